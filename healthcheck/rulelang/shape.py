"""The schema stage: the shape of every document, before anybody asks what it means."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from itertools import islice

from healthcheck.errors import Problem
from healthcheck.registry import Registry
from healthcheck.rulelang.document import Document, KeyPath
from healthcheck.rulelang.merge import Draft
from healthcheck.rulelang.problems import ENOUGH
from healthcheck.rulelang.schema import build_schema
from healthcheck.rulelang.schemaerrors import schema_problems

RECOVERY_PASSES = 4

_clean: set[tuple[str, str]] = set()
"""Schemas and texts of files that fitted them: a process that loads the packs again need not look again."""


class Shape:
    """The schema stage: what it refused is not looked at again."""

    def __init__(self, registry: Registry) -> None:
        from jsonschema import Draft7Validator

        self.schema = build_schema(registry)
        self.validator = Draft7Validator(self.schema)
        self.problems: list[Problem] = []
        self._bad: dict[int, set[KeyPath]] = {}
        """Per document: every refused place, and every place that holds a refused one."""
        self._hopeless: set[int] = set()

    @cached_property
    def _name(self) -> str:
        """What tells this schema from another one: only files ask, rules given as a dict do not."""
        return _digest(json.dumps(self.schema, sort_keys=True))

    def check(self, document: Document) -> list[Problem]:
        found: list[Problem] = []
        if document.data is None and document.problems:
            return found
        known = (self._name, _digest("\n".join(document.lines))) if document.lines else None
        if known in _clean:
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
            self._refuse(document, ("rules",))
        else:
            found += self._passes(document)
            if known is not None and not found:
                _clean.add(known)
        self.problems += found
        return found

    def _passes(self, document: Document) -> list[Problem]:
        """Validate; where a key is surely meant as another, report it, rename it and look again.

        So that a file written in another tool's words shows all its mistakes, not only the words.
        """
        found: dict[tuple[str, int, int, str], Problem] = {}
        for _ in range(RECOVERY_PASSES):
            errors = list(islice(self.validator.iter_errors(document.data), ENOUGH))
            translated = schema_problems(document, errors)
            for problem, _, _ in translated:
                found.setdefault((problem.path, problem.line, problem.column, problem.message), problem)
            renames = [(where, *rename) for _, where, rename in translated if rename is not None]
            if not renames or len(errors) == ENOUGH:
                break
            for where, old, new in renames:
                document.rename(where, old, new)
        else:
            errors = list(islice(self.validator.iter_errors(document.data), ENOUGH))
        if len(errors) == ENOUGH:
            self._hopeless.add(id(document))
            text = f"more than {ENOUGH} mistakes; the rest of the file is not looked at"
            found[document.path, 0, 0, text] = document.problem((), "too-many-mistakes", text)
        for error in errors:
            path = tuple(error.absolute_path)
            if error.validator == "additionalProperties":
                for key in error.instance:
                    if key not in error.schema.get("properties", {}):
                        self._refuse(document, (*path, key))
            elif path or error.validator != "required":
                self._refuse(document, path)
        return list(found.values())

    def _refuse(self, document: Document, where: KeyPath) -> None:
        bad = self._bad.setdefault(id(document), set())
        bad.update(where[:depth] for depth in range(len(where) + 1))

    def is_bad(self, document: Document, where: KeyPath) -> bool:
        """Whether the schema refused this value or something inside it."""
        return where in self._bad.get(id(document), ())

    def is_hopeless(self, document: Document) -> bool:
        """Whether a document has so many mistakes that nothing in it is safe to look at."""
        return id(document) in self._hopeless

    def touches(self, draft: Draft) -> bool:
        """Whether something of this rule was refused."""
        places = [(draft.document, draft.where), *((e.document, e.where) for e in draft.touched)]
        return any(self.is_bad(document, where) for document, where in places)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
