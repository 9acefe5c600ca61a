"""How many samples and tokens a batch holds, where that is obvious. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TOKEN_KEYS = ("input_ids", "tokens", "token_ids", "decoder_input_ids")


def batch_counts(batch: Any) -> tuple[int | None, int | None]:
    """``(samples, tokens)`` of one batch; None for what cannot be told from its shapes.

    Samples are the first dimension of the first tensor. Tokens are counted for dictionaries with
    ``input_ids`` (padding included, since telling it apart would read the device) and for batches
    whose tensors are all two-dimensional integers.
    """
    tokens = None
    if isinstance(batch, Mapping):
        for key in _TOKEN_KEYS:
            shape = getattr(batch.get(key), "shape", None)
            if shape is not None and len(shape) == 2:
                tokens = int(shape[0]) * int(shape[1])
                break
    tensors = _tensors(batch)
    if not tensors:
        return None, None
    first = tensors[0].shape
    samples = int(first[0]) if len(first) else None
    if tokens is None and all(len(t.shape) == 2 and _whole_numbers(t) for t in tensors):
        tokens = int(first[0]) * int(first[1])
    return samples, tokens


def _tensors(batch: Any, depth: int = 0) -> list[Any]:
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        return [batch]
    if depth > 2:
        return []
    values: Any = ()
    if isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, (list, tuple)):
        values = batch
    return [tensor for value in values for tensor in _tensors(value, depth + 1)]


def _whole_numbers(tensor: Any) -> bool:
    return str(tensor.dtype) in ("torch.int64", "torch.int32", "torch.int16", "torch.uint8")
