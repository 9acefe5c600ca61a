"""Numbers that may be tensors: told apart without importing torch.

Probes run where torch is loaded, but their modules are imported where it need not be.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
from collections.abc import Sequence
from typing import Any

from healthcheck.probes.transfer.late import Element, Late
from healthcheck.samples import Labels

GRADIENT = operator.attrgetter("grad")
IS_NONE = functools.partial(operator.is_, None)
"""For ``map`` over all parameters: nothing of it runs as Python."""


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a torch tensor. Never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def on_host(value: Any) -> bool:
    """Whether reading ``value`` costs no wait for a device."""
    if type(value) is float:
        return True
    if is_tensor(value):
        return bool(value.device.type == "cpu")
    return not isinstance(value, (Late, Element))


def scalar(value: Any) -> Any:
    """A number or 0-dim tensor that a sample may carry, or None if ``value`` is neither.

    Host values become floats; device tensors stay where they are.
    """
    if value is None or type(value) is float:
        return value
    if is_tensor(value):
        if value.numel() != 1 or value.is_complex():
            return None
        if value.requires_grad:
            value = value.detach()
        device = value.device.type
        if device == "cpu":
            return float(value)
        if device == "meta":
            return None
        return value.reshape(()) if value.dim() else value
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)):
        return float(value)
    item = getattr(value, "item", None)  # numpy scalars
    if callable(item):
        try:
            return float(item())
        except (TypeError, ValueError):
            return None
    return None


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


def spread(things: Sequence[Any], most: int) -> Sequence[Any]:
    """All, or ``most`` of them at even distances."""
    return things if len(things) <= most else [things[i * len(things) // most] for i in range(most)]


@functools.cache
def optimizer_labels(index: int) -> Labels:
    """No label for the first optimizer, ``optimizer=1`` for the second."""
    return (("optimizer", str(index)),) if index > 0 else ()


def with_label(labels: Labels, name: str, value: str) -> Labels:
    """``labels`` and one more, sorted as :data:`healthcheck.samples.Labels` asks."""
    return tuple(sorted((*labels, (name, value))))
