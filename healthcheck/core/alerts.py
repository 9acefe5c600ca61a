"""How rules end: states, alerts and verdicts. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from healthcheck.core.digest import sha256
from healthcheck.core.samples import Labels
from healthcheck.core.text import decode_number, encode_number, strict


class Severity(IntEnum):
    """What the report and CI say. Severity never acts; only ``then`` does."""

    INFO = 0
    WARNING = 1
    ERROR = 2

    @classmethod
    def parse(cls, word: str) -> Severity:
        return cls[word.upper()]

    def __str__(self) -> str:
        return self.name.lower()


class Kind(IntEnum):
    """How certain a cause is when it fires; the greater one is the more certain."""

    TREND = 0
    """A curve was judged."""
    MEASURE = 1
    """A number is over its limit."""
    FACT = 2
    """There is no threshold to argue about: something is None, wired wrongly, not finite."""

    @classmethod
    def parse(cls, word: str) -> Kind:
        return cls[word.upper()]

    def __str__(self) -> str:
        return self.name.lower()


class State(str, Enum):
    """Where one (rule, cause, series, rank) stands."""

    NO_DATA = "no_data"
    WARMING = "warming"
    OK = "ok"
    PENDING = "pending"
    FIRING = "firing"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Missing:
    """Why something was not judged."""

    reason: str
    """A sentence fragment: ``no GPU``."""
    remedy: str = ""
    """What the person who runs it can do, as an imperative: ``log eval.loss``; empty where nobody knows."""
    applies: bool = True
    """False where the run has nothing of the kind that is judged."""
    steps: int = 0
    """How long the run would have to be, where it was too short; 0 where that is not the reason."""


class Outcome(str, Enum):
    """How one rule ended. ``NOT_JUDGED`` is never a pass; its verdict carries the reason."""

    FAILED = "failed"
    """An episode of severity error."""
    WARNED = "warned"
    """An episode of severity warning."""
    OK = "ok"
    """Judged, and nothing above info: a note does not take a pass away."""
    PARTLY_JUDGED = "partly judged"
    """Nothing was found, but not every cause that applies was judged; the verdict names those that were not."""
    NOT_JUDGED = "not judged"
    DOES_NOT_APPLY = "does not apply"
    """The run has nothing that it could judge: a rule about GPUs on a machine without one, or one that comes on by itself
    (``applies_if``) for runs of another kind. Not counted."""

    def __str__(self) -> str:
        return self.value


@dataclass(slots=True)
class SeriesFact:
    """One series of an alert: where it stood when the alert was raised."""

    name: str
    labels: Labels
    value: float
    score: float | None
    normal: float | None


OBSERVE_MODE = "observe mode"
"""``ActionOutcome.text`` of an action that only observe mode held back; in ``report.json`` readers find it by this text."""


@dataclass(slots=True)
class ActionOutcome:
    """What one action did. ``text`` is a sentence fragment: ``released 812 MiB``."""

    action: str
    done: bool
    text: str
    step: int = 0
    held: bool = False
    """True when observe mode, a mute or an explanation held the action back."""
    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, action: str, text: str, **data: Any) -> ActionOutcome:
        return cls(action, True, text, data=data)

    @classmethod
    def nothing_done(cls, action: str, reason: str) -> ActionOutcome:
        return cls(action, False, reason)


@dataclass(slots=True)
class Finding:
    """What one cause found within an episode of its rule."""

    cause: str
    """Name of the cause; empty for a rule that is its own only cause."""
    kind: Kind
    severity: Severity
    phase: str
    fired_step: int
    """Step of the sample that made the cause fire."""
    detected_step: int
    """Step during which the engine saw that sample (values may arrive late)."""
    value: float
    score: float | None
    normal: float | None
    threshold: str
    series: list[SeriesFact]
    """The worst five."""
    count: int
    """How many series breached."""
    fired_sample: int = 0
    order: int = 0
    """Place in the list of the rule's causes: the less, the more certain."""
    message: str = ""
    hint: str = ""
    docs: str = ""
    tags: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    cleared_step: int | None = None
    error_step: int | None = None
    """Step at which it had gone on for so long that it became an error (``error_after``)."""
    muted: str = ""
    accepted: str = ""

    @property
    def counts(self) -> bool:
        """Whether it counts for the exit code."""
        return not self.muted and not self.accepted

    def state(self) -> dict[str, Any]:
        """Plain JSON values, for an episode that a resume goes on with. Facts are not in it."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            **{name: encode_number(getattr(self, name)) for name in _NUMBERS},
            "kind": str(self.kind),
            "severity": str(self.severity),
            "tags": list(self.tags),
            "series": [
                [fact.name, [list(pair) for pair in fact.labels], *(encode_number(getattr(fact, n)) for n in _NUMBERS)]
                for fact in self.series
            ],
        }

    @classmethod
    def of_state(cls, saved: Mapping[str, Any]) -> Finding:
        """The inverse of :meth:`state`; raises whatever a state that cannot be read gives."""
        return cls(
            **{name: saved[name] for name in _PLAIN if name in saved or name != "error_step"},
            value=decode_number(saved["value"]),
            score=_decoded(saved["score"]),
            normal=_decoded(saved["normal"]),
            kind=Kind.parse(saved["kind"]),
            severity=Severity.parse(saved["severity"]),
            tags=tuple(saved["tags"]),
            series=[
                SeriesFact(
                    name,
                    tuple((str(key), str(text)) for key, text in labels),
                    decode_number(value),
                    _decoded(score),
                    _decoded(normal),
                )
                for name, labels, value, score, normal in saved["series"]
            ],
        )


_NUMBERS = ("value", "score", "normal")
_PLAIN = (
    "cause",
    "phase",
    "fired_step",
    "detected_step",
    "threshold",
    "count",
    "fired_sample",
    "order",
    "message",
    "hint",
    "docs",
    "where",
    "cleared_step",
    "error_step",
    "muted",
    "accepted",
)


def _decoded(number: Any) -> float | None:
    return None if number is None else decode_number(number)


@dataclass(frozen=True, slots=True)
class CauseChange:
    """Another cause of the rule speaks for the alert from now on."""

    step: int
    """At which the cause that speaks now fired."""
    before: str
    after: str


@dataclass(slots=True)
class Alert:
    """One episode of one rule: from the first of its causes that fires until all have recovered.

    The most certain cause that fired speaks: ``message``, ``value``, ``series`` and the like are its own. What the
    others found stands in :attr:`also`.
    """

    rule: str
    number: int
    """Counts the alerts of a run from 1: ``healthcheck why 2``."""
    severity: Severity
    """The highest among the causes that count."""
    phase: str
    episode: int
    fired_step: int
    """Step of the sample that made the first cause fire."""
    detected_step: int
    """Step during which the engine saw that sample (values may arrive late)."""
    value: float
    score: float | None
    normal: float | None
    threshold: str
    """In words: ``above 8``, ``non-finite``."""
    series: list[SeriesFact]
    """The worst five."""
    count: int
    """How many series breached."""
    fired_sample: int = 0
    """Index of the sample within its series, counted from 1."""
    rank: int = 0
    message: str = ""
    hint: str = ""
    docs: str = ""
    tags: tuple[str, ...] = ()
    time: float = 0.0
    acted_step: int | None = None
    cleared_step: int | None = None
    explained_by: str = ""
    """Rule whose alert holds this one back: no block of its own, and no action that only observes."""
    muted: str = ""
    """Reason of the mute, if one covers all that was found."""
    accepted: str = ""
    """Reason under which ``healthcheck accept`` took this alert as known."""
    repeat: bool = False
    """True for a repetition of actions under ``cooldown`` while still firing."""
    facts: dict[str, Any] = field(default_factory=dict)
    """From :attr:`Sample.detail`: seen, never guessed."""
    actions: list[ActionOutcome] = field(default_factory=list)
    cause: str = ""
    """Name of the cause that speaks; empty for a rule that is its own only cause."""
    kind: Kind = Kind.MEASURE
    cause_step: int = 0
    """Step of the sample that made the cause fire that speaks; ``fired_step`` stays that of the first one."""
    where: str = ""
    """``train.py:31``: the place in the user's code, where one is known."""
    findings: list[Finding] = field(default_factory=list)
    """What the causes found, most certain first."""
    changes: list[CauseChange] = field(default_factory=list)

    @classmethod
    def of(
        cls, rule: str, number: int, episode: int, findings: list[Finding], *, rank: int = 0, time: float = 0.0
    ) -> Alert:
        """The alert of what some causes found at once; at least one."""
        first = min(findings, key=lambda finding: finding.fired_step)
        alert = cls(
            rule=rule,
            number=number,
            severity=first.severity,
            phase=first.phase,
            episode=episode,
            fired_step=first.fired_step,
            detected_step=min(finding.detected_step for finding in findings),
            value=first.value,
            score=first.score,
            normal=first.normal,
            threshold=first.threshold,
            series=first.series,
            count=first.count,
            rank=rank,
            time=time,
            findings=list(findings),
        )
        alert.settle()
        return alert

    @property
    def name(self) -> str:
        """``rule.cause`` of the cause that speaks, or the rule where it is its own only cause."""
        return f"{self.rule}.{self.cause}" if self.cause else self.rule

    @property
    def names(self) -> list[str]:
        """``rule.cause`` of all causes that have found something, or the rule where it is its own only cause."""
        return [f"{self.rule}.{finding.cause}" if finding.cause else self.rule for finding in self.findings]

    @property
    def counts(self) -> bool:
        """Whether this alert counts for the exit code."""
        return not self.muted and not self.accepted

    @property
    def also(self) -> list[Finding]:
        """What the other causes found, most certain first."""
        return [finding for finding in self.findings if finding.cause != self.cause]

    @property
    def fingerprint(self) -> str:
        """The same for the same trouble of another run: rule, cause, family of series, place in the code; no steps."""
        family = self.series[0].name.partition("[")[0] if self.series else ""
        return sha256("|".join((self.rule, self.cause, family, self.where)).encode()).hexdigest()[:12]

    def state(self) -> dict[str, Any]:
        """Plain JSON values, for an episode that a resume goes on with."""
        return {
            "number": self.number,
            "episode": self.episode,
            "fired_step": self.fired_step,
            "detected_step": self.detected_step,
            "acted_step": self.acted_step,
            "explained_by": self.explained_by,
            "rank": self.rank,
            "changes": [[change.step, change.before, change.after] for change in self.changes],
            "findings": [finding.state() for finding in self.findings],
        }

    @classmethod
    def of_state(cls, rule: str, saved: Mapping[str, Any]) -> Alert:
        """The inverse of :meth:`state`; raises whatever a state that cannot be read gives."""
        findings = [Finding.of_state(entry) for entry in saved["findings"]]
        alert = cls.of(rule, int(saved["number"]), int(saved["episode"]), findings, rank=int(saved["rank"]))
        for name in ("fired_step", "detected_step", "acted_step", "explained_by"):
            setattr(alert, name, saved[name])
        alert.changes = [CauseChange(*change) for change in saved["changes"]]
        return alert

    def finding(self, cause: str) -> Finding | None:
        """What a cause found in this episode so far."""
        return next((finding for finding in self.findings if finding.cause == cause), None)

    def end(self, step: int) -> None:
        """Its episode is over with the run, which ended at ``step``."""
        for finding in self.findings:
            finding.cleared_step = step if finding.cleared_step is None else finding.cleared_step
        self.cleared_step = step

    def settle(self) -> None:
        """Have the right cause speak for all that was found, at the highest severity of what counts."""
        self.findings.sort(key=lambda finding: finding.order)
        counting = [finding for finding in self.findings if finding.counts]
        shown = counting or [finding for finding in self.findings if not finding.muted] or self.findings
        self.severity = max(finding.severity for finding in shown)
        self.muted = "" if any(not f.muted for f in self.findings) else _together(f.muted for f in shown)
        self.accepted = "" if counting or self.muted else _together(f.accepted for f in shown)
        speaker = shown[0]
        self.cause, self.kind, self.cause_step = speaker.cause, speaker.kind, speaker.fired_step
        for name in _SPOKEN:
            setattr(self, name, getattr(speaker, name))


