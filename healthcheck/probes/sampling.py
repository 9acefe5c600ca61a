"""A few fixed elements of every tensor instead of a copy of the model.

Enough to tell whether weights move, and by how much, at a memory cost of a few hundred bytes a
tensor. Reading is one foreach copy per device.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_ADDRESS = operator.methodcaller("data_ptr")

PER_TENSOR = 64
"""Elements of one tensor. Over all sampled tensors that stays far under 64 MiB."""


@dataclass(slots=True)
class SampledRows:
    """Sampled values of the tensors of one device and precision, one row each.

    Rows of small tensors are filled up with zeros. ``indices`` are positions in the list that the
    sampler was made for.
    """

    indices: list[int]
    values: Any


class ElementSampler:
    """Reads the same elements of the same parameters, and of their gradients, time and again.

    Values are widened to float32, which holds every bf16 and fp16 number exactly; float64 stays.
    """

    def __init__(self, params: Sequence[Any], per_tensor: int = PER_TENSOR) -> None:
        self.params = list(params)
        self.per_tensor = per_tensor
        self.groups: list[list[int]] = []
        by_kind: dict[tuple[Any, bool], list[int]] = {}
        for index, parameter in enumerate(self.params):
            local = local_part(parameter)
            if local.numel() and (local.is_floating_point() or local.is_complex()) and local.device.type != "meta":
                by_kind.setdefault((local.device, local.element_size() > 4), []).append(index)
        self.groups = list(by_kind.values())
        self._views: dict[int, tuple[int, Any]] = {}
        self._buffers: dict[tuple[str, int], tuple[Any, list[Any]]] = {}
        self._tables: dict[int, Any] = {}
        self._shapes: dict[int, list[Any]] = {}
        self._known: dict[tuple[str, int], list[int]] = {}

    def weights(self, role: str = "weights") -> list[SampledRows]:
        """Present values of all parameters. May overwrite what was read before in the same role."""
        return [
            self._read(role, n, [self.params[i] for i in group], self._weight) for n, group in enumerate(self.groups)
        ]

    def gradients(self, role: str = "gradients", of: Sequence[Any] | None = None) -> list[SampledRows]:
        """Present gradients at the same elements; zero where there is none, or a sparse one.

        :param of: the gradients of all parameters, where the caller has them at hand.
        """
        given = [p.grad for p in self.params] if of is None else of
        return [self._read(role, n, [given[i] for i in group], self._gradient) for n, group in enumerate(self.groups)]

    def compare(self, before: list[SampledRows], gradients: list[SampledRows] | None) -> list[Any] | None:
        """Present values against ``before``, summed up on the device: a vector for each group as in
        :data:`healthcheck.probes.moved.ROWS`. None where the kernel cannot read all of them."""
        found = []
        for number, group in enumerate(self.groups):
            table = self._table(number)
            addresses = None
            if table is not None:
                addresses = self._where("before", number, [self.params[i] for i in group])
            if table is None or addresses is None:
                return None
            rows = None if gradients is None else gradients[number].values
            found.append(table.compare("before", addresses, before[number].values, rows))
        return found

    def _read(self, role: str, number: int, tensors: list[Any], view: Callable[[int], Any]) -> SampledRows:
        table = self._table(number)
        if table is not None:
            addresses = self._where(role, number, tensors)
            if addresses is not None:
                return SampledRows(self.groups[number], table.read(role, addresses))
        return self._gather(role, number, [view(i) for i in self.groups[number]])

    def squares(self) -> list[Any] | None:
        """Sum of squares of the sampled elements of each tensor, on the device: the first part of a vector for each
        group as :meth:`compare` gives it. None where the kernel cannot read all of them."""
        found = []
        for number, group in enumerate(self.groups):
            table = self._table(number)
            addresses = None if table is None else self._where("before", number, [self.params[i] for i in group])
            if addresses is None:
                return None
            found.append(table.compare("before", addresses, table.zeros(), None))
        return found

    def _where(self, role: str, number: int, tensors: list[Any]) -> list[int] | None:
        """Addresses of tensors that lie in memory as their parameters do; the list of the look before if all stayed."""
        known = self._known.get((role, number))
        try:
            addresses = list(map(_ADDRESS, tensors))
        except (AttributeError, RuntimeError, NotImplementedError):  # None, or another layout
            return _addresses(tensors, self._shapes[number])
        if addresses == known:
            return known
        found = _addresses(tensors, self._shapes[number])
        if found is not None:
            self._known[role, number] = found
        return found

    def _table(self, number: int) -> Any:
        """The kernel's table for one group, or None where it cannot read its tensors."""
        if number not in self._tables:
            group = self.groups[number]
            first = local_part(self.params[group[0]])
            kernel = sample_kernel() if first.device.type == "cuda" else None
            params = [self.params[i] for i in group]
            self._tables[number] = None
            if kernel is not None and all(
                p.dtype in kernel.KINDS and not hasattr(p, "to_local") and dense(p) for p in params
            ):
                strides, counts = zip(*(spread(p.numel(), self.per_tensor) for p in params), strict=True)
                kinds = [p.dtype for p in params]
                self._tables[number] = kernel.ElementTable(first.device, kinds, strides, counts, self.per_tensor)
                self._shapes[number] = [p.stride() for p in params]
        return self._tables[number]

    def sizes(self, group: Sequence[int]) -> list[float]:
        """How many elements each sampled one of a tensor stands for."""
        counts = [local_part(self.params[i]).numel() for i in group]
        return [count / min(count, self.per_tensor) for count in counts]

    def _gather(self, role: str, number: int, sources: list[Any]) -> SampledRows:
        import torch

        group = self.groups[number]
        known = self._buffers.get((role, number))
        if known is None:
            local = local_part(self.params[group[0]])
            wide = torch.float64 if local.element_size() > 4 else torch.float32
            rows = torch.zeros(len(group), self.per_tensor, dtype=wide, device=local.device)
            targets = [row[: self._count(index)] for row, index in zip(rows, group, strict=True)]
            known = self._buffers[role, number] = (rows, targets)
        rows, targets = known
        there = [k for k, source in enumerate(sources) if source is not None]
        with torch.no_grad():
            if len(there) < len(sources):
                rows.zero_()
            if there:
                torch._foreach_copy_([targets[k] for k in there], [sources[k] for k in there])
        return SampledRows(group, rows)

    def _count(self, index: int) -> int:
        local = local_part(self.params[index])
        return min(self.per_tensor, int(local.numel()) * (2 if local.is_complex() else 1))

    def _weight(self, index: int) -> Any:
        local = local_part(self.params[index])
        known = self._views.get(index)
        if known is not None and known[0] == local.data_ptr():
            return known[1]
        view = strided_view(local, self.per_tensor)
        self._views[index] = (local.data_ptr(), view)
        return view

    def _gradient(self, index: int) -> Any:
        import torch

        gradient = self.params[index].grad
        if gradient is None:
            return None
        gradient, local = local_part(gradient), local_part(self.params[index])
        if gradient.layout is not torch.strided:
            return None
        if gradient.stride() != local.stride() and gradient.shape == local.shape:
            # The same elements of both are wanted, so the gradient has to lie as the weight does.
            gradient = torch.empty_like(local).copy_(gradient)
        return strided_view(gradient, self.per_tensor)


