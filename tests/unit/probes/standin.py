"""A stand-in for a device: CPU tensors that count as being elsewhere, and copies of them that arrive late.

Probes ask :func:`healthcheck.device.tensors.on_host` whether a tensor may be read. With
:func:`elsewhere` it always says no, and :class:`LateMemory` brings the numbers as a device would: as they were when the
copy was queued, a few looks later. What a card does besides (kernels of our own, streams) needs one: tests/gpu.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from healthcheck.device import tensors
from healthcheck.device.deferred import DeviceVector
from healthcheck.device.mailbox import PinnedMemory, Transfer


class NoReads(TorchDispatchMode):
    """Whoever reads a tensor inside (``.item()``, ``float()``, ``bool()``) has waited for the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if "_local_scalar_dense" in name or "is_nonzero" in name or "nonzero" in name:
            raise AssertionError(f"a probe waits for the device: {name}")
        return function(*args, **(kwargs or {}))


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on tensors of the CPU count as those of a device that copies to pinned memory by itself."""
    monkeypatch.setattr(tensors, "HOST", frozenset())
    monkeypatch.setattr(tensors, "PINNED", frozenset({"cpu"}))


class _Event:
    """Done when it has been asked often enough, or waited for."""

    def __init__(self, looks: int) -> None:
        self._left = looks

    def query(self) -> bool:
        self._left -= 1
        return self._left < 0

    def synchronize(self) -> None:
        self._left = 0


class LateMemory(PinnedMemory):
    """Sends as :class:`PinnedMemory` does, without a card.

    :param looks: at so many looks a copy is still under way.
    """

    def __init__(self, looks: int = 1) -> None:
        super().__init__()
        self._looks = looks
        self.copies = 0

    def send(self, transfer: Transfer) -> None:
        self.copies += 1
        parts = [tensor.detach().reshape(1) for tensor in transfer.tensors]
        parts += [vector.tensor.detach().reshape(-1) for vector in transfer.vectors if vector.tensor is not None]
        page = torch.cat([part.double() for part in parts]).tolist()
        transfer.sent(page, len(transfer.tensors), _Event(self._looks))

    def receive(self, transfer: Transfer) -> None:
        transfer.arrived()


class LatePage:
    """Memory of the host as a device writes it itself: the mark stands there when it has been looked at often enough, and not
    before those of earlier ones that are awaited."""

    awaited: ClassVar[list[LatePage]] = []

    def __init__(self, numbers: list[float], mark: int, looks: int) -> None:
        self.numbers, self._mark, self._left = numbers, mark, looks
        self.awaited.append(self)

    @property
    def mark(self) -> Any:
        for page in self.awaited[: self.awaited.index(self) + 1] if self in self.awaited else ():
            page._left -= 1
            if page._left >= 0:
                return SimpleNamespace(value=0)
            self.awaited.remove(page)
        return SimpleNamespace(value=self._mark)

    def wait(self) -> None:
        for page in self.awaited:
            page._left = 0


def written(numbers: list[float], looks: int = 1) -> DeviceVector:
    """A vector that its device writes to the host itself; at so many looks it is not there yet."""
    page = LatePage(numbers, 1, looks)
    vector = DeviceVector(torch.tensor(numbers, dtype=torch.float64), fetch=page.wait)
    vector.own_page, vector.mark = page, 1  # type: ignore[assignment]
    return vector
