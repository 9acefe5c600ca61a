"""What plugins write and what they are given: protocols, and the few values that they exchange. No base class.

Standard library only. A plugin registers objects of these shapes through the hooks in
:mod:`healthcheck.extend.hookspecs`; the built-ins do exactly the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from healthcheck.core.alerts import ActionOutcome, Alert
from healthcheck.core.events import Event, EventKind
from healthcheck.core.runinfo import RunInfo
from healthcheck.core.samples import Metric, Sample

if TYPE_CHECKING:
    from pathlib import Path

# --------------------------------------------------------------------------- the run


class Session(Protocol):
    """The run that is watched, as hooks see it. :class:`healthcheck.Session` has more, for trainers and reports.

    Read it, log to it, listen to it; what happens to the run is up to rules and their actions.
    """

    @property
    def step(self) -> int:
        """The step under way, or the last one; 0 before the first."""

    @property
    def unit(self) -> str:
        """What is counted as a step: ``step``, or ``backward`` where no optimizer was seen to step."""

    @property
    def epoch(self) -> float | None:
        """Epoch of the last event that had one."""

    @property
    def info(self) -> RunInfo:
        """Target, rank, number of ranks, folder of the record."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the run, from the rule file, the environment and the command line."""

    @property
    def user_state(self) -> dict[str, Any]:
        """The dict that every event carries: one for the whole run, shared by all plugins. Prefix your keys."""

    @property
    def alerts(self) -> Sequence[Alert]:
        """Alerts so far, oldest first."""

    @property
    def history(self) -> Callable[..., list[tuple[int, float]]]:
        """``history("loss", 50)``: the last values of a series as (step, value)."""

    units: Mapping[str, str]
    """Name of a metric -> its unit (:attr:`Metric.unit`), of all that probes provide."""

    @property
    def events(self) -> tuple[str, ...]:
        """Names of all events that can be heard."""

    @property
    def observing(self) -> bool:
        """Whether actions that change the run are left out (``mode: observe``)."""

    @property
    def report(self) -> Mapping[str, Any] | None:
        """Content of ``report.json``, once the run is over."""

    def on(self, event: str | EventKind, function: Callable[..., Any]) -> Callable[[], None]:
        """Call ``function`` at every such event; returns a function that removes it."""

    def has_hooks(self, event: str | EventKind) -> bool: ...
    def list_hooks(self, event: str | EventKind) -> list[str]:
        """Owners that listen to an event, in calling order."""

    def register(self, plugin: object, name: str | None = None) -> str:
        """Register one more plugin object (or class); returns its name."""

    def log(self, metrics: Mapping[str, Any], *, step: int | None = None, phase: str | None = None) -> None:
        """Feed metrics of your own. Device scalars are taken as they are, without a wait."""

    def note(self, text: str) -> None:
        """One line for the person who watches the console."""

    def untimed(self) -> Callable[[], None]:
        """``over = session.untimed()``: until ``over()``, steps are slowed down on purpose and enter no step time."""

    def muted(self, rule: str, *, reason: str) -> AbstractContextManager[None]:
        """Judge and record a rule (or glob), but do nothing about it inside this block."""


# --------------------------------------------------------------------------- what is watched


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an adapter can show and do. What is missing has its reason in ``gaps``."""

    trainer: str
    events: frozenset[EventKind]
    controls: frozenset[str]
    """Subset of ``stop``, ``skip_update``, ``checkpoint``, ``scale_lr``, ``log``."""
    gaps: Mapping[str, str] = field(default_factory=dict)
    """Event kind, control, fact or metric name -> why this trainer cannot have it."""


class Device(Protocol):
    """The accelerator (or the CPU) as actions see it."""

    @property
    def kind(self) -> str: ...

    def capacity_bytes(self) -> int | None: ...
    def allocated_bytes(self) -> int: ...
    def reserved_bytes(self) -> int: ...
    def release_cached(self) -> None:
        """Give cached blocks back to the driver. Stalls the device."""


class Controls(Protocol):
    """What a trainer lets an action do. Ask ``capabilities.controls`` before promising."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def device(self) -> Device: ...

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        """End the loop in the framework's own way at the next step boundary; before an update, keep that from being applied."""

    def skip_update(self) -> bool:
        """Keep the pending update from being applied. False if it is too late or impossible."""

    def request_checkpoint(self, path: Path | None = None) -> str:
        """Save at the next safe point. Returns where, or raises ``UsageError``."""

    def scale_lr(self, factor: float) -> list[float]:
        """Multiply every learning rate. Returns the new values."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send metrics to the trainer's own logger; does nothing without one."""


