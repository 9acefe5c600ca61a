"""Tensors in numbers, for evidence: a batch, the parameters and their gradients, the values of one tensor."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from healthcheck.core.events import ModelView
from healthcheck.core.text import encode_number
from healthcheck.device.tensors import host_bytes

MAX_LEAVES = 64
MAX_IDS = 256
HASHED_BYTES = 64 * 2**20

_ID_NAMES = frozenset(
    {
        "id",
        "ids",
        "index",
        "indices",
        "idx",
        "sample_id",
        "sample_ids",
        "example_id",
        "example_ids",
        "uid",
        "uids",
        "guid",
        "guids",
    }
)


def describe_batch(batch: Any) -> dict[str, Any]:
    """One entry per tensor or value of the batch, plus ``sample_ids`` where the loader gives them."""
    described: dict[str, Any] = {"leaves": []}
    ids: dict[str, Any] = {}
    for count, (path, leaf) in enumerate(_leaves(batch)):
        if count == MAX_LEAVES:
            described["more"] = f"only the first {MAX_LEAVES} are described"
            break
        described["leaves"].append({"path": path, **_describe(leaf)})
        name = path.rsplit(".", 1)[-1].split("[")[0].lower()
        if name in _ID_NAMES:
            ids[path] = _ids(leaf)
    found = {path: value for path, value in ids.items() if value is not None}
    if found:
        described["sample_ids"] = found
    return described


def write_contents(batch: Any, add: Callable[[str, str, Callable[[], str | bytes | None]], None]) -> None:
    """Raw little-endian bytes per tensor, with a list of shapes and dtypes: loads without unpickling."""
    index: list[dict[str, Any]] = []
    for number, (path, leaf) in enumerate(_leaves(batch)):
        if number == MAX_LEAVES:
            break
        entry: dict[str, Any] = {"path": path}
        if _is_tensor(leaf):
            name = f"batch/{number:03d}.bin"
            entry |= {"file": name, "shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
            add(name, f"contents of {path or 'the batch'}", lambda leaf=leaf: _bytes(leaf))  # type: ignore[misc]
        elif isinstance(leaf, float):
            entry["value"] = encode_number(leaf)
        else:
            entry["value"] = leaf if isinstance(leaf, (str, int, bool)) or leaf is None else str(leaf)
        index.append(entry)
    add("batch/index.json", "which file holds what", lambda: json.dumps(index, indent=1) + "\n")


def _leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values inside nested mappings, sequences and dataclasses, with their path."""
    if depth > 8:
        yield path, f"<nested deeper than 8: {type(value).__name__}>"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, (list, tuple)) and not _is_plain(value):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]", depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}" if path else field.name, depth + 1)
    else:
        yield path, value


def _is_plain(value: list[Any] | tuple[Any, ...]) -> bool:
    """A list of numbers or strings is one leaf, not hundreds."""
    return len(value) > 0 and all(isinstance(item, (str, int, float, bool)) for item in value)


def _is_tensor(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, torch.Tensor)


def _describe(leaf: Any) -> dict[str, Any]:
    if _is_tensor(leaf):
        return _describe_tensor(leaf)
    if isinstance(leaf, (bool, int, float)):
        return {"type": type(leaf).__name__}
    if isinstance(leaf, (str, bytes)):
        data = leaf.encode() if isinstance(leaf, str) else leaf
        return {"type": type(leaf).__name__, "length": len(leaf), "sha256": hashlib.sha256(data).hexdigest()}
    if isinstance(leaf, (list, tuple)):
        text = json.dumps(list(leaf), default=str)
        return {"type": f"{type(leaf).__name__} of {type(leaf[0]).__name__ if leaf else 'nothing'}", "length": len(leaf),
                "sha256": hashlib.sha256(text.encode()).hexdigest()}  # fmt: skip
    return {"type": type(leaf).__name__}


def _describe_tensor(tensor: Any) -> dict[str, Any]:
    import torch

    entry: dict[str, Any] = {
        "type": "tensor",
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
    }
    with torch.no_grad():
        tensor = tensor.detach()
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
            entry["shard"] = "local"
        if tensor.layout is not torch.strided:
            return {**entry, "layout": str(tensor.layout)}
        if tensor.numel() and not tensor.is_complex():
            finite = torch.isfinite(tensor)
            entry["nonfinite"] = int((~finite).sum())
            values = tensor[finite].to(torch.float64 if tensor.device.type == "cpu" else torch.float32)
            if values.numel():
                low, high = torch.aminmax(values)
                entry |= {"min": float(low), "max": float(high), "mean": encode_number(float(values.mean()))}
        data = _bytes(tensor, HASHED_BYTES)
        entry["sha256"] = hashlib.sha256(data).hexdigest()
        if tensor.numel() * tensor.element_size() > HASHED_BYTES:
            entry["sha256_of"] = f"the first {HASHED_BYTES:,} bytes"
    return entry


