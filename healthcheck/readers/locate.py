"""Where a row stands: which columns are the step, the epoch, the clock and the phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from healthcheck.readers.aliases import EPOCH_NAMES, EVAL_WORDS, PHASE_COLUMNS, STEP_NAMES, TEST_WORDS, TRAIN_WORDS
from healthcheck.readers.columns import TIME_RANK, Columns, Row, Target, step_rank
from healthcheck.readers.identify import identify, joined
from healthcheck.readers.values import to_seconds
from healthcheck.samples import NO_LABELS

Numbers = Mapping[str, list[tuple[int, float]]]
"""Column -> (row index, number) for the first rows."""

_EPOCH_GROUP = len(STEP_NAMES) - 1


def says_eval(value: Any) -> bool:
    """Whether the text of a phase column means evaluation."""
    return isinstance(value, str) and value.lower() in EVAL_WORDS | TEST_WORDS


def find_phase(columns: Columns, peek: Sequence[Row]) -> None:
    for name in PHASE_COLUMNS:
        said = {str(row[name]).lower() for row in peek if isinstance(row.get(name), str)}
        if said & (EVAL_WORDS | TEST_WORDS | TRAIN_WORDS):
            columns.phase_column = name
            return


def find_steps(columns: Columns, peek: Sequence[Row], numbers: Numbers, apart: frozenset[int] = frozenset()) -> None:
    """``apart``: rows that are known to be of evaluations."""
    found = []
    for name, values in numbers.items():
        rank = step_rank(name)
        if rank is None or not values or name in columns.targets:
            continue
        if any(v != v or v != int(v) if abs(v) < 1e300 else True for _, v in values):
            continue
        if len(values) > 3 and len({v for _, v in values}) == 1:
            continue  # a setting, not a counter
        if rank[0] == _EPOCH_GROUP and not _one_row_per_epoch(name, values, numbers, apart):
            continue
        found.append((rank, name))
    found.sort()
    found = _counters(found, numbers)
    bearing = {
        i for n, values in numbers.items() if step_rank(n) is None and joined(n) not in TIME_RANK for i, _ in values
    }
    rows = len(bearing) or 1
    best: tuple[float, tuple[str, ...]] = (0.0, ())
    for rank, name in found:
        own = {i for i, _ in numbers[name]}
        names = [name]
        for other_rank, other in found:
            theirs = {i for i, _ in numbers[other]}
            if other != name and other_rank[0] == rank[0] and not own & theirs:
                names.append(other)
                own |= theirs
        share = len(own & bearing) / rows
        if share >= 0.9:
            best = (share, tuple(names))
            break
        if share > best[0] + 0.1:
            best = (share, tuple(names))
    columns.steps = best[1]
    if not columns.steps:
        columns.notes.append("no step column: rows counted from 1")


_INDEX = frozenset({"index", "idx", "unnamed_0", "_step", "batch_idx"})
"""Numbers of rows, not of updates."""


def _counters(found: list[tuple[tuple[int, int], str]], numbers: Numbers) -> list[tuple[tuple[int, int], str]]:
    """Without columns that do not count where another one does.

    Such are the steps taken in each episode beside ``episode``, and the steps of each round beside ``iteration``.
    """
    if any(joined(name) in EPOCH_NAMES for name in numbers):
        return found  # batches that begin again in each epoch
    falls = {name: sum(b < a for (_, a), (_, b) in pairwise(numbers[name])) for _, name in found}
    rises = {name: sum(b > a for (_, a), (_, b) in pairwise(numbers[name])) for _, name in found}
    # A second run that was appended falls once.
    steady = [name for name, count in falls.items() if count <= 0.05 * len(numbers[name]) and len(numbers[name]) > 3]
    fullest = max((len(numbers[name]) for name in steady), default=0)
    strict = [name for name in steady if rises[name] >= 0.9 * (len(numbers[name]) - 1) and joined(name) not in _INDEX]
    widest = max((len(numbers[name]) for name in strict), default=0)
    kept = []
    for rank, name in found:
        rows = len(numbers[name])
        wavers = steady and falls[name] > 0.1 * rows and fullest >= 0.9 * rows
        stands = strict and rises[name] < 0.3 * (rows - 1) and widest >= 0.9 * rows
        if not (wavers or stands):
            kept.append((rank, name))
    return kept


def _one_row_per_epoch(name: str, values: Sequence[tuple[int, float]], numbers: Numbers, apart: frozenset[int]) -> bool:
    """Whether an epoch column can count steps: no other column has several values in one epoch."""
    metrics = {n: sum(i not in apart for i, _ in v) for n, v in numbers.items() if step_rank(n) is None}
    known = [count for n, count in metrics.items() if identify(n).known]
    fullest = max(known or metrics.values(), default=0)
    # Changes, not different values: a second run that was appended begins at epoch 1 again.
    return fullest <= 1.5 * (1 + sum(b != a for (_, a), (_, b) in pairwise(values)))


def find_epoch(columns: Columns, peek: Sequence[Row], numbers: Numbers) -> None:
    columns.epoch = next((n for n in numbers if joined(n) in EPOCH_NAMES and numbers[n] and n not in columns.steps), "")
    if not columns.epoch or not columns.steps or step_rank(columns.steps[0]) is None:
        return
    epochs = dict(numbers[columns.epoch])
    steps = [
        (i, v) for name in columns.steps for i, v in numbers[name] if not says_eval(peek[i].get(columns.phase_column))
    ]
    steps.sort()
    changes = restarts = 0
    for (i, a), (j, b) in pairwise(steps):
        if epochs.get(j, 0) > epochs.get(i, 0):
            changes += 1
            restarts += b < a
    # Without any change so far the question is open; the rows are then watched one by one.
    columns.within_epoch = restarts * 2 > changes if changes else len(set(epochs.values())) == 1 and len(epochs) > 1


def find_time(columns: Columns, peek: Sequence[Row], numbers: Numbers) -> None:
    best: tuple[int, str, float] | None = None
    for name in numbers:
        plain = joined(name)
        scale = 1.0
        rank = TIME_RANK.get(plain)
        if rank is None and plain.removesuffix("_ms").removesuffix("_s").removesuffix("_sec") in TIME_RANK:
            rank = TIME_RANK[plain.removesuffix("_ms").removesuffix("_s").removesuffix("_sec")]
        if plain.endswith("_ms"):
            scale = 1e-3
        if rank is None or name in columns.steps or name in columns.targets:
            continue
        seconds = [s for row in peek if name in row and (s := to_seconds(row[name], scale)) is not None]
        falls = sum(b < a for a, b in pairwise(seconds))
        plainly_time = plain in ("time", "time_ms", "time_s", "time_sec")
        if not seconds or falls > len(seconds) * (0.05 if plainly_time else 0.34):
            if seconds and plainly_time:
                target = Target("time.step", NO_LABELS, "train", scale)
                if target.series not in columns.owners:
                    columns.targets[name] = target
                    columns.owners[target.series] = name
            continue
        if len(seconds) > 1 or len(peek) == 1:
            columns.targets[name] = None
            if best is None or rank < best[0]:
                best = (rank, name, scale)
    if best is not None:
        columns.time, columns.time_scale = best[1], best[2]
