"""Numbers that are still on a device: what will be read, and what the host then makes of it.

A probe that needs ``max_norm / norm`` of a norm on the device could launch kernels for it. Each costs
the host some microseconds a step; the division after the number has arrived costs none. So a sample
may carry a :class:`Late`: the device values that it needs, and a function of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


ROOM = 32
"""Scalars for which there is room in front of a table, or on a pad of their own."""


class Room:
    """Device memory whose first elements are free for scalars.

    :param whole: float64 vector; a table may stand behind the room.
    :param size: of the room.
    """

    __slots__ = ("_slots", "size", "whole")

    def __init__(self, whole: Tensor, size: int) -> None:
        self.whole = whole
        self.size = size
        self._slots: list[Tensor] = []

    def slots(self, count: int) -> list[Tensor]:
        """The first ``count`` elements as 0-dim views."""
        while len(self._slots) < count:
            self._slots.append(self.whole[len(self._slots)])
        return self._slots[:count]


class LateTable:
    """A device vector that travels with the letter of its step, so that what is read later is of that step.

    Messages name parameters from per-parameter statistics. By the time an alert is raised, the next
    step has overwritten the gradients; the numbers that came with the value have not changed.

    :param tensor: float64 vector on the device.
    :param room: room in front of it in the same memory, where it was made with some: scalars of the step
        are written there, and all goes to the host in one copy.
    :param own_page: pinned memory to which the device writes the same numbers itself: they need no copy, only
        word that they are there.
    """

    __slots__ = ("_begin", "_fetch", "_page", "own_page", "room", "size", "tensor")

    def __init__(self, tensor: Tensor, room: Room | None = None, own_page: Any = None) -> None:
        self.tensor: Tensor | None = tensor
        self.room = room
        self.own_page: Any = own_page
        self.size = tensor.numel()
        self._page: Sequence[float] | None = None
        self._begin = 0
        self._fetch: Callable[[], object] | None = None

    def number(self, position: int) -> float:
        """One element; waits for the device if it was not shipped."""
        return self._there()[self._begin + position]

    def numbers(self) -> Sequence[float]:
        """All elements; waits for the device if they were not shipped."""
        page = self._there()
        return page[self._begin : self._begin + self.size]

    def _there(self) -> Sequence[float]:
        if self._page is None and self._fetch is not None:
            self._fetch()
        if self._page is None:
            assert self.tensor is not None
            self._page = self.tensor.detach().double().flatten().tolist()
            self.tensor = self.room = self.own_page = None
        return self._page

    def arrived(self, page: Sequence[float], begin: int) -> None:
        """The mailbox brought the elements: they stand in ``page`` from ``begin`` on."""
        self._page, self._begin = page, begin
        self.tensor = self.room = self.own_page = self._fetch = None

    def shipped(self, fetch: Callable[[], object]) -> None:
        """The copy is under way: let the device memory go at once, as the script's own kernels would.

        Held until the numbers arrive, a step or two later, it would make the allocator place the next
        step's gradients elsewhere.

        :param fetch: waits for the copy and calls :meth:`arrived`.
        """
        self._fetch = fetch
        self.tensor = self.room = None


class Element:
    """One element of a table, by its position."""

    __slots__ = ("position", "table")

    def __init__(self, table: LateTable, position: int) -> None:
        self.table = table
        self.position = position

    def on_device(self) -> Tensor:
        """The element as a 0-dim tensor, for comparisons that must not wait."""
        assert self.table.tensor is not None, "asked after the value had arrived"
        return self.table.tensor.view(-1)[self.position]


class Late:
    """A number that the host computes when its parts have arrived.

    :param compute: gets one float per part and returns a float; None for the only part itself.
    :param parts: 0-dim device tensors, :class:`Element` of a table, plain floats, or a whole
        :class:`LateTable`, for which ``compute`` gets the sequence of its numbers.
    :param device_form: the same number as a 0-dim device tensor, where a gate must compare it before
        the host can; None: that of the first part.
    """

    __slots__ = ("compute", "device_form", "parts")

    def __init__(
        self,
        compute: Callable[..., float] | None,
        *parts: Any,
        device_form: Callable[[], Tensor] | None = None,
    ) -> None:
        self.compute = compute
        self.parts = parts
        self.device_form = device_form

    def on_device(self) -> Any:
        """The number as a 0-dim tensor (or a float, if it is one). Never waits."""
        if self.device_form is not None:
            return self.device_form()
        part = self.parts[0]
        return part.on_device() if isinstance(part, Element) else part

    def finish(self, numbers: list[Any]) -> float:
        """The number, from those of the parts."""
        return numbers[0] if self.compute is None else float(self.compute(*numbers))

    def read(self) -> float:
        """The number now. Waits for the device."""
        numbers: list[Any] = []
        for part in self.parts:
            if isinstance(part, LateTable):
                numbers.append(part.numbers())
            elif isinstance(part, Element):
                numbers.append(part.table.number(part.position))
            else:
                numbers.append(float(part))
        return self.finish(numbers)
