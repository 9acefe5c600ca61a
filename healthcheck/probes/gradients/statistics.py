"""Statistics of all gradients in one pass, without ever waiting for a device.

On CUDA and ROCm a kernel of our own reads every gradient once (:mod:`healthcheck.probes.kernels.gradients`);
elsewhere, and for gradients that it cannot read, torch's foreach kernels measure the norms.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from healthcheck.probes.kernels.foreach import l2_norms, nonfinite_count, norm_of, plain_values, sharding_of
from healthcheck.probes.transfer.late import Element, LateTable
from healthcheck.probes.values import GRADIENT, on_host

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GradientPass", "GradientStats", "gradient_stats", "l2_norms", "nonfinite_count", "plain_values"]


_ADDRESS = operator.methodcaller("data_ptr")
_BYTES = operator.attrgetter("nbytes")


class GradientStats:
    """Statistics of the gradients that exist.

    ``indices`` are positions in the list of parameters that was given, in its order. On a device
    everything lies in ``table``: a total for each of ``fields``, then a row for each with a number per
    gradient; on the host ``table`` is None. Finite gradients always have finite norms: where a float32 sum of
    squares would overflow, a scaled or a float64 one takes its place.
    """

    __slots__ = ("_columns", "_norms", "fields", "indices", "lengths", "table")

    def __init__(
        self,
        indices: list[int],
        *,
        norms: Any = None,
        table: LateTable | None = None,
        fields: tuple[str, ...] = ("norm",),
        columns: list[int] | None = None,
        lengths: list[int] | None = None,
    ) -> None:
        self.indices = indices
        self.lengths = lengths or []
        """Elements that this rank holds of each gradient; only where there are counts."""
        self.table = table
        self.fields = fields
        self._norms = norms
        self._columns = columns

    @property
    def norms(self) -> Tensor:
        """L2 norm of each gradient: a float64 vector (float32 where the device has no float64)."""
        if self._norms is None:
            size, first = len(self.indices), len(self.fields)
            norms = self._vector()[first : first + size]
            self._norms = norms if self._columns is None else norms[_index(self._columns, norms)]
        return self._norms

    @property
    def total(self) -> Tensor:
        """L2 norm of all gradients together, 0-dim."""
        return self._vector()[0] if self.table is not None else norm_of(self.norms)

    def has(self, field: str) -> bool:
        return self.table is not None and field in self.fields

    def element(self, field: str, k: int | None = None) -> Element:
        """A statistic of the ``k``-th gradient of ``indices``, or of all together; only with a table."""
        assert self.table is not None
        return Element(self.table, self.position(field, k))

    def position(self, field: str, k: int | None = None) -> int:
        """Where in the table that statistic stands."""
        number = self.fields.index(field)
        if k is None:
            return number
        return len(self.fields) + number * len(self.indices) + (k if self._columns is None else self._columns[k])

    def _vector(self) -> Any:
        assert self.table is not None and self.table.tensor is not None
        return self.table.tensor


SMALL = 64 * 2**20
"""Bytes of gradients that may be held until the update is over."""


class HeldGradients(list[Any]):
    """Gradients that several look at under one event: while they are held, nobody makes their Python objects anew.

    ``small``: together they are no more than :data:`SMALL`, so that an optimizer that lets gradients go one by one while
    it steps has little to miss. It then finds the objects made as well, which saves it what we pay for them.
    """

    small = False


class GradientPass:
    """Measures the gradients of one list of parameters, step after step.

    What does not change from step to step (lengths, types, scratch memory) is made once. Parameters
    and gradients are not kept alive.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._present: list[int] = []
        self._absent: list[int] = []
        self._table: Any = None
        self._lengths: list[int] = []
        self._bytes: list[int] = []
        self._sharded: list[tuple[Any, list[int]]] = []
        self._known: list[int] = []
        self._every: list[int] = []
        self._same: Any = None
        self._small = False

    def measure(
        self, params: Sequence[Any], same: object = None, hold: HeldGradients | None = None
    ) -> GradientStats | None:
        """Statistics of the gradients that exist; None without any.

        :param hold: gets the list of gradients, for a caller under which others will ask for them too.
        :param same: an object that stands for this list of parameters: while it is the same object, the
            caller knows that the parameters are the same, and nothing is compared.

        Dense gradients of bf16, fp16, fp32 and float8 on one CUDA device take the kernel. Sparse ones
        count by their coalesced values, complex ones as pairs of reals, sharded ones (DTensor) by their
        local parts, reduced over the ranks that hold them: a collective, so call it on all of them.
        """
        addresses = self._addresses(params, same, hold)
        if addresses is None and not self._prepare(params):
            return gradient_stats(params)
        if addresses is None:
            addresses = self._addresses(params, same, hold)
            if addresses is None:
                return gradient_stats(params)
        if hold is not None:
            hold.small = self._small
        table = self._table.measure(addresses, final=not self._sharded)
        if self._sharded:
            _reduce(table.tensor, len(self._table.fields), self._sharded)
        columns = None if self._table.in_order else self._table.columns
        return GradientStats(
            self._present,
            table=table,
            fields=self._table.fields,
            columns=columns,
            lengths=self._lengths,
        )

    def _addresses(self, params: Sequence[Any], same: object, hold: HeldGradients | None) -> list[int] | None:
        """Where the gradients are now; None if the table does not fit them.

        A thousand gradients are asked one by one for nothing but what may differ, and in C where that is
        possible: on the step path a microsecond a gradient is a millisecond a step.
        """
        if self._table is None or len(params) != len(self._ids):
            return None
        if same is None or same is not self._same:
            if list(map(id, params)) != self._ids:
                return None
            self._same = same
        gradients = list(map(GRADIENT, params))
        if hold is not None:
            hold.append(gradients)
        if self._absent:
            if any(gradients[i] is not None for i in self._absent):
                return None
            gradients = [gradients[i] for i in self._present]
        try:
            if self._sharded:
                gradients = [g._local_tensor for g in gradients]
            if self._known and _all_at is not None and _all_at(gradients, self._known, self._every):
                return self._known
            addresses = list(map(_ADDRESS, gradients))
        except (AttributeError, RuntimeError, TypeError):  # a gradient is gone, or of another layout
            return None
        if addresses != self._known:
            if not self._table.fits(addresses) or self._bytes != list(map(_BYTES, gradients)):
                return None
            self._known = addresses
        return addresses

    def _prepare(self, params: Sequence[Any]) -> bool:
        """Make the table for the gradients that are there; False where the kernel cannot read them."""
        self._table, self._sharded, self._known = None, [], []
        present = [i for i, p in enumerate(params) if p.grad is not None]
        kernel = _kernel(params[present[0]].grad) if present else None
        if kernel is None:
            return False
        locals_, groups = [], dict[Any, list[int]]()
        for k, i in enumerate(present):
            gradient = params[i].grad
            if hasattr(gradient, "_local_tensor"):
                groups.setdefault(sharding_of(gradient), []).append(k)
                gradient = gradient._local_tensor
            locals_.append(gradient)
        home = locals_[0].device
        if 0 < sum(map(len, groups.values())) < len(present):
            return False  # sharded and plain ones together: the fallback sorts them
        if not all(g.device == home and kernel.usable(g) for g in locals_):
            return False
        self._table = kernel.GradientTable(locals_)
        self._ids, self._present = list(map(id, params)), present
        there = set(present)
        self._absent = [i for i in range(len(params)) if i not in there]
        self._lengths = [g.numel() for g in locals_]
        self._bytes = list(map(_BYTES, locals_))
        self._small = sum(self._bytes) <= SMALL
        self._every = list(range(len(locals_)))
        self._sharded = [(sharding, [self._table.columns[k] for k in members]) for sharding, members in groups.items()]
        return True


