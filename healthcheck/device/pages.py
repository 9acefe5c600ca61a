"""Pinned memory of the host, to which devices copy numbers or write them themselves, and which is used again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any


class Page:
    """Pinned memory for ``count`` float64 numbers; used again once nobody can ask for its numbers any more."""

    __slots__ = ("_spare", "address", "numbers", "tensor")

    def __init__(self, spare: list[tuple[Any, Any, int]], count: int) -> None:
        if spare:
            self.tensor, self.numbers, self.address = spare.pop()
        else:
            import torch

            with torch.inference_mode(False):  # it is used again in training
                self.tensor = torch.empty(count, dtype=torch.float64, pin_memory=True)
            self.address = self.tensor.data_ptr()
            memory: Any = ctypes.c_double * count
            self.numbers = memory.from_address(self.address)
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append((self.tensor, self.numbers, self.address))

    def __getitem__(self, key: Any) -> Any:
        return self.numbers[key]

    def __len__(self) -> int:
        return len(self.numbers)


class OwnPage:
    """Pinned memory of the host that a device writes itself: numbers, and then the mark of the launch that wrote them.

    :param count: float64 numbers.
    """

    __slots__ = ("address", "awaited", "holder", "mark", "numbers", "tensor")

    def __init__(self, count: int) -> None:
        import torch

        with torch.inference_mode(False):  # it is used again in training
            self.tensor = torch.zeros(count + 1, dtype=torch.float64, pin_memory=True)
        self.address = self.tensor.data_ptr()
        memory: Any = ctypes.c_double * count
        self.numbers: Any = memory.from_address(self.address)
        self.mark = ctypes.c_longlong.from_address(self.address + 8 * count)
        self.awaited = 0
        """The mark of the launch that wrote to it last, or will."""
        self.holder: Callable[[], Any] = lambda: None
        """The vector whose numbers these are, by weak reference."""

    @property
    def free(self) -> bool:
        """Whether nobody will ask for its numbers any more, and nothing will write to it."""
        holder = self.holder()
        return self.mark.value == self.awaited and (holder is None or holder.own_page is not self)
