"""``healthcheck top``: a run that goes on, watched from another terminal through its record."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from healthcheck.cli import main
from healthcheck.record.runs import Follower, find_run


def test_newest_and_usual_values_of_a_run_that_goes_on(
    going_on: Callable[..., subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    going_on([2.0], 0.02)
    assert main(["top", "--once"]) == 0
    first, _, loss, *rest = capsys.readouterr().out.splitlines()
    assert "train.py: running, step " in first
    assert loss.split()[:2] == ["loss", "2"]
    assert rest[-1] == "0 alerts"


def test_a_second_look_reads_only_what_is_new_and_a_thinned_record_anew(
    going_on: Callable[..., subprocess.Popen[bytes]], here: Path
) -> None:
    child = going_on([1.0, 2.0, 3.0, "nan"], 0.01)
    child.wait(120)
    follower = Follower(find_run())
    follower.look()
    assert [value for _, value in follower.series["loss"].values][:3] == [1.0, 2.0, 3.0]
    assert follower.series["loss"].usual == 2.0
    follower.look()
    assert len(follower.series["loss"].values) == 4
    path = next(here.glob("*/samples.jsonl"))
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[-1])  # as thinning leaves it: shorter
    follower.look()
    assert len(follower.series["loss"].values) == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo terminal")
def test_on_a_terminal_it_draws_until_the_run_has_ended(going_on: Callable[..., subprocess.Popen[bytes]]) -> None:
    import pty

    child = going_on([2.0], 0.05)
    master, slave = pty.openpty()
    code = "import sys; from healthcheck.cli import main; sys.exit(main(['top', '--every', '0.2']))"
    top = subprocess.Popen([sys.executable, "-c", code], stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm"})
    os.close(slave)
    shown = b""
    while more := _read(master):
        shown += more
        if b"running" in shown and child.poll() is None:
            child.kill()
            child.wait()
    assert top.wait(120) == 0
    assert b"train.py: killed, step " in shown.split(b"running")[-1]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side has closed
        return b""


@pytest.mark.parametrize("given", ["0", "soon"])
def test_a_rhythm_that_makes_no_sense_is_refused(given: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--every", given]) == 4
    assert "--every takes seconds" in capsys.readouterr().err