# --------------------------------------------------------------------------- probes


class Demand(Protocol):
    """What the rules want, given to a probe so that it does no work that nobody needs."""

    def wants(self, key: str) -> bool:
        """Whether any rule, derived metric or report asks for this metric.

        ``key`` is :attr:`Metric.key`: ``grad_norm``, or ``grad_norm[]`` for the family.
        """

    @property
    def due_now(self) -> AbstractSet[str]:
        """Keys that are due at the step of the event that the probe was given: for probes that ask at every step."""

    def due(self, key: str, step: int) -> bool:
        """``wants`` and some rule evaluates it at this step (rule key ``every``)."""

    def every_of(self, key: str) -> int:
        """Steps from one at which a wanted key is due to the next, as things stand."""

    def next_due(self, keys: Iterable[str], step: int) -> int:
        """The first step after ``step`` at which one of ``keys`` is due; far away if nobody wants them."""


class Probe(Protocol):
    """Turns events into samples.

    ``sample`` runs on the step path: no ``.item()``, no ``float(tensor)``, no ``bool(tensor)``.
    Yield device scalars as they are; the mailbox brings them to the host. What is not there is
    not yielded: no gradients is not a zero norm.

    A probe may also have ``plan(demand)``, called once before the first event and again when the demand changes,
    ``close()``, called at the end of the run, ``state_dict`` / ``load_state_dict`` for what must survive a resume,
    ``provides_prefixes``: prefixes of further metric names that come from here (``eval.``), known only when they do, and
    ``reason_without(key)``: why this run cannot have a metric (``no driver``), or an empty text; rules of packs then do not apply.

    ``only_when_due`` names kinds of event at which a probe has nothing to do in steps in which no rule
    is due to look at one of its metrics: it is not called then. ``steps_ahead = 1`` has it called in the
    step before such a step, too. ``answers_once`` names kinds of event at which it is not called once it has
    given samples for that step and optimizer; ``only_with`` a fact of the event without which it never is.
    A probe that finds nothing to do for a while sets its attribute ``rests_until`` to the step at which it wants
    to be called again. A new optimizer ends every such pause. Where several optimizers take turns, what it says at the
    update of one concerns that one alone: it must say so at each, and is called at events of no optimizer until it rests for all.
    ``rests_for_all = True``: what it says at any event concerns all of them, as it does for one that listens to no update. ``rests_always = True``: what it looks at has
    nothing to do with optimizers, and no new one ends its pause either.

    A probe that needs no more of a step than what a :class:`~healthcheck.core.rows.StepRow` says has ``sample_rows(rows,
    demand)`` and names in ``noted`` the kinds of event that rows spare it. It gets the rows of some steps at once, in
    their order, up to a quarter of a second after they were noted, and returns the samples of each with its ``step`` and its
    ``time``. Where nobody notes rows it is given the events as before, so it needs ``sample`` as well. One with
    ``before_update`` among ``noted`` is asked about a row that is not :attr:`~healthcheck.core.rows.StepRow.over`, too, when
    a rule has to know of an update before it is made, and once more when it is over: it must not answer the same twice.
    One whose ``idle`` is true once training has begun is left out. ``look(row, update)`` is called for each row while its
    gradients are final, and may put what it finds into ``row.found``; with ``looks_from`` not before about that step.
    ``events_from`` takes the place of ``rests_until`` in
    steps that are noted in rows. ``rows_with`` names a field of the row: one that is asked only where some row has it, or with
    ``found`` only where it has left something in some row itself, under its name. One that measures time has ``untimed(since, until)``: what happens between these readings of
    ``time.monotonic`` is not the training's time (``until`` is None when it begins)."""

    @property
    def name(self) -> str: ...

    @property
    def listens_to(self) -> tuple[EventKind, ...]: ...

    @property
    def provides(self) -> tuple[Metric, ...]: ...

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]: ...


