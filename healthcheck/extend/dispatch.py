"""Calling listeners: flat, guarded, in order. The hot side of the plugin system.

pluggy declares and registers hooks; here the implementations of the loop and judgement hooks are
compiled into flat tuples, because a pluggy call without implementations costs over a microsecond
and one raising implementation silences the rest.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.core.errors import StopTraining, UnknownHookError
from healthcheck.core.events import EventKind
from healthcheck.core.text import strict, suggest
from healthcheck.extend.guard import calls_foreign, describe, passes_on, place_of

WITH_GRADIENTS = frozenset({"backward_end", "before_update"})
"""Hooks at which gradients are there that an update will use."""
LOOKS_FIRST, LOOKS_EVERY = 3, 100
"""Calls of a listener around which its gradients are compared: the first ones, and from then on every so many."""
Gradient = tuple[Any, Any, int]
"""A parameter, its gradient and the version of that."""
QUARANTINE_AFTER = 3
"""Errors of one owner after which it is not called again."""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    **{kind.value: ("session", "event") for kind in EventKind},
    "samples": ("session", "step", "samples"),
    "transition": ("session", "transition"),
    "alert": ("session", "alert"),
    "alert_amended": ("session", "alert"),
    "report_section": ("session", "report"),
    "performance": ("session", "performance"),
}
"""Loop or judgement hook, without its prefix -> its arguments in order."""


REPORT_METHODS = (
    *("start", "rules", "samples", "transition", "alert", "amended", "cleared", "acted", "note", "detail", "finish"),
)
"""Methods of a report that a session calls; see :class:`healthcheck.core.protocols.Report`."""


@dataclass(slots=True)
class ListenerError:
    """One error of one listener, for the report."""

    owner: str
    hook: str
    step: int
    error: str
    place: str
    count: int = 1
    quarantined: bool = False
    raised: bool = True
    """False where it did something that people must know of, and raised nothing."""

    def to_json(self) -> dict[str, Any]:
        return {
            "plugin": self.owner,
            "hook": self.hook,
            "step": self.step,
            "error": self.error,
            "place": self.place,
            "count": self.count,
            "quarantined": self.quarantined,
            **({} if self.raised else {"raised": False}),
        }


@dataclass(frozen=True, slots=True)
class Listener:
    """One compiled implementation: ``call`` takes all arguments of the hook, in order."""

    call: Callable[..., Any]
    owner: str


class Dispatch:
    """Listeners and reports of one session, by hook; see :mod:`healthcheck.extend.hookspecs` for what they are called with.

    :param on_error: ``warn`` keeps errors and goes on, ``raise`` lets them out (tests, and people who want it).
    :param say: called with an error worth saying: an owner's first one, and the one that puts it in quarantine.
    :param note: called with owner, hook and exception of every error, before it is kept.
    :param stopping: whether the run has been asked to stop: only then a ``StopTraining`` is that stop.
    """

    def __init__(
        self,
        *,
        on_error: str = "warn",
        say: Callable[[ListenerError], None] | None = None,
        note: Callable[[str, str, BaseException], None] | None = None,
        stopping: Callable[[], bool] = lambda: True,
    ) -> None:
        self.on_error = on_error
        self.errors: list[ListenerError] = []
        self.table: dict[str, tuple[Listener, ...]] = {}
        """Hook -> its listeners, in calling order. Whoever asks whether anybody listens looks in here."""
        self.reports: dict[str, tuple[Listener, ...]] = {}
        """Method of :data:`REPORT_METHODS` -> the reports that have it."""
        self.changed: Callable[[], None] | None = None
        """Called after a listener has come or gone."""
        self._say = say
        self._note = note
        self._stopping = stopping
        self._off: set[str] = set()
        self._failures: dict[str, int] = {}
        self._looked: dict[tuple[str, str], int] = {}
        self._changing: set[tuple[str, str]] = set()

    # -- registration -----------------------------------------------------------------

    def on(self, hook: str | EventKind, function: Callable[..., Any], *, owner: str = "") -> Callable[[], None]:
        """Register a plain function for an event or judgement hook; returns its remover.

        The function may take any of the hook's arguments by name; one that takes a single
        positional argument of another name gets the event.

        Raises ``UnknownHookError`` for a name that does not exist, with a suggestion.
        """
        name = _hook_name(hook)
        listener = Listener(_adapt(function, name), owner or _name_of(function))
        self._put(name, (*self.table.get(name, ()), listener))

        def remove() -> None:
            self._put(name, tuple(x for x in self.table.get(name, ()) if x is not listener))

        return remove

    def _put(self, hook: str, listeners: tuple[Listener, ...]) -> None:
        # Tuples are replaced, never changed: a listener may come or go while its hook is being called.
        self.table[hook] = listeners
        if self.changed is not None:
            self.changed()

    def add_plugin(self, plugin: object, implementations: Iterable[tuple[str, Callable[..., Any]]], owner: str) -> None:
        """Register the loop and judgement implementations of a plugin, in its given order."""
        for name, function in implementations:
            if name.removeprefix("healthcheck_") in ARGUMENTS:
                self.on(name, function, owner=owner)

    def compile_reports(self, reports: Iterable[Any]) -> None:
        """Take the methods that these reports have now; a report may give itself more of them in ``start``."""
        known = [report for report in reports if not self.is_quarantined(report.name)]
        for method in REPORT_METHODS:
            self.reports[method] = tuple(
                Listener(getattr(report, method), report.name) for report in known if hasattr(report, method)
            )

    def has_hooks(self, hook: str | EventKind) -> bool:
        return bool(self.table.get(_hook_name(hook)))

    def list_hooks(self, hook: str | EventKind) -> list[str]:
        """Owners that listen to a hook, in calling order."""
        return [listener.owner for listener in self.table.get(_hook_name(hook), ())]

    # -- calling ----------------------------------------------------------------------

    @calls_foreign(lambda of: (of["listener"].owner, of["hook"]))
    def call(self, hook: str, step: int, *arguments: Any) -> None:
        """Call every listener of a hook; errors are kept, not raised (see ``on_error``)."""
        for listener in self.table.get(hook, ()):
            before = self._gradients_before(listener, hook, arguments) if hook in WITH_GRADIENTS else ()
            try:
                listener.call(*arguments)
            except BaseException as error:
                self.failed(listener.owner, hook, step, error)
            if before:
                self._name_changed(listener, hook, step, before)

    @calls_foreign(lambda of: (of["listener"].owner, of["method"]))
    def report(self, method: str, step: int, *arguments: Any) -> None:
        """Call a method of all reports that have it, guarded in the same way."""
        for listener in self.reports.get(method, ()):
            try:
                listener.call(*arguments)
            except BaseException as error:
                self.failed(listener.owner, method, step, error)

    def add_sections(self, session: Any, report: dict[str, Any], step: int) -> None:
        """What plugins add to the report, as plain JSON. They are given a copy: what stands there stays."""
        for listener in self.table.get("report_section", ()):
            offered = copy.deepcopy(report)
            try:
                listener.call(session, offered)
                report.update({str(key): strict(offered[key]) for key in offered.keys() - report.keys()})
            except BaseException as error:
                self.failed(listener.owner, "report_section", step, error)

    def add_findings(self, session: Any, step: int, performance: dict[str, Any]) -> None:
        """What plugins found of the run's speed, into ``performance["findings"]``. They are given a copy."""
        findings = performance.setdefault("findings", {})
        for listener in self.table.get("performance", ()):
            try:
                for name, finding in (listener.call(session, copy.deepcopy(performance)) or {}).items():
                    findings[name] = {**checked_finding(name, finding, findings), "from": listener.owner}
            except BaseException as error:
                self.failed(listener.owner, "performance", step, error)

    def failed(self, owner: str, hook: str, step: int, error: BaseException, *, quarantine: bool = True) -> None:
        """Keep one error of an owner; say it once; quarantine the owner after three.

        To be called where it was caught. Raises it again if it is not the owner's, see :func:`passes_on`.
        """
        if passes_on(error) and (self._stopping() or not isinstance(error, StopTraining)):
            raise error
        if self._note is not None:
            self._note(owner, hook, error)
        count = self._failures[owner] = self._failures.get(owner, 0) + 1
        # A plugin that fails at every step fails in the same words: one entry, counted, keeps the report short.
        text = describe(error)
        known = next((e for e in self.errors if (e.owner, e.hook, e.error) == (owner, hook, text)), None)
        if known is None:
            known = ListenerError(owner, hook, step, text, place_of(error))
            self.errors.append(known)
        else:
            known.count += 1
        if quarantine and count >= QUARANTINE_AFTER:
            known.quarantined = True
            self.quarantine(owner)
        if self.on_error == "raise":
            raise error
        if self._say is not None and (count == 1 or count == QUARANTINE_AFTER):
            self._say(known)

    # -- gradients that a listener changes ----------------------------------------------

    def _gradients_before(self, listener: Listener, hook: str, arguments: tuple[Any, ...]) -> Sequence[Gradient]:
        """Now and then the gradients that a listener is about to see, with their versions; torch counts changes in place."""
        calls = self._looked[listener.owner, hook] = self._looked.get((listener.owner, hook), 0) + 1
        if (calls > LOOKS_FIRST and calls % LOOKS_EVERY) or (listener.owner, hook) in self._changing:
            return ()
        event = arguments[-1]
        try:
            if event.optimizer is not None:
                parameters = [p for group in event.optimizer.param_groups for p in group["params"]]
            else:
                parameters = [p for _, p in event.model.named_parameters()]
            return [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]
        except Exception:  # a tensor that has no version, an event without a model: then nothing is known
            return ()

    def _name_changed(self, listener: Listener, hook: str, step: int, before: Sequence[Gradient]) -> None:
        """A listener may change gradients; whoever reads the run must know that it did. Said once for each hook."""
        changed = sum(p.grad is not gradient or gradient._version != version for p, gradient, version in before)
        if not changed:
            return
        self._changing.add((listener.owner, hook))
        known = ListenerError(
            listener.owner, hook, step, f"changed {changed} of {len(before)} gradients", "", raised=False
        )
        self.errors.append(known)
        if self._say is not None:
            self._say(known)

    def is_quarantined(self, owner: str) -> bool:
        return owner in self._off or self._failures.get(owner, 0) >= QUARANTINE_AFTER

    def quarantine(self, owner: str) -> None:
        """Call nothing of this owner any more."""
        self._off.add(owner)
        for table in (self.table, self.reports):
            for hook, listeners in table.items():
                table[hook] = tuple(x for x in listeners if x.owner != owner)
        if self.changed is not None:
            self.changed()


