"""A few fixed elements of every tensor instead of a copy of the model.

Enough to tell whether weights move, and by how much, at a memory cost of a few hundred bytes a
tensor. Reading is one foreach copy per device.
"""

from __future__ import annotations

import importlib
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.device.deferred import DeviceVector, numbers
from healthcheck.device.tensors import ADDRESS, IS_NONE, dense, local_part, no_grad

PER_TENSOR = 64
"""Elements of one tensor. Over all sampled tensors that stays far under 64 MiB."""


ROWS = 6
"""Rows of a comparison, each with one number per tensor: squared change, squared size before, elements that
changed, elements with something to apply (a finite gradient, not zero), those among them that stayed,
and the largest gradient of such an element."""


_STRIDE = operator.methodcaller("stride")


@dataclass(slots=True)
class SampledRows:
    """Sampled values of the tensors of one device and precision, one row each.

    Rows of small tensors are filled up with zeros. ``indices`` are positions in the list that the
    sampler was made for.
    """

    indices: list[int]
    values: Any


@dataclass(slots=True)
class _Place:
    """Where the sampled elements of one parameter are found."""

    strides: tuple[int, ...]
    """Of what this rank holds of the parameter."""
    step: int
    """Distance from one sampled number to the next in memory, where that is dense."""
    count: int
    dense: bool
    plain: bool
    """Dense, real, and no shard: a gradient that lies as the parameter does is read in the same way."""
    stands_for: float
    """Elements for each sampled one."""


