"""Deferred numbers: values that may still be on a device, written like floats.

A metric such as ``max_norm / norm`` is written once. Where the norm is a float, so is the result, at once. Where
it is on a device, the result is a :class:`Deferred`: it remembers what is to be calculated, and the host calculates
it when the copy of the norm has arrived, a step or two later. No kernel is launched for arithmetic on single numbers
(each costs the host some microseconds a step), and nothing waits.

A probe takes tensors in by :func:`number` (one element) and :func:`numbers` (a vector), calculates with operators,
with the functions below, or with a function of its own through :func:`calculate`, and gives the result to a sample.
The mailbox (:mod:`healthcheck.device.mailbox`) does the rest.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from healthcheck.device import tensors
from healthcheck.device.tensors import is_tensor, on_host

if TYPE_CHECKING:
    from torch import Tensor

    from healthcheck.device.pages import OwnPage


class Deferred:
    """A number that the host may not know yet.

    Operators give another deferred number; comparisons give one that is 1 or 0. It has no truth value and does
    not convert to float: both would have to wait for the device.
    """

    __slots__ = ()

    here = False
    """Whether the number has arrived, so that nobody waits for it; False also where nobody has found out."""

    def value(self) -> float | None:
        """The number, or None if there is none. Waits for the device if it has not been sent or is still under way."""
        raise NotImplementedError

    def on_device(self) -> Any:
        """The same as a 0-dim tensor, for comparisons on the device: never waits.

        A float if it has arrived already, None if it is calculated in a way that has no form on the device.
        """
        raise NotImplementedError

    def leaves(self) -> Sequence[DeviceScalar | DeviceVector]:
        """What has to come from the device before it can be calculated."""
        raise NotImplementedError

    def __bool__(self) -> bool:
        raise TypeError("a deferred number has no truth value before it has arrived: use where() or calculate()")

    def __add__(self, other: Number) -> Deferred:
        return _Calculation(_added, (self, other), _added)

    def __radd__(self, other: float) -> Deferred:
        return _Calculation(_added, (other, self), _added)

    def __sub__(self, other: Number) -> Deferred:
        return _Calculation(operator.sub, (self, other), operator.sub)

    def __rsub__(self, other: float) -> Deferred:
        return _Calculation(operator.sub, (other, self), operator.sub)

    def __mul__(self, other: Number) -> Deferred:
        return _Calculation(operator.mul, (self, other), operator.mul)

    def __rmul__(self, other: float) -> Deferred:
        return _Calculation(operator.mul, (other, self), operator.mul)

    def __truediv__(self, other: Number) -> Deferred:
        return _Calculation(_divided, (self, other), operator.truediv)

    def __rtruediv__(self, other: float) -> Deferred:
        return _Calculation(_divided, (other, self), operator.truediv)

    def __neg__(self) -> Deferred:
        return _Calculation(operator.neg, (self,), operator.neg)

    def __gt__(self, other: Number) -> Deferred:
        return _Calculation(operator.gt, (self, other), operator.gt)

    def __ge__(self, other: Number) -> Deferred:
        return _Calculation(operator.ge, (self, other), operator.ge)

    def __lt__(self, other: Number) -> Deferred:
        return _Calculation(operator.lt, (self, other), operator.lt)

    def __le__(self, other: Number) -> Deferred:
        return _Calculation(operator.le, (self, other), operator.le)


Number = float | Deferred
"""What a probe calculates with: a float where the host knows it, which stays a float."""


# -- what is on a device -------------------------------------------------------------------------------------


class DeviceScalar(Deferred):
    """One element on a device, which is sent to the host with the samples of its step.

    :param tensor: of one element, without a graph.
    """

    __slots__ = ("_fetch", "_index", "_page", "position", "tensor", "vector")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.vector: DeviceVector | None = None
        """Where a kernel has read it and put it among numbers of its own, at :attr:`position`: it travels with those then."""
        self.position = 0
        self._page: Any = None
        self._index = 0
        self._fetch: Callable[[], object] | None = None

    def value(self) -> float:
        if self.vector is not None:
            return self.vector.number(self.position)
        if self._fetch is not None:
            self._fetch()
        if self._page is None:
            assert self.tensor is not None
            return float(self.tensor)
        return float(self._page[self._index])

    @property
    def here(self) -> bool:  # type: ignore[override]
        if self.vector is not None:
            return self.vector.here
        return self._page is not None and self._fetch is None

    def on_device(self) -> Any:
        if self.vector is not None:
            return self.vector.element_on_device(self.position)
        return self.value() if self.tensor is None else self.tensor.reshape(())

    def leaves(self) -> Sequence[DeviceScalar | DeviceVector]:
        return (self,) if self.vector is None else (self.vector,)

    def sent(self, page: Any, index: int, fetch: Callable[[], object]) -> None:
        """It will stand at ``page[index]`` once the copy is done; device memory is let go now, for the reason given at
        :meth:`DeviceVector.sent`.

        :param fetch: waits for the copy, and calls :meth:`arrived`.
        """
        self._page, self._index, self._fetch = page, index, fetch
        self.tensor = None

    def arrived(self) -> None:
        self._fetch = None


class DeviceVector:
    """A vector on a device that travels with the samples of its step, so that what is read later is of that step.

    Messages name parameters from per-parameter statistics. By the time an alert is raised, the next step has
    overwritten the gradients; the numbers that came with the value have not changed.

    :param tensor: vector on the device.
    :param slots: free places in front of it in the same memory, where it was made with some: scalars of the step are
        written there, and all goes to the host in one copy.
    :param own_page: memory of the host to which the device writes the same numbers itself: nothing is copied, and nobody
        need be asked whether they are there.
    :param mark: what stands on that page once they are.
    :param fetch: waits until they are.
    """

    __slots__ = ("__weakref__", "_fetch", "floats", "mark", "own_page", "size", "slots", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        slots: Slots | None = None,
        own_page: OwnPage | None = None,
        mark: int = 0,
        fetch: Callable[[], object] | None = None,
    ) -> None:
        self.tensor: Tensor | None = tensor
        self.slots = slots
        self.own_page = own_page
        self.mark = mark
        self.size = int(tensor.numel())
        self.floats: list[float] | None = None
        """Its elements, once they have arrived and somebody has looked."""
        self._fetch = fetch

    def __len__(self) -> int:
        return self.size

    @property
    def here(self) -> bool:
        """Whether the elements have arrived, so that nobody waits for them."""
        return self.floats is not None or self.has_landed()

    def has_landed(self) -> bool:
        """Take the elements from the page that the device writes itself; False if they are not there yet."""
        page = self.own_page
        if page is None or page.mark.value != self.mark:
            return False
        self._take(page)
        return True

    def _take(self, page: OwnPage) -> None:
        self.floats = page.numbers[:]
        self.tensor = self.slots = self.own_page = self._fetch = None

    def __getitem__(self, position: int) -> Deferred:
        """One element, as a deferred number."""
        return Element(self, position)

    def leaves(self) -> Sequence[DeviceScalar | DeviceVector]:
        """As of a deferred number."""
        return (self,)

    def number(self, position: int) -> float:
        """One element; waits for the device if it has not arrived."""
        floats = self.floats
        return (self.numbers() if floats is None else floats)[position]

    def numbers(self) -> list[float]:
        """All elements; waits for the device if they have not arrived."""
        if self.floats is None and not self.has_landed() and self._fetch is not None:
            self._fetch()
            if self.own_page is not None:  # whoever has waited need not look for a mark
                self._take(self.own_page)
        if self.floats is None:
            assert self.tensor is not None
            self.floats = self.tensor.detach().flatten().tolist()
            self.tensor = self.slots = self.own_page = None
        assert self.floats is not None
        return self.floats

    def element_on_device(self, position: int) -> Any:
        """One element as a 0-dim tensor, or as a float where device memory was let go."""
        return self.number(position) if self.tensor is None else self.tensor.view(-1)[position]

    def sent(self, fetch: Callable[[], object]) -> None:
        """The copy is under way: device memory is let go now, as the script's own kernels would let it go.

        Held until the numbers arrive, a step or two later, it would make the allocator place the next step's
        gradients elsewhere.

        :param fetch: waits for the copy, and calls :meth:`arrived`.
        """
        self._fetch = fetch
        self.tensor = self.slots = None

    def arrived(self, page: Sequence[float], begin: int) -> None:
        """The elements stand in ``page`` from ``begin`` on."""
        self.floats = list(page[begin : begin + self.size])
        self.tensor = self.slots = self._fetch = None


class Element(Deferred):
    """One element of a vector, by its position."""

    __slots__ = ("position", "vector")

    def __init__(self, vector: DeviceVector, position: int) -> None:
        self.vector = vector
        self.position = position

    @property
    def here(self) -> bool:  # type: ignore[override]
        vector = self.vector
        return vector.floats is not None or vector.has_landed()

    def value(self) -> float:
        vector = self.vector
        floats = vector.floats  # as `DeviceVector.number` does, at one call less for each that is asked for
        return vector.number(self.position) if floats is None else floats[self.position]

    def on_device(self) -> Any:
        return self.vector.element_on_device(self.position)

    def leaves(self) -> Sequence[DeviceScalar | DeviceVector]:
        return (self.vector,)


SLOTS = 32
"""Scalars for which there is a place in front of a vector, or in memory of their own."""


class Slots:
    """Device memory whose first elements are free for scalars.

    :param whole: float64 vector; another vector may stand behind the slots.
    :param count: how many elements are free.
    """

    __slots__ = ("_views", "count", "whole")

    def __init__(self, whole: Tensor, count: int) -> None:
        self.whole = whole
        self.count = count
        self._views: list[Tensor] = []

    def first(self, count: int) -> list[Tensor]:
        """The first ``count`` elements as 0-dim views."""
        while len(self._views) < count:
            self._views.append(self.whole[len(self._views)])
        return self._views[:count]


# -- taking values in ----------------------------------------------------------------------------------------


def number(value: Any) -> Any:
    """``value`` as a float, as a deferred number where it is on a device, or None if it is no single number.

    Takes floats, ints, bools, tensors of one real element, numpy scalars and deferred numbers.
    """
    if value is None or type(value) is float or isinstance(value, Deferred):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        device = value.device.type
        if value.numel() != 1 or value.is_complex() or device == "meta":
            return None
        if value.requires_grad:
            value = value.detach()
        return float(value) if device in tensors.HOST else DeviceScalar(value)
    if isinstance(value, (int, float)):
        return float(value)
    item = getattr(value, "item", None)  # numpy scalars
    if callable(item):
        try:
            return float(item())
        except (TypeError, ValueError):
            return None
    return None


def numbers(tensor: Tensor) -> list[float] | DeviceVector:
    """The elements of a vector: floats where it is on the host. Both forms have a length and give one element by its
    position, and :func:`calculate` takes both."""
    return tensor.detach().flatten().tolist() if on_host(tensor) else DeviceVector(tensor)


def value_of(given: Any) -> Any:
    """The number behind a deferred one, for a message: waits if it has not arrived. A float is what it is."""
    return given.value() if isinstance(given, Deferred) else given


def values_of(given: list[float] | DeviceVector) -> Sequence[float]:
    """The same of a vector."""
    return given.numbers() if isinstance(given, DeviceVector) else given


# -- calculating ---------------------------------------------------------------------------------------------


def calculate(
    function: Callable[..., float | None], *operands: Any, on_device: Callable[..., Any] | None = None
) -> Any:
    """``function`` of these operands: at once where the host knows them all, else when they have arrived.

    :param function: gets a float for each number and a sequence of floats for each vector; returns a number, or
        None where there is nothing to say, which gives no sample. It is called once, and in the order of the steps if
        its result is given to a sample of each, so that it may keep something from one step to the next.
    :param operands: floats, deferred numbers, and what :func:`numbers` gives.
    :param on_device: the same function of tensors, where a rule may have to compare the result before the host
        knows it.
    """
    for operand in operands:
        if isinstance(operand, (Deferred, DeviceVector)):
            return _Calculation(function, operands, on_device)
    return function(*operands)


def where(condition: Any, value: Any, other: Any) -> Any:
    """``value`` where the condition is not 0, else ``other``."""
    if isinstance(condition, Deferred):
        return _Calculation(_chosen, (condition, value, other), _chosen_on_device)
    return value if condition else other


def maximum(one: Any, other: Any) -> Any:
    """The larger number; NaN if one is NaN."""
    return calculate(_larger, one, other, on_device=_larger_on_device)


def minimum(one: Any, other: Any) -> Any:
    """The smaller number; NaN if one is NaN."""
    return calculate(_smaller, one, other, on_device=_smaller_on_device)


def largest(given: Any) -> Any:
    """The largest number of a vector, or of a list of numbers; NaN if one is NaN."""
    return calculate(_largest_of, given) if isinstance(given, DeviceVector) else calculate(_largest, *given)


def smallest(given: Any) -> Any:
    """The smallest one; NaN if one is NaN."""
    return calculate(_smallest_of, given) if isinstance(given, DeviceVector) else calculate(_smallest, *given)


def count(flags: Any) -> Any:
    """How many numbers of a vector are not 0."""
    return calculate(_count, flags)


def quotient(part: Any, whole: Any) -> Any:
    """``part / whole`` as a device divides: by zero it is infinite, or NaN for ``0 / 0``."""
    return calculate(_divided, part, whole, on_device=operator.truediv)


def is_finite(value: Any) -> Any:
    """1 if it is neither NaN nor infinite, else 0."""
    return calculate(math.isfinite, value, on_device=_finite_on_device)


class _Calculation(Deferred):
    """A function of deferred numbers. Calculated once; the operands are let go then."""

    __slots__ = ("_function", "_known", "_on_device", "_operands")

    def __init__(
        self, function: Callable[..., Any] | None, operands: Sequence[Any], on_device: Callable[..., Any] | None
    ) -> None:
        self._function = function
        self._operands = operands
        self._on_device = on_device
        self._known: float | None = None

    def __add__(self, other: Number) -> Deferred:
        if self._function is _added:  # a sum of hundreds of micro-batches stays flat, and is no recursion
            return _Calculation(_added, (*self._operands, other), _added)
        return super().__add__(other)

    def value(self) -> float | None:
        if self._function is not None:
            # Let go of first: a function that raises is not called again, and pages are free for the next step.
            function, self._function = self._function, None
            operands, self._operands = list(map(_arrived, self._operands)), ()
            if not any(map(tensors.IS_NONE, operands)):
                result = function(*operands)
                self._known = None if result is None else float(result)
        return self._known

    def on_device(self) -> Any:
        if self._function is None:
            return self._known
        if self._on_device is None:
            return None
        operands = [o.on_device() if isinstance(o, Deferred) else o for o in self._operands]
        if any(o is None for o in operands):
            return None
        return self._on_device(*operands) if any(map(is_tensor, operands)) else self.value()

    def leaves(self) -> Sequence[DeviceScalar | DeviceVector]:
        found: list[DeviceScalar | DeviceVector] = []
        for operand in self._operands:
            if isinstance(operand, Deferred):
                found += operand.leaves()
            elif isinstance(operand, DeviceVector):
                found.append(operand)
        return found


def _arrived(operand: Any) -> Any:
    if isinstance(operand, Deferred):
        return operand.value()
    return operand.numbers() if isinstance(operand, DeviceVector) else operand


def _added(first: Any, *others: Any) -> Any:
    """Of floats, or of 0-dim tensors."""
    return sum(others, first)


def _divided(part: float, whole: float) -> float:
    try:
        return part / whole
    except ZeroDivisionError:
        return math.nan if part == 0 or math.isnan(part) else math.copysign(math.inf, part) * math.copysign(1, whole)


def _larger(one: float, other: float) -> float:
    return max(one, other) if one == one and other == other else math.nan


def _smaller(one: float, other: float) -> float:
    return min(one, other) if one == one and other == other else math.nan


def _largest(*given: float) -> float:
    return _largest_of(given)


def _largest_of(given: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, given)) else max(given)


def _smallest(*given: float) -> float:
    return _smallest_of(given)


def _smallest_of(given: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, given)) else min(given)


def _count(flags: Sequence[float]) -> float:
    return float(sum(map(bool, flags)))


def _chosen(condition: float, value: float, other: float) -> float:
    return value if condition else other


# The same of 0-dim tensors, of which some may be plain numbers. A number is never made a tensor: that is a copy.


def _larger_on_device(one: Any, other: Any) -> Any:
    if not is_tensor(one):
        one, other = other, one
    return one.maximum(other) if is_tensor(other) else one.clamp(min=other)


def _smaller_on_device(one: Any, other: Any) -> Any:
    if not is_tensor(one):
        one, other = other, one
    return one.minimum(other) if is_tensor(other) else one.clamp(max=other)


def _chosen_on_device(condition: Any, value: Any, other: Any) -> Any:
    import torch

    return torch.where(condition != 0, value, other)


def _finite_on_device(value: Any) -> Any:
    return value.isfinite()
