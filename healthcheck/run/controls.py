"""The stop of a run, and the trainer's controls as the actions of a session use them.

With one process an action's request goes straight to the trainer. With several ranks whatever needs all of them
(a stop, a checkpoint) is proposed to the others first, because a rank that leaves alone makes the rest hang.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import UsageError
from healthcheck.core.protocols import Agreement, Controls
from healthcheck.core.runinfo import RunInfo

if TYPE_CHECKING:
    from healthcheck.core.alerts import Alert
    from healthcheck.core.protocols import Capabilities, Device

CHECKPOINT = "checkpoint"
"""In place of a rule's id, in a proposal to save."""


@dataclass(slots=True)
class StopRequest:
    """One request to end the run. The first one of a rule wins; later ones only add their rules to it."""

    rule: str
    """Empty for a stop that the user asked for (``--max-steps``)."""
    step: int
    reason: str
    mode: str = "graceful"
    exit_code: int = 1
    also: list[str] | None = None


class StopState:
    """Whether the run is to stop, and how far that has got. One object per session, and the only place that knows.

    Actions ask for a stop through the controls; what trains (an adapter, a loop) reads this object and ends.
    Once :attr:`request` is set it stays: a stop is never taken back.
    """

    def __init__(self) -> None:
        self.request: StopRequest | None = None
        """The stop to carry out. With several ranks it appears here when all of them have agreed."""
        self.raised = 0
        """How often it was raised inside the training as ``StopTraining``."""
        self.by_framework = False
        """True while a framework ends its loop in its own way: nothing is raised meanwhile, and no update applied."""


class SessionControls:
    """The trainer's controls, as the actions of one session use them.

    :param stop: the stop of the run, which :meth:`agreed` sets.
    :param info: how many ranks there are; a framework may correct that when training begins.
    :param note: says one line to the user.
    """

    def __init__(self, controls: Controls, *, stop: StopState, info: RunInfo, note: Callable[[str], None]) -> None:
        self._controls = controls
        self._info = info
        self._note = note
        self.stop = stop
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
        if self.stop.request is not None:
            self.agreed(self.stop.request)

    @property
    def capabilities(self) -> Capabilities:
        return self._controls.capabilities

    @property
    def device(self) -> Device:
        return self._controls.device

    # -- stop ---------------------------------------------------------------------------

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        known = self.stop.request
        if known is not None and (known.rule or not rule):
            if rule and rule != known.rule:
                known.also = [*(known.also or []), rule]
            return
        if rule and self.agreement is not None:
            severity, place = self.order.get(rule, (0, 0))
            request = {"rule": rule, "step": step, "reason": reason, "mode": mode, "exit_code": exit_code}
            unanimous = rule in self.unanimous
            self.agreement.propose({**request, "severity": severity, "order": place, "unanimous": unanimous})
            return
        self.agreed(StopRequest(rule, step, reason, mode, exit_code))

    def cleared(self, rule: str) -> None:
        """An episode is over: where all ranks have to see the same, they no longer do."""
        if self.agreement is not None and rule in self.unanimous:
            self.agreement.withdraw(rule)

    def agreed(self, request: StopRequest) -> None:
        """The run stops: keep the request, and ask the trainer for it."""
        self.stop.request = request
        self._controls.request_stop(
            request.reason, rule=request.rule, step=request.step, mode=request.mode, exit_code=request.exit_code
        )

    # -- several ranks --------------------------------------------------------------------

    def exchange(self, step: int, alerts: Iterable[Alert]) -> None:
        """Sync point of several ranks, at the end of every step: do what all of them have agreed on.

        :param alerts: of this run so far; those of the rule that stops it are dated to the common step.
        """
        if self.agreement is None or self.stop.request is not None:
            return
        for decided in self.agreement.exchange(step):
            if decided["rule"] == CHECKPOINT:
                self._save(decided, step)
            else:
                self._stop(decided, step, alerts)

    def _save(self, decided: Mapping[str, Any], step: int) -> None:
        """All ranks save now, at one place: the one that was asked for, else in the record of rank 0."""
        place = decided["path"]
        if not place and decided["folder"] and "checkpoint_path" not in self.capabilities.gaps:
            place = os.path.join(decided["folder"], "checkpoints", f"step-{step}")
        try:
            where = self._controls.request_checkpoint(Path(place) if place else None)
        except UsageError as error:
            self._note(f"no checkpoint at step {step:,}: {error}")
            return
        self._note(f"all ranks save at step {step:,}, as asked by rank {decided['rank']}: {where}")

    def _stop(self, decided: Mapping[str, Any], step: int, alerts: Iterable[Alert]) -> None:
        rule, first, ranks = decided["rule"], int(decided["step"]), decided["ranks"]
        where = f"rank {ranks[0]} only" if len(ranks) == 1 else f"{len(ranks)} of {self._info.world_size} ranks"
        self._note(f"all ranks stop at step {step:,}: {rule} on {where}, first seen at step {first:,}")
        for alert in alerts:
            if alert.rule == rule and alert.acted_step is not None:
                alert.acted_step = step
        self.agreed(StopRequest(rule, step, decided["reason"], decided["mode"], int(decided["exit_code"])))

    # -- everything else --------------------------------------------------------------------

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

    def scale_lr(self, factor: float) -> list[float]:
        return self._controls.scale_lr(factor)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._controls.log(metrics, step)
