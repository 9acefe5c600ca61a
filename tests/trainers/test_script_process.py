"""A watched script is what it is under plain python: arguments, globals, tracebacks, exits, children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HEAD = (sys.executable, "-c", "import sys; from healthcheck.cli import main; sys.exit(main())", "run", "-qq")
QUIET = {"HEALTHCHECK_AGREE": "off", "OMP_NUM_THREADS": "1"}


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")}
    return {**clean, **QUIET, "HEALTHCHECK_RUNS": str(tmp_path / "runs"), **more}


def both(
    tmp_path: Path, *words: str, cwd: Path | None = None
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """The same script under plain python and watched."""
    given = {"cwd": cwd or tmp_path, "env": environment(tmp_path), "capture_output": True, "text": True, "timeout": 200}
    return subprocess.run([sys.executable, *words], **given), subprocess.run([*HEAD, *words], **given)  # type: ignore[call-overload]


LOOK = """
    import sys, os
    print(sys.argv, __name__, __file__, getattr(__spec__, "name", None), getattr(__spec__, "origin", None), __package__, __cached__, __doc__)
    print(sorted(globals()), sys.path[0], type(__loader__).__name__)
    import __main__
    print(__main__.__dict__ is globals(), sys.orig_argv[1:] if hasattr(sys, "orig_argv") else "")
    import helper
    print(helper.__file__)
"""


def test_a_script_finds_the_world_that_python_gives_it(tmp_path: Path, script: Callable[..., Path]) -> None:
    (tmp_path / "deep").mkdir()
    script(LOOK, "deep/train.py")
    script("", "deep/helper.py")

    plain, watched = both(tmp_path, "deep/train.py", "--lr", "3e-4", "--", "-x")

    assert watched.stdout == plain.stdout
    assert plain.returncode == 0


@pytest.mark.slow
def test_a_module_finds_the_world_that_python_m_gives_it(tmp_path: Path, script: Callable[..., Path]) -> None:
    (tmp_path / "pkg").mkdir()
    script("", "pkg/__init__.py")
    script(LOOK.replace("__cached__, ", "").replace("import helper", "from pkg import helper"), "pkg/train.py")
    script("from . import train", "pkg/__main__.py")
    script("", "pkg/helper.py")

    plain, watched = both(tmp_path, "-m", "pkg.train", "--steps", "5")
    package_plain, package_watched = both(tmp_path, "-m", "pkg")

    assert watched.stdout == plain.stdout
    assert plain.returncode == 0, plain.stderr
    assert package_watched.stdout == package_plain.stdout


@pytest.mark.slow
def test_an_uncaught_exception_prints_the_same_traceback(tmp_path: Path, script: Callable[..., Path]) -> None:
    """Not one frame of ours, even when it passed through a function that we watch."""
    script(
        """
        import torch, warnings
        warnings.warn("from the script", DeprecationWarning)
        def step():
            loss = torch.nn.Linear(2, 1)(torch.ones(1, 2)).sum()
            loss.backward()
            try:
                loss.backward()
            except RuntimeError as error:
                raise ValueError("bad step") from error
        step()
        """
    )

    plain, watched = both(tmp_path, "train.py")

    assert watched.stderr == plain.stderr
    assert (plain.returncode, watched.returncode) == (1, 1)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(3)", 3),
        *(
            pytest.param(end, code, marks=pytest.mark.slow)
            for end, code in (
                ("sys.exit('no data')", 1),
                ("raise SystemExit", 5),
                ("sys.exit(256 + 7)", 7),
                ("pass", 5),
            )
        ),
    ],
)
def test_the_scripts_own_exit_status_is_kept(tmp_path: Path, script: Callable[..., Path], end: str, code: int) -> None:
    """0 becomes 5 here, because there was no training in it."""
    script(f"import sys\nprint('bye')\n{end}\n")

    plain, watched = both(tmp_path, "train.py")

    assert watched.returncode == code
    assert watched.stdout == plain.stdout
    if code != 5:
        assert watched.stderr == plain.stderr


@pytest.mark.slow
def test_a_syntax_error_looks_like_pythons(tmp_path: Path, script: Callable[..., Path]) -> None:
    script("def f(:\n    pass\n")

    plain, watched = both(tmp_path, "train.py")

    assert watched.stderr == plain.stderr
    assert watched.returncode == 1


@pytest.mark.slow
def test_an_exit_hook_of_the_script_is_called_and_still_sees_its_globals(
    tmp_path: Path, script: Callable[..., Path]
) -> None:
    script(
        """
        import atexit, pickle, sys
        class Thing: pass
        atexit.register(lambda: print("bye", pickle.loads(pickle.dumps(Thing())), sys.argv))
        Thing.__repr__ = lambda self: "thing"
        """
    )

    plain, watched = both(tmp_path, "train.py")

    assert watched.stdout == plain.stdout == "bye thing ['train.py']\n"


SLEEPER = """
    import sys, time, signal
    import torch
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
    {before}
    step()
    print("ready", flush=True)
    for i in range(3000):
        step()
        time.sleep(0.01)
