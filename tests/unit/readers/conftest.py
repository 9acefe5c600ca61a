"""Small recordings, written in the shape that each tool writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from healthcheck.readers.find import read_run
from healthcheck.readers.series import RecordedRun

Points = list[tuple[int, float | str]]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """``write("metrics.csv", text)``: a file below the test's folder."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def read(write: Callable[[str, str], Path]) -> Callable[..., RecordedRun]:
    """``read("metrics.csv", text)``: the file written and opened, without options unless given."""

    def read_text(name: str, text: str, **options: object) -> RecordedRun:
        return read_run(write(name, text), **options)  # type: ignore[arg-type]

    return read_text


@pytest.fixture
def jsonl() -> Callable[..., str]:
    return lambda *rows: "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def points() -> Callable[[RecordedRun, str], Points]:
    """``points(run, "loss")``: (step, value) of a series; non-finite values as text, so that they compare."""

    def of(run: RecordedRun, series: str) -> Points:
        found = run.series()
        assert series in found, f"{series} is not among {list(found)}"
        column = found[series]
        return [(s, v if math.isfinite(v) else str(v)) for s, v in zip(column.steps, column.values, strict=True)]

    return of


Rows = Mapping[str, object]
