"""Which parameters are bad, after a hit: facts for messages. Reads values; never on the hot path."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

_KEPT = 32
"""Steps whose facts are kept: values from a device arrive that much later at most, or nearly so."""


class RecentGradients:
    """What is known of the gradients of the last steps, for the messages of other rules.

    One for the probes of a session: that of the gradients fills it, that of the loss reads it.
    """

    def __init__(self) -> None:
        self._facts: dict[int, Callable[[], Mapping[str, Any]]] = {}

    def remember(self, step: int, facts: Callable[[], Mapping[str, Any]]) -> None:
        """:param facts: called when a message needs them; must speak of that step, as the gradients were
        before clipping spread a NaN over all parameters.
        """
        self._facts[step] = facts
        if len(self._facts) > _KEPT:
            del self._facts[next(iter(self._facts))]

    def of(self, step: int) -> Callable[[], Mapping[str, Any]] | None:
        """The facts of a step, None if there are none (any more)."""
        return self._facts.get(step)


def bad_gradient_facts(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """``{"first": "head.scale, 1 of 64 values", "tensors": "1 of 24 gradients not finite"}``.

    ``first`` is the first in the order of the model, which need not be where it began.
    """
    with_gradient = [(name, p.grad) for name, p in named if p.grad is not None]
    return _facts(with_gradient, "gradients")


def bad_weight_facts(named: Iterable[tuple[str, Any]]) -> str:
    """``finite``, or ``3 of 24 tensors not finite, first head.weight``."""
    facts = _facts([(name, p) for name, p in named], "tensors")
    return f"{facts['tensors']}, first {facts['first']}" if facts else "finite"


def loss_facts(
    named: Sequence[tuple[str, Any]],
    known: Callable[[], Mapping[str, Any]] | None,
    *,
    late: bool = False,
    batch: Sequence[tuple[str, Any]] = (),
    cause: str = "",
) -> dict[str, Any]:
    """What is known beside a non-finite loss: bad inputs, bad gradients of that step, state of the weights.

    :param known: what is known of the gradients of that step (:class:`RecentGradients`).
    :param late: the loss came from a device; the gradients that are there now are of a later step.
    :param batch: tensors of that step's batch, by name.
    :param cause: what the graph of the loss showed.
    """
    facts: dict[str, Any] = {"cause": cause} if cause else {}
    bad_input = _facts([(name, tensor) for name, tensor in batch if tensor.is_floating_point()], "tensors")
    if bad_input:
        facts["input"] = f"the batch itself is not finite: {bad_input['first']}"
    if known is not None:
        facts |= {key: value for key, value in known().items() if key != "largest"}
    elif not late:
        facts |= bad_gradient_facts(named)
    facts["weights"] = bad_weight_facts(named)
    return facts


def _facts(named: Sequence[tuple[str, Any]], what: str) -> dict[str, Any]:
    import torch

    from healthcheck.probes.kernels.foreach import plain_values

    first, bad = "", 0
    with waiting_allowed():
        for name, tensor in named:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                values = plain_values(tensor)[0]
                count = int((~torch.isfinite(values)).sum())
                if count:
                    bad += 1
                    first = first or f"{name}, {count:,} of {values.numel():,} values"
    return {"first": first, "tensors": f"{bad:,} of {len(named):,} {what} not finite"} if bad else {}


@contextlib.contextmanager
def waiting_allowed() -> Iterator[None]:
    """For reads after a hit: a script that makes waits an error means its own, and those of healthy steps."""
    import torch

    if not torch.cuda.is_initialized():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    if not mode:  # nothing to allow, and setting it makes torch warn
        yield
        return
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
