"""Tensors without a wait: whether they lie here, what they hold, and reductions over many of them by torch's own functions."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

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


def host_bytes(tensor: Any) -> bytes:
    """Elements of a contiguous tensor on the CPU as they lie in memory.

    ``tensor.numpy()`` would need numpy, which torch does not require; ``bytes(tensor.untyped_storage())`` takes
    11 us a byte and ignores where in its storage the tensor begins.

    Raises ``ValueError`` for a tensor without memory of its own (fake tensors, wrapper subclasses).
    """
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise ValueError(f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} holds no memory")
    import ctypes  # torch has loaded it; what reads a log does without

    return ctypes.string_at(address, tensor.numel() * tensor.element_size())


# --------------------------------------------------------------------------------------------------
# Norms and counts through torch's own kernels: for every device, type and layout.


_KIND = operator.attrgetter("device", "dtype", "layout")
_DETACHED = operator.methodcaller("detach")
ELEMENTS = operator.methodcaller("numel")

LARGE = 1 << 17
"""Elements from which on a sum of squares in float32 on the host is taken in rows: torch adds one to the next there, so that the
norm of ten million elements is 3.7e-4 off, and of this many 2e-6."""
_ROW = 4096


def l2_norms(tensors: Sequence[Any]) -> Tensor:
    """L2 norm of each tensor as one vector on the device of the first: float64, or float32 on MPS, which lacks it.

    Tensors may be dense, sparse, complex, of any precision, on several devices, or sharded (``DTensor``): then the
    norm is that of the whole tensor, by a collective on all ranks.
    """
    import torch

    plain: list[Any] = []
    groups: dict[tuple[Any, Any, Any], Sequence[int]] = {}
    kinds = set(map(_KIND, tensors))
    if len(kinds) == 1 and set(map(type, tensors)) == {torch.Tensor}:  # nearly always, and what follows costs something
        device, dtype, layout = kinds.pop()
        if layout is torch.strided and dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            plain, groups[device, dtype, None] = list(map(_DETACHED, tensors)), range(len(tensors))
    if not groups:
        plain, groups = _sorted_out(tensors)
    home = plain[0].device
    kind = torch.float32 if home.type == "mps" else torch.float64
    vectors: list[Any] = []
    order: list[int] = []
    for (device, dtype, sharding), members in groups.items():
        some = plain if len(groups) == 1 else [plain[i] for i in members]
        # On the host the sum is taken in float32 first and repeated in float64 only where it came out non-finite, since
        # the second costs ten times as much; devices are bound by their memory and take float64 at once.
        host = device.type in HOST
        narrow = dtype is not torch.float64 and (host or device.type == "mps")
        if host and narrow and max(map(ELEMENTS, some)) > LARGE:
            large = [k for k, tensor in enumerate(some) if tensor.numel() > LARGE and dense(tensor)]
            small = list(some)
            for k in large:
                small[k] = some[k].new_zeros(1)
            norms = torch.stack(torch._foreach_norm(small, 2, dtype=torch.float32)).double()
            for k in large:
                norms[k] = _norm_by_rows(some[k])
        else:
            norms = torch.stack(torch._foreach_norm(some, 2, dtype=torch.float32 if narrow else torch.float64))
        if host and narrow:
            norms = norms.double()
            if not bool(norms.isfinite().all()):
                for k in (~norms.isfinite()).nonzero().flatten().tolist():
                    norms[k] = torch.linalg.vector_norm(some[k], 2, dtype=torch.float64)
        if sharding is not None:
            norms = _over_shards(norms, sharding)
        vectors.append(norms.to(device=home, dtype=kind, non_blocking=True))
        order += members
    if len(vectors) == 1:
        return vectors[0]
    # Several types or devices: back into the order given.
    together = torch.empty(len(tensors), dtype=kind, device=home)
    together[torch.tensor(order).to(home, non_blocking=True)] = torch.cat(vectors)
    return together


def _norm_by_rows(tensor: Any) -> Tensor:
    """L2 norm of a large tensor on the host as float64, from those of rows in float32: one pass, to 1e-7."""
    import torch

    count = tensor.numel()
    whole = count - count % _ROW
    flat = tensor.as_strided((count,), (1,))
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), 2, dim=1, dtype=torch.float32).double()
    rest = torch.linalg.vector_norm(flat[whole:], 2, dtype=torch.float64)
    return torch.hypot(torch.linalg.vector_norm(rows, 2), rest)


def _sorted_out(tensors: Sequence[Any]) -> tuple[list[Any], dict[tuple[Any, Any, Any], Sequence[int]]]:
    """Plain values of all tensors, and the positions of those that can be reduced together, by device, type and
    sharding."""
    groups: dict[tuple[Any, Any, Any], list[int]] = {}
    plain: list[Any] = []
    for index, tensor in enumerate(tensors):
        local, sharded = plain_values(tensor)
        plain.append(local)
        sharding = None if sharded is None else sharding_of(sharded)
        groups.setdefault((local.device, local.dtype, sharding), []).append(index)
    return plain, dict(groups)


def nonfinite_counts(tensors: Sequence[Any]) -> Tensor:
    """How many elements of each tensor are NaN or infinite, as a vector on the device of the first.

    A few kernels per tensor: for use after a hit, or where a rule asks for the count. Of a sharded tensor this rank's
    part is counted.
    """
    import torch

    home = tensors[0].device
    counts = [(~torch.isfinite(plain_values(t)[0])).sum().to(home, non_blocking=True) for t in tensors]
    return torch.stack(counts)


def plain_values(tensor: Any) -> tuple[Any, Any]:
    """A dense real local tensor with the same L2 norm, and the sharded tensor it is a part of.

    float8 storage is widened, since no reduction is defined on it.
    """
    import torch

    sharded = None
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        sharded, tensor = tensor, tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        tensor = tensor.float()
    elif tensor.element_size() == 1:
        tensor = tensor.to(torch.bfloat16)
    return tensor, sharded


def norm_of(norms: Tensor) -> Tensor:
    """Norm of norms; scaled by the largest so that no square overflows in any precision."""
    import torch

    largest = norms.max()
    safe = torch.where((largest > 0) & torch.isfinite(largest), largest, torch.ones_like(largest))
    return torch.linalg.vector_norm(norms / safe, 2) * safe


def sharding_of(sharded: Any) -> Any:
    """What tensors must share to be reduced together: mesh and placements."""
    return sharded.device_mesh, tuple(sharded.placements)


def _over_shards(norms: Tensor, sharding: Any) -> Tensor:
    """Norms of the whole tensors from those of this rank's shards: a collective, on all ranks.

    Only ranks along sharded dimensions of the mesh hold different parts; replicas count once.
    """
    import torch.distributed as dist

    mesh, placements = sharding
    squared = norms.square()
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():
            dist.all_reduce(squared, group=mesh.get_group(dimension))
    return squared.sqrt()
