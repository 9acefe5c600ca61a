"""``healthcheck run`` of launchers, shells and scripts that start processes: each that trains is watched, all others are left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.slow
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")

TRAIN = """
    import sys, torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(25):
        loss = model(torch.randn(8, 4)).square().mean()
        if "nan" in sys.argv and step == 20: loss = loss * float("nan")
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    if "exit" in sys.argv: sys.exit(7)
"""
SPAWN = """
    import runpy, torch.multiprocessing as mp
    def train(rank): runpy.run_path("train.py")
    if __name__ == "__main__": mp.spawn(train, nprocs=1)
"""
SUBPROCESS = """
    import subprocess, sys
    sys.exit(subprocess.run([sys.executable, "train.py", *sys.argv[1:]]).returncode)
"""
HAND = """
    import torch
    model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(25):
        found = torch.autograd.grad(model(torch.randn(8, 4)).square().mean(), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), found): parameter.grad = gradient
        optimizer.step()
"""
RESTARTED = """
    import os, torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = 0
    if os.path.exists("kept.pt"):
        kept = torch.load("kept.pt")
        model.load_state_dict(kept["model"]); optimizer.load_state_dict(kept["optimizer"]); first = kept["step"]
    for step in range(first + 1, 61):
        optimizer.zero_grad(); model(torch.randn(8, 4)).square().mean().backward(); optimizer.step()
        if step == 30: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "kept.pt")
        if step == 35 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": os._exit(3)
"""
RANKS = """
    import os, subprocess, sys
    ranks = [
        subprocess.Popen([sys.executable, "rank.py"], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29876"})
        for rank in (1, 0)
    ]
    sys.exit(max(one.wait() for one in ranks))
"""
RANK = """
    import os, pathlib, time, torch
    late = os.environ["RANK"] == "0"
    pathlib.Path("here-" + os.environ["RANK"]).touch()
    while not pathlib.Path("done-1" if late else "here-0").exists():  # rank 0 begins when rank 1 is through
        time.sleep(0.05)
    model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    longest = 0.0
    for step in range(25):
        began = time.monotonic()
        optimizer.zero_grad(); model(torch.randn(8, 4)).square().mean().backward(); optimizer.step()
        longest = max(longest, time.monotonic() - began)
    pathlib.Path("done-" + os.environ["RANK"]).write_text(str(longest))
"""
RULES = """
    version: 1
    extends: [healthcheck:recommended]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("train.py", TRAIN), ("spawn.py", SPAWN), ("start.py", SUBPROCESS), ("rules.yaml", RULES)):
        (tmp_path / name).write_text(textwrap.dedent(text))
    (tmp_path / "job.sh").write_text(f'{sys.executable} start.py "$@"\n')
    return tmp_path


def run(command: Callable[..., Any], folder: Path, *words: str, options: tuple[str, ...] = ()) -> Any:
    return command("run", *options, *words, cwd=folder, env={"HEALTHCHECK_RUNS": str(folder / "runs")})


def record(folder: Path) -> Path:
    """The one record of the job."""
    (found,) = [path for path in (folder / "runs").iterdir() if path.is_dir() and not path.is_symlink()]
    return found


LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "train.py"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "train.py"],
    "bash, then a subprocess": ["bash", "job.sh"],
    "mp.spawn": ["spawn.py"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_a_launcher_starts_is_watched_and_has_one_record(
    launcher: str, folder: Path, healthcheck_command: Callable[..., Any]
) -> None:
    if launcher == "accelerate":
        pytest.importorskip("accelerate")
    result = run(healthcheck_command, folder, *LAUNCHERS[launcher])
    assert result.returncode == 0, result.stderr
    assert "25 steps" in result.stderr
    assert "1 child process" in result.stderr
    assert "not watched" not in result.stderr
    reports = [json.loads(path.read_text()) for path in record(folder).rglob("report.json")]
    assert 25 in {report["steps"] for report in reports}


def test_a_child_that_sets_its_gradients_by_hand_is_watched(
    folder: Path, healthcheck_command: Callable[..., Any]
) -> None:
    (folder / "hand.py").write_text(textwrap.dedent(HAND))
    result = run(healthcheck_command, folder, sys.executable, "hand.py")
    assert result.returncode == 0, result.stderr
    assert json.loads((record(folder) / "report.json").read_text())["steps"] >= 23


def test_what_a_launcher_starts_anew_goes_on_from_its_checkpoint_as_one_logical_run(
    folder: Path, healthcheck_command: Callable[..., Any]
) -> None:
    (folder / "restarted.py").write_text(textwrap.dedent(RESTARTED))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1"]
    result = run(healthcheck_command, folder, *launcher, "restarted.py")
    assert result.returncode == 0, result.stderr
    records = sorted(path for path in (folder / "runs").iterdir() if path.is_dir() and not path.is_symlink())
    before, after = (json.loads((path / "run.json").read_text()) for path in records)
    assert (before.get("continues"), after["continues"]) == (None, before["name"])
    assert (after["resumed_from"], after["attempt"]) == (30, 2)
    assert json.loads((records[1] / "report.json").read_text())["steps"] == 60
    assert "with their windows" in result.stderr


def test_a_rank_that_trains_first_does_not_wait_for_the_record_of_rank_0(
    folder: Path, healthcheck_command: Callable[..., Any]
) -> None:
    (folder / "ranks.py").write_text(textwrap.dedent(RANKS))
    (folder / "rank.py").write_text(textwrap.dedent(RANK))
    result = run(healthcheck_command, folder, sys.executable, "ranks.py")
    assert result.returncode == 0, result.stderr
    assert float((folder / "done-1").read_text()) < 8.0  # it imports us in its first step; rank 0 comes later than that
    facts = json.loads((record(folder) / "run.json").read_text())
    assert (facts["rank"], facts["world_size"]) == (0, 2)
    assert "2 child processes" in result.stderr


def test_the_exit_code_of_the_command_is_kept(folder: Path, healthcheck_command: Callable[..., Any]) -> None:
    result = run(healthcheck_command, folder, "bash", "job.sh", "exit")
    assert result.returncode == 7
    assert "25 steps" in result.stderr
    assert "healthcheck: COMMAND FAILED, no alert" in result.stderr


def test_a_child_is_stopped_by_the_rules_that_were_named_and_the_job_fails(
    folder: Path, healthcheck_command: Callable[..., Any]
) -> None:
    options = ("--rules", "rules.yaml", "--set", "loss-not-finite.hint=from the rules of the job")
    result = run(healthcheck_command, folder, "bash", "job.sh", "nan", options=options)
    assert result.returncode == 1
    assert "from the rules of the job" in result.stderr
    assert "train.py: at step 21 by loss-not-finite" in result.stderr


def test_a_script_that_fails_because_a_child_was_stopped_says_so(
    folder: Path, healthcheck_command: Callable[..., Any]
) -> None:
    result = run(healthcheck_command, folder, "start.py", "nan", options=("--rules", "rules.yaml"))
    assert result.returncode == 1
    said = json.loads((record(folder) / "report.json").read_text())["exit_words"]
    assert said.startswith("the script itself exited with 1; train.py: at step 21 by loss-not-finite")


def test_a_healthy_process_is_not_blamed_for_another_one_of_its_job(
    folder: Path, healthcheck_command: Callable[..., Any]
) -> None:
    (folder / "two.sh").write_text(f"{sys.executable} train.py nan; {sys.executable} train.py\n")
    result = run(healthcheck_command, folder, "bash", "two.sh", options=("--rules", "rules.yaml"))
    blocks = [line for line in result.stderr.splitlines() if line.startswith("healthcheck: ")]
    assert any(line.startswith("healthcheck: OK, 25 steps") for line in blocks), result.stderr
    assert blocks[-1].startswith("healthcheck: FAILED, train.py: at step 21 by loss-not-finite; exit 1")


def test_mistakes_in_the_rules_are_told_before_anything_runs(
    folder: Path, healthcheck_command: Callable[..., Any]
) -> None:
    (folder / "rules.yaml").write_text("version: 1\nrules: {high: {metric: los, when: {above: 1}}}\n")
    result = run(healthcheck_command, folder, "bash", "-c", "echo ran", options=("--rules", "rules.yaml"))
    assert result.returncode == 4
    assert "ran" not in result.stdout


@LINUX
@pytest.mark.parametrize("how", ["-I", "-S", "env -i"])
def test_what_cannot_be_reached_is_counted(how: str, folder: Path, healthcheck_command: Callable[..., Any]) -> None:
    python = f"env -i {sys.executable}" if how == "env -i" else f"{sys.executable} {how}"
    # `-S` finds no packages by itself.
    path = f"import sys; sys.path = {sys.path!r}; import time, torch; time.sleep(4)"
    (folder / "hidden.sh").write_text(f'{python} -c "{path}"\n')
    result = run(healthcheck_command, folder, "bash", "hidden.sh")
    assert "1 child not watched" in result.stderr
    assert result.returncode == 5


LOOK = "import sys; print(sorted({'torch', 'healthcheck', 'json', 'yaml'} & set(sys.modules)), len(sys.modules))"


def test_other_programs_that_a_watched_script_starts_behave_as_ever(
    folder: Path, healthcheck_command: Callable[..., Any]
) -> None:
    """Nothing is imported in a Python that does not train, nor in the workers of a pool; git and pip print what they print."""
    (folder / "tools.py").write_text(
        textwrap.dedent(
            f"""
            import concurrent.futures as futures, multiprocessing, subprocess, sys
            def look(_):
                import sys
                return sorted({{"torch", "healthcheck"}} & set(sys.modules))
            if __name__ == "__main__":
                sys.modules.pop("torch", None)
                with futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                    print(*pool.map(look, [0]))
                for command in ([sys.executable, "-c", {LOOK!r}], ["git", "--version"], [sys.executable, "-m", "pip", "--version"]):
                    done = subprocess.run(command, capture_output=True, text=True)
                    print(done.returncode, done.stdout.strip(), done.stderr.strip())
            """
        )
    )
    watched = run(healthcheck_command, folder, "tools.py")
    plain = subprocess.run(
        [sys.executable, "tools.py"], cwd=folder, capture_output=True, text=True, check=True, env={**os.environ}
    )
    first, *others = watched.stdout.splitlines()
    assert first == "[]"
    told, ours = plain.stdout.splitlines()[1].split(), others[0].split()
    assert ours[:2] == told[:2] == ["0", "[]"]
    assert int(ours[2]) - int(told[2]) <= 1  # sitecustomize itself
    assert others[1:] == plain.stdout.splitlines()[2:]


def test_a_sitecustomize_that_ours_hides_is_run(folder: Path, healthcheck_command: Callable[..., Any]) -> None:
    own = folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins; builtins.OWN = __name__\n")
    (folder / "look.sh").write_text(f'{sys.executable} -c "import sitecustomize; print(OWN, sitecustomize.__file__)"\n')
    result = healthcheck_command(
        "run", "bash", "look.sh", cwd=folder, env={"PYTHONPATH": str(own), "HEALTHCHECK_RUNS": str(folder / "runs")}
    )
    assert result.stdout.split() == ["sitecustomize", str(own / "sitecustomize.py")]


def test_an_interpreter_without_healthcheck_runs_as_ever_and_is_counted(
    folder: Path, healthcheck_command: Callable[..., Any]
) -> None:
    code = "import sys; sys.modules['healthcheck'] = None; sys.argv = ['train.py']; import runpy; runpy.run_path('train.py')"
    (folder / "other.sh").write_text(f'{sys.executable} -c "{code}" && echo fine\n')
    result = run(healthcheck_command, folder, "bash", "other.sh")
    assert result.stdout == "fine\n"
    assert "1 child not watched (train.py (healthcheck is not installed in" in result.stderr


def test_the_variables_alone_have_a_job_watched(folder: Path, healthcheck_command: Callable[..., Any]) -> None:
    printed = healthcheck_command("env", "--observe", "--rules", folder / "rules.yaml")
    assert printed.returncode == 0
    (folder / "job.sh").write_text(printed.stdout + f"cd {folder} && {sys.executable} train.py nan\n")
    result = subprocess.run(
        ["bash", str(folder / "job.sh")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HEALTHCHECK_RUNS": str(folder / "runs")},
    )
    assert result.returncode == 0  # observed, never stopped
    assert "loss-not-finite" in result.stderr
    assert json.loads((record(folder) / "report.json").read_text())["mode"] == "observe"


def test_switched_off_the_command_is_what_it_was(folder: Path, healthcheck_command: Callable[..., Any]) -> None:
    result = healthcheck_command("run", "bash", "-c", "echo $HEALTHCHECK_WATCH.; exit 3", env={"HEALTHCHECK": "off"})
    assert (result.returncode, result.stdout, result.stderr) == (3, ".\n", "")
