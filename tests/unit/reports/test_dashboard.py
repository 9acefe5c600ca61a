"""The live table: off without a terminal, drawn over itself on one."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from healthcheck.core.samples import Sample
from healthcheck.reports.live import DashboardReport


def started() -> DashboardReport:
    report = DashboardReport()
    report.start(SimpleNamespace(step=7, epoch=1.0, alerts=[]))  # type: ignore[arg-type]
    return report


def text_of(report: DashboardReport) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(report.table())
    return out.getvalue()


def test_without_a_terminal_nothing_is_shown_and_nothing_is_paid(capsys: pytest.CaptureFixture[str]) -> None:
    report = started()
    assert report.show() is False
    assert not hasattr(report, "samples")
    report.finish({})
    assert capsys.readouterr().err == ""


def test_on_a_terminal_the_newest_values_are_drawn() -> None:
    report, out = started(), io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    extra: dict[str, Any] = {"train/loss_avg": 1.5, "note": "text is no number"}
    assert report.show(1, lambda: extra, console)
    report.samples(7, [Sample("loss", 7, 0.25), Sample("memory.allocated", 7, 2.0**30), Sample("eta", 7, 9240.0)])
    report.finish({})
    for expected in ("step 7", "0.25", "1,024 MiB", "2h 34m", "train/loss_avg"):
        assert expected in out.getvalue()
    assert "text is no number" not in out.getvalue()


def test_series_of_a_family_are_left_out() -> None:
    report, out = started(), io.StringIO()
    report.show(1, None, Console(file=out, force_terminal=True, width=80))
    report.samples(1, [Sample("loss", 1, 99.0, (("optimizer", "1"),))])
    report.finish({})
    assert "99" not in text_of(report)
