"""Statistics of all gradients in one pass, without ever waiting for a device.

On CUDA and ROCm a kernel of our own reads every gradient once (:mod:`healthcheck.device.gradient_kernel`);
elsewhere, and for gradients that it cannot read, torch's foreach kernels measure the norms.
"""

from __future__ import annotations

import importlib
import math
import operator
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from healthcheck.core.protocols import Demand
from healthcheck.device import tensors
from healthcheck.device.between import WORDS
from healthcheck.device.deferred import DeviceScalar, DeviceVector, Element, numbers
from healthcheck.device.tensors import (
    ADDRESS,
    ELEMENTS,
    GRADIENT,
    IS_NONE,
    LARGE,
    l2_norms,
    norm_of,
    plain_values,
    sharding_of,
)

_BYTES = operator.attrgetter("nbytes")
_ON_HOST = operator.attrgetter("is_cpu", "dtype")
_ITEM = operator.methodcaller("item")
_ANY = (-math.inf, math.inf)


class GradientStats:
    """Statistics of the gradients that exist, on the host or still on a device.

    Finite gradients always have finite norms: where a float32 sum of squares would overflow, a scaled or a float64 one
    takes its place.

    :param indices: positions of the gradients in the list of parameters that was given, in its order.
    :param numbers: a total for each of ``fields``, then for each a row with a number per gradient.
    :param fields: ``norm``; elements that are not finite (``nonfinite``); 1 where a gradient is zero throughout
        (``all_zero``), and what else the kernel counts.
    :param columns: where in a row each gradient stands, if not in the order of ``indices``.
    :param lengths: elements that this rank holds of each gradient; only where there are counts.
    :param words: ends with what was kept of the steps before that nobody read (:data:`~healthcheck.device.between.WORDS`).
    """

    __slots__ = (
        "_columns",
        "breach",
        "fields",
        "indices",
        "lengths",
        "nonfinite",
        "norm",
        "numbers",
        "words",
    )

    def __init__(
        self,
        indices: Sequence[int],
        numbers: list[float] | DeviceVector,
        fields: tuple[str, ...] = ("norm",),
        columns: list[int] | None = None,
        lengths: list[int] | None = None,
        words: DeviceVector | None = None,
    ) -> None:
        self.words = words
        self.indices = indices
        self.fields = fields
        self.lengths = lengths or []
        self.numbers = numbers
        self.norm: Any = numbers[0] if type(numbers) is list else None
        """L2 norm of all gradients together, where the host knows it; :meth:`total` where it need not."""
        self.nonfinite: Any = None
        """Elements that are not finite, where they were counted beside the numbers: a tensor."""
        self.breach: Any = None
        """As :attr:`healthcheck.core.rows.StepRow.breach`."""
        self._columns = columns

    def word(self, name: str) -> Any:
        """One of the running words, as a deferred number; only where there are :attr:`words`."""
        assert self.words is not None
        return self.words[len(self.words) - len(WORDS) + WORDS.index(name)]

    def has(self, field: str) -> bool:
        """Whether there is such a statistic."""
        return field in self.fields

    def total(self) -> Any:
        """L2 norm of all gradients together: a float or a deferred number."""
        return self.numbers[0] if self.norm is None else self.norm

    def number(self, field: str, k: int | None = None) -> Any:
        """A statistic of the ``k``-th gradient of ``indices``, or of all together: a float or a deferred number."""
        return self.numbers[self.position(field, k)]

    def row(self, field: str) -> list[Any]:
        """A statistic of every gradient of ``indices``: floats or deferred numbers."""
        if isinstance(self.numbers, list):
            return self.row_of(self.numbers, field)
        return [self.numbers[self.position(field, k)] for k in range(len(self.indices))]

    def row_of(self, numbers: Sequence[float], field: str) -> list[float]:
        """The same out of numbers that have arrived."""
        count = len(self.indices)
        first = len(self.fields) + self.fields.index(field) * count
        row = numbers[first : first + count]
        return list(row) if self._columns is None else [row[column] for column in self._columns]

    def position(self, field: str, k: int | None = None) -> int:
        """Where in :attr:`numbers` that statistic stands."""
        row = self.fields.index(field)
        if k is None:
            return row
        return len(self.fields) + row * len(self.indices) + (k if self._columns is None else self._columns[k])


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
        self._every: list[int] = []
        self._same: Any = None
        self._plain = False
        """Whether each parameter has a gradient, none is sharded, and torch compares addresses itself."""
        self._small = False

    def measure(
        self,
        params: Sequence[Any],
        same: object = None,
        hold: HeldGradients | None = None,
        loss: Any = None,
        given: Any = None,
        limits: tuple[float, float, float, float] | None = None,
    ) -> GradientStats | None:
        """Statistics of the gradients that exist; None without any.

        :param loss: of the step: a float or a deferred number; the kernel reads it where it is one element on its device.
        :param given: the loop's own norm, likewise.
        :param limits: as :attr:`healthcheck.core.rows.Update.limits`.
        :param hold: gets the list of gradients, for a caller under which others will ask for them too.
        :param same: an object that stands for this list of parameters: while it is the same object, the
            caller knows that the parameters are the same, and nothing is compared.

        Dense gradients of bf16, fp16, fp32 and float8 on one CUDA device take the kernel. Sparse ones
        count by their coalesced values, complex ones as pairs of reals, sharded ones (DTensor) by their
        local parts, reduced over the ranks that hold them: a collective, so call it on all of them.
        """
        table, place = self._table, None
        if self._plain and same is self._same and same is not None:
            # Nearly always so: each of the same parameters has a gradient, and all lie where they have lain before.
            gradients = list(map(GRADIENT, params))
            try:
                # Of another type they might lie where others have lain.
                for known in table.known if gradients[0].nbytes == self._bytes[0] else ():
                    if _all_at(gradients, known[0], self._every):
                        place = known
                        break
            except (AttributeError, RuntimeError, TypeError):
                place = None  # a gradient is gone, or of another layout
            if place is not None and hold is not None:
                hold.append(gradients)
        if place is None:
            place = self._place(params, same, hold)
            if place is None and self._prepare(params):
                place = self._place(params, same, hold)
            if place is None:
                return gradient_stats(params)
            table = self._table
        if hold is not None:
            hold.small = self._small
        columns = None if table.in_order else table.columns
        if self._sharded:  # what the whole is like is known only when all ranks have met
            vector = table.measure(place, False)
            _reduce(vector.tensor, len(table.fields), self._sharded)
            return GradientStats(self._present, vector, table.fields, columns, self._lengths)
        kinds, device = table.scalars, table.device
        scalar = loss.tensor if type(loss) is DeviceScalar else None
        if scalar is not None and (scalar.dtype not in kinds or scalar.device != device or scalar.is_neg()):
            scalar = None
        norm = given.tensor if type(given) is DeviceScalar else None
        if norm is not None and (norm.dtype not in kinds or norm.device != device or norm.is_neg()):
            norm = None
        vector = table.measure(place, True, scalar, norm, limits)
        stats = GradientStats(self._present, vector, table.fields, columns, self._lengths, vector)
        # The same numbers, which travel with those of the gradients. Their own memory is let go, as the loop lets it go.
        at = table.at_loss
        if scalar is not None:
            loss.vector, loss.position, loss.tensor = vector, at, None
        if norm is not None:
            given.vector, given.position, given.tensor = vector, at + 1, None
        if (
            limits is not None
            and (scalar is not None or loss is None or limits[:2] == _ANY)
            and (norm is not None or given is None)
        ):
            stats.breach = table.flag, Element(vector, at + 2)
        return stats

    def keep(self, params: Sequence[Any], step: int, same: object = None) -> bool:
        """Measure a step whose numbers nobody reads; the next :meth:`measure` says what it was like, with others like it.

        False where that cannot be: gradients are sharded (no rank knows their norm alone), the kernel cannot read them,
        or nothing was ever measured.
        """
        if self._table is None or self._sharded:
            return False
        place = self._place(params, same, None)
        if place is None and self._prepare(params) and not self._sharded:
            place = self._place(params, same, None)
        if place is None:
            return False
        self._table.keep(place, step)
        return True

    def _place(
        self, params: Sequence[Any], same: object, hold: HeldGradients | None
    ) -> tuple[list[int], Any, int] | None:
        """Where the gradients are now, as the table knows it; None if it does not fit them.

        A thousand gradients are asked one by one for nothing but what may differ, and in C where that is
        possible: on the step path a microsecond a gradient is a millisecond a step.
        """
        table = self._table
        if table is None or len(params) != len(self._ids):
            return None
        # Another list object, or a caller that has none: the parameters themselves are compared.
        if same is None or same is not self._same:
            if list(map(id, params)) != self._ids:
                return None
            self._same = same
        gradients = list(map(GRADIENT, params))
        if hold is not None:
            hold.append(gradients)
        if self._absent:
            # A gradient that was absent has come: the table has no place for it.
            if any(gradients[i] is not None for i in self._absent):
                return None
            gradients = [gradients[i] for i in self._present]
        try:
            if self._sharded:
                gradients = [g._local_tensor for g in gradients]
            alike = gradients[0].nbytes == self._bytes[0]
            if _all_at is not None and alike:
                for place in table.known:
                    if _all_at(gradients, place[0], self._every):
                        return place  # type: ignore[no-any-return]
            addresses = list(map(ADDRESS, gradients))
        except (AttributeError, RuntimeError, TypeError):  # a gradient is gone, or of another layout
            return None
        for place in table.known if alike else ():
            if place[0] == addresses:
                return place  # type: ignore[no-any-return]
        # A gradient that moved may have been made anew with another size or alignment.
        if not table.fits(addresses) or self._bytes != list(map(_BYTES, gradients)):
            return None
        return table.move(addresses)  # type: ignore[no-any-return]

    def _prepare(self, params: Sequence[Any]) -> bool:
        """Make the table for the gradients that are there; False where the kernel cannot read them."""
        # Anew from scratch: what was known is of other gradients. What was kept of steps that nobody read stays.
        words = None if self._table is None else self._table.words
        self._table, self._sharded, self._plain = None, [], False
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
        self._table = kernel.GradientTable(locals_, words)
        self._ids, self._present = list(map(id, params)), present
        there = set(present)
        self._absent = [i for i in range(len(params)) if i not in there]
        self._lengths = [g.numel() for g in locals_]
        self._bytes = list(map(_BYTES, locals_))
        self._small = sum(self._bytes) <= SMALL
        self._every = list(range(len(locals_)))
        self._sharded = [(sharding, [self._table.columns[k] for k in members]) for sharding, members in groups.items()]
        self._plain = not self._absent and not self._sharded and _all_at is not None
        return True


