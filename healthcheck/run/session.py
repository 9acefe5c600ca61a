"""One watched run: events in, alerts and a report out.

The session owns the parts of a run and connects them. Each part is given what it needs and knows nothing of the
session: what it has to tell goes through functions that it was given here. Concrete probes, actions, trainers and
reports come from plugins; :mod:`healthcheck.assembly` puts them in.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter_ns
from typing import Any

from healthcheck.core import protocols
from healthcheck.core.alerts import Alert, Verdict
from healthcheck.core.clock import ActiveTime, LiveClock, VirtualClock
from healthcheck.core.errors import StopTraining
from healthcheck.core.events import PAUSES, Event, EventKind
from healthcheck.core.protocols import Capabilities, Controls, Report
from healthcheck.core.rows import StepRow
from healthcheck.core.runinfo import Elsewhere, RunFacts, RunInfo
from healthcheck.core.samples import samples_of
from healthcheck.engine.columns import History, complete
from healthcheck.engine.engine import Engine
from healthcheck.engine.episodes import TRAITS, Evaluation
from healthcheck.engine.lookups import RuleDemand
from healthcheck.engine.summary import verdicts
from healthcheck.extend import guard
from healthcheck.extend.dispatch import Dispatch
from healthcheck.extend.host import PluginHost, implementations_of
from healthcheck.rulelang.accepted import Accepted
from healthcheck.rulelang.known import rule_hint
from healthcheck.rulelang.rule import Mute, RuleSet
from healthcheck.rulelang.sources import RuleLayers
from healthcheck.run.actor import Actor, Agreement, SessionControls, StopState
from healthcheck.run.board import DeviceTimer, ProbeBoard
from healthcheck.run.budget import OverheadBudget, acting_metrics, acts_on
from healthcheck.run.ending import Ending, JudgedRun, ends_here, live_end, live_report
from healthcheck.run.errorlog import ErrorLog
from healthcheck.run.judge import JUDGED_AT, Judge, Mailbox, acted_upon
from healthcheck.run.performance import Performance
from healthcheck.run.unjudged import reasons_of
from healthcheck.run.untimed import Untimed
from healthcheck.run.watchdog import Watchdog

_NEEDED = JUDGED_AT | PAUSES.keys()
"""Events that the session needs itself, whoever else listens."""
_ROWS_END = {EventKind.BEFORE_UPDATE, EventKind.STEP_END}
"""Those of them that it does not need where steps are noted in rows: :meth:`Session.step_noted` takes their place."""


class Session:
    """One watched run. Trainer adapters emit events into it; users read it.

    Made by ``healthcheck.watch``, an adapter, ``healthcheck run`` or :mod:`healthcheck.testing`.

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
        self.rules, self.layers = rules, RuleLayers()
        self.settings: Mapping[str, Any] = rules.settings
        self.host, self.info, self.accepted = host, info, accepted or Accepted()
        self.clock = clock or LiveClock()
        self.active, self.pid, self._performance = ActiveTime(self.clock), os.getpid(), Performance()
        self.user_state: dict[str, Any] = {}  # the users' dict, in every event
        self.facts = RunFacts()
        """What probes may know of the run, in every event."""
        self.step, self.unit = info.resumed_from or 0, "step"
        self.epoch: float | None = None  # of the last event that had one
        self.last_event_at = self.clock.monotonic()
        self.alerts: list[Alert] = []
        self.report: dict[str, Any] | None = None
        self.event_cost: dict[EventKind, int] = {}
        """Nanoseconds of host time that watching has taken, by kind of event."""
        self.own_ns = 0  # the same for all kinds together
        self.history = History()
        self.units: Mapping[str, str] = host.registry.units()
        most_steps, most_seconds = self.settings.get("max_steps"), self.settings.get("max_time")
        self.stop = StopState(
            most_steps=int(most_steps) if most_steps else None,
            most_seconds=float(most_seconds) if most_seconds else None,
        )
        """The stop of this run: what trains looks here, actions ask through :attr:`controls`."""
        self.controls: SessionControls | None = None  # what actions may do to the run; None until a trainer has come
        self.reports: list[Report] = list(host.registry.reports.values())
        self.errors = ErrorLog(say or (lambda text: None), self._clean_up)
        self.internal_errors, self._elsewhere = self.errors.internal, Elsewhere()
        self.step_of_log: Callable[[], int] = lambda: max(1, self.step)  # whoever counts steps knows better
        self.logged: set[str] = set()  # names of the metrics that were given to `log`
        self._not_judged: dict[str, str] = {}  # rule -> why it judges nothing more
        self._stopped_at: int | None = None  # the step whose samples made a rule stop: others of its block come later
        self._ended = self.holds = False  # whether numbers of a noted step are still to be sent
        self._watchdog: Watchdog | None = None

        self.dispatch = Dispatch(
            on_error=str(self.settings.get("on_plugin_error", "warn")),
            say=self.errors.say_plugin,
            note=lambda owner, hook, error: self.errors.plugin(owner, hook, error, self.epoch),
            stopping=lambda: self.stop.request is not None,
        )
        # In the order of need: rules are final once plugins have modified them, reports may look at all the rest.
        self.dispatch.compile_reports(self.reports)
        for plugin in host.infos:
            self.dispatch.add_plugin(plugin.plugin, implementations_of(plugin.plugin), plugin.name)
        host.modify_rules(rules.rules)
        watch_transitions = bool(self.dispatch.table.get("transition") or self.dispatch.reports["transition"])
        self.engine = Engine(rules, rank=info.rank, start_step=self.step, watch_transitions=watch_transitions)
        # Rules that apply to some runs only wait to hear what this one is like.
        wanted = (*extra_metrics, *TRAITS) if self.engine.episodes.undecided else extra_metrics
        self.demand = RuleDemand.of(rules.causes, rules.derived, wanted)
        self.board = ProbeBoard(host.registry.probes, self.demand, self.dispatch, device_time)
        self.untimed = Untimed(self.active, self.facts, self.board)
        self.wanted = self.board.wanted
        """Kinds of event that are worth building in the step that :meth:`begin_step` began. Always the same set."""
        self.begin_step = self.board.begin_step
        """``begin_step(step)``: an adapter calls it once per step, and then needs only look into :attr:`wanted`."""
        self.acts_on_loss = acts_on("loss", rules.causes, host.registry.actions)
        """Whether a rule acts on the run for its loss."""
        self._mailbox = mailbox
        self.judge = Judge(
            self.engine,
            mailbox,
            acting=lambda gated: (
                frozenset() if self.observing else acted_upon(rules.causes, rules.derived, host.registry.actions, gated)
            ),
            history=self.history,
            dispatch=self.dispatch,
            shown=lambda step, samples: self.dispatch.call("samples", step, self, step, samples),
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
        share, keep = self.settings.get("overhead_budget"), acting_metrics(rules.causes)
        self.budget = OverheadBudget(share, demand=self.demand, board=self.board, keep=keep)
        self.dispatch.changed, self.judge.rows = self._listeners_changed, self.board.take_rows
        self.board.receive = mailbox.receive
        self._listeners_changed()
        self._failed_plugins = 0
        self._configure()
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
        self._configure(only=owner)
        self.board.plan()
        return owner

    def _configure(self, only: str = "") -> None:
        """Have plugins configure this session, and leave out those that failed then or before."""
        seen_by_hooks: protocols.Session = self
        self.host.configure(seen_by_hooks, only=only)
        failures = [failure for failure in self.host.failures[self._failed_plugins :] if failure.hook != "load"]
        self._failed_plugins = len(self.host.failures)
        if not failures:
            return
        for failure in failures:
            self.dispatch.quarantine(failure.name)
            (self.note if only else self.info.notes.append)(str(failure))
        kept = self.host.registry.reports
        self.reports[:] = [report for report in self.reports if kept.get(report.name) is report]
        self.dispatch.compile_reports(self.reports)
        self.board.plan()

    def add_report(self, report: Report) -> None:
        """One more report from now on; its ``start`` is not called."""
        self.reports.append(report)
        self.dispatch.compile_reports(self.reports)

    def attach(self, target: Any, **options: Any) -> Any:
        """Attach to the trainer of a framework; returns its adapter.

        Raises ``UsageError`` for an object that no loaded plugin knows.
        """
        return self.host.attach(
            self, target, options, lambda owner, error: self.dispatch.failed(owner, "attach", self.step, error)
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
        step = step if step is not None else self.step_of_log()
        named = metrics if labels or phase == "eval" else self.demand.agents.of(metrics)
        samples, odd = samples_of(named, step, self.active(), phase=phase, labels=labels)
        self.judge.waiting += samples
        if any(isinstance(one.value, float) and one.value - one.value != 0.0 for one in samples):
            self.judge.due_step = 0  # it must not wait for the end of its block
        for name in odd - self.logged:
            self.note(f'logged "{name}" is not a number but {type(metrics[name]).__name__}: it is left out')
        self.logged.update(metrics)

    @contextlib.contextmanager
    def muted(self, rule: str, *, reason: str) -> Iterator[None]:
        """Judge and record a rule (or glob), but do nothing about it inside this block."""
        mute = Mute(rule, reason, first=self.step)
        known = dict.fromkeys([*(r.id for r in self.rules.causes), *self.rules.off])
        if not any(mute.covers(rule_id, self.step) for rule_id in known):
            self.note(f'muted "{rule}": there is no such rule here; {rule_hint(rule, known)}')
        with self.engine.muted(mute):
            yield

    def collect(self, *metrics: str) -> None:
        """Have metrics measured that no rule asks for (``Metric.key``), before the first event."""
        self.demand.every.update(dict.fromkeys(metrics, 1) | self.demand.every)
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
        self.controls = SessionControls(
            controls,
            stop=self.stop,
            info=self.info,
            note=self.note,
            mute=lambda mute: self.engine.mutes.append(mute),
            watch_two_in=self.budget.agreed,
        )
        self._watch_silence()

    def rules_changed(self) -> None:
        """Other rules are judged from here on (:func:`healthcheck.run.joining.change_rules`)."""
        self.board.plan()
        self._listeners_changed()
        self._watch_silence()

    def _watch_silence(self) -> None:
        needed = self.engine.needs_watchdog or any(info.source != "built in" for info in self.host.infos)
        live = isinstance(self.clock, LiveClock)  # else no thread exists
        if needed and live and self.controls is not None and self._watchdog is None:
            self._watchdog = Watchdog(
                self.clock,
                last_event=lambda: self.last_event_at,
                silence=self._silence,
                budget=lambda: self.engine.first_budget,
                stop=self.stop,
                finish=lambda: self.finish(Ending()),
                note=self.note,
            ).start()

    def agree_through(self, agreement: Agreement) -> None:
        """Let the ranks of this job decide together. Adapters call it once they know how."""
        if self.controls is not None:
            self.controls.agree_through(agreement, self.rules.causes)
            self.judge.exchange, self.judge.due_step = self._exchange, 0
            self.facts.meet(getattr(agreement, "talk", None))
            self.judge.exchange_every = getattr(agreement, "sync_every", 1)

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
        """False if nobody wants anything: then adapters attach nothing."""
        return bool(self.rules.causes) or any(self.dispatch.table.values()) or bool(self.board.by_kind)

    def _listeners_changed(self) -> None:
        heard = {kind for kind in EventKind if self.dispatch.table.get(kind)}
        self._heard = frozenset(heard | _NEEDED if self.watching else heard)
        self.board.heard_elsewhere(
            self._heard, frozenset(heard | (_NEEDED - _ROWS_END)) if self.watching else self._heard
        )

    def emit(self, event: Event) -> None:
        """Take one event: probes, listeners, and at judging points the rules.

        Never raises because of us; a plugin's error is kept and said once.
        """
        if self._ended or os.getpid() != self.pid:  # a forked child shares our hooks, and is not this run
            return
        began, untimed = perf_counter_ns(), self.facts.untimed
        kind = event.kind
        if event.step > self.step:
            self.step = event.step
        if event.epoch is not None:
            self.epoch = event.epoch
        now = self.last_event_at = self.clock.monotonic()  # the only time that is read for an event
        active = self.active
        if kind in PAUSES:
            (active.pause if PAUSES[kind] else active.resume)(now)
        at = (now if active.paused_at is None else active.paused_at) - active.origin
        facts = self.facts
        facts.active_seconds, facts.own_seconds, facts.world_size = at, self.own_ns / 1e9, self.info.world_size
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
                if guard.broken:
                    self._conditions_broke()
            except BaseException as error:
                if self.dispatch.on_error == "raise" or guard.passes_on(error):
                    raise
                self.monitor_error(error)
        if device_ends is not None:
            device_ends()
        spent = 0 if untimed or facts.untimed else perf_counter_ns() - began
        self.event_cost[kind] = self.event_cost.get(kind, 0) + spent
        self.own_ns += spent
        if kind is EventKind.STEP_END and self.own_ns >= self.budget.binds_at and not self.budget.asked:
            self.budget.step_over(event.step, self.own_ns, at)

    def row_sent(self, row: StepRow) -> None:
        """What is still on a device of a row travels with the samples of its step."""
        self._mailbox.hold(row.step, row.late)
        self.holds = True

    def judge_now(self) -> None:
        """Nobody looks at the next steps: judge what can be judged without a wait."""
        if self._mailbox.receive(self.board.rows) is None:
            self._guard(lambda: self.judge.flush(self.step, self.active()))

    def step_noted(self, step: int) -> None:
        """A step is over that was noted in rows, and of whose end no event was built."""
        if self._ended or os.getpid() != self.pid:
            return
        at = self.board.noted_until
        if step >= self.judge.due_step or at >= self.judge.due_time:
            try:
                self.judge.block_over(step, at)
                if guard.broken:
                    self._conditions_broke()
            except BaseException as error:
                if self.dispatch.on_error == "raise" or guard.passes_on(error):
                    raise
                self.monitor_error(error)
        if self.holds:  # what has not gone with a post
            self.holds = self._mailbox.send()

    def monitor_error(self, error: BaseException, method: str = "") -> None:
        """A fault of ours: keep it with ``method``, step and epoch, say it once, let training go on."""
        self.errors.ours(error, method, self.step, self.epoch)

    def state_dict(self) -> dict[str, Any]:
        """All that must survive a resume, as plain JSON values: detectors and probes. What waits is judged before."""
        self.judge.flush(self.step, self.active())
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

    def _handle(self, found: Evaluation, event: Event | None) -> None:
        """Rules have found something: reports hear of it, actions run, reports hear what came of them."""
        dispatch = self.dispatch
        for transition in found.transitions:
            dispatch.call("transition", self.step, self, transition)
            self.tell("transition", transition)
        for alert in (*found.alerts, *found.amended):
            complete(alert, self.history, self.accepted, self.info.target)
        for alert in found.alerts:
            alert.detected_step = max(self.step, alert.fired_step)
            if self._stopped_at is not None and found.step > self._stopped_at:
                alert.facts.setdefault("after_stop", self._stopped_at)
            if not alert.repeat:
                self.alerts.append(alert)
            self.tell("alert", alert)
        for alert in found.amended:
            if not any(known is alert for known in self.alerts):  # its episode began before a resume
                self.alerts.append(alert)
            self.tell("amended", alert)
        if self.controls is not None:
            self.actor.run(found.plan, self.controls, self.step, event)
            if self._stopped_at is None and self.stop.request is not None and self.stop.request.rule:
                self._stopped_at = found.step
        for alert in (*found.alerts, *found.amended):
            self.tell("acted", alert)
        for alert in found.alerts:
            dispatch.call("alert", self.step, self, alert)
        for alert in found.amended:
            dispatch.call("alert_amended", self.step, self, alert)
        if self.controls is not None:
            self.controls.recovered(found.recovered)
        for alert in found.cleared:
            self.tell("cleared", alert)

    def _exchange(self, step: int) -> None:
        if self.controls is not None:
            self.controls.exchange(step, self.alerts)
            self.judge.exchange_every = getattr(self.controls.agreement, "sync_every", 1)

    def _silence(self, seconds: float) -> None:
        """From the watchdog's thread: nothing has happened for so long."""
        if not self._ended:
            self.facts.silent(self.step, seconds)
            self.judge.silence(seconds, self.active())

    def _clean_up(self) -> str | None:
        """What the ``cleanup`` action does, without a rule: after an error that looks like memory."""
        return None if self.controls is None else self.actor.emergency("cleanup", self.controls, self.step)

    def _conditions_broke(self) -> None:
        """Conditions of plugins raised: their rules judge nothing more, and are not called ok."""
        for found in guard.take_broken():
            self._not_judged[found.rule] = found.reason()
            self.dispatch.failed(found.owner, f"condition of {found.rule}", self.step, found.error, quarantine=False)

    def _guard(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except StopTraining:
            pass  # the run is over already
        except BaseException as error:
            if guard.passes_on(error):
                raise
            self.monitor_error(error)

    # -- the end --------------------------------------------------------------------------

    def finish(self, ending: Ending) -> dict[str, Any]:
        """End the run: last judgement, verdicts, report. Idempotent; returns ``report.json``."""
        if self.report is not None or os.getpid() != self.pid:
            return self.report or {}
        if ending.exception is not None:
            self._guard(lambda: self.emit(Event(EventKind.EXCEPTION, self.step, exception=ending.exception)))
        self._guard(lambda: self.emit(Event(EventKind.TRAIN_END, self.step, loads=self.facts.loads)))
        self._ended = True
        if self._watchdog is not None:
            self._watchdog.stop()
        agreement = self.controls.agreement if self.controls is not None else None
        unheard = "" if self.info.speaks else "ranks do not talk to each other here"
        if agreement is not None:
            self._elsewhere = agreement.close(*ends_here(self._judged_run(), ending))
            unheard = agreement.unheard
        if said := self.budget.sentence(self.step, self.active()):
            self.note(said)
        self.board.close(self._guard)
        self.report = live_report(
            self._judged_run(),
            self._verdicts(),
            ending,
            capabilities=self._capabilities(),
            accepted_unused=sorted({entry.rule for entry in self.accepted.unused(self.info.target)}),
            unheard=unheard,
            overhead=self.budget.facts(self.own_ns, self.event_cost, self.clock.monotonic() - self.active.started),
        )
        ask = functools.partial(self.dispatch.add_findings, self, self.step)
        facts = (self.report, self.history, self.active(), self.controls)
        self._guard(lambda: self._performance.add(*facts, ask))
        self.dispatch.add_sections(self, self.report, self.step)
        self.report["plugin_errors"] = self._plugin_errors()
        self.tell("finish", self.report)
        return self.report

    def exit_code(self) -> int:
        """What ``healthcheck run`` would exit with, as things stand."""
        if self.report is not None:
            return int(self.report["exit_code"])
        return live_end(self._judged_run(), Ending(), self._verdicts()).code

    def _capabilities(self) -> Capabilities | None:
        return None if self.controls is None else self.controls.capabilities

    def _verdicts(self) -> list[Verdict]:
        return verdicts(self.engine, reasons_of(self, self._capabilities()), self._not_judged, steps=self.step)

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
            plugin_errors=self._plugin_errors(),
            internal_errors=self.internal_errors,
            elsewhere=self._elsewhere,
            places=self.facts.places.known(),
        )

    def _plugin_errors(self) -> list[dict[str, Any]]:
        return self.errors.plugin_entries(self.dispatch.errors, self.host.failures)
