"""Plays a rule test through the real engine, with a clock that moves only as the test says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from healthcheck.clock import VirtualClock
from healthcheck.engine.engine import Engine
from healthcheck.engine.evaluation import Evaluation
from healthcheck.engine.trace import Batch
from healthcheck.rulelang.rule import RuleSet
from healthcheck.ruletests.model import RuleTest
from healthcheck.ruletests.timeline import Moment, timeline
from healthcheck.verdicts import Alert

LOOKS_PER_GAP = 1000
"""The watchdog looks once a second of virtual time, and at most this often within one pause."""

RulesFor = Callable[[RuleTest], RuleSet]
"""Compiles the rules of a test. Called once per engine: derived metrics keep state in the rule set."""


@dataclass(slots=True)
class Episode:
    """One alert of the played run, with what was done about it."""

    alert: Alert
    clears: int | None = None
    actions: list[str] = field(default_factory=list)
    """Names of the actions that ran, each once, in the order of their first run."""
    held: dict[str, str] = field(default_factory=dict)
    """Actions that were held back -> why."""


@dataclass(slots=True)
class Played:
    """What a test run brought."""

    rules: RuleSet
    start_step: int = 0
    """The step before the first one."""
    episodes: list[Episode] = field(default_factory=list)
    batches: dict[int, list[Batch]] = field(default_factory=dict)
    """Rank -> all that its engine was given: the trace runs over it again."""
    engines: dict[int, Engine] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)
    """Rules that a resume could not restore."""
    last_step: int = 0
    stopped_at: int | None = None
    stopped_by: str = ""


class Player:
    """One test at play.

    :param stages: action name -> stage, since only actions of stage ``observe`` run for rules in
        observe mode.

    Raises ``RecordError`` for a record without the series.
    """

    def __init__(self, test: RuleTest, rules_for: RulesFor, stages: Mapping[str, str]) -> None:
        self.test = test
        self.rules_for = rules_for
        self.stages = stages
        self.clock = VirtualClock()
        self.last_sample = 0.0
        self.moments = list(timeline(test))
        first = rules_for(test)
        # A record may begin at step 101: a run that was resumed there, for warm-ups and `missing`.
        self.played = Played(first, start_step=self.moments[0].step - 1 if self.moments else 0)
        self.played.last_step = self.played.start_step
        self.open: dict[tuple[int, str], Episode] = {}
        for index, rank in enumerate(test.ranks):
            rules = first if index == 0 else rules_for(test)
            self.played.engines[rank] = Engine(rules, rank=rank, start_step=self.played.start_step)
            self.played.batches[rank] = []

    def play(self) -> Played:
        """Run to the end, or to a stop."""
        played = self.played
        for moment in self.moments:
            self._pass_time(moment.pause)
            if not self._stopped() and moment.step > played.last_step:
                self._step(moment)
                played.last_step = moment.step
                if moment.step in self.test.resume_at:
                    self._resume(moment.step)
            if self._stopped():
                break
        return played

    def _stopped(self) -> bool:
        return self.played.stopped_at is not None and not self.test.continue_after_stop

    def _step(self, moment: Moment) -> None:
        if moment.samples:
            self.last_sample = self.clock.monotonic()
        for rank, engine in self.played.engines.items():
            samples = moment.samples.get(rank, [])
            now = self.clock.monotonic()
            for sample in samples:
                sample.time = now
            self.played.batches[rank].append(Batch(moment.step, samples, now))
            self._note(rank, moment.step, engine.evaluate(moment.step, samples, now))

    def _pass_time(self, seconds: float) -> None:
        """Move the clock; where rules watch the clock, look as the live watchdog would."""
        watched = [rank for rank, engine in self.played.engines.items() if engine.needs_watchdog]
        looks = min(LOOKS_PER_GAP, max(1, math.ceil(seconds))) if watched else 1
        start = self.clock.monotonic()
        for look in range(1, looks + 1):
            self.clock.advance(start + seconds * look / looks - self.clock.monotonic())
            for rank in watched:
                now = self.clock.monotonic()
                silent = now - self.last_sample
                step = self.played.last_step
                self.played.batches[rank].append(Batch(step, (), now, silent))
                self._note(rank, step, self.played.engines[rank].tick(silent, now))
            if self._stopped():
                return

    def _note(self, rank: int, step: int, result: Evaluation) -> None:
        for alert in result.alerts:
            key = (rank, alert.rule)
            if not alert.repeat:
                self.open[key] = Episode(alert)
                self.played.episodes.append(self.open[key])
        for planned in result.plan:
            episode = self.open.get((rank, planned.rule.id))
            if episode is None:
                continue
            why = planned.held or self._observed(planned.rule.mode, planned.spec.name)
            if why:
                episode.held.setdefault(planned.spec.name, why)
                continue
            if planned.spec.name not in episode.actions:
                episode.actions.append(planned.spec.name)
            if planned.spec.name == "stop" and self.played.stopped_at is None:
                self.played.stopped_at, self.played.stopped_by = step, planned.rule.id
        engine = self.played.engines[rank]
        for key, episode in list(self.open.items()):
            # Asked of the engine's own set, not of the alert: after a resume the alert is not its object.
            if key[0] == rank and not engine.by_id[key[1]].firing:
                episode.clears = episode.alert.cleared_step or step
                del self.open[key]

    def _observed(self, mode: str, action: str) -> str:
        if self.stages.get(action) == "observe":
            return ""
        observing = mode == "observe" or self.played.rules.settings.get("mode") == "observe"
        return "observe mode" if observing else ""

    def _resume(self, step: int) -> None:
        """Save, go through JSON as a checkpoint does, and start again from nothing."""
        for rank, engine in list(self.played.engines.items()):
            saved = json.loads(json.dumps(engine.state_dict(), allow_nan=False))
            again = Engine(self.rules_for(self.test), rank=rank, start_step=step)
            self.played.fresh.extend(again.load_state_dict(saved, now=engine.now))
            self.played.engines[rank] = again


def play(test: RuleTest, rules_for: RulesFor, stages: Mapping[str, str]) -> Played:
    """Play one test; see :class:`Player`."""
    return Player(test, rules_for, stages).play()
