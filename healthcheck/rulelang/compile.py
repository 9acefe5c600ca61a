"""Rule files -> a :class:`~healthcheck.rulelang.rule.RuleSet`. The door of this package.

Two stages, reported together: shape (JSON Schema) and meaning (metrics, rule ids, conditions,
formulas, messages, cycles). All mistakes of all files come at once, as one ``RuleFileError``.
"""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

from healthcheck.core.errors import Problem, RuleFileError
from healthcheck.core.setting import SettingError
from healthcheck.core.text import one_line, suggest
from healthcheck.extend.registry import Registry
from healthcheck.rulelang import lint
from healthcheck.rulelang.document import Document
from healthcheck.rulelang.formulas import check_formulas, compile_formulas
from healthcheck.rulelang.known import KnownMetrics
from healthcheck.rulelang.merge import SUGGESTIONS, Draft, Merged, Merger
from healthcheck.rulelang.overrides import apply_set, file_mutes, flag_mutes, no_such, switched_off
from healthcheck.rulelang.problems import ENOUGH, ordered
from healthcheck.rulelang.rule import Origin, Rule, RuleSet
from healthcheck.rulelang.rulecompiler import RuleCompiler
from healthcheck.rulelang.schema import RULE_ONLY, RuleFormat
from healthcheck.rulelang.settings import parse_setting
from healthcheck.rulelang.sources import Joining, collect
from healthcheck.rulelang.validation import Validator

P = ParamSpec("P")


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
        """The problems that keep the rules from being used."""
        return [p for p in self.problems if p.severity == "error"]


UNKNOWABLE = frozenset(("unknown-rule", "unknown-profile"))
"""What nobody can say while a file or pack that is extended is missing or broken: it may define the rule."""


def _or_raise(load: Callable[P, Loaded]) -> Callable[P, RuleSet]:
    @functools.wraps(load)
    def load_rules(*sources: P.args, **choice: P.kwargs) -> RuleSet:
        loaded = load(*sources, **choice)
        if loaded.errors:
            raise RuleFileError(loaded.errors)
        return loaded.ruleset

    return load_rules


def load_all(
    sources: Any,
    *,
    registry: Registry,
    profile: str | None = None,
    off: Iterable[str] = (),
    only: Iterable[str] = (),
    set: Iterable[str] = (),
    mute: Iterable[str] = (),
    known_metrics: Iterable[str] | None = None,
    force: bool = False,
    joining: Iterable[Joining] = (),
) -> Loaded:
    """Compile rules from paths, pack names, YAML texts and dicts, later ones over earlier ones.

    :param sources: one source or a list of them.
    :param registry: conditions, actions, probes and packs that exist (``plugin_host().registry``).
    :param profile: profile to apply; None for the one that ``settings: {profile: ...}`` names.
    :param off: ids (or globs) of rules, or of causes as ``rule.cause``, not to judge; ``only``: to judge no others.
    :param set: ``ID.key=value`` changes of one leaf.
    :param mute: ``ID@12000..12500`` or ``ID@...:reason``; rules for NaN need ``force``.
    :param known_metrics: further metric names that rules may use.
    :param joining: layers of rules that join these: what people wrote in two layers must not contradict each other.

    Raises nothing for mistakes: errors and warnings of all files are in ``Loaded.problems``.
    """
    if isinstance(sources, (str, Path, Mapping)):
        sources = [sources]
    only = list(only)
    collected = collect(sources, registry, joining)
    documents, problems = collected.documents, collected.problems
    shape = Validator(RuleFormat(registry))
    for document in documents:
        problems += shape.check(document)
    merger = Merger(shape.is_bad)
    profile = profile or _default_profile(documents)
    merged = merger.merge((d for d in documents if not shape.is_hopeless(d)), profile)
    problems += merged.problems
    _check_profile(profile, merged, documents, problems)
    # A changed key is one of a small document of its own, so that it is checked and placed like a written one.
    for document in apply_set(set, merged.rules, problems):
        problems += shape.check(document)
    settings, origins = _settings(merged, registry, problems)
    derived, external = compile_formulas(merged, problems, registry)
    known = KnownMetrics(registry, known_metrics, merged.metrics, external)
    check_formulas(derived, merged, known, problems)
    for pattern in only:
        for rule_id in fnmatch.filter(merged.rules, pattern.partition(".")[0]):
            merged.rules[rule_id].named = True
    gone = switched_off(merged.rules, off, only, problems)
    excused = lambda draft: collected.incomplete or _refused(draft, shape)  # noqa: E731
    compiler = RuleCompiler(registry, known, problems, excused)
    rules = _rules(merged, gone, compiler, problems)
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
        off=_shown_off(gone),
        write=functools.partial(effective_text, merged, gone),
    )
    if collected.incomplete:  # the missing file is the mistake; what follows from it would only bury it
        problems = [p for p in problems if p.slug not in UNKNOWABLE]
    if not any(p.severity == "error" for p in problems):
        problems += lint.warnings(ruleset, merged, registry)
        if not merged.rules and documents:
            problems.append(documents[-1].problem((), "no-rules", "there are no rules in it", severity="warning"))
    problems = ordered(problems, (document.path for document in documents))
    ruleset.warnings = [p for p in problems if p.severity != "error"]
    return Loaded(ruleset, problems, merged, documents)


