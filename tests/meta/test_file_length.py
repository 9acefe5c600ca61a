"""Past 300 lines a file holds a second idea. Those that may be longer stand here with the reason."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "healthcheck"
LIMIT = 300

MAY_BE_LONGER = {
    "hookspecs.py": "the hook specification is nearly all docstring and is read from top to bottom",
    "protocols.py": "what a plugin writes and is given, on one page; half of it is docstring",
    "session.py": "the public face of one run; what it does at a judging point stands in judging.py",
    "trainers/loop.py": "`watch` and the object that it returns, whose methods are documented for users",
}


def lengths() -> dict[str, int]:
    return {
        path.relative_to(PACKAGE).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in PACKAGE.rglob("*.py")
    }


def test_no_file_is_longer_than_300_lines_without_a_reason() -> None:
    long = {name: count for name, count in lengths().items() if count > LIMIT and name not in MAY_BE_LONGER}
    assert long == {}


def test_every_exception_is_still_needed() -> None:
    found = lengths()
    assert [name for name in MAY_BE_LONGER if found.get(name, 0) <= LIMIT] == []
