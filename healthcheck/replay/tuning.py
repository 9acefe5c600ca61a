"""Tuning rules on recorded runs: what another version changes, and one key at several values."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from healthcheck.core.alerts import State
from healthcheck.core.text import encode_number, number, plural, step
from healthcheck.engine.series import SeriesState
from healthcheck.replay.play import Play
from healthcheck.reports.tables import table_lines
from healthcheck.rulelang.loader import load_text
from healthcheck.rulelang.origins import flow
from healthcheck.rulelang.rule import Cause


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between the reports of one run."""

    path: str
    rule: str
    what: str
    """``fires``, ``silent``, ``moved``, ``severity``, ``judged``, ``not judged``."""
    text: str

    def to_json(self) -> dict[str, str]:
        return {"path": self.path, "rule": self.rule, "what": self.what, "text": self.text}


def changes(path: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> list[Change]:
    """What the new rules say of a run that the old ones did not, rule by rule, in the order of the new file."""
    found: list[Change] = []
    for rule in dict.fromkeys([*new["rules"], *old["rules"]]):
        now, then = _episodes(new, rule), _episodes(old, rule)
        if now == then:
            found += _verdict_change(path, rule, new, old)
            continue
        if not then:
            found.append(Change(path, rule, "fires", f"now fires at {_steps(now)}{_new_rule(rule, old)}"))
        elif not now:
            found.append(Change(path, rule, "silent", f"no longer fires (fired at {_steps(then)}){_gone(rule, new)}"))
        elif [s for s, _ in now] != [s for s, _ in then]:
            found.append(Change(path, rule, "moved", f"fires at {_steps(now)}, was {_steps(then)}"))
        else:
            found.append(Change(path, rule, "severity", f"at {_steps(now)}: {now[0][1]}, was {then[0][1]}"))
    return found


def _episodes(report: Mapping[str, Any], rule: str) -> list[tuple[int, str]]:
    """Step and weight of each alert; a muted one weighs otherwise than one that counts."""
    return [
        (a["fired_step"], "muted" if a.get("muted") else str(a["severity"]))
        for a in report["alerts"]
        if a["rule"] == rule
    ]


def _steps(episodes: Sequence[tuple[int, str]]) -> str:
    shown = ", ".join(step(at) for at, _ in episodes[:3])
    more = f" and {len(episodes) - 3} more" if len(episodes) > 3 else ""
    return f"step {shown}{more} ({episodes[0][1]})"


def _new_rule(rule: str, old: Mapping[str, Any]) -> str:
    return "" if rule in old["rules"] else "; the old rules do not have it"


def _gone(rule: str, new: Mapping[str, Any]) -> str:
    return "" if rule in new["rules"] else "; the new rules do not have it"


def _verdict_change(path: str, rule: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> list[Change]:
    """A rule that was judged and is not any more, or the other way round: never passed over."""
    now, then = new["rules"].get(rule), old["rules"].get(rule)
    if now is None or then is None or (now["verdict"] == "not judged") == (then["verdict"] == "not judged"):
        return []
    if now["verdict"] == "not judged":
        return [Change(path, rule, "not judged", f"no longer judged: {now.get('reason', '')}")]
    return [Change(path, rule, "judged", f"now judged ({now['verdict']}); was not: {then.get('reason', '')}")]


def change_lines(found: Sequence[Change], runs: int) -> list[str]:
    """Text: the changes by rule, and a count."""
    signs = {"fires": "+", "silent": "-", "moved": "~", "severity": "~", "judged": "+", "not judged": "-"}
    lines: list[str] = []
    by_rule: dict[str, list[Change]] = {}
    for change in found:
        by_rule.setdefault(change.rule, []).append(change)
    for rule, listed in by_rule.items():
        lines.append(rule)
        lines += [f"  {signs[c.what]} {c.path}: {c.text}" for c in listed]
    changed = len({c.path for c in found})
    if not found:
        return [f"no difference on {plural(runs, 'run')}"]
    more = sum(c.what in ("fires", "judged") for c in found)
    less = sum(c.what in ("silent", "not judged") for c in found)
    moved = len(found) - more - less
    counts = ", ".join(f"{n} {word}" for n, word in ((more, "more"), (less, "fewer"), (moved, "changed")) if n)
    return [*lines, f"{plural(changed, 'run')} of {runs} change: {counts}"]


# --------------------------------------------------------------------------------------------------
# One key of one rule at several values: how often the rule would fire in good runs and in bad ones.
#
# All values are judged in one reading of each run. For a threshold the *critical value* of a run is
# known exactly: the value up to which the rule would still have fired there, with its ``for``.


COMPARATORS = ("above", "below", "at_least", "at_most")


@dataclass(slots=True)
class Swept:
    """One run under all values. Lists are as long as the list of values."""

    path: str
    bad: bool
    rows: int = 0
    fired: list[int | None] = field(default_factory=list)
    """Step of the first alert that is not muted, or None."""
    judged: bool = False
    critical: float | None = None
    """A threshold short of this fires; None where the rule never scored or has no plain threshold."""
    critical_step: int = 0
    notes: list[str] = field(default_factory=list)
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "bad": self.bad,
            "rows": self.rows,
            "judged": self.judged,
            "fired_steps": self.fired,
            "critical": encode_number(self.critical),
            "critical_step": self.critical_step,
        }


class CriticalValue:
    """Follows the scores of one cause: the threshold that would just have fired, given its ``for``.

    A cause with ``for: 2 of 5`` fires at a threshold below the second largest of five scores.
    """

    def __init__(self, play: Play, cause: Cause) -> None:
        self.state = play.engine.by_id[cause.id]
        self.state.every_score = True  # before its first series is made
        self.hold = cause.hold
        self.upward = cause.condition.breaches.direction >= 0
        self.best = -math.inf
        self.step = 0
        self._recent: dict[Any, tuple[int, deque[float]]] = {}

    def look(self) -> None:
        """After each evaluation: take the new score of each series."""
        for labels, series in self.state.series.items():
            if series is None or series.state in (State.NO_DATA, State.WARMING):
                continue
            seen, scores = self._recent.get(labels) or (0, deque(maxlen=max(1, self.hold.of)))
            if series.n != seen:
                scores.append(self._away(series))
                self._recent[labels] = (series.n, scores)
                if len(scores) >= self.hold.need:
                    just = sorted(scores)[-max(1, self.hold.need)]
                    if just > self.best:
                        self.best, self.step = just, series.last_step

    def _away(self, series: SeriesState) -> float:
        if series.score is None:  # a non-finite sample breaches any threshold
            return math.inf
        return series.score if self.upward else -series.score

    @property
    def value(self) -> float | None:
        if self.best == -math.inf:
            return None
        return self.best if self.upward else -self.best


def first_fired(play: Play, cause_id: str) -> int | None:
    """Step at which a cause first found what is not muted; None if it never did."""
    for alert in play.alerts:
        for name, finding in zip(alert.names, alert.findings, strict=True):
            if name == cause_id and not finding.muted:
                return finding.fired_step
    return None


# --------------------------------------------------------------------------- the table


def sweep_lines(
    rule: Cause, key: str, values: Sequence[str], runs: Sequence[Swept], *, now: int | None, keep: Sequence[str]
) -> list[str]:
    """The table and what follows from it.

    :param now: index of the value that the rule has today, if it is among ``values``.
    :param keep: per value, the line for the rule file.
    """
    readable = [run for run in runs if not run.problem]
    good = [run for run in readable if not run.bad]
    bad = [run for run in readable if run.bad]
    heads = [key.rpartition(".")[2], "", f"fires in good runs ({len(good)})"]
    if bad:
        heads += [f"in bad runs ({len(bad)})", "median delay"]
    rows = []
    for index, value in enumerate(values):
        row = [value, "now" if index == now else "", str(_count(good, index))]
        if bad:
            row += [str(_count(bad, index)), _delay(bad, index)]
        rows.append(row)
    lines = table_lines(rows, "rlrrr", heads=heads)
    silent = [run.path for run in readable if not run.judged]
    if silent:
        lines.append(
            f"  not judged in {plural(len(silent), 'run')}: {', '.join(silent[:3])}{' ...' if len(silent) > 3 else ''}"
        )
    lines += [f"  {text}" for text in closest(rule, key, values, good, bad)]
    best = recommended(good, bad, len(values))
    if best is not None:
        found = (
            f"fires in {_count(bad, best)} of {plural(len(bad), 'bad run')}, {_count(good, best)} of {len(good)} good"
        )
        lines.append(f"  suggested: {values[best]} ({found}): in healthcheck.yaml")
        lines.append(f"    {keep[best]}")
    elif not bad:
        lines.append("  no suggestion without a bad run: name runs that went wrong with --bad RUN")
    else:
        lines.append("  no suggestion: none of these values tells bad runs from good ones")
    return lines


def _count(runs: Sequence[Swept], index: int) -> int:
    return sum(run.fired[index] is not None for run in runs)


def _delay(bad: Sequence[Swept], index: int) -> str:
    """Steps after the first alert that any of the values gives in the same run."""
    late = []
    for run in bad:
        fired = run.fired[index]
        if fired is not None:
            late.append(fired - min(f for f in run.fired if f is not None))
    return f"{plural(int(median(late)), 'step')}" if late else "-"


def closest(rule: Cause, key: str, values: Sequence[str], good: Sequence[Swept], bad: Sequence[Swept]) -> list[str]:
    """How near good runs came, how clear bad ones are, and which values lie between them.

    Says nothing where a score alone does not decide: below other keys than thresholds, and under a ``for`` in seconds.
    """
    if key.rpartition(".")[2] not in COMPARATORS or not key.startswith("when.") or rule.hold.seconds:
        return []
    upward = rule.condition.breaches.direction >= 0
    sign = 1.0 if upward else -1.0
    word = "peaks at" if upward else "falls to"
    near = max((r for r in good if r.critical is not None), key=lambda r: sign * (r.critical or 0.0), default=None)
    weak = min((r for r in bad if r.critical is not None), key=lambda r: sign * (r.critical or 0.0), default=None)
    parts = []
    if near is not None:
        parts.append(f"closest good run {word} {number(near.critical)} ({near.path}, step {step(near.critical_step)})")
    if weak is not None:
        parts.append(f"weakest bad run {word} {number(weak.critical)} ({weak.path})")
    lines = ["; ".join(parts)] if parts else []
    if near is None or weak is None or near.critical is None or weak.critical is None:
        return lines
    if any(run.critical is None for run in bad):  # no threshold makes the rule fire there
        return lines
    if sign * near.critical >= sign * weak.critical:
        return [*lines, "no value tells these good runs from these bad ones"]
    low, high = sorted((near.critical, weak.critical))
    if _confirmed(values, low, high, good, bad):
        inside = f"between {number(low)} and {number(high)}"
        if not math.isfinite(high):
            inside = f"above {number(low)}"
        elif not math.isfinite(low):
            inside = f"below {number(high)}"
        lines.append(f"any value {inside} tells these runs apart")
    return lines


def _confirmed(values: Sequence[str], low: float, high: float, good: Sequence[Swept], bad: Sequence[Swept]) -> bool:
    """Whether those of the values that lie between did tell the runs apart: mutes or guards may have had their say."""
    for index, text in enumerate(values):
        try:
            inside = low < float(text) < high
        except ValueError:  # a percentage or an amount of memory
            continue
        if inside and (_count(bad, index) < len(bad) or _count(good, index)):
            return False
    return True


def recommended(good: Sequence[Swept], bad: Sequence[Swept], count: int) -> int | None:
    """Index of the value that finds the most bad runs for the fewest alarms in good ones; the middle of equals.

    None without a bad run, and where no value fires in more bad runs than good ones: then nothing is known that would
    speak for any of them.
    """
    if not bad:
        return None
    scores = [(_count(bad, i) - _count(good, i), -_count(good, i)) for i in range(count)]
    best = [i for i in range(count) if scores[i] == max(scores)]
    chosen = best[(len(best) - 1) // 2]
    part = _count(good, chosen) / len(good) if good else 0.0
    return chosen if _count(bad, chosen) / len(bad) > part else None


# --------------------------------------------------------------------------- the rule file


def keep_line(rule: Cause, key: str, value: str) -> str:
    """The line for a rule file that sets a key to one of the values: ``spike: {when: {robust_z: {above: 8}}}``.

    Keys below a top-level one cannot be overridden alone there, so the whole top-level key is written out.
    """
    body = f"{{{key.partition('.')[0]}: {flow(_with_value(rule, key, value))}}}"
    return f"{rule.rule}: {{causes: {{{rule.name}: {body}}}}}" if rule.name else f"{rule.id}: {body}"


def _with_value(rule: Cause, key: str, value: str) -> Any:
    """The top-level key of a rule with one leaf of it changed."""
    parsed = load_text(f"value: {value}").data["value"]
    first, *inner = key.split(".")
    if not inner:
        return parsed
    whole = copy.deepcopy(rule.when) if first == "when" else {}
    at: Any = whole
    for part in inner[:-1]:
        at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
    at[int(inner[-1]) if isinstance(at, list) else inner[-1]] = parsed
    return whole


def value_now(rule: Cause, key: str, values: Sequence[str]) -> int | None:
    """Index of the value that the rule has now; None if it is not among them."""
    first, *inner = key.split(".")
    at: Any = rule.when if first == "when" else None
    for part in inner:
        if isinstance(at, dict):
            at = at.get(part)
        else:
            at = at[int(part)] if isinstance(at, list) and part.isdigit() else None
    if first != "when" and not inner:
        at = {"every": rule.every, "min_samples": rule.min_samples, "cooldown": rule.cooldown}.get(first)
    for index, value in enumerate(values):
        try:
            if at is not None and (str(at) == value or float(at) == float(value)):
                return index
        except (TypeError, ValueError):
            continue
    return None


def sweep_json(
    rule_id: str, key: str, values: Sequence[str], runs: Sequence[Swept], unreadable: Mapping[str, str]
) -> dict[str, Any]:
    """The whole sweep for programs.

    :param unreadable: path -> why it could not be read.
    """
    return {
        "rule": rule_id,
        "key": key,
        "values": list(values),
        "runs": [run.to_json() for run in runs if not run.problem],
        "unreadable": [{"path": path, "problem": problem} for path, problem in unreadable.items()],
    }
