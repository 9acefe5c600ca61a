"""Rules as the engine uses them: compiled, checked, immutable. What each key means: docs/reference/rule-files.md.

A :class:`Rule` is what users write and read about: one disease of a training run. A :class:`Cause` is one way in which
it shows: what is watched, when it is bad, how certain that is. A rule without ``causes`` is its own only cause.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from healthcheck.core.alerts import Kind, Severity
from healthcheck.core.errors import Problem
from healthcheck.core.protocols import Comparator, Condition
from healthcheck.core.redact import redact_text
from healthcheck.core.samples import CONTEXT_LABELS, Labels
from healthcheck.core.text import in_message, nearest, one_line, size_text


@dataclass(frozen=True, slots=True)
class Origin:
    """Where something was written: ``team.yaml:14``. ``path`` is a pack name for packs."""

    path: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True, slots=True)
class Selector:
    """``loss``, ``grad_norm[*]``, ``grad_norm[encoder.*]``, ``time.step[rank=*]``, minus ``except``.

    A plain name matches the series without labels and those with context labels only
    (``optimizer``, ``dataset``, ``rank``); a family matches by glob on its label.
    """

    metric: str
    globs: tuple[tuple[str, str], ...] = ()
    """``(label, glob)``; the label ``""`` stands for the metric's own family label."""
    excluded: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The demand key of this selector: ``grad_norm`` or ``grad_norm[]``."""
        return f"{self.metric}[]" if any(label not in CONTEXT_LABELS for label, _ in self.globs) else self.metric

    def matches(self, labels: Labels) -> bool:
        """Whether a series with these labels is meant."""
        if not self.globs:
            return all(name in CONTEXT_LABELS for name, _ in labels)
        family = [(n, v) for n, v in labels if n not in CONTEXT_LABELS]
        named = dict(labels)
        wanted = set()
        for label, glob in self.globs:
            if label:
                if label not in named or not _glob(glob)(named[label]):
                    return False
                wanted.add(label)
            else:
                if not family or not any(_glob(glob)(v) for _, v in family):
                    return False
                wanted.update(n for n, _ in family)
        if any(n not in wanted for n, _ in family):
            return False
        return not any(_glob(pattern)(value) for pattern in self.excluded for _, value in labels)

    def __str__(self) -> str:
        if not self.globs:
            return self.metric
        return f"{self.metric}[{','.join(f'{n}={g}' if n else g for n, g in self.globs)}]"


@lru_cache(maxsize=4096)
def _glob(pattern: str) -> Callable[[str], Any]:
    return re.compile(fnmatch.translate(pattern)).match


@dataclass(frozen=True, slots=True)
class Span:
    """A length in one of three units: ``100 steps``, ``20 samples`` (``2 evals``), ``30s``."""

    amount: float
    unit: str = "steps"
    """``steps``, ``samples`` or ``seconds``."""

    def __str__(self) -> str:
        if self.unit == "seconds":
            return f"{self.amount:g}s"
        return f"{self.amount:g} {self.unit}"


SETTLED = 200
"""Steps of a run after which the second number of ``every: 10, then 50`` counts."""


@dataclass(frozen=True, slots=True)
class Hold:
    """``for``: ``need`` of the last ``of`` samples, or continuously for ``seconds``."""

    need: int = 1
    of: int = 1
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.seconds:
            return f"for {self.seconds:g}s"
        return f"{self.need} samples" if self.need == self.of else f"{self.need} of {self.of} samples"


@dataclass(frozen=True, slots=True)
class Guard:
    """One entry of ``only_if``: the last value of a metric must satisfy the comparator."""

    metric: str
    test: Comparator


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """One entry of ``then``: an action's name and options, without the reserved ``after``."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    after: int = 1
    """Runs only from the n-th time on that the alert runs its actions."""
    stage: str = ""
    """``observe``, ``mitigate`` or ``stop``; only what observes is held back where another alert explains this one."""

    @property
    def key(self) -> str:
        """Within one episode the same action with the same options runs once, whichever cause names it."""
        return f"{self.name}:{sorted(self.options.items(), key=str)}"


