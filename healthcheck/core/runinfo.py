"""What is known of a run: before it starts, and while it goes on, with ways back to things that it does not keep alive. Standard
library only."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSet, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol


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
        """Keep a place at which a function was called: ``zero_grad``, ``backward``, ``clip``, ``loader``, ``eval``,
        ``load`` (of a state that fits nowhere, or is the module's own), ``loss_in_train_mode`` (without gradients)."""
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


class RankTalk(Protocol):
    """How probes on different ranks of one job tell each other what they have read: :attr:`RunFacts.ranks`.

    Nobody waits, and nobody takes part in a collective. What is said leaves this rank at the next point at which ranks agree
    (``sync_every``), through the store of the process group; one rank, the one that speaks for all, hears it some steps later.
    Give plain JSON values, a kilobyte at most: with thousands of ranks all of it passes through one store.
    """

    rank: int
    world_size: int
    hears: bool
    """Whether this is the rank that hears what all say."""

    def say(self, topic: str, step: int, values: Mapping[str, Any]) -> None:
        """Tell the rank that hears. A newer word on the same topic takes the place of one some steps older."""

    def heard(self, topic: str) -> Sequence[tuple[int, Mapping[int, Mapping[str, Any]]]]:
        """What came since the last call: for each step the values of each rank. Complete, but for ranks that have ended, or
        that have not said anything for that step while others went on."""

    def ask(self, topic: str, question: Mapping[str, Any]) -> None:
        """Put a question to all ranks, this one included."""

    def asked(self, topic: str) -> Sequence[Mapping[str, Any]]:
        """Questions since the last call."""

    def silent(self, collectives: Collectives | None, step: int, seconds: float) -> None:
        """Nothing has happened on this rank for so long: say where it stands. Called by the watchdog's thread."""

    def hang(self) -> Mapping[str, Any]:
        """While nothing happens: which rank the others wait for, as facts of an alert; what is known, where that is not."""


class Replicas:
    """Modules that were wrapped in ``DistributedDataParallel``, so that ranks hold copies of them. Trainers add to it.

    Nothing is kept alive.
    """

    def __init__(self) -> None:
        self.data_group: tuple[int, ...] = ()
        """Ranks that are given different parts of the data, as far as that is known."""
        self.searched = False
        """Whether somebody has looked for wrappers that were made before the run was watched."""
        self._wrappers: list[weakref.ref[Any]] = []
        self._groups: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._times: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def note(self, wrapper: Any, ranks: Sequence[int]) -> None:
        """A wrapper was made for the ranks of a process group, by their numbers in the job."""
        if any(ref() is wrapper for ref in self._wrappers):
            return
        self._wrappers = [ref for ref in self._wrappers if ref() is not None]
        self._wrappers.append(weakref.ref(wrapper))
        self._groups[wrapper.module] = tuple(ranks)
        self._times[wrapper.module] = self._times.get(wrapper.module, 0) + 1

    def wrappers(self) -> list[Any]:
        """Those that are alive."""
        return [wrapper for ref in self._wrappers if (wrapper := ref()) is not None]

    def modules(self) -> list[tuple[Any, tuple[int, ...], int]]:
        """Modules that are or were wrapped: module, ranks, how often it was wrapped."""
        return [(module, ranks, self._times.get(module, 1)) for module, ranks in list(self._groups.items())]


@dataclass(slots=True)
class Collectives:
    """Which collectives this rank has entered and left. Trainers keep it; times are readings of ``time.monotonic``."""

    count: int = 0
    """Collectives entered so far."""
    inside: bool = False
    name: str = ""
    """Of the last one: its function, the type and shape of its first tensor, when it was entered."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    entered_at: float = 0.0
    left_at: float = 0.0
    pass_ended_at: float = 0.0
    """End of the last backward pass."""
    forward_at: float = 0.0
    """Begin of the first forward pass of a wrapper in the step at hand; 0 before."""
    waited: float = 0.0
    """Seconds inside of collectives in the step at hand."""
    delayed: float = 0.0
    """Seconds between the backward pass (or the collective before) and the entry of each of them, in the step at hand."""

    def enter(self, name: str, kind: tuple[str, tuple[int, ...]], now: float) -> None:
        """A collective is entered."""
        self.count += 1
        self.inside, self.name, self.entered_at = True, name, now
        self.dtype, self.shape = kind
        if self.pass_ended_at:
            self.delayed += now - max(self.pass_ended_at, self.left_at)

    def leave(self, now: float) -> None:
        """It is left, or was only started (``async_op``)."""
        self.inside, self.left_at = False, now
        self.waited += now - self.entered_at

    def step_over(self) -> tuple[float, float, float]:
        """The step at hand is over: begin of its forward pass, seconds inside of collectives and on the way to them."""
        found = self.forward_at, self.waited, self.delayed
        self.forward_at = self.waited = self.delayed = self.pass_ended_at = 0.0
        return found


@dataclass(slots=True)
class PlateauUse:
    """How a ``ReduceLROnPlateau`` is used: calls, and what it was given when it lowered the rate."""

    calls: int = 0
    lowest: float = float("inf")
    """Of the numbers that it was given, those that the host knew."""
    reductions: int = 0
    at_lowest: int = 0
    """Reductions in mode ``max`` at a number lower than any before."""


@dataclass(slots=True)
class Habits:
    """Calls of torch that say something by how often they come, or with what. Trainers add to it; nothing is kept alive."""

    seen: bool = False
    """Whether somebody shows these calls: where nobody does, nothing follows from there being none."""
    seed: int | None = None
    """The seed that was set last while training runs, how often in a row it was this one, and where."""
    seeded: int = 0
    seeded_at: str = ""
    plateaus: MutableMapping[Any, PlateauUse] = field(default_factory=weakref.WeakKeyDictionary)
    """Schedulers that wait for a number to stop falling or rising."""
    drawn: deque[Callable[[], Any]] = field(default_factory=lambda: deque(maxlen=8))
    """The last tensors drawn with ``sample()`` from a distribution whose parameters have gradients."""
    scored: bool = False
    """Whether log probabilities of such distributions were asked for: then drawing without gradients is right."""
    redrawn: dict[int, tuple[Callable[[], Any], Callable[[], Any] | None]] = field(default_factory=dict)
    """Tensors that functions of ``torch.nn.init`` have written after they were loaded or trained, by id: the tensor, and the
    optimizer that had it by then."""
    longest_pass: int = 0
    """Batches of the longest pass over a loader so far, of those that are trained on."""
    cut_passes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By the id of a data set: how many loops over its loader in a row were left after their first batch, and the batches of a
    whole pass."""
    resumed_rates: MutableMapping[Any, tuple[float, float]] = field(default_factory=weakref.WeakKeyDictionary)
    """Optimizers that were given a state with a rate that a schedule had lowered: that rate, and the one the schedule began with."""
    resumed_schedules: MutableSet[Any] = field(default_factory=weakref.WeakSet)
    """Schedulers that were given a state."""
    plain_gradients: int = 0
    """How often ``torch.autograd.grad`` was asked for gradients of inputs without a graph of their own."""
    unheard: dict[str, str] = field(default_factory=dict)
    """Values of a data set that were changed in two passes over it, or more, while its workers live on with the first ones."""
    unkept_random: str = ""
    """A part of the model with dropout that is computed again for the backward pass without its random state."""

    def was_redrawn(self, tensor: Any, optimizer: Any = None) -> bool:
        """Whether this tensor was written by a function of ``torch.nn.init`` while this optimizer had it; without one, after it
        was loaded and before anybody trained it."""
        ref, by = self.redrawn.get(id(tensor), (None, None))
        if ref is None or ref() is not tensor:
            return False
        return by is None if optimizer is None else by is not None and by() is optimizer


@dataclass(slots=True)
class RunFacts:
    """What a session knows of its run so far, for probes. One object for the whole run, in every event of it."""

    active_seconds: float = 0.0
    """Seconds of training up to this event; evaluations and test runs do not count."""
    own_seconds: float = 0.0
    """Seconds of host time that watching has taken, up to the event before this one."""
    untimed: int = 0
    """Above 0 while steps are slowed down on purpose (``session.untimed()``): their times are not those of the training."""
    world_size: int = 1
    """Processes that train together, as far as that is known by now."""
    actions_done: dict[str, int] = field(default_factory=dict)
    """Name of an action -> how often it has done something."""
    loads: StateLoads = field(default_factory=StateLoads)
    set_to_eval: MutableMapping[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    """Modules beside the trained model that were put into eval mode while it trained, and how often."""
    loaded_themselves: MutableSet[Any] = field(default_factory=weakref.WeakSet)
    """Those that were given a state dict of their own tensors."""
    loaded: MutableSet[Any] = field(default_factory=weakref.WeakSet)
    """Modules that were given a state dict."""
    model_evaluated: bool = False
    """Whether the trained model was put into eval mode since training began."""
    losses_in_train_mode: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    """Steps after which losses were computed without gradients, in train mode, of rows that are not trained on."""
    trained_on_evaluation: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    """Steps after which a backward pass was made in evaluation mode, from a batch of another data set than that trained on;
    each once."""
    places: Places = field(default_factory=Places)
    """Where in the user's code optimizers, schedulers, loaders and modules were made, and functions called."""
    habits: Habits = field(default_factory=Habits)
    """Calls of torch that say something by how often they come."""
    ranks: RankTalk | None = None
    """How probes hear of other ranks, once these have a way to agree; None on a single one, and without one."""
    replicas: Replicas = field(default_factory=Replicas)
    """Modules of which several ranks hold a copy."""
    collectives: Collectives | None = None
    """What ranks of one job do together; None on a single one."""

    def silent(self, step: int, seconds: float) -> None:
        """Nothing has happened for so long."""
        if self.ranks is not None:
            self.ranks.silent(self.collectives, step, seconds)

    def meet(self, ranks: RankTalk | None) -> None:
        """Ranks have a way to talk to each other."""
        self.ranks = ranks
        if self.collectives is None:
            self.collectives = Collectives()


# --------------------------------------------------------------------------------------------------
# Ways back to things that must not live on because we looked at them.


def weak(thing: Any) -> Callable[[], Any]:
    """A way back to ``thing`` that does not keep it alive, where its type allows that.

    We outlive models and optimizers that a script replaces; holding one would hold its memory.
    """
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing
