"""Ends a suite that hangs, and says where: workers of pytest-xdist that say nothing for ten minutes, with the stacks of their threads.

Without it a hang lasts until whoever runs the suite loses patience, and leaves nothing to learn from. A test that hangs is
a failure (exit code 1). Where no worker runs a test and the suite goes on for none of them, pytest or pytest-xdist lost
something on the way: exit code 75 ("try again", as in sysexits.h), which ``make test`` does once.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

PATIENCE = float(os.environ.get("HEALTHCHECK_TEST_PATIENCE", "600"))
"""Seconds. The longest test takes one minute, on a loaded machine five."""
TRY_AGAIN = 75
STACKS = ".stacks"


class Worker:
    """In a worker: notes the test at hand, and writes its stacks when it is asked to (SIGUSR2)."""

    def __init__(self, folder: Path, name: str) -> None:
        self._state = folder / name
        self._stacks = folder.joinpath(name + STACKS).open("w", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, self._stacks, all_threads=True)
        self._note(None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._note(item.nodeid)
        try:
            return (yield)
        finally:
            self._note(None)

    def _note(self, test: str | None) -> None:
        new = self._state.with_suffix(".new")
        new.write_text(json.dumps({"pid": os.getpid(), "test": test, "since": time.time()}), encoding="utf-8")
        new.replace(self._state)


class Controller:
    """In the process that hands out tests: a thread that looks at what its workers note."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="stalls-"))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["stalls"] = str(self.folder)

    def pytest_sessionstart(self) -> None:
        self._thread.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """All workers have ended by now."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _workers(self) -> dict[str, dict[str, Any]]:
        """What each of them has noted last."""
        files = [path for path in self.folder.iterdir() if not path.suffix]
        return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in files}

    def _watch(self) -> None:
        while not self._over.wait(PATIENCE / 60):
            workers = self._workers()
            silent = {name: one for name, one in workers.items() if time.time() - one["since"] > PATIENCE}
            hanging = {name: one for name, one in silent.items() if one["test"]}
            if hanging:
                self._end(hanging, 1)
            elif silent and len(silent) == len(workers):
                self._end(silent, TRY_AGAIN)

    def _end(self, silent: dict[str, dict[str, Any]], code: int) -> None:
        """Print what there is to learn, and end this process and its workers."""
        out = sys.__stderr__ or sys.stderr
        for name, one in silent.items():
            os.kill(one["pid"], signal.SIGUSR2)
            time.sleep(2)
            test = f"in {one['test']}" if one["test"] else "and runs no test"
            print(f"\n{name} has said nothing for {PATIENCE:g} seconds, {test}. Its threads:", file=out)
            print((self.folder / (name + STACKS)).read_text(encoding="utf-8"), file=out)
        print("Threads of the process that hands out tests:", file=out, flush=True)
        faulthandler.dump_traceback(out)
        out.flush()
        workers = self._workers()
        shutil.rmtree(self.folder, ignore_errors=True)
        for one in workers.values():
            os.kill(one["pid"], signal.SIGKILL)
        os._exit(code)


def watch(config: pytest.Config) -> None:
    """Begin, in a process that pytest configures; nothing is watched without pytest-xdist."""
    given = getattr(config, "workerinput", None)
    if given is not None:
        config.pluginmanager.register(Worker(Path(given["stalls"]), given["workerid"]), "stalls")
    elif getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Controller(), "stalls")
