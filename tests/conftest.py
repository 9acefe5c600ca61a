"""What every test may use: the console command as a real process."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from healthcheck.core.clock import VirtualClock

REPOSITORY = Path(__file__).resolve().parent.parent
Run = Callable[..., "subprocess.CompletedProcess[str]"]

# The console command without depending on where pip put it: the same entry point.
COMMAND = (sys.executable, "-c", "import sys; from healthcheck.cli import main; sys.exit(main())")


def load_helper(path: str) -> ModuleType:
    """A module of the checkout by its path."""
    spec = importlib.util.spec_from_file_location(f"helper_{Path(path).stem.strip('_')}", REPOSITORY / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ALL_SLOW = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.MULTILINE)


def fast_only(config: pytest.Config) -> bool:
    """Whether these are the tests of ``make check``."""
    return bool(config.option.markexpr == "not slow")


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried with 100 examples each, in the fast tests with 30; how long one takes is no property."""
    settings.register_profile("whole", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("fast", settings.get_profile("whole"), max_examples=30)
    settings.load_profile("fast" if fast_only(config) else "whole")
    load_helper("tests/stalls.py").watch(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast tests do not even import a file whose tests are all slow: some begin with a whole trainer framework."""
    if not fast_only(config) or collection_path.suffix != ".py":
        return None
    return True if ALL_SLOW.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: looking for garbage in it takes a third of the time that collecting takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


PATIENCE = 120.0
"""Seconds after which a test that waits for something gives up: it matters only where something is broken."""


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """``wait_until(path.exists, "a report")``: waits for an event as long as a busy machine may need."""

    def wait(happened: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {seconds:g} seconds")
            time.sleep(0.02)

    return wait


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """Only ``time.sleep`` lets time pass for the sessions of this process: what sleeps is what costs, on any machine."""
    from healthcheck.core import clock
    from healthcheck.run import board as probing
    from healthcheck.run import session

    now = clock.VirtualClock(100.0)
    monkeypatch.setattr(time, "sleep", now.advance)
    monkeypatch.setattr(clock.LiveClock, "monotonic", now.monotonic)
    for module in (probing, session):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: round(now.monotonic() * 1e9))
    return now


@pytest.fixture
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def helper() -> Callable[[str], ModuleType]:
    """``helper("tests/plugins/clean_venv.py")``: under importmode=importlib the folders of tests are no packages."""
    return load_helper


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """``clone(folder)``: what a fresh clone of this working tree holds, copied there; nothing that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    first = tmp_path_factory.mktemp("clone")
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():  # not deleted since the last commit
            (first / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, first / name)
    # Once for all copies: each process would else compile the package anew.
    subprocess.run([sys.executable, "-m", "compileall", "-q", first / "healthcheck"], check=True)

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(first, folder, dirs_exist_ok=True))

    return copy


@pytest.fixture(scope="session")
def compiler_imported() -> None:
    """torch's compiler comes with the first optimizer: 300,000 objects, here before the first test and not within it."""
    torch = pytest.importorskip("torch")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.fixture(scope="module", autouse=True)
def nothing_compiled() -> None:
    """What tests of another file have compiled in this process is forgotten: some things are not looked at beside compiled code."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """What is there when a file of tests begins is looked through no more: modules, and what other files have left.

    Each watched script looks for living models and collects garbage; with all that was imported, that is most of a test.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def healthcheck_command(tmp_path: Path) -> Run:
    """``healthcheck_command("run", "train.py", cwd=..., env=...)``: exit code and both streams of a real process.

    Records go to ``tmp_path/runs``; the working directory is ``tmp_path`` unless ``cwd`` is given.
    Variables of ours that the developer has set do not reach the process.
    """
    script = Path(sys.executable).with_name("healthcheck")
    head = (str(script),) if script.exists() else COMMAND

    def run(
        *args: object, cwd: Path = tmp_path, env: Mapping[str, str] | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*head, *map(str, args)],
            cwd=cwd,
            env=_environment(tmp_path, env),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    return run


def _environment(folder: Path, more: Mapping[str, str] | None) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")}
    return {**clean, "HEALTHCHECK_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1", **(more or {})}


@pytest.fixture(scope="session")
def warm_command(helper: Callable[[str], ModuleType]) -> Generator[Any, None, None]:
    """One process that has torch imported, for all commands of this worker's tests."""
    warm = helper("tests/warm.py").WarmCommand()
    yield warm
    warm.close()


@pytest.fixture
def healthcheck_warm(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, warm_command: Any, healthcheck_command: Run
) -> Run:
    """As ``healthcheck_command``, in a fork of a process that has torch imported: a toy run takes a tenth of the time.

    For tests of what a run says, not of how a process begins.
    """
    if sys.platform != "linux":  # elsewhere a fork of a process with torch is not safe, or there is none
        return healthcheck_command

    def run(
        *args: object, cwd: Path = tmp_path, env: Mapping[str, str] | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        given, streams = list(map(str, args)), tmp_path_factory.mktemp("streams")
        ended: subprocess.CompletedProcess[str] = warm_command.run(
            given, cwd=cwd, env=_environment(tmp_path, env), streams=streams, timeout=timeout
        )
        return ended

    return run


@pytest.fixture
def healthcheck_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """As ``healthcheck_command``, in this process: for commands that run no script. Saves the start of Python and torch."""
    from healthcheck.cli import main

    def run(
        *args: object, cwd: Path = tmp_path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name in [n for n in os.environ if n.startswith("HEALTHCHECK")]:
                patch.delenv(name)
            for name, value in {"HEALTHCHECK_RUNS": str(tmp_path / "runs"), **(env or {})}.items():
                patch.setenv(name, value)
            patch.chdir(cwd)
            capfd.readouterr()
            code = main([str(arg) for arg in args])
            out, err = capfd.readouterr()
        return subprocess.CompletedProcess(list(args), code, out, err)

    return run