# --------------------------------------------------------------------------- conditions


@dataclass(slots=True)
class Bound:
    """A closed interval of numbers that are fine: what lies outside breaches, and so does NaN.

    Comparators publish one of scores, scorers one of values. A strict limit is written with the float next to
    it: scores that are not ``at_least 8`` end at ``math.nextafter(8.0, -math.inf)``. Bounds are shared: never change
    one that you were given.
    """

    low: float
    high: float

    def holds(self, number: float) -> bool:
        """Whether ``number`` is fine."""
        return self.low <= number <= self.high


EMPTY = Bound(math.inf, -math.inf)
"""The bound that no number keeps."""
FINITE = Bound(-sys.float_info.max, sys.float_info.max)
"""The bound that only NaN and the infinities break: "non-finite only"."""


class Comparator(Protocol):
    """Which scores breach, and which of two is nearer to it: ``above 8``, with its wording.

    :class:`healthcheck.Threshold` is one for a limit or two; write your own only for a test of another kind.
    """

    @property
    def text(self) -> str:
        """``above 8``, as alerts and reports write it."""

    @property
    def direction(self) -> int:
        """1 if greater scores are closer to a breach, -1 if smaller ones are, 0 if :meth:`closer` must be asked."""

    @property
    def healthy(self) -> Bound:
        """Scores that do not breach; :data:`EMPTY` if no interval says it. It never changes.

        Nobody asks about a score within it: this is what makes healthy samples cheap, and what a device
        compares with where an update is held back before the host has seen its values.
        """

    @property
    def exact(self) -> bool:
        """Whether every score outside :attr:`healthy` breaches, so that nobody need ask at all."""

    def __call__(self, score: float) -> bool:
        """Whether ``score`` breaches."""

    def closer(self, score: float, than: float) -> bool:
        """Whether ``score`` is closer to a breach than another one, or breaches by more.

        Finds the closest approach of a run, and the worst of several series.
        """

    def quiet(self, closest: float) -> Bound:
        """Scores that neither breach nor are closer to it than ``closest``: they change nothing in any report.

        :data:`EMPTY` is always right; a wider interval saves work.
        """


Scored = tuple[float | None, float | None]
"""``(score, normal)`` of one sample. Without a score it cannot be judged yet. ``normal`` is what the value was
compared with (median, mean, best, ...), None if there is no such thing."""


class Scorer(Protocol):
    """The memory of one condition for one series: a window of samples in, score and normal out.

    ``state``/``restore`` round-trip through JSON (no NaN); a ``restore`` that raises costs only its rule.

    A costly scorer may offer two more methods for the time when it is a part of ``all`` or ``any``:
    ``learn(values, steps) -> int`` takes a run without scoring it and returns how many of its samples, from the
    first on, could not have been judged (for an ``all`` that has failed already); ``join(other) -> Scorer | None``
    gives a scorer that reads what another part remembers of the same values: the other itself if both score alike.
    """

    @property
    def normal(self) -> float | None:
        """What the last value was compared with."""

    @property
    def memoryless(self) -> bool:
        """True while the score depends on the value alone, ``normal`` stays and nothing is learnt.

        Values within ``bound(quiet)`` are then not even handed over. Once true it stays so until ``restore``.
        """

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        """Score a run of samples, each against what came before it, and learn them.

        One sample is a run of one. How a stream is cut into runs must not matter.

        :param values: finite, unless the condition sets ``judges_nonfinite``; oldest first, at least one.
        :param steps: the training step of each value.
        :param quiet: scores that nobody will look at.

        Returns one :data:`Scored` for each value; those at the beginning whose scores are within ``quiet`` may be left out.
        """

    def bound(self, healthy: Bound) -> Bound | None:
        """The values whose scores would lie within ``healthy`` if they came next; learns nothing.

        It must agree with :meth:`update` to the last bit (:func:`healthcheck.exact_bound` sees to rounding): an
        update is let through or held back by it before the value is judged. None where the next value will not
        be scored, or where no interval says it; the latter always goes with ``Condition.bounded = False``.
        """

    def state(self) -> Any: ...
    def restore(self, state: Any) -> None: ...


