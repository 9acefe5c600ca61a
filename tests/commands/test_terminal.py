"""Views for reading on a real terminal of a given width, and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

PROGRAM = (sys.executable, "-m", "healthcheck")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return kept | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "TERM": "xterm"} | more


def on_a_terminal(width: int, *argv: str) -> list[str]:
    """Lines that a terminal of this width is sent on standard output."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    process = subprocess.Popen([*PROGRAM, *argv], stdin=terminal, stdout=terminal, env=environment())
    os.close(terminal)
    seen = b""
    while True:
        try:
            chunk = os.read(controller, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(controller)
    assert process.wait(60) == 0
    return seen.decode().splitlines()


def in_a_pipe(*argv: str, **variables: str) -> list[str]:
    done = subprocess.run([*PROGRAM, *argv], capture_output=True, text=True, env=environment(**variables), timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("command", ["metrics --all", "plan"])
def test_a_table_fits_the_terminal_and_a_pipe_has_one_line_a_row(here: Path, command: str) -> None:
    """``grep`` must find the whole row, in whatever window it was typed; a person must be able to read it."""
    piped = in_a_pipe(*command.split())
    assert piped == in_a_pipe(*command.split(), COLUMNS="40", FORCE_COLOR="1")
    assert not any("\x1b" in line for line in piped)
    rows = piped[1 + next(i for i, line in enumerate(piped) if line.endswith(("what it is", "judged here"))) :]
    rows = rows[: rows.index("")]
    assert max(map(len, rows)) > 100

    shown = on_a_terminal(100, *command.split())
    head = next(line for line in shown if "\x1b[1m" in line)
    table = [ESCAPE.sub("", line) for line in shown[shown.index(head) :]]
    table = table[: table.index("")]
    assert max(map(len, table)) <= 100
    words = set(" ".join(table).split())
    assert [row.split()[0] for row in rows if row.split()[0] not in words] == []
