"""Controls of a framework: its own ways to end and to save, over those of its torch optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from healthcheck.protocols import Capabilities, Device
from healthcheck.trainers.controls import TorchControls, without_updates


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
