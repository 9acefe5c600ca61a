"""NaN, infinity, null, text, empty and missing are told apart."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from healthcheck.readers.base import cell, to_seconds
from healthcheck.readers.series import RecordedRun, stale_rows

Read = Callable[..., RecordedRun]
Points = Callable[[RecordedRun, str], object]


@pytest.mark.parametrize("text", ["", "No log", "None", "null", "N/A", "-", "  "])
def test_words_for_nothing_are_missing(text: str) -> None:
    assert cell(text) is None


@pytest.mark.parametrize(
    ("text", "value"), [("inf", math.inf), ("-Infinity", -math.inf), ("0", 0.0), ("1e-3", 0.001), ("12.5%", 12.5)]
)
def test_numbers_in_text(text: str, value: float) -> None:
    assert cell(text) == value


@pytest.mark.parametrize("text", ["nan", "NaN", "-nan", " nan "])
def test_nan_is_a_number_and_not_missing(text: str) -> None:
    value = cell(text)
    assert isinstance(value, float)
    assert math.isnan(value)


def test_other_text_stays_text() -> None:
    assert cell("adamw") == "adamw"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(1700000000000, 1.7e9), ("1:02:03", 3723.0), ("2025-01-01T00:00:10Z", 1735689610.0), (5, 5.0)],
)
def test_clocks(value: object, seconds: float) -> None:
    assert to_seconds(value) == seconds


def test_a_loss_that_became_null_is_a_nan(read: Read, points: Points, jsonl: Callable[..., str]) -> None:
    """Strict JSON cannot write NaN: a log whose loss turned null must not be called clean."""
    run = read("a.jsonl", jsonl(*({"step": i, "loss": 2.0 if i < 3 else None, "lr": 0.5} for i in range(5))))

    assert points(run, "loss") == [(0, 2.0), (1, 2.0), (2, 2.0), (3, "nan"), (4, "nan")]
    assert any("null" in note and "NaN" in note for note in run.notes)


def test_a_closing_row_of_which_all_is_null_is_no_nan(read: Read, points: Points, jsonl: Callable[..., str]) -> None:
    rows = [{"current_steps": n, "loss": 1.5, "eval_loss": None, "learning_rate": 0.5} for n in range(1, 6)]
    closing = {"current_steps": 6, "loss": None, "eval_loss": None, "learning_rate": None}
    assert points(read("trainer_log.jsonl", jsonl(*rows, closing)), "loss") == [(n, 1.5) for n in range(1, 6)]
    bad = {"current_steps": 6, "loss": None, "eval_loss": None, "learning_rate": 0.5}
    assert points(read("trainer_log.jsonl", jsonl(*rows, bad)), "loss") == [
        *((n, 1.5) for n in range(1, 6)),
        (6, "nan"),
    ]


def test_a_null_in_rows_of_different_keys_is_a_nan(read: Read, points: Points, jsonl: Callable[..., str]) -> None:
    run = read(
        "a.jsonl",
        jsonl(
            {"step": 1, "loss": 2.0},
            {"step": 1, "val_loss": 2.5},
            {"step": 2, "loss": None},
            {"step": 2, "val_loss": None},
        ),
    )

    assert points(run, "loss") == [(1, 2.0), (2, "nan")]
    assert points(run, "eval.loss") == [(1, 2.5), (2, "nan")]


def test_nulls_that_fill_a_wide_table_are_empty_cells(read: Read, points: Points) -> None:
    table = [{"step": i, "loss": 2.0 - i / 64, "val_loss": 2.5 if i % 10 == 0 else None} for i in range(40)]
    run = read("a.json", json.dumps(table))

    assert points(run, "eval.loss") == [(0, 2.5), (10, 2.5), (20, 2.5), (30, 2.5)]
    assert len(run.series()["loss"].steps) == 40


def test_an_evaluation_loss_that_became_null_in_a_wide_table_is_a_nan(read: Read, points: Points) -> None:
    """The accuracy beside it shows that this row is an evaluation."""
    table = [
        {
            "step": i,
            "loss": 2.0,
            "val_loss": (2.5 if i < 20 else None) if i % 10 == 0 else None,
            "val_acc": 0.5 if i % 10 == 0 else None,
        }
        for i in range(40)
    ]
    run = read("a.json", json.dumps(table))

    assert points(run, "eval.loss") == [(0, 2.5), (10, 2.5), (20, "nan"), (30, "nan")]


def test_a_column_that_is_never_numeric_is_not_turned_into_nan(read: Read, jsonl: Callable[..., str]) -> None:
    run = read(
        "a.jsonl", jsonl({"step": 1, "loss": 2.0, "best_metric": None}, {"step": 2, "loss": 1.5, "best_metric": None})
    )

    assert list(run.series()) == ["loss"]


def test_nan_between_regular_evaluations_is_an_empty_cell_but_nan_where_one_is_due_stays(
    read: Read, points: Points
) -> None:
    rows = []
    for i in range(60):
        due = i % 10 == 0
        value = "nan" if not due or i == 50 else "2.5"
        rows.append(f"{i},2.0,{value}")
    run = read("a.csv", "step,loss,val_loss\n" + "\n".join(rows) + "\n")

    assert points(run, "eval.loss") == [(0, 2.5), (10, 2.5), (20, 2.5), (30, 2.5), (40, 2.5), (50, "nan")]


def test_zero_loss_stays_zero(read: Read, points: Points) -> None:
    run = read("a.csv", "train_loss,epoch,step,eval_loss\n" + "".join(f"0.0,{i},{i * 100},nan\n" for i in range(1, 9)))

    assert points(run, "loss") == [(i * 100, 0.0) for i in range(1, 9)]
    assert points(run, "eval.loss") == [(i * 100, "nan") for i in range(1, 9)]


CARD = "train_loss,epoch,step,eval_loss\n,0.1,400,0.9\n2.3,0.2,800,0.8\n0.7,0.3,1200,0.7\n0.66,0.4,1600,0.6\n0.63,0.5,2000,0.5\n0.63,0.6,2400,0.5\n0.61,0.7,2800,0.5\n"


def test_a_result_table_repeats_the_last_logged_loss_and_repeats_are_dropped_with_a_note(
    read: Read, points: Points
) -> None:
    run = read("a.csv", CARD)

    assert points(run, "loss") == [(800, 2.3), (1200, 0.7), (1600, 0.66), (2000, 0.63), (2800, 0.61)]
    assert any("logged every 500 steps" in note for note in run.notes)


def test_the_same_repeat_in_another_table_is_kept(read: Read, points: Points) -> None:
    run = read("a.csv", "step,loss\n400,2.0\n800,1.5\n1200,1.5\n1600,1.25\n")

    assert len(points(run, "loss")) == 4  # type: ignore[arg-type]


def test_a_loss_that_never_moves_is_no_repeat() -> None:
    assert stale_rows([100.0 * i for i in range(1, 20)], [0.6931] * 19) == (set(), 0)


def test_equal_neighbours_that_no_interval_explains_are_kept() -> None:
    steps = [100.0 * i for i in range(1, 9)]

    assert stale_rows(steps, [2.0, 1.5, 1.5, 1.4, 1.3, 1.2, 1.2, 1.1])[0] == set()
