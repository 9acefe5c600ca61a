"""The live view: off without a terminal, drawn over itself on one, and no work for the thread that trains."""

from __future__ import annotations

import io
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from healthcheck.assembly import open_session
from healthcheck.core.events import Event, EventKind
from healthcheck.core.samples import Sample
from healthcheck.reports.live import MOVES, Above, DashboardReport, Redirected
from healthcheck.reports.screen import NARROWEST, Screen, screen_lines
from healthcheck.reports.textchart import sparkline
from healthcheck.run.ending import Ending
from healthcheck.run.session import Session

RULES = {
    "version": 1,
    "external": ["loss", "mine"],
    "rules": {"high": {"metric": "loss", "when": {"above": 50}, "hint": "look", "message": "loss is {value}"}},
}


def session(**settings: Any) -> Session:
    return open_session(target="train.py", rules=RULES, record=False, console=False, settings=settings)


def shown_of(one: Session) -> DashboardReport:
    (found,) = [report for report in one.reports if isinstance(report, DashboardReport)]
    return found


def step(one: Session, at: int, **values: float) -> None:
    one.log(values, step=at)
    one.emit(Event(EventKind.STEP_END, at))


def test_without_a_terminal_nothing_is_shown_and_nothing_is_paid(capsys: pytest.CaptureFixture[str]) -> None:
    one = session(live=True)
    assert shown_of(one).show() is False
    assert not hasattr(shown_of(one), "samples")
    one.finish(Ending())
    assert capsys.readouterr().err == ""


def test_on_a_terminal_it_is_drawn_by_a_thread_of_its_own_once_a_second() -> None:
    one, out = session(), io.StringIO()
    report = shown_of(one)
    assert report.show(
        lambda: {"train/loss_avg": 1.5, "note": "no number"}, Console(file=out, force_terminal=True, width=80)
    )
    assert not hasattr(report, "samples")  # the training thread hands it nothing
    for at in range(1, 60):
        step(one, at, loss=60.0 if at == 30 else 2.0 + at / 100, mine=float(at))
    time.sleep(2.3)
    one.finish(Ending())
    text = out.getvalue()
    assert text.count("train.py: running, step 59") <= 4  # at most one each second, and the last
    for expected in ("2.59", "train/loss_avg", "mine", "warning high, step 30: loss is 60", "try: look"):
        assert expected in text
    assert "no number" not in text
    drawn = len(text)
    time.sleep(1.2)
    assert len(out.getvalue()) == drawn  # nothing is drawn after the end


def test_a_view_that_is_drawn_while_values_come_breaks_nothing() -> None:
    one, out = session(), io.StringIO()
    report = shown_of(one)
    report.show(None, Console(file=out, force_terminal=True, width=80))
    for at in range(1, 2000):
        step(one, at, loss=1.0 + at % 3)
        if at % 40 == 0:
            report.picture(80)
    one.finish(Ending())
    assert one.report is not None
    assert one.report["internal_errors"] == one.report["plugin_errors"] == []


SERIES = {
    "loss": [(n, 3.0 - n / 100) for n in range(1, 101)],
    "eval.loss": [(50, 2.4), (100, 2.6)],
    "lr": [(n, 1e-3) for n in range(1, 101)],
    "grad_norm": [(n, 1.0 + n % 5) for n in range(1, 100)] + [(100, math.nan)],
    "time.step": [(n, 0.1) for n in range(1, 101)],
    "time.data": [(n, 0.02) for n in range(1, 101)],
    "memory.allocated": [(n, 2.0**30) for n in range(1, 101)],
    "optimizers": [(n, 1.0) for n in range(1, 101)],
    "accuracy": [(n, n / 100) for n in range(1, 101)],
}
UNITS = dict.fromkeys(("loss", "eval.loss", "lr", "grad_norm", "optimizers"), "") | {
    "time.step": "s", "time.data": "s", "memory.allocated": "bytes",
}  # fmt: skip


