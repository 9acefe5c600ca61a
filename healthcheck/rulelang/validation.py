"""One validator for every YAML file of ours, and jsonschema's errors in our words.

Rule files, rule tests and accepted alerts each bring a :class:`Format`: a draft-07 schema and the words
that only it has. All mistakes of a file come at once (jsonschema's own ``best_match`` would show one),
each with its place, and a word of another tool is answered with ours.

A schema says in ``errorMessage`` what was expected: words for whatever is wrong with the value, or a map from
keyword to words, in which ``required`` has a map of its own from missing key to words. Words are a text, or a
pair: what is wrong, and what to write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from healthcheck.core.errors import Problem
from healthcheck.core.redact import redact_text
from healthcheck.core.text import nearest, one_line
from healthcheck.rulelang import parsed
from healthcheck.rulelang.document import Document, KeyPath
from healthcheck.rulelang.loader import shape_is_right
from healthcheck.rulelang.problems import ENOUGH
from healthcheck.rulelang.quantities import QuantityError, parse_quantity

RECOVERY_PASSES = 4
FEW_KEYS = 16
FEW_WORDS = 12
"""Of so many at most all are listed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What to say of one mistake."""

    message: str
    suggestion: str = ""
    slug: str = "bad-value"
    meant: str = ""
    """The word that was surely meant, for ``check --fix``."""


class Format:
    """One kind of file.

    :param schema: draft-07. Shapes are chosen for their errors: one object with ``additionalProperties: false``
        names a typo, where a ``oneOf`` of shapes would answer "is not valid under any of the given schemas".
    """

    version_key = "version"
    files = "rule files"
    """What such files are called."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema
        self.definitions: dict[str, Any] = {}
        """Those that others refer to, as they stand in :attr:`inlined`."""

    @cached_property
    def inlined(self) -> Any:
        """The schema without references, where that is possible."""
        schema = self.schema
        return {
            **{key: _inlined(part, schema, self.definitions) for key, part in schema.items() if key != "definitions"},
            "definitions": schema.get("definitions", {}),
        }

    @cached_property
    def mark(self) -> str:
        """Tells this schema from another one."""
        return parsed.mark(json.dumps(self.schema, sort_keys=True))

    def level(self, where: KeyPath) -> tuple[str, Mapping[str, str]]:
        """What the keys of the map at ``where`` are called, and words of other tools for them -> ours."""
        return "key", {}

    def unknown_key(self, where: KeyPath, key: str, beside: Mapping[str, Any], known: Sequence[str]) -> Answer | None:
        """A special answer to a key that the map at ``where`` does not have.

        :param beside: that map, with the key in it.
        """
        return None

    def unknown_word(self, where: KeyPath, value: Any, words: Sequence[str]) -> Answer | None:
        """A special answer to a value that is none of ``words``."""
        return None

    def wrong_type(self, where: KeyPath, value: Any) -> Answer | None:
        """A special answer to a value of the wrong kind."""
        return None

    def too_many(self, where: KeyPath, names: Sequence[str]) -> Answer:
        """The answer to a map that may hold fewer keys."""
        return Answer(f"one key expected, found {len(names)}: {', '.join(names)}", slug="too-many")

    def good_name(self, where: KeyPath, key: str) -> str:
        """What to write for a key that is no good name; empty if there is no saying."""
        return ""