def local_part(tensor: Any) -> Any:
    """What this rank holds of a tensor, without its graph."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def strided_view(tensor: Any, count: int) -> Any:
    """At most ``count`` evenly spread elements as a vector; a view wherever memory is dense.

    The stride is odd, so that the elements do not all lie in the same column of a matrix.
    """
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    stride, count = spread(int(tensor.numel()), count)
    if dense(tensor):
        return tensor.as_strided((count,), (stride,), tensor.storage_offset())
    return tensor.reshape(-1)[::stride][:count]


def spread(total: int, count: int) -> tuple[int, int]:
    """Distance and number of at most ``count`` evenly spread elements of ``total``; the distance is odd."""
    count = min(count, total)
    stride = max(1, total // count) if count else 1
    return (stride - 1 if stride > 1 and stride % 2 == 0 else stride), count


def sample_kernel() -> Any:
    """The kernel's module where Triton is installed and works, else None."""
    try:
        return importlib.import_module("healthcheck.probes.samplekernel")
    except Exception:  # no Triton, or one that does not fit this torch
        return None


def _addresses(tensors: list[Any], strides: list[Any]) -> list[int] | None:
    """Where the tensors are, 0 for None; None if one does not lie in memory as its parameter does."""
    try:
        if any(t is not None and t.stride() != s for t, s in zip(tensors, strides, strict=True)):
            return None
        return [0 if t is None else t.data_ptr() for t in tensors]
    except (RuntimeError, NotImplementedError):  # another layout
        return None


def dense(tensor: Any) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