"""


def killed(tmp_path: Path, script: Callable[..., Path], number: int, before: str = "") -> tuple[int, str]:
    script(SLEEPER.format(before=before))
    process = subprocess.Popen(
        [*HEAD, "--report", "json=hc.json", "train.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        # A test run in the background ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=200)
    return process.returncode, out


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_sigterm_writes_the_report_and_kills_the_process(tmp_path: Path, script: Callable[..., Path]) -> None:
    code, _ = killed(tmp_path, script, signal.SIGTERM)

    assert code == -signal.SIGTERM  # a shell shows 143
    report = json.loads((tmp_path / "hc.json").read_text())
    assert report["exit_code"] == 143
    assert report["exit_reason"] == "interrupted"
    assert report["steps"] > 0


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_sigterm_while_the_report_is_being_written_does_not_lose_it(
    tmp_path: Path, script: Callable[..., Path]
) -> None:
    """A launcher ends all ranks as soon as the first has failed: the others are at their reports then."""
    script(SLEEPER.format(before="").replace("3000", "3"))
    script(
        """
        import os, signal, healthcheck
        @healthcheck.hookimpl
        def healthcheck_report_section(session, report):
            os.kill(os.getpid(), signal.SIGTERM)
        """,
        "impatient.py",
    )
    command = [*HEAD, "-p", "./impatient.py", "--report", "json=hc.json", "train.py"]

    ended = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=200
    )

    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "hc.json").read_text())["exit_reason"] == "ok"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_the_scripts_own_sigterm_handler_decides(tmp_path: Path, script: Callable[..., Path]) -> None:
    own = """
    def handler(number, frame):
        print("saving", flush=True)
        sys.exit(7)
    assert signal.signal(signal.SIGTERM, handler) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is handler
"""
    code, out = killed(tmp_path, script, signal.SIGTERM, own)

    assert code == 7
    assert "saving" in out
    assert (tmp_path / "hc.json").is_file()


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_writes_the_report_and_exits_with_2(tmp_path: Path, script: Callable[..., Path]) -> None:
    code, _ = killed(tmp_path, script, signal.SIGINT)

    assert code == 2
    assert (tmp_path / "hc.json").is_file()


SLOW_STEPS = """
    import os, signal, sys, time
    import torch
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    {before}
    for i in range(300):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().mean()
        loss.backward()
        if i == 3:
            {in_the_step}
            print("the step goes on", flush=True)
        optimizer.step()
        print("step", i, flush=True)
