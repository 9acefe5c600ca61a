"""Plays a rule test, step by step, through the real engine, with a clock that moves only as the test says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from healthcheck.core.alerts import OBSERVE_MODE, Alert
from healthcheck.core.clock import VirtualClock
from healthcheck.core.samples import Labels, Sample, series_name
from healthcheck.engine import columns
from healthcheck.engine.engine import Engine, Evaluation
from healthcheck.readers.record import RecordReader
from healthcheck.record.lines import parse_series
from healthcheck.rulelang.rule import RuleSet
from healthcheck.ruletests.loading import RuleTest, Source
from healthcheck.ruletests.notation import expand

EVAL_PREFIXES = ("eval.", "val.", "test.")
"""Series that belong to phase ``eval``, as in ``healthcheck.log``."""


@dataclass(slots=True)
class Moment:
    """One step of a played run."""

    step: int
    pause: float
    """Seconds between the moment before and this one."""
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """By rank; ranks without a sample are absent."""


class RecordError(ValueError):
    """A recorded series cannot be used; ``source`` says which."""

    def __init__(self, source: Source, message: str) -> None:
        super().__init__(message)
        self.source = source


def series_of(name: str) -> tuple[str, Labels]:
    """``lr[group=1]`` as metric and labels, in the order that the engine expects."""
    metric, labels = parse_series(name)
    return metric, tuple(sorted(labels))


def timeline(test: RuleTest) -> Iterator[Moment]:
    """All moments of a test in order; the last one may be a gap without samples (its step repeats).

    Raises ``RecordError`` when a record lacks a series.
    """
    steps: dict[int, dict[int, list[Sample]]] = {}
    gaps: dict[int, float] = {}
    """Step before which time passes -> seconds. The same gap in several series is one gap."""
    times: dict[int, float] = {}
    length = 0
    for rank, sources in test.ranks.items():
        for source in sources:
            if source.record is not None:
                length = max(length, _recorded(rank, source, steps, times))
            else:
                length = max(length, _written(test, rank, source, steps, gaps))
    order = sorted({*steps, *range(1, length + 1)} if not times else steps)
    yield from _paced(test, order, steps, gaps, times)


def _paced(
    test: RuleTest,
    order: list[int],
    steps: dict[int, dict[int, list[Sample]]],
    gaps: dict[int, float],
    times: dict[int, float],
) -> Iterator[Moment]:
    before_step = order[0] - 1 if order else 0
    before_time: float | None = None
    for step in order:
        pause = (step - before_step) * test.step_time
        if step in times:
            if before_time is not None:
                pause = max(0.0, times[step] - before_time)
            before_time = times[step]
        pause += sum(seconds for at, seconds in gaps.items() if before_step < at <= step)
        samples = steps.get(step, {})
        for listed in samples.values():
            listed.sort(key=lambda sample: sample.phase != "train")  # an evaluation follows its step
        yield Moment(step, pause, samples)
        before_step = step
    trailing = sum(seconds for at, seconds in gaps.items() if at > before_step)
    if trailing:
        yield Moment(before_step, trailing)


def _written(
    test: RuleTest, rank: int, source: Source, steps: dict[int, dict[int, list[Sample]]], gaps: dict[int, float]
) -> int:
    metric, labels = series_of(source.series)
    phase = "eval" if metric.startswith(EVAL_PREFIXES) else "train"
    seed = f"{test.name}/{source.series}" if rank == 0 else f"{test.name}/{source.series}/{rank}"
    made = expand(list(source.pieces), seed)
    for index, value in enumerate(made.values):
        if value is not None:
            samples = steps.setdefault(index + 1, {}).setdefault(rank, [])
            samples.append(Sample(metric, index + 1, value, labels, phase))
    for index, seconds in made.gaps.items():
        gaps[index + 1] = max(gaps.get(index + 1, 0.0), seconds)
    return len(made.values)


def _recorded(rank: int, source: Source, steps: dict[int, dict[int, list[Sample]]], times: dict[int, float]) -> int:
    assert source.record is not None
    reader = RecordReader()
    head = b""
    if source.record.is_file():
        with source.record.open("rb") as stream:
            head = stream.read(65536)
    if not reader.recognises(source.record, head):
        raise RecordError(source, f"{source.record.name} is not a run record (a run folder, or its samples.jsonl)")
    names: set[str] = set()
    found = 0
    for at, time, batch in reader.batches(source.record, []):
        for sample in batch:
            name = series_name(sample.metric, sample.labels)
            names.add(name)
            if source.metric and name != source.metric:
                continue
            metric, labels = series_of(source.series) if source.series else (sample.metric, sample.labels)
            made = Sample(metric, sample.step, sample.value, labels, sample.phase)
            steps.setdefault(sample.step, {}).setdefault(rank, []).append(made)
            found += 1
        times[at] = max(times.get(at, 0.0), time)
    if not found:
        what = f"no series {source.metric}" if source.metric else "no samples"
        close = ", ".join(sorted(names)[:8])
        raise RecordError(source, f"{source.record.name} holds {what}" + (f"; it has {close}" if close else ""))
    return max(steps)


# --------------------------------------------------------------------------- playing


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
    batches: dict[int, list[columns.Moment]] = field(default_factory=dict)
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
            self.played.batches[rank].append(columns.Moment(moment.step, samples, now))
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
                self.played.batches[rank].append(columns.Moment(step, (), now, silent))
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
        return OBSERVE_MODE if observing else ""

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