SUBJECTS = frozenset(
    (
        "loss",
        "gradients",
        "weights",
        "updates",
        "learning-rate",
        "activations",
        "evaluation",
        "predictions",
        "data",
        "memory",
        "throughput",
        "reward",
        "balance",
    )
)
"""Tags that say what a cause is about. While a fact fires, trends about the same get no block of their own."""


@dataclass(frozen=True, slots=True)
class AppliesIf:
    """When a rule of an automatic pack applies to a run: once all that is asked for has been seen."""

    metrics: tuple[str, ...] = ()
    """One of these series has had a sample: names or globs, with those of labels (``loss[optimizer=critic*]``) or for any."""
    optimizers: int = 0
    """At least so many optimizers."""
    ranks: int = 0
    """At least so many processes that train together."""
    adapters: bool = False
    """Adapters (LoRA and the like) in the model."""
    router: bool = False
    """A router that sends tokens to experts."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One way in which a rule shows, compiled. Keys as in the rule file; defaults filled in."""

    id: str
    """``rule.cause``, or the rule's id where the rule is its own only cause."""
    selector: Selector
    condition: Condition
    when: Any
    """The ``when`` value as written, for reports and fingerprints."""
    hold: Hold = Hold()
    recover: Comparator | None = None
    """None: the opposite of the condition."""
    warmup: Span = Span(0)
    min_samples: int = 0
    every: int = 1
    settled_every: int = 0
    """What takes the place of ``every`` once :data:`SETTLED` steps of the run were made; 0: nothing does."""
    cooldown: int | None = None
    """Of its rule."""
    only_if: tuple[Guard, ...] = ()
    phase: str = "any"
    ranks: str = "each"
    severity: Severity = Severity.WARNING
    error_after: int = 0
    """Samples that breach after it fired, after which it is an error; 0: never."""
    actions: tuple[ActionSpec, ...] = ()
    message: Callable[[Mapping[str, Any]], str] | None = None
    """Renders the message from the closed set of placeholders; None: a generated sentence."""
    hint: str = ""
    docs: str = ""
    tags: tuple[str, ...] = ()
    kind: Kind = Kind.MEASURE
    holds_back: tuple[str, ...] = ()
    """Kinds and tags of less certain causes that get no block of their own while this one fires."""
    basis: tuple[str, ...] = ()
    """Papers, issues, documentation that this cause rests on."""
    applies_if: AppliesIf | None = None
    """Of its rule."""
    mode: str = "act"
    required: bool = False
    preview: bool = False
    origin: Origin = Origin("<rules>")
    key_origins: Mapping[str, Origin] = field(default_factory=dict)

    @property
    def rule(self) -> str:
        """Id of its rule."""
        return self.id.partition(".")[0]

    @property
    def name(self) -> str:
        """Its name within the rule; empty if the rule is its own only cause."""
        return self.id.partition(".")[2]

    @property
    def fingerprint(self) -> str:
        """Changes when saved detector state no longer fits: metric or condition differ."""
        return f"{self.selector}|{self.when!r}"

    @property
    def may_stop(self) -> bool:
        """Whether an alert of this cause can end the run."""
        return self.mode == "act" and any(a.name == "stop" for a in self.actions)


@dataclass(frozen=True, slots=True)
class Rule:
    """What users write and read about: a problem, with the causes by which it is seen, most certain first.

    It has one episode at a time: from the first cause that fires until all have recovered.
    """

    id: str
    causes: tuple[Cause, ...]
    cooldown: int | None = None
    """Steps between two action runs of one alert; None: once per episode."""
    explains: tuple[str, ...] = ()
    """Rules, or causes as ``rule.cause``, that get no block of their own while this rule fires."""
    applies_if: AppliesIf | None = None
    """None: it always applies, so that no data is "not judged"."""
    origin: Origin = Origin("<rules>")

    @property
    def severity(self) -> Severity:
        """The highest that an alert of this rule can have."""
        return max(Severity.ERROR if cause.error_after else cause.severity for cause in self.causes)

    @property
    def required(self) -> bool:
        """Whether the run fails if some cause that says so was not judged."""
        return any(cause.required for cause in self.causes)

    @property
    def tags(self) -> tuple[str, ...]:
        """Of all its causes."""
        return tuple(dict.fromkeys(tag for cause in self.causes for tag in cause.tags))

    @property
    def may_stop(self) -> bool:
        """Whether an alert of this rule can end the run."""
        return any(cause.may_stop for cause in self.causes)