"""
PRESS = "os.kill(os.getpid(), signal.SIGINT)"


def pressed(
    tmp_path: Path, script: Callable[..., Path], in_the_step: str, *, before: str = ""
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    script(SLOW_STEPS.format(in_the_step=in_the_step, before=before))
    ended = subprocess.run(
        [*HEAD, "--report", "json=hc.json", "train.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return ended, json.loads((tmp_path / "hc.json").read_text())


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
class TestCtrlC:
    def test_once_ends_the_run_after_the_step(self, tmp_path: Path, script: Callable[..., Path]) -> None:
        ended, report = pressed(tmp_path, script, PRESS)
        assert ended.returncode == 2
        assert "the step goes on" in ended.stdout
        assert "step 4" not in ended.stdout
        assert (report["steps"], report["exit_reason"], report["exit_code"]) == (4, "interrupted", 2)
        assert "press Ctrl-C again to end at once" in ended.stderr

    def test_twice_ends_it_at_once(self, tmp_path: Path, script: Callable[..., Path]) -> None:
        ended, report = pressed(tmp_path, script, f"{PRESS}; {PRESS}")
        assert ended.returncode == 2
        assert "the step goes on" not in ended.stdout
        assert report["exit_reason"] == "interrupted"

    def test_outside_of_training_once_is_at_once(self, tmp_path: Path, script: Callable[..., Path]) -> None:
        ended, report = pressed(tmp_path, script, "pass", before=f"{PRESS}; print('too late', flush=True)")
        assert ended.returncode == 2
        assert "too late" not in ended.stdout
        assert (report["steps"], report["exit_reason"]) == (0, "interrupted")

    def test_a_handler_of_the_script_is_called_at_once_and_seen_by_it(
        self, tmp_path: Path, script: Callable[..., Path]
    ) -> None:
        before = "own = lambda *_: sys.exit(7); signal.signal(signal.SIGINT, own); assert signal.getsignal(signal.SIGINT) is own"
        ended, _ = pressed(tmp_path, script, PRESS, before=before)
        assert ended.returncode == 7
        assert "the step goes on" not in ended.stdout

    def test_a_script_that_catches_it_may_go_on_for_as_long_as_was_asked(
        self, tmp_path: Path, script: Callable[..., Path]
    ) -> None:
        script(
            """
            import os, signal
            import torch
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for i in range(8):
                try:
                    optimizer.zero_grad()
                    model(torch.ones(4, 2)).square().mean().backward()
                    if i == 3:
                        os.kill(os.getpid(), signal.SIGINT)
                    optimizer.step()
                except KeyboardInterrupt:
                    print("caught at", i, flush=True)
            """
        )
        ended = subprocess.run(
            [*HEAD, "--max-time", "10m", "--report", "json=hc.json", "train.py"],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=200,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert ended.returncode == 0, ended.stderr
        assert "caught at 3" in ended.stdout
        assert json.loads((tmp_path / "hc.json").read_text())["steps"] == 8


@pytest.mark.slow
def test_max_time_counts_training_and_not_what_comes_before_it(tmp_path: Path, script: Callable[..., Path]) -> None:
    script(
        """
        import time
        import torch
        time.sleep(1.5)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(100_000):
            optimizer.zero_grad()
            model(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
            time.sleep(0.01)
        """
    )
    command = [*HEAD, "--max-time", "1s", "--report", "json=hc.json", "train.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=200
    )
    report = json.loads((tmp_path / "hc.json").read_text())
    assert ended.returncode == 0, ended.stderr
    assert report["seconds"] > 2.5
    assert report["steps"] >= 10


@pytest.mark.slow
def test_loader_workers_are_not_disturbed(
    healthcheck_command: Callable, script: Callable[..., Path], tmp_path: Path
) -> None:
    """By fork they inherit our hooks and handlers, by spawn they start afresh."""
    path = script(
        """
        import torch, signal
        from torch.utils.data import DataLoader, TensorDataset
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, i):
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
                assert not hasattr(torch.autograd.backward, "__wrapped__")
                return torch.ones(2)
        if __name__ == "__main__":
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for context in ("fork", "spawn"):
                for x in DataLoader(Data(), 4, num_workers=2, multiprocessing_context=context):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                print(context)
        """
    )

    result = healthcheck_command("run", path)

    assert result.returncode == 0, result.stderr
    assert result.stdout == "fork\nspawn\n"
    assert "4 steps" in result.stderr
    assert "not watched" not in result.stderr


@pytest.mark.slow
def test_children_with_an_interpreter_of_their_own_are_watched_and_forked_ones_are_named(
    healthcheck_command: Callable, script: Callable[..., Path]
) -> None:
    path = script(
        """
        import torch
        import torch.multiprocessing as mp
        def train(rank):
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for i in range(3):
                model(torch.ones(4, 2)).mean().backward()
                optimizer.step()
        def idle(): pass
        if __name__ == "__main__":
            mp.spawn(train, nprocs=1)
            for target, given in ((train, (0,)), (idle, ())):
                child = mp.get_context("fork").Process(target=target, args=given)
                child.start()
                child.join()
                print(child.exitcode)
        """
    )

    result = healthcheck_command("run", path)

    assert result.stdout == "0\n0\n"
    assert result.returncode == 0
    assert "OK (trained in 1 child process: " in result.stderr
    assert "1 child process trained and was not watched (train)" in result.stderr


@pytest.mark.slow
def test_a_training_thread_is_waited_for(healthcheck_command: Callable, script: Callable[..., Path]) -> None:
    path = script(
        """
        import threading, time, torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        def work():
            time.sleep(0.5)
            for i in range(3):
                model(torch.ones(4, 2)).mean().backward()
                optimizer.step()
        threading.Thread(target=work).start()
        """
    )

    result = healthcheck_command("run", path)

    assert result.returncode == 0
    assert "3 steps" in result.stderr


def test_a_pool_that_nobody_shut_down_finishes_its_work_and_ends(
    healthcheck_command: Callable, script: Callable[..., Path]
) -> None:
    """Compilers keep such pools for the whole process; the interpreter ends them before it waits for their threads."""
    path = script(
        """
        import concurrent.futures, time, torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pool = concurrent.futures.ThreadPoolExecutor(2)
        def work():
            time.sleep(0.5)
            for i in range(3):
                model(torch.ones(4, 2)).mean().backward()
                optimizer.step()
        pool.submit(work)
        """
    )

    result = healthcheck_command("run", path)

    assert result.returncode == 0
    assert "3 steps" in result.stderr


def test_os_exit_does_not_lose_the_report(
    healthcheck_command: Callable, script: Callable[..., Path], tmp_path: Path
) -> None:
    path = script("import os\nprint('out', flush=True)\nos._exit(9)\n")

    result = healthcheck_command("run", "--report", f"json={tmp_path / 'hc.json'}", path)

    assert result.returncode == 9
    assert (tmp_path / "hc.json").is_file()
