"""The controls of a session: a stop latches, and what needs all ranks is proposed to them first."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.errors import UsageError
from healthcheck.protocols import Agreement, Controls
from healthcheck.runinfo import RunInfo

if TYPE_CHECKING:
    from healthcheck.protocols import Capabilities, Device

CHECKPOINT = "checkpoint"
"""In place of a rule's id, in a proposal to save."""


@dataclass(slots=True)
class StopRequest:
    """The latch: the first stop wins, later ones only append their rules."""

    rule: str
    """Empty for a stop that the user asked for (``--max-steps``)."""
    step: int
    reason: str
    mode: str = "graceful"
    exit_code: int = 1
    also: list[str] | None = None


class LatchingControls:
    """The trainer's controls, with the stop latch of the session in front.

    With several ranks a rule's stop is only proposed here; :meth:`agreed` latches it once all
    ranks have decided.
    """

    def __init__(self, controls: Controls, info: RunInfo) -> None:
        self._controls = controls
        self._info = info
        self.stop: StopRequest | None = None
        self.agreement: Agreement | None = None
        self.may_skip = True
        """False while a rule acts that other ranks may not see: an update skipped here alone would set ranks apart."""
        self.order: Mapping[str, tuple[int, int]] = {}
        """Rule id -> (severity, place in the file): which of several proposals is the cause."""
        self.unanimous: Collection[str] = ()
        """Rules with ``ranks: all``: what they ask for is done only if every rank asks for it."""

    def take_over(self, controls: Controls) -> None:
        """Another trainer's controls from now on; a stop that was asked for already holds for it too."""
        self._controls = controls
        if self.stop is not None:
            self.agreed(self.stop)

    @property
    def capabilities(self) -> Capabilities:
        return self._controls.capabilities

    @property
    def device(self) -> Device:
        return self._controls.device

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        if self.stop is not None and (self.stop.rule or not rule):
            if rule and rule != self.stop.rule:
                self.stop.also = [*(self.stop.also or []), rule]
            return
        if rule and self.agreement is not None:
            severity, place = self.order.get(rule, (0, 0))
            request = {"rule": rule, "step": step, "reason": reason, "mode": mode, "exit_code": exit_code}
            unanimous = rule in self.unanimous
            self.agreement.propose({**request, "severity": severity, "order": place, "unanimous": unanimous})
            return
        self.agreed(StopRequest(rule, step, reason, mode, exit_code))

    def cleared(self, rule: str) -> None:
        """An episode is over: ranks that have to be of one mind no longer are."""
        if self.agreement is not None and rule in self.unanimous:
            self.agreement.withdraw(rule)

    def agreed(self, request: StopRequest) -> None:
        """Latch a stop and ask the trainer for it."""
        self.stop = request
        rule, step, reason, mode, exit_code = (
            request.rule,
            request.step,
            request.reason,
            request.mode,
            request.exit_code,
        )
        self._controls.request_stop(reason, rule=rule, step=step, mode=mode, exit_code=exit_code)

    def skip_update(self) -> bool:
        return self.may_skip and self._controls.skip_update()

    def gated(self, step: int, rule: str) -> bool:
        """Whether this rule's bound decided on the update of that step, before the rule was judged."""
        controls = getattr(self._controls, "base", self._controls)
        gated = getattr(controls, "gated", None)
        return bool(gated is not None and gated(step, rule))

    def request_checkpoint(self, path: Path | None = None) -> str:
        """Save; with several ranks, which save together, propose it. Returns where.

        Raises ``UsageError`` where that cannot be.
        """
        if self._info.world_size < 2:
            return self._controls.request_checkpoint(path)
        why = getattr(self._controls, "ranks_cannot_save", "")
        if why or self.agreement is None:
            raise UsageError(why or f"{self._info.world_size} ranks cannot agree on it")
        if path is not None and path.exists():
            raise UsageError(f"{path} exists already")
        self.agreement.propose({"rule": CHECKPOINT, "path": str(path or "")})
        return "on all ranks, at their next sync point"

    def agreed_checkpoint(self, request: Mapping[str, Any], step: int) -> str:
        """All ranks save now, at one place: the one that was asked for, else in the record of rank 0. Returns where."""
        place = request["path"]
        if not place and request["folder"] and "checkpoint_path" not in self.capabilities.gaps:
            place = os.path.join(request["folder"], "checkpoints", f"step-{step}")
        return self._controls.request_checkpoint(Path(place) if place else None)

    def scale_lr(self, factor: float) -> list[float]:
        return self._controls.scale_lr(factor)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._controls.log(metrics, step)
