"""``--set``, ``--off``, ``--only``, ``--mute``: what the command line changes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from healthcheck.core.errors import Problem
from healthcheck.core.text import one_line
from healthcheck.rulelang.document import Document
from healthcheck.rulelang.known import rule_hint
from healthcheck.rulelang.loader import load_text
from healthcheck.rulelang.merge import Draft, Entry
from healthcheck.rulelang.quantities import QuantityError, parse_steps
from healthcheck.rulelang.rule import Mute, named

RANK = 4
"""Above every file (see :class:`~healthcheck.rulelang.merge.Entry`)."""


def apply_set(texts: Iterable[str], rules: dict[str, Draft], problems: list[Problem]) -> list[Document]:
    """``ID.key=value`` changes one leaf by its path, last wins. Returns what the schema must still check."""
    documents = []
    for text in texts:
        document = Document(f"--set {one_line(text)}")
        path, equals, written = text.partition("=")
        rule_id, dot, rest = path.strip().partition(".")
        if not equals or not dot or not rest:
            problems.append(
                document.problem((), "usage", "expected RULE.key=value, such as loss-spike.when.robust_z.above=12")
            )
            continue
        rule = draft = rules.get(rule_id)
        if rule is None or draft is None:
            problems.append(
                document.problem((), "unknown-rule", f'"{rule_id}" is not a rule', suggestion=rule_hint(rule_id, rules))
            )
            continue
        parsed = load_text(f"value: {written.strip() or 'null'}")  # as in a file: 1e-3 is a number, off is text
        if parsed.problems:
            problems.append(document.problem((), "usage", f"the value cannot be read: {parsed.problems[0].message}"))
            continue
        key, *inner = rest.split(".")
        value = parsed.data["value"]
        where: tuple[str, ...] = ("rules", rule_id)
        if key in rule.causes:  # `rule.cause.key`, as causes are named everywhere else
            key, inner = "causes", [key, *inner]
        if key == "causes" and inner:
            name, *inner = inner
            draft = rule.causes.get(name)
            if draft is None:
                text, hint = f'"{name}" is not a cause of "{rule_id}"', rule_hint(name, rule.causes)
                problems.append(document.problem((), "unknown-cause", text, suggestion=hint))
                continue
            if not inner:
                problems.append(document.problem((), "usage", f"expected {rule_id}.causes.{name}.key=value"))
                continue
            key, *inner = inner
            where = (*where, "causes", name)
            if inner and key not in draft.entries and key in rule.entries:  # a leaf of what the rule says for all
                draft.entries[key] = rule.entries[key]
        if inner:
            value = _changed(draft, key, inner, value, document, problems)
            if value is _REFUSED:
                continue
        data: Any = {key: value}
        for part in reversed(where):
            data = {part: data}
        document.data = {"version": 1, **data}
        documents.append(document)
        if value is None:
            draft.entries.pop(key, None)
        else:
            draft.entries[key] = Entry(value, document, (*where, key), RANK)
    return documents


_REFUSED = object()


def _changed(draft: Draft, key: str, inner: list[str], value: Any, document: Document, problems: list[Problem]) -> Any:
    whole = copy.deepcopy(draft.value(key))  # the document that it came from keeps what it says
    at = whole
    done = key
    for part in inner[:-1]:
        following = _step(at, part)
        if not isinstance(following, (dict, list)):
            hint = rule_hint(part, dict.fromkeys(map(str, at))) if isinstance(at, dict) else ""
            problems.append(
                document.problem((), "usage", f'"{draft.id}.{done}" has no "{part}" to change', suggestion=hint)
            )
            return _REFUSED
        at, done = following, f"{done}.{part}"
    last = inner[-1]
    if isinstance(at, dict):
        at[last] = value
    elif isinstance(at, list) and last.isdigit() and int(last) < len(at):
        at[int(last)] = value
    else:
        problems.append(document.problem((), "usage", f'"{draft.id}.{done}" has no "{last}" to change'))
        return _REFUSED
    return whole


def _step(at: Any, part: str) -> Any:
    if isinstance(at, dict):
        return at.get(part)
    if isinstance(at, list) and part.isdigit() and int(part) < len(at):
        return at[int(part)]
    return None


def switched_off(
    rules: dict[str, Draft], off: Iterable[str], only: Iterable[str], problems: list[Problem]
) -> list[str]:
    """What is not to be judged, rules and causes (``rule.cause``): ``off`` in a file, ``--off``, all but ``--only``.

    All causes of a rule that is off are in the result; a rule all of whose causes are off is, too.
    """
    names = all_names(rules)
    gone: set[str] = set()
    gone.update(part.id for draft in rules.values() for part in draft.parts if part.value("enabled") is False)
    wanted: set[str] = set()
    only = list(only)
    for flag, patterns, target in (("--off", off, gone), ("--only", only, wanted)):
        for pattern in patterns:
            hits = [name for name in names if named(pattern, name)]
            if not hits:
                where = Document(f"{flag} {one_line(pattern)}")
                problems.append(no_such(where, (), pattern, rules))
            target.update(hits)
    if only:  # naming a rule exactly switches it on even if a file has it off; a glob does not
        gone = {name for name in names if name not in wanted} | {n for n in gone if not _exactly(n, only)}
    whole = [i for i, draft in rules.items() if draft.causes and all(f"{i}.{c}" in gone for c in draft.causes)]
    gone.update(whole)
    return [name for i, draft in rules.items() for name in (i, *(f"{i}.{c}" for c in draft.causes)) if name in gone]


def all_names(rules: dict[str, Draft]) -> list[str]:
    """Every cause as it is named outside of its rule; a rule that is its own only cause by its id."""
    return [part.id for draft in rules.values() for part in draft.parts]


def _exactly(name: str, only: Iterable[str]) -> bool:
    return name in only or name.partition(".")[0] in only


def no_such(document: Document, where: tuple[str | int, ...], name: str, rules: dict[str, Draft]) -> Problem:
    """Neither a rule nor a cause."""
    rule_id, _, cause = name.partition(".")
    if cause and rule_id in rules:
        causes = rules[rule_id].causes
        hint = rule_hint(cause, causes) if causes else f"`{rule_id}` is its own only cause"
        return document.problem(
            where, "unknown-cause", f'"{one_line(cause)}" is not a cause of "{rule_id}"', suggestion=hint
        )
    owners = [rule for rule, draft in rules.items() if name in draft.causes]
    hint = f'did you mean "{owners[0]}.{name}"?' if owners else rule_hint(name, rules)
    return document.problem(where, "unknown-rule", f'"{one_line(name)}" is not a rule', suggestion=hint)


def file_mutes(
    entries: Iterable[Entry], rules: dict[str, Draft], force_all: bool, problems: list[Problem]
) -> list[Mute]:
    """The ``mute:`` blocks of all files."""
    mutes = []
    for entry in entries:
        written = entry.value
        if not isinstance(written, dict) or not isinstance(written.get("rule"), str):
            continue
        try:
            first, last = parse_steps(written["steps"]) if "steps" in written else (0, None)
        except QuantityError as error:
            problems.append(entry.document.problem((*entry.where, "steps"), "bad-value", str(error)))
            continue
        origin = entry.document.origin(entry.where)
        mute = Mute(written["rule"], str(written.get("reason", "")), first, last, origin)
        if _mutable(
            mute, rules, entry.document, (*entry.where, "rule"), force_all or written.get("force") is True, problems
        ):
            mutes.append(mute)
    return mutes


def flag_mutes(texts: Iterable[str], rules: dict[str, Draft], force: bool, problems: list[Problem]) -> list[Mute]:
    """``--mute ID``, ``--mute ID@12000..12500``, either with ``:reason`` at the end."""
    mutes = []
    for text in texts:
        document = Document(f"--mute {one_line(text)}")
        head, _, reason = text.partition(":")
        rule_id, at, span = head.partition("@")
        try:
            first, last = parse_steps(span) if at else (0, None)
        except QuantityError as error:
            problems.append(document.problem((), "usage", str(error)))
            continue
        mute = Mute(rule_id.strip(), reason.strip() or "muted on the command line", first, last)
        if _mutable(mute, rules, document, (), force, problems):
            mutes.append(mute)
    return mutes


def _mutable(
    mute: Mute,
    rules: dict[str, Draft],
    document: Document,
    where: tuple[str | int, ...],
    force: bool,
    problems: list[Problem],
) -> bool:
    hits = [part for draft in rules.values() for part in draft.parts if named(mute.rule, part.id)]
    if not hits:
        problems.append(no_such(document, where, mute.rule, rules))
        return False
    deaf = [part.id for part in hits if _finds_nan(part)]
    if deaf and not force:
        text = f'muting "{deaf[0]}" would hide NaN and infinity'
        hint = (
            "if that is meant, use `--force`"
            if document.path.startswith("--mute")
            else "if that is meant, add `force: true`"
        )
        problems.append(document.problem(where, "mute-nonfinite", text, suggestion=hint))
        return False
    return True


def _finds_nan(draft: Draft) -> bool:
    when = draft.value("when")
    return when == "nonfinite" or (isinstance(when, dict) and "nonfinite" in when)
