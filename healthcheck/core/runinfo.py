"""What is known of a run: before it starts, and while it goes on. Standard library only."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, MutableMapping, MutableSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(slots=True)
class RunInfo:
    """What reports learn when a run starts."""

    target: str
    run_dir: Path | None = None
    rank: int = 0
    voice: bool | None = None
    """Whether this rank speaks for all; None: if it is rank 0. Another one stands in for a rank 0 that is not watched."""
    world_size: int = 1
    argv: list[str] = field(default_factory=list)
    resumed_from: int | None = None
    name: str = ""
    notes: list[str] = field(default_factory=list)
    """Sentences for the start block, each said once."""

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for all of them: on the console, in the record, in reports."""
        return self.rank == 0 if self.voice is None else self.voice


class Elsewhere(NamedTuple):
    """What is known of other ranks at the end of a run, in words; empty where there is nothing to say."""

    failed: str = ""
    warned: str = ""
    unseen: str = ""
    """Why nothing is known of some of them."""


@dataclass(slots=True)
class StateLoads:
    """Loads of a state dict that changed nothing. Trainers add to it; each step that ends hands on what it has."""

    unmatched: list[tuple[Any, str]] = field(default_factory=list)
    """Not one name fitted: a weak reference to the module, and words."""
    own: list[str] = field(default_factory=list)
    """It consisted of a module's own tensors, in words: at the end of the run, when it is said, the model may be gone."""
    copies: list[str] = field(default_factory=list)
    """The same of a module that is not trained, but made like one that is."""

    def __bool__(self) -> bool:
        return bool(self.unmatched or self.own or self.copies)


class Places:
    """Where in the user's code things were made and functions called: ``train.py:31``.

    Trainers add to it, each place looked at once. Objects are not kept alive.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[int, str], tuple[Callable[[], Any], str]] = {}
        self._calls: dict[str, list[str]] = {}

    def note(self, thing: Any, place: str, what: str = "made") -> None:
        """Keep the place at which something happened to an object; the first one counts."""
        key = (id(thing), what)
        if not place or (key in self._of and self._of[key][0]() is thing):
            return
        try:
            self._of[key] = (weakref.ref(thing, lambda _: self._of.pop(key, None)), place)
        except TypeError:  # an object that cannot be referred to weakly
            return

    def note_call(self, role: str, place: str) -> None:
        """Keep a place at which a function was called: ``zero_grad``, ``backward``, ``clip``, ``loader``, ``eval``."""
        known = self._calls.setdefault(role, [])
        if place and place not in known:
            known.append(place)

    def made(self, thing: Any, what: str = "made") -> str:
        """Where the object was made (or, for a scheduler, ``stepped``); empty if that was not seen."""
        ref, place = self._of.get((id(thing), what), (None, ""))
        return place if ref is not None and ref() is thing else ""

    def things(self, what: str = "made") -> list[Any]:
        """All living objects to which it was seen to happen."""
        known = [ref for (_, done), (ref, _) in [*self._of.items()] if done == what]
        return [thing for ref in known if (thing := ref()) is not None]

    def known(self) -> dict[str, list[str]]:
        """Where functions were called, by role, and where living optimizers were made; three of each at most. For people who
        look for the loop: it says nothing of what is wrong there."""
        found = {role: places[:3] for role, places in self._calls.items() if places}
        made = [self.made(thing) for thing in self.things() if hasattr(thing, "param_groups")]
        return {**found, **({"optimizer": list(dict.fromkeys(made))[:3]} if made else {})}

    def called(self, role: str) -> str:
        """Where the function was called; empty if that was not seen, or seen at several places: which one it is, nobody
        knows then."""
        known = self._calls.get(role, ())
        return known[0] if len(known) == 1 else ""


@dataclass(slots=True)
class RunFacts:
    """What a session knows of its run so far, for probes. One object for the whole run, in every event of it."""

    active_seconds: float = 0.0
    """Seconds of training up to this event; evaluations and test runs do not count."""
    own_seconds: float = 0.0
    """Seconds of host time that watching has taken, up to the event before this one."""
    world_size: int = 1
    """Processes that train together, as far as that is known by now."""
    actions_done: dict[str, int] = field(default_factory=dict)
    """Name of an action -> how often it has done something."""
    loads: StateLoads = field(default_factory=StateLoads)
    set_to_eval: MutableMapping[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    """Modules beside the trained model that were put into eval mode while it trained, and how often."""
    loaded_themselves: MutableSet[Any] = field(default_factory=weakref.WeakSet)
    """Those that were given a state dict of their own tensors."""
    model_evaluated: bool = False
    """Whether the trained model was put into eval mode since training began."""
    losses_in_train_mode: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    """Steps after which losses were computed without gradients, in train mode, of rows that are not trained on."""
    places: Places = field(default_factory=Places)
    """Where in the user's code optimizers, schedulers, loaders and modules were made, and functions called."""
