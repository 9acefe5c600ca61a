"""A small hand-written training loop that tells probes what happens, as a trainer adapter would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Probe
from healthcheck.core.runinfo import RunFacts
from healthcheck.core.samples import Sample, series_name
from healthcheck.device.mailbox import StepMailbox

Loss = Callable[[], torch.Tensor]


class View:
    """The plain form of :class:`healthcheck.core.events.ModelView`; lists are new at every call."""

    def __init__(self, model: torch.nn.Module | None, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self.modules = list(model.named_modules()) if model is not None else []
        named = list(model.named_parameters()) if model is not None else []
        known = {id(p) for _, p in named}
        for optimizer in optimizers:
            for g, group in enumerate(optimizer.param_groups):
                for i, p in enumerate(group["params"]):
                    if id(p) not in known:
                        known.add(id(p))
                        named.append((f"group{g}.param{i}", p))
        self.parameters = named
        self.seen = list(optimizers)

    def named_parameters(self) -> Sequence[tuple[str, Any]]:
        return list(self.parameters)

    def named_modules(self) -> Sequence[tuple[str, Any]]:
        return list(self.modules)

    def optimizers(self) -> Sequence[Any]:
        return self.seen


@dataclass
class Everything:
    """A demand that wants all, or only what is named."""

    only: set[str] | None = None
    every: int = 1
    step: int = 0
    """The step of the event at hand."""

    @property
    def due_now(self) -> Any:
        return _Due(self)

    def wants(self, key: str) -> bool:
        return self.only is None or key in self.only

    def due(self, key: str, step: int) -> bool:
        return self.wants(key) and step % self.every == 0

    def every_of(self, key: str) -> int:
        return self.every

    def next_due(self, keys: Iterable[str], step: int) -> int:
        return step - step % self.every + self.every if any(map(self.wants, keys)) else 2**62


class _Due(frozenset[str]):
    """What is due at the step at hand, of names that nobody has listed."""

    def __new__(cls, demand: Everything) -> _Due:
        return super().__new__(cls)

    def __init__(self, demand: Everything) -> None:
        self._demand = demand

    def __contains__(self, key: object) -> bool:
        return self._demand.due(str(key), self._demand.step)

    def __rand__(self, keys: Any) -> set[str]:
        return {key for key in keys if key in self}


@dataclass
class Watched:
    """Feeds events to probes and keeps what they say, as numbers, by series."""

    probes: Iterable[Probe]
    demand: Everything = field(default_factory=Everything)
    samples: list[Sample] = field(default_factory=list)
    run: RunFacts = field(default_factory=RunFacts)

    def __post_init__(self) -> None:
        self.probes = list(self.probes)
        self._mailbox = StepMailbox()
        for probe in self.probes:
            plan = getattr(probe, "plan", None)
            if plan is not None:
                plan(self.demand)

    def emit(self, kind: EventKind, step: int, **facts: Any) -> None:
        event = Event(kind, step, run=self.run, **facts)
        self.demand.step = step
        for probe in self.probes:
            if kind in probe.listens_to:
                self._mailbox.post(step, list(probe.sample(event, self.demand)))
        self.samples += self._mailbox.ready()

    def close(self) -> None:
        for probe in self.probes:
            close = getattr(probe, "close", None)
            if close is not None:
                close()

    def of(self, series: str) -> list[tuple[int, float]]:
        """``(step, value)`` of one series, by its written name."""
        return [(s.step, s.value) for s in self.samples if series_name(s.metric, s.labels) == series]

    def values(self, series: str) -> list[float]:
        return [value for _, value in self.of(series)]

    def last(self, series: str) -> float:
        return self.values(series)[-1]

    def names(self) -> set[str]:
        return {s.metric for s in self.samples}

    def facts(self, metric: str) -> dict[str, Any]:
        """What the last sample of a series says when an alert asks."""
        sample = [s for s in self.samples if series_name(s.metric, s.labels) == metric][-1]
        assert sample.detail is not None
        return dict(sample.detail())


@dataclass
class Loop:
    """One step at a time: micro-batches, clipping, loss scale, zero_grad as the test wants them."""

    watched: Watched
    model: torch.nn.Module | None
    optimizer: torch.optim.Optimizer
    others: Sequence[torch.optim.Optimizer] = ()
    clip: float | None = None
    zero: bool = True
    set_to_none: bool = True
    step: int = 0
    view: View = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.view = View(self.model, [self.optimizer, *self.others])

    def run(self, steps: int, loss: Loss, *, micro: int = 1, **facts: Any) -> None:
        for _ in range(steps):
            self.one(loss, micro=micro, **facts)

    def one(
        self,
        loss: Loss,
        *,
        micro: int = 1,
        optimizer: torch.optim.Optimizer | None = None,
        index: int = 0,
        advance: bool = True,
        loss_weight: float | None = None,
        **facts: Any,
    ) -> None:
        """One attempted update by ``optimizer`` (the loop's own by default)."""
        used = optimizer or self.optimizer
        self.step += advance
        emit, view, step = self.watched.emit, self.view, self.step
        emit(EventKind.STEP_START, step, model=view)
        for n in range(micro):
            value = loss()
            if n == 0 and self.zero:
                used.zero_grad(set_to_none=self.set_to_none)
            emit(EventKind.LOSS, step, model=view, loss=value.detach(), loss_weight=loss_weight)
            value.backward()
        emit(EventKind.BACKWARD_END, step, model=view, optimizer_index=index)
        owned = [p for group in used.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(owned, self.clip) if self.clip is not None else None
        known = {
            "model": view,
            "optimizer": used,
            "optimizer_index": index,
            "grad_norm": norm,
            "max_norm": self.clip,
            **facts,
        }
        emit(EventKind.BEFORE_UPDATE, step, **known)
        used.step()
        emit(EventKind.AFTER_UPDATE, step, **known)
        emit(EventKind.STEP_END, step, **known)