def named(pattern: str, name: str) -> bool:
    """Whether a name or glob, of rules or of causes as ``rule.cause``, means a cause: a rule means all its causes."""
    if pattern in (name, name.partition(".")[0]):
        return True
    match = _glob(pattern)
    return match(name) is not None or match(name.partition(".")[0]) is not None


@dataclass(frozen=True, slots=True)
class Mute:
    """Judged and recorded, no action, not counted. ``reason`` is required."""

    rule: str
    """Rule id, ``rule.cause`` or glob."""
    reason: str
    first: int = 0
    last: int | None = None
    origin: Origin = Origin("<command line>")

    def covers(self, name: str, step: int) -> bool:
        """Whether what a rule or a cause (``rule.cause``) finds at a step is muted."""
        inside = step >= self.first and (self.last is None or step <= self.last)
        return inside and named(self.rule, name)


class Derived:
    """A metric computed from others; compiled from the ``metrics:`` block.

    ``triggers`` are the bare inputs: a value exists at a step when all of them have one there.
    ``compute(get)`` takes ``get(name) -> float | None`` for current values and returns the
    number, or None where it is undefined. Look-ups such as ``ewma(loss, 200)`` keep their own
    window; ``feeds(name)`` is what every value of that metric must be given to.
    """

    name: str
    text: str
    triggers: tuple[str, ...]
    inputs: tuple[str, ...]
    remembers: tuple[str, ...]
    origin: Origin

    def feeds(self, name: str) -> Sequence[Callable[[Sequence[float]], None]]:
        """What every value of a metric must be given to, several at a time."""
        raise NotImplementedError

    def feed(self, name: str, value: float) -> None:
        """Give one value to all its look-ups."""
        for take in self.feeds(name):
            take((value,))

    def compute(self, get: Callable[[str], float | None]) -> float | None:
        """The value from the current values of its inputs; NaN if one of them is not finite, None if undefined."""
        raise NotImplementedError

    def run(self, given: Mapping[str, Sequence[float]], count: int, late: Collection[str]) -> Sequence[float | None]:
        """The values of ``count`` evaluations, one after the other, as :meth:`feed` and :meth:`compute` would give them.

        :param given: what came of each input; one that only look-ups remember may be missing.
        :param late: inputs of look-ups that are computed later than this: it sees those of the evaluation before.
        """
        raise NotImplementedError

    def state(self) -> Any:
        """What the look-ups remember, as plain JSON values."""
        raise NotImplementedError

    def restore(self, state: Any) -> None:
        """Go on from what :meth:`state` gave. Raises whatever a state of another formula leads to."""
        raise NotImplementedError


@dataclass(slots=True)
class RuleSet:
    """Everything that one set of rule files says, after ``extends``, profile and overrides."""

    rules: list[Rule]
    derived: list[Derived] = field(default_factory=list)
    external: frozenset[str] = frozenset()
    mutes: list[Mute] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    setting_origins: dict[str, Origin] = field(default_factory=dict)
    source: str = ""
    """What the start line names: ``team.yaml``, ``healthcheck:recommended@1 (no config found)``."""
    profile: str = ""
    off: list[str] = field(default_factory=list)
    """Ids of rules, and of causes of rules that go on, that are switched off (``off``, ``--off``, ``--only``)."""
    write: Callable[[], str] = str
    """Gives ``text``: most who load rules never ask for it."""
    warnings: list[Problem] = field(default_factory=list)
    """What ``healthcheck check`` warns of; never an error."""

    @property
    def text(self) -> str:
        """The effective rules as YAML, for the record."""
        return self.write()

    @property
    def causes(self) -> list[Cause]:
        """All causes of all rules, in file order: what the engine judges."""
        return [cause for rule in self.rules for cause in rule.causes]

    def __getitem__(self, rule_id: str) -> Rule:
        return next(r for r in self.rules if r.id == rule_id)

    def cause(self, name: str) -> Cause:
        """A cause by ``rule.cause``, or the only one of a rule. Raises ``StopIteration`` for a name that is not there."""
        return next(cause for cause in self.causes if cause.id == name)

    def keeping(self, keep: Callable[[Cause], bool]) -> RuleSet:
        """The same rule set with these causes only; a rule of which none is left is left out."""
        kept = [(rule, tuple(cause for cause in rule.causes if keep(cause))) for rule in self.rules]
        return replace(self, rules=[replace(rule, causes=causes) for rule, causes in kept if causes])


