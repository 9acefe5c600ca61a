"""A recorded run through the engine, with what our own record knows beside its samples; many of them on several processes."""

from __future__ import annotations

import copy
import json
import math
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.alerts import OBSERVE_MODE, ActionOutcome, Alert, Missing, Outcome, Verdict
from healthcheck.core.errors import HealthCheckError
from healthcheck.core.samples import Sample
from healthcheck.engine.columns import History, Moment, complete, step_by_step
from healthcheck.engine.engine import Engine
from healthcheck.engine.episodes import Evaluation
from healthcheck.engine.lookups import RuleDemand
from healthcheck.engine.summary import verdicts
from healthcheck.extend import guard
from healthcheck.extend.guard import describe, passes_on, place_of
from healthcheck.readers.record import incomplete
from healthcheck.readers.series import RecordedRun
from healthcheck.rulelang.accepted import Accepted, find_accepted, load_accepted
from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.rule import Cause, RuleSet
from healthcheck.run.actor import StopRequest
from healthcheck.run.ending import VERDICTS_OF_THE_SCRIPT, End, JudgedRun, judged_end, run_report
from healthcheck.run.unjudged import always_applies, applies_without

if TYPE_CHECKING:
    from healthcheck.extend.registry import Registry


from collections import deque
from collections.abc import Iterable
from math import isfinite
from statistics import median


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a recorded run beside its samples."""

    start_step: int | None = None
    """The step after which the run began; None: one logging interval before the first row."""
    known: Collection[str] = ()
    """Metrics that the record would hold if they had existed."""
    resumed_from: int | None = None
    notes: tuple[str, ...] = ()
    ended: tuple[str, str] | None = None
    """Verdict and words of a run whose script did not come to a good end: that is so whatever its rules say."""
    missing: Mapping[str, Missing] = field(default_factory=dict)
    """Why causes were not judged while the run was live, by their ids."""
    target: str = ""
    """What was run."""
    accepted: Accepted = field(default_factory=Accepted)
    """Alerts of earlier runs that are known and do not count; they name what was run."""


def record_facts(run: RecordedRun, registry: Registry) -> Facts:
    """Of a foreign file nothing is known; of our own record, what its folder says."""
    if run.reader.name != "record":
        return Facts(accepted=_accepted())
    folder = run.path if run.path.is_dir() else run.path.parent
    run_facts = _json_file(folder / "run.json")
    resumed = run_facts.get("resumed_from")
    start = resumed if isinstance(resumed, int) else 0
    known = _collected(folder / "rules.yaml", registry)
    report = _json_file(folder / "report.json")
    ended = (
        (str(report["verdict"]), str(report.get("exit_words", "")))
        if report.get("verdict") in VERDICTS_OF_THE_SCRIPT
        else None
    )
    notes = []
    if start:
        notes.append(
            f"this attempt was resumed after step {start:,}: what its rules had seen before is not in this record"
        )
    return Facts(
        start,
        known,
        start or None,
        tuple(notes),
        ended,
        dict(_live_reasons(report.get("rules"))),
        str(run_facts.get("target", "")),
        _accepted(),
    )


def _accepted() -> Accepted:
    """As a live run in this folder finds them."""
    known = find_accepted(Path.cwd())
    return load_accepted(known) if known is not None else Accepted()


def _live_reasons(rules: Any, rule: str = "") -> Iterator[tuple[str, Missing]]:
    """Why causes were not judged, by their ids, as a report has it."""
    for name, entry in rules.items() if isinstance(rules, dict) else ():
        if not isinstance(entry, dict):
            continue
        if entry.get("causes"):
            yield from _live_reasons(entry["causes"], f"{name}.")
        elif entry.get("verdict") in (Outcome.NOT_JUDGED.value, Outcome.DOES_NOT_APPLY.value):
            applies, steps = entry["verdict"] == Outcome.NOT_JUDGED.value, entry.get("needs_steps")
            reason, remedy = str(entry.get("reason", "")), str(entry.get("remedy", ""))
            yield rule + name, Missing(reason, remedy, applies, steps if isinstance(steps, int) else 0)


def _json_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _collected(rules_file: Path, registry: Registry) -> frozenset[str]:
    """Metrics that the live run was asked to collect: what its own rules wanted."""
    if not rules_file.is_file():
        return frozenset()
    try:
        rules = load_rules([str(rules_file)], registry=registry)
    except (HealthCheckError, OSError):  # a plugin of that run is not here: then less is known
        return frozenset()
    return frozenset(RuleDemand.of(rules.causes, rules.derived).every)


# --------------------------------------------------------------------------------------------------
# Many recorded runs, in this process or in several.


Judge = Callable[[str], Any]
"""Judges one path; its result can be pickled."""

_judge: Judge | None = None


def judge_all(paths: Sequence[str], prepare: Callable[[], Judge], *, jobs: int = 1) -> Iterator[Any]:
    """Yield one result per path, in the order given.

    :param prepare: makes the judge (plugins loaded, rules compiled); called once in each process,
        so that it must be picklable itself where ``jobs`` is above 1.
    """
    if jobs <= 1 or len(paths) < 2:
        judge = prepare()
        for path in paths:
            yield judge(path)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # spawn: a forked child of a program with threads (a progress bar) may hang
    with ProcessPoolExecutor(
        min(jobs, len(paths)), mp_context=get_context("spawn"), initializer=_start, initargs=(prepare,)
    ) as pool:
        yield from pool.map(_run, paths, chunksize=max(1, min(16, len(paths) // (4 * jobs))))


def _start(prepare: Callable[[], Judge]) -> None:
    global _judge
    _judge = prepare()


def _run(path: str) -> Any:
    assert _judge is not None
    return _judge(path)


# --------------------------------------------------------------------------------------------------
# A recorded run through the real engine: ``RecordedRun`` in, the report of a live run out.
#
# There is no second engine and no second report here. What differs from a live run: nothing is
# executed (actions are held), and the clock is the record's.


Batch = tuple[int, float, Sequence[Sample]]

LOOKS_PER_GAP = 1000
"""``stale`` rules are judged once a second of a gap in the record, and at most this often."""
BLOCK = 512
"""Evaluations that are judged at a time."""
_LOOK_CLOSELY = 1000
_LOOK_EVERY = 61


class RuleCopies:
    """Fresh copies of one compiled rule set: derived metrics keep their windows in it."""

    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules
        self._start = [copy.deepcopy(derived.state()) for derived in rules.derived]

    def fresh(self) -> RuleSet:
        """The rule set, its derived metrics empty again. Only the last one given out may be in use."""
        for derived, state in zip(self.rules.derived, self._start, strict=True):
            derived.restore(copy.deepcopy(state))
        return self.rules


@dataclass(slots=True)
class Seen:
    """What one reading of a record saw."""

    batches: int = 0
    first_step: int = 0
    last_step: int = 0
    seconds: float = 0.0
    metrics: dict[str, None] = field(default_factory=dict)
    """Names of the metrics, in the order in which they came."""
    runs: int = 1
    """Runs that the record holds one after the other, each judged by itself."""
    problem: str = ""
    """Why reading ended early; empty if it did not."""


class Play:
    """One rule set judging one record; parameters as in :func:`play`."""

    def __init__(self, rules: RuleSet, facts: Facts, *, start_step: int = 0) -> None:
        known = facts.known
        self.rules = rules
        self.facts = facts
        # What only a log can bring (`external:`) and this one does not have, the run did not have either.
        self.engine = Engine(rules, start_step=start_step, recorded=True, known={*known, *rules.external})
        self.alerts: list[Alert] = []
        self.stop: StopRequest | None = None
        self.internal_errors: list[dict[str, Any]] = []
        self.plugin_errors: list[dict[str, Any]] = []
        self.broken: dict[str, str] = {}
        """Rule -> why it judges nothing more."""
        self.history = History()
        """Of the metrics that a rule may find not finite: what they were before."""
        self.breakable = frozenset(c.selector.metric for c in rules.causes if c.condition.judges_nonfinite)
        self._observing = rules.settings.get("mode") == "observe"
        self._derived = copy.deepcopy([derived.state() for derived in rules.derived])

    def begin_again(self, step: int, start_step: int) -> None:
        """Another run begins in the record: nothing that the one before has shown holds for it."""
        for derived, state in zip(self.rules.derived, self._derived, strict=True):
            derived.restore(copy.deepcopy(state))
        self.history = History()
        self.engine.begin_again(step, start_step)

    def note(self, result: Evaluation) -> None:
        """Keep the alerts of one evaluation, and say of each action that nothing was done."""
        for alert in (*result.alerts, *result.amended):
            complete(alert, self.history, self.facts.accepted, self.facts.target)
        self.alerts += [alert for alert in result.alerts if not alert.repeat]
        for planned in result.plan:
            why = planned.held or (OBSERVE_MODE if self._observing or planned.cause.mode == "observe" else "")
            why = why or str(planned.alert.facts.get("capped", ""))
            name, step = planned.spec.name, planned.alert.detected_step
            planned.alert.actions.append(ActionOutcome(name, False, why or "replay", step, held=True))
            if name == "stop" and not why:
                self._stop(planned.cause, step)

    def _stop(self, cause: Cause, step: int) -> None:
        if self.stop is None:
            self.stop = StopRequest(cause.rule, step, "replay", also=[], cause=cause.name)
        elif cause.rule != self.stop.rule and self.stop.also is not None and cause.rule not in self.stop.also:
            self.stop.also.append(cause.rule)

    def failed(self, error: BaseException) -> None:
        """Our own fault: keep it once, go on. Raises it again if it passes on."""
        if passes_on(error):
            raise error
        text = describe(error)
        if all(known["error"] != text for known in self.internal_errors):
            trace = "".join(traceback.format_exception(error))
            self.internal_errors.append({"error": text, "step": self.engine.step, "traceback": trace})

    def conditions_broke(self) -> None:
        """Conditions of plugins raised: their rules judge nothing more, and are not called ok."""
        for found in guard.take_broken():
            self.broken[found.rule] = found.reason()
            error = {"hook": f"condition of {found.rule}", "step": self.engine.step, "error": describe(found.error)}
            self.plugin_errors.append({"plugin": found.owner, **error, "place": place_of(found.error), "count": 1})

    def reason_without_data(self, rule: Cause, seen: Seen, registry: Registry) -> Missing:
        """``the record has no grad_norm``; whether it applies goes by what the record does have."""
        wanted = [rule.selector.metric]
        for derived in self.rules.derived:
            if derived.name == wanted[0]:
                missing = [name for name in derived.inputs if name.partition("[")[0] not in seen.metrics]
                if not missing:
                    return Missing("undefined for all samples", applies=always_applies(rule))
                wanted = missing
        near = [name for name in seen.metrics if name.startswith(f"{rule.selector.metric}[")]
        other = f" (it has {', '.join(near[:3])})" if near else ""
        text = str(rule.selector) if wanted == [rule.selector.metric] else ", ".join(wanted)
        return Missing(
            f"the record has no {text}{other}", applies=applies_without(rule, wanted, seen.metrics, registry)
        )

    def judged(self, seen: Seen, registry: Registry, *, target: str) -> tuple[JudgedRun, list[Verdict]]:
        facts = self.facts

        def why(rule: Cause) -> Missing:
            return facts.missing.get(rule.id) or self.reason_without_data(rule, seen, registry)

        run = JudgedRun(
            engine=self.engine,
            rules=self.rules,
            alerts=self.alerts,
            target=target,
            steps=seen.last_step,
            seconds=round(seen.seconds, 3),
            resumed_from=facts.resumed_from,
            stop=self.stop,
            stop_held=True,
            plugin_errors=self.plugin_errors,
            internal_errors=self.internal_errors,
        )
        return run, verdicts(self.engine, why, self.broken, steps=seen.last_step)


def play(
    run: RecordedRun,
    rulesets: Sequence[RuleSet],
    *,
    facts: Facts = Facts(),
    follow: Callable[[Sequence[Play]], Callable[[], None] | None] | None = None,
) -> tuple[list[Play], Seen]:
    """Judge a record by several rule sets in one reading.

    :param facts: what is known of the run beside its samples (:func:`record_facts`).
    :param follow: given the plays, makes what is called after each evaluation (see ``sweep``).

    Never raises because of the file: ``Seen.problem`` says why reading ended early.
    """
    seen = Seen()
    batches = _readable(run, seen)
    if run.reader.name == "record":
        batches = _as_judged(batches)
    head = list(islice(batches, 2))
    start_step = facts.start_step if facts.start_step is not None else _play_start(head)
    plays = [Play(rules, facts, start_step=start_step) for rules in rulesets]
    if head:
        seen.first_step = head[0][0]
        look = follow(plays) if follow is not None else None
        _feed(chain(head, batches), run, plays, seen, look, before_first=seen.first_step - start_step)
    return plays, seen


def _feed(
    batches: Iterator[Batch],
    run: RecordedRun,
    plays: Sequence[Play],
    seen: Seen,
    look: Callable[[], None] | None,
    *,
    before_first: int,
) -> None:
    """The loop over the whole record.

    :param before_first: how many steps a run of it has made before its first row.
    """
    beginnings = Beginnings()
    foreign = run.reader.name != "record"
    ticking = any(p.engine.needs_watchdog for p in plays)
    resumes = run.resumes
    resumed = count = 0
    last = most = seen.first_step
    before = ticked = now = 0.0
    block: list[Moment] = []
    length = BLOCK if look is None else 1
    for step, now, samples in batches:
        count += 1
        if step < last and resumed < len(resumes):
            resumed = len(resumes)
            _judge_block(plays, block, look)
            another = foreign and resumes[-1].from_start and beginnings.another(samples)
            seen.runs += another
            for p in plays:
                if another:
                    p.begin_again(step, max(0, step - before_first))
                else:
                    p.engine.rewind(step)
        if foreign:
            beginnings.saw(samples)
        if count <= _LOOK_CLOSELY or count % _LOOK_EVERY == 0:
            for sample in samples:
                seen.metrics[sample.metric] = None
        for p in plays:
            if p.breakable:
                p.history.remember(sample for sample in samples if sample.metric in p.breakable)
        if ticking and now - ticked >= 1.0:
            block += _looks(last, before, now)
            ticked = now
        block.append(Moment(step, samples, now))
        if len(block) >= length:
            _judge_block(plays, block, look)
        last, before = step, now
        if step > most:
            most = step
    _judge_block(plays, block, look)
    seen.batches, seen.last_step, seen.seconds = count, most, now


def _judge_block(plays: Sequence[Play], block: list[Moment], look: Callable[[], None] | None) -> None:
    """Judge what has been read, and empty the block."""
    if not block:
        return
    for p in plays:
        for result in p.engine.judge(block):
            p.note(result)
        for error in p.engine.failures:
            p.failed(error)
        p.engine.failures.clear()
        if guard.broken:
            p.conditions_broke()
    block.clear()
    if look is not None:
        look()


def _looks(step: int, start: float, end: float) -> list[Moment]:
    """Between two rows nothing came: ``stale`` rules are judged as the watchdog of a live run would, once a second."""
    looks = min(LOOKS_PER_GAP, max(1, math.ceil(end - start)))
    gaps = [(end - start) * look / looks for look in range(1, looks + 1)]
    return [Moment(step, (), start + silent, silent) for silent in gaps]


def _readable(run: RecordedRun, seen: Seen) -> Iterator[Batch]:
    """The batches as far as the file can be read."""
    try:
        yield from run.batches()
    except HealthCheckError as error:
        seen.problem = str(error)
    except BaseException as error:  # a damaged file, or a fault of a plugin's reader
        if passes_on(error):
            raise
        seen.problem = f"reading ended here: {describe(error)}"


def _as_judged(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Evaluations of our own record, cut up as the live run cut them."""
    for at, now, samples in batches:
        for part in step_by_step(samples):
            yield at, now, part


