"""jsonschema's errors in our words.

All of them are shown; jsonschema's own ``best_match`` would show one. Four keywords are reworded
(unknown key, not one of, too many, wrong type), and words of other tools are answered with ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from healthcheck.dispatch import suggest
from healthcheck.errors import Problem
from healthcheck.rulelang import aliases
from healthcheck.rulelang.document import Document, KeyPath
from healthcheck.rulelang.problems import ENOUGH
from healthcheck.rulelang.quantities import QuantityError, parse_quantity, shorten


def schema_problems(document: Document, errors: Iterable[Any]) -> list[tuple[Problem, KeyPath, tuple[str, str] | None]]:
    """jsonschema's errors for one document as problems, one per mistake.

    Each comes with the path of the map it is in and, for a key that is surely meant as another,
    the old and the new name of that key.
    """
    found: dict[tuple[int, int, str], tuple[Problem, KeyPath, tuple[str, str] | None]] = {}
    for error in errors:
        for problem in islice(_translate(document, error), ENOUGH):
            key = (problem.line, problem.column, problem.path if not problem.line else "")
            known = found.get(key)
            rename = problem.fix if error.validator == "additionalProperties" else None
            if known is None or _rank(problem) < _rank(known[0]):
                found[key] = (problem, tuple(error.absolute_path), rename)
    return list(found.values())


def _rank(problem: Problem) -> int:
    return 0 if problem.suggestion or problem.slug == "unknown-key" else 1


def _translate(document: Document, error: Any) -> Iterator[Problem]:
    where: KeyPath = tuple(error.absolute_path)
    keyword = error.validator
    if keyword == "additionalProperties":
        for key in error.instance:
            if key not in error.schema.get("properties", {}):
                yield _unknown_key(document, where, str(key), error)
    elif keyword == "enum":
        yield _not_one_of(document, where, error)
    elif keyword == "maxProperties":
        yield _too_many(document, where, error)
    elif keyword == "minProperties":
        yield document.problem(where, "empty", _said(error) or "at least one key is expected here")
    elif keyword == "required":
        for key in error.validator_value:
            if key not in error.instance:
                yield _missing_key(document, where, key)
    elif error.parent is None and "propertyNames" in error.absolute_schema_path:
        key = str(error.instance)
        message = error.schema.get("errorMessage", "this name cannot be used")
        yield document.problem(
            (*where, key), "bad-name", f'"{shorten(key)}": {message}', key=True, suggestion=_kebab(where, key)
        )
    else:
        as_list = keyword == "type" and "array" in error.validator_value and isinstance(error.instance, str)
        hint = f"write [{shorten(error.instance)}]" if as_list else ""
        yield document.problem(where, "bad-value", _bad_value(error), suggestion=hint)


def _unknown_key(document: Document, where: KeyPath, key: str, error: Any) -> Problem:
    known = list(error.schema.get("properties", {}))
    kind, table = _level(where)
    value = error.instance.get(key)
    ours = table.get(key) or table.get(key.lower().replace("-", "_"))
    if kind == "rule" and key == "threshold":
        hint = f"write `when: {{above: {shorten(str(value), 20)}}}`"
        return document.problem((*where, key), "unknown-key", f'unknown key "{key}"', key=True, suggestion=hint)
    if key == "disabled":
        return document.problem(
            (*where, key),
            "unknown-key",
            f'unknown key "{key}"',
            key=True,
            suggestion="write `enabled: false`, or `rule-id: off`",
        )
    if ours and ours in known and ours not in error.instance:
        return document.problem(
            (*where, key),
            "unknown-key",
            f'unknown key "{key}"',
            key=True,
            suggestion=f"here it is called `{ours}`",
            fix=(key, ours),
        )
    if kind == "condition" and key in ("all", "any"):
        return document.problem(
            (*where, key),
            "nested",
            f"`{key}` cannot stand inside `all` or `any`",
            key=True,
            suggestion="one level is all there is; write two rules",
        )
    what = {"condition": "condition", "action": "action"}.get(kind, "key")
    slug = {"condition": "unknown-condition", "action": "unknown-action"}.get(kind, "unknown-key")
    hint = suggest(key, known)
    if kind == "rule" and (not hint or key in _conditions()):
        hint = _as_condition(key, value)
    if not hint and 0 < len(known) <= 16:
        hint = f"there are {', '.join(known)}"
    fix = (key, hint.split('"')[1]) if hint.startswith("did you mean") else None
    return document.problem((*where, key), slug, f'unknown {what} "{shorten(key)}"', key=True, suggestion=hint, fix=fix)


def _conditions() -> list[str]:
    from healthcheck.rulelang.conditions import CONDITIONS

    return [condition.name for condition in CONDITIONS]


def _as_condition(key: str, value: Any) -> str:
    """For a condition that stands beside ``metric`` and not under ``when``; empty for any other word."""
    close = difflib.get_close_matches(key, _conditions(), n=1, cutoff=0.7)
    shown = "..." if isinstance(value, (dict, list)) else shorten(str(value), 20)
    return f"a condition stands under `when`: write `when: {{{close[0]}: {shown}}}`" if close else ""


def _level(where: KeyPath) -> tuple[str, Mapping[str, str]]:
    """What kind of map a path leads to, and the synonyms of its keys."""
    path = where
    if path[:1] == ("profiles",) and len(path) >= 2:
        path = path[2:]
        if not path:
            return "profile", aliases.FILE_SYNONYMS
    if not path:
        return "file", aliases.FILE_SYNONYMS
    body = path[1:] if path[0] == "defaults" else path[2:] if path[0] == "rules" and len(path) >= 2 else None
    if body is None:
        return "other", {}
    if not body:
        return "rule", aliases.RULE_SYNONYMS
    if body[0] == "when":
        inner = body[1:]
        if not inner or (len(inner) == 2 and inner[0] in ("all", "any")):
            return "condition", aliases.CONDITION_SYNONYMS
        return "option", aliases.OPTION_SYNONYMS
    if body[0] == "then":
        return ("action", aliases.ACTION_SYNONYMS) if len(body) == 2 else ("option", aliases.OPTION_SYNONYMS)
    return "option", aliases.OPTION_SYNONYMS


def _not_one_of(document: Document, where: KeyPath, error: Any) -> Problem:
    value = error.instance
    words = [
        str(w) for w in error.validator_value if isinstance(w, str) or (isinstance(w, int) and not isinstance(w, bool))
    ]
    if where == ("version",):
        return _version(document, value)
    said = _said(error)
    if isinstance(value, (dict, list)) or value is None:
        return document.problem(where, "bad-value", said or f"expected one of {', '.join(words)}, found {_kind(value)}")
    shown = shorten(str(value).lower() if isinstance(value, bool) else str(value))
    tables = {"severity": aliases.SEVERITY_SYNONYMS, "when": aliases.CONDITION_SYNONYMS}
    table = tables.get(str(where[-1]), {}) if where else {}
    if len(where) >= 2 and where[-2] == "then":
        table = aliases.ACTION_SYNONYMS
    if len(where) >= 2 and where[-2] == "rules":
        table = aliases.SEVERITY_SYNONYMS
    ours = table.get(str(value), "")
    hint = f"here it is called `{ours}`" if ours in words else suggest(str(value), words)
    fix = (str(value), ours if ours in words else hint.split('"')[1]) if hint else None
    listed = ", ".join(words) if len(words) <= 12 else ", ".join(words[:12]) + ", ..."
    if where and where[-1] == "when" and not hint and len(shown.split()) > 1:
        return document.problem(
            where,
            "bad-value",
            f'"{shown}" is no condition',
            suggestion="conditions are keys, not expressions: when: {above: 5}",
        )
    slug = "unknown-action" if table is aliases.ACTION_SYNONYMS else "bad-value"
    what = "no action" if slug == "unknown-action" else f"not one of {listed}"
    if slug == "unknown-action" and not hint:
        hint = f"there are {listed}"
    return document.problem(where, slug, f'"{shown}" is {what}', suggestion=hint, fix=fix)


def _version(document: Document, value: Any) -> Problem:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 1:
        return document.problem(
            ("version",), "newer-version", f"version {value} needs a newer healthcheck; this one reads version 1"
        )
    return document.problem(
        ("version",),
        "bad-value",
        f'"{shorten(str(value))}" is not a version of rule files',
        suggestion="write `version: 1`",
    )


def _too_many(document: Document, where: KeyPath, error: Any) -> Problem:
    names = [str(k) for k in error.instance]
    kind, _ = _level(where)
    if kind == "condition" and "metric" in names:
        names.remove("metric")
    if kind == "condition":
        hint = "combine them with `all:` or `any:`"
        if set(names) == {"above", "below"}:
            hint = "write `outside: [low, high]`, or combine them with `all:` or `any:`"
        text = f"one condition expected, found {len(names)}: {', '.join(names)}"
    elif kind == "action":
        text, hint = f"one action expected, found {len(names)}: {', '.join(names)}", "give each its own list item"
    else:
        text, hint = f"one comparator expected, found {len(names)}: {', '.join(names)}", ""
    return document.problem(where, "too-many", shorten(text, 200), suggestion=hint)


def _missing_key(document: Document, where: KeyPath, key: str) -> Problem:
    if key == "version" and not where:
        problem = document.problem(
            (), "no-version", "the file does not say `version: 1`", suggestion="make it the first line"
        )
        return problem
    return document.problem(where, "missing-key", f"`{key}` is missing here")


def _bad_value(error: Any) -> str:
    said = _said(error)
    value = error.instance
    if error.validator in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        words = {
            "minimum": "less than",
            "maximum": "more than",
            "exclusiveMinimum": "not more than",
            "exclusiveMaximum": "not less than",
        }
        return f"{_shown(value)} is {words[error.validator]} {error.validator_value:g}"
    if error.validator == "type":
        expected = said or f"expected {_types(error.validator_value)}"
        return f"{expected}; found {_kind(value)}"
    if _is_quantity(error):
        try:
            parse_quantity(value)
        except QuantityError as reason:
            return str(reason)
    if error.validator == "pattern":
        return f"{said or 'expected another form'}; found {_shown(value)}"
    if error.validator == "minItems" and said:
        return said
    if error.validator in ("minLength", "minItems"):
        return "this is empty" if not value else f"at least {error.validator_value} expected"
    if error.validator in ("maxLength", "maxItems"):
        return f"too long: at most {error.validator_value}"
    return said or shorten(str(error.message), 160)


def _is_quantity(error: Any) -> bool:
    return error.validator == "pattern" and "16MiB" in _said(error)


def _said(error: Any) -> str:
    schema = error.schema
    text = schema.get("errorMessage", "") if isinstance(schema, Mapping) else ""
    return str(text)


def _shown(value: Any) -> str:
    return f'"{shorten(value)}"' if isinstance(value, str) else shorten(str(value))


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'the text "{shorten(value, 40)}"'
    if isinstance(value, (int, float)):
        return f"the number {shorten(str(value), 40)}"
    return "a list" if isinstance(value, list) else "a map of keys"


def _types(types: Any) -> str:
    words = {
        "object": "a map of keys",
        "array": "a list",
        "string": "text",
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
    }
    names = [types] if isinstance(types, str) else list(types)
    return " or ".join(words[n] for n in names if n in words)


def _kebab(where: KeyPath, key: str) -> str:
    if where and where[-1] == "rules":
        mended = "-".join(part for part in "".join(c.lower() if c.isalnum() else "-" for c in key).split("-") if part)
        return f"write {mended}" if mended and mended.isascii() else ""
    return ""
