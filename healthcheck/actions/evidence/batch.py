"""A batch as shapes, types, ranges, non-finite counts and hashes; its contents only on request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from healthcheck.samples import encode_number

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

    flat = tensor.detach().contiguous().reshape(-1)
    if limit is not None:
        flat = flat[: max(1, limit // max(1, flat.element_size()))]
    if flat.dtype is torch.bool:
        flat = flat.to(torch.uint8)
    if not flat.numel():
        return b""
    data: bytes = bytes(flat.cpu().view(torch.uint8).untyped_storage())
    return data[: flat.numel() * flat.element_size()]


def _ids(leaf: Any) -> list[Any] | None:
    """Identifiers as the loader gave them, if that is what they are: whole numbers or strings."""
    if _is_tensor(leaf):
        if leaf.is_floating_point() or leaf.is_complex():
            return None
        return list(leaf.detach().reshape(-1)[:MAX_IDS].tolist())
    if isinstance(leaf, (list, tuple)):
        return [item if isinstance(item, int) else str(item)[:200] for item in leaf[:MAX_IDS]]
    return [leaf] if isinstance(leaf, (int, str)) else None