def _play_start(head: Sequence[Batch]) -> int:
    """Rows at 500, 1,000, ... begin at 0; rows at 18,001, 18,002, ... at 18,000."""
    if not head:
        return 0
    first = head[0][0]
    gap = head[1][0] - first if len(head) > 1 else first
    return max(0, first - max(1, gap))


def replay_report(play: Play, run: RecordedRun, seen: Seen, registry: Registry, *, path: str) -> dict[str, Any]:
    """The report contract for one record, with ``path`` and what was read.

    The exit code is that of what was judged; how the script itself ended stays the verdict.
    """
    judged, found = play.judged(seen, registry, target=path)
    lost = incomplete(run.notes)
    if lost:
        _cannot_tell(found, lost)
    end = judged_end(judged, found)
    if lost and end.verdict == "not judged":
        end = End(end.code, end.verdict, f"cannot tell: {lost}")
    if play.facts.ended is not None and not judged.internal_errors:
        end = End(end.code, *play.facts.ended)
    report = run_report(judged, found, end)
    report["path"] = path
    report["trainer"] = "replay"
    record: dict[str, Any] = {
        "format": run.reader.name,
        "rows": seen.batches,
        "first_step": seen.first_step,
        "last_step": seen.last_step,
        "metrics": list(seen.metrics),
        "resumes": [{"before": r.before, "step": r.step} for r in run.resumes],
        "notes": list(dict.fromkeys(run.notes)),
        "runs": seen.runs,
    }
    if seen.problem:
        record["problem"] = seen.problem
    report["record"] = record
    return report


