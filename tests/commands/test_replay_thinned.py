"""A record of which a part is missing is never called OK by a replay: what did not fire may have fired in what is gone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from healthcheck.cli import main
from healthcheck.record.lines import SampleEncoder
from healthcheck.record.segments import PACKED, TAIL

RULES = """version: 1
external: [loss]
rules:
  high: {metric: loss, when: {above: 50}, severity: error}
  two-parts:
    causes:
      a: {metric: loss, when: {above: 60}}
      b: {metric: loss, when: {below: -60}}
"""


def replayed(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    rules = folder / "rules.yaml"
    rules.write_text(RULES)
    code = main(["replay", str(folder), "--rules", str(rules), "--format", "json"])
    (report,) = json.loads(capsys.readouterr().out)
    return code, report


def record(folder: Path, values: list[float], *markers: bytes) -> Path:
    encoder = SampleEncoder()
    lines = [
        line
        for step, value in enumerate(values, start=1)
        for line in encoder.lines(step, step * 0.1, [("loss", (), step, "train", value)])
    ]
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    half = len(lines) // 2
    (folder / PACKED).write_bytes(gzip.compress(b"".join([*markers, *lines[:half]])))
    (folder / TAIL).write_bytes(b"".join(lines[half:]))
    return folder


def test_a_whole_record_in_closed_parts_is_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = replayed(record(tmp_path / "run", [1.0] * 40), capsys)
    assert (code, report["verdict"], report["steps"]) == (0, "ok", 40)
    assert report["record"]["rows"] == 40


@pytest.mark.parametrize(
    ("marker", "why"),
    [
        (b'{"thinned":2,"to":20}\n', "up to step 20 only a part of the evaluations was kept"),
        (b'{"gap":3}\n', "3 evaluations are missing"),
    ],
)
def test_where_samples_are_gone_nobody_can_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], marker: bytes, why: str
) -> None:
    code, report = replayed(record(tmp_path / "run", [1.0] * 40, marker), capsys)
    assert (code, report["verdict"]) == (5, "not judged")
    assert report["exit_words"].startswith("cannot tell: ")
    assert why in report["exit_words"]
    for entry in (*report["rules"].values(), *report["rules"]["two-parts"]["causes"].values()):
        assert entry["verdict"] == "not judged"
        assert entry["reason"].startswith(f"cannot tell: {why}")


def test_what_fires_in_what_is_left_has_fired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = replayed(record(tmp_path / "run", [1.0] * 30 + [90.0], b'{"thinned":1,"to":20}\n'), capsys)
    assert (code, report["verdict"]) == (1, "failed")
    assert report["rules"]["high"]["verdict"] == "failed"


def test_the_tail_of_a_longer_record_is_read_with_what_was_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path / "run", [1.0] * 40)
    (folder / "rules.yaml").write_text(RULES)
    main(["replay", str(folder / TAIL), "--rules", str(folder / "rules.yaml"), "--format", "json"])
    (report,) = json.loads(capsys.readouterr().out)
    assert report["record"]["rows"] == 40
