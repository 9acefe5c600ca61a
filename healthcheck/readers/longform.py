"""Long tables: one row per value, with the metric's name in a column (Comet, exported databases)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from healthcheck.readers.aliases import EVAL_WORDS, TRAIN_WORDS
from healthcheck.readers.base import Position
from healthcheck.readers.columns import step_rank
from healthcheck.readers.identify import joined
from healthcheck.readers.values import to_number

Item = tuple[Position | None, Mapping[str, Any]]

_NAME = frozenset({"metric", "metric_name", "metricname", "name", "key", "tag", "series", "variable", "metric_key"})
_PHASES = TRAIN_WORDS | EVAL_WORDS
"""A value that is called by its phase alone is the loss."""
_VALUE = frozenset({"value", "metric_value", "metricvalue", "val", "scalar"})


def name_and_value(peek: Sequence[Item]) -> tuple[str, str] | None:
    """The columns that hold the metric's name and its value, if this is a long table."""
    if not peek:
        return None
    columns = list(dict.fromkeys(name for _, row in peek for name in row))
    names = [c for c in columns if joined(c) in _NAME and any(isinstance(row.get(c), str) for _, row in peek)]
    values = [c for c in columns if joined(c) in _VALUE and any(to_number(row.get(c)) is not None for _, row in peek)]
    return (names[0], values[0]) if names and values else None


def pivoted(items: Iterator[Item], name: str, value: str, notes: list[str]) -> Iterator[Item]:
    """The same values as ordinary rows, in the order of their steps.

    Such tables list one metric after the other, so all of it is kept in memory.
    """
    rows: list[tuple[float, int, Item]] = []
    step = ""
    for order, (position, row) in enumerate(items):
        if not step:
            step = min((c for c in row if step_rank(c) is not None), key=lambda c: step_rank(c) or (9, 9), default="")
        label = row.get(name)
        if not isinstance(label, str):
            continue
        kept = {
            k: v
            for k, v in row.items()
            if k not in (name, value) and (k == step or not isinstance(v, str) or "time" in k)
        }
        kept[f"{label}_loss" if label in _PHASES else label] = row.get(value)
        at = to_number(row.get(step)) if step else None
        rows.append((at if at is not None and at == at else float(order), order, (position, kept)))
    rows.sort(key=lambda r: r[:2])
    notes.append(f'long table: metrics named by column "{name}", {len(rows)} values sorted by step')
    yield from (item for _, _, item in rows)
