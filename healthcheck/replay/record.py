"""What our own record knows beyond its samples: where the run began, what it was asked to collect."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.engine.demand import RuleDemand
from healthcheck.errors import HealthCheckError
from healthcheck.readers.series import RecordedRun
from healthcheck.rulelang.compile import load_rules

if TYPE_CHECKING:
    from healthcheck.registry import Registry


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a record for :func:`healthcheck.replay.play.play`."""

    start_step: int | None = None
    known: Collection[str] = ()
    resumed_from: int | None = None
    notes: tuple[str, ...] = ()


def record_facts(run: RecordedRun, registry: Registry) -> Facts:
    """Of a foreign file nothing is known; of our own record, what its folder says."""
    if run.reader.name != "record":
        return Facts()
    folder = run.path if run.path.is_dir() else run.path.parent
    resumed = _run_json(folder).get("resumed_from")
    start = resumed if isinstance(resumed, int) else 0
    known = _collected(folder / "rules.yaml", registry)
    notes = []
    if start:
        notes.append(
            f"this attempt was resumed after step {start:,}: what its rules had seen before is not in this record"
        )
    return Facts(start, known, start or None, tuple(notes))


def _run_json(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _collected(rules_file: Path, registry: Registry) -> frozenset[str]:
    """Metrics that the live run was asked to collect: what its own rules wanted."""
    if not rules_file.is_file():
        return frozenset()
    try:
        rules = load_rules([str(rules_file)], registry=registry)
    except (HealthCheckError, OSError):  # a plugin of that run is not here: then less is known
        return frozenset()
    return frozenset(RuleDemand.of(rules.rules, rules.derived).every)
