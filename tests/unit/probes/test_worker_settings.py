"""Values of a data set that its workers never hear of, and those that they have nothing to do with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from healthcheck.instrument.data import WorkerSettings


class Rows:
    epoch = 0
    passes = 0

    def __getitem__(self, row: int) -> int:
        return self.drawn(row)

    def drawn(self, row: int) -> int:
        return row + self.epoch

    def told(self) -> None:
        self.passes += 1


class Part:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, row: int) -> int:
        return self.dataset[row]  # type: ignore[no-any-return]


class Iterator(SimpleNamespace):
    __hash__ = object.__hash__


def changed(rows: Rows, dataset: Any) -> dict[str, str]:
    settings, iterator = WorkerSettings(), Iterator(_dataset=dataset)
    said: dict[str, str] = {}
    for epoch in range(4):
        rows.epoch, rows.passes = epoch, epoch
        said = settings.changed(iterator)
    return said


def test_a_value_that_workers_read_through_a_method_is_told_and_one_that_the_script_alone_keeps_is_not() -> None:
    rows = Rows()
    assert changed(rows, rows) == {"epoch": "0 to 3"}
    assert changed(rows, Part(rows)) == {"dataset.epoch": "0 to 3"}
