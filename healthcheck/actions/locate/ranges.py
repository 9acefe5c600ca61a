"""What is in a tensor, in numbers: how many values are not finite, and the range of those that are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

MAX_TENSORS = 16
"""Tensors looked at in one input or output: a cache of hundreds is not walked."""


@dataclass(frozen=True, slots=True)
class Range:
    """One floating point tensor. ``low`` and ``high`` are of its finite values, None if it has none."""

    place: str
    """Where in the arguments or the output: ``attention_mask``, ``[0]``; empty for a lone tensor."""
    shape: tuple[int, ...]
    dtype: str
    bad: int
    nan: int
    low: float | None
    high: float | None

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def absmax(self) -> float | None:
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))

    def counts(self) -> str:
        """``12 of 64 values NaN in float16``."""
        kind = "NaN" if self.nan == self.bad else "infinite" if not self.nan else "NaN or infinite"
        return f"{self.bad:,} of {self.numel:,} values {kind} in {self.dtype}"


def ranges(value: Any) -> list[Range]:
    """The floating point and complex tensors inside a value. Waits for the device."""
    return [range_of(tensor, place) for place, tensor in tensors(value) if is_real(tensor)]


def bad(found: list[Range]) -> Range | None:
    """The first of them that holds a non-finite value."""
    return next((one for one in found if one.bad), None)


def widest(found: list[Range]) -> Range | None:
    """That of the largest magnitude."""
    known = [one for one in found if one.absmax is not None]
    return max(known, key=lambda one: one.absmax or 0.0, default=None)


def short(number: float) -> str:
    """``65504.0`` -> ``6.55e4``."""
    digits, _, power = f"{number:.3g}".partition("e")
    return f"{digits}e{int(power)}" if power else digits


def is_real(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def range_of(tensor: Any, place: str = "") -> Range:
    """Numbers of one tensor; float8 is widened, complex numbers count as two reals, sparse ones by their values."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    with torch.no_grad():
        flat = tensor.detach()
        if hasattr(flat, "to_local"):
            flat = flat.to_local()
        if flat.layout is not torch.strided:
            flat = flat.coalesce().values() if flat.is_sparse else flat.to_dense()
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())
        if not flat.numel():
            return Range(place, shape, dtype, 0, 0, None, None)
        if flat.element_size() == 1:
            flat = flat.float()
        wide = torch.float32 if flat.device.type == "mps" else torch.float64
        finite = torch.isfinite(flat)
        low_end = torch.where(finite, flat, float("inf")).amin()
        high_end = torch.where(finite, flat, float("-inf")).amax()
        numbers = (finite.sum(), flat.isnan().sum(), low_end, high_end)
        read = torch.stack([number.to(wide) for number in numbers]).tolist()
    good, nan, low, high = int(read[0]), int(read[1]), read[2], read[3]
    return Range(place, shape, dtype, flat.numel() - good, nan, low if good else None, high if good else None)


def tensors(value: Any) -> Iterator[tuple[str, Any]]:
    """``(place, tensor)`` inside nested mappings, sequences and dataclasses; the first :data:`MAX_TENSORS`."""
    import torch

    left = MAX_TENSORS

    def walk(value: Any, place: str, depth: int) -> Iterator[tuple[str, Any]]:
        nonlocal left
        if isinstance(value, torch.Tensor):
            if left > 0:
                left -= 1
                yield place, value
        elif depth > 6 or left <= 0:
            return
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from walk(item, f"{place}.{key}" if place else str(key), depth + 1)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                yield from walk(item, f"{place}[{i}]", depth + 1)
        elif is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                name = f"{place}.{field.name}" if place else field.name
                yield from walk(getattr(value, field.name), name, depth + 1)

    return walk(value, "", 0)
