"""Where in the user's code optimizers, schedulers, loaders and modules were made, and the loop's own functions called.

Frames are looked at once for each object and at the first few calls of a function, never step by step. Objects are held
weakly. Once something is compiled, nothing of this is in the way of the compiler any more.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from healthcheck.core.runinfo import Places
from healthcheck.device.living import Births
from healthcheck.instrument.compiled import when_something_is_compiled
from healthcheck.instrument.patching import AfterImport, Patches, Replaced

CALLS = 8
"""Calls of a function whose places are looked at. A loop calls it from one line, and that line is among them."""
_SCHEDULERS = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler")
"""Classes of torch's schedulers that have a constructor which does not call that of their base."""
_LIBRARIES = ("site-packages", "dist-packages")


class PlaceHooks:
    """Notes places while a script runs.

    :param places: where they are kept, for probes.
    :param training: whether training has begun: layers that a forward pass makes are not noted.
    """

    def __init__(self, places: Places, patches: Patches, imports: AfterImport, training: Callable[[], bool]) -> None:
        self._places = places
        self._patches = patches
        self._imports = imports
        self._training = training
        self._counted: list[Replaced] = []
        self._births = Births(from_the_start="torch" not in sys.modules)
        self._building = 0
        """Schedulers whose constructor runs: it makes a first step itself."""

    def install(self) -> None:
        self._births.follow()
        self._patches.on_restore(self._births.end)
        self._imports.when("torch", self._torch_is_there)
        self._imports.when("torch.utils.data.dataloader", self._loaders)
        when_something_is_compiled(self._give_back, self._patches, self._imports)

    def _torch_is_there(self, torch: ModuleType) -> None:
        import torch.optim.lr_scheduler as schedulers

        self._patches.replace(torch.optim.Optimizer, "__init__", self._optimizer_made)
        for kind in _SCHEDULERS:
            self._patches.replace(getattr(schedulers, kind), "__init__", self._scheduler_made)
        for kind in (torch.optim.Optimizer, torch.nn.Module):
            self._patches.replace(kind, "__setstate__", self._copied)
        made = self._patches.replace(torch.nn.Module, "__init__", self._module_made)
        if made is not None:
            self._counted.append(made)
        self._count_calls(schedulers.LRScheduler, "step", self._scheduler_stepped)
        for owner, name, role in (
            (torch.Tensor, "backward", "backward"),
            (torch.optim.Optimizer, "zero_grad", "zero_grad"),
            (torch.nn.Module, "zero_grad", "zero_grad"),
            (torch.nn.utils, "clip_grad_norm_", "clip"),
            (torch.nn.utils.clip_grad, "clip_grad_norm_", "clip"),
        ):
            self._count_calls(owner, name, functools.partial(self._function_called, role))

    def _loaders(self, dataloader: ModuleType) -> None:
        self._patches.replace(dataloader.DataLoader, "__init__", self._made)
        self._count_calls(dataloader.DataLoader, "__iter__", self._passed_over)

    def _give_back(self) -> None:
        """What may be called inside a compiled region is as it was before."""
        self._births.lose("Module")
        while self._counted:
            self._counted.pop().give_back()

    # -- what is made -----------------------------------------------------------------

    def _made(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(thing: Any, *args: Any, **kwargs: Any) -> None:
            original(thing, *args, **kwargs)
            if self._patches.active:
                self._places.note(thing, place_of(sys._getframe(1)))

        return __init__

    def _optimizer_made(self, original: Callable[..., Any]) -> Callable[..., Any]:
        noted = self._made(original)

        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._births.born(optimizer)
            noted(optimizer, *args, **kwargs)

        return __init__

    def _copied(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What ``copy`` and ``pickle`` make passes no constructor."""

        def __setstate__(thing: Any, state: Any) -> None:
            self._births.born(thing)
            original(thing, state)
            if self._patches.active and not self._training():
                self._places.note(thing, place_of(sys._getframe(1)))

        return __setstate__

    def _scheduler_made(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(thing: Any, *args: Any, **kwargs: Any) -> None:
            self._births.born(thing)
            self._building += 1
            try:
                original(thing, *args, **kwargs)
            finally:
                self._building -= 1
            if self._patches.active:
                self._places.note(thing, place_of(sys._getframe(1)))

        return __init__

    def _module_made(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(module: Any, *args: Any, **kwargs: Any) -> None:
            self._births.born(module)
            original(module, *args, **kwargs)
            if self._patches.active and not self._training():
                self._places.note(module, place_of(sys._getframe(1)))

        return __init__

    # -- what is called ---------------------------------------------------------------

    def _count_calls(self, owner: Any, name: str, note: Callable[[Any, str], None]) -> None:
        """Note the places of the first calls; then the function is what it was, and costs nothing."""
        ours: list[Replaced] = []

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            left = CALLS

            def called(first: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal left
                if left > 0 and self._patches.active and not self._building:
                    left -= 1
                    note(first, place_of(sys._getframe(1)))
                    if not left and ours:
                        ours.pop().give_back()
                return original(first, *args, **kwargs)

            return called

        replaced = self._patches.replace(owner, name, make)
        if replaced is not None:
            ours.append(replaced)
            self._counted.append(replaced)

    def _function_called(self, role: str, first: Any, place: str) -> None:
        self._places.note_call(role, place)
        self._places.note(first, place, role)

    def _scheduler_stepped(self, scheduler: Any, place: str) -> None:
        self._places.note(scheduler, place, "stepped")

    def _passed_over(self, loader: Any, place: str) -> None:
        import torch

        if torch.is_grad_enabled():  # else it is an evaluation
            self._places.note_call("loader", self._places.made(loader))


# -- frames -------------------------------------------------------------------------------


def place_of(frame: FrameType | None) -> str:
    """``train.py:31`` of the nearest caller that is the user's own code; empty if there is none, as in a library's thread."""
    while frame is not None:
        file = _shown(frame.f_code.co_filename)
        if file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=4096)
def _shown(file: str) -> str:
    """A file as users type it; empty for a file that is not theirs: of Python, an installed package, torch or ours."""
    if file.startswith("<") and not file.startswith("<ipython-input"):
        return ""
    path = os.path.abspath(file)
    parts = path.split(os.sep)
    if any(name in parts for name in _LIBRARIES) or path.startswith(_not_users()):
        return ""
    for folder in (os.getcwd(), sys.path[0] if sys.path else ""):
        if folder and path.startswith(os.path.join(folder, "")):
            return Path(path).relative_to(folder).as_posix()
    return parts[-1]


@functools.cache
def _not_users() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], str(Path(__file__).resolve().parents[1])}
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:  # built from a checkout
        folders.add(os.path.dirname(os.path.abspath(torch.__file__)))
    return tuple(os.path.join(folder, "") for folder in folders)
