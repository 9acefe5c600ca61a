"""Samples and metrics: the numbers that rules judge. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, overload

Labels = tuple[tuple[str, str], ...]
"""Sorted ``(name, value)`` pairs that tell the series of one metric apart."""

NO_LABELS: Labels = ()

CONTEXT_LABELS = frozenset({"optimizer", "dataset", "rank", "device"})
"""Labels that say *whose* value it is, not *which part*: a rule on plain ``loss`` also judges
``loss[optimizer=1]``, each series on its own. All other labels (``parameter``, ``group``, ...)
make a family that a rule must ask for: ``grad_norm[*]``."""


BETWEEN = "between"
"""Phase of a value from a step that nobody watched: the largest of several, kept by the device. It is judged by the bound that
a rule draws from the samples before it, and enters no window unless it breaks one."""


class Cost(str, Enum):
    """What one sample of a metric costs."""

    FREE = "free"
    """A number that the host has already."""
    HOST = "host"
    """Host work only (a system call, a walk over modules)."""
    DEVICE = "device"
    """Kernels on the device, no synchronisation."""
    SYNC = "sync"
    """Waits for the device. Only where a rule asks for it."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of a metric: what ``healthcheck metrics`` lists and rules may name."""

    name: str
    help: str
    unit: str = ""
    """``s``, ``bytes``, ``1/s``, ``fraction``, or empty for a plain number."""
    cost: Cost = Cost.FREE
    labels: tuple[str, ...] = ()
    """Names of the family's labels, e.g. ``("parameter",)``. Empty: one series."""
    needs: tuple[str, ...] = ()
    """What must be there: ``cuda``, ``amp``, ``clipping``, ``evaluation``, ``ranks``, ``linux``.
    Named in the reason when a rule could not be judged."""

    @property
    def key(self) -> str:
        """``grad_norm`` for a plain metric, ``grad_norm[]`` for a family."""
        return f"{self.name}[]" if self.labels else self.name


@dataclass(slots=True)
class Sample:
    """One value of one series at one step.

    ``value`` is a number, or a 0-dim device tensor while it waits in the mailbox; the engine
    sees numbers only. ``step`` counts from 1. ``time`` is the session's clock in seconds.
    """

    metric: str
    step: int
    value: Any
    labels: Labels = NO_LABELS
    phase: str = "train"
    time: float = 0.0
    detail: Callable[[], Mapping[str, Any]] | None = None
    """Called only if this sample raises an alert: facts for its message and evidence, such as
    ``{"first": "head.scale, 1 of 64 values"}``. May be slow; must not raise."""


Series = tuple[str, Labels, str]
"""Metric, labels and phase: what tells the samples of one series from all others."""


class Row(Sequence[Sample]):
    """The samples of one step as plain numbers; a :class:`Sample` is made of one only where somebody asks for it.

    :param series: of each value. Rows that come one after the other should share one object.
    """

    __slots__ = ("series", "step", "time", "values")

    def __init__(self, series: tuple[Series, ...], step: int, values: Sequence[float], time: float = 0.0) -> None:
        self.series = series
        self.step = step
        self.values = values
        self.time = time

    def __len__(self) -> int:
        return len(self.series)

    def __iter__(self) -> Iterator[Sample]:
        step, time = self.step, self.time
        for (metric, labels, phase), value in zip(self.series, self.values, strict=True):
            yield Sample(metric, step, value, labels, phase, time)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return list(self)[index]
        metric, labels, phase = self.series[index]
        return Sample(metric, self.step, self.values[index], labels, phase, self.time)


@lru_cache(maxsize=65536)
def series_name(metric: str, labels: Labels) -> str:
    """``loss``, ``grad_norm[encoder.weight]``, ``lr[group=1]``, ``loss[optimizer=1,rank=2]``.

    The label ``parameter`` is the usual one and is written without its name.
    """
    if not labels:
        return metric
    inner = ",".join(v if k == "parameter" else f"{k}={v}" for k, v in labels)
    return f"{metric}[{inner}]"


def samples_of(
    metrics: Mapping[str, Any],
    step: int,
    at: float,
    *,
    phase: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> tuple[list[Sample], set[str]]:
    """Metrics that somebody logs, as samples; with the names of those that are no numbers.

    :param phase: ``train`` or ``eval``; by the beginning of the name if None.
    """
    apart = tuple(sorted(labels.items())) if labels else NO_LABELS
    odd = {name for name, value in metrics.items() if not hasattr(value, "__float__")}
    return [
        Sample(name, step, value, apart, phase or ("eval" if name.startswith(EVALUATED) else "train"), at)
        for name, value in metrics.items()
        if name not in odd
    ], odd


EVALUATED = ("eval.", "val.", "test.")
"""How the names of results of an evaluation begin."""


def arrived(samples: Iterable[Sample]) -> list[Sample]:
    """With numbers where they had deferred ones that have arrived since; without those that turn out to have none."""
    found = []
    for sample in samples:
        if type(sample.value) is not float:
            late = getattr(sample.value, "value", None)
            if late is not None:
                sample.value = late()
            if sample.value is None:
                continue
        found.append(sample)
    return found