BOUNDS = ("data", "memory", "host", "communication", "compute")
"""What a run may wait for, as ``bound`` of a finding of ``healthcheck_performance``."""


def checked_finding(name: Any, finding: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """A finding as plain JSON. Raises ``ValueError`` for one that has not the form that the hook describes."""
    if not isinstance(name, str) or not name or name in known:
        raise ValueError(f"a finding needs a name of its own, not {name!r}")
    if not isinstance(finding, Mapping) or not isinstance(finding.get("text"), str):
        raise ValueError(f'finding "{name}" must be a mapping with a sentence as "text"')
    made: dict[str, Any] = strict(dict(finding))
    bound, share = made.get("bound"), made.get("share")
    if bound is not None and bound not in BOUNDS:
        raise ValueError(f'finding "{name}": "bound" is one of {", ".join(BOUNDS)}, not {bound!r}')
    if share is not None and not (isinstance(share, (int, float)) and 0 <= share <= 1):
        raise ValueError(f'finding "{name}": "share" is a part of a step\'s time from 0 to 1, not {share!r}')
    rows = made.get("rows", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f'finding "{name}": "rows" is a list of mappings')
    return made


def _hook_name(hook: str | EventKind) -> str:
    name = hook.value if isinstance(hook, EventKind) else hook.removeprefix("healthcheck_")
    if name not in ARGUMENTS:
        hint = suggest(name, ARGUMENTS) or f"one of {', '.join(ARGUMENTS)}"
        raise UnknownHookError(f'no event is called "{hook}"; {hint}')
    return name


def _adapt(function: Callable[..., Any], hook: str) -> Callable[..., Any]:
    """A callable that takes all the hook's arguments, whatever subset ``function`` takes."""
    arguments = ARGUMENTS[hook]
    # Done once, at registration: what is called at every step then takes its arguments as they come.
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return function
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function
    taken = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.default is p.empty]
    unknown = [name for name in taken if name not in arguments]
    if len(taken) == 1 and unknown:  # lambda e: ...
        position = len(arguments) - 1
        return lambda *given: function(given[position])
    if unknown:
        raise UnknownHookError(
            f'{_name_of(function)}: hook "{hook}" has no argument "{unknown[0]}"; it has {", ".join(arguments)}'
        )
    optional = [p.name for p in parameters if p.default is not p.empty and p.name in arguments]
    names = [name for name in arguments if name in taken or name in optional]
    if names == list(arguments) and [p.name for p in parameters] == names:
        return function
    positions = [(name, arguments.index(name)) for name in names]
    return lambda *given: function(**{name: given[i] for name, i in positions})


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
