"""One watched run: events in, alerts and a report out.

The session owns one plugin host, one engine and one adapter's controls. It knows no concrete
probe, action, trainer or report: :mod:`healthcheck.assembly` puts those in.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

from healthcheck.acting import Actor
from healthcheck.budget import OWN_TIME, OverheadBudget
from healthcheck.clock import ActiveTime, LiveClock, VirtualClock
from healthcheck.contained import ContainedErrors, NotingDispatch
from healthcheck.dispatch import Dispatch, from_signal_handler
from healthcheck.engine.demand import RuleDemand
from healthcheck.engine.engine import Engine
from healthcheck.errors import StopTraining, UsageError
from healthcheck.events import Event, EventKind
from healthcheck.judging import JUDGED_AT, Judge
from healthcheck.latch import LatchingControls, StopRequest
from healthcheck.outcome import Ending, build_report, why_no_data
from healthcheck.plugins import PluginHost, implementations_of
from healthcheck.probing import History, ProbeBoard
from healthcheck.protocols import Agreement, Controls, Mailbox, Report
from healthcheck.rulelang.accepted import Accepted
from healthcheck.rulelang.known import rule_hint
from healthcheck.rulelang.rule import Mute, RuleSet
from healthcheck.runinfo import RunInfo
from healthcheck.samples import NO_LABELS, Sample
from healthcheck.verdicts import Alert
from healthcheck.watchdog import Watchdog

_PAUSES = {EventKind.EVAL_START: True, EventKind.EVAL_END: False, EventKind.TEST_START: True, EventKind.TEST_END: False}


class Session:
    """One watched run. Trainer adapters emit events into it; users read it.

    Made by ``healthcheck.watch``, an adapter or ``healthcheck run``; not meant to be built by
    hand, except through :mod:`healthcheck.testing`.
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
        self._no_numbers: set[str] = set()
        self.step = info.resumed_from or 0
        self.unit = "step"
        self.alerts: list[Alert] = []
        self.report: dict[str, Any] | None = None
        self.epoch: float | None = None
        """Epoch of the last event that had one."""
        self.event_cost: dict[EventKind, int] = {}
        self.user_state[OWN_TIME] = lambda: (sum(self.event_cost.values()) / 1e9, self.active())
        self.history = History()
        self.last_event: tuple[EventKind, float] = (EventKind.TRAIN_START, self.clock.monotonic())
        self.judged_at = 0.0
        """Seconds of active training at the last judgement: the engine's clock, for the record."""
        self.controls: LatchingControls | None = None
        self.mailbox = mailbox
        self.before_post: Callable[[Sequence[Sample]], None] | None = None
        """Sees the samples of an event before they leave for the host: an adapter's gate."""
        self.prompt = False
        """Whether the update at hand must wait for its values: set by an adapter that can hold it back."""
        self.reports: list[Report] = list(host.registry.reports.values())
        self._say = say or (lambda text: None)
        self.contained = ContainedErrors(self._say, self._clean_up)
        self.internal_errors = self.contained.internal
        self.dispatch: Dispatch = NotingDispatch(
            on_error=str(self.settings.get("on_plugin_error", "warn")),
            say=lambda known, error: self.contained.say_plugin(known),
            note=lambda owner, hook, error: self.contained.plugin(owner, hook, error, self.epoch),
        )
        for plugin in host.infos:
            self.dispatch.add_plugin(plugin.plugin, implementations_of(plugin.plugin), plugin.name)
        host.manager.hook.healthcheck_modify_rules(rules=rules.rules)
        watch_transitions = self.dispatch.wants("transition") or any(hasattr(r, "transition") for r in self.reports)
        self.engine = Engine(rules, rank=info.rank, start_step=self.step, watch_transitions=watch_transitions)
        self.demand = RuleDemand.of(rules.rules, rules.derived, extra_metrics)
        self.probing = ProbeBoard(host.registry.probes, self.demand, self.dispatch, self.active)
        self.budget = OverheadBudget(self, self.settings.get("overhead_budget"))
        self.judge = Judge(self)
        self._ended = False
        self._watchdog: Watchdog | None = None
        self.actor = Actor(
            host.registry.actions,
            observe=self.observing,
            world_size=info.world_size,
            run_dir=info.run_dir,
            history=self.history,
            say=self.note,
        )
        host.manager.hook.healthcheck_configure.call_historic(kwargs={"session": self})
        self.tell("start", self)

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
        self.probing.plan()
        return owner

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

    @property
    def stop_request(self) -> StopRequest | None:
        """The stop that a rule (or ``--max-steps``) asked for, or None."""
        return self.controls.stop if self.controls is not None else None

    def agree_through(self, agreement: Agreement) -> None:
        """Let the ranks of this job decide together. Adapters call it once they know how."""
        if self.controls is not None:
            self.controls.agreement = agreement
            self.controls.order = {r.id: (int(r.severity), i) for i, r in enumerate(self.rules.rules)}
            self.controls.unanimous = {r.id for r in self.rules.rules if r.ranks == "all"}

    def log(self, metrics: Mapping[str, Any], *, step: int | None = None, phase: str | None = None) -> None:
        """Feed metrics of your own. Device scalars are taken as they are, without a wait."""
        if self._ended or os.getpid() != self.pid:
            return
        at = self.active()
        step = step if step is not None else max(1, self.step)
        for name, value in metrics.items():
            if not hasattr(value, "__float__"):
                self._no_number(name, value)
                continue
            kind = phase or ("eval" if name.startswith(("eval.", "val.", "test.")) else "train")
            self.probing.pending.append(Sample(name, step, value, NO_LABELS, kind, at))

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
        self.probing.plan()

    def note(self, text: str) -> None:
        """One line for the person who watches the console."""
        self.tell("note", text)

    def state_dict(self) -> dict[str, Any]:
        """All that must survive a resume, as plain JSON values: detectors and probes."""
        return {"engine": self.engine.state_dict(), "probes": self.probing.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore before the first event; returns one sentence for every rule that starts fresh.

        Raises ``StateError`` for a state that this version cannot read.
        """
        fresh = self.engine.load_state_dict(saved["engine"], now=self.active())
        for sentence in self.probing.load_state_dict(saved.get("probes", {})):
            self.note(sentence)
        self.step = self.engine.step
        return fresh

    # -- what adapters call -----------------------------------------------------------

    def bind(self, controls: Controls) -> None:
        """Give the session its trainer's controls, before the first event.

        A framework found inside a watched script binds again: its controls take over, the latch stays.
        """
        if self.controls is not None:
            self.controls.take_over(controls)
            return
        self.controls = LatchingControls(controls, self.info)
        if self.engine.needs_watchdog and isinstance(self.clock, LiveClock):
            self._watchdog = Watchdog(self).start()

    def wants(self, kind: EventKind, step: int | None = None) -> bool:
        """Whether anybody listens; an adapter builds no event otherwise.

        ``step_end`` and ``before_update`` are wanted as soon as any rule or listener exists,
        because samples are judged there.

        :param step: the step of that event, where it is known: probes that look at every tenth step
            only are then not asked for the nine between.
        """
        if self._ended:
            return False
        if self.dispatch.table.get(kind) or ((kind in JUDGED_AT or kind in _PAUSES) and self.watching):
            return True
        return kind in self.probing.by_kind if step is None else self.probing.looks_at(kind, step)

    @property
    def watching(self) -> bool:
        """False if no rule, plugin or report wants anything: then adapters attach nothing."""
        return bool(self.rules.rules) or any(self.dispatch.table.values()) or bool(self.probing.by_kind)

    def emit(self, event: Event) -> None:
        """Take one event: probes, listeners, and at judging points the rules.

        Never raises because of us; a plugin's error is kept and said once.
        """
        if self._ended or os.getpid() != self.pid:
            return
        began = perf_counter_ns()
        kind = event.kind
        event.user_state = self.user_state
        if event.step > self.step:
            self.step = event.step
        if event.epoch is not None:
            self.epoch = event.epoch
        now = self.clock.monotonic()
        self.last_event = (kind, now)
        pause = _PAUSES.get(kind)
        if pause is not None:
            (self.active.pause if pause else self.active.resume)()
            now = self.clock.monotonic()
        probing = self.probing
        device_ends = probing.device_time.begin() if probing.measures_device else None
        at = self.active.at(now)
        probing.sample(event, at)
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
        self.event_cost[kind] = self.event_cost.get(kind, 0) + perf_counter_ns() - began
        if kind is EventKind.STEP_END:
            self.budget.step_ended()

    def finish(self, ending: Ending) -> dict[str, Any]:
        """End the run: last judgement, verdicts, report. Idempotent; returns ``report.json``."""
        if self.report is not None:
            return self.report
        if os.getpid() != self.pid:
            return {}
        if ending.exception is not None:
            self._guard(lambda: self.emit(Event(EventKind.EXCEPTION, self.step, exception=ending.exception)))
        self._guard(lambda: self.emit(Event(EventKind.TRAIN_END, self.step, user_state=self.user_state)))
        self._ended = True
        if self._watchdog is not None:
            self._watchdog.stop()
        if self.controls is not None and self.controls.agreement is not None:
            self.controls.agreement.close()
        self.probing.close(self._guard)
        self.report = build_report(self, ending)
        self.dispatch.call("report_section", self.step, self, self.report)
        self.tell("finish", self.report)
        return self.report

    # -- inside -----------------------------------------------------------------------

    def watchdog_tick(self, silent_seconds: float) -> None:
        """Judge ``stale`` rules from the watchdog thread; never blocks on a busy main thread."""
        if not self._ended:
            self.judge.tick(silent_seconds)

    def reason_without_data(self, rule: Any) -> str:
        """Why a rule's metric gave no sample."""
        return why_no_data(self, rule)

    def tell(self, method: str, *given: Any) -> None:
        """Tell every report; a report that fails is an error of that report, said once."""
        for report in self.reports:
            function = getattr(report, method, None)
            if function is None or self.dispatch.is_quarantined(report.name):
                continue
            try:
                function(*given)
            except (Exception, SystemExit) as error:
                self.dispatch.failed(report.name, method, self.step, error)

    def _guard(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except StopTraining:
            pass  # the run is over already
        except Exception as error:
            self.monitor_error(error)

    def monitor_error(self, error: BaseException, method: str = "") -> None:
        """A fault of ours: keep it with ``method``, step and epoch, say it once, let training go on."""
        self.contained.ours(error, method, self.step, self.epoch)

    def _clean_up(self) -> str | None:
        """What the ``cleanup`` action does, without a rule: after an error that looks like memory."""
        return None if self.controls is None else self.actor.emergency("cleanup", self.controls, self.step)
