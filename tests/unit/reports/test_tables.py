"""Tables for reading: wrapped on a terminal, one line a row everywhere else."""

from __future__ import annotations

import io
import sys

import pytest

from healthcheck.reports.tables import table_lines

LONG = "the gradient norm is far above what is usual for this run and has been for a while"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int = 50) -> None:
    """Called in the test itself: between its set-up and the call pytest puts back a standard output of its own."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", str(width))


def test_columns_are_aligned_without_boxes_and_without_trailing_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """``grep -w``, ``awk`` and ``diff`` are the readers of a pipe."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    assert table_lines([["spike", "1,502", LONG], ["nan", "7"]], "lr", heads=("rule", "step", "what")) == [
        "  rule    step  what",
        f"  spike  1,502  {LONG}",
        "  nan        7",
    ]


def test_a_terminal_gets_lines_of_its_width_and_loses_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    lines = table_lines([["spike", "1,502", LONG]], "lr", indent=4)
    assert len(lines) > 1
    assert all(len(line) <= 50 and line.startswith("    ") for line in lines)
    assert " ".join(" ".join(lines).split()) == f"spike 1,502 {LONG}"


def test_a_number_is_never_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch, 40)
    drawn = "".join("".join(table_lines([["1" * 60]])).split())
    assert drawn == "1" * 60


def test_on_a_terminal_colour_repeats_what_the_word_says(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    (line,) = table_lines([["error", "loss"]])
    assert line == "  \x1b[31merror\x1b[0m  loss"
    monkeypatch.setenv("NO_COLOR", "1")
    assert table_lines([["error", "loss"]]) == ["  error  loss"]


def test_names_of_modules_and_metrics_are_no_markup() -> None:
    assert table_lines([["grad_norm[layers.0]", "[red]", ":smile:"]], indent=0) == [
        "grad_norm[layers.0]  [red]  :smile:"
    ]


def test_a_table_without_rows_has_no_heads_either() -> None:
    assert table_lines([], heads=("rule", "step")) == []


def test_names_keep_their_line_and_sentences_share_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule's id is there to be copied."""
    on_a_terminal(monkeypatch, 60)
    lines = table_lines([["grads-not-finite-streak", "error", LONG]], indent=0)
    assert lines[0].startswith("grads-not-finite-streak  \x1b[31merror\x1b[0m  the gradient norm is")
    assert len(lines) > 2
