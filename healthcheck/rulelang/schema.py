"""The format of rule files: their JSON Schema, and words of other tools answered with ours.

``rules-v1.schema.json`` is written by hand, except for the sections that repeat what conditions,
actions and settings declare themselves; ``build_schema`` fills those from a registry, and a test
keeps the shipped file equal to what the built-ins give. ``errorMessage`` is ignored by validators,
shown by editors, and used for our own errors (:mod:`healthcheck.rulelang.validation`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from healthcheck.core.text import nearest, one_line
from healthcheck.extend.registry import Registry
from healthcheck.rulelang.comparators import COMPARATORS
from healthcheck.rulelang.conditions.base import comparator_schemas
from healthcheck.rulelang.document import KeyPath
from healthcheck.rulelang.settings import SETTINGS
from healthcheck.rulelang.validation import Answer, Format, did_you_mean, listed

FILE = "rules-v1.schema.json"
COMBINED = ("all", "any")
RULE_ONLY = ("causes", "cooldown", "explains", "applies_if")
"""Keys that count for a whole rule, and stand beside its causes."""


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
        "properties": {
            name: {"description": s.help, **s.schema} for name, s in {**SETTINGS, **registry.settings}.items()
        },
    }
    definitions["action"], definitions["actionName"] = _actions(registry)
    keys = definitions["rule"]["properties"]
    definitions["cause"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {key: value for key, value in keys.items() if key not in RULE_ONLY},
    }
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


# --------------------------------------------------------------------------- words of other tools

FILE_SYNONYMS: dict[str, str] = {
    "extend": "extends",
    "include": "extends",
    "includes": "extends",
    "inherit": "extends",
    "import": "extends",
    "imports": "extends",
    "default": "defaults",
    "metric": "metrics",
    "derived": "metrics",
    "recording_rules": "metrics",
    "externals": "external",
    "custom_metrics": "external",
    "rule": "rules",
    "alerts": "rules",
    "checks": "rules",
    "thresholds": "rules",
    "groups": "rules",
    "profile": "profiles",
    "mutes": "mute",
    "silence": "mute",
    "silences": "mute",
    "ignore": "mute",
    "setting": "settings",
    "config": "settings",
    "options": "settings",
}

RULE_SYNONYMS: dict[str, str] = {
    "actions": "then",
    "action": "then",
    "do": "then",
    "notify": "then",
    "condition": "when",
    "conditions": "when",
    "expr": "when",
    "expression": "when",
    "if": "when",
    "on": "when",
    "check": "when",
    "trigger": "when",
    "level": "severity",
    "sev": "severity",
    "priority": "severity",
    "patience": "for",
    "duration": "for",
    "consecutive": "for",
    "max_check_attempts": "for",
    "failureThreshold": "for",
    "signal": "metric",
    "series": "metric",
    "name": "metric",
    "exclude": "except",
    "not": "except",
    "recovery": "recover",
    "resolve": "recover",
    "warm_up": "warmup",
    "initialDelaySeconds": "warmup",
    "min_history": "min_samples",
    "min_points": "min_samples",
    "interval": "every",
    "frequency": "every",
    "periodSeconds": "every",
    "repeat_interval": "cooldown",
    "renotify_interval": "cooldown",
    "cool_down": "cooldown",
    "guard": "only_if",
    "unless": "only_if",
    "msg": "message",
    "description": "message",
    "summary": "message",
    "annotations": "message",
    "advice": "hint",
    "fix": "hint",
    "url": "docs",
    "runbook_url": "docs",
    "labels": "tags",
    "inhibits": "holds_back",
    "suppresses": "holds_back",
    "inhibit": "holds_back",
    "reasons": "causes",
    "cause": "causes",
    "variants": "causes",
    "sources": "basis",
    "references": "basis",
    "reference": "basis",
    "source": "basis",
    "citations": "basis",
    "enabled_if": "applies_if",
    "certainty": "kind",
    "type": "kind",
    "disabled": "enabled",
}
"""Word of another tool -> our key of a rule. ``threshold`` is answered apart: it is no key."""

CONDITION_SYNONYMS: dict[str, str] = {
    "gt": "above",
    "greater_than": "above",
    "lt": "below",
    "less_than": "below",
    "gte": "at_least",
    "ge": "at_least",
    "lte": "at_most",
    "le": "at_most",
    "eq": "equals",
    "equal": "equals",
    "between": "outside",
    "range": "outside",
    "threshold": "above",
    "over_threshold": "above",
    "nan": "nonfinite",
    "isnan": "nonfinite",
    "non-finite": "nonfinite",
    "non_finite": "nonfinite",
    "not_finite": "nonfinite",
    "inf": "nonfinite",
    "z_score": "zscore",
    "z": "zscore",
    "std": "zscore",
    "sigma": "zscore",
    "spike": "robust_z",
    "mad": "robust_z",
    "average": "mean",
    "avg": "mean",
    "quantile": "percentile",
    "median": "percentile",
    "change": "delta",
    "rate": "increase",
    "trend": "slope",
    "plateau": "no_improvement",
    "patience": "no_improvement",
    "constant": "unchanged",
    "timeout": "stale",
    "absent": "missing",
    "no_data": "missing",
    "cusum": "drift",
    "page_hinkley": "drift",
    "and": "all",
    "or": "any",
}

OPTION_SYNONYMS: dict[str, str] = {
    "gt": "above",
    "lt": "below",
    "gte": "at_least",
    "lte": "at_most",
    "threshold": "above",
    "k": "above",
    "n": "window",
    "size": "window",
    "length": "window",
    "samples": "window",
    "history": "window",
    "lookback": "window",
    "over_samples": "over",
    "patience": "over",
    "baseline": "to",
    "min_delta": "min_abs",
    "tolerance": "min_rel",
    "q": "p",
    "percent": "p",
    "timeout": "after",
    "startup": "first",
    "by": "across",
}

SEVERITY_SYNONYMS: dict[str, str] = {
    "warn": "warning",
    "err": "error",
    "critical": "error",
    "fatal": "error",
    "high": "error",
    "medium": "warning",
    "low": "info",
    "note": "info",
    "notice": "info",
    "page": "error",
}

KIND_SYNONYMS: dict[str, str] = {
    "certain": "fact",
    "error": "fact",
    "wiring": "fact",
    "threshold": "measure",
    "number": "measure",
    "limit": "measure",
    "curve": "trend",
    "statistical": "trend",
    "heuristic": "trend",
}

ACTION_SYNONYMS: dict[str, str] = {
    "abort": "stop",
    "kill": "stop",
    "halt": "stop",
    "exit": "stop",
    "terminate": "stop",
    "log": "note",
    "print": "warn",
    "alert": "warn",
    "notify": "warn",
    "gc": "cleanup",
    "empty_cache": "cleanup",
    "skip": "skip_update",
    "skip_step": "skip_update",
    "save": "checkpoint",
    "snapshot": "evidence",
    "dump": "evidence",
    "stacks": "dump_stacks",
    "reduce_lr": "scale_lr",
}


class RuleFormat(Format):
    """Rule files, with the conditions and actions of a registry."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(build_schema(registry))
        self.conditions = list(registry.conditions)

    def level(self, where: KeyPath) -> tuple[str, Mapping[str, str]]:
        """Conditions and actions are called so; everything else is a key."""
        kind, synonyms = _level(where)
        return (kind if kind in ("condition", "action") else "key"), synonyms

    def unknown_key(self, where: KeyPath, key: str, beside: Mapping[str, Any], known: Sequence[str]) -> Answer | None:
        """Keys that stand in the wrong place, or that another tool has where we have none."""
        kind, synonyms = _level(where)
        value = beside[key]
        text = f'unknown key "{one_line(key)}"'
        if kind == "cause" and key in RULE_ONLY:
            text = f"`{key}` is of the whole rule, not of one cause"
            hint = "causes have no causes" if key == "causes" else "write it beside `causes:`"
            return Answer(text, hint, "of-the-rule")
        if kind in ("rule", "cause") and key == "threshold":
            return Answer(text, _limit_in_when(str(where[-1]), beside, value), "unknown-key")
        if key == "disabled":
            return Answer(text, "write `enabled: false`, or `rule-id: off`", "unknown-key")
        if kind == "condition" and key in COMBINED:
            hint = "only one level is supported; write two rules"
            return Answer(f"`{key}` cannot stand inside `all` or `any`", hint, "nested")
        if kind in ("rule", "cause") and key not in synonyms and (key in self.conditions or not nearest(key, known)):
            # A condition beside `metric`, not under `when`.
            close = nearest(key, self.conditions, 0.7)
            if close:
                shown = "..." if isinstance(value, (dict, list)) else one_line(str(value), 20)
                hint = f"a condition goes under `when`: write `when: {{{close}: {shown}}}`"
                return Answer(text, hint, "unknown-key")
        return None

    def unknown_word(self, where: KeyPath, value: Any, words: Sequence[str]) -> Answer | None:
        """A severity, condition or action of another tool; or an expression where a condition belongs."""
        if not where:
            return None
        table = {"severity": SEVERITY_SYNONYMS, "when": CONDITION_SYNONYMS, "kind": KIND_SYNONYMS}.get(
            str(where[-1]), {}
        )
        holder = where[-2] if len(where) >= 2 else ""
        if holder == "then":
            table = ACTION_SYNONYMS
        if holder in ("rules", "causes"):
            table = SEVERITY_SYNONYMS
        ours = table.get(str(value), "")
        meant = ours if ours in words else nearest(str(value), words)
        hint = f"here it is called `{ours}`" if ours in words else did_you_mean(meant)
        shown = one_line(str(value).lower() if isinstance(value, bool) else str(value))
        if where[-1] == "when" and not hint and len(shown.split()) > 1:
            return Answer(f'"{shown}" is not a condition', "conditions are keys, not expressions: when: {above: 5}")
        if holder == "then":
            hint = hint or f"there are {listed(words)}"
            return Answer(f'"{shown}" is not an action', hint, "unknown-action", meant)
        return Answer(f'"{shown}" is not one of {listed(words)}', hint, meant=meant)

    def wrong_type(self, where: KeyPath, value: Any) -> Answer | None:
        """Rules as a list, which most other tools have."""
        if where and where[-1] == "causes" and isinstance(value, list):
            return Answer("`causes` is a map from name to cause, not a list", "write `not-in-optimizer: {metric: ...}`")
        if where == ("rules",) and isinstance(value, list):
            text = "`rules` is a map from rule id to rule, not a list"
            return Answer(text, "write `loss-spike: {metric: ...}` without dashes")
        return None

    def too_many(self, where: KeyPath, names: Sequence[str]) -> Answer:
        """Two conditions, actions or comparators where one belongs."""
        kind, _ = _level(where)
        what, hint = "comparator", ""
        if kind == "condition":
            names = [name for name in names if name != "metric"]
            what, hint = "condition", "combine them with `all:` or `any:`"
            if set(names) == {"above", "below"}:
                hint = "write `outside: [low, high]`, or combine them with `all:` or `any:`"
        elif kind == "action":
            what, hint = "action", "give each its own list item"
        text = f"one {what} expected, found {len(names)}: {', '.join(names)}"
        return Answer(one_line(text, 200), hint, "too-many")

    def good_name(self, where: KeyPath, key: str) -> str:
        """A rule id made of what was written."""
        if not where or where[-1] not in ("rules", "causes"):
            return ""
        spaced = "".join(c.lower() if c.isalnum() else " " for c in key)
        mended = "-".join(spaced.split())
        return f"write {mended}" if mended and mended.isascii() else ""


