"""What the machine may do to a run: a full quota, a closed terminal, an impatient person. Training ends as it would have without us."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TRAIN = """
    import sys, time, torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for i in range({steps}):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if i == 10:
            print("TEN", flush=True)
        time.sleep({pause})
    print("TRAINED", round(float(model.weight.detach().sum()), 6), flush=True)
"""


def started(path: Path, folder: Path, **more: Any) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "HEALTHCHECK_RUNS": str(folder / "runs"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    command = [sys.executable, "-m", "healthcheck", "run", path.name]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=path.parent, env=environment, text=True, **{**streams, **more})


def test_a_quota_on_the_size_of_files_costs_the_record_and_not_the_training(
    tmp_path: Path, script: Callable[..., Path]
) -> None:
    path = script(TRAIN.format(steps=60, pause=0))
    plain = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120).stdout
    limited = started(path, tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)))
    out, err = limited.communicate(timeout=120)
    assert out == plain
    assert limited.returncode == 0, err
    assert "Traceback" not in err
    assert "healthcheck: OK" in err


def test_a_terminal_that_is_closed_in_the_middle_does_not_end_the_training(
    tmp_path: Path, script: Callable[..., Path]
) -> None:
    read, write = os.pipe()
    run = started(script(TRAIN.format(steps=40, pause=0.01)), tmp_path, stderr=write)
    os.close(write)
    os.close(read)  # nobody reads what we say from now on
    out, _ = run.communicate(timeout=120)
    assert "TRAINED" in out
    assert run.returncode == 0


def test_a_parent_that_dies_leaves_the_run_to_its_end(
    tmp_path: Path, script: Callable[..., Path], wait_until: Callable[..., None]
) -> None:
    path = script(TRAIN.format(steps=40, pause=0.01))
    environment = {
        **os.environ,
        "HEALTHCHECK_RUNS": str(tmp_path / "runs"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    line = f"{sys.executable} -m healthcheck run {path.name} > out.txt 2>&1 & wait"
    shell = subprocess.Popen(["sh", "-c", line], cwd=path.parent, env=environment)
    out = path.parent / "out.txt"
    wait_until(lambda: out.exists() and "TEN" in out.read_text(), "ten steps")
    shell.kill()
    shell.wait()
    wait_until(lambda: list((tmp_path / "runs").glob("*/report.json")), "the report")
    wait_until(lambda: "exit 0" in out.read_text(), "the closing line")
    assert "TRAINED" in out.read_text()


def test_ctrl_c_twice_still_leaves_a_whole_record(tmp_path: Path, script: Callable[..., Path]) -> None:
    run = started(
        script(TRAIN.format(steps=10_000, pause=0.01)),
        tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "TEN\n"
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=120)
    assert run.returncode in (2, -signal.SIGINT), err
    (record,) = [path for path in (tmp_path / "runs").glob("*-*") if path.is_dir() and not path.is_symlink()]
    for line in (record / "samples.jsonl").read_text().splitlines():
        json.loads(line)
    if (record / "report.json").exists():
        assert json.loads((record / "report.json").read_text())["exit_reason"] == "interrupted"


PLUGIN = """
import os, torch, healthcheck
@healthcheck.hookimpl
def healthcheck_before_update(session, event):
    parameters = [p for group in event.optimizer.param_groups for p in group["params"]]
    {body}
"""
CHANGES = {
    "in place": "[p.grad.mul_(0.5) for p in parameters]",
    "by clipping": "torch.nn.utils.clip_grad_norm_(parameters, 1e-3)",
    "by others in their place": "for p in parameters: p.grad = p.grad * 0.5",
}
READS = {
    "norms": "[p.grad.norm().item() for p in parameters]",
    "a copy that it changes": "[p.grad.clone().mul_(0.5) for p in parameters]",
    "more memory than there is": "bytearray(10**15)",
    "a call of itself without end": "exec('def f(): f()', globals()); f()",
    "files, which it closes": "[os.close(n) for n in range(3, 40) if os.path.exists(f'/proc/self/fd/{n}')]",
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_plugin_that_changes_gradients_is_named_as_what_it_is(
    how: str, healthcheck_warm: Callable[..., Any], tmp_path: Path, script: Callable[..., Path]
) -> None:
    path = script(TRAIN.format(steps=20, pause=0))
    (tmp_path / "theirs.py").write_text(PLUGIN.replace("{body}", CHANGES[how]))
    done = healthcheck_warm(
        "run", "-p", tmp_path / "theirs.py", "--report", "junit=out.xml", path.name, cwd=path.parent
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('"theirs" changed 2 of 2 gradients in before_update at step 1') == 1
    assert "gradients were changed by: theirs" in done.stderr
    assert "plugins with errors" not in done.stderr
    assert "theirs" not in (path.parent / "out.xml").read_text()


@pytest.mark.parametrize("what", READS)
def test_a_plugin_that_reads_gradients_or_fails_by_itself_leaves_the_training_as_it_is(
    what: str, healthcheck_warm: Callable[..., Any], tmp_path: Path, script: Callable[..., Path]
) -> None:
    path = script(TRAIN.format(steps=20, pause=0))
    (tmp_path / "theirs.py").write_text(PLUGIN.replace("{body}", READS[what]))
    plain = healthcheck_warm("run", path.name, cwd=path.parent)
    done = healthcheck_warm("run", "-p", tmp_path / "theirs.py", path.name, cwd=path.parent)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert "changed" not in done.stderr
    assert "Traceback" not in done.stderr
