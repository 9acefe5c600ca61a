"""The JSON Schema of rule files: one shipped draft-07 file, plus what plugins registered.

``rules-v1.schema.json`` is written by hand, except for the sections that repeat what conditions,
actions and settings declare themselves; ``build_schema`` fills those from a registry, and a test
keeps the shipped file equal to what the built-ins give. Shapes are chosen for their errors: one
object with ``additionalProperties: false`` names a typo, where a ``oneOf`` of shapes would answer
"is not valid under any of the given schemas". ``errorMessage`` is ignored by validators, shown by
editors, and used for our own errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from healthcheck.registry import Registry
from healthcheck.rulelang.comparators import COMPARATORS
from healthcheck.rulelang.conditions.base import comparator_schemas
from healthcheck.rulelang.settings import SETTINGS

FILE = "rules-v1.schema.json"
COMBINED = ("all", "any")


@cache
def shipped_schema() -> dict[str, Any]:
    """The schema as it ships: built-in conditions and actions only. Read once per process; not to be changed."""
    text = resources.files("healthcheck.rulelang").joinpath(FILE).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def build_schema(registry: Registry) -> dict[str, Any]:
    """The schema with the conditions and actions of a registry (built-ins and plugins)."""
    shipped = shipped_schema()
    definitions = dict(shipped["definitions"])
    conditions = {name: dict(kind.schema) for name, kind in registry.conditions.items()}
    for name, kind in registry.conditions.items():
        if "description" not in conditions[name] and kind.help:
            conditions[name]["description"] = kind.help
    short = sorted(name for name, kind in registry.conditions.items() if kind.shorthand)
    definitions["condition"] = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": conditions,
        "errorMessage": "one condition is expected, such as {above: 5}",
    }
    definitions["shorthand"] = {"enum": [*short, None]}
    definitions["part"] = {
        "type": ["object", "string"],
        "if": {"type": "object"},
        "then": {
            "minProperties": 1,
            "maxProperties": 2,
            "additionalProperties": False,
            "properties": {
                "metric": {
                    "description": "Metric of this part; default: the rule's own.",
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 300,
                },
                **{name: value for name, value in conditions.items() if name not in COMBINED},
            },
        },
        "else": {"enum": short},
        "errorMessage": "expected a condition, such as {metric: grad_norm, above: 10}",
    }
    definitions["comparator"] = {
        "type": ["object", "null"],
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": comparator_schemas(),
    }
    assert tuple(definitions["comparator"]["properties"]) == COMPARATORS
    definitions["settings"] = {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {name: {"description": s.help, **s.schema} for name, s in SETTINGS.items()},
    }
    definitions["action"], definitions["actionName"] = _actions(registry)
    return {**shipped, "definitions": definitions}


def _actions(registry: Registry) -> tuple[dict[str, Any], dict[str, Any]]:
    if not registry.actions:  # an engine without actions: rules are still readable
        return {"type": "object", "minProperties": 1, "maxProperties": 1}, {"type": "string"}
    properties: dict[str, Any] = {}
    for name, action in sorted(registry.actions.items()):
        properties[name] = _action(name, action.options_schema, (type(action).__doc__ or "").strip())
    shape = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": properties,
    }
    return shape, {"enum": sorted(registry.actions)}


def _action(name: str, options: Mapping[str, Any], doc: str) -> dict[str, Any]:
    own = dict(options or {})
    properties = dict(own.pop("properties", {}))
    properties["after"] = {
        "description": "Act only from the n-th time on that this alert runs its actions (1).",
        "type": "integer",
        "minimum": 1,
    }
    first_line = doc.splitlines()[0] if doc else name
    return {
        "description": own.pop("description", first_line),
        "additionalProperties": False,
        **own,
        "type": ["object", "null"],
        "properties": properties,
    }


def dump_schema(schema: Mapping[str, Any]) -> str:
    """The schema as text, stable for diffs."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
