"""Rules over their causes: episodes, the alert of each, what holds it back, and which actions it runs.

The engine judges causes. What a reader meets is one alert per episode of a rule: from the first of its causes that fires
until all have recovered. The most certain cause speaks; what the others found stands beside it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from healthcheck.core.alerts import Alert, CauseChange, Finding, Kind, Severity, Transition
from healthcheck.core.samples import Labels
from healthcheck.engine.rulestate import WORST, CauseState, cap, message, mute, unsaid
from healthcheck.rulelang.rule import SUBJECTS, ActionSpec, Cause, Mute, Rule

TRAITS = OPTIMIZERS, RANKS, ADAPTERS, ROUTER = "run.optimizers", "run.ranks", "run.adapters", "run.router"
"""Samples that say what a run is like, for rules with ``applies_if``. The first two have a label ``count``."""


@dataclass(slots=True)
class PlannedAction:
    """One action for one alert, asked for by one cause. ``held`` says why it must not run, or is empty."""

    cause: Cause
    alert: Alert
    spec: ActionSpec
    held: str = ""
    episode: RuleState | None = None

    def not_done(self) -> None:
        """It was planned and could not be run: a later cause of the same episode that names it asks again."""
        if self.episode is not None:
            self.episode.forget_run(self.spec)


@dataclass(slots=True)
class Evaluation:
    """What one evaluation brought. Empty most of the time."""

    step: int = 0
    """The step of the evaluation."""
    alerts: list[Alert] = field(default_factory=list)
    """New episodes and repeats under ``cooldown``, in file order."""
    amended: list[Alert] = field(default_factory=list)
    """Alerts of open episodes in which another cause has fired now."""
    recovered: list[str] = field(default_factory=list)
    """Causes (``rule.cause``) that fire no longer."""
    cleared: list[Alert] = field(default_factory=list)
    """Alerts whose episodes are over: no cause of their rules fires any longer."""
    transitions: list[Transition] = field(default_factory=list)
    plan: list[PlannedAction] = field(default_factory=list)
    """Actions in the order in which they must run."""

    def __bool__(self) -> bool:
        return bool(self.alerts or self.amended or self.recovered or self.cleared or self.transitions)


NOTHING = Evaluation()


class RuleState:
    """The episodes of one rule.

    :param causes: the states of its causes, most certain first.
    """

    def __init__(self, rule: Rule, causes: Sequence[CauseState]) -> None:
        self.rule = rule
        self.causes = list(causes)
        self.start_fresh()

    def start_fresh(self) -> None:
        """Begin with nothing seen."""
        self.applies = self.rule.applies_if is None
        """Whether the rule is one for runs like this; once true, it stays so."""
        self._seen: dict[str, bool] = {}
        """Of what it needs to apply, what has been met."""
        self.withheld: list[tuple[CauseState, Finding]] = []
        """What its causes found while it did not apply."""
        self.open: Alert | None = None
        """The alert of the episode under way."""
        self.episodes: list[Alert] = []
        """Alerts of this run."""
        self.past_episodes = 0
        """Episodes of the run that was resumed."""
        self.action_runs = 0
        """How often it has run its actions, for ``after``."""
        self.last_action_step: int | None = None
        self._turn = 0
        """Counts the episodes and the repeats within them: in each an action runs once."""
        self._counted = 0
        """The last turn that was counted in ``action_runs``."""
        self._ran: dict[str, tuple[int, int]] = {}
        """Action -> the last turn in which its time came, and the step."""

    @property
    def firing(self) -> bool:
        """Whether some cause fires."""
        return any(cause.firing for cause in self.causes)

    # -- whether it applies ---------------------------------------------------------------

    def met(self, metric: str, labels: Labels) -> bool:
        """Note a series that has come; whether the rule applies now."""
        needs = self.rule.applies_if
        if needs is None:
            return False
        count = int(dict(labels).get("count", "0")) if metric in (OPTIMIZERS, RANKS) else 0
        if any(_is(wanted, metric, labels) for wanted in needs.metrics):
            self._seen["metrics"] = True
        if metric in (ADAPTERS, ROUTER):
            self._seen[metric] = True
        if metric == OPTIMIZERS and needs.optimizers and count >= needs.optimizers:
            self._seen[OPTIMIZERS] = True
        if metric == RANKS and needs.ranks and count >= needs.ranks:
            self._seen[RANKS] = True
        return self.has_all()

    def has_all(self) -> bool:
        """Whether all has been met that the rule needs to apply."""
        needs = self.rule.applies_if
        if needs is None:
            return True
        asked = {
            "metrics": bool(needs.metrics),
            OPTIMIZERS: bool(needs.optimizers),
            RANKS: bool(needs.ranks),
            ADAPTERS: needs.adapters,
            ROUTER: needs.router,
        }
        return all(self._seen.get(key, False) for key, wanted in asked.items() if wanted)

    def apply(self, step: int) -> None:
        """From this step on the rule applies: its warm-up counts from here, what was seen before is judged."""
        self.applies = True
        for state in self.causes:
            if state.cause.warmup.amount:
                state.warm_up_again(step)
        self.withheld = [(state, finding) for state, finding in self.withheld if not state.cause.warmup.amount]

    def withhold(self, found: Iterable[tuple[CauseState, Finding]]) -> None:
        """Keep what was found until the rule applies, if it ever does."""
        for state, finding in found:
            known = next((kept for other, kept in self.withheld if other is state), None)
            if known is None:
                self.withheld.append((state, finding))
            else:
                _join(known, finding)

    # -- episodes -----------------------------------------------------------------------

    def take(self, found: list[tuple[CauseState, Finding]], number: int, now: float, rank: int) -> tuple[Alert, bool]:
        """Put what causes found now into the episode; ``(alert, whether it said nothing of this before)``.

        The alert is a new one if no episode was under way. Series that join what their cause has found already are
        added to it, without more ado.
        """
        for state, finding in found:
            state.findings.append(finding)
        alert = self.open
        if alert is None:
            episode = self.past_episodes + len(self.episodes) + 1
            alert = self.open = Alert.of(self.rule.id, number, episode, [f for _, f in found], rank=rank, time=now)
            self.episodes.append(alert)
            return alert, True
        before, new = alert.cause, False
        for state, finding in found:
            known = alert.finding(finding.cause)
            if known is None:
                alert.findings.append(finding)
                new = True
            elif known.muted and not finding.muted:  # what the mute covered has come again, outside of it
                alert.findings[alert.findings.index(known)] = finding
                new = True
            else:
                state.findings.pop()
                _join(known, finding)
                new |= bool(known.accepted)  # whether the series that came are accepted too must be asked
        alert.settle()
        if alert.cause != before:
            alert.changes.append(CauseChange(alert.cause_step, before, alert.cause))
        return alert, new

    def repeat(self, found: list[Finding], number: int, now: float, rank: int) -> Alert:
        """The alert of an episode that goes on and may act again (``cooldown``)."""
        episode = self.past_episodes + len(self.episodes)
        alert = Alert.of(self.rule.id, number, episode, found, rank=rank, time=now)
        alert.repeat = True
        return alert

    def recovered(self) -> Alert | None:
        """Note which causes fire no longer; the alert whose episode is over, if it is."""
        alert = self.open
        if alert is None:
            return None
        for state in self.causes:
            finding = alert.finding(state.cause.name)
            if finding is None:
                continue
            if state.firing:
                finding.cleared_step = None
            elif state.cleared:
                finding.cleared_step = max(series.last_step for series in state.cleared)
        if self.firing:
            return None
        alert.cleared_step = max(
            (finding.fired_step if finding.cleared_step is None else finding.cleared_step) for finding in alert.findings
        )
        self.open = None
        return alert

    def due_again(self, step: int) -> bool:
        """Whether an episode that goes on may act again."""
        cooldown = self.rule.cooldown
        return cooldown is not None and self.last_action_step is not None and step - self.last_action_step >= cooldown

    # -- actions ------------------------------------------------------------------------

    def plan(self, alert: Alert, causes: Iterable[CauseState], step: int, *, begins: bool) -> list[PlannedAction]:
        """The actions of some causes that have not run yet in this episode, in the order of the causes.

        What is muted, within the ``cooldown``, or only observes what another alert explains, stays in the plan, held:
        the report says what would have been done.

        :param begins: whether an episode begins, or acts again.
        """
        if begins:
            self._turn += 1
        planned: list[PlannedAction] = []
        seen: set[str] = set()
        runs = False
        for state in causes:
            finding = alert.finding(state.cause.name)
            for spec in state.cause.actions:
                key = spec.key
                if key in seen or self._ran.get(key, (0, 0))[0] == self._turn:
                    continue
                seen.add(key)
                held = f"muted: {finding.muted}" if finding is not None and finding.muted else self._cooling(key, step)
                if not held and alert.explained_by and spec.stage == "observe":
                    held = f"explained by {alert.explained_by}"
                if held.startswith("muted"):
                    seen.discard(key)  # another cause may ask for it that is not muted
                runs |= not held
                planned.append(PlannedAction(state.cause, alert, spec, held, self))
            runs |= not state.cause.actions and not (finding is not None and finding.muted)
        # What is held back is no run: `after: 2` counts what was done, and `cooldown` begins with it.
        if runs and self._counted != self._turn:
            self._counted = self._turn
            self.action_runs += 1
        if runs:
            self.last_action_step = step
        result = []
        for item in planned:
            if not item.held:
                self._ran[item.spec.key] = self._turn, step
                if self.action_runs < item.spec.after:
                    continue
            result.append(item)
        return result

    def _cooling(self, key: str, step: int) -> str:
        cooldown = self.rule.cooldown
        turn, last = self._ran.get(key, (0, 0))
        if cooldown is None or not turn or turn == self._turn or step - last >= cooldown:
            return ""
        return f"within the cooldown of {cooldown} steps"

    def forget_run(self, spec: ActionSpec) -> None:
        """An action that was planned could not be run."""
        turn, step = self._ran.get(spec.key, (0, 0))
        if turn == self._turn:
            self._ran[spec.key] = -1, step

    # -- resume -------------------------------------------------------------------------

    def rewind(self, step: int) -> None:
        """The run goes on at an earlier step: ``cooldown`` counts from there."""
        if self.last_action_step is not None:
            self.last_action_step = min(self.last_action_step, step)
        self._ran = {key: (turn, min(at, step)) for key, (turn, at) in self._ran.items()}

    def begin_again(self, step: int) -> None:
        """The run has ended at ``step``, and an episode under way with it; another one begins."""
        if self.open is not None:
            self.open.end(step)
        self.open, self.last_action_step, self._ran = None, None, {}

    def save(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "episodes": self.past_episodes + len(self.episodes),
            "action_runs": self.action_runs,
            "last_action_step": self.last_action_step,
            "turn": self._turn,
            "counted": self._counted,
            "ran": {key: list(at) for key, at in self._ran.items()},
            "open": None if self.open is None else self.open.state(),
            "applies": self.applies,
            "seen": self._seen,
            "withheld": [finding.state() for _, finding in self.withheld],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """The inverse of :meth:`save`; raises whatever a state that cannot be read gives."""
        self.past_episodes = int(saved["episodes"])
        self.action_runs = int(saved["action_runs"])
        self.last_action_step = saved["last_action_step"]
        self._turn, self._counted = int(saved["turn"]), int(saved["counted"])
        self._ran = {key: (int(turn), int(step)) for key, (turn, step) in saved["ran"].items()}
        self.applies = self.applies or bool(saved["applies"])
        self._seen = {str(key): bool(met) for key, met in saved["seen"].items()}
        by_name = {state.cause.name: state for state in self.causes}
        findings = [Finding.of_state(entry) for entry in saved["withheld"]]
        self.withheld = [(by_name[f.cause], f) for f in findings if f.cause in by_name]
        # An episode without a cause that still fires (it starts fresh, or is gone) is over.
        self.open = Alert.of_state(self.rule.id, saved["open"]) if saved["open"] is not None and self.firing else None


def _join(known: Finding, more: Finding) -> None:
    """Series that join what their cause has found already."""
    names = {fact.name for fact in known.series}
    fresh = [fact for fact in more.series if fact.name not in names]
    known.series = (known.series + fresh)[:WORST]
    known.count += more.count - (len(more.series) - len(fresh))
    known.severity = max(known.severity, more.severity)
    known.cleared_step = None


_Acting = tuple[RuleState, Alert, list[CauseState], bool]
"""A rule, its alert, the causes whose actions are due, and whether an episode begins or acts again."""


class Episodes:
    """The episodes of all rules of one engine, and its alerts.

    :param rules: in file order, with the states of those causes that are judged here.
    :param mutes: looked at each time: people mute rules of a run that goes on.
    """

    def __init__(self, rules: Iterable[RuleState], mutes: list[Mute], rank: int) -> None:
        self.rules = {rule.rule.id: rule for rule in rules}
        self.mutes = mutes
        self.mute_hits: dict[int, int] = {}
        """How much each mute was good for."""
        self.alerts: list[Alert] = []
        self.rank = rank
        self.late: list[RuleState] = []
        """Rules that apply from now on; what their causes have found before comes next."""
        self._awaited: dict[str, list[str]] | None = None
        """By metric, the series that rules wait for, empty for any; None: to be worked out."""
        self._globs: list[str] = []
        """The same, where the name of the metric is a glob."""

    @property
    def undecided(self) -> list[RuleState]:
        """Rules that have not met yet what they need to apply to this run."""
        return [rule for rule in self.rules.values() if not rule.applies]

    def concerns(self, metric: str, labels: Labels) -> bool:
        """Whether it may be that a rule applies once this series has come.

        What all rules together wait for is worked out once: runs meet thousands of series that concern none of them.
        """
        if self._awaited is None:
            self._awaited = {trait: [""] for trait in TRAITS}
            self._globs = []
            for rule in self.undecided:
                if rule.has_all():  # it was restored so: the next series is enough
                    self._globs.append("*")
                for wanted in rule.rule.applies_if.metrics if rule.rule.applies_if is not None else ():
                    name, _, rest = wanted.partition("[")
                    if any(sign in name for sign in "*?["):
                        self._globs.append(wanted)
                    else:
                        self._awaited.setdefault(name, []).append(wanted if rest else "")
        asked = self._awaited.get(metric, ())
        return any(not wanted or _is(wanted, metric, labels) for wanted in (*asked, *self._globs))

    def forget(self) -> None:
        """Rules were restored: what they wait for is worked out anew."""
        self._awaited = None

    def saw(self, metric: str, labels: Labels, step: int) -> bool:
        """A series comes for the first time, at this step; whether some rule applies by that.

        What a run is like is said by samples too, so that a replay knows it.
        """
        if not self.concerns(metric, labels):
            return False
        found = [rule for rule in self.undecided if rule.met(metric, labels)]
        for rule in found:
            rule.apply(max(0, step - 1))
        self.late += found
        return bool(found)

    def conclude(
        self,
        result: Evaluation,
        touched: Iterable[CauseState],
        step: int,
        now: float,
        unknown: Callable[[str], bool],
    ) -> None:
        """What the marks of one evaluation mean, into ``result``.

        :param touched: causes with something to tell, in file order.
        :param step: the step during which it was judged, at ``now`` seconds of active training.
        :param unknown: whether a record does not know a metric that a guard asks for.
        """
        acting: list[_Acting] = []
        late, self.late = self.late, []
        for rule in late:
            if rule.withheld:
                acting += self._take(rule, rule.withheld, now, result)
                rule.withheld = []
                self._end(rule, result)
        for rule, causes in self._by_rule(touched):
            # Cleared before fired: a rule of which one series clears while another fires goes on.
            for cause in causes:
                for series in cause.cleared:
                    cause.firing.discard(series.labels)
            fresh = [cause for cause in causes if cause.fresh]
            again = [cause for cause in causes if cause.again and not cause.fresh]
            if fresh:
                found = [(cause, self._find(rule, cause, step, unknown)) for cause in fresh]
                for cause in fresh:
                    cause.firing.update(series.labels for series in cause.fresh)
                if rule.applies:
                    acting += self._take(rule, found, now, result)
                else:
                    rule.withhold(found)
            elif again and rule.due_again(step):
                number = rule.open.number if rule.open else 0
                repeated = [self._find(rule, cause, step, unknown, repeat=True) for cause in again]
                alert = rule.repeat(repeated, number, now, self.rank)
                result.alerts.append(alert)
                acting.append((rule, alert, again, True))
            for cause in causes:
                if cause.worse:
                    self._worsen(rule, cause, step, unknown, result)
            result.recovered += [state.cause.id for state in causes if state.cleared and not state.firing]
            self._end(rule, result)
            for cause in causes:
                cause.reset_marks()
        # All alerts of the evaluation are known now: one may explain another that stands before it in the file.
        for rule, alert, causes, begins in acting:
            self._explain(rule, alert, causes, begins=begins)
        for rule, alert, causes, begins in acting:
            result.plan += rule.plan(alert, causes, step, begins=begins)

    def _take(
        self, rule: RuleState, found: list[tuple[CauseState, Finding]], now: float, result: Evaluation
    ) -> list[_Acting]:
        """Begin an episode with what causes found, or let them join it; what there is to act upon."""
        begins = rule.open is None
        alert, new = rule.take(found, len(self.alerts) + 1, now, self.rank)
        if begins:
            self.alerts.append(alert)
            result.alerts.append(alert)
        elif new:
            self._list(rule, alert)
            result.amended.append(alert)
        return [(rule, alert, [cause for cause, _ in found], begins)] if begins or new else []

    def _worsen(
        self, rule: RuleState, cause: CauseState, step: int, unknown: Callable[[str], bool], result: Evaluation
    ) -> None:
        """What a cause has found goes on for so long that it is an error (``error_after``)."""
        alert = rule.open
        kept = [finding for state, finding in rule.withheld if state is cause]
        finding = kept[0] if kept else alert.finding(cause.cause.name) if alert is not None else None
        if finding is None or finding.severity is Severity.ERROR or unsaid(cause.cause, unknown):
            return
        finding.severity, finding.error_step = Severity.ERROR, step
        if alert is not None and not kept:
            alert.settle()
            self._list(rule, alert)
            result.amended.append(alert)

    def _end(self, rule: RuleState, result: Evaluation) -> None:
        over = rule.recovered()
        if over is not None:
            result.cleared.append(over)

    def _by_rule(self, touched: Iterable[CauseState]) -> list[tuple[RuleState, list[CauseState]]]:
        """What changed, by rule, all in file order."""
        groups: dict[str, list[CauseState]] = {}
        for state in touched:
            groups.setdefault(state.cause.rule, []).append(state)
        return [(self.rules[rule_id], causes) for rule_id, causes in groups.items()]

    def _find(
        self, rule: RuleState, state: CauseState, step: int, unknown: Callable[[str], bool], *, repeat: bool = False
    ) -> Finding:
        """What one cause found, as it will be read."""
        cause = state.cause
        finding = state.find(rule.causes.index(state), step, repeat=repeat)
        cap(cause, finding, unknown)
        mute(finding, cause.id, self.mutes, self.mute_hits)
        finding.message = message(cause, finding, self.rank)
        return finding

    def _list(self, rule: RuleState, alert: Alert) -> None:
        """An episode that was open before a resume says something new: it becomes an alert of this run."""
        if not any(known is alert for known in self.alerts):
            alert.number = len(self.alerts) + 1
            rule.past_episodes -= 1
            rule.episodes.append(alert)
            self.alerts.append(alert)

    def _explain(self, rule: RuleState, alert: Alert, causes: list[CauseState], *, begins: bool) -> None:
        """Whether another alert holds this one back. What was shown once is not taken back later."""
        if begins:
            alert.explained_by = hold_back(alert, self.rules)
        elif alert.explained_by:
            alert.explained_by = hold_back(alert, self.rules)
            if alert.explained_by:
                return
            # No longer held back: what its causes would have done so far is due now.
            causes[:] = [state for state in rule.causes if alert.finding(state.cause.name) is not None and state.firing]


# --------------------------------------------------------------------------------------------------
# What holds an alert back: no block of its own, no action that only observes. Never more than that.


def hold_back(alert: Alert, states: Mapping[str, RuleState]) -> str:
    """The rule whose alert explains this one, or an empty text.

    Everything that was found must be explained, by causes that fired first (or at the same step), that are not muted,
    and whose alerts are no less severe. What explains is shown itself, or explained by what is shown.
    """
    holders = []
    for finding in alert.findings:
        if finding.muted:
            continue
        holder = next((name for name in _holders(alert, finding, states) if _leads_to_light(name, alert, states)), "")
        if not holder:
            return ""
        holders.append(holder)
    return holders[0] if holders else ""


def _holders(alert: Alert, finding: Finding, states: Mapping[str, RuleState]) -> Iterable[str]:
    name = f"{alert.rule}.{finding.cause}" if finding.cause else alert.rule
    shown: list[str] = []
    hidden: list[str] = []
    for rule in states.values():
        other = rule.open
        if other is None or rule.rule.id == alert.rule or other.severity < alert.severity:
            continue
        for state in rule.causes:
            first = other.finding(state.cause.name)
            if first is None or first.muted or not state.firing or first.fired_step > finding.fired_step:
                continue
            if _holds(rule.rule, state.cause, name, finding):
                (hidden if other.explained_by else shown).append(rule.rule.id)
                break
    return shown + hidden


def _holds(rule: Rule, cause: Cause, name: str, finding: Finding) -> bool:
    if name in rule.explains or name.partition(".")[0] in rule.explains:
        return True
    if cause.kind <= finding.kind:
        return False  # only what is more certain
    if cause.kind is Kind.FACT and finding.kind is Kind.TREND and SUBJECTS.intersection(cause.tags, finding.tags):
        return True
    return str(finding.kind) in cause.holds_back or not set(finding.tags).isdisjoint(cause.holds_back)


def _leads_to_light(holder: str, alert: Alert, states: Mapping[str, RuleState]) -> bool:
    """Whether one that is shown stands at the end of who explains whom: two must not hide each other."""
    passed = {alert.rule}
    while holder:
        if holder in passed or holder not in states:
            return False
        passed.add(holder)
        other = states[holder].open
        if other is None:
            return False
        holder = other.explained_by
    return True


def _is(wanted: str, metric: str, labels: Labels) -> bool:
    """Whether a series is one of ``loss``, ``grads.*`` or ``loss[optimizer=critic*]``: globs of the name and of its labels."""
    name, _, rest = wanted.partition("[")
    if not fnmatch.fnmatchcase(metric, name):
        return False
    asked = dict(pair.split("=", 1) for pair in rest[:-1].split(",")) if rest else {}
    has = dict(labels)
    return all(key in has and fnmatch.fnmatchcase(has[key], glob) for key, glob in asked.items())