class ElementSampler:
    """Reads the same elements of the same parameters, and of their gradients, time and again.

    Values are widened to float32, which holds every bf16 and fp16 number exactly; float64 stays.
    """

    def __init__(self, params: Sequence[Any], per_tensor: int = PER_TENSOR) -> None:
        self.params = list(params)
        self.per_tensor = per_tensor
        self._places: dict[int, _Place] = {}
        by_kind: dict[tuple[Any, bool], list[int]] = {}
        for index, parameter in enumerate(self.params):
            local = local_part(parameter)
            if local.numel() and (local.is_floating_point() or local.is_complex()) and local.device.type != "meta":
                by_kind.setdefault((local.device, local.element_size() > 4), []).append(index)
                self._places[index] = _place(local, per_tensor, sharded=hasattr(parameter, "to_local"))
        self.groups: list[list[int]] = list(by_kind.values())
        self._members = [[self.params[i] for i in group] for group in self.groups]
        self._plain = [all(self._places[i].plain for i in group) for group in self.groups]
        self._views: dict[int, tuple[list[int], list[Any]]] = {}
        self._buffers: dict[tuple[str, int], tuple[Any, list[Any]]] = {}
        self._tables: dict[int, Any] = {}
        self._known: dict[tuple[str, int], list[int]] = {}

    def weights(self, role: str = "weights") -> list[SampledRows]:
        """Present values of all parameters. May overwrite what was read before in the same role."""
        return [self._read(role, n, members, self._weight_views) for n, members in enumerate(self._members)]

    def gradients(self, role: str = "gradients", of: Sequence[Any] | None = None) -> list[SampledRows]:
        """Present gradients at the same elements; zero where there is none, or a sparse one.

        :param of: the gradients of all parameters, where the caller has them at hand.
        """
        given = [p.grad for p in self.params] if of is None else of
        return [
            self._read(role, n, [given[i] for i in group], self._gradient_views) for n, group in enumerate(self.groups)
        ]

    def compare(
        self, before: list[SampledRows], gradients: list[SampledRows] | None = None
    ) -> list[list[float] | DeviceVector]:
        """Present values against ``before``: for each group a vector of :data:`ROWS` rows with one number per tensor.

        :param before: what :meth:`weights` gave.
        :param gradients: what :meth:`gradients` gave; without it the last three rows are zero.
        """
        found: list[list[float] | DeviceVector] = []
        for number, members in enumerate(self._members):
            table = self._table(number)
            addresses = None if table is None else self._where("before", number, members)
            rows = None if gradients is None else gradients[number].values
            if addresses is not None:
                vector = table.compare("before", addresses, before[number].values, rows)
            else:
                now = self._read("now", number, members, self._weight_views).values
                vector = _compared(now, before[number].values, rows)
            found.append(numbers(vector))
        return found

    def squares(self) -> list[list[float] | DeviceVector]:
        """For each group a vector that begins with the sum of squares of each tensor's sampled elements."""
        found: list[list[float] | DeviceVector] = []
        for number, members in enumerate(self._members):
            table = self._table(number)
            addresses = None if table is None else self._where("before", number, members)
            if addresses is not None:
                vector = table.compare("before", addresses, table.zeros(), None)
            else:
                vector = self._read("now", number, members, self._weight_views).values.square().sum(1)
            found.append(numbers(vector))
        return found

    def sizes(self, group: Sequence[int]) -> list[float]:
        """How many elements each sampled one of a tensor stands for."""
        return [self._places[i].stands_for for i in group]

    # -- through the kernel -----------------------------------------------------------

    def _read(
        self, role: str, number: int, tensors: list[Any], views: Callable[[int, list[Any]], list[Any]]
    ) -> SampledRows:
        table = self._table(number)
        if table is not None:
            addresses = self._where(role, number, tensors)
            if addresses is not None:
                return SampledRows(self.groups[number], table.read(role, addresses))
        return self._gather(role, number, views(number, tensors))

    def _where(self, role: str, number: int, tensors: list[Any]) -> list[int] | None:
        """Addresses of tensors that lie in memory as their parameters do; the list of the look before if all stayed."""
        known = self._known.get((role, number))
        try:
            addresses = list(map(ADDRESS, tensors))
        except (AttributeError, RuntimeError, NotImplementedError):  # None, or another layout
            return _addresses(tensors, self._strides(number))
        if addresses == known:
            return known
        found = _addresses(tensors, self._strides(number))
        if found is not None:
            self._known[role, number] = found
        return found

    def _strides(self, number: int) -> list[Any]:
        return [self._places[i].strides for i in self.groups[number]]

    def _table(self, number: int) -> Any:
        """The kernel's table for one group, or None where it cannot read its tensors."""
        if number not in self._tables:
            params, places = self._members[number], [self._places[i] for i in self.groups[number]]
            device = local_part(params[0]).device
            kernel = sample_kernel() if device.type == "cuda" and self._plain[number] else None
            kinds = [p.dtype for p in params]
            self._tables[number] = None
            if kernel is not None and all(kind in kernel.KINDS for kind in kinds):
                strides, counts = [place.step for place in places], [place.count for place in places]
                self._tables[number] = kernel.ElementTable(device, kinds, strides, counts, self.per_tensor)
        return self._tables[number]

    # -- through views ----------------------------------------------------------------

    def _gather(self, role: str, number: int, sources: list[Any]) -> SampledRows:
        import torch

        group = self.groups[number]
        known = self._buffers.get((role, number))
        if known is None:
            local = local_part(self.params[group[0]])
            wide = torch.float64 if local.element_size() > 4 else torch.float32
            rows = torch.zeros(len(group), self.per_tensor, dtype=wide, device=local.device)
            targets = [row[: self._places[index].count] for row, index in zip(rows.unbind(), group, strict=True)]
            known = self._buffers[role, number] = (rows, targets)
        rows, targets = known
        with no_grad():
            # Rows of absent gradients must be zero, not what was read there before.
            if any(map(IS_NONE, sources)):
                rows.zero_()
                there = [k for k, source in enumerate(sources) if source is not None]
                targets, sources = [targets[k] for k in there], [sources[k] for k in there]
            if sources:
                torch._foreach_copy_(targets, sources)
        return SampledRows(group, rows)

    def _weight_views(self, number: int, params: list[Any]) -> list[Any]:
        """The sampled elements of each parameter; made anew only where one lies somewhere else now."""
        there = params if self._plain[number] else list(map(local_part, params))
        addresses = list(map(ADDRESS, there))
        known = self._views.get(number)
        if known is not None and known[0] == addresses:
            return known[1]
        places = [self._places[i] for i in self.groups[number]]
        if self._plain[number]:
            found = zip(params, places, strict=True)
            views = [p.detach().as_strided((at.count,), (at.step,), p.storage_offset()) for p, at in found]
        else:
            views = [strided_view(local_part(p), self.per_tensor) for p in params]
        if self._plain[number] or all(at.dense for at in places):  # else they are copies
            self._views[number] = (addresses, views)
        return views

    def _gradient_views(self, number: int, gradients: list[Any]) -> list[Any]:
        import torch

        views: list[Any] = []
        for index, gradient in zip(self.groups[number], gradients, strict=True):
            place = self._places[index]
            if gradient is None:
                views.append(None)
            elif place.plain and gradient.layout is torch.strided and gradient.stride() == place.strides:
                there = gradient.detach()
                views.append(there.as_strided((place.count,), (place.step,), there.storage_offset()))
            else:
                views.append(self._laid_alike(torch, gradient, self.params[index]))
        return views

    def _laid_alike(self, torch: Any, gradient: Any, parameter: Any) -> Any:
        """The sampled elements of a gradient that lies otherwise than its parameter; None of one that has no layout."""
        gradient, local = local_part(gradient), local_part(parameter)
        if gradient.layout is not torch.strided:
            return None
        if gradient.stride() != local.stride() and gradient.shape == local.shape:
            # The same elements of both are wanted, so the gradient has to lie as the weight does.
            gradient = torch.empty_like(local).copy_(gradient)
        return strided_view(gradient, self.per_tensor)


