"""The live view and ``top`` in real terminals of three widths, driven through tmux."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux on this machine"),
]
SCRIPT = """
import time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(4000):
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean() + (1000 if step == 40 else 0)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if step % 100 == 0:
        print("said", step, flush=True)
    time.sleep(0.02)
"""
RULES = "version: 1\nrules: {high: {metric: loss, when: {above: 100}, hint: look at the batch}}\n"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """``terminal(name, *arguments)``: a tmux server of this test alone."""
    socket = str(tmp_path / "tmux")

    def call(*arguments: str) -> str:
        return subprocess.run(["tmux", "-S", socket, *arguments], capture_output=True, text=True, check=True).stdout

    yield call
    subprocess.run(["tmux", "-S", socket, "kill-server"], capture_output=True)


def until(look: Callable[[], str], wanted: str, seconds: float = 120.0) -> str:
    end = time.monotonic() + seconds
    while wanted not in (screen := look()):
        assert time.monotonic() < end, screen
        time.sleep(0.2)
    return screen


def test_a_live_run_and_top_beside_it_fit_three_widths_and_leave_a_tidy_terminal(
    terminal: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "rules.yaml").write_text(RULES)
    command = f"{sys.executable} -m healthcheck"
    run = f"cd {tmp_path} && HEALTHCHECK_RUNS=runs {command} run --live --rules rules.yaml --max-steps 1500 train.py"
    terminal("new-session", "-d", "-s", "live", "-x", "80", "-y", "40", f"{run}; echo END; sleep 600")

    def of(name: str) -> Callable[[], str]:
        return lambda: terminal("capture-pane", "-p", "-t", name)

    shown = until(of("live"), "1 alert")
    assert "train.py: running, step " in shown
    assert "try: look at the batch" in shown
    assert "said 0" in terminal("capture-pane", "-p", "-S", "-", "-t", "live")  # what the script prints is above it
    for width in (120, 80, 42):
        name = f"top{width}"
        top = f"cd {tmp_path} && HEALTHCHECK_RUNS=runs {command} top --every 0.5"
        terminal("new-session", "-d", "-s", name, "-x", str(width), "-y", "40", f"{top}; echo END; sleep 600")
        screen = until(of(name), "1 alert")
        assert "running, step" in screen.replace("\n  ", " ")
        assert "loss" in screen
        assert max(map(len, screen.splitlines())) <= width
    ended = until(of("live"), "END")
    assert "exit" in ended
    assert "running, step" not in ended  # the view is gone, what was said stays
    assert "said 1400" in ended
