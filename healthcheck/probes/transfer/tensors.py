"""Tensors as probes look at them: recognised without importing torch, and never waited for.

Probes run where torch is loaded, but their modules are imported where it need not be.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import operator
import sys
from collections.abc import Sequence
from typing import Any

HOST = frozenset({"cpu"})
"""Types of device whose tensors are read without a wait."""
PINNED = frozenset({"cuda"})
"""Types of device that copy to pinned memory by themselves, while the host goes on. ROCm calls itself ``cuda``, too."""

GRADIENT = operator.attrgetter("grad")
ADDRESS = operator.methodcaller("data_ptr")
IS_NONE = functools.partial(operator.is_, None)
"""For ``map`` over all parameters: nothing of it runs as Python."""


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a torch tensor. Never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def on_host(tensor: Any) -> bool:
    """Whether reading this tensor costs no wait for a device."""
    return tensor.device.type in HOST


def local_part(tensor: Any) -> Any:
    """What this rank holds of a tensor, without its graph."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def dense(tensor: Any) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def evenly(things: Sequence[Any], most: int) -> Sequence[Any]:
    """All of them, or ``most`` at even distances."""
    return things if len(things) <= most else [things[i * len(things) // most] for i in range(most)]


class no_grad:
    """``torch.no_grad()`` at a fraction of its cost: it is entered in every step."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        import torch

        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: object) -> None:
        import torch

        torch._C._set_grad_enabled(self._before)


def live_objects(*kinds: str) -> list[Any]:
    """All objects of these torch classes that are alive: ``Module``, ``Optimizer``, ``LRScheduler``.

    Walks all that the garbage collector tracks: some 100 ms, so call it rarely. Asks ``type(obj)`` and never the
    object itself, so that proxies and lazy modules of other packages are not woken.
    """
    torch = sys.modules["torch"]
    classes = {
        "Module": torch.nn.Module,
        "Optimizer": torch.optim.Optimizer,
        "LRScheduler": torch.optim.lr_scheduler.LRScheduler,
    }
    bases = {classes[kind] for kind in kinds}
    wanted: dict[type, bool] = {}
    found = []
    for thing in gc.get_objects():
        cls = type(thing)
        hit = wanted.get(cls)
        if hit is None:
            hit = wanted[cls] = not bases.isdisjoint(cls.__mro__)
        if hit:
            found.append(thing)
    return found


def host_bytes(tensor: Any) -> bytes:
    """Elements of a contiguous tensor on the CPU as they lie in memory.

    ``tensor.numpy()`` would need numpy, which torch does not require; ``bytes(tensor.untyped_storage())`` takes
    11 us a byte and ignores where in its storage the tensor begins.

    Raises ``ValueError`` for a tensor without memory of its own (fake tensors, wrapper subclasses).
    """
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise ValueError(f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} holds no memory")
    return ctypes.string_at(address, tensor.numel() * tensor.element_size())
