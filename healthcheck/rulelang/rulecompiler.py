"""One draft -> one compiled rule. Every mistake is reported at its key; nothing is raised."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from healthcheck.core.alerts import Kind, Severity
from healthcheck.core.errors import Problem
from healthcheck.core.protocols import Condition
from healthcheck.core.text import one_line
from healthcheck.extend.guard import GuardedCondition, describe, passes_on
from healthcheck.extend.registry import BUILTIN, Registry
from healthcheck.rulelang.comparators import ABSENT, Threshold, comparator_in
from healthcheck.rulelang.conditions.base import OptionError, must_fit
from healthcheck.rulelang.conditions.combined import PART_COMPILER
from healthcheck.rulelang.known import KnownMetrics
from healthcheck.rulelang.merge import Draft, Entry
from healthcheck.rulelang.quantities import QuantityError, parse_hold, parse_pace, parse_span
from healthcheck.rulelang.rule import (
    ActionSpec,
    AppliesIf,
    Cause,
    Guard,
    Hold,
    Rule,
    Selector,
    Span,
    Template,
    TemplateError,
    default_message,
)

FEW_SAMPLES_KEYS = ("min_samples", "outliers", "reseed")
"""Keys of a rule that its condition may read."""


class RuleCompiler:
    """Compiles the drafts of one rule set.

    :param excused: whether a rule may lack its metric or condition because something about it is reported already.
    """

    def __init__(
        self, registry: Registry, known: KnownMetrics, problems: list[Problem], excused: Callable[[Draft], bool]
    ) -> None:
        self.registry = registry
        self.excused = excused
        self.known = known
        self.problems = problems
        self._draft: Draft
        self._fitting: set[str] = set()
        """Names of conditions that have all that their protocol asks for."""

    def compile(self, draft: Draft, gone: Container[str] = ()) -> Rule | None:
        """The rule, or None if something is wrong with it, or nothing is left of it.

        :param gone: causes that are switched off: looked at, since they may be switched on for one run, and left out.
        """
        before = len(self.problems)
        parts = draft.parts
        if any("metric" not in part.entries or "when" not in part.entries for part in parts) and self.excused(draft):
            return None
        self._draft = draft
        cooldown = self._steps("cooldown", None, least=0)
        # None for what a person names or demands: without data that is not judged, instead of out of place.
        automatic = not draft.named and not any(part.value("required") is True for part in parts)
        applies_if = _applies_if(draft.value("applies_if")) if automatic else None
        if draft.causes:
            self._order(parts)
            self._useless(draft)
        causes = [self._cause(part, cooldown, applies_if) for part in parts]
        # What is wrong with a key of the rule is wrong in each of its causes, and said once.
        self.problems[before:] = list(dict.fromkeys(self.problems[before:]))
        if any(p.severity == "error" for p in self.problems[before:]):
            return None
        kept = tuple(cause for cause in causes if cause is not None and cause.id not in gone)
        if not kept:
            return None
        return Rule(
            id=draft.id,
            causes=kept,
            cooldown=cooldown,
            explains=tuple(draft.value("explains", ())),
            applies_if=applies_if,
            origin=draft.document.origin(draft.where, key=True),
        )

    # -- the rule as a whole ------------------------------------------------------------

    def _order(self, causes: Sequence[Draft]) -> None:
        """A trend never stands before a fact: the order says what is believed first."""
        trend: Draft | None = None
        for cause in causes:
            kind = cause.value("kind", "measure")
            if kind == "trend":
                trend = trend or cause
            elif kind == "fact" and trend is not None:
                name, later = trend.id.partition(".")[2], cause.id.partition(".")[2]
                text = f"`{name}` is a trend and stands before the fact `{later}`; causes stand with the most certain first"
                hint = f"move `{name}` below `{later}`"
                self.problems.append(
                    trend.document.problem(trend.where, "trend-first", text, key=True, suggestion=hint)
                )
                return

    def _useless(self, draft: Draft) -> None:
        """A metric or condition of a rule whose causes all have their own would change nothing, or all of them alike."""
        for key in ("metric", "when"):
            entry = draft.entries.get(key)
            if entry is not None and all(key in cause.entries for cause in draft.causes.values()):
                first = next(iter(draft.causes))
                text = f'every cause of "{draft.id}" has a `{key}` of its own, so this one is not used'
                hint = f"write `causes: {{{first}: {{{key}: ...}}}}`, or `causes: null` to have none of them"
                self.problems.append(entry.document.problem(entry.where, "unused-key", text, key=True, suggestion=hint))

    def _cause(self, draft: Draft, cooldown: int | None, applies_if: AppliesIf | None) -> Cause | None:
        """One cause, or None if something is wrong with it."""
        # Every key is looked at even after a mistake: one run of `check` shows all of them.
        before = len(self.problems)
        self._draft = draft
        selector = self._selector()
        condition = self._condition()
        hold = self._read("for", Hold(), parse_hold)
        warmup = self._read("warmup", Span(0), parse_span)
        every, settled = self._read("every", (1, 0), parse_pace)
        severity = Severity.parse(draft.value("severity", "warning"))
        recover = self._recover()
        guards = self._guards()
        actions = self._actions(severity)
        message = self._message(condition)
        self._preview(actions, severity)
        if any(p.severity == "error" for p in self.problems[before:]) or selector is None or condition is None:
            return None
        min_samples = draft.value("min_samples") or condition.min_samples
        return Cause(
            id=draft.id,
            selector=selector,
            condition=condition,
            when=draft.value("when"),
            hold=hold,
            recover=recover,
            warmup=warmup,
            min_samples=0 if min_samples <= 1 else min_samples,
            every=every,
            settled_every=settled,
            cooldown=cooldown,
            only_if=guards,
            phase=draft.value("phase", "any"),
            ranks=draft.value("ranks", "each"),
            severity=severity,
            error_after=self._error_after(severity),
            actions=actions,
            message=message,
            hint=_one_line(draft.words("hint")),
            docs=draft.words("docs"),
            tags=tuple(draft.value("tags", ())),
            kind=Kind.parse(draft.value("kind", "measure")),
            holds_back=tuple(draft.value("holds_back", ())),
            basis=tuple(draft.value("basis", ())),
            applies_if=applies_if,
            mode=draft.value("mode", "act"),
            required=draft.value("required", False),
            preview=draft.value("preview", False),
            origin=draft.document.origin(draft.where, key=True),
            # As `Entry.origin` has it, without 2,500 calls for the recommended rules.
            key_origins={key: entry.document.origin(entry.where, key=True) for key, entry in draft.entries.items()},
        )

    # -- what is watched --------------------------------------------------------------

    def _selector(self) -> Selector | None:
        entry = self._draft.entries.get("metric")
        if entry is None:
            self._missing("metric")
            return None
        excluded = self._draft.value("except", ())
        return self._parse_selector(entry, entry.where, str(entry.value), excluded)

    def _parse_selector(
        self, entry: Entry, where: tuple[str | int, ...], text: str, excluded: Any = ()
    ) -> Selector | None:
        try:
            selector = parse_selector(text, excluded)
        except SelectorError as error:
            self.problems.append(
                entry.document.problem(
                    where, "bad-metric", str(error), offset=error.column or None, suggestion=error.suggestion
                )
            )
            return None
        fault = self.known.fault(selector)
        if fault is not None:
            self.problems.append(entry.document.problem(where, "unknown-metric", fault[0], suggestion=fault[1]))
            return None
        return selector

    # -- when it is bad ---------------------------------------------------------------

    def _condition(self) -> Condition | None:
        entry = self._draft.entries.get("when")
        if entry is None:
            self._missing("when")
            return None
        return self._compile_condition(entry, entry.where, entry.value, parts=True)

    def _compile_condition(
        self, entry: Entry, where: tuple[str | int, ...], written: Any, *, parts: bool
    ) -> Condition | None:
        if isinstance(written, str):
            name, options = written, True
        elif isinstance(written, Mapping) and len(written) == 1:
            name, options = next(iter(written.items()))
            where = (*where, name)
        else:
            return None  # the schema has said so
        kind = self.registry.conditions.get(name)
        if kind is None:
            return None
        rule: dict[str, Any] = {key: self._draft.value(key) for key in FEW_SAMPLES_KEYS}
        if parts:
            rule[PART_COMPILER] = self._part_compiler(entry, where)
        try:
            condition = kind.compile(options, rule)
            if name not in self._fitting:
                must_fit(condition)
                self._fitting.add(name)
            owner = self.registry.owners.get(("conditions", name), BUILTIN)
            return condition if owner == BUILTIN else GuardedCondition(condition, owner, self._draft.id)
        except _PartRefused:
            return None
        except OptionError as error:
            self._option_problem(entry, where, error)
        except BaseException as error:  # a plugin's compiler; ours raise OptionError only
            if passes_on(error):
                raise
            text = f'condition "{name}" could not be prepared: {one_line(describe(error), 150)}'
            self.problems.append(entry.document.problem(where, "condition-failed", text, key=True))
        return None

    def _option_problem(self, entry: Entry, where: tuple[str | int, ...], error: OptionError) -> None:
        if error.rule_key and error.rule_key in self._draft.entries:
            blamed = self._draft.entries[error.rule_key]
            problem = blamed.document.problem(blamed.where, "bad-option", str(error), suggestion=error.suggestion)
        else:
            problem = entry.document.problem(
                (*where, *error.path), "bad-option", str(error), suggestion=error.suggestion
            )
        self.problems.append(problem)

    def _part_compiler(
        self, entry: Entry, where: tuple[str | int, ...]
    ) -> Callable[[Any, int], tuple[Selector | None, Condition]]:
        def compile_part(part: Any, index: int) -> tuple[Selector | None, Condition]:
            at = (*where, index)
            selector = None
            written = part
            if isinstance(part, Mapping) and "metric" in part:
                written = {key: value for key, value in part.items() if key != "metric"}
                selector = self._parse_selector(entry, (*at, "metric"), str(part["metric"]))
                if selector is None:
                    raise _PartRefused
            if isinstance(written, Mapping) and not written:
                raise OptionError("this part names a metric but no condition", index)
            condition = self._compile_condition(entry, at, written, parts=False)
            if condition is None:
                raise _PartRefused
            if condition.absence:
                raise OptionError(f"`{condition.name}` is judged by the clock and cannot be combined", index)
            return selector, condition

        return compile_part

    def _recover(self) -> Any:
        entry = self._draft.entries.get("recover")
        return None if entry is None else self._comparator(entry, entry.where, entry.value)

    def _comparator(self, entry: Entry, where: tuple[str | int, ...], written: Any) -> Any:
        try:
            found = comparator_in(written) if isinstance(written, Mapping) else ("equals", _number(written))
            if found is None:
                return None
            return Threshold(*found)
        except QuantityError as error:
            self.problems.append(entry.document.problem(where, "bad-value", str(error)))
            return None

    def _guards(self) -> tuple[Guard, ...]:
        entry = self._draft.entries.get("only_if")
        guards = []
        for metric, written in (entry.value if entry is not None else {}).items():
            assert entry is not None
            where = (*entry.where, metric)
            if not self.known.has(metric):
                text, hint = self.known.unknown(metric)
                self.problems.append(entry.document.problem(where, "unknown-metric", text, key=True, suggestion=hint))
                continue
            test = ABSENT if written == ABSENT.text else self._comparator(entry, where, written)
            if test is not None:
                guards.append(Guard(metric, test))
        return tuple(guards)

    # -- how long, how often ----------------------------------------------------------

    def _read(self, key: str, default: Any, parse: Callable[[Any], Any]) -> Any:
        entry = self._draft.entries.get(key)
        if entry is None:
            return default
        try:
            return parse(entry.value)
        except QuantityError as error:
            self.problems.append(entry.document.problem(entry.where, "bad-value", str(error)))
            return default

    def _steps(self, key: str, default: int | None, *, least: int) -> int | None:
        def parse(value: Any) -> int:
            span = parse_span(value)
            if span.unit != "steps":
                raise QuantityError(f"`{key}` counts steps; write for instance {key}: 100")
            if span.amount < least:
                raise QuantityError(f"`{key}` must be at least {least}")
            return int(span.amount)

        found: int | None = self._read(key, default, parse)
        return found

    # -- what then --------------------------------------------------------------------

    def _error_after(self, severity: Severity) -> int:
        """Samples. None for a note, nor where a nearer file has a say about the severity: it is as it says there."""
        entry, said = self._draft.entries.get("error_after"), self._draft.entries.get("severity")
        if (
            entry is None
            or severity is Severity.INFO
            or (said is not None and (said.rank, said.turn) > (entry.rank, entry.turn))
        ):
            return 0
        return int(entry.value)

    def _actions(self, severity: Severity) -> tuple[ActionSpec, ...]:
        entry = self._draft.entries.get("then")
        if entry is None:
            return (ActionSpec("note" if severity is Severity.INFO else "warn", stage="observe"),)
        specs = []
        for item in entry.value:
            name, options = (item, None) if isinstance(item, str) else next(iter(item.items()), ("", None))
            own = dict(options or {})
            after = own.pop("after", 1)
            action = self.registry.actions.get(str(name))
            specs.append(ActionSpec(str(name), own, after, action.stage if action is not None else ""))
        return tuple(specs)

    def _message(self, condition: Condition | None) -> Any:
        entry = self._draft.entries.get("message")
        if entry is None:
            sentence = condition.sentence if condition else ""
            return default_message(sentence, judges_nonfinite=bool(condition and condition.judges_nonfinite))
        try:
            return Template(str(entry.value), secrets=not entry.document.shipped)
        except TemplateError as error:
            self.problems.append(
                entry.document.problem(
                    entry.where,
                    "bad-message",
                    str(error),
                    offset=error.column,
                    width=error.width,
                    suggestion=error.suggestion,
                )
            )
            return None

    def _preview(self, actions: tuple[ActionSpec, ...], severity: Severity) -> None:
        preview = self._draft.entries.get("preview")
        if preview is None or not preview.value:
            return
        for key, wrong in (("then", any(a.name == "stop" for a in actions)), ("severity", severity > Severity.INFO)):
            entry = self._draft.entries.get(key)
            mine = entry is not None and entry.rank >= 2 and preview.rank < 2
            if wrong and not mine:
                blamed = entry or preview
                text = "a preview rule never stops a run" if key == "then" else "a preview rule has severity info"
                self.problems.append(blamed.document.problem(blamed.where, "preview", text))

    def _missing(self, key: str) -> None:
        draft = self._draft
        if draft.document.broken_within(draft.where):
            return  # the key may be there, in a line that is reported already
        self.problems.append(
            draft.document.problem(draft.where, "missing-key", f'rule "{draft.id}" needs `{key}`', key=True)
        )


def _applies_if(written: Any) -> AppliesIf | None:
    if not isinstance(written, Mapping):
        return None
    return AppliesIf(
        metrics=tuple(written.get("metrics", ())),
        optimizers=int(written.get("optimizers", 0)),
        ranks=int(written.get("ranks", 0)),
        adapters=written.get("adapters") is True,
        router=written.get("router") is True,
    )


class _PartRefused(Exception):
    """A part of ``all`` or ``any`` is wrong and already reported."""


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def _one_line(text: str) -> str:
    return " ".join(str(text).split())


# --------------------------------------------------------------------------- the value of `metric:`


MAX_LENGTH = 300
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./:-]*")
_LABEL = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*", re.DOTALL)


class SelectorError(ValueError):
    """A metric cannot be read; ``column`` counts characters from 0."""

    def __init__(self, message: str, column: int = 0, *, suggestion: str = "") -> None:
        super().__init__(message)
        self.column = column
        self.suggestion = suggestion


def parse_selector(text: str, excluded: Sequence[str] = ()) -> Selector:
    """Raises ``SelectorError``: no name, a bracket that is not closed, an empty glob."""
    if len(text) > MAX_LENGTH:
        raise SelectorError(f"a metric has at most {MAX_LENGTH} characters")
    name, bracket, rest = text.strip().partition("[")
    if not _NAME.fullmatch(name):
        if any(c in name for c in "*?"):
            raise SelectorError(
                "a glob goes in brackets, after the name of the family", suggestion="write for instance grad_norm[*]"
            )
        if any(c in name for c in "+(<>=") or " " in name.strip():
            raise SelectorError(
                f'"{one_line(name)}" is not the name of a metric',
                suggestion="give a formula a name in the `metrics:` block",
            )
        raise SelectorError(f'"{one_line(text)}" is not the name of a metric')
    if not bracket:
        if excluded:
            raise SelectorError(f"`except` only makes sense for a family; write {name}[*]")
        return Selector(name)
    if not rest.endswith("]"):
        raise SelectorError("the bracket is never closed", len(name))
    inner = rest[:-1]
    globs: list[tuple[str, str]] = []
    for part in _split(inner):
        labelled = _LABEL.fullmatch(part)
        label, glob = (labelled[1], labelled[2]) if labelled else ("", part.strip())
        if not glob:
            raise SelectorError("an empty glob matches nothing; write `*` for all", len(name) + 1)
        if any(label == known for known, _ in globs):
            raise SelectorError(
                f'the label "{label}" is given twice' if label else "one glob for the family is enough", len(name) + 1
            )
        globs.append((label, glob))
    return Selector(name, tuple(globs), tuple(excluded))


def _split(inner: str) -> Iterable[str]:
    """At commas outside of ``[...]`` character classes."""
    depth, start = 0, 0
    for at, character in enumerate(inner):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth <= 0:
            yield inner[start:at]
            start = at + 1
    yield inner[start:]