def _cannot_tell(found: Sequence[Verdict], lost: str) -> None:
    """What did not fire on a part of the samples may have fired on all of them."""
    for verdict in found:
        for one in (verdict, *verdict.causes):
            if one.outcome in (Outcome.OK, Outcome.PARTLY_JUDGED):
                one.outcome, one.reason = Outcome.NOT_JUDGED, f"cannot tell: {lost}"


def only_rules(rules: RuleSet, keep: Collection[str]) -> RuleSet:
    """The same rule set with these rules or causes, and those that own non-finite samples for them."""
    kept = {cause.id for cause in rules.causes if cause.id in keep or cause.rule in keep}
    metrics = {cause.selector.metric for cause in rules.causes if cause.id in kept}
    return rules.keeping(
        lambda cause: cause.id in kept or (cause.condition.judges_nonfinite and cause.selector.metric in metrics)
    )


# --------------------------------------------------------------------------------------------------
# Whether a record that begins again at its first step holds another run from there: folds, seeds, sweeps in one file.
#
# A run that goes on after a crash, or whose log counts steps of each epoch, goes on with the loss that it had. Another one
# begins with a loss like that with which the first began, or a worse one. Records of rewards alone count episodes and steps of
# the environment, which no epoch sets back.


KEPT = 64
"""Batches of samples at the beginning and before the newest one in which losses are looked for."""
LOSSES = ("loss", "eval.loss")
FEW = 3
"""Values of a loss that say where it began, and where it stood."""


