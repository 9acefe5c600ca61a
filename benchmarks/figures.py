"""Recall and false alarms of each cause, as the pages of rules show them: benchmarks/detection.py --figures.

For each cause: ``runs`` in which it was judged; ``healthy`` ones among them and ``false``, those of these in which it fired;
``faults``, the incidents and toy faults that it answers for (benchmarks/kinds.yaml, tests/faults/detectors.yaml), and ``found``,
those of these in which it fired in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from scoring import Scored, kinds

HEAD = """# Recall and false alarms of each cause. Written by benchmarks/detection.py --faults --figures; read by docs/_generate.py.
"""


def write_figures(path: Path, scored: Sequence[Scored], toys: Sequence[Any], causes: Sequence[str]) -> None:
    """Write what was counted, and which runs it was counted on."""
    table = {cause: figures(cause, scored, toys) for cause in causes}
    of = {"recorded": len(scored), "toys": len(toys)}
    path.write_text(HEAD + yaml.safe_dump({"runs": of, "causes": table}, sort_keys=False), encoding="utf-8")


def figures(cause: str, scored: Iterable[Scored], toys: Iterable[Any]) -> dict[str, int]:
    """What one cause did on all runs."""
    count: Counter[str] = Counter()
    named = kinds().get(cause, frozenset())
    for run in scored:
        count["runs"] += cause in run.judged
        if not run.incident:
            count["healthy"] += cause in run.judged
            count["false"] += any(f.name == cause for f in run.false)
        elif run.entry["kind"] in named:
            last = run.entry["onset_step_range"][1]
            early = {id(f) for f in run.false}
            fired = [f for f in run.found if f.name == cause and f.step is not None and id(f) not in early]
            count["faults"] += 1
            count["found"] += any(f.step <= last for f in fired)
    for toy in toys:
        count["runs"] += cause in toy.judged
        if toy.wanted == "none":
            count["healthy"] += cause in toy.judged
            count["false"] += any(name == cause for name, _, _ in toy.alerts)
        elif cause in toy.answers:
            count["faults"] += 1
            count["found"] += cause in toy.right
    return {key: count[key] for key in ("runs", "healthy", "false", "faults", "found")}
