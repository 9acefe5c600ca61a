"""Norm and non-finite count of every parameter and its gradient.

Reads in chunks: per parameter a handful of device kernels, per chunk one read. Under FSDP the
numbers are of the local shard, since a full norm would need the other ranks.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from healthcheck.events import ModelView

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