# --------------------------------------------------------------------------- who owns the non-finite samples of a metric


def owners(causes: Iterable[Cause], derived: Iterable[Derived] = ()) -> dict[str, str]:
    """Cause -> the ``nonfinite`` cause that owns the non-finite samples it would see, by id: one event, one alert.

    A NaN breaches every numeric rule. But where an enabled ``nonfinite`` rule covers the same metric and phase, it
    owns such samples and the others skip them. Ownership goes by the base name of the metric: labels are ignored. A
    derived metric is not finite only because one of its inputs is not: where all of them are owned, so is what is
    made of them.

    :param derived: the formulas of the rule set.

    Rules that nobody excuses are not in the result. Where several ``nonfinite`` rules cover a
    metric, each judges for itself and the first in file order is named.
    """
    listed = list(causes)
    dedicated = [cause for cause in listed if owns_nonfinite(cause)]
    formulas = {formula.name: formula for formula in derived}
    found: dict[str, str] = {}
    for cause in listed:
        if cause.condition.judges_nonfinite:
            continue
        owning = [
            next((o for o in dedicated if _covers(o, metric, cause)), None)
            for metric in _inputs(cause.selector.metric, formulas)
        ]
        if owning and owning[0] is not None and None not in owning:
            found[cause.id] = owning[0].id
    return found


def _inputs(metric: str, formulas: Mapping[str, Derived]) -> list[str]:
    """The metrics from which a metric is computed in the end; itself if it is not derived."""
    formula = formulas.get(metric)
    if formula is None:
        return [metric]
    return [raw for name in formula.inputs if name != metric for raw in _inputs(name, formulas)]


def owns_nonfinite(cause: Cause) -> bool:
    """Whether the cause is the plain ``when: nonfinite``, or a count that one sample reaches."""
    return cause.condition.judges_nonfinite and cause.condition.breaches(1.0)


def _covers(owner: Cause, metric: str, cause: Cause) -> bool:
    # One that may not apply to this run owns nothing: a NaN would be nobody's then.
    certain = owner.applies_if is None or owner.applies_if == cause.applies_if
    return certain and owner.selector.metric == metric and owner.phase in ("any", cause.phase)


# --------------------------------------------------------------------------- messages with placeholders
#
# Checked when the file is read, and never ``str.format``: that reaches attributes and from there module globals; here a
# placeholder is one of a closed set of names with at most a numeric format, and rendering cannot raise.

PLACEHOLDERS: dict[str, str] = {
    "value": "the sample that breached",
    "score": "the score that the condition gave it",
    "normal": "what it was compared with: median, mean, best, ...",
    "threshold": "the comparator in words: above 8",
    "window": "how many samples the condition looks back",
    "step": "step of the sample",
    "epoch": "epoch, where the trainer knows one",
    "rule": "id of the rule",
    "series": "name of the worst series",
    "rank": "rank that saw it",
    "count": "how many series breached",
}
UNKNOWN = "?"
"""What a placeholder without a value becomes."""
MAX_LENGTH = 500

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_FORMAT = re.compile(r"B|[<>^]?[-+ ]?\d{0,2},?(?:\.\d{1,2})?[eEfFgGd%]?")
"""Python's numeric formats, and ``B`` for bytes as people write them: ``812 MiB``."""
_WHOLE = ("step", "rank", "count", "window")


