"""Checksums of many tensors, to the last bit, and without a wait: so that copies of them on other ranks can be compared.

The checksum of a tensor is the sum of its elements' bits as whole numbers, modulo 2**64. It does not depend on the order in
which a device adds them up, so copies that are equal to the last bit have equal sums on any device; other tensors have other
sums but for chance. A second sum, each element weighed by its position, tells a change of one element from one of many: where
one element differs by ``d`` in its bits the sums differ by ``d`` and ``position * d``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from healthcheck.device.tensors import dense, local_part, no_grad, on_host

_MODULUS = 1 << 64


class Sums:
    """Whole numbers that may still be on their way from a device: two's complement, 64 bits each.

    :param parts: ``(positions, vector)`` with one int64 vector for each device.
    :param count: of all numbers.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[int], Any]], count: int) -> None:
        self._count = count
        self._parts = [(positions, _on_its_way(vector)) for positions, vector in parts]

    def values(self) -> list[int] | None:
        """The numbers, from 0 to 2**64 - 1; None while a device has not delivered them. Never waits."""
        if any(done is not None and not done.query() for _, (_, done) in self._parts):
            return None
        found = [0] * self._count
        for positions, (vector, _) in self._parts:
            for position, value in zip(positions, vector.tolist(), strict=True):
                found[position] = value % _MODULUS
        return found


def _on_its_way(vector: Any) -> tuple[Any, Any]:
    """A copy on the host and the event that says when it is there; no event where it is there already."""
    import torch

    if on_host(vector):
        return vector, None
    if vector.device.type != "cuda":  # no pinned memory here: a wait, once in a check
        return vector.cpu(), None
    host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
    host.copy_(vector, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return host, done


def checksums(tensors: Sequence[Any], part: int = 0, parts: int = 1) -> Sums:
    """The sum of the bits of each tensor; of those without values here (meta, sparse, None) it is 0.

    Of sharded tensors that of this rank's shard.

    :param part: which of ``parts`` equal stretches of each tensor is summed up. All parts together are the whole tensor.
    """
    return _collected([None if t is None else bits_of(t) for t in tensors], part, parts, weighed=False)


def positional_sums(tensors: Sequence[Any]) -> Sums:
    """For each tensor two numbers: :func:`checksums` of all of it, and the same with elements weighed by their position."""
    plain = [None if t is None else bits_of(t) for t in tensors]
    return _collected([bits for bits in plain for _ in (0, 1)], 0, 1, weighed=True)


def _collected(found: Sequence[Any], part: int, parts: int, *, weighed: bool) -> Sums:
    import torch

    sums: dict[Any, tuple[list[int], list[Any]]] = {}
    with no_grad():
        for index, bits in enumerate(found):
            if bits is None or not bits.numel():
                continue
            if parts > 1:
                size = bits.numel()
                bits = bits[size * part // parts : size * (part + 1) // parts]
            if weighed and index % 2:
                bits = bits.to(torch.int64) * torch.arange(bits.numel(), device=bits.device)
            positions, values = sums.setdefault(bits.device, ([], []))
            positions.append(index)
            values.append(bits.sum(dtype=torch.int64))
        return Sums([(positions, torch.stack(values)) for positions, values in sums.values()], len(found))


def bits_of(tensor: Any) -> Any:
    """The elements of a tensor as a vector of whole numbers of the same width, without a copy where memory is dense; None of
    one that has no memory of its own.

    Dense tensors are read as they lie, so a permuted copy has other positions; copies made alike lie alike.
    """
    import torch

    try:
        local = local_part(tensor)
        if local.layout is not torch.strided or local.device.type == "meta":
            return None
        if local.is_complex():
            local = torch.view_as_real(local)
        flat = local.as_strided((local.numel(),), (1,), local.storage_offset()) if dense(local) else local.reshape(-1)
        if flat.dtype is torch.bool:
            return flat.view(torch.uint8)
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size())
        return None if width is None else flat.view(width)
    except (RuntimeError, NotImplementedError, AttributeError):  # a subclass that packs its values in its own way
        return None


def folded(values: Sequence[int], slots: int) -> list[int]:
    """Checksums in at most ``slots`` numbers of 32 bits, each of which stands for the same tensors at any time."""
    found = [0] * min(slots, len(values))
    for index, value in enumerate(values):
        slot = slot_of(index, len(values), slots)
        found[slot] = (found[slot] * 0x9E3779B1 + (value ^ value >> 32)) & 0xFFFFFFFF
    return found


def slot_of(index: int, count: int, slots: int) -> int:
    """In which of ``slots`` numbers of :func:`folded` a tensor is."""
    return index if count <= slots else index * slots // count


def one_element(sums: tuple[int, int], others: tuple[int, int], elements: int) -> int | None:
    """The position of the one element in which two copies of a tensor differ, None if they differ in more.

    :param sums: of the two copies, as :func:`positional_sums` gives them.
    :param elements: how many the tensor has.
    """
    apart, weighed = _signed(sums[0] - others[0]), _signed(sums[1] - others[1])
    if not apart or weighed % apart:
        return None
    position = weighed // apart
    return position if 0 <= position < elements else None


def flipped_bit(sums: tuple[int, int], others: tuple[int, int]) -> int | None:
    """Which bit of that element differs, from 0 for the lowest; None if it is more than one, as after further updates."""
    apart = abs(_signed(sums[0] - others[0]))
    return apart.bit_length() - 1 if apart and not apart & (apart - 1) else None


def _signed(number: int) -> int:
    number %= _MODULUS
    return number - _MODULUS if number >> 63 else number


def parts_for(elements: int, most: int) -> int:
    """Into how many parts tensors of so many elements are divided, so that one part has ``most`` at most."""
    return max(1, math.ceil(elements / most))
