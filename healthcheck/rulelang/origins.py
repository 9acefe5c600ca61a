"""Where each key came from: ``check --print-config`` and ``explain``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from healthcheck.rulelang.settings import SETTINGS

if TYPE_CHECKING:
    from healthcheck.rulelang.compile import Loaded
    from healthcheck.rulelang.merge import Draft


def config_text(loaded: Loaded) -> str:
    """The effective rules as YAML, each key with its origin as a comment."""
    merged = loaded.merged
    off = set(loaded.ruleset.off)
    lines: list[str] = ["version: 1"]
    if loaded.ruleset.profile:
        lines.append(f"# profile {loaded.ruleset.profile}")
    if merged.settings:
        lines.append("settings:")
        rows = [
            (f"  {name}: {flow(entry.value)}", str(entry.origin))
            for name, entry in merged.settings.items()
            if name in SETTINGS or "." in name
        ]
        lines.extend(_aligned(rows))
    if merged.metrics:
        lines.append("metrics:")
        lines.extend(
            _aligned([(f"  {name}: {flow(entry.value)}", str(entry.origin)) for name, entry in merged.metrics.items()])
        )
    if merged.external:
        lines.append(f"external: {flow([entry.value for entry in merged.external])}")
    lines.append("rules:")
    for rule_id, draft in merged.rules.items():
        lines.append(f"  {rule_id}:")
        rows = list(rule_rows(draft, indent="    "))
        if rule_id in off:
            where = str(draft.entries["enabled"].origin) if "enabled" in draft.entries else "command line"
            rows.insert(0, ("    enabled: false", where))
        lines.extend(_aligned(rows))
    if merged.mutes:
        lines.append("mute:")
        lines.extend(_aligned([(f"  - {flow(entry.value)}", str(entry.origin)) for entry in merged.mutes]))
    return "\n".join(lines)


def rule_rows(draft: Draft, *, indent: str = "") -> Iterator[tuple[str, str]]:
    """``(key: value, origin)`` for every key of a rule."""
    for key, entry in draft.entries.items():
        if key != "enabled":
            yield f"{indent}{key}: {flow(entry.value)}", str(entry.origin)
    if draft.causes:
        yield f"{indent}causes:", str(draft.document.origin((*draft.where, "causes"), key=True))
    for name, cause in draft.causes.items():
        yield f"{indent}  {name}:", str(cause.document.origin(cause.where, key=True))
        in_force = draft.part(cause).entries
        for key, entry in cause.entries.items():
            if in_force.get(key) is entry:
                value = entry.value is not False if key == "enabled" else entry.value
                yield f"{indent}    {key}: {flow(value)}", str(entry.origin)


def config_json(loaded: Loaded) -> dict[str, Any]:
    """The same for programs."""
    merged = loaded.merged
    off = set(loaded.ruleset.off)
    return {
        "profile": loaded.ruleset.profile or None,
        "settings": {n: {"value": e.value, "origin": str(e.origin)} for n, e in merged.settings.items()},
        "metrics": {n: {"value": e.value, "origin": str(e.origin)} for n, e in merged.metrics.items()},
        "external": [e.value for e in merged.external],
        "rules": {
            rule_id: {
                "off": rule_id in off,
                "keys": {key: {"value": e.value, "origin": str(e.origin)} for key, e in draft.entries.items()},
            }
            for rule_id, draft in merged.rules.items()
        },
        "mute": [e.value for e in merged.mutes],
    }


def flow(value: Any) -> str:
    """A value in one line of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow_key(k)}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(v) for v in value) + "]"
    if isinstance(value, str):
        return value if _plain(value) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def flow_key(key: Any) -> str:
    """A key in one line of YAML, quoted where it must be."""
    text = str(key)
    return text if _plain(text) else json.dumps(text, ensure_ascii=False)


def _plain(text: str) -> bool:
    """Whether text can stand without quotes, also inside braces."""
    simple = text.replace("_", "").replace("-", "").replace(".", "").replace("/", "").replace(" ", "").replace("+", "")
    if not simple.isalnum() or text != text.strip() or text[0] in "-." or text in ("true", "false", "null"):
        return False
    return not text.replace(".", "").replace("e", "").replace("-", "").replace("+", "").isdigit()


def _aligned(rows: list[tuple[str, str]]) -> Iterator[str]:
    width = min(max((len(text) for text, _ in rows), default=0), 70)
    for text, origin in rows:
        yield f"{text.ljust(width)}  # {origin}"
