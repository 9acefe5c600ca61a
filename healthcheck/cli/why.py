"""``healthcheck why``: the steps around one alert, with value, baseline, score and state of each.

The record keeps samples and rules, not every judgement. So the engine judges the recorded samples once more, which
gives the numbers that it had then; where the rules cannot be compiled any more, the alert's own numbers must do.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from healthcheck.cli.choosing import add_choice, numbered, rule_ids, rules_of, run_and_alert, worst_first
from healthcheck.cli.options import add_format, add_plugin_option, loaded_host, print_json
from healthcheck.core.alerts import State
from healthcheck.core.errors import UsageError
from healthcheck.core.text import decode_number, number, shorten, step, suggest
from healthcheck.engine.trace import TraceRow
from healthcheck.record.runs import Run
from healthcheck.reports.tables import prose_width, table_lines
from healthcheck.reports.textchart import text_chart
from healthcheck.reports.why import Explanation, explain_alert, own_numbers
from healthcheck.reports.wording import actions_done, cause_name, checks, how_it_ended, judged_line
from healthcheck.rulelang.rule import RuleSet

NAME = "why"
HELP = "why an alert fired: the steps around it, with value, normal, score and state"


def configure(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, "the most severe")
    add_plugin_option(parser)
    add_format(parser)


def main(args: argparse.Namespace) -> int:
    run, wanted = run_and_alert(list(args.what), NAME)
    host = loaded_host(args)
    rules, problem = rules_of(run, host)
    alert = _choose(run, wanted, rules)
    if alert is None:
        if args.format == "json":
            verdicts = (run.report or {}).get("rules", {})
            chosen = verdicts if wanted is None else {wanted: verdicts.get(wanted)}
            print_json({"run": run.name, "alert": None, "rules": chosen})
        else:
            print("\n".join(silent_text(run, wanted)))
        return 0
    units = host.registry.units()
    explanation = explain_alert(run, alert, rules, problem)
    if args.format == "json":
        print_json(explanation.to_json())
    else:
        print("\n".join(alert_text(explanation, units)))
    return 0


def _choose(run: Run, wanted: str | None, rules: RuleSet | None) -> dict[str, Any] | None:
    """The alert that is meant; None if nothing fired. Raises ``UsageError`` for a rule that the run did not have."""
    if wanted is None:
        return next(iter(worst_first(run.alerts)), None)
    if wanted.isdigit():
        return numbered(run, int(wanted))
    for alert in run.alerts:
        if wanted in (alert["rule"], cause_name(alert)):
            return alert
    known = rule_ids(run)
    if not known and rules is not None:  # no report yet: the run goes on or was killed
        known = [rule.id for rule in rules.rules]
    if wanted in known:
        return None
    raise UsageError(f'{run.name} had no rule "{wanted}"; {suggest(wanted, known) or "its rules: " + ", ".join(known)}')


# --------------------------------------------------------------------------- what to say

MOST_PENDING = 5
"""Rows of the way to an alert that are shown; of a longer one the first two and the last three."""


def alert_text(found: Explanation, units: Mapping[str, str]) -> list[str]:
    """All lines for one alert.

    :param units: metric name -> unit.
    """
    alert = found.alert
    cleared = alert.get("cleared_step")
    if cleared is not None:
        until = f", cleared at {step(cleared)}"
    else:
        until = ", still firing at the end" if found.run.report is not None else ", not cleared so far"
    place = f", rule at {found.origin}" if found.origin else ""
    lines = [f"{alert['rule']} fired at step {step(alert['fired_step'])}{until}         {found.run.shown}{place}"]
    if alert.get("message"):
        lines.append(f"  said    {alert['severity']}: {alert['message']}")
    if alert.get("cause"):
        lines.append(
            f"  cause   {alert['cause']} ({alert['kind']}), at step {step(alert.get('cause_step', alert['fired_step']))}"
        )
    lines += [
        f"  also    {other['cause']} ({other['kind']}), at step {step(other['fired_step'])}: {other['message']}"
        for other in alert.get("also", ())
    ]
    if found.asks:
        lines.append(f"  asks    {found.asks}")
    if found.problem:
        lines.append(f"  note    {found.problem}")
    lines += _table(found)
    lines += _drawn(found, units)
    lines += [f"  {name.ljust(7)} {text}" for name, text in _facts(found, units) if text]
    return lines + ranks_text(found.run)


def ranks_text(run: Run) -> list[str]:
    """Other ranks with alerts, and the command that shows them."""
    lines = []
    for other in run.other_ranks[:8]:
        rules = shorten(list(dict.fromkeys(str(alert["rule"]) for alert in other.alerts)), 3)
        lines.append(f"  {other.name}: {rules}    healthcheck why {other.shown}")
    if len(run.other_ranks) > 8:
        lines.append(f"  and {len(run.other_ranks) - 8} more ranks with alerts: {run.shown}/rank-*")
    return lines


def _facts(found: Explanation, units: Mapping[str, str]) -> list[tuple[str, str]]:
    alert = found.alert
    seen = [f"at {alert['where']}"] if alert.get("where") else []
    seen += [f"{key.replace('_', ' ')}: {value}" for key, value in alert.get("facts", {}).items()]
    if alert.get("count", 1) > 1:
        names = [str(series["name"]) for series in alert["series"]]
        seen.append(f"{alert['count']:,} series: {shorten(names, 3)}")
    if alert["detected_step"] != alert["fired_step"]:
        seen.append(f"value of step {step(alert['fired_step'])} seen at step {step(alert['detected_step'])}")
    evidence = [
        _near(str(o.get("path") or o["text"]))
        + f"        read it: healthcheck evidence {found.run.name} {alert['number']}"
        for o in alert.get("actions", ())
        if o["action"] == "evidence" and o["done"]
    ]
    around = [change.text(found.first_step, units.get(change.metric, "")) for change in found.changes]
    around += [course.text(units.get(course.series, "")) for course in found.courses]
    return [
        ("seen", "; ".join(seen)),
        ("around", "; ".join(around)),
        ("also", "; ".join(_also(found))),
        ("muted", str(alert.get("muted") or "")),
        ("kept", "; ".join(evidence)),
        ("try", str(alert.get("hint") or "")),
        ("closest", _closest(found)),
    ]


def _near(path: str) -> str:
    """The path as people type it: relative to the working directory where it lies below."""
    try:
        return Path(path).relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path


def _also(found: Explanation) -> list[str]:
    texts = []
    for other in found.also[:4]:
        text = f"{other['rule']} at {step(other['fired_step'])}"
        if other.get("explained_by") == found.alert["rule"]:
            text += " (same cause; held back)"
        elif found.alert.get("explained_by") == other["rule"]:
            text += " (explains this one, whose actions were held back)"
        texts.append(text)
    if len(found.also) > 4:
        texts.append(f"{len(found.also) - 4} more")
    return texts


def _closest(found: Explanation) -> str:
    if found.closest is None or (found.rule is not None and found.rule.condition.judges_nonfinite):
        return ""
    score = found.headings[1]
    text = f"before: {score} {number(found.closest.score)} at step {step(found.closest.step)}"
    if command_exists("replay"):
        text += f".    tune: healthcheck replay {found.run.name} --only {found.alert['rule']} --sweep ..."
    return text


def _table(found: Explanation) -> list[str]:
    rows = [*found.before, *_thinned(found.episode)]
    if not rows:
        value, normal, score = own_numbers(found.alert)
        fired = TraceRow(
            int(found.alert.get("cause_step", found.alert["fired_step"])),
            "",
            value,
            normal,
            score,
            State.FIRING,
            fired=True,
        )
        rows = [fired]
    normal_name, score_name = found.headings
    series = str(found.alert["series"][0]["name"]) if found.alert.get("series") else "value"
    plain = all(
        row.score is None or row.score == row.value or row.score != row.score for row in rows if row is not None
    )
    plain = plain or (found.rule is not None and found.rule.condition.judges_nonfinite)
    with_normal = any(row is not None and row.normal is not None for row in rows)
    heads = ["step", series] + ([normal_name] if with_normal else []) + ([] if plain else [score_name])
    table = []
    for row in rows:
        if row is None:
            table.append(["..."])
            continue
        cells = [step(row.step), number(row.value)]
        if with_normal:
            cells.append(number(row.normal))
        if not plain:
            cells.append(number(row.score))
        table.append([*cells, _state(found, row)])
    return table_lines(table, "r" * len(heads), heads=[*heads, "state"])


def _drawn(found: Explanation, units: Mapping[str, str]) -> list[str]:
    """The series of the alert in a few lines of text; nothing where too few steps were judged for a picture."""
    if not found.pictures:
        return []
    picture = found.pictures[-1] if found.pictures[-1].limits else found.pictures[0]
    picture.unit = picture.unit or units.get(picture.title.partition("[")[0], "")
    return ["", *("  " + line for line in text_chart(picture, min(78, prose_width() - 2))), ""]


def _state(found: Explanation, row: TraceRow) -> str:
    if row.fired:
        return f"FIRING -> {actions_done(found.alert)}"
    if row.cleared:
        return "ok again"
    if row.state is State.PENDING:
        return f"pending {row.progress}".rstrip()
    return str(row.state)


def _thinned(rows: Sequence[TraceRow]) -> list[Any]:
    """An episode in a few rows: the way to the alert, the worst while firing, the end; None for left out."""
    at = next((i for i, row in enumerate(rows) if row.fired), 0)
    way = list(rows[: at + 1])
    shown: list[Any] = way if len(way) <= MOST_PENDING + 1 else [*way[:2], None, *way[-3:]]
    rest = list(rows[at + 1 :])
    if len(rest) <= 3:
        return [*shown, *rest]
    worst = max(rest[:-1], key=lambda row: abs(row.score) if row.score is not None else 0.0)
    middle = [None, worst] if worst is not rest[0] else [worst]
    return [*shown, *middle, None, rest[-1]]


def silent_text(run: Run, rule: str | None) -> list[str]:
    """What to say where nothing fired: the verdict, and how close it came."""
    entries: dict[str, Any] = {**(run.report or {}).get("rules", {})}
    by_cause = dict(checks(run.report["rules"])) if run.report else {}
    if rule is not None:
        entry = entries.get(rule) or by_cause.get(rule)
        if entry is None:
            return [f"{rule} did not fire in {run.name} so far (no report: the run is {run.status})"]
        if entry["verdict"] == "not judged":
            return [f"{rule} was not judged in {run.name}: {entry.get('reason', '')}"]
        return [f"{rule} did not fire in {run.name}: {entry['samples']:,} samples judged", *_approaches({rule: entry})]
    if run.report is None:
        return [f"no alert in {run.name} so far; the run is {run.status} (no report)", *ranks_text(run)]
    head = f"no alert in {run.name}: {how_it_ended(run.report)}"
    return [head, f"  {judged_line(entries)}", *ranks_text(run), *_approaches(by_cause)]


def _approaches(entries: dict[str, Any], most: int = 5) -> list[str]:
    rows = [
        [
            rule,
            f"closest {number(decode_number(entry['closest']['score']))}",
            str(entry.get("threshold", "")),
            f"step {step(entry['closest']['step'])}",
        ]
        for rule, entry in entries.items()
        if entry.get("closest")
    ]
    return table_lines(rows[:most])


def command_exists(name: str) -> bool:
    """Whether a command is there already: a hint must not name one that is not."""
    return importlib.util.find_spec(f"healthcheck.cli.{name}") is not None
