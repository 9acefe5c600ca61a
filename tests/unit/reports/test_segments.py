"""Closed parts of the samples are compressed, nothing is lost on the way, and what is missing is never called whole."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from healthcheck.record import segments
from healthcheck.record.lines import SampleEncoder, read_samples
from healthcheck.record.runs import Follower, load_run
from healthcheck.record.segments import CLOSING, PACKED, TAIL, Segments, newest_lines, sample_lines


def lines(first: int, last: int, width: int = 1) -> bytes:
    encoder = SampleEncoder()
    return b"".join(
        line
        for step in range(first, last + 1)
        for line in encoder.lines(step, 0.1 * step, [(f"m{n}", (), step, "train", step / 7 + n) for n in range(width)])
    )


def test_what_is_closed_and_the_tail_are_read_as_one_record(tmp_path: Path) -> None:
    made = Segments(tmp_path, 2**30, 4_000)
    for step in range(1, 1001, 10):
        made.append(lines(step, step + 9), ())
    assert (tmp_path / PACKED).is_file()
    assert (tmp_path / TAIL).read_text().startswith('{"step":')
    found = read_samples(sample_lines(tmp_path))
    assert [batch.at for batch in found.batches] == list(range(1, 1001))
    assert [batch.samples[0].value for batch in found.batches] == [step / 7 for step in range(1, 1001)]
    assert found.complete


@pytest.mark.parametrize("torn", [0, 1, 40])
def test_a_kill_while_a_part_is_being_closed_loses_nothing_and_doubles_nothing(tmp_path: Path, torn: int) -> None:
    """The three moments at which a process may die: before, within and after the append of the stream."""
    packed = gzip.compress(lines(1, 50)) + (gzip.compress(lines(51, 99)))[: torn or None]
    (tmp_path / PACKED).write_bytes(packed)
    (tmp_path / CLOSING).write_bytes(lines(51, 99))
    (tmp_path / TAIL).write_bytes(lines(100, 110))
    found = read_samples(sample_lines(tmp_path))
    assert [batch.at for batch in found.batches] == list(range(1, 111))
    assert found.complete


def test_a_damaged_part_makes_the_record_incomplete(tmp_path: Path) -> None:
    (tmp_path / PACKED).write_bytes(gzip.compress(lines(1, 50)) + gzip.compress(lines(51, 99))[:-7])
    (tmp_path / TAIL).write_bytes(lines(100, 110))
    found = read_samples(sample_lines(tmp_path))
    assert [found.batches[0].at, found.batches[-1].at] == [1, 110]
    assert not found.complete


def test_the_newest_ten_thousand_steps_and_those_around_alerts_stay_exact(tmp_path: Path) -> None:
    made = Segments(tmp_path, 120_000, 20_000)
    for step in range(1, 24_001, 200):
        made.append(lines(step, step + 199), (5_000,))
    found = read_samples(sample_lines(tmp_path))
    seen = [batch.at for batch in found.batches]
    assert 0 < found.thinned_to <= 24_000 - segments.EXACT_STEPS
    assert set(range(14_001, 24_001)) <= set(seen)
    assert set(range(4_900, 5_101)) <= set(seen)
    assert len(seen) < 24_000


def test_a_record_whose_steps_are_large_stays_bounded_all_the_same(tmp_path: Path) -> None:
    made = Segments(tmp_path, 30_000, 20_000)
    for step in range(1, 400, 4):
        made.append(lines(step, step + 3, width=60), ())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 45_000
    found = read_samples(sample_lines(tmp_path))
    assert found.batches[-1].at == 400
    assert not found.complete


def test_the_newest_lines_are_there_right_after_a_part_was_closed(tmp_path: Path) -> None:
    (tmp_path / PACKED).write_bytes(gzip.compress(lines(1, 50)))
    assert read_samples(newest_lines(tmp_path, 10_000)).batches[-1].at == 50
    (tmp_path / TAIL).write_bytes(lines(51, 52))
    assert read_samples(newest_lines(tmp_path, 10_000)).batches[-1].at == 52


def test_a_follower_goes_on_when_the_tail_is_closed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    made = Segments(tmp_path, 2**30, 3_000)
    follower = Follower(load_run(tmp_path))
    for step in range(1, 500, 5):
        made.append(lines(step, step + 4), ())
        follower.look()
    assert follower.step == 500
    assert len(follower.series["m0"].values) == 200
    assert follower.series["m0"].values[-1] == (500, 500 / 7)
