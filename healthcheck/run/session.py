"""One watched run: events in, alerts and a report out.

The session owns the parts of a run and connects them. Each part is given what it needs and knows nothing of the
session: what it has to tell goes through functions that it was given here. Concrete probes, actions, trainers and
reports come from plugins; :mod:`healthcheck.assembly` puts them in.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter_ns
from typing import Any

from healthcheck.core import protocols
from healthcheck.core.alerts import Alert, Verdict
from healthcheck.core.clock import ActiveTime, LiveClock, VirtualClock
from healthcheck.core.errors import StopTraining, UsageError
from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Agreement, Capabilities, Controls, Mailbox, Report
from healthcheck.core.runinfo import RunFacts, RunInfo
from healthcheck.core.samples import NO_LABELS, Sample
from healthcheck.engine.engine import Engine, Evaluation
from healthcheck.engine.routes import RuleDemand
from healthcheck.engine.summary import verdicts
from healthcheck.extend.dispatch import Dispatch, from_signal_handler
from healthcheck.extend.host import PluginHost, implementations_of
from healthcheck.rulelang.accepted import Accepted
from healthcheck.rulelang.known import rule_hint
from healthcheck.rulelang.rule import Mute, Rule, RuleSet
from healthcheck.run.actor import Actor, SessionControls, StopState
from healthcheck.run.board import DeviceTimer, History, ProbeBoard
from healthcheck.run.budget import OverheadBudget, acting_metrics
from healthcheck.run.ending import Ending, JudgedRun, UnjudgedReasons, exit_code, live_report
from healthcheck.run.errorlog import ErrorLog
from healthcheck.run.judge import JUDGED_AT, Judge, acted_upon
from healthcheck.run.watchdog import Watchdog

_PAUSES = {EventKind.EVAL_START: True, EventKind.EVAL_END: False, EventKind.TEST_START: True, EventKind.TEST_END: False}
"""Events at which the time of training stops (True) or goes on."""
_NEEDED = JUDGED_AT | _PAUSES.keys()
"""Events that the session needs itself, whoever else listens."""


class Session:
    """One watched run. Trainer adapters emit events into it; users read it.

    Made by ``healthcheck.watch``, an adapter or ``healthcheck run``; not meant to be built by
    hand, except through :mod:`healthcheck.testing`.

    :param host: the loaded plugins.
    :param extra_metrics: measured beside those that the rules ask for.
    :param accepted: alerts of earlier runs that are known and do not count.
    :param say: prints one line; None prints nothing.
    :param device_time: measures what we launch on a device; None: nothing does.
    """

    def __init__(
        self,
        rules: RuleSet,
        host: PluginHost,
        *,
        mailbox: Mailbox,
        info: RunInfo,
        clock: LiveClock | VirtualClock | None = None,
        extra_metrics: tuple[str, ...] = (),
        accepted: Accepted | None = None,
        say: Callable[[str], None] | None = None,
        device_time: DeviceTimer | None = None,
    ) -> None:
        self.rules = rules
        self.settings: Mapping[str, Any] = rules.settings
        self.host = host
        self.accepted = accepted or Accepted()
        self.info = info
        self.clock = clock or LiveClock()
        self.active = ActiveTime(self.clock)
        self.pid = os.getpid()
        self.user_state: dict[str, Any] = {}
        """The users' dict, in every event."""
        self.facts = RunFacts()
        """What probes may know of the run, in every event."""
        self.step = info.resumed_from or 0
        self.unit = "step"
        self.epoch: float | None = None
        """Epoch of the last event that had one."""
        self.last_event_at = self.clock.monotonic()
        self.judged_at = 0.0
        """Seconds of active training at the last judgement: the engine's clock, for the record."""
        self.alerts: list[Alert] = []
        self.report: dict[str, Any] | None = None
        self.event_cost: dict[EventKind, int] = {}
        """Nanoseconds of host time that watching has taken, by kind of event."""
        self.own_ns = 0
        """The same for all kinds together."""
        self.history = History()
        most_steps, most_seconds = self.settings.get("max_steps"), self.settings.get("max_time")
        self.stop = StopState(
            most_steps=int(most_steps) if most_steps else None,
            most_seconds=float(most_seconds) if most_seconds else None,
        )
        """The stop of this run: what trains looks here, actions ask through :attr:`controls`."""
        self.controls: SessionControls | None = None
        """What actions may do to the run; None until a trainer has come."""
        self.reports: list[Report] = list(host.registry.reports.values())
        self.errors = ErrorLog(say or (lambda text: None), self._clean_up)
        self.internal_errors = self.errors.internal
        self.logged: set[str] = set()
        """Names of the metrics that were given to :meth:`log`."""
        self._no_numbers: set[str] = set()
        self._ended = False
        self._watchdog: Watchdog | None = None

        self.dispatch = Dispatch(
            on_error=str(self.settings.get("on_plugin_error", "warn")),
            say=self.errors.say_plugin,
            note=lambda owner, hook, error: self.errors.plugin(owner, hook, error, self.epoch),
        )
        # The order of what follows is that of need: rules are final once plugins have modified them, the board asks the
        # demand of these rules, and reports start last, when all that they may look at is there.
        self.dispatch.compile_reports(self.reports)
        for plugin in host.infos:
            self.dispatch.add_plugin(plugin.plugin, implementations_of(plugin.plugin), plugin.name)
        host.manager.hook.healthcheck_modify_rules(rules=rules.rules)
        watch_transitions = bool(self.dispatch.table.get("transition") or self.dispatch.reports["transition"])
        self.engine = Engine(rules, rank=info.rank, start_step=self.step, watch_transitions=watch_transitions)
        self.demand = RuleDemand.of(rules.rules, rules.derived, extra_metrics)
        self.board = ProbeBoard(host.registry.probes, self.demand, self.dispatch, device_time)
        self.wanted = self.board.wanted
        """Kinds of event that are worth building in the step that :meth:`begin_step` began. Always the same set."""
        self.begin_step = self.board.begin_step
        """``begin_step(step)``: an adapter calls it once per step, and then needs only look into :attr:`wanted`."""
        self.judge = Judge(
            self.engine,
            mailbox,
            acting=acted_upon(rules.rules, rules.derived, host.registry.actions),
            arrived=self._hand_out,
            found=self._handle,
        )
        self.actor = Actor(
            host.registry.actions,
            observe=self.observing,
            info=info,
            history=self.history,
            done=self.facts.actions_done,
            say=self.note,
        )
        self.budget = OverheadBudget(
            self.settings.get("overhead_budget"),
            demand=self.demand,
            board=self.board,
            keep=acting_metrics(rules.rules),
            note=self.note,
        )
        self._reasons = UnjudgedReasons(
            self.engine,
            derived=rules.derived,
            registry=host.registry,
            quarantined=self.dispatch.is_quarantined,
        )
        self.dispatch.changed = self._listeners_changed
        self._listeners_changed()
        seen_by_hooks: protocols.Session = self
        host.manager.hook.healthcheck_configure.call_historic(kwargs={"session": seen_by_hooks})
        self.tell("start", self)
        self.dispatch.compile_reports(self.reports)  # some have given themselves methods in `start`

    # -- what users see ---------------------------------------------------------------

    @property
    def observing(self) -> bool:
        """Whether actions that change the run are held back."""
        return bool(self.settings.get("mode", "act") == "observe")

    @property
    def events(self) -> tuple[str, ...]:
        """Names of all events that can be heard."""
        return tuple(kind.value for kind in EventKind)

    def on(self, event: str | EventKind, function: Callable[..., Any]) -> Callable[[], None]:
        """Call ``function`` at every such event; returns a function that removes it.

        Raises ``UnknownHookError`` for an unknown name, with a suggestion.
        """
        return self.dispatch.on(event, function)

    def has_hooks(self, event: str | EventKind) -> bool:
        return self.dispatch.has_hooks(event)

    def list_hooks(self, event: str | EventKind) -> list[str]:
        """Owners that listen to an event, in calling order."""
        return self.dispatch.list_hooks(event)

    def register(self, plugin: object, name: str | None = None) -> str:
        """Register a plugin object (or class) with this running session; returns its name."""
        owner = self.host.register(plugin, name)
        self.dispatch.add_plugin(self.host.infos[-1].plugin, implementations_of(self.host.infos[-1].plugin), owner)
        self.board.plan()
        return owner

    def add_report(self, report: Report) -> None:
        """One more report from now on; its ``start`` is not called."""
        self.reports.append(report)
        self.dispatch.compile_reports(self.reports)

    def attach(self, target: Any, **options: Any) -> Any:
        """Attach to the trainer of a framework; returns its adapter.

        Raises ``UsageError`` for an object that no loaded plugin knows.
        """
        for attach in self.host.registry.trainers.values():
            adapter = attach(self, target, **options)
            if adapter is not None:
                return adapter
        trainers = self.host.registry.trainers
        known = "; ".join(str(getattr(attach, "takes", name)) for name, attach in trainers.items()) or "nothing"
        given = f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
        raise UsageError(
            f"attach() cannot watch {given}; it takes an object: {known}. "
            "A model and its optimizers are given to healthcheck.watch()"
        )

    def log(
        self,
        metrics: Mapping[str, Any],
        *,
        step: int | None = None,
        phase: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Feed metrics of your own. Device scalars are taken as they are, without a wait.

        :param step: that of the values; the step under way if None.
        :param phase: ``train`` or ``eval``; by the beginning of the name if None.
        :param labels: tell these series of a metric apart from others: ``{"parameter": "head.weight"}``.
        """
        if self._ended or os.getpid() != self.pid:
            return
        at = self.active()
        step = step if step is not None else max(1, self.step)
        apart = tuple(sorted(labels.items())) if labels else NO_LABELS
        self.logged.update(metrics)
        for name, value in metrics.items():
            if not hasattr(value, "__float__"):
                self._no_number(name, value)
                continue
            kind = phase or ("eval" if name.startswith(("eval.", "val.", "test.")) else "train")
            self.judge.waiting.append(Sample(name, step, value, apart, kind, at))

    def _no_number(self, name: str, value: Any) -> None:
        if name not in self._no_numbers:
            self._no_numbers.add(name)
            self.note(f'logged "{name}" is no number but {type(value).__name__}: it is left out')

    @contextlib.contextmanager
    def muted(self, rule: str, *, reason: str) -> Iterator[None]:
        """Judge and record a rule (or glob), but do nothing about it inside this block."""
        mute = Mute(rule, reason, first=self.step)
        known = dict.fromkeys([*(r.id for r in self.rules.rules), *self.rules.off])
        if not any(mute.covers(rule_id, self.step) for rule_id in known):
            self.note(f'muted "{rule}": that is no rule here; {rule_hint(rule, known)}')
        self.engine.mutes.append(mute)
        try:
            yield
        finally:
            index = self.engine.mutes.index(mute)
            self.engine.mutes[index] = Mute(rule, reason, mute.first, self.step, mute.origin)

    def collect(self, *metrics: str) -> None:
        """Have metrics measured that no rule asks for; keys as in ``Metric.key``. Before the first event."""
        for key in metrics:
            self.demand.every.setdefault(key, 1)
        self.board.plan()

    def note(self, text: str) -> None:
        """One line for the person who watches the console."""
        self.tell("note", text)

    # -- what adapters call -----------------------------------------------------------

    def bind(self, controls: Controls) -> None:
        """Give the session its trainer's controls, before the first event.

        A framework found inside a watched script binds again: its controls take over, a stop stays asked for.
        """
        if self.controls is not None:
            self.controls.take_over(controls)
            return
        self.controls = SessionControls(controls, stop=self.stop, info=self.info, note=self.note)
        if self.engine.needs_watchdog and isinstance(self.clock, LiveClock):  # else no thread exists
            self._watchdog = Watchdog(
                self.clock,
                last_event=lambda: self.last_event_at,
                silence=self._silence,
                stop=self.stop,
                finish=lambda: self.finish(Ending()),
                note=self.note,
            ).start()

    def agree_through(self, agreement: Agreement) -> None:
        """Let the ranks of this job decide together. Adapters call it once they know how."""
        if self.controls is not None:
            self.controls.agreement = agreement
            self.controls.order = {r.id: (int(r.severity), i) for i, r in enumerate(self.rules.rules)}
            self.controls.unanimous = {r.id for r in self.rules.rules if r.ranks == "all"}
            self.judge.exchange = self._exchange

    def wants(self, kind: EventKind, step: int | None = None) -> bool:
        """Whether anybody listens; an adapter builds no event otherwise.

        ``step_end`` and ``before_update`` are wanted as soon as any rule or listener exists,
        because samples are judged there. On the step path look into :attr:`wanted` instead.

        :param step: the step of that event, where it is known: probes that look at every tenth step
            only are then not asked for the nine between.
        """
        if self._ended:
            return False
        if step is not None:
            return self.board.looks_at(kind, step)
        return kind in self._heard or kind in self.board.by_kind

    @property
    def watching(self) -> bool:
        """False if no rule, plugin or report wants anything: then adapters attach nothing."""
        return bool(self.rules.rules) or any(self.dispatch.table.values()) or bool(self.board.by_kind)

    def _listeners_changed(self) -> None:
        heard = {kind for kind in EventKind if self.dispatch.table.get(kind)}
        self._heard = frozenset(heard | _NEEDED if self.watching else heard)
        self.board.heard_elsewhere(self._heard)

    def emit(self, event: Event) -> None:
        """Take one event: probes, listeners, and at judging points the rules.

        Never raises because of us; a plugin's error is kept and said once.
        """
        if self._ended or os.getpid() != self.pid:  # a forked child shares our hooks, and is not this run
            return
        began = perf_counter_ns()
        kind = event.kind
        if event.step > self.step:
            self.step = event.step
        if event.epoch is not None:
            self.epoch = event.epoch
        now = self.last_event_at = self.clock.monotonic()  # the only time that is read for an event
        active = self.active
        if kind in _PAUSES:
            (active.pause if _PAUSES[kind] else active.resume)(now)
        at = (now if active.paused_at is None else active.paused_at) - active.origin
        facts = self.facts
        facts.active_seconds, facts.own_seconds = at, self.own_ns / 1e9
        event.run, event.user_state = facts, self.user_state
        board = self.board
        device_ends = None
        if board.measures_device and board.device_time is not None:
            device_ends = board.device_time.begin()
        board.sample(event, at, self.judge.waiting)
        if self.dispatch.table.get(kind):
            self.dispatch.call(kind.value, event.step, self, event)
        if kind in JUDGED_AT:
            try:
                self.judge(event, at)
            except StopTraining:
                raise
            except Exception as error:
                if self.dispatch.on_error == "raise" or from_signal_handler(error):
                    raise
                self.monitor_error(error)
        if device_ends is not None:
            device_ends()
        spent = perf_counter_ns() - began
        self.event_cost[kind] = self.event_cost.get(kind, 0) + spent
        self.own_ns += spent
        if kind is EventKind.STEP_END:
            self.budget.steps_to_look -= 1
            if not self.budget.steps_to_look:
                self.budget.look(self.own_ns, at)

    def monitor_error(self, error: BaseException, method: str = "") -> None:
        """A fault of ours: keep it with ``method``, step and epoch, say it once, let training go on."""
        self.errors.ours(error, method, self.step, self.epoch)

    def state_dict(self) -> dict[str, Any]:
        """All that must survive a resume, as plain JSON values: detectors and probes."""
        return {"engine": self.engine.state_dict(), "probes": self.board.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore before the first event; returns one sentence for every rule that starts fresh.

        Raises ``StateError`` for a state that this version cannot read.
        """
        fresh = self.engine.load_state_dict(saved["engine"], now=self.active())
        for sentence in self.board.load_state_dict(saved.get("probes", {})):
            self.note(sentence)
        self.step = self.engine.step
        return fresh

    # -- what the parts hand over -------------------------------------------------------

    def tell(self, method: str, *given: Any) -> None:
        """Call a method of every report; one that fails is an error of that report, said once."""
        self.dispatch.report(method, self.step, *given)

    def _hand_out(self, step: int, at: float, samples: list[Sample]) -> None:
        """Samples have arrived as numbers: keep them, and show them to whoever wants that."""
        self.judged_at = at
        self.history.remember(samples)
        dispatch = self.dispatch
        if dispatch.table.get("samples"):
            dispatch.call("samples", step, self, step, samples)
        for report in dispatch.reports["samples"]:  # as `dispatch.report` does, at one call less in every step
            try:
                report.call(step, samples)
            except (Exception, SystemExit) as error:
                dispatch.failed(report.owner, "samples", self.step, error)

    def _handle(self, found: Evaluation, event: Event | None) -> None:
        """Rules have found something: reports hear of it, actions run, reports hear what came of them."""
        dispatch = self.dispatch
        for transition in found.transitions:
            dispatch.call("transition", self.step, self, transition)
            self.tell("transition", transition)
        for alert in found.alerts:
            alert.accepted = self.accepted.reason(alert.rule, [f.name for f in alert.series], self.info.target)
            if not alert.repeat:
                self.alerts.append(alert)
            self.tell("alert", alert)
        if self.controls is not None:
            self.actor.run(found.plan, self.controls, self.step, event)
        for alert in found.alerts:
            self.tell("acted", alert)
            dispatch.call("alert", self.step, self, alert)
        for alert in found.cleared:
            if self.controls is not None:
                self.controls.cleared(alert.rule)
            self.tell("cleared", alert)

    def _exchange(self, step: int) -> None:
        if self.controls is not None:
            self.controls.exchange(step, self.alerts)

    def _silence(self, seconds: float) -> None:
        """From the watchdog's thread: nothing has happened for so long."""
        if not self._ended:
            self.judge.silence(seconds, self.active())

    def _clean_up(self) -> str | None:
        """What the ``cleanup`` action does, without a rule: after an error that looks like memory."""
        return None if self.controls is None else self.actor.emergency("cleanup", self.controls, self.step)

    def _guard(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except StopTraining:
            pass  # the run is over already
        except Exception as error:
            self.monitor_error(error)

    # -- the end --------------------------------------------------------------------------

    def finish(self, ending: Ending) -> dict[str, Any]:
        """End the run: last judgement, verdicts, report. Idempotent; returns ``report.json``."""
        if self.report is not None:
            return self.report
        if os.getpid() != self.pid:
            return {}
        if ending.exception is not None:
            self._guard(lambda: self.emit(Event(EventKind.EXCEPTION, self.step, exception=ending.exception)))
        self._guard(lambda: self.emit(Event(EventKind.TRAIN_END, self.step, loads=self.facts.loads)))
        self._ended = True
        if self._watchdog is not None:
            self._watchdog.stop()
        if self.controls is not None and self.controls.agreement is not None:
            self.controls.agreement.close()
        self.board.close(self._guard)
        self.report = live_report(
            self._judged_run(),
            self._verdicts(),
            ending,
            capabilities=self._capabilities(),
            accepted_unused=sorted({entry.rule for entry in self.accepted.unused(self.info.target)}),
            overhead=self._overhead(),
        )
        self.dispatch.call("report_section", self.step, self, self.report)
        self.tell("finish", self.report)
        return self.report

    def exit_code(self) -> int:
        """What ``healthcheck run`` would exit with, as things stand."""
        if self.report is not None:
            return int(self.report["exit_code"])
        return exit_code(self._judged_run(), Ending(), self._verdicts())[0]

    def reason_without_data(self, rule: Rule) -> str:
        """Why a rule's metric gave no sample."""
        return self._reasons.why(rule, step=self.step, capabilities=self._capabilities(), seen=self.event_cost.keys())

    def _capabilities(self) -> Capabilities | None:
        return None if self.controls is None else self.controls.capabilities

    def _verdicts(self) -> list[Verdict]:
        return verdicts(self.engine, self.reason_without_data)

    def _judged_run(self) -> JudgedRun:
        """This run, as the report needs it."""
        return JudgedRun(
            engine=self.engine,
            rules=self.rules,
            alerts=self.alerts,
            target=self.info.target,
            steps=self.step,
            seconds=round(self.clock.monotonic() - self.active.started, 3),
            unit=self.unit,
            rank=self.info.rank,
            world_size=self.info.world_size,
            resumed_from=self.info.resumed_from,
            stop=self.stop.request,
            action_errors=self.actor.errors,
            plugin_errors=[self.errors.plugin_entry(error) for error in self.dispatch.errors]
            + [{"plugin": f.name, "hook": "load", "error": f.reason, "count": 1} for f in self.host.failures],
            internal_errors=self.internal_errors,
        )

    def _overhead(self) -> dict[str, Any]:
        """Host time that watching took, per event kind and probe, in seconds."""
        seconds = self.clock.monotonic() - self.active.started
        total = self.own_ns / 1e9
        timer = self.board.device_time
        on_device = None if timer is None else timer.seconds_per_step()
        device = {} if on_device is None else {"device_seconds_per_step": round(on_device, 7)}
        return {
            **device,
            "host_seconds": round(total, 4),
            "fraction": round(total / seconds, 5) if seconds > 0 else 0.0,
            "events": {kind.value: round(ns / 1e9, 4) for kind, ns in self.event_cost.items()},
            "probes": {name: round(cost.ns / 1e9, 4) for name, cost in self.board.cost.items()},
            "stretched": dict(self.budget.stretched),
        }