def gradient_stats(params: Sequence[Any], hold: HeldGradients | None = None) -> GradientStats | None:
    """The same through torch's foreach kernels, for any device and layout: norms, and counts on the host after a hit.

    :param hold: gets the gradients, for others who look at them in the same event.
    """
    import torch

    gradients = list(map(GRADIENT, params))
    if hold is not None:
        hold.append(gradients)
    indices: Sequence[int] = range(len(gradients))
    if any(map(IS_NONE, gradients)):
        indices = [index for index in indices if gradients[index] is not None]
        gradients = [gradients[index] for index in indices]
    if not gradients:
        return None
    # What they mostly are on a host: without the casts and checks of `l2_norms`, which take as long as the norms. A norm of
    # finite values whose squares overflow is infinite here: then `l2_norms` is asked.
    if (
        "cpu" in tensors.HOST
        and set(map(_ON_HOST, gradients)) == {(True, torch.float32)}
        and set(map(type, gradients)) == {torch.Tensor}
        and max(map(ELEMENTS, gradients)) <= LARGE
    ):
        try:
            norms = list(map(_ITEM, torch._foreach_norm(gradients, 2)))
            if math.isfinite(norm := math.hypot(*norms)):
                return GradientStats(indices, [norm, *norms])
        except RuntimeError:  # of a layout that has no such kernel
            pass
    vector = l2_norms(gradients)
    if vector.device.type not in tensors.HOST:
        return GradientStats(indices, DeviceVector(torch.cat([norm_of(vector).reshape(1), vector])))
    norms = vector.tolist()
    norm = math.hypot(*norms)  # scaled by itself: no square of a finite number overflows
    if math.isfinite(norm):
        return GradientStats(indices, [norm, *norms])
    return _counted(indices, gradients, norms)