class Validator:
    """The shape of documents of one format, before anybody asks what they mean. What it refused is not looked at again."""

    def __init__(self, format: Format) -> None:
        self.format = format
        self._bad: dict[int, set[KeyPath]] = {}
        """Per document: every refused place, and every place that holds a refused one."""
        self._hopeless: set[int] = set()

    def check(self, document: Document, *, anew: bool = False) -> list[Problem]:
        """All that is wrong with the shape of a document; nothing if it could not be read at all.

        A key that is surely meant as another one is reported and then read as that one (``Document.rename``).

        :param anew: look, whatever is known of its text.
        """
        if document.data is None and document.problems:
            return []
        # Rules given as a dict have no text, and are looked at each time.
        if document.text and not anew:
            if self.format.mark in parsed.known.get(document.text, ()):
                return []
            if parsed.is_shipped(document.text, self.format.mark):
                shape_is_right(document.text, self.format.mark)
                return []
        if not isinstance(document.data, Mapping):
            what = "empty" if document.data is None else "not a map of keys"
            hint = f"begin with `{self.format.version_key}: 1`"
            return [document.problem((), "bad-value", f"the file is {what}", suggestion=hint)]
        found = self._passes(document)
        if document.text and not found:
            shape_is_right(document.text, self.format.mark)
        return found

    @cached_property
    def _validator(self) -> Any:
        """Made for the first document that is not known."""
        from jsonschema import Draft7Validator

        return Draft7Validator(self.format.inlined)

    def is_bad(self, document: Document, where: KeyPath) -> bool:
        """Whether this value or something inside it was refused."""
        return where in self._bad.get(id(document), ())

    def is_hopeless(self, document: Document) -> bool:
        """Whether a document has so many mistakes that nothing in it is safe to look at."""
        return id(document) in self._hopeless

    def _passes(self, document: Document) -> list[Problem]:
        """Validate; where a key is surely meant as another, report it, rename it and look again.

        So that a file written in another tool's words shows all its mistakes, not only the words.
        """
        found: dict[tuple[str, int, int, str], Problem] = {}
        for _ in range(RECOVERY_PASSES):  # a renamed key brings what is in it to light, and there may be more of them
            errors = list(islice(self._validator.iter_errors(document.data), ENOUGH))
            mistakes = _mistakes(self.format, document, errors)
            renames = [m for m in mistakes if m.renamed is not None]
            meant = {(m.where, m.renamed[1]) for m in renames if m.renamed is not None}
            for mistake in mistakes:
                if (mistake.where, mistake.missing) not in meant:  # else the key is there, and only misspelt
                    problem = mistake.problem
                    found.setdefault((problem.path, problem.line, problem.column, problem.message), problem)
            if not renames or len(errors) == ENOUGH:
                break
            for mistake in renames:
                if mistake.renamed is not None:
                    document.rename(mistake.where, *mistake.renamed)
        else:
            errors = list(islice(self._validator.iter_errors(document.data), ENOUGH))
        if len(errors) == ENOUGH:
            self._hopeless.add(id(document))
            text = f"more than {ENOUGH} mistakes; the rest of the file is not looked at"
            found[document.path, 0, 0, text] = document.problem((), "too-many-mistakes", text)
        self._refuse(document, errors)
        return list(found.values())

    def _refuse(self, document: Document, errors: Iterable[Any]) -> None:
        bad = self._bad.setdefault(id(document), set())
        for error in errors:
            path = tuple(error.absolute_path)
            places = [path] if path or error.validator != "required" else []
            if error.validator == "additionalProperties":
                places = [(*path, key) for key in error.instance if key not in error.schema.get("properties", {})]
            bad.update(place[:depth] for place in places for depth in range(len(place) + 1))


@dataclass(frozen=True, slots=True)
class _Mistake:
    problem: Problem
    where: KeyPath
    """The map or value that jsonschema blamed."""
    renamed: tuple[str, str] | None = None
    """A key of that map that is surely meant as another: the old name and the new."""
    missing: str = ""
    """A key that the map lacks."""


def _mistakes(format: Format, document: Document, errors: Iterable[Any]) -> list[_Mistake]:
    """jsonschema's errors for one document, one mistake per place and missing key.

    Several keywords often fail at one place (a type and a pattern). The one with a way out is kept.
    """
    found: dict[tuple[int, int, str, str], _Mistake] = {}
    for error in errors:
        for mistake in islice(_Translation(format, document, error).mistakes(), ENOUGH):
            problem = mistake.problem
            key = (problem.line, problem.column, "" if problem.line else problem.path, mistake.missing)
            known = found.get(key)
            if known is None or _rank(problem) < _rank(known.problem):
                found[key] = mistake
    return list(found.values())


def _rank(problem: Problem) -> int:
    return 0 if problem.suggestion or problem.slug == "unknown-key" else 1


