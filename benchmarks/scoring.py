"""Scores of replayed runs against labels: caught, late, early, missed, false.

An incident is **caught** if the first alert (warning or above) of a rule that names its kind lies between one sample
before the start of the onset window and its end. An alert is **false** on a healthy run, and on an incident if it comes
more than one sample before the window, whatever it names. Labels: see the README of the corpus; steps of files without a step column
are counted from 0 there and from 1 here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
CORPUS = HERE.parents[1] / "shared" / "corpus"
CORPORA = (CORPUS, CORPUS.with_name("corpus2"))
"""Both sets of recordings, which have no source in common."""
KINDS = HERE / "kinds.yaml"


@dataclass(slots=True)
class Found:
    """One alert, or one cause of it, whoever raised it. ``step`` is None where a tool does not say."""

    name: str
    step: int | None
    severity: str
    kinds: frozenset[str]
    series: str = ""


@dataclass(slots=True)
class Scored:
    """One run with its label and what was found in it."""

    entry: Mapping[str, Any]
    found: list[Found]
    verdict: str = ""
    """``caught``, ``late``, ``early``, ``missed``; for healthy runs ``clean`` or ``false``."""
    by: Found | None = None
    """The alert that decided: the first fitting one."""
    delay: float | None = None
    """Where in the window it came: 0.0 at its start, 1.0 at its end; below 0 one sample before."""
    false: list[Found] = field(default_factory=list)
    judged: set[str] = field(default_factory=set)
    """Names of all causes that were judged."""
    problem: str = ""

    @property
    def incident(self) -> bool:
        return self.entry["label"] == "incident"

    @property
    def source(self) -> str:
        return str(self.entry["source"]["repo"])


def labels(corpus: Path = CORPUS) -> list[dict[str, Any]]:
    """Entries of ``labels.yaml``; windows in steps as a reader counts them."""
    entries = yaml.safe_load((corpus / "labels.yaml").read_text(encoding="utf-8"))["runs"]
    for entry in entries:
        if str(entry["step_column"]).startswith("none") and entry["onset_step_range"]:
            entry["onset_step_range"] = [step + 1 for step in entry["onset_step_range"]]
    return list(entries)


def kinds() -> dict[str, frozenset[str]]:
    return {cause: frozenset(named) for cause, named in yaml.safe_load(KINDS.read_text(encoding="utf-8")).items()}


def named_causes(alert: Mapping[str, Any]) -> Iterator[tuple[str, int, str]]:
    """Each cause that an alert of ``report.json`` names: its full name, the step at which it fired, its severity."""
    cause = alert.get("cause")
    name = f"{alert['rule']}.{cause}" if cause else alert["rule"]
    yield name, alert.get("cause_step", alert["fired_step"]), alert["severity"]
    for other in alert.get("also", ()):
        yield f"{alert['rule']}.{other['cause']}", other["fired_step"], other["severity"]


def judged_causes(report: Mapping[str, Any]) -> set[str]:
    """Full names of all causes that a run was judged by."""
    judged = set()
    for rule, entry in report["rules"].items():
        for cause, verdict in entry.get("causes", {"": entry}).items():
            if verdict["verdict"] not in ("not judged", "does not apply", "off"):
                judged.add(f"{rule}.{cause}" if cause else rule)
    return judged


def score(
    entry: Mapping[str, Any], found: Sequence[Found], steps: Mapping[str, Sequence[int]], *, timed: bool = True
) -> Scored:
    """Score one run.

    :param found: alerts in the order of their steps; below ``warning`` they are ignored.
    :param steps: series name -> its steps, for "one sample before".
    :param timed: False: an incident is caught if anything fitting was said at all.
    """
    loud = [f for f in found if f.severity in ("warning", "error")]
    scored = Scored(entry, loud)
    if not scored.incident:
        scored.false = loud
        scored.verdict = "false" if loud else "clean"
        return scored
    fitting = [f for f in loud if entry["kind"] in f.kinds]
    first, last = entry["onset_step_range"]
    if not timed:
        scored.verdict = "caught" if fitting else "missed"
        scored.by = fitting[0] if fitting else None
        return scored
    scored.false = [f for f in loud if f.step is not None and f.step < _sample_before(first, f, steps)]
    dated = [f for f in fitting if f.step is not None]
    if not dated:
        scored.verdict = "missed"
        return scored
    by = scored.by = dated[0]
    assert by.step is not None
    if by.step < _sample_before(first, by, steps):
        scored.verdict = "early"
    elif by.step > last:
        scored.verdict = "late"
    else:
        scored.verdict = "caught"
    scored.delay = (by.step - first) / max(1, last - first)
    return scored


def _sample_before(first: int, found: Found, steps: Mapping[str, Sequence[int]]) -> int:
    """The step of the last sample before the window, of the series that the alert is about."""
    own = steps.get(found.series) or steps.get("loss") or max(steps.values(), key=len, default=())
    ordered = sorted(set(own))
    at = bisect_left(ordered, first)
    return ordered[at - 1] if at else first
