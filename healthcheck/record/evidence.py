"""Evidence bundles read back: what the action ``evidence`` kept for an alert. Torch-free, nothing is unpickled.

Files that are missing or damaged count as absent: a bundle may have been cut off by a full disk, or copied in part.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from healthcheck.record.runs import Run

KEPT_BESIDE = ("stacks", "locate", "profile", "memory")
"""Folders of a run that other actions write."""


@dataclass
class Bundle:
    """One folder ``alerts/NNN``; its files are read when they are asked for."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def files(self) -> dict[str, int]:
        """Relative name -> bytes, in the order in which a person wants them."""
        found = {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in _files(self.folder)}
        return {name: found[name] for name in sorted(found, key=lambda name: (_rank(name), name))}

    @property
    def total_bytes(self) -> int:
        return sum(self.files.values())

    @cached_property
    def alert(self) -> dict[str, Any]:
        """The alert when it was raised, in the form of ``report.json``; empty if its file is damaged."""
        return _dict(self._json("alert.json"))

    @property
    def number(self) -> int:
        """Number of its alert; from the folder's name where the file is damaged."""
        given = self.alert.get("number")
        digits = self.name.partition("-")[0]
        return given if isinstance(given, int) else int(digits) if digits.isdigit() else 0

    @property
    def rule(self) -> str:
        return str(self.alert.get("rule", "?"))

    @cached_property
    def batch(self) -> dict[str, Any]:
        """``leaves`` (shapes, dtypes, ranges, hashes) and perhaps ``sample_ids``."""
        return _dict(self._json("batch.json"))

    @cached_property
    def contents(self) -> list[dict[str, Any]]:
        """``batch/index.json``: which file holds which tensor; only with ``evidence: {batch: full}``."""
        found = self._json("batch/index.json")
        return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []

    @cached_property
    def environment(self) -> dict[str, Any]:
        return _dict(self._json("environment.json"))

    @cached_property
    def generators(self) -> list[str]:
        """Random number generators whose state was kept."""
        return list(_dict(self._json("rng.json")))

    @cached_property
    def series(self) -> list[dict[str, str]]:
        """Rows of ``series.csv``: ``step`` and a column per series, as text; empty cells had no value."""
        return self._table("series.csv")

    @cached_property
    def parameters(self) -> list[dict[str, str]]:
        """Rows of ``parameters.csv``."""
        return [row for row in self._table("parameters.csv") if row.get("shape")]

    @cached_property
    def not_here(self) -> list[str]:
        """What could not be kept and why, as its README says."""
        return list(self._readme_lines("Not here"))

    @cached_property
    def moment(self) -> str:
        """When weights and gradients were read, in a sentence; empty where they were not."""
        return next(
            (line for line in self._text("README").splitlines() if line.startswith("Weights and gradients")), ""
        )

    def worst_parameters(self, most: int = 5) -> list[dict[str, str]]:
        """Those with values that are not finite first, then the largest gradients."""
        return sorted(self.parameters, key=lambda row: (-_nonfinite(row), -_number(row["grad_norm"])))[:most]

    def to_json(self) -> dict[str, Any]:
        """All but the bulk: series and parameter rows stay in their files."""
        return {
            "alert": self.alert,
            "folder": str(self.folder),
            "bytes": self.total_bytes,
            "files": [{"name": name, "bytes": size} for name, size in self.files.items()],
            "parameters": len(self.parameters),
            "worst_parameters": self.worst_parameters(),
            "batch": self.batch,
            "generators": self.generators,
            "environment": self.environment,
            "not_here": self.not_here,
        }

    # -- inside -----------------------------------------------------------------------

    def _text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def _json(self, name: str) -> Any:
        try:
            return json.loads(self._text(name))
        except ValueError:
            return None

    def _table(self, name: str) -> list[dict[str, str]]:
        try:
            rows = csv.DictReader(io.StringIO(self._text(name)))
            return [{key: value or "" for key, value in row.items() if key is not None} for row in rows]
        except csv.Error:
            return []

    def _readme_lines(self, heading: str) -> Iterator[str]:
        lines = iter(self._text("README").splitlines())
        for line in lines:
            if line == heading:
                break
        for line in lines:
            if not line.startswith("  "):
                return
            yield line.strip()


def bundles_of(run: Run) -> list[Bundle]:
    """All bundles of a run, those of its other ranks too, by number of the alert."""
    folders = [path for pattern in ("alerts/*", "rank-*/alerts/*") for path in run.folder.glob(pattern)]
    bundles = [Bundle(path) for path in sorted(folders) if path.is_dir()]
    return sorted(bundles, key=lambda bundle: bundle.number)


def kept_beside(run: Run) -> list[str]:
    """Files of other actions (stacks, located modules, profiles), relative to the run's folder."""
    return [
        path.relative_to(run.folder).as_posix() for name in KEPT_BESIDE for path in sorted(_files(run.folder / name))
    ]


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.rglob("*") if path.is_file()]
    except OSError:
        return []


_ORDER = ("README", "alert.json", "series.csv", "parameters.csv", "batch.json", "batch/index.json")


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _nonfinite(row: dict[str, str]) -> float:
    return _number(row.get("weight_nonfinite", "")) + _number(row.get("grad_nonfinite", ""))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