class _Translation:
    """One error of jsonschema in our words."""

    def __init__(self, format: Format, document: Document, error: Any) -> None:
        self.format = format
        self.document = document
        self.schema: Any = error.schema
        self.keyword: str = error.validator
        self.limit: Any = error.validator_value
        self.where: KeyPath = tuple(error.absolute_path)
        self.value: Any = error.instance
        self.is_name = "propertyNames" in error.absolute_schema_path
        self.plain_words = str(error.message)

    def mistakes(self) -> Iterator[_Mistake]:
        """One for each key, if keys are what is wrong; else the one about the value."""
        if self.is_name:
            text, hint = self._said()
            text = f'"{one_line(self.value)}": {text or "this name cannot be used"}'
            hint = hint or self.format.good_name(self.where, self.value)
            yield self._at_key(self.value, Answer(text, hint, "bad-name"))
        elif self.keyword == "additionalProperties":
            known = list(self.schema.get("properties", {}))
            for key in self.value:
                if key not in known:
                    yield self._at_key(key, self._unknown_key(key, known))
        elif self.keyword == "required":
            for key in self.limit:
                if key not in self.value:
                    yield self._missing(key)
        else:
            answer = self._bad_value()
            fix = (str(self.value), answer.meant) if answer.meant else None
            problem = self.document.problem(
                self.where, answer.slug, answer.message, suggestion=answer.suggestion, fix=fix
            )
            yield _Mistake(problem, self.where)

    def _at_key(self, key: str, answer: Answer) -> _Mistake:
        fix = (key, answer.meant) if answer.meant else None
        problem = self.document.problem(
            (*self.where, key), answer.slug, answer.message, key=True, suggestion=answer.suggestion, fix=fix
        )
        # Both keys are there: taking one for the other would hide what the right one says.
        return _Mistake(problem, self.where, None if answer.meant in self.value else fix)

    def _said(self, key: str = "") -> tuple[str, str]:
        """What the schema says is expected, and what to write; both may be empty."""
        words = self.schema.get("errorMessage", "") if isinstance(self.schema, Mapping) else ""
        for name in (self.keyword, key):
            if isinstance(words, Mapping):
                words = words.get(name, "")
        return (words, "") if isinstance(words, str) else (words[0], words[1])

    def _said_of_keyword(self, key: str = "") -> tuple[str, str]:
        """The same, but only of just this keyword: where the usual words say more than "expected ..."."""
        by_keyword = isinstance(self.schema, Mapping) and isinstance(self.schema.get("errorMessage"), Mapping)
        return self._said(key) if by_keyword else ("", "")

    # -- keys -------------------------------------------------------------------------

    def _unknown_key(self, key: str, known: Sequence[str]) -> Answer:
        special = self.format.unknown_key(self.where, key, self.value, known)
        if special is not None:
            return special
        noun, synonyms = self.format.level(self.where)
        ours = synonyms.get(key) or synonyms.get(key.lower().replace("-", "_")) or ""
        if ours in known and ours not in self.value:
            return Answer(f'unknown key "{key}"', f"here it is called `{ours}`", "unknown-key", ours)
        near = nearest(key, known)
        hint = f"there are {', '.join(known)}" if 0 < len(known) <= FEW_KEYS else ""
        return Answer(f'unknown {noun} "{one_line(key)}"', did_you_mean(near) or hint, f"unknown-{noun}", near)

    def _missing(self, key: str) -> _Mistake:
        text, hint = self._said_of_keyword(key)
        slug = "missing-key"
        if key == self.format.version_key and not self.where:
            slug, text, hint = "no-version", f"the file does not say `{key}: 1`", "make it the first line"
        text = text or f"`{key}` is missing here"
        return _Mistake(self.document.problem(self.where, slug, text, suggestion=hint), self.where, missing=key)

    # -- values -----------------------------------------------------------------------

    def _may_be_an_item(self, text: str) -> bool:
        """Whether a text could stand in the list that is expected in its place."""
        items = self.schema.get("items", {})
        return items.get("type") not in ("integer", "number") or text.strip().lstrip("+-").isdecimal()

    def _bad_value(self) -> Answer:
        keyword, value, limit = self.keyword, self.value, self.limit
        text, hint = self._said()
        if keyword == "enum":
            return self._unknown_word(text, hint)
        if keyword == "maxProperties":
            return self.format.too_many(self.where, list(map(str, value)))
        if keyword == "minProperties":
            return Answer(text or "at least one key is expected here", hint, "empty")
        if keyword == "type":
            if "array" in limit and isinstance(value, str) and self._may_be_an_item(value):
                hint = hint or f"write [{one_line(value)}]"
            usual = Answer(f"{text or f'expected {_types(limit)}'}; found {_kind(value)}", hint)
            return self.format.wrong_type(self.where, value) or usual
        if keyword in _LIMITS:
            text, hint = self._said_of_keyword()
            usual_text = f"{_shown(value)} is {_LIMITS[keyword]} {limit:g}"
            return Answer(f"{text}; found {_shown(value)}" if text else usual_text, hint)
        if keyword == "pattern":
            return Answer(self._unlike_pattern(text), hint)
        if keyword == "minItems" and text:
            return Answer(text, hint)
        if keyword in ("minLength", "minItems"):
            return Answer("this is empty" if not value else f"at least {limit} expected")
        if keyword in ("maxLength", "maxItems"):
            return Answer(f"too long: at most {limit}")
        return Answer(text or one_line(self.plain_words, 160), hint)

    def _unlike_pattern(self, text: str) -> str:
        if self.schema is self.format.definitions.get("quantity"):
            try:
                parse_quantity(self.value)
            except QuantityError as reason:
                return str(reason)
        return f"{text or 'expected another form'}; found {_shown(self.value)}"

    def _unknown_word(self, text: str, hint: str) -> Answer:
        value = self.value
        if self.where == (self.format.version_key,):
            return self._version()
        words = [str(w) for w in self.limit if isinstance(w, str) or (isinstance(w, int) and not isinstance(w, bool))]
        if isinstance(value, (dict, list)) or value is None:
            return Answer(text or f"expected one of {', '.join(words)}, found {_kind(value)}", hint)
        own, own_hint = self._said_of_keyword()
        if own:
            return Answer(f"{own}; found {_shown(value)}", own_hint)
        near = nearest(str(value), words)
        shown = one_line(str(value).lower() if isinstance(value, bool) else str(value))
        usual = Answer(f'"{shown}" is not one of {listed(words)}', did_you_mean(near), meant=near)
        return self.format.unknown_word(self.where, value, words) or usual

    def _version(self) -> Answer:
        value, key = self.value, self.format.version_key
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 1:
            return Answer(f"version {value} needs a newer healthcheck; this one reads version 1", slug="newer-version")
        return Answer(f'"{one_line(str(value))}" is not a version of {self.format.files}', f"write `{key}: 1`")