class TemplateError(ValueError):
    """A message template cannot be used; ``column`` counts characters from 0."""

    def __init__(self, message: str, column: int, width: int, *, suggestion: str = "") -> None:
        super().__init__(message)
        self.column = column
        self.width = width
        self.suggestion = suggestion


class Template:
    """A compiled message: call it with a mapping of placeholders.

    :param secrets: whether there may be some, which are not shown.
    """

    __slots__ = ("_pieces", "text")

    def __init__(self, text: str, *, secrets: bool = True) -> None:
        self.text = text
        self._pieces: list[str | tuple[str, str]] = _compile(text, secrets)

    def __call__(self, values: Mapping[str, Any]) -> str:
        return "".join(p if isinstance(p, str) else _render(p[0], p[1], values.get(p[0])) for p in self._pieces)


def _compile(text: str, secrets: bool) -> list[str | tuple[str, str]]:
    if len(text) > MAX_LENGTH:
        raise TemplateError(f"the message has {len(text)} characters; at most {MAX_LENGTH}", 0, 1)
    pieces: list[str | tuple[str, str]] = []
    at = 0
    for found in _PIECE.finditer(text):
        pieces.append(text[at : found.start()])
        at = found.end()
        whole, inner = found[0], found[1]
        if whole in ("{{", "}}"):
            pieces.append(whole[0])
        elif inner is None:
            raise TemplateError(
                f"a lone `{whole}` in the message",
                found.start(),
                1,
                suggestion=f"write `{whole}{whole}` for the character",
            )
        else:
            pieces.append(_placeholder(inner, found.start(), len(whole)))
    pieces.append(text[at:])
    return [redact_text(p) if secrets and isinstance(p, str) else p for p in pieces if p]


def without_secrets(text: str) -> str:
    """Words of a rule file, for the record and the reports that others read; placeholders stay."""
    parts, at = [], 0
    for found in _PIECE.finditer(text):
        parts += [redact_text(text[at : found.start()]), found[0]]
        at = found.end()
    return "".join([*parts, redact_text(text[at:])])


def _placeholder(inner: str, column: int, width: int) -> tuple[str, str]:
    name, colon, spec = inner.partition(":")
    if name not in PLACEHOLDERS:
        near = nearest(name, PLACEHOLDERS)
        raise TemplateError(
            f"unknown placeholder {{{one_line(name)}}}",
            column,
            width,
            suggestion=f"did you mean `{{{near}}}`?" if near else f"there are {', '.join(PLACEHOLDERS)}",
        )
    if colon and not _FORMAT.fullmatch(spec):
        raise TemplateError(
            f'"{one_line(spec)}" is not a numeric format',
            column,
            width,
            suggestion="write for instance {value:.4g} or {score:.1f}",
        )
    return name, spec


def _render(name: str, spec: str, value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return one_line(str(value), 200)
    if not spec:
        return in_message(value, whole=name in _WHOLE)
    try:
        if spec == "B":
            return size_text(value)
        if spec[-1] == "d":
            return format(round(value), spec)
        if isinstance(value, int) and "." not in spec and not spec[-1].isalpha() and spec[-1] != "%":
            return format(value, spec)
        return format(float(value), spec)
    except (ValueError, OverflowError, TypeError):
        return in_message(value)


def default_message(sentence: str, *, judges_nonfinite: bool) -> Callable[[Mapping[str, Any]], str]:
    """The sentence of a rule that has no ``message``: the condition's own.

    A value that is not a number has no score, so then it only says that.
    """
    usual, plain = Template(sentence, secrets=False), Template("{series} is {value}", secrets=False)
    if judges_nonfinite:
        return usual

    def render(values: Mapping[str, Any]) -> str:
        value = values.get("value")
        broken = isinstance(value, float) and not math.isfinite(value)
        return (plain if broken else usual)(values)

    return render
