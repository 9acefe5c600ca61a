"""The page of promises names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "promises.md"


def test_every_promise_has_a_test_that_exists() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        files = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", row)
        assert files, row
        for file in files:
            assert (PAGE.parents[2] / file).is_file(), file
