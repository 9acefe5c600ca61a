"""What an update did to sampled elements, worked out on the host from a few numbers per tensor.

The device sums up each tensor's elements in one launch; everything after that is arithmetic on some
hundred numbers, for which kernels would cost the host more than Python does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul

from healthcheck.probes.transfer.late import Element, Late, LateTable

ROWS = 6
"""Rows of a table with one number per tensor: squared change, squared size before, elements that
changed, elements with something to apply (a finite gradient, not zero), those among them that stayed,
and the largest gradient of such an element."""


def ratio_of(change: float, size: float) -> float:
    """sqrt(change / size); a tensor that was all zero and moved counts as 1, one that stayed as 0."""
    base = size if size > 0 else (change if change > 0 else 1.0)
    return math.sqrt(change / base)


class Moved:
    """One update's tables, a table per group of tensors.

    :param groups: positions of each group's tensors in the list of all.
    """

    def __init__(self, tables: Sequence[LateTable], groups: Sequence[Sequence[int]]) -> None:
        self.tables = tuple(tables)
        self.groups = groups

    def ratio(self, sizes: Sequence[Sequence[float]]) -> Late:
        """|dW| / |W| over all tensors; ``sizes``: per group, how many elements a sampled one stands for."""

        def compute(*tables: Sequence[float]) -> float:
            change = size = 0.0
            for numbers, weights in zip(tables, sizes, strict=True):
                n = len(weights)
                change += sum(map(mul, numbers[:n], weights))
                size += sum(map(mul, numbers[n : 2 * n], weights))
            return ratio_of(change, size)

        return Late(compute, *self.tables)

    def each_ratio(self) -> list[tuple[int, Late]]:
        """The same of every tensor, with its position."""
        return [
            (index, Late(ratio_of, Element(table, k), Element(table, len(group) + k)))
            for table, group in zip(self.tables, self.groups, strict=True)
            for k, index in enumerate(group)
        ]

    def lost(self, counts: Sequence[bool]) -> Late:
        """Part of the elements with something to apply that stayed as they were; ``counts``: in which tensors."""
        groups = self.groups

        def compute(*tables: Sequence[float]) -> float:
            asked = gone = 0.0
            for numbers, group in zip(tables, groups, strict=True):
                n = len(group)
                for k, index in enumerate(group):
                    if counts[index]:
                        asked += numbers[3 * n + k]
                        gone += numbers[4 * n + k]
            return gone / max(asked, 1.0)

        return Late(compute, *self.tables)


class Streaks:
    """For how many updates in a row each tensor has stood still. Updates may wait here before they are counted."""

    def __init__(self, count: int, negligible: float) -> None:
        """``negligible``: part of the largest gradient up to which one counts as none."""
        self.negligible = negligible
        self.values = [0] * count
        self._waiting: list[tuple[Moved, list[bool], list[bool]]] = []

    def add(self, moved: Moved, without: list[bool], moves: list[bool]) -> None:
        """One update. ``without``: which tensors had no gradient; ``moves``: which have a rate that moves them."""
        self._waiting.append((moved, without, moves))

    def standing(self, patience: int) -> tuple[Late, Callable[[], list[int]]]:
        """How many tensors have stood still so long, and afterwards which."""
        waiting, self._waiting = self._waiting, []
        hit: list[int] = []

        def compute(*tables: Sequence[float]) -> float:
            given = iter(tables)
            for moved, without, moves in waiting:
                pairs = [(next(given), group) for group in moved.groups]
                largest = max((max(numbers[5 * len(group) :]) for numbers, group in pairs), default=0.0)
                for numbers, group in pairs:
                    self._count(numbers, group, without, moves, self.negligible * largest)
            hit.extend(index for index, streak in enumerate(self.values) if streak >= patience)
            return float(len(hit))

        return Late(compute, *(table for moved, *_ in waiting for table in moved.tables)), lambda: hit

    def _count(
        self, numbers: Sequence[float], group: Sequence[int], without: list[bool], moves: list[bool], noise: float
    ) -> None:
        n = len(group)
        changed, gradient = numbers[2 * n : 3 * n], numbers[5 * n :]
        for k, index in enumerate(group):
            if changed[k]:
                self.values[index] = 0
            elif moves[index] and (gradient[k] > noise or without[index]):
                self.values[index] += 1
