"""``healthcheck replay --sweep``: one key of a rule at several values over good and bad runs."""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.commands.replay import _jobs, _latest, _progress, say_problems
from healthcheck.commands.replaying import Given, Outcome
from healthcheck.errors import HealthCheckError, RuleFileError, UsageError
from healthcheck.outcome import OK, USAGE

if TYPE_CHECKING:
    from healthcheck.replay.sweep import Swept
    from healthcheck.rulelang.rule import RuleSet


def sweep(args: argparse.Namespace, given: Given, paths: Sequence[str], problems: Sequence[Outcome]) -> int:
    """Print the table; exit 0, or 4 if a named run cannot be read or the sweep makes no sense."""
    from healthcheck.replay.pool import judge_all
    from healthcheck.replay.sweep import sweep_lines
    from healthcheck.reports.text import number, plural

    rule_id, key, values = parse(args.sweep)
    base = given.load()
    rule = _rule(base, rule_id)
    for value in values:  # every mistake in a value before the first run is read
        try:
            _only(given.load(more=[f"{rule_id}.{key}={value}"]), rule_id)
        except RuleFileError as error:
            raise UsageError(str(error).replace("--set ", "--sweep ")) from error
    bad = _bad(args.bad, given)
    prepare = functools.partial(_judge, given, rule_id, key, tuple(values), frozenset(bad))
    results: list[Swept] = list(_progress(judge_all(paths, prepare, jobs=_jobs(args.jobs)), len(paths)))
    unread = [*problems, *(Outcome(s.path, problem=s.problem) for s in results if s.problem)]
    keep = [_line(rule_id, key, _leaf(base, rule_id, key, given, value)) for value in values]
    now = _today(base, rule_id, key, values)
    if args.format == "json":
        print(json.dumps(_json(rule_id, key, values, results, unread), indent=1, allow_nan=False))
    else:
        rows = sum(s.rows for s in results)
        unreadable = f" ({len(unread)} unreadable: named on stderr)" if unread else ""
        print(f"{plural(len(results), 'run')}, {number(rows)} rows{unreadable}")
        print("\n".join(sweep_lines(rule, key, values, results, now=now, keep=keep)))
    say_problems(unread)
    return USAGE if any(p.named for p in problems) else OK


def parse(text: str) -> tuple[str, str, list[str]]:
    """``RULE.key.path=6,8,10`` in its parts."""
    path, equals, listed = text.partition("=")
    rule_id, dot, key = path.strip().partition(".")
    values = [v.strip() for v in listed.split(",") if v.strip()]
    if not equals or not dot or not key or not values:
        raise UsageError(
            "healthcheck replay: --sweep takes RULE.KEY=VALUES, for instance "
            f"loss-spike.when.robust_z.above=6,8,10, not {text!r}"
        )
    return rule_id, key, values


def _rule(rules: RuleSet, rule_id: str) -> Any:
    from healthcheck.dispatch import suggest

    for rule in rules.rules:
        if rule.id == rule_id:
            return rule
    hint = suggest(rule_id, [r.id for r in rules.rules])
    off = "it is switched off" if rule_id in rules.off else hint
    raise UsageError(f'healthcheck replay: --sweep: "{rule_id}" is not a rule here; {off}')


def _only(rules: RuleSet, rule_id: str) -> RuleSet:
    from healthcheck.replay.play import only_rules

    return only_rules(rules, {rule_id})


def _bad(named: Sequence[str], given: Given) -> list[str]:
    """Paths of all runs under the names given with ``--bad``."""
    return [os.path.realpath(found.path) for found in given.find([_latest(name) for name in named])] if named else []


def _judge(given: Given, rule_id: str, key: str, values: Sequence[str], bad: frozenset[str]) -> Callable[[str], Swept]:
    from healthcheck.replay.play import RuleCopies, play
    from healthcheck.replay.record import record_facts
    from healthcheck.replay.sweep import CriticalValue, Swept, first_fired

    copies = [RuleCopies(_only(given.load(more=[f"{rule_id}.{key}={value}"]), rule_id)) for value in values]
    plain = key.startswith("when.")

    def judge(path: str) -> Swept:
        swept = Swept(path, os.path.realpath(path) in bad, fired=[None] * len(values))
        try:
            run = given.read(path)
        except (HealthCheckError, OSError) as error:
            swept.problem = str(error)
            return swept
        facts = record_facts(run, given.host.registry)
        followed: list[CriticalValue] = []

        def follow(plays: Sequence[Any]) -> Callable[[], None] | None:
            if not plain:
                return None
            followed.append(CriticalValue(plays[0], plays[0].rules[rule_id]))
            return followed[0].look

        plays, seen = play(
            run, [c.fresh() for c in copies], start_step=facts.start_step, known=facts.known, follow=follow
        )
        swept.rows = seen.batches
        if seen.problem and not seen.batches:
            swept.problem = seen.problem
        swept.fired = [first_fired(p, rule_id) for p in plays]
        swept.judged = any(
            s is not None and s.state.value not in ("no_data", "warming")
            for s in plays[0].engine.by_id[rule_id].series.values()
        )
        if followed:
            swept.critical, swept.critical_step = followed[0].value, followed[0].step
        return swept

    return judge


def _leaf(base: RuleSet, rule_id: str, key: str, given: Given, value: str) -> Any:
    """The whole top-level key with one leaf changed, as it must stand in a rule file."""
    from healthcheck.rulelang.loader import load_text

    parsed = load_text(f"value: {value}").data["value"]
    first, *inner = key.split(".")
    if not inner:
        return parsed
    whole = copy.deepcopy(base[rule_id].when) if first == "when" else {}
    at: Any = whole
    for part in inner[:-1]:
        at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
    at[int(inner[-1]) if isinstance(at, list) else inner[-1]] = parsed
    return whole


def _line(rule_id: str, key: str, value: Any) -> str:
    return f"{rule_id}: {{{key.partition('.')[0]}: {_flow(value)}}}"


def _flow(value: Any) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def _today(base: RuleSet, rule_id: str, key: str, values: Sequence[str]) -> int | None:
    """Which of the values the rule has now."""
    first, *inner = key.split(".")
    at: Any = base[rule_id].when if first == "when" else None
    for part in inner:
        at = (
            at.get(part) if isinstance(at, dict) else at[int(part)] if isinstance(at, list) and part.isdigit() else None
        )
    if first != "when" and not inner:
        rule = base[rule_id]
        at = {"every": rule.every, "min_samples": rule.min_samples, "cooldown": rule.cooldown}.get(first)
    for index, value in enumerate(values):
        try:
            if at is not None and (str(at) == value or float(at) == float(value)):
                return index
        except (TypeError, ValueError):
            continue
    return None


def _json(rule_id: str, key: str, values: Sequence[str], runs: Sequence[Swept], unread: Sequence[Outcome]) -> Any:
    from healthcheck.samples import encode_number

    return {
        "rule": rule_id,
        "key": key,
        "values": list(values),
        "runs": [
            {
                "path": s.path,
                "bad": s.bad,
                "rows": s.rows,
                "judged": s.judged,
                "fired_steps": s.fired,
                "critical": encode_number(s.critical),
                "critical_step": s.critical_step,
            }
            for s in runs
            if not s.problem
        ],
        "unreadable": [{"path": str(Path(o.path)), "problem": o.problem} for o in unread],
    }
