"""The processes of one command: what those that are started are given, and what they leave behind for the end.

``HEALTHCHECK_WATCH`` holds the options of ``healthcheck run`` as JSON, and the name of a folder in which processes leave a
few lines each: where the record lies, how each ended, which could not be watched. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from healthcheck.core.runinfo import Elsewhere
from healthcheck.core.text import plural
from healthcheck.record.folder import job_size, key, process_rank

VARIABLE = "HEALTHCHECK_WATCH"
SITE = Path(__file__).resolve().parent.parent / "site"
"""The folder that goes first on PYTHONPATH; it holds ``sitecustomize.py`` and nothing else."""


class Job:
    """One command that is watched, with all processes that it starts.

    :param options: of ``healthcheck run``, as its parser names them; plain JSON values.
    :param folder: where processes leave word; None: nobody waits for it (``healthcheck env``).
    """

    def __init__(self, options: Mapping[str, Any], folder: Path | None) -> None:
        self.options = dict(options)
        self.folder = folder

    @classmethod
    def begin(cls, options: Mapping[str, Any]) -> Job:
        """A job of this process."""
        return cls(options, Path(tempfile.mkdtemp(prefix="healthcheck-job-")))

    @classmethod
    def of_environment(cls) -> Job | None:
        """The job that this process belongs to, or None."""
        try:
            given = json.loads(os.environ[VARIABLE])
            return cls(given["options"], Path(given["job"]) if given.get("job") else None)
        except (KeyError, ValueError, TypeError):
            return None

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What processes that are started need in their environment."""
        others = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(SITE)]
        given = {"options": self.options, "job": None if self.folder is None else str(self.folder)}
        return {"PYTHONPATH": os.pathsep.join([str(SITE), *others]), VARIABLE: json.dumps(given)}

    def tell(self, environ: MutableMapping[str, str]) -> None:
        """Let what this process starts be watched."""
        environ.update(self.variables(environ))

    # -- the record ---------------------------------------------------------------------

    def place(self) -> tuple[bool | Path, bool]:
        """``(record, first)`` for a process that begins: True for a new record, a folder inside the one of the job, or
        False; and whether it is the first process of this job that trains.
        """
        if self.folder is None:
            return True, True
        known = self._record()
        if known is None and process_rank() == 0:
            try:
                os.close(os.open(self.folder / "first", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                return True, True
            except OSError:
                known = self._record(wait=5.0)
        if known is None:  # a rank: it finds the record of its launch, or stands in for rank 0
            return True, False
        run, launch, attempt = known
        if launch is not None and launch == key() and job_size() > 1:
            return True, False
        if (mine := _attempt()) is not None and attempt is not None and mine[0] == attempt[0] and mine[1] > attempt[1]:
            # The launcher has started its ranks anew: a run that goes on from the last one.
            return True, not process_rank()
        name = f"rank-{process_rank()}" if job_size() > 1 and process_rank() else f"process-{os.getpid()}"
        return Path(run) / "processes" / name, False

    def rank_zero_comes(self) -> bool:
        """Whether rank 0 of this launch has imported torch where ours waits for its training (``healthcheck/site``)."""
        port = "".join(filter(str.isalnum, os.environ.get("MASTER_PORT", "")))
        return self.folder is not None and (self.folder / f"rank-0-{port}").exists()

    def opened(self, run_dir: Path | None, first: bool) -> None:
        """This process has a record; the first one's is that of the job."""
        if self.folder is not None and first:
            with contextlib.suppress(OSError):
                unfinished = self.folder / f".record-{os.getpid()}"
                unfinished.write_text(json.dumps([str(run_dir.absolute()) if run_dir else None, key(), _attempt()]))
                unfinished.replace(self.folder / "record")

    def _record(self, wait: float = 0.0) -> tuple[str, str | None, list[Any] | None] | None:
        deadline = time.monotonic() + wait
        while self.folder is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                run, launch, attempt = json.loads((self.folder / "record").read_text())
                return None if run is None else (run, launch, attempt)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)
        return None

    # -- how processes ended --------------------------------------------------------------

    def ended(self, target: str, report: Mapping[str, Any]) -> None:
        """This process was watched to its end."""
        if self.folder is not None:
            kept = {name: report.get(name) for name in ("exit_code", "exit_words", "verdict", "steps", "rank")}
            kept["target"] = target
            with contextlib.suppress(OSError):
                (self.folder / f"{os.getpid()}.json").write_text(json.dumps(kept))

    def unreached(self, what: str) -> None:
        """This process trains, and cannot be watched."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                (self.folder / f"{os.getpid()}.unreached").write_text(what)

    def results(self) -> list[dict[str, Any]]:
        """Of all processes that were watched to their end, in the order in which they ended."""
        found = []
        for path in self._left("*.json"):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_text()))
        return found

    def not_watched(self) -> list[str]:
        """What trained and could not be watched, in words."""
        return [path.read_text() for path in self._left("*.unreached")]

    def summary(self) -> tuple[Elsewhere, str]:
        """What became of the processes that were watched, and which they are: ``2 child processes: train.py``."""
        found = [one for one in self.results() if one["steps"]]
        if not found:
            return Elsewhere(), ""
        failed = [f"{one['target']}: {one['exit_words']}" for one in found if one["verdict"] in ("failed", "stopped")]
        warned = [f"alerts in {one['target']}" for one in found if one["verdict"] == "warned"]
        names = ", ".join(dict.fromkeys(one["target"] for one in found))
        return Elsewhere(*("; ".join(dict.fromkeys(words)) for words in (failed, warned))), (
            f"trained in {plural(len(found), 'child process', 'child processes')}: {names}"
        )

    def _left(self, pattern: str) -> list[Path]:
        if self.folder is None:
            return []
        with contextlib.suppress(OSError):
            return sorted(self.folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
        return []

    def clear(self) -> None:
        """Nobody needs the folder any more."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _attempt() -> list[Any] | None:
    """Which launch of torchrun this is, and how often that has started its ranks before; None elsewhere."""
    run, restarts = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    return [run, int(restarts)] if run and restarts.isdigit() else None


# -- processes that the variables do not reach ------------------------------------------------


LOOK_SECONDS = 0.5
"""How often a :class:`Lookout` looks."""


class Lookout:
    """Looks, while a command runs, for processes below ``pid`` that use torch and were started so that nothing of ours runs
    in them: ``python -I``, ``-E``, ``-S``, an empty environment. Linux only; elsewhere nothing is known of them.
    """

    def __init__(self, job: Job, pid: int) -> None:
        self._job = job
        self._pid = pid
        self._seen: set[int] = set()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on; a second call does nothing."""
        if self._thread is None and sys.platform.startswith("linux"):
            self._thread = threading.Thread(target=self._look, name="healthcheck-lookout", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            with contextlib.suppress(Exception):
                for child, command in without_us(self._pid):
                    if child not in self._seen and self._job.folder is not None:
                        self._seen.add(child)
                        (self._job.folder / f"{child}.unreached").write_text(command)


def without_us(pid: int) -> list[tuple[int, str]]:
    """Processes below ``pid``, with their commands, that have torch in memory and cannot know of us."""
    found = []
    for parent, child in _below(pid):
        with contextlib.suppress(OSError, ValueError):
            command = _command(child)
            # One that was forked shows the command of its parent, and is what that is.
            if not command or command == _command(parent) or "python" not in _program(child):
                continue
            knows = f"{VARIABLE}=".encode() in Path(f"/proc/{child}/environ").read_bytes()
            if not (knows and not _shut(command)) and "libtorch" in Path(f"/proc/{child}/maps").read_text(
                errors="replace"
            ):
                found.append((child, shlex.join([os.path.basename(command[0]), *command[1:4]])))
    return found


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]


def _program(pid: int) -> str:
    return os.path.basename(os.path.realpath(f"/proc/{pid}/exe"))


def _shut(command: list[str]) -> bool:
    """Whether an interpreter was asked to look at no environment, or to load no ``site``."""
    for word in command[1:]:
        if not word.startswith("-") or word in ("-c", "-m"):
            return False
        if not word.startswith(("--", "-W", "-X")) and set(word[1:]) & set("IES"):
            return True
    return False


def _below(pid: int) -> list[tuple[int, int]]:
    """Parent and child, for all processes below one."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError, ValueError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError):
                    below = [int(word) for word in Path(f"/proc/{parent}/task/{thread}/children").read_text().split()]
                    found += [(parent, child) for child in below]
                    waiting += below
    return found
