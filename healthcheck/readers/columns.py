"""The reading of one file's columns: what each one becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from healthcheck.readers.aliases import BOOKKEEPING, STEP_NAMES, TIME_NAMES, TRAIN_WORDS
from healthcheck.readers.identify import Identity, identify, joined, safe
from healthcheck.samples import Labels, series_name

Row = Mapping[str, Any]
Series = tuple[str, Labels]

_STEP_RANK = {name: (group, i) for group, names in enumerate(STEP_NAMES) for i, name in enumerate(names)}
TIME_RANK = {name: i for i, name in enumerate(TIME_NAMES)}


@dataclass(frozen=True, slots=True)
class Target:
    """What a column becomes."""

    metric: str
    labels: Labels
    phase: str
    scale: float = 1.0

    @property
    def series(self) -> Series:
        return self.metric, self.labels


@dataclass(slots=True)
class Columns:
    """The reading of one file's columns. ``steps`` empty: rows are counted from 1."""

    steps: tuple[str, ...] = ()
    epoch: str = ""
    time: str = ""
    time_scale: float = 1.0
    phase_column: str = ""
    within_epoch: bool = False
    """The step column starts again in every epoch."""
    targets: dict[str, Target | None] = field(default_factory=dict)
    """Column -> target; ``None`` for bookkeeping."""
    sums: dict[Series, tuple[str, ...]] = field(default_factory=dict)
    """Series that no column gives: the sum of these columns."""
    owners: dict[Series, str] = field(default_factory=dict)
    datasets: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    positioned: bool = False
    """The format itself says the step."""

    def target(self, name: str, phase: str = "train") -> Target | None:
        """The target of a column, also of one that was not among the first rows."""
        if phase == "eval" and identify(name, self.datasets).phase != "eval":
            key = f"eval/{name}"
            if key not in self.targets:
                self.targets[key] = None if self.special(name) else self._fit(key, identify(key, self.datasets))
            return self.targets[key]
        if name not in self.targets:
            self.targets[name] = None if self.special(name) else self._fit(name, identify(name, self.datasets))
        return self.targets[name]

    def special(self, name: str) -> bool:
        plain = joined(name)
        settings = name.startswith(("config/", "hparams/", "args/"))
        return settings or plain in TIME_RANK or plain in BOOKKEEPING or step_rank(name) is not None

    def _fit(self, name: str, identity: Identity) -> Target:
        target = Target(identity.metric, identity.labels, identity.phase, identity.scale)
        if target.series in self.owners:
            target = own_name(name, identity)
            if target.series in self.owners:  # its own name is the metric's
                target = Target(f"{target.metric}_", target.labels, target.phase)
        self.owners[target.series] = name
        return target


def own_name(name: str, identity: Identity) -> Target:
    """A column under its own name, because another one is the metric."""
    metric = f"eval.{safe(identity.own)}" if identity.phase == "eval" else safe(name)
    return Target(metric, tuple(label for label in identity.labels if label[0] == "dataset"), identity.phase)


def step_rank(name: str) -> tuple[int, int] | None:
    """How good a step column this name is; ``None`` if it is none."""
    plain = joined(name)
    found = _STEP_RANK.get(plain)
    if found is None:
        parts = plain.split("_")
        while len(parts) > 1 and parts[0] in TRAIN_WORDS | {"", "progress", "counters", "metrics"}:
            parts = parts[1:]
            found = found or _STEP_RANK.get("_".join(parts))
    return found


def show(columns: Columns) -> str:
    """The reading as text, one line per column: for ``--show-columns``."""
    lines = []
    if columns.positioned:
        lines.append("step <- (given by the format)")
    else:
        lines.append(f"step <- {', '.join(columns.steps) or '(rows counted from 1)'}")
    if columns.within_epoch:
        lines.append(f"        counted on over epochs ({columns.epoch})")
    if columns.time:
        lines.append(f"time <- {columns.time}")
    for series, names in columns.sums.items():
        lines.append(f"{series_name(*series)} <- {' + '.join(names)}")
    named = [(series_name(t.metric, t.labels), n) for n, t in columns.targets.items() if t is not None]
    width = max((len(a) for a, _ in named), default=0)
    lines += [f"{metric:<{width}} <- {name}" for metric, name in named]
    ignored = [n for n, t in columns.targets.items() if t is None and n not in (*columns.steps, columns.time)]
    if ignored:
        lines.append(f"not used: {', '.join(ignored)}")
    return "\n".join(lines)
