"""The console never harms the script's own streams. Real processes: only they have real streams."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from healthcheck.reports.console import ascii_only

WRITE = "from healthcheck.reports.console import Stderr; out = Stderr(); "


def python(code: str, *, env: dict[str, str] | None = None, **options: object) -> subprocess.CompletedProcess[bytes]:
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    return subprocess.run([sys.executable, "-c", code], env={**clean, **(env or {})}, timeout=120, **options)  # type: ignore[call-overload, no-any-return]


def test_lines_go_to_stderr_and_nothing_to_stdout() -> None:
    result = python(WRITE + "print('mine'); out.write(['a', 'b'])", capture_output=True)
    assert (result.stdout, result.stderr) == (b"mine\n", b"a\nb\n")


def test_what_the_script_wrote_before_comes_first() -> None:
    result = python(WRITE + "import sys; sys.stderr.write('script '); out.write(['ours'])", capture_output=True)
    assert result.stderr == b"script ours\n"


def test_a_code_page_without_our_letters_is_no_error() -> None:
    result = python(
        WRITE + "out.write(['Gr\\u00f6\\u00dfe \\u2192 1'])", env={"PYTHONIOENCODING": "cp1252"}, capture_output=True
    )
    assert result.returncode == 0
    assert result.stderr == b"Gr\\xf6\\xdfe \\u2192 1\n"


def test_a_broken_pipe_leaves_the_exit_status_alone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = python(WRITE + "out.write(['lost']); out.write(['lost']); raise SystemExit(7)", stderr=writer)
    os.close(writer)
    assert result.returncode == 7


@pytest.mark.parametrize("how", ["sys.stderr.close()", "sys.stderr = None", "import os; os.close(2)"])
def test_a_closed_stderr_is_survived(how: str) -> None:
    result = python(WRITE + f"import sys; {how}; out.write(['lost']); print('done')", capture_output=True)
    assert result.stdout == b"done\n"
    assert result.returncode == 0


def test_a_script_that_replaced_stderr_gets_the_lines_there(tmp_path: Path) -> None:
    code = WRITE + f"import sys; sys.stderr = open({str(tmp_path / 'log')!r}, 'w'); out.write(['here'])"
    assert python(code, capture_output=True).stderr == b""
    assert (tmp_path / "log").read_text() == "here\n"


COLOUR = WRITE + "out.write(['ERROR x'], colour=(0, 5, 'red'))"


def test_no_colour_in_files() -> None:
    assert python(COLOUR, capture_output=True).stderr == b"ERROR x\n"


def test_force_color_colours_files_and_no_color_wins() -> None:
    assert b"\x1b[31mERROR\x1b[0m x" in python(COLOUR, env={"FORCE_COLOR": "1"}, capture_output=True).stderr
    assert python(COLOUR, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}, capture_output=True).stderr == b"ERROR x\n"


def on_a_terminal(code: str, **env: str) -> bytes:
    """What a terminal is sent on stderr."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # bars hide in a window of size 0
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=terminal, stdout=subprocess.DEVNULL, env={**clean, "TERM": "xterm", **env}
    )
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
    assert process.wait(120) == 0
    return seen


def test_a_terminal_gets_colour_and_the_word_stays() -> None:
    assert b"\x1b[31mERROR\x1b[0m x" in on_a_terminal(COLOUR)
    assert b"\x1b[" not in on_a_terminal(COLOUR, NO_COLOR="1")


def test_a_line_never_lands_in_the_middle_of_a_tqdm_bar() -> None:
    pytest.importorskip("tqdm")
    seen = on_a_terminal(
        WRITE
        + "from tqdm import tqdm\nbar = tqdm(total=10, mininterval=0)\nbar.update(5)\nout.write(['ALERT'])\nbar.update(1)\nbar.close()"
    )
    before, _, after = seen.partition(b"ALERT\r\n")
    assert after, seen
    last = before.split(b"\r")[-1]
    assert b"|" not in last, "the bar's line was cleared before ours"
    assert b"6/10" in after


def test_a_finished_bar_needs_no_clearing() -> None:
    pytest.importorskip("tqdm")
    code = WRITE + "from tqdm import tqdm\nlist(tqdm(range(3)))\nout.write(['ALERT'])"
    assert python(code, capture_output=True).stderr.endswith(b"ALERT\n")


def test_a_rich_bar_is_drawn_below_our_line() -> None:
    code = WRITE + (
        "import sys\nfrom rich.console import Console\nfrom rich.progress import Progress\n"
        "with Progress(console=Console(file=sys.__stderr__, force_terminal=True)) as bar:\n"
        "    task = bar.add_task('train', total=10)\n    bar.update(task, advance=5)\n    out.write(['ALERT'])\n"
    )
    seen = on_a_terminal(code, COLUMNS="80")
    before, _, after = seen.partition(b"ALERT")
    assert b"train" in after, "rich draws its bar again after our line"
    assert b"train" not in before.split(b"\x1b[2K")[-1]


def test_text_outside_ascii_is_spelled_out() -> None:
    assert ascii_only("Größe") == "Gr\\xf6\\xdfe"
