"""Optimizers that step inside the backward pass, one for each parameter: the pass is the step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from healthcheck.probes.gradients.inner import InnerGradients, InnerPass
from healthcheck.probes.nograd import no_grad
from healthcheck.trainers.guarding import guarded
from healthcheck.trainers.modelview import FoundModel

if TYPE_CHECKING:
    from healthcheck.session import Session


class InnerUpdates:
    """The updates of one backward pass, made while others of its gradients do not exist yet.

    Each gradient is measured before it is gone; what they were together is known when the pass is over.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._gradients = InnerGradients(session.demand)
        self.first: weakref.ref[Any] | None = None
        """The optimizer that stepped first in this pass; None while none did."""

    def made(self, optimizer: Any, step: int) -> None:
        """An optimizer is about to use its gradients and to throw them away."""
        if self.first is None:
            self.first = weakref.ref(optimizer)
        with no_grad():
            guarded(self._session, self._gradients.take, optimizer, step)

    def end(self, view: FoundModel, step: int) -> tuple[Any, InnerPass | None]:
        """The pass is over. Returns the optimizer that stepped first, and what was measured of the gradients."""
        assert self.first is not None
        optimizer, self.first = self.first(), None
        with no_grad():
            found = guarded(self._session, self._gradients.result, view.named_parameters())
        return optimizer, None if found is None else InnerPass(step, *found)