class AbsenceScorer(Scorer, Protocol):
    """A scorer of a condition that watches absence. Its values are lengths of silence, in seconds or steps."""

    def arrived(self, gap: float) -> None:
        """A sample came after so much silence, which no rule has called an alert. A value of 0 follows."""


class OtherPart(Protocol):
    """A part of a condition that watches another metric, as the engine follows it."""

    @property
    def breach(self) -> bool | None:
        """Whether the newest sample of that metric breaches; None before one was judged."""


class Condition(Protocol):
    """A compiled condition of one rule: options are checked, nothing changes any more.

    Shared by all series of the rule; memory belongs into the scorers that ``start`` makes, one per series.
    :class:`healthcheck.CompiledCondition` is a ready-made one, with defaults for all that is not asked for.
    """

    @property
    def name(self) -> str: ...

    @property
    def breaches(self) -> Comparator:
        """Applied to every score."""

    @property
    def sentence(self) -> str:
        """Default message of a rule with this condition; placeholders as in ``message``."""

    @property
    def judges_nonfinite(self) -> bool:
        """True if NaN and infinity are handed to ``update`` (the ``nonfinite`` condition).

        Otherwise they are a breach without being scored, unless a ``nonfinite`` rule watches the same metric.
        """

    @property
    def bounded(self) -> bool:
        """True if its scorers publish a bound: a rule with it can then hold back the update of a bad value."""

    @property
    def baseline(self) -> bool:
        """True if it learns from earlier samples: ``outliers`` and ``reseed`` apply."""

    @property
    def min_samples(self) -> int:
        """Samples from which on it judges, after defaults and the rule's ``min_samples``."""

    @property
    def window(self) -> int:
        """Samples that it looks back at most; 0 if that has no limit. The placeholder ``{window}``."""

    @property
    def absence(self) -> str:
        """``""``; or ``steps`` / ``seconds``: judged by the clock instead of by samples (``missing``, ``stale``).

        ``start`` then makes an :class:`AbsenceScorer`.
        """

    @property
    def first(self) -> float:
        """With ``absence``: seconds or steps of silence that are fine until the first sample."""

    @property
    def across(self) -> str:
        """A label: each value comes divided by the median of the series that differ in it alone; empty: as it is."""

    @property
    def parts(self) -> Sequence[tuple[Any, Condition]]:
        """``(selector, condition)``: what it is made of (``all``, ``any``). The selector names another metric, or
        is None for the rule's own; the engine follows the others and hands them to ``start``."""

    def start(self, *others: OtherPart) -> Scorer:
        """A fresh scorer for one series; ``others`` are the parts on other metrics, in their order."""


def lacking(thing: Any, protocol: type) -> list[str]:
    """Names that ``protocol`` asks for and ``thing`` does not have."""
    wanted: dict[str, None] = {}
    for base in reversed(protocol.__mro__):
        if getattr(base, "_is_protocol", False):
            wanted.update(dict.fromkeys(n for n in vars(base) if n == "__call__" or not n.startswith("_")))
    return [name for name in wanted if not hasattr(thing, name)]


@dataclass(frozen=True, slots=True)
class ConditionType:
    """How a condition is registered: its name, the schema of its options, its compiler."""

    name: str
    """As written under ``when:``. Plugins use a dot: ``acme.cusum``."""
    schema: Mapping[str, Any]
    """draft-07 schema of the value under the condition's key."""
    compile: Callable[[Any, Mapping[str, Any]], Condition]
    """``compile(options, rule)``: ``options`` is the validated value, ``rule`` holds the rule's
    other keys that a condition may read (``min_samples``, ``outliers``, ``reseed``)."""
    help: str = ""
    shorthand: bool = False
    """True if the bare name is a complete condition: ``when: nonfinite``."""


