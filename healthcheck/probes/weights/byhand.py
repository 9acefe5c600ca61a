"""Weights that a script changes itself, without an optimizer: seen from a few elements."""

from __future__ import annotations

from typing import Any

from healthcheck.probes.nograd import no_grad
from healthcheck.probes.values import spread
from healthcheck.probes.weights.sampling import local_part, strided_view
from healthcheck.references import weak

TENSORS = 8
"""Tensors looked at, spread over the model: a script may train one end of it only."""
PER_TENSOR = 16
"""Elements of each."""


class HandUpdates:
    """Compares weights that have gradients with what they were at the look before.

    Only for loops whose optimizer never steps: ``p.data.add_(p.grad, alpha=-lr)`` is training, too, and torch tells
    nobody of it, neither by a hook nor by the version number of ``p``.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any]] = []
        """Each tensor, by weak reference, with its elements at the look before."""

    def changed(self, model: Any) -> Any:
        """Whether any of them changed since the last call.

        :param model: a :class:`healthcheck.events.ModelView`, just after a backward pass.
        :returns: a boolean, on the device of the weights where that is not the host's; None if no weight has a
            gradient, so that there is nothing to apply.
        """
        there = [p for _, p in model.named_parameters() if p.grad is not None]
        if not there:
            return None
        chosen = [*spread(there, TENSORS - 1), there[-1]]
        before, known = self._before, {id(tensor()): values for tensor, values in self._before}
        with no_grad():
            present = [(p, strided_view(local_part(p), PER_TENSOR).clone()) for p in dict.fromkeys(chosen)]
            self._before = [(weak(p), values) for p, values in present]
            # A NaN differs from itself, and would pass for a change.
            hits = [
                ((values != known[id(p)]) & (values == values)).any()
                for p, values in present
                if id(p) in known and known[id(p)].shape == values.shape
            ]
            if not hits:
                return bool(before)  # other tensors than before: the script made new ones
            found = hits[0]
            for hit in hits[1:]:
                found = found | hit.to(found.device)
            return found
