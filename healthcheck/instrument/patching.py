"""Replacing functions of other packages for a while, and acting right after an import.

Nothing here imports torch: scripts that set environment variables before their first
``import torch`` must find it as untouched as under plain ``python``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ABSENT = object()


def _ignore(error: Exception) -> None:
    """Where errors go once nobody waits for imports any more."""


Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a wrapper of a function."""


class Replaced:
    """One attribute that was replaced."""

    def __init__(self, owner: Any, name: str, original: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._original = original
        self._before = vars(owner).get(name, _ABSENT)
        self._wrapper: Any = self._before

    def put(self, make: Make) -> None:
        """Set the attribute to ``make(original)``, unless somebody else has replaced it since."""
        if vars(self._owner).get(self._name, _ABSENT) is self._wrapper:
            self._wrapper = functools.wraps(self._original)(make(self._original))
            setattr(self._owner, self._name, self._wrapper)

    def give_back(self) -> None:
        if vars(self._owner).get(self._name, _ABSENT) is not self._wrapper:
            return
        if self._before is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


class Patches:
    """Attributes replaced for the time of a run; :meth:`restore` gives all of them back.

    A wrapper that somebody has wrapped again cannot be taken out. It stays, and must pass calls
    through once :attr:`active` is False. A forked child has the functions that its script set, and nothing of ours.

    :param stay_in_children: forked children keep them as well.
    """

    def __init__(self, *, stay_in_children: bool = False) -> None:
        self.active = True
        self._undo: list[Callable[[], None]] = []
        if not stay_in_children:
            _restore_in_children(self)

    def replace(self, owner: Any, name: str, make: Make) -> Replaced | None:
        """Set ``owner.name`` to ``make(original)``; does nothing where there is no such attribute."""
        original = getattr(owner, name, None)
        if original is None:
            return None
        replaced = Replaced(owner, name, original)
        replaced.put(make)
        self._undo.append(replaced.give_back)
        return replaced

    def on_restore(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def restore(self) -> None:
        """Undo everything, last first. Safe to call twice."""
        self.active = False
        while self._undo:
            self._undo.pop()()


_all: weakref.WeakSet[Patches] = weakref.WeakSet()
_listening = False


def _restore_in_children(patches: Patches) -> None:
    """Fork callbacks cannot be taken back, so that there is one for the process, without references."""
    global _listening
    _all.add(patches)
    if not _listening and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_restore_all)
        _listening = True


def _restore_all() -> None:
    for patches in list(_all):
        if patches.active:
            patches.restore()


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported, at once if it has been already.

    The module's own loader does the work; only the moment after it is ours.

    :param failed: called with an error in one of those functions; the import itself goes on.
    :param patches: once these are restored nobody waits any more, and nothing of the run is kept.
    """

    def __init__(self, failed: Callable[[Exception], None], patches: Patches) -> None:
        self._failed = failed
        patches.on_restore(self._remove)
        self._waiting: dict[str, list[Callable[[ModuleType], object]]] = {}
        self._searching: set[str] = set()

    def when(self, name: str, function: Callable[[ModuleType], object]) -> None:
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if module is not None and not getattr(spec, "_initializing", False):
            self._call(function, module)
            return
        self._waiting.setdefault(name, []).append(function)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def _remove(self) -> None:
        self._waiting.clear()
        self._failed = _ignore
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _call(self, function: Callable[[ModuleType], object], module: ModuleType) -> None:
        try:
            function(module)
        except Exception as error:
            self._failed(error)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = self._others(fullname, path, target)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            self._listen(fullname, spec.loader)
        return spec

    def _others(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def _listen(self, fullname: str, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with contextlib.suppress(AttributeError):
                del loader.exec_module
            original(module)
            for function in self._waiting.pop(fullname, ()):
                self._call(function, module)

        with contextlib.suppress(AttributeError, TypeError):  # a loader that takes no attributes: nothing is called
            loader.exec_module = exec_module
