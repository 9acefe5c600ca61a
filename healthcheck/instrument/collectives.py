"""Which collectives a rank enters and leaves, noted and never altered: for the wait in them, and for the moment at which a job hangs.

What Python code calls is seen (``dist.all_reduce`` and its relatives, what FSDP2 calls), and when a DDP wrapper begins its forward
pass. The reductions that DDP starts inside of a backward pass are made in C++ and are not.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from types import ModuleType
from typing import Any

from healthcheck.core.runinfo import Collectives

FUNCTIONS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all", "all_to_all_single", "gather", "scatter", "barrier", "monitored_barrier", "send", "recv",
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
)  # fmt: skip
"""Functions of ``torch.distributed`` at which ranks meet."""


def seen_collective(
    name: str, notes: Callable[[], Collectives | None], original: Callable[..., Any]
) -> Callable[..., Any]:
    """``original``, noted."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        seen = notes()
        if seen is None or seen.inside:
            return original(*args, **kwargs)
        given = args[0] if args else next(iter(kwargs.values()), None)
        seen.enter(name, _shape(given), monotonic())
        try:
            return original(*args, **kwargs)
        finally:
            seen.leave(monotonic())

    return collective


def seen_forward(original: Callable[..., Any], notes: Callable[[], Collectives | None]) -> Callable[..., Any]:
    """The forward pass of a wrapper, of which the beginning is noted."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen = notes()
        if seen is not None and not seen.forward_at:
            seen.forward_at = monotonic()
        return original(*args, **kwargs)

    return forward


def modules_of(distributed: ModuleType) -> tuple[ModuleType, ...]:
    """Where the functions are looked up: by user code, and by torch's own."""
    import torch.distributed

    return (torch.distributed, distributed)


def _shape(given: Any) -> tuple[str, tuple[int, ...]]:
    """Type and shape of what a collective is about; nothing for objects."""
    if isinstance(given, (list, tuple)) and given:
        given = given[0]
    if hasattr(given, "dtype") and hasattr(given, "shape"):
        return str(given.dtype).removeprefix("torch."), tuple(given.shape)
    return "", ()
