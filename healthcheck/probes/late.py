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


class LateTable:
    """A device tensor that travels with the letter of its step, so that what is read later is of that step.

    Messages name parameters from per-parameter statistics. By the time an alert is raised, the next
    step has overwritten the gradients; the numbers that came with the value have not changed.
    """

    __slots__ = ("fetch", "host", "size", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.size = tensor.numel()
        self.host: Sequence[float] | None = None
        """All elements in row-major order, once they have arrived."""
        self.fetch: Callable[[], object] | None = None
        """Waits for a copy that is under way and calls :meth:`arrived`; set by the mailbox."""

    def numbers(self) -> Sequence[float]:
        """All elements; waits for the device if they were not shipped."""
        if self.host is None and self.fetch is not None:
            self.fetch()
        if self.host is None:
            assert self.tensor is not None
            self.host = self.tensor.detach().double().flatten().tolist()
            self.tensor = None
        return self.host

    def arrived(self, numbers: Sequence[float]) -> None:
        """The mailbox brought the elements."""
        self.host = numbers
        self.tensor = self.fetch = None

    def shipped(self, fetch: Callable[[], object]) -> None:
        """The copy is under way: let the device memory go at once, as the script's own kernels would.

        Held until the numbers arrive, a step or two later, it would make the allocator place the next
        step's gradients elsewhere.
        """
        self.fetch = fetch
        self.tensor = None


class Element:
    """One element of a table: ``position`` in row-major order."""

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
    :param parts: 0-dim device tensors, :class:`Element` of a table, or plain floats.
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

    def finish(self, numbers: list[float]) -> float:
        """The number, from those of the parts."""
        return numbers[0] if self.compute is None else float(self.compute(*numbers))

    def read(self) -> float:
        """The number now. Waits for the device."""
        numbers = []
        for part in self.parts:
            if isinstance(part, Element):
                numbers.append(part.table.numbers()[part.position])
            else:
                numbers.append(float(part))
        return self.finish(numbers)