def _limit_in_when(rule_id: str, rule: Mapping[str, Any], limit: Any) -> str:
    """Where a rule's ``threshold`` belongs: what to write is valid and keeps the condition that is there."""
    shown = limit if isinstance(limit, (int, float)) and not isinstance(limit, bool) else 9
    when = rule.get("when")
    if isinstance(when, str):
        return f"the limit belongs to the condition: write `when: {{{one_line(when, 20)}: {{above: {shown}}}}}`"
    if isinstance(when, Mapping) and len(when) == 1:
        (name, options), *_ = when.items()
        if isinstance(options, Mapping) and not {"above", "below", "at_least", "at_most"} & set(options):
            inside = ", ".join(f"{option}: {setting}" for option, setting in options.items() if _is_plain(setting))
            return f"the limit belongs to the condition: write `when: {{{name}: {{{inside}, above: {shown}}}}}`"
        return "the condition has a limit of its own: delete this key"
    if when is not None:
        return "a limit belongs to a condition under `when`, for instance `when: {above: 9}`"
    if "metric" in rule or rule_id == "defaults":
        return f"write `when: {{above: {shown}}}`" if shown is limit else "write a number: `when: {above: 9}`"
    return (
        f"write its `when:` again with the new limit; `healthcheck explain {one_line(rule_id, 40)}` shows the old one"
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _level(where: KeyPath) -> tuple[str, Mapping[str, str]]:
    """What kind of map a path leads to, and the synonyms of its keys."""
    path = where
    if path[:1] == ("profiles",) and len(path) >= 2:
        path = path[2:]
    if not path:
        return "file", FILE_SYNONYMS
    body = path[1:] if path[0] == "defaults" else path[2:] if path[0] == "rules" and len(path) >= 2 else None
    if body is None:
        return "other", {}
    if not body:
        return "rule", RULE_SYNONYMS
    if body[0] == "causes" and len(body) >= 2:
        body = body[2:]
        if not body:
            return "cause", RULE_SYNONYMS
    elif body[0] == "causes":
        return "other", {}
    if body[0] == "when":
        inner = body[1:]
        if not inner or (len(inner) == 2 and inner[0] in COMBINED):
            return "condition", CONDITION_SYNONYMS
    if body[0] == "then" and len(body) == 2:
        return "action", ACTION_SYNONYMS
    return "option", OPTION_SYNONYMS
