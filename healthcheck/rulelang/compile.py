"""Rule files -> a :class:`~healthcheck.rulelang.rule.RuleSet`. The door of this package.

Two stages, reported together: shape (JSON Schema) and meaning (metrics, rule ids, conditions,
formulas, messages, cycles). All mistakes of all files come at once, as one ``RuleFileError``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.dispatch import suggest
from healthcheck.errors import Problem, RuleFileError
from healthcheck.registry import Registry
from healthcheck.rulelang import lint
from healthcheck.rulelang.arithmetic import Formula, FormulaError, parse_formula
from healthcheck.rulelang.known import KnownMetrics, rule_hint
from healthcheck.rulelang.loader import Document, KeyPath
from healthcheck.rulelang.merge import Draft, Entry, Merged, Merger
from healthcheck.rulelang.overrides import apply_set, file_mutes, flag_mutes, switched_off
from healthcheck.rulelang.problems import ordered, schema_problems
from healthcheck.rulelang.quantities import shorten
from healthcheck.rulelang.rule import Derived, Origin, Rule, RuleSet
from healthcheck.rulelang.rulecompiler import RuleCompiler
from healthcheck.rulelang.schema import build_schema
from healthcheck.rulelang.settings import SettingError, parse_setting
from healthcheck.rulelang.sources import collect

RECOVERY_PASSES = 4


@dataclass(slots=True)
class Loaded:
    """Everything that loading found out; commands show more of it than a run needs."""

    ruleset: RuleSet
    problems: list[Problem]
    """Errors and warnings, by place."""
    merged: Merged
    documents: list[Document]

    @property
    def errors(self) -> list[Problem]:
        return [p for p in self.problems if p.severity == "error"]


def load_rules(
    sources: Sequence[Any],
    *,
    registry: Registry,
    profile: str | None = None,
    off: Iterable[str] = (),
    only: Iterable[str] = (),
    set: Iterable[str] = (),
    mute: Iterable[str] = (),
    known_metrics: Iterable[str] | None = None,
    force: bool = False,
) -> RuleSet:
    """Compile rules from paths, pack names, YAML texts and dicts, later ones over earlier ones.

    :param registry: conditions, actions, probes and packs that exist (``plugin_host().registry``).
    :param profile: profile to apply; None for the one that ``settings: {profile: ...}`` names.
    :param off: ids (or globs) of rules not to judge; ``only``: to judge no others.
    :param set: ``ID.key=value`` changes of one leaf.
    :param mute: ``ID@12000..12500`` or ``ID@...:reason``; rules for NaN need ``force``.
    :param known_metrics: further metric names that rules may use.

    Raises ``RuleFileError`` with all problems of all files. Warnings are in ``RuleSet.warnings``.
    """
    loaded = load_all(
        sources,
        registry=registry,
        profile=profile,
        off=off,
        only=only,
        set=set,
        mute=mute,
        known_metrics=known_metrics,
        force=force,
    )
    if loaded.errors:
        raise RuleFileError(loaded.errors)
    return loaded.ruleset


def load_all(
    sources: Sequence[Any],
    *,
    registry: Registry,
    profile: str | None = None,
    off: Iterable[str] = (),
    only: Iterable[str] = (),
    set: Iterable[str] = (),
    mute: Iterable[str] = (),
    known_metrics: Iterable[str] | None = None,
    force: bool = False,
) -> Loaded:
    """Like :func:`load_rules`, without raising: problems are in the result."""
    documents, problems = collect(sources, registry)
    shape = _Shape(registry)
    for document in documents:
        shape.check(document)
    merger = Merger(shape.is_bad)
    profile = profile or _default_profile(documents)
    merged = merger.merge(documents, profile)
    problems += shape.problems + merged.problems
    _check_profile(profile, merged, documents, problems)
    for document in apply_set(set, merged.rules, problems):
        problems += shape.check(document)
    settings, origins = _settings(merged, problems)
    derived, external = _metrics(merged, problems, registry, known_metrics)
    known = KnownMetrics(registry, known_metrics, merged.metrics, external)
    _check_formulas(derived, merged, known, problems)
    gone = switched_off(merged.rules, off, only, problems)
    rules = _rules(merged, gone, RuleCompiler(registry, known, problems), shape, problems)
    mutes = file_mutes(merged.mutes, merged.rules, force, problems) + flag_mutes(mute, merged.rules, force, problems)
    ruleset = RuleSet(
        rules=rules,
        derived=list(derived),
        external=frozenset(external),
        mutes=mutes,
        settings=settings,
        setting_origins=origins,
        source=documents[-1].path if documents else "",
        profile=profile or "",
        off=gone,
        text=effective_text(merged, gone),
    )
    if not any(p.severity == "error" for p in problems):
        problems += lint.warnings(ruleset, merged)
        if not merged.rules and documents:
            problems.append(documents[-1].problem((), "no-rules", "there are no rules in it", severity="warning"))
    problems = ordered(problems)
    ruleset.warnings = [p for p in problems if p.severity != "error"]
    return Loaded(ruleset, problems, merged, documents)


class _Shape:
    """The schema stage: what it refused is not looked at again."""

    def __init__(self, registry: Registry) -> None:
        from jsonschema import Draft7Validator

        self.validator = Draft7Validator(build_schema(registry))
        self.problems: list[Problem] = []
        self._bad: dict[int, list[KeyPath]] = {}

    def check(self, document: Document) -> list[Problem]:
        found: list[Problem] = []
        if document.data is None and document.problems:
            return found
        if not isinstance(document.data, Mapping):
            what = "empty" if document.data is None else "not a map of keys"
            found.append(document.problem((), "bad-value", f"the file is {what}", suggestion="begin with `version: 1`"))
        elif isinstance(document.data.get("rules"), list):
            found.append(
                document.problem(
                    ("rules",),
                    "bad-value",
                    "`rules` is a map from rule id to rule, not a list",
                    suggestion="write `loss-spike: {metric: ...}` without dashes",
                )
            )
            self._bad[id(document)] = [("rules",)]
        else:
            found += self._passes(document)
        self.problems += found
        return found

    def _passes(self, document: Document) -> list[Problem]:
        """Validate; where a key is surely meant as another, report it, rename it and look again.

        So that a file written in another tool's words shows all its mistakes, not only the words.
        """
        found: dict[tuple[str, int, int, str], Problem] = {}
        for _ in range(RECOVERY_PASSES):
            errors = list(self.validator.iter_errors(document.data))
            translated = schema_problems(document, errors)
            for problem, _, _ in translated:
                found.setdefault((problem.path, problem.line, problem.column, problem.message), problem)
            renames = [(where, *rename) for _, where, rename in translated if rename is not None]
            if not renames:
                break
            for where, old, new in renames:
                document.rename(where, old, new)
        else:
            errors = list(self.validator.iter_errors(document.data))
        bad = self._bad.setdefault(id(document), [])
        for error in errors:
            path = tuple(error.absolute_path)
            if error.validator == "additionalProperties":
                bad.extend((*path, key) for key in error.instance if key not in error.schema.get("properties", {}))
            elif path or error.validator != "required":
                bad.append(path)
        return list(found.values())

    def is_bad(self, document: Document, where: KeyPath) -> bool:
        """Whether the schema refused this value or something inside it."""
        return any(bad[: len(where)] == where for bad in self._bad.get(id(document), ()))

    def touches(self, draft: Draft) -> bool:
        """Whether something of this rule was refused."""
        places = [(draft.document, draft.where), *((e.document, e.where) for e in draft.touched)]
        return any(self.is_bad(document, where) for document, where in places)


def _default_profile(documents: Iterable[Document]) -> str | None:
    profile = None
    for document in documents:
        settings = document.data.get("settings") if isinstance(document.data, Mapping) else None
        if isinstance(settings, Mapping) and isinstance(settings.get("profile"), str):
            profile = settings["profile"]
    return profile or None


def _check_profile(profile: str | None, merged: Merged, documents: list[Document], problems: list[Problem]) -> None:
    if profile and profile not in merged.profiles and documents:
        known = list(merged.profiles)
        hint = suggest(profile, known) or (f"there are {', '.join(known)}" if known else "no file here has profiles")
        problems.append(
            Problem(
                f"--profile {shorten(profile)}",
                0,
                0,
                "unknown-profile",
                f'there is no profile "{shorten(profile)}"',
                suggestion=hint,
            )
        )


def _settings(merged: Merged, problems: list[Problem]) -> tuple[dict[str, Any], dict[str, Origin]]:
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name, entry in merged.settings.items():
        try:
            if entry.value is not None:
                values[name] = parse_setting(name, entry.value)
                origins[name] = entry.origin
        except SettingError as error:
            problems.append(entry.document.problem(entry.where, "bad-setting", str(error)))
    return values, origins


def _metrics(
    merged: Merged, problems: list[Problem], registry: Registry, extra: Iterable[str] | None
) -> tuple[list[Derived], list[str]]:
    """Compiled formulas in an order in which each comes after those it uses; external names."""
    external = [str(entry.value) for entry in merged.external]
    formulas: dict[str, Formula] = {}
    for name, entry in merged.metrics.items():
        if name in registry.metrics:
            problems.append(
                entry.document.problem(
                    entry.where, "metric-exists", f'a probe provides "{name}" already; choose another name', key=True
                )
            )
            continue
        try:
            formulas[name] = parse_formula(name, str(entry.value), entry.origin)
        except FormulaError as error:
            problems.append(
                entry.document.problem(
                    entry.where,
                    error.slug,
                    str(error),
                    offset=error.column,
                    width=error.width,
                    suggestion=error.suggestion,
                )
            )
    return _sorted_formulas(formulas, merged.metrics, problems), external


def _sorted_formulas(
    formulas: dict[str, Formula], entries: Mapping[str, Entry], problems: list[Problem]
) -> list[Derived]:
    done: dict[str, Formula] = {}
    state: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if state.get(name) == 2 or name not in formulas:
            return
        if state.get(name) == 1:
            ring = " -> ".join([*path[path.index(name) :], name])
            entry = entries[name]
            problems.append(
                entry.document.problem(entry.where, "metric-cycle", f"this formula needs itself: {ring}", key=True)
            )
            return
        state[name] = 1
        for used in formulas[name].inputs:
            visit(used, (*path, name))
        state[name] = 2
        done[name] = formulas[name]

    if len(formulas) > 500:
        entry = next(iter(entries.values()))
        problems.append(
            entry.document.problem(("metrics",), "too-many-metrics", f"{len(formulas)} formulas; at most 500", key=True)
        )
        return []
    for name in formulas:
        visit(name, ())
    return list(done.values())


def _check_formulas(derived: Sequence[Derived], merged: Merged, known: KnownMetrics, problems: list[Problem]) -> None:
    for formula in derived:
        entry = merged.metrics[formula.name]
        for use in getattr(formula, "uses", ()):
            if not known.has(use.name):
                text, hint = known.unknown(use.name)
                problems.append(
                    entry.document.problem(
                        entry.where, "unknown-metric", text, offset=use.column, width=len(use.name), suggestion=hint
                    )
                )


def _rules(
    merged: Merged, gone: Sequence[str], compiler: RuleCompiler, shape: _Shape, problems: list[Problem]
) -> list[Rule]:
    """All rules compiled (also those switched off, so that a typo in them is found)."""
    rules: list[Rule] = []
    for draft in merged.rules.values():
        if shape.touches(draft) and ("metric" not in draft.entries or "when" not in draft.entries):
            continue
        rule = compiler.compile(draft)
        if rule is not None and rule.id not in gone:
            rules.append(rule)
    _check_explains(merged, problems)
    return rules


def _check_explains(merged: Merged, problems: list[Problem]) -> None:
    graph: dict[str, list[str]] = {}
    for draft in merged.rules.values():
        entry = draft.entries.get("explains")
        for i, other in enumerate(entry.value if entry is not None else ()):
            assert entry is not None
            where = (*entry.where, i)
            if other == draft.id:
                problems.append(entry.document.problem(where, "explains-itself", "a rule cannot explain itself"))
            elif other not in merged.rules:
                text, hint = f'"{shorten(other)}" is not a rule', rule_hint(other, merged.rules)
                problems.append(entry.document.problem(where, "unknown-rule", text, suggestion=hint))
            else:
                graph.setdefault(draft.id, []).append(other)
    for ring in _rings(graph):
        entry = merged.rules[ring[0]].entries["explains"]
        text = f"rules explain each other in a circle: {' -> '.join([*ring, ring[0]])}"
        problems.append(entry.document.problem(entry.where, "explains-cycle", text))


def _rings(graph: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """One ring per cycle found, by depth-first search without recursion."""
    rings: list[list[str]] = []
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        stack: list[tuple[str, int]] = [(start, 0)]
        while stack:
            node, depth = stack.pop()
            del path[depth:]
            if node in path:
                rings.append(path[path.index(node) :])
                continue
            if node in done:
                continue
            path.append(node)
            following = graph.get(node, ())
            if following:
                stack.extend((other, depth + 1) for other in following)
        done.update(path)
        done.add(start)
    unique = {frozenset(ring): ring for ring in rings}
    return list(unique.values())


def effective_text(merged: Merged, gone: Iterable[str]) -> str:
    """The effective rules as one file that can be loaded again. JSON, which is YAML."""
    off = {*gone}
    rules: dict[str, Any] = {}
    for rule_id, draft in merged.rules.items():
        body = {key: entry.value for key, entry in draft.entries.items() if key != "enabled"}
        rules[rule_id] = {**body, "enabled": False} if rule_id in off else body
    whole: dict[str, Any] = {"version": 1}
    if merged.metrics:
        whole["metrics"] = {name: entry.value for name, entry in merged.metrics.items()}
    if merged.external:
        whole["external"] = [entry.value for entry in merged.external]
    whole["rules"] = rules
    if merged.mutes:
        whole["mute"] = [entry.value for entry in merged.mutes]
    return json.dumps(whole, indent=1, ensure_ascii=False, default=str)
