"""How much the tuned numbers of the pack owe to single sources of the corpus.

Each number in ``benchmarks/tuned.yaml`` is set to other values, a fifth lower and a quarter higher among them, and the
corpus is scored again. Then one source after the other is left out: which value would the rest have chosen, and how
well does that value do on the source that had no say? The sum of the latter is the only figure on this page of
detection that is not in-sample as far as these numbers go; that the rules themselves were thought up with the whole
corpus in view, no such table can undo.

Score of a value: incidents caught minus healthy runs with a warning. Of equal values the pack's own one is chosen.
Rules are judged alone here; what the rest of the pack says is taken from one run of the whole pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from scoring import Found, Scored, kinds, labels, score

from healthcheck.cli.replay import Given
from healthcheck.replay.play import Play, RuleCopies, play, record_facts

TUNED = Path(__file__).resolve().parent / "tuned.yaml"


@dataclass(eq=False)
class Tuned:
    """One number of one rule, and what happened with each of its values."""

    rule: str
    key: str
    own: Any
    values: list[Any]
    runs: dict[Any, list[Scored]] = field(default_factory=dict)
    """Value -> every run of the corpus, scored with it."""


def tuned_numbers(given: Given) -> list[Tuned]:
    """The list of ``tuned.yaml``; the pack's own value is read from the pack, so that it cannot be out of date."""
    rules = {cause.id: cause for cause in given.load().causes}
    numbers = []
    for entry in yaml.safe_load(TUNED.read_text(encoding="utf-8")):
        own = _at(_options(rules[entry["rule"]]), entry["key"])
        others = [value for value in entry["values"] if value != own]
        numbers.append(Tuned(entry["rule"], entry["key"], own, [own, *others]))
    return numbers


def _options(rule: Any) -> dict[str, Any]:
    hold = str(rule.hold).removesuffix(" samples").removesuffix(" sample")
    return {"when": deepcopy(rule.when), "for": int(hold) if hold.isdigit() else hold}


def _at(options: Any, key: str) -> Any:
    for part in key.split("."):
        options = options[int(part)] if part.isdigit() else options[part]
    return options


def _changed(given: Given, number: Tuned, value: Any) -> Given:
    """The same rules with one number changed, and no other rule than its own."""
    return _with(given, {number: value}, only=[number.rule])


def _with(given: Given, values: Mapping[Tuned, Any], only: Sequence[str] = ()) -> Given:
    """The same rules with some numbers changed."""
    causes = {cause.id: cause for cause in given.load().causes}
    options: dict[str, dict[str, Any]] = {}
    rules: dict[str, dict[str, Any]] = {}
    for number, value in values.items():
        changed = options.setdefault(number.rule, _options(causes[number.rule]))
        first, *rest = number.key.split(".")
        inner: Any = changed
        keys = [int(part) if part.isdigit() else part for part in (first, *rest)]
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        rules.setdefault(number.rule, {})[first] = changed[first]
    text = yaml.safe_dump({"version": 1, "extends": list(given.choice["rules"]), "rules": rules})
    return Given({"rules": [text], "only": list(only)})


def vary(given: Given, corpora: Sequence[Path], whole: Mapping[tuple[str, str], Scored]) -> list[Tuned]:
    """Score every value of every number, all of them in one reading of each file.

    :param whole: name of the set and id of the run -> the run as scored with the whole pack.
    """
    numbers = tuned_numbers(given)
    variants = [(number, value) for number in numbers for value in number.values]
    copies = [RuleCopies(_changed(given, number, value).load()) for number, value in variants]
    named = kinds()
    for folder, entry in [(corpus, one) for corpus in corpora for one in labels(corpus)]:
        known = whole.get((folder.name, entry["id"]))
        if known is None or known.problem:
            continue
        run = given.read(str(folder / entry["file"]))
        facts = record_facts(run, given.host.registry)
        plays, _ = play(run, [c.fresh() for c in copies], facts=facts)
        steps = {name: list(column.steps) for name, column in run.series().items()}
        for (number, value), judged in zip(variants, plays, strict=True):
            others = [f for f in known.found if f.name != number.rule]
            found = sorted([*others, *_found(judged, named)], key=lambda f: f.step or 0)
            number.runs.setdefault(value, []).append(score(entry, found, steps))
    return numbers


def _found(judged: Play, named: Mapping[str, frozenset[str]]) -> list[Found]:
    return [
        Found(a.name, a.fired_step, a.severity.name.lower(), named.get(a.name, frozenset()), str(a.series[0].name))
        for a in judged.alerts
    ]


def worth(runs: Sequence[Scored]) -> tuple[int, int]:
    """Incidents caught, healthy runs with a warning."""
    return (
        sum(s.verdict == "caught" for s in runs if s.incident),
        sum(bool(s.false) for s in runs if not s.incident),
    )


def choose(number: Tuned, keep: Callable[[Scored], bool]) -> Any:
    """The value with the highest score among the runs that are kept; the pack's own one if it is as good."""

    def points(value: Any) -> int:
        caught, false = worth([s for s in number.runs[value] if keep(s)])
        return caught - false

    return max(number.values, key=lambda value: (points(value), value == number.own))


def left_out(
    given: Given, corpora: Sequence[Path], numbers: Sequence[Tuned], whole: Mapping[tuple[str, str], Scored]
) -> list[Scored]:
    """Every run scored by the numbers that all other sources would have chosen, all of them at once."""
    named, results = kinds(), []
    places = {(folder.name, entry["id"]): folder / entry["file"] for folder in corpora for entry in labels(folder)}
    for source in sorted({scored.source for scored in whole.values()}):
        others = {
            number: choose(number, lambda s, source=source: s.source != source)  # type: ignore[misc]
            for number in numbers
        }
        changed = {number: value for number, value in others.items() if value != number.own}
        copies = RuleCopies(_with(given, changed).load()) if changed else None
        for key, scored in whole.items():
            if scored.source != source:
                continue
            if copies is None or scored.problem:
                results.append(scored)
                continue
            run = given.read(str(places[key]))
            plays, _ = play(run, [copies.fresh()], facts=record_facts(run, given.host.registry))
            steps = {name: list(column.steps) for name, column in run.series().items()}
            found = sorted(_found(plays[0], named), key=lambda f: f.step or 0)
            results.append(score(scored.entry, found, steps))
    return results


HEADER = ["rule", "number", "value: caught, false alarms (the pack's own first)", "other choice without", "left out"]


def rows(numbers: Sequence[Tuned]) -> list[list[str]]:
    """One line per number: all values in-sample, the sources whose absence changes the choice, the left-out sum."""
    table = []
    for number in numbers:
        sources = sorted({s.source for s in number.runs[number.own]})
        shown = ", ".join("{}: {} / {}".format(value, *worth(number.runs[value])) for value in number.values)
        changed, caught, false = [], 0, 0
        for source in sources:
            value = choose(number, lambda s, source=source: s.source != source)  # type: ignore[misc]
            if value != number.own:
                changed.append(f"{source} ({value})")
            got, wrong = worth([s for s in number.runs[value] if s.source == source])
            caught, false = caught + got, false + wrong
        table.append([number.rule, number.key, shown, ", ".join(changed) or "none", f"{caught} / {false}"])
    return table
