"""What actions may do to a loop of torch optimizers: stop, skip, save, slow down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from healthcheck.errors import UsageError
from healthcheck.events import EventKind
from healthcheck.probes.memory_readings import TorchDevice
from healthcheck.protocols import Capabilities, Device
from healthcheck.trainers.gating import UpdateGate
from healthcheck.trainers.modelview import FoundModel
from healthcheck.trainers.resume.savedstate import new_checkpoint
from healthcheck.trainers.stopping import StopSwitch

if TYPE_CHECKING:
    from healthcheck.session import Session


class PendingUpdate(Protocol):
    """An update that can still be kept from happening."""

    skip: bool


_NO_EPOCHS = "a plain loop does not announce its epochs"
_NO_TESTS = "a plain loop does not tell a test from an evaluation"

GAPS = {
    **dict.fromkeys(("epoch_start", "epoch_end"), _NO_EPOCHS),
    **dict.fromkeys(("test_start", "test_step", "test_end"), _NO_TESTS),
}

SCRIPT_EVENTS = frozenset(kind for kind in EventKind if kind.value not in GAPS)


class TorchControls:
    """Implements :class:`healthcheck.protocols.Controls` over optimizers and modules found."""

    ranks_cannot_save = "a plain script does not say which rank saves which part"

    def __init__(self, session: Session, view: FoundModel, stop: StopSwitch, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.device: Device = TorchDevice()
        self.stop = stop
        self.update: PendingUpdate | None = None
        """The update at hand, while it is shown and can still be skipped."""
        self.gate = UpdateGate(session)
        self._session = session
        self._view = view

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        """Nothing to ask for: what trains looks at the stop of the run itself, and raises it from its next step."""

    def skip_update(self) -> bool:
        if self.update is None:
            return False
        self.update.skip = True
        return True

    def gated(self, step: int, rule: str) -> bool:
        """Whether this rule's bound decided on the update of that step, before the rule was judged."""
        return self.gate.decided(step, rule)

    def cannot_gate(self, why: str) -> None:
        """Rules want to hold back updates, and this optimizer does not let them: say so, and promise nothing."""
        if not why or self.gate.rules is None:
            return
        known = self.capabilities
        self.capabilities = replace(
            known, controls=known.controls - {"skip_update"}, gaps={**known.gaps, "skip_update": f"cannot gate: {why}"}
        )
        ids = ", ".join(rule.id for rule in self.gate.rules.rules)
        self._session.note(f"cannot gate ({ids} act one or two steps after a bad update): {why}")

    def update_unseen(self, why: str) -> None:
        """Updates are made where nobody can look at their gradients: say so, once, and promise nothing."""
        if self.capabilities.gaps.get("before_update") == why:
            return
        self.capabilities = without_updates(self.capabilities, why)
        self._session.note(f"{why}: its gradients and updates are not seen, and not judged")

    def updates_inside_backward(self) -> None:
        """There is no moment between the gradients and the updates at which somebody could look."""
        known = self.capabilities
        if "before_update" not in known.gaps:
            kinds = (EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE)
            gaps = dict.fromkeys((kind.value for kind in kinds), "optimizers step inside the backward pass, one by one")
            self.capabilities = replace(known, events=known.events - set(kinds), gaps={**known.gaps, **gaps})

    def scale_lr(self, factor: float) -> list[float]:
        rates = []
        for optimizer in self._view.optimizers():
            for group in optimizer.param_groups:
                if hasattr(group["lr"], "mul_"):  # a tensor that a captured graph reads: keep its address
                    group["lr"].mul_(factor)
                else:
                    group["lr"] = group["lr"] * factor
                rates.append(float(group["lr"]))
        return rates

    def request_checkpoint(self, path: Path | None = None) -> str:
        """Write modules and optimizers as state dicts, now: between two updates is a safe point.

        Raises ``UsageError`` where there is nothing to save, nowhere to put it, or a file already.
        """
        roots = self._view.roots()
        if not roots:
            raise UsageError("no module was found to save")
        step = self._session.step
        path = new_checkpoint(self._session, path, f"step-{step}.pt")
        path.parent.mkdir(parents=True, exist_ok=True)
        import torch

        content = {
            "step": step,
            "modules": [root.state_dict() for root in roots],
            "optimizers": [optimizer.state_dict() for optimizer in self._view.optimizers()],
        }
        save = getattr(torch.save, "__wrapped__", torch.save)  # our own checkpoint is no event of the script
        unfinished = path.with_suffix(path.suffix + ".part")
        save(content, unfinished)
        unfinished.replace(path)
        return str(path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """A plain loop has no logger of its own that we know of."""


def without_updates(known: Capabilities, why: str) -> Capabilities:
    """What is left to a trainer whose updates nobody sees."""
    unseen = (EventKind.BACKWARD_END, EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE)
    return replace(
        known,
        events=known.events - set(unseen),
        controls=known.controls - {"skip_update"},
        gaps={**known.gaps, **dict.fromkeys([kind.value for kind in unseen] + ["skip_update"], why)},
    )


def capabilities_of(trainer: str, gaps: Mapping[str, str] | None = None) -> Capabilities:
    return Capabilities(
        trainer=trainer,
        events=SCRIPT_EVENTS,
        controls=frozenset({"stop", "skip_update", "checkpoint", "scale_lr"}),
        gaps={**GAPS, "log": "a plain loop has no logger that is known here", **(gaps or {})},
    )
