"""How rules end: states, alerts and verdicts. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from healthcheck.core.samples import Labels


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


class State(str, Enum):
    """Where one (rule, series, rank) stands."""

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
    NOT_JUDGED = "not judged"
    DOES_NOT_APPLY = "does not apply"
    """The run has nothing that it could judge: a rule about GPUs on a machine without one. Not counted."""

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
class Alert:
    """One episode of one rule, however many series breached in that evaluation."""

    rule: str
    number: int
    """Counts the alerts of a run from 1: ``healthcheck why 2``."""
    severity: Severity
    phase: str
    episode: int
    fired_step: int
    """Step of the sample that made the rule fire."""
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
    muted: str = ""
    """Reason of the mute, if one covers this step."""
    accepted: str = ""
    """Reason under which ``healthcheck accept`` took this alert as known."""
    repeat: bool = False
    """True for a repetition of actions under ``cooldown`` while still firing."""
    facts: dict[str, Any] = field(default_factory=dict)
    """From :attr:`Sample.detail`: seen, never guessed."""
    actions: list[ActionOutcome] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        """Whether this alert counts for the exit code."""
        return not self.muted and not self.accepted


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


@dataclass(slots=True)
class Verdict:
    """How one rule ended."""

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
