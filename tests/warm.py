"""The command in processes that need not import torch first: they are forks of one that has.

Python, torch and torch's compiler take three seconds to start, a toy script takes less. For tests of what a run says of
its training, not of how a run begins. As a program this is the process that forks; see the fixture ``healthcheck_warm``.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class WarmCommand:
    """Runs ``healthcheck ARGS`` in forks of one warm process."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, args: Sequence[str], *, cwd: Path, env: Mapping[str, str], streams: Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """One command to its end; raises ``TimeoutExpired`` and begins anew where it takes too long.

        :param streams: a folder for what the command writes to stdout and stderr.
        """
        if self._server is None or self._server.poll() is not None:
            self._server = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
                start_new_session=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        out, err = streams / "stdout", streams / "stderr"
        job = {"argv": list(args), "cwd": str(cwd), "env": dict(env), "out": str(out), "err": str(err)}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        if not select.select([self._server.stdout], [], [], timeout)[0]:
            self.close()
            raise subprocess.TimeoutExpired(list(args), timeout, out.read_text(), err.read_text())
        code = int(self._server.stdout.readline())
        said = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
        return subprocess.CompletedProcess(list(args), code, *said)

    def close(self) -> None:
        """End the warm process and what it has started."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None


def serve() -> dict[str, Any] | None:
    """In each fork its job; in the warm process None, once nobody has another one."""
    import torch

    import healthcheck.cli.run  # noqa: F401

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer brings the compiler
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            random.seed()  # as in a new process: a script that sets no seed has another one in each run
            torch.seed()
            return dict(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def main() -> int:
    from healthcheck.cli import main

    job = serve()
    if job is None:
        return 0
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    for number, path, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, job["out"], os.O_WRONLY),
        (2, job["err"], os.O_WRONLY),
    ):
        opened = os.open(path, mode | (os.O_CREAT | os.O_TRUNC if number else 0))
        os.dup2(opened, number)
        os.close(opened)
    sys.argv[:] = ["healthcheck", *job["argv"]]
    return main(job["argv"])


if __name__ == "__main__":
    sys.exit(main())