def gradient_stats(params: Sequence[Any], hold: HeldGradients | None = None) -> GradientStats | None:
    """The same through torch's foreach kernels, for any device and layout: norms only.

    :param hold: gets the gradients, for others who look at them in the same event.
    """
    gradients = list(map(GRADIENT, params))
    if hold is not None:
        hold.append(gradients)
    indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if not indices:
        return None
    norms = l2_norms(gradients if len(indices) == len(gradients) else [gradients[index] for index in indices])
    if on_host(norms):
        return GradientStats(indices, norms=norms)
    import torch

    together = torch.cat([norm_of(norms).reshape(1), norms])
    return GradientStats(indices, norms=norms, table=LateTable(together))


def _find_address_check() -> Any:
    """torch's own comparison of the addresses of a list of tensors with known ones, where it has one."""
    torch = sys.modules.get("torch")
    return getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None) if torch is not None else None


_all_at = None


def _kernel(gradient: Any) -> Any:
    """The kernel's module where the device is CUDA or ROCm and Triton is installed and works."""
    if gradient.device.type != "cuda" or _broken:
        return None
    global _all_at
    try:
        _all_at = _find_address_check()
        return importlib.import_module("healthcheck.probes.kernels.gradtable")
    except Exception as error:  # no Triton, or one that does not fit this torch
        _broken.append(repr(error))
        return None


_broken: list[str] = []
"""Why the kernel cannot be used in this process."""


def _index(columns: list[int], like: Any) -> Any:
    import torch

    return torch.tensor(columns).to(like.device, non_blocking=True)


def _reduce(vector: Any, fields: int, sharded: list[tuple[Any, list[int]]]) -> None:
    """Make the statistics of whole gradients of those of this rank's shards, in place.

    Only ranks along sharded dimensions of the mesh hold different parts; replicas count once.
    """
    import torch
    import torch.distributed as dist

    result = vector[fields:].view(fields, -1)
    for (mesh, placements), columns in sharded:
        every = len(columns) == result.shape[1]
        index = slice(None) if every else _index(columns, result)
        part = result[:, index]
        sums = torch.stack([part[0].square(), part[2], part[3]])
        largest = part[1].clone()
        for dimension, placement in enumerate(placements):
            if not placement.is_replicate():
                group = mesh.get_group(dimension)
                dist.all_reduce(sums, group=group)
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        zero = ((largest == 0) & (sums[1] == 0)).to(result.dtype)
        result[:, index] = torch.stack([sums[0].sqrt(), largest, sums[1], sums[2], zero])
    vector[:fields] = torch.stack([result[0].square().sum().sqrt(), result[1].max(), *result[2:].sum(1)])