class KeptSamplers:
    """The sampler of each optimizer, made anew where its parameters are others. No optimizer is kept alive, and once it is gone
    nor are they."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, ElementSampler] = weakref.WeakKeyDictionary()

    def of(self, optimizer: Any, params: Sequence[Any]) -> ElementSampler:
        """Of these parameters of an optimizer."""
        try:
            sampler = self._known.get(optimizer)
            if sampler is None or not same_objects(params, sampler.params):
                sampler = self._known[optimizer] = ElementSampler(params)
        except TypeError:  # an optimizer of which there are no weak references
            sampler = ElementSampler(params)
        return sampler


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists hold the very same tensors."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _compared(now: Any, before: Any, gradients: Any) -> Any:
    """The :data:`ROWS` of a comparison one after the other, by torch's own kernels: float64, except on MPS."""
    import torch

    # The same rows as the kernel makes, so that everything behind them is written once.
    delta = now - before
    if gradients is None:
        active = size = torch.zeros_like(delta, dtype=torch.bool)
    else:
        active = gradients.isfinite() & (gradients != 0)
        size = torch.where(active, gradients.abs(), 0.0)
    rows = [
        delta.square().sum(1),
        before.square().sum(1),
        (delta != 0).sum(1),
        active.sum(1),
        (active & (delta == 0)).sum(1),
        size.amax(1),
    ]
    wide = torch.float32 if now.device.type == "mps" else torch.float64
    return torch.cat([row.to(wide) for row in rows])


def _place(local: Any, most: int, *, sharded: bool) -> _Place:
    total = int(local.numel())
    real, together = not local.is_complex(), dense(local)
    step, count = _stride_and_count(total if real else 2 * total, most)
    return _Place(local.stride(), step, count, together, together and real and not sharded, total / min(total, most))


def strided_view(tensor: Any, count: int) -> Any:
    """At most ``count`` evenly spread elements as a vector; a view wherever memory is dense.

    The stride is odd, so that the elements do not all lie in the same column of a matrix.
    """
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    stride, count = _stride_and_count(int(tensor.numel()), count)
    if dense(tensor):
        return tensor.as_strided((count,), (stride,), tensor.storage_offset())
    return tensor.reshape(-1)[::stride][:count]


def _stride_and_count(total: int, count: int) -> tuple[int, int]:
    """Distance and number of at most ``count`` evenly spread elements of ``total``; the distance is odd."""
    count = min(count, total)
    stride = max(1, total // count) if count else 1
    return (stride - 1 if stride > 1 and stride % 2 == 0 else stride), count


def sample_kernel() -> Any:
    """The kernel's module where Triton is installed and works, else None."""
    try:
        return importlib.import_module("healthcheck.device.sample_kernel")
    except Exception:  # no Triton, or one that does not fit this torch
        return None


def _addresses(tensors: list[Any], strides: list[Any]) -> list[int] | None:
    """Where the tensors are, 0 for None; None if one does not lie in memory as its parameter does."""
    try:
        if not any(map(IS_NONE, tensors)):
            return list(map(ADDRESS, tensors)) if list(map(_STRIDE, tensors)) == strides else None
        if any(t is not None and t.stride() != s for t, s in zip(tensors, strides, strict=True)):
            return None
        return [0 if t is None else t.data_ptr() for t in tensors]
    except (RuntimeError, NotImplementedError):  # another layout
        return None
