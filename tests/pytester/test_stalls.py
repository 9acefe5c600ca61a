"""A suite that hangs is ended, with the place: real workers of pytest-xdist that hang in a test, or between two tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = """
import importlib.util, time
import pytest
spec = importlib.util.spec_from_file_location("stalls", {stalls!r})
stalls = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stalls)

def pytest_configure(config):
    stalls.watch(config)
    if {between!r}:
        config.pluginmanager.register(LostBetweenTests())

class LostBetweenTests:
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        yield
        time.sleep(600)
"""


def suite(folder: Path, repository: Path, tests: str, *, between: bool = False) -> subprocess.CompletedProcess[str]:
    stalls = str(repository / "tests" / "stalls.py")
    (folder / "conftest.py").write_text(CONFTEST.format(stalls=stalls, between=between))
    for name in ("test_a.py", "test_b.py"):
        (folder / name).write_text(tests)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    environment = {**os.environ, "HEALTHCHECK_TEST_PATIENCE": "6"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_a_test_that_hangs_is_a_failure_and_its_place_is_shown(tmp_path: Path, repository: Path) -> None:
    ended = suite(tmp_path, repository, "import time\ndef test_it(): waits()\ndef waits(): time.sleep(600)\n")
    assert ended.returncode == 1
    assert "has said nothing for 6 seconds, in test_a.py::test_it. Its threads:" in ended.stderr
    assert 'test_a.py", line 3 in waits' in ended.stderr


def test_workers_that_get_lost_between_two_tests_are_worth_another_try(tmp_path: Path, repository: Path) -> None:
    ended = suite(tmp_path, repository, "def test_it(): pass\n", between=True)
    assert ended.returncode == 75
    assert "gw0 has said nothing for 6 seconds, and runs no test. Its threads:" in ended.stderr
    assert re.search(r'conftest\.py", line \d+ in pytest_runtest_protocol', ended.stderr)
    assert "Threads of the process that hands out tests:" in ended.stderr


def test_a_suite_that_goes_on_is_left_alone(tmp_path: Path, repository: Path) -> None:
    tests = "import pytest, time\n@pytest.mark.parametrize('n', range(8))\ndef test_it(n): time.sleep(1)\n"
    ended = suite(tmp_path, repository, tests)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