_LIMITS = {
    "minimum": "less than",
    "maximum": "more than",
    "exclusiveMinimum": "not more than",
    "exclusiveMaximum": "not less than",
}
_TYPES = {
    "object": "a map of keys",
    "array": "a list",
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}


def did_you_mean(word: str) -> str:
    """The suggestion of a word; empty if there is none."""
    return f'did you mean "{word}"?' if word else ""


def listed(words: Sequence[str]) -> str:
    """The first words of a list that may be long."""
    return ", ".join(words) if len(words) <= FEW_WORDS else ", ".join(words[:FEW_WORDS]) + ", ..."


def _shown(value: Any) -> str:
    return f'"{one_line(redact_text(value))}"' if isinstance(value, str) else one_line(str(value))


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'the text "{one_line(redact_text(value), 40)}"'
    if isinstance(value, (int, float)):
        return f"the number {one_line(str(value), 40)}"
    return "a list" if isinstance(value, list) else "a map of keys"


def _types(types: Any) -> str:
    return " or ".join(_TYPES[n] for n in ([types] if isinstance(types, str) else types) if n in _TYPES)


def _inlined(node: Any, schema: Mapping[str, Any], done: dict[str, Any]) -> Any:
    """A part of a schema with definitions in place of references to them: looking those up is a third of the work.

    :param done: definitions so far; one that is not finished refers to itself, and keeps that reference.
    """
    if isinstance(node, list):
        return [_inlined(inner, schema, done) for inner in node]
    if not isinstance(node, Mapping):
        return node
    prefix, _, name = str(node.get("$ref", "")).rpartition("/")
    if prefix == "#/definitions" and name in schema["definitions"]:
        if name not in done:
            done[name] = node
            done[name] = _inlined(schema["definitions"][name], schema, done)
        return done[name]
    return {key: _inlined(inner, schema, done) for key, inner in node.items()}