def _counted(indices: Sequence[int], gradients: Sequence[Any], norms: list[float]) -> GradientStats:
    """With the number of elements that are not finite: read now, before clipping makes them all NaN."""
    import torch

    plain = [plain_values(gradient)[0] for gradient in gradients]
    counts = [float((~torch.isfinite(values)).sum()) for values in plain]
    norm = math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)
    given = [norm, sum(counts), *norms, *counts]
    return GradientStats(
        indices, given, fields=("norm", "nonfinite"), lengths=[int(values.numel()) for values in plain]
    )


_all_at: Any = None
"""torch's own comparison of the addresses of a list of tensors with known ones, where it has one."""
_broken: list[str] = []
"""Why the kernel cannot be used in this process."""


def _kernel(gradient: Any) -> Any:
    """The kernel's module where the device is CUDA or ROCm and Triton is installed and works."""
    if gradient.device.type != "cuda" or _broken:
        return None
    # The module is imported on first use: it needs Triton, and compiles nothing before its first launch.
    global _all_at
    try:
        _all_at = getattr(sys.modules["torch"]._C, "_tensors_data_ptrs_at_indices_equal", None)
        return importlib.import_module("healthcheck.device.gradient_kernel")
    except Exception as error:  # no Triton, or one that does not fit this torch
        _broken.append(repr(error))
        return None


