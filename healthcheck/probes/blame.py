"""Which parameters are bad, after a hit: facts for messages. Reads values; never on the hot path."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BAD_GRADIENTS = "healthcheck.bad_gradients"
"""Key in ``event.user_state``: ``(step, facts)`` of the last non-finite gradients, as they were
before clipping spread them over all parameters."""


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


def loss_facts(named: Sequence[tuple[str, Any]], user_state: Mapping[str, Any], step: int) -> dict[str, Any]:
    """What is known beside a non-finite loss: bad gradients of that step, state of the weights."""
    known = user_state.get(BAD_GRADIENTS)
    facts = dict(known[1]) if known is not None and known[0] == step else bad_gradient_facts(named)
    facts["weights"] = bad_weight_facts(named)
    return facts


def _facts(named: Sequence[tuple[str, Any]], what: str) -> dict[str, Any]:
    import torch

    from healthcheck.probes.gradstats import plain_values

    first, bad = "", 0
    for name, tensor in named:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            values = plain_values(tensor)[0]
            count = int((~torch.isfinite(values)).sum())
            if count:
                bad += 1
                first = first or f"{name}, {count:,} of {values.numel():,} values"
    return {"first": first, "tensors": f"{bad:,} of {len(named):,} {what} not finite"} if bad else {}
