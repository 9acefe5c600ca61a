"""Forked children of a watched script: left alone, and named if they train, which nobody watches.

The target of a ``multiprocessing`` process is wrapped so that a child can leave word that it has stepped an optimizer.
Loader workers are not touched, nor are children with an interpreter of their own: they are watched
(``healthcheck/site/sitecustomize.py``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from healthcheck.instrument.patching import AfterImport, Patches

_WORKERS = ("torch.utils.data", "multiprocessing.", "concurrent.futures")
"""Modules of targets that are workers of a pool or loader."""


class ChildTarget:
    """Runs the target in the child; the first optimizer step there leaves a file in ``folder``."""

    def __init__(self, target: Callable[..., Any], folder: str) -> None:
        self.target = target
        self.folder = folder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        imports = AfterImport(lambda error: None, Patches(stay_in_children=True))
        imports.when("torch.optim.optimizer", self._listen)
        return self.target(*args, **kwargs)

    def _listen(self, module: ModuleType) -> None:
        noted: list[int] = []

        def stepped(*given: Any) -> None:
            if not noted:
                noted.append(os.getpid())
                with contextlib.suppress(OSError):  # the parent may be gone
                    Path(self.folder, str(os.getpid())).write_text(_name_of(self.target))

        module.register_optimizer_step_pre_hook(stepped)


class Children:
    """Counts the children that trained while nobody watched them."""

    def __init__(self, patches: Patches, imports: AfterImport) -> None:
        self._patches = patches
        self._imports = imports
        self._pid = os.getpid()
        self._folder: str | None = None

    def install(self) -> None:
        self._imports.when("multiprocessing.process", self._patch)

    def _patch(self, process: ModuleType) -> None:
        self._patches.replace(process.BaseProcess, "start", self._start)

    def _start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(process: Any) -> Any:
            target = getattr(process, "_target", None)
            if not (self._patches.active and os.getpid() == self._pid) or not callable(target) or _is_worker(target):
                return original(process)
            if start_method(process) != "fork":
                return original(process)  # an interpreter of its own, which is watched as every other
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="healthcheck-children-")
            process._target = ChildTarget(target, self._folder)
            try:
                return original(process)
            finally:
                process._target = target if hasattr(process, "_target") else None
                if process._target is None:
                    del process._target

        return start

    def unwatched(self) -> list[str]:
        """Names of the functions that trained in children, one for each child. Removes its traces."""
        if self._folder is None or os.getpid() != self._pid:
            return []
        # In the order in which they trained: process ids do not keep to one.
        files = sorted(Path(self._folder).iterdir(), key=lambda path: path.stat().st_mtime_ns)
        found = [path.read_text() or "a function" for path in files]
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
        return found


def start_method(process: Any) -> str:
    """How a process of ``multiprocessing`` will start: its own way, or the usual one."""
    own = getattr(process, "_start_method", None)
    if own is not None:
        return str(own)
    multiprocessing = sys.modules.get("multiprocessing")
    return str(multiprocessing.get_start_method()) if multiprocessing is not None else "fork"


def _is_worker(target: Any) -> bool:
    return str(getattr(target, "__module__", "")).startswith(_WORKERS)


def _name_of(target: Any) -> str:
    name = getattr(target, "__name__", type(target).__name__)
    if name == "_wrap" and "torch.multiprocessing.spawn" in sys.modules:
        return "mp.spawn"
    return str(name)