# --------------------------------------------------------------------------- actions, reports


class Action(Protocol):
    """Something done about an alert.

    ``stage`` orders actions within one evaluation: ``observe``, then ``mitigate``, then
    ``stop``. In observe mode only ``observe`` runs. ``options_schema`` is a draft-07 schema of
    the options a rule may give. An exception becomes an ``action_error`` in the report and never
    prevents a later stop.

    An action that must listen before anything is wrong does so in the hook ``configure``. It may also
    have ``torch_is_there()``, called when a watched script has imported torch, and ``before_update``:
    true for one that observes and has to do so while the weights are still those of the step, and ``per_update``:
    true for one that can only act upon the update at hand. Others run at the end of the block in which their
    rule fired (see docs/explanation/stopping.md).
    """

    name: str
    stage: str
    options_schema: Mapping[str, Any]

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome: ...


@dataclass(slots=True)
class ActionContext:
    """What an action is given besides the alert."""

    options: Mapping[str, Any]
    controls: Controls
    step: int
    """The step during which the action runs."""
    before_update: bool
    """True if the update of this step can still be kept from happening."""
    run_dir: Path | None
    """Folder of the run's record, or None if there is none."""
    history: Callable[[str, int], list[tuple[int, float]]]
    """``history("loss", 50)``: the last values of a series as (step, value)."""
    series: Callable[[], Sequence[str]] = tuple
    """Names of all series that ``history`` knows."""
    event: Event | None = None
    """The event at which the action runs, with model, optimizer and batch where known."""
    say: Callable[[str], None] = lambda text: None
    """One line for the console."""


class Report(Protocol):
    """Where alerts and samples go. All methods are optional; the missing ones cost nothing.

    ``start(session)``, ``rules(session)`` when rules have joined since, ``samples(step, samples)``, ``transition(transition)``,
    ``alert(alert)``, ``amended(alert)`` when another cause has joined an alert or it has become an error, ``cleared(alert)``, ``acted(alert)`` after its
    actions ran, ``note(text)``, ``finish(report)`` with ``report.json``. One that needs ``samples`` or ``transition`` only
    sometimes sets them on itself in ``start``.

    With ``render(reports) -> str`` its name is a kind of ``--report NAME=PATH`` in ``run``, ``replay``
    and pytest: the text of the file, from one ``report.json`` or several. Called at the end, on rank 0."""

    @property
    def name(self) -> str: ...


class Position(NamedTuple):
    """Where a row of a recorded run stands, for formats that say so themselves.

    ``None`` in a field means that the column of that meaning is looked for: ``time`` in seconds since any origin, ``phase`` is
    ``train``, ``eval`` or ``test``."""

    step: int | None = None
    time: float | None = None
    phase: str | None = None


class Reader(Protocol):
    """Reads recorded runs of one format.

    ``recognises`` looks at the first 64 KiB (unpacked if gzip; empty for a folder) and answers how sure it is, 0.0 to 1.0;
    the surest reader is asked to read. ``read`` streams rows in the order of the file and appends to ``notes`` what a
    reader of the result should know (damaged lines, what was left out). A reader of a format with whole evaluations under
    our own names may have ``batches(path, notes)``, which yields ``(step, seconds, samples)`` and is then used instead.
    One of a format that says the names of all columns first may have ``names(path)``, which returns them.
    """

    name: str
    help: str

    def recognises(self, path: Path, head: bytes) -> float: ...
    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, Mapping[str, Any]]]:
        """Yield ``(position, columns)``, row by row.

        ``position`` is None where step, time and phase all have to be found in the columns. ``columns`` maps names to
        numbers (NaN and infinity are floats), text, or ``None`` (JSON ``null``); a column without a value is absent.
        """


class Clock(Protocol):
    """Time as an argument: the live clock, or a virtual one in replay and rule tests."""

    def monotonic(self) -> float: ...
    def wall(self) -> float: ...