load_rules = _or_raise(load_all)
"""Like :func:`load_all`, for who only wants the rules. Raises ``RuleFileError`` with all problems of all files.
Warnings are in ``RuleSet.warnings``."""


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
                f"--profile {one_line(profile)}",
                0,
                0,
                "unknown-profile",
                f'there is no profile "{one_line(profile)}"',
                suggestion=hint,
            )
        )


def _settings(merged: Merged, registry: Registry, problems: list[Problem]) -> tuple[dict[str, Any], dict[str, Origin]]:
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name, entry in merged.settings.items():
        try:
            if entry.value is not None:
                values[name] = parse_setting(name, entry.value, registry.settings)
                origins[name] = entry.origin
        except SettingError as error:
            problems.append(entry.document.problem(entry.where, "bad-setting", str(error)))
    return values, origins


def _rules(merged: Merged, gone: Sequence[str], compiler: RuleCompiler, problems: list[Problem]) -> list[Rule]:
    """All rules compiled."""
    rules: list[Rule] = []
    for draft in merged.rules.values():
        if len(problems) > 2 * ENOUGH:
            break
        rule = compiler.compile(draft, gone)  # rules that are off too: they may be switched on for one run
        if rule is not None and rule.id not in gone:
            rules.append(rule)
    check_explains(merged, problems)
    return rules


def _shown_off(gone: Sequence[str]) -> list[str]:
    """Rules that are off, and single causes that are: not all causes of a rule that is."""
    return [name for name in gone if "." not in name or name.partition(".")[0] not in gone]


def _refused(draft: Draft, shape: Validator) -> bool:
    """Whether something of this rule was refused for its shape."""
    drafts = [draft, *draft.causes.values()]
    places = [place for d in drafts for place in [(d.document, d.where), *((e.document, e.where) for e in d.touched)]]
    return any(shape.is_bad(document, where) for document, where in places)


WORDS = {"message", "hint", "docs"}
"""Keys of a rule that are for people."""


def effective_text(merged: Merged, gone: Iterable[str]) -> str:
    """The effective rules as one file that can be loaded again. JSON, which is YAML."""
    off = {*gone}
    rules: dict[str, Any] = {}
    for rule_id, draft in merged.rules.items():
        body = _written(draft, rule_id in off)
        if draft.causes:
            # Each with all its keys: which of them the rule gave, and which won, is settled here.
            body["causes"] = {
                name: _written(draft.part(cause), f"{rule_id}.{name}" in off and rule_id not in off, RULE_ONLY)
                for name, cause in draft.causes.items()
            }
        rules[rule_id] = body
    whole: dict[str, Any] = {"version": 1}
    if merged.metrics:
        whole["metrics"] = {name: entry.value for name, entry in merged.metrics.items()}
    if merged.external:
        whole["external"] = [entry.value for entry in merged.external]
    whole["rules"] = rules
    if merged.mutes:
        whole["mute"] = [entry.value for entry in merged.mutes]
    return json.dumps(whole, indent=1, ensure_ascii=False, default=str)


def _written(draft: Draft, off: bool, without: Iterable[str] = ()) -> dict[str, Any]:
    body = {key: entry.value for key, entry in draft.entries.items() if key != "enabled" and key not in without}
    for key in WORDS & body.keys():
        body[key] = draft.words(key)
    return {**body, "enabled": False} if off else body


# --------------------------------------------------------------------------- the key `explains`


def check_explains(merged: Merged, problems: list[Problem]) -> None:
    """Known rules and causes only, never itself, never in a circle."""
    graph: dict[str, list[str]] = {}
    unknown = 0
    for draft in merged.rules.values():
        entry = draft.entries.get("explains")
        for i, other in enumerate(entry.value if entry is not None else ()):
            assert entry is not None
            where = (*entry.where, i)
            rule_id, _, cause = str(other).partition(".")
            if rule_id == draft.id:
                problems.append(entry.document.problem(where, "explains-itself", "a rule cannot explain itself"))
            elif rule_id not in merged.rules or (cause and cause not in merged.rules[rule_id].causes):
                unknown += 1
                if unknown < SUGGESTIONS:
                    problems.append(no_such(entry.document, where, str(other), merged.rules))
            else:
                graph.setdefault(draft.id, []).append(rule_id)
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
