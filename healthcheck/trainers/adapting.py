"""What the adapters of frameworks are made of: controls over a framework's own ways, alerts for its logger, a mixin."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.protocols import Capabilities, Device
from healthcheck.trainers.controls import TorchControls, without_updates

if TYPE_CHECKING:
    from healthcheck.verdicts import Alert


class NativeControls:
    """Implements :class:`healthcheck.protocols.Controls`; a framework's adapter fills in its own ways.

    While :attr:`engaged`, a stop asks the framework to end its loop and nothing is raised; outside
    its loop the stop is raised from the step, as in a plain script.
    """

    def __init__(self, base: TorchControls, capabilities: Capabilities) -> None:
        self.base = base
        self._capabilities = capabilities
        self.engaged = False

    @property
    def capabilities(self) -> Capabilities:
        """The framework's, less an update that its optimizer does not let us hold back."""
        known, base = self._capabilities, self.base.capabilities
        if "before_update" in base.gaps and "before_update" not in known.gaps:
            return without_updates(known, base.gaps["before_update"])
        if "skip_update" in base.controls or "skip_update" not in known.controls:
            return known
        gap = base.gaps.get("skip_update", "the optimizer does not let an update be held back")
        return replace(known, controls=known.controls - {"skip_update"}, gaps={**known.gaps, "skip_update": gap})

    @property
    def ranks_cannot_save(self) -> str:
        """Why several ranks cannot save together; empty where the framework does it."""
        return "" if self.engaged else self.base.ranks_cannot_save

    # -- what a framework fills in ----------------------------------------------------

    def end_loop(self, reason: str) -> None:
        """Ask the framework to end its loop at the next step boundary."""
        raise NotImplementedError

    def save(self, path: Path | None) -> str:
        """Have a checkpoint written at the next safe point; returns where. ``UsageError`` if that cannot be."""
        raise NotImplementedError

    def schedulers(self) -> Iterable[Any]:
        """Learning-rate schedulers that would undo a scaled rate."""
        return ()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    # -- Controls ---------------------------------------------------------------------

    @property
    def device(self) -> Device:
        return self.base.device

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        if self.engaged:
            self.base.stop.state.by_framework = True
            self.end_loop(reason)
        self.base.request_stop(reason, rule=rule, step=step, mode=mode, exit_code=exit_code)

    def skip_update(self) -> bool:
        return self.base.skip_update()

    def request_checkpoint(self, path: Path | None = None) -> str:
        return self.save(path) if self.engaged else self.base.request_checkpoint(path)

    def scale_lr(self, factor: float) -> list[float]:
        """Scales the schedulers' base rates too, so that their next step does not undo it."""
        rates = self.base.scale_lr(factor)
        for scheduler in self.schedulers():
            inner = getattr(scheduler, "scheduler", scheduler)
            if hasattr(inner, "base_lrs"):
                inner.base_lrs = [rate * factor for rate in inner.base_lrs]
        return rates


def scale_schedules(schedulers: Iterable[Any], factor: float) -> None:
    """Scale the bounds of Megatron's ``OptimizerParamScheduler``, which sets rates from them at each step."""
    for scheduler in schedulers:
        for name in ("init_lr", "max_lr", "min_lr"):
            value = getattr(scheduler, name, None)
            if isinstance(value, (int, float)):
                setattr(scheduler, name, value * factor)
        for group in getattr(getattr(scheduler, "optimizer", None), "param_groups", ()) or ():
            for name in ("max_lr", "min_lr"):
                if isinstance(group.get(name), (int, float)):
                    group[name] = group[name] * factor


class Forwarded:
    """Remembers how many of a run's alerts have been handed on."""

    def __init__(self, alerts: Sequence[Alert] = ()) -> None:
        self._count = len(alerts)

    def news(self, alerts: Sequence[Alert]) -> dict[str, float]:
        """``{"alert/loss-spike": 1.0}`` for those that came since the last call."""
        new = alerts[self._count :]
        self._count = len(alerts)
        return {f"alert/{alert.rule}": 1.0 for alert in new}


def mix_in(mixin: type, target: Any) -> None:
    """Give ``target`` the methods of ``mixin``, in front of those of its own class.

    Its class becomes a new one of the same name, ``class Own(mixin, Own)``; other objects of the old
    class stay as they are. Does nothing where the mixin is there already.
    """
    kind = type(target)
    if issubclass(kind, mixin):
        return
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    mixed = types.new_class(kind.__name__, (mixin, kind), exec_body=lambda space: space.update(named))
    object.__setattr__(target, "__class__", mixed)  # classes that keep track of what is set need not see this


def joined(parts: Iterable[Any], name: str) -> Any:
    """One module for the parts of a model; with several, names begin with ``chunk0.``, ``chunk1.``, ...

    The parts stay as they are; the caller must keep what is returned.
    """
    import torch

    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    if len(modules) < 2:
        return modules[0] if modules else None
    return torch.nn.ModuleDict({f"{name}{i}": module for i, module in enumerate(modules)})


def listed(given: Any) -> list[Any]:
    """A framework's one thing, list of things, or None, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) else [given]