def _index(columns: list[int], like: Any) -> Any:
    import torch

    return torch.tensor(columns).to(like.device, non_blocking=True)


def _reduce(vector: Any, fields: int, sharded: list[tuple[Any, list[int]]]) -> None:
    """Make the statistics of whole gradients of those of this rank's shards, in place.

    Only ranks along sharded dimensions of the mesh hold different parts; replicas count once.
    """
    import torch
    import torch.distributed as dist

    count = sum(len(columns) for _, columns in sharded)
    result = vector[fields : fields * (count + 1)].view(fields, -1)
    for (mesh, placements), columns in sharded:
        every = len(columns) == result.shape[1]
        index = slice(None) if every else _index(columns, result)
        part = result[:, index]
        # Squares of norms, counts of non-finite values and of zeros add up over shards; the largest value is a maximum.
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


_OF_NORMS = ("grad_norm", "grad_norm[]", "grads.zero", "grad.layer_ratio")


class InnerPass(NamedTuple):
    """What was measured of one backward pass whose gradients are gone."""

    step: int
    names: list[str]
    parameters: list[Any]
    statistics: GradientStats


class InnerGradients:
    """Statistics of gradients whose optimizers step inside the backward pass, measured one by one before each is gone.

    Keeps no gradient: that they need not all exist at once is why such optimizers are used. One reduction a parameter,
    a second where a rule asks for the count of non-finite values.
    """

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._params: list[Any] = []
        self._norms: list[Any] = []
        self._counts: list[Any] = []

    def take(self, optimizer: Any, step: int) -> None:
        """Measure what this optimizer is about to use and throw away."""
        import torch

        counted = self._demand.due("grad_nonfinite", step)
        if not counted and not any(self._demand.due(key, step) for key in _OF_NORMS):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, sharded = plain_values(parameter.grad)
                if sharded is not None:  # a collective here would meet others in another order
                    continue
                wide = torch.float32 if gradient.device.type == "mps" else torch.float64
                self._params.append(parameter)
                self._norms.append(torch.linalg.vector_norm(gradient, 2, dtype=wide))
                if counted:
                    self._counts.append((~torch.isfinite(gradient)).sum())

    def result(self, named: Any) -> tuple[list[str], list[Any], GradientStats] | None:
        """Names, parameters and statistics in the model's order, or None; forgets them.

        :param named: all ``(name, parameter)`` of the model.
        """
        params, norms, counts = self._params, self._norms, self._counts
        self._params, self._norms, self._counts = [], [], []
        if not params:
            return None
        import torch

        places = {id(p): (place, name) for place, (name, p) in enumerate(named)}
        found = [places.get(id(p), (len(places) + k, f"param{k}")) for k, p in enumerate(params)]
        # They came in the order of the backward pass; people know the model's.
        order = sorted(range(len(params)), key=lambda k: found[k][0])
        home = norms[0].device
        rows = [torch.stack([norms[k].to(home, non_blocking=True) for k in order])]
        totals, fields = [norm_of(rows[0])], ["norm"]
        if counts:
            rows.append(torch.stack([counts[k].to(home, non_blocking=True) for k in order]).to(rows[0].dtype))
            fields.append("nonfinite")
        given = numbers(torch.cat([torch.stack([*totals, *(row.sum() for row in rows[1:])]), *rows]))
        lengths = [params[k].numel() for k in order]
        stats = GradientStats(range(len(order)), given, fields=tuple(fields), lengths=lengths)
        return [found[k][1] for k in order], [params[k] for k in order], stats