class Beginnings:
    """Remembers how the run at hand began and where it stands."""

    def __init__(self) -> None:
        self._first: list[Sequence[Sample]] = []
        self._last: deque[Sequence[Sample]] = deque(maxlen=KEPT)

    def saw(self, samples: Sequence[Sample]) -> None:
        """Note the next batch of the run."""
        if len(self._first) < KEPT:
            self._first.append(samples)
        self._last.append(samples)

    def another(self, samples: Sequence[Sample]) -> bool:
        """Whether these samples, at the first step again, are another run's; then nothing of the one before is kept."""
        found = self._is_another(samples)
        if found:
            self._first, self._last = [], deque(maxlen=KEPT)
        return found

    def _is_another(self, samples: Sequence[Sample]) -> bool:
        for metric in LOSSES:
            first, last = _values(self._first, metric), _values(reversed(self._last), metric)
            now = _values([samples], metric)
            if first and last and now:
                return _begins_again(now[0], first, last)
        return any(sample.metric == "reward" for batch in self._last for sample in batch)


def _begins_again(now: float, first: Sequence[float], last: Sequence[float]) -> bool:
    """Outside of where it stood last, and nearer to where it began (or worse than both)."""
    finite = [value for value in last if isfinite(value)]
    if not finite or not isfinite(now):
        return isfinite(now)  # a loss that was NaN does not mend itself
    low, high, began = min(finite), max(finite), median(first)
    spread = high - low
    if now > high + spread:
        return now > 0.5 * (began + median(finite))
    return now < low - spread and abs(now - began) < abs(now - median(finite))


def _values(batches: Iterable[Sequence[Sample]], metric: str) -> list[float]:
    """The values of a plain metric in the first few batches that have it."""
    found: list[float] = []
    for samples in batches:
        found += [sample.value for sample in samples if sample.metric == metric and not sample.labels]
        if len(found) >= FEW:
            break
    return found[:FEW]