@pytest.mark.parametrize("width", [20, NARROWEST, 60, 80, 120, 200])
@pytest.mark.parametrize("blocks", [True, False])
def test_every_line_fits_the_terminal_and_says_what_matters(width: int, blocks: bool) -> None:
    alert = {
        "severity": "error",
        "rule": "high",
        "fired_step": 7,
        "message": "the loss " + "is high " * 20,
        "hint": "look",
    }
    screen = Screen("train.py", "running", 100, SERIES, UNITS, [alert], ["high fires"], 400, 2**32, blocks=blocks)
    lines = screen_lines(screen, width)
    assert max(map(len, lines)) <= max(NARROWEST, min(width, 110))
    text = "\n".join(lines)
    for expected in (
        "25%",
        "30s left",
        "held-out loss",
        "accuracy",
        "nan",
        "20% of the time",
        "high fires",
        "1 GiB",
    ):
        assert expected in text
    assert "optimizers" not in text  # constants and signs of our own say nothing here
    assert text.isascii() is not blocks
    assert len(lines) <= 24


def test_a_run_of_which_nothing_is_known_yet_says_so() -> None:
    lines = screen_lines(Screen("train.py", "running", 0), 80)
    assert lines[0] == "train.py: running, step 0"
    assert "  no samples yet" in lines
    assert lines[-1] == "0 alerts"


def test_a_sparkline_marks_what_is_not_finite_and_takes_logarithms_of_steep_values() -> None:
    assert sparkline([1.0], 8) == ""
    assert sparkline([1.0, math.nan, 2.0], 8, blocks=False) == ".x@"
    assert sparkline([math.nan, math.inf], 8) == "xx"
    assert sparkline([1.0, 10.0, 100.0, 1000.0], 4) == "▁▃▆█"
    assert sparkline([5.0, 5.0], 8) == "▁▁"
    assert len(sparkline(list(range(500)), 24)) == 24


def test_series_of_a_family_are_left_out() -> None:
    one = session()
    one.judge.waiting.append(Sample("loss", 1, 99.0, (("parameter", "head.weight"),)))
    step(one, 1, loss=1.0)
    assert "99" not in str(shown_of(one).picture(80))
    one.finish(Ending())


def test_a_run_that_is_observed_says_so(tmp_path: Path) -> None:
    one = session(mode="observe")
    assert "train.py: observing, step 0" in str(shown_of(one).picture(80))
    one.finish(Ending())


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_bars_of_other_libraries_are_one_frame_of_the_view_and_whole_lines_go_above_it() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    from rich.progress import track

    said: list[str] = []
    above = Above(Terminal(), said.append)
    print("a line", file=above)
    for n in tqdm(range(50), file=above, mininterval=0):
        if n == 25:
            assert "50%" in above.frame
            assert "\r" not in above.frame
    print("between", file=above)
    for n in track(
        range(20), "training", console=Console(file=above, force_terminal=True, width=60), update_period=0.01
    ):
        time.sleep(0.02)
        if n == 15:
            assert "training" in above.frame
            assert not MOVES.search(above.frame)
    for piece in (
        "\r 34%|###",
        "\r" + " " * 40 + "\r",
        "WARN a block\n",
        "\r 35%|###",
    ):  # as tqdm makes room for others
        above.write(piece)
    assert above.frame == " 35%|###"
    above.write("\n")
    assert said[-2:] == ["WARN a block", " 35%|###"]
    print("half", end="", file=above)
    assert above.isatty()
    above.close_part()
    text = "\n".join(said)
    assert said[0] == "a line"
    assert "100%" in text
    assert text.count("50/50") == 1  # the last state of the bar, once
    assert text.count("training") == 1
    assert "between" in said
    assert said[-1] == "half"
    assert above.frame == ""


def test_a_stream_that_goes_to_a_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    redirected = Redirected(lambda text: None)
    redirected.begin()
    try:
        assert sys.stdout is out
        assert sys.stderr is not err
    finally:
        redirected.end()
    assert sys.stderr is err
