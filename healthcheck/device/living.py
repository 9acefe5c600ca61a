"""Modules, optimizers and schedulers that are alive in this process.

The garbage collector knows them all, but asking it means a walk over everything that it tracks: 20 ms in a small script,
half a second in one that has imported a large library. Where a run is watched from the start, what is made is noted as it is
made, and nothing need be searched for.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterable
from typing import Any

KINDS = ("Module", "Optimizer", "LRScheduler")


def live_objects(*kinds: str) -> list[Any]:
    """All objects of these torch classes that are alive: ``Module``, ``Optimizer``, ``LRScheduler``.

    Asks ``type(obj)`` and never the object itself, so that proxies and lazy modules of other packages are not woken. Where
    nobody follows what is made it takes 20 ms and more, so call it rarely.
    """
    births = Births.followed
    if births is None:
        return _search(kinds)
    return births.alive(kinds)


class Births:
    """Notes what is made, held weakly.

    :param from_the_start: whether nothing was made before; else the process is searched once, when somebody first asks.
    """

    followed: Births | None = None
    """Those of the run that watches this process, while there is one."""

    def __init__(self, *, from_the_start: bool) -> None:
        self._refs: list[weakref.ref[Any]] = []
        self._unknown = set() if from_the_start else set(KINDS)
        """Kinds of which some may have been made unseen."""
        self._lost: set[str] = set()
        """Kinds whose making is not seen any more."""
        self._prune_at = 1024

    def follow(self) -> None:
        Births.followed = self

    def end(self) -> None:
        if Births.followed is self:
            Births.followed = None

    def born(self, thing: Any) -> None:
        """A module, optimizer or scheduler was made, or is about to be."""
        try:
            self._refs.append(weakref.ref(thing))
        except TypeError:  # a class with slots that leave no room for a weak reference
            return
        if len(self._refs) >= self._prune_at:
            self._refs = [ref for ref in self._refs if ref() is not None]
            self._prune_at = max(1024, 2 * len(self._refs))

    def lose(self, kind: str) -> None:
        """From now on nobody tells of things of this kind that are made."""
        self._lost.add(kind)

    def alive(self, kinds: Iterable[str]) -> list[Any]:
        """Those of these kinds, in the order in which they were made."""
        kinds = set(kinds)
        if kinds & self._lost:
            return _search(kinds)
        if kinds & self._unknown:
            for thing in _search(self._unknown):
                self.born(thing)
            self._unknown.clear()
        bases = tuple(_classes(kinds))
        found: dict[int, Any] = {}
        for ref in list(self._refs):
            thing = ref()
            if thing is not None and issubclass(type(thing), bases):
                found.setdefault(id(thing), thing)
        return list(found.values())


def _classes(kinds: Iterable[str]) -> set[type]:
    torch = sys.modules["torch"]
    classes = {
        "Module": torch.nn.Module,
        "Optimizer": torch.optim.Optimizer,
        "LRScheduler": torch.optim.lr_scheduler.LRScheduler,
    }
    return {classes[kind] for kind in kinds}


def _search(kinds: Iterable[str]) -> list[Any]:
    """By way of the garbage collector."""
    bases = _classes(kinds)
    # Half a million objects of a few thousand types: what is done for each object is done in C.
    around = gc.get_objects()
    hits = {cls for cls in set(map(type, around)) if not bases.isdisjoint(cls.__mro__)}
    return list(itertools.compress(around, map(hits.__contains__, map(type, around))))
