"""The writer behind the step path: bounded, honest about losses, harmless after a fork."""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from healthcheck.record import writer as writing
from healthcheck.record.lines import read_samples
from healthcheck.record.segments import sample_lines
from healthcheck.record.writer import RecordWriter

BACKLOG = 100
ROW = [("loss", (), 1, "train", 1.0)]


def test_lines_wait_less_than_a_second_for_the_disk(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    pauses: list[float | None] = []

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return super().wait(timeout)

    writer = RecordWriter(tmp_path)
    writer._ended = Ended()
    written = tmp_path / "samples.jsonl"
    for step in (1, 2):
        before = written.stat().st_size if written.exists() else 0
        writer.samples(step, 0.0, ROW)
        wait_until(lambda size=before: written.exists() and written.stat().st_size > size, "a line on disk")
    writer.close()
    assert len(pauses) >= 2
    assert all(pause is not None and pause < 1 for pause in pauses)


def test_without_samples_there_is_no_thread_and_no_file(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.close()
    assert writer._thread is None
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_keep_up_leaves_a_gap_and_not_a_growing_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BACKLOG", BACKLOG)
    writer = RecordWriter(tmp_path, seconds=3600)
    for step in range(BACKLOG + 5):
        writer.samples(step, 0.0, ROW)
    writer._empty()
    writer.samples(BACKLOG + 6, 0.0, ROW)
    writer.close()
    found = read_samples((tmp_path / "samples.jsonl").read_bytes().splitlines())
    assert found.gaps == 5
    assert len(found.batches) == BACKLOG + 1


def test_a_record_past_its_limit_is_thinned_and_stays_below_it(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, limit=3_000, segment=1_000, seconds=3600)
    for step in range(1, 3001):
        writer.samples(step, 0.0, ROW)
        if step % 100 == 0:
            writer._empty()
    writer.close()
    found = read_samples(sample_lines(tmp_path))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3_000
    assert not found.complete
    assert found.batches[-1].at == 3000, "the newest evaluations stay"
    assert found.bad_lines == 0


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "gone")
    writer.samples(1, 0.0, ROW)
    writer.alert(1, json.dumps({"rule": "x"}).encode() + b"\n")
    writer.close()
    assert "No such file" in writer.trouble
    assert str(tmp_path / "gone") in writer.trouble


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_and_the_rest_stays_readable(small_disk: Path) -> None:
    writer = RecordWriter(small_disk, seconds=3600)
    for step in range(1, 5001):
        writer.samples(step, random.random(), [("loss", (), step, "train", random.random())])
        if step % 500 == 0:
            writer._empty()
    writer.close()
    assert "No space left" in writer.trouble
    found = read_samples(sample_lines(small_disk))
    assert found.batches[0].at == 1
    assert found.bad_lines <= 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_nothing_and_does_not_wait(tmp_path: Path) -> None:
    """DataLoader workers inherit the writer; its thread does not exist there."""
    writer = RecordWriter(tmp_path, seconds=3600)
    writer.samples(1, 0.0, ROW)
    assert writer._thread is not None
    pid = os.fork()
    if pid == 0:
        writer._thread.join = lambda wait=None: os._exit(1)  # type: ignore[method-assign]
        writer.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not (tmp_path / "samples.jsonl").exists()
    writer.close()
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 1