_SPOKEN = (
    "phase",
    "value",
    "score",
    "normal",
    "threshold",
    "series",
    "count",
    "fired_sample",
    "message",
    "hint",
    "docs",
    "tags",
    "facts",
    "where",
)
"""What an alert takes over from the cause that speaks."""


def _together(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason))


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of state of one series; the engine hands out nothing else."""

    rule: str
    series: str
    step: int
    before: State
    after: State
    value: float
    score: float | None
    cause: str = ""
    """Name of the cause; empty for a rule that is its own only cause."""


@dataclass(slots=True)
class Verdict:
    """How one rule ended, or one cause of it."""

    rule: str
    outcome: Outcome
    severity: Severity
    reason: str = ""
    """Why it was not judged or does not apply."""
    remedy: str = ""
    """What can be done so that it is judged."""
    needs_steps: int = 0
    """From which length of a run it is judged, where this one was too short."""
    origin: str = ""
    """``team.yaml:14``: where the rule stands."""
    episodes: int = 0
    samples: int = 0
    required: bool = False
    closest: float | None = None
    """The score that came nearest to firing (closest approach)."""
    closest_step: int | None = None
    threshold: str = ""
    cause: str = ""
    """Name of the cause, in the verdict of one."""
    kind: Kind = Kind.MEASURE
    causes: list[Verdict] = field(default_factory=list)
    """How each cause ended, most certain first; one for a rule that is its own only cause."""

    @property
    def missing(self) -> list[Verdict]:
        """The causes that apply and were not judged."""
        return [verdict for verdict in self.causes if verdict.outcome is Outcome.NOT_JUDGED]


# --------------------------------------------------------------------------- an alert as JSON


def alert_json(alert: Alert) -> dict[str, Any]:
    """One alert in the form of the report contract; what is absent is left out."""
    entry: dict[str, Any] = {
        "rule": alert.rule,
        "cause": alert.cause or None,
        "kind": str(alert.kind),
        "number": alert.number,
        "severity": str(alert.severity),
        "phase": alert.phase,
        "series": [_series_json(fact) for fact in alert.series],
        "count": alert.count,
        "rank": alert.rank,
        "episode": alert.episode,
        "fired_step": alert.fired_step,
        "cause_severity": _cause_severity(alert),
        "cause_step": alert.cause_step if alert.cause_step != alert.fired_step else None,
        "fired_sample": alert.fired_sample,
        "detected_step": alert.detected_step,
        "acted_step": alert.acted_step,
        "cleared_step": alert.cleared_step,
        "error_step": min((f.error_step for f in alert.findings if f.error_step is not None), default=None),
        "value": encode_number(alert.value),
        "score": encode_number(alert.score),
        "normal": encode_number(alert.normal),
        "threshold": alert.threshold,
        "message": alert.message,
        "hint": alert.hint or None,
        "docs": alert.docs or None,
        "tags": list(alert.tags),
        "explained_by": alert.explained_by or None,
        "muted": alert.muted or None,
        "accepted": alert.accepted or None,
        "fingerprint": alert.fingerprint,
        "where": alert.where or None,
        "changes": [
            {"transition": "cause", "step": change.step, "from": change.before, "to": change.after}
            for change in alert.changes
        ]
        or None,
        "also": [finding_json(finding) for finding in alert.also] or None,
        "time": round(alert.time, 3),
        "facts": {key: strict(value) for key, value in alert.facts.items()},
        "actions": [_action_json(outcome) for outcome in alert.actions],
    }
    return {key: value for key, value in entry.items() if value is not None}


def _cause_severity(alert: Alert) -> str | None:
    """Of the cause that speaks, where another one makes the alert more severe."""
    finding = alert.finding(alert.cause)
    return str(finding.severity) if finding is not None and finding.severity is not alert.severity else None


def finding_json(finding: Finding) -> dict[str, Any]:
    """What another cause of the same episode found; what is absent is left out."""
    entry: dict[str, Any] = {
        "cause": finding.cause,
        "kind": str(finding.kind),
        "severity": str(finding.severity),
        "phase": finding.phase,
        "series": [_series_json(fact) for fact in finding.series],
        "count": finding.count,
        "fired_step": finding.fired_step,
        "fired_sample": finding.fired_sample,
        "detected_step": finding.detected_step,
        "cleared_step": finding.cleared_step,
        "error_step": finding.error_step,
        "value": encode_number(finding.value),
        "score": encode_number(finding.score),
        "normal": encode_number(finding.normal),
        "threshold": finding.threshold,
        "message": finding.message,
        "hint": finding.hint or None,
        "docs": finding.docs or None,
        "muted": finding.muted or None,
        "accepted": finding.accepted or None,
        "where": finding.where or None,
        "facts": {key: strict(value) for key, value in finding.facts.items()},
    }
    return {key: value for key, value in entry.items() if value is not None}


def _series_json(fact: SeriesFact) -> dict[str, Any]:
    return {
        "name": fact.name,
        "value": encode_number(fact.value),
        "score": encode_number(fact.score),
        "normal": encode_number(fact.normal),
    }


def _action_json(outcome: ActionOutcome) -> dict[str, Any]:
    entry = {"action": outcome.action, "done": outcome.done, "text": outcome.text, "step": outcome.step}
    if outcome.held:
        entry["held"] = True
    return {**entry, **{key: strict(value) for key, value in outcome.data.items()}}