def _bytes(tensor: Any, limit: int | None = None) -> bytes:
    import torch

    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if limit is not None:
        flat = flat[: max(1, limit // max(1, flat.element_size()))]
    if flat.dtype is torch.bool:
        flat = flat.to(torch.uint8)
    return host_bytes(flat.cpu())


def _ids(leaf: Any) -> list[Any] | None:
    """Identifiers as the loader gave them, if that is what they are: whole numbers or strings."""
    if _is_tensor(leaf):
        if leaf.is_floating_point() or leaf.is_complex():
            return None
        return list(leaf.detach().reshape(-1)[:MAX_IDS].tolist())
    if isinstance(leaf, (list, tuple)):
        return [item if isinstance(item, int) else str(item)[:200] for item in leaf[:MAX_IDS]]
    return [leaf] if isinstance(leaf, (int, str)) else None


# --------------------------------------------------------------------------------------------------
# Norm and non-finite count of every parameter and its gradient.
#
# Reads in chunks: per parameter a handful of device kernels, per chunk one read. Under FSDP the
# numbers are of the local shard, since a full norm would need the other ranks.


MAX_ROWS = 20_000
_CHUNK = 256

_HEADER = (
    "name",
    "shape",
    "dtype",
    "trainable",
    "weight_norm",
    "weight_nonfinite",
    "grad_norm",
    "grad_nonfinite",
    "shard",
)


def parameter_rows(model: ModelView) -> str:
    """CSV text. Norms are L2 over the finite elements, so that one NaN does not hide the rest."""
    named = list(model.named_parameters())
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(_HEADER)
    for start in range(0, min(len(named), MAX_ROWS), _CHUNK):
        table.writerows(_rows(named[start : start + _CHUNK]))
    if len(named) > MAX_ROWS:
        table.writerow([f"... {len(named) - MAX_ROWS:,} more", *[""] * (len(_HEADER) - 1)])
    return out.getvalue()


def _rows(named: list[tuple[str, Any]]) -> Iterator[list[str]]:
    """One chunk: all numbers are stacked and read once per device."""
    import torch

    waiting: dict[Any, list[Any]] = {}
    place: list[tuple[Any, int] | None] = []
    with torch.no_grad():
        for _, parameter in named:
            for tensor in (parameter.detach(), parameter.grad):
                if tensor is None:
                    place.append(None)
                    continue
                local = _local(tensor)
                numbers = waiting.setdefault(local.device, [])
                place.append((local.device, len(numbers)))
                numbers.extend(_norm_and_count(local))
        read = {device: torch.stack(numbers).tolist() for device, numbers in waiting.items()}
    for i, (name, parameter) in enumerate(named):
        row = [name, "x".join(map(str, parameter.shape)) or "scalar", str(parameter.dtype).removeprefix("torch.")]
        row.append("yes" if parameter.requires_grad else "no")
        for where in place[2 * i : 2 * i + 2]:
            row += (
                ["", ""]
                if where is None
                else [f"{read[where[0]][where[1]]:.6g}", f"{read[where[0]][where[1] + 1]:.0f}"]
            )
        row.append("local" if hasattr(parameter, "to_local") else "")
        yield row


def _local(tensor: Any) -> Any:
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _norm_and_count(tensor: Any) -> tuple[Any, Any]:
    import torch

    if tensor.numel() == 0:
        zero = torch.zeros(
            (), dtype=torch.float64 if tensor.device.type == "cpu" else torch.float32, device=tensor.device
        )
        return zero, zero
    wide = torch.float64 if tensor.device.type == "cpu" else torch.float32
    finite = torch.isfinite(tensor)
    norm = torch.linalg.vector_norm(torch.where(finite, tensor, torch.zeros_like(tensor)), dtype=_real(wide, tensor))
    norm = norm.to(wide).masked_fill(~finite.any(), float("nan"))  # of no values at all: that is not zero
    return norm, (~finite).sum().to(wide)


def _real(wide: Any, tensor: Any) -> Any:
    import torch

    if tensor.is_complex():
        return torch.complex128 if wide is torch.float64 else torch.complex64
    return wide


# --------------------------------------------------------------------------------------------------
# What is in a tensor, in numbers: how many values are not finite, and the range of those that are.


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
