"""``healthcheck explain RULE``: the manual of a rule, and the rule as it stands here."""

from __future__ import annotations

import argparse
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.cli.options import add_format, add_plugin_option, add_rule_sources, loaded_host, print_json
from healthcheck.core.errors import UsageError
from healthcheck.core.text import suggest
from healthcheck.reports.alertblock import asks
from healthcheck.reports.tables import table_lines
from healthcheck.rulelang.compile import Loaded, load_all
from healthcheck.rulelang.discover import discover
from healthcheck.rulelang.document import Document
from healthcheck.rulelang.origins import flow, rule_rows
from healthcheck.rulelang.settings import SETTINGS
from healthcheck.rulelang.sources import pack_names

if TYPE_CHECKING:
    from healthcheck.core.protocols import Action
    from healthcheck.extend.registry import Registry
    from healthcheck.rulelang.merge import Draft

OURS = "healthcheck:"
"""How the names of packs begin that come with healthcheck."""

NAME = "explain"
HELP = "the manual page of a rule, condition, action, metric or setting, and how a rule is set here (for an alert: why)"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "rule", metavar="RULE", nargs="?", help="id of a rule; name of a condition, action, metric or setting"
    )
    add_rule_sources(parser)
    add_format(parser)
    add_plugin_option(parser)


def main(args: argparse.Namespace) -> int:
    host = loaded_host(args)
    found = discover(args.rules)
    loaded = load_all(found.sources, registry=host.registry, profile=args.profile)
    if args.rule is None:
        print("\n".join(_list(loaded, found.label)))
        return 0
    content, text = _looked_up(args.rule, loaded, found.label, host.registry)
    if args.format == "json":
        print_json(content)
    else:
        print(text)
    return 0


def _looked_up(name: str, loaded: Loaded, label: str, registry: Registry) -> tuple[Any, str]:
    """What the name stands for, for a program and for a person. Raises ``UsageError`` with the nearest name."""
    rule_id, _, cause = name.partition(".")
    draft = loaded.merged.rules.get(rule_id)
    if draft is not None and (not cause or cause in draft.causes):
        return _rule_json(loaded, rule_id), _rule_text(loaded, rule_id, label)
    if name in registry.conditions:
        kind = registry.conditions[name]
        return dict(kind.schema), _condition_text(name, kind.help, kind.schema)
    if name in registry.actions:
        action = registry.actions[name]
        return dict(action.options_schema), _action_text(action)
    metrics = [_metric_facts(registry, metric.key) for metric in registry.metrics.values() if metric.name == name]
    if metrics:
        return metrics, _metric_text(metrics, loaded)
    settings = {**SETTINGS, **registry.settings}
    if name in settings:
        setting = settings[name]
        words = f"  {setting.help}\n  default {json.dumps(setting.default)}; environment {setting.env}"
        facts = {"setting": name, "help": setting.help, "default": setting.default, "environment": setting.env}
        return facts, f"settings: {name}\n{words}"
    for pack in pack_names(registry):  # a rule of a pack that is not in use here can be read all the same
        other = load_all([Document(pack, {"version": 1, "extends": [pack]})], registry=registry)
        if name in other.merged.rules:
            return _rule_json(other, name), _rule_text(other, name, f"{pack}, which is not in use here")
    known = [*loaded.merged.rules, *registry.conditions, *registry.actions, *settings]
    known += [metric.name for metric in registry.metrics.values()]
    hint = suggest(name, known) or "`healthcheck explain` lists the rules here, `healthcheck metrics` the metrics"
    raise UsageError(f'"{name}" is not a rule, condition, action, metric or setting; {hint}')


def _list(loaded: Loaded, label: str) -> list[str]:
    """All rules in force: what ``explain`` prints without a name."""
    rules = loaded.ruleset.rules
    rows = [[cause.id, str(cause.severity), asks(cause)] for rule in rules for cause in rule.causes]
    lines = [f"{label}: {len(rules)} rules", *table_lines(rows)]
    return lines + ([f"  off: {', '.join(loaded.ruleset.off)}"] if loaded.ruleset.off else [])


def _rule_text(loaded: Loaded, rule_id: str, label: str) -> str:
    draft = loaded.merged.rules[rule_id]
    rule = next((r for r in loaded.ruleset.rules if r.id == rule_id), None)
    lines = [
        _page(draft).rstrip() or f"# {rule_id}\n\n({_without_page(draft)})",
        "",
        f"## This rule here ({label})",
        "",
    ]
    if rule is not None:
        for cause in rule.causes:
            fails = "yes" if cause.severity >= 2 else "no"
            lines += [f"cause     {cause.name} ({cause.kind})"] if cause.name else []
            lines += [f"asks      {asks(cause)}", f"fails CI: {fails}, stops: {'yes' if cause.may_stop else 'no'}", ""]
    elif rule_id in loaded.ruleset.off:
        lines += ["switched off", ""]
    rows = list(rule_rows(draft))
    width = min(max((len(text) for text, _ in rows), default=0), 78)
    lines += [f"{text.ljust(width)}  # {origin}" for text, origin in rows]
    problems = [p for p in loaded.problems if p.severity == "error"]
    if problems:
        lines += ["", f"the rule files hold {len(problems)} error(s); see `healthcheck check`"]
    return "\n".join(lines)


def _rule_json(loaded: Loaded, rule_id: str) -> dict[str, Any]:
    draft = loaded.merged.rules[rule_id]
    rule = next((r for r in loaded.ruleset.rules if r.id == rule_id), None)
    causes = rule.causes if rule is not None else ()
    return {
        "rule": rule_id,
        "off": rule_id in loaded.ruleset.off,
        "asks": asks(causes[0]) if len(causes) == 1 else None,
        **({"causes": {cause.name: asks(cause) for cause in causes}} if draft.causes else {}),
        "keys": {key: {"value": e.value, "origin": str(e.origin)} for key, e in draft.entries.items()},
        "page": _page(draft) or None,
    }


def _condition_text(name: str, help: str, schema: Any) -> str:
    lines = [f"condition {name}", f"  {schema.get('description', help)}"]
    options = schema.get("properties", {})
    if options:
        lines.append("  options:")
        lines += [
            f"    {key:<12} {value.get('description', '')}"
            + (f" ({', '.join(map(flow, value['enum']))})" if "enum" in value else "")
            for key, value in options.items()
        ]
    return "\n".join(lines)


def _action_text(action: Action) -> str:
    lines = [f"action {action.name} ({action.stage})", *(f"  {line}".rstrip() for line in _docstring(action))]
    options = action.options_schema.get("properties", {})
    if options:
        lines.append("  options:")
        lines += [f"    {key:<12} {_option(value)}".rstrip() for key, value in options.items()]
    lines.append(
        f"  in a rule:   then: [{action.name}]   or   then: [{{{action.name}: {{...}}}}]"
        if options
        else f"  in a rule:   then: [{action.name}]"
    )
    return "\n".join(lines)


def _option(schema: Any) -> str:
    kinds = schema.get("enum") or [schema["type"]] if "type" in schema or "enum" in schema else []
    text = str(schema.get("description", ""))
    return text or ", ".join(map(str, kinds))


def _docstring(thing: object) -> list[str]:
    import inspect

    return (inspect.getdoc(type(thing)) or "").splitlines()


def _metric_facts(registry: Registry, key: str) -> dict[str, Any]:
    metric, probe = registry.metrics[key], registry.metric_probe[key]
    return {
        "metric": f"{metric.name}[*]" if metric.labels else metric.name,
        "help": metric.help,
        "unit": metric.unit,
        "cost": metric.cost.name.lower(),
        "needs": list(metric.needs),
        "labels": list(metric.labels),
        "probe": probe.name,
        "measured_at": [str(kind) for kind in probe.listens_to],
    }


def _metric_text(found: list[dict[str, Any]], loaded: Loaded) -> str:
    lines = []
    for facts in found:
        lines += [f"metric {facts['metric']}", f"  {facts['help']}"]
        rows = [
            ("unit", facts["unit"] or "a plain number"),
            ("cost", facts["cost"]),
            ("needs", ", ".join(facts["needs"])),
            ("labels", ", ".join(facts["labels"])),
            ("probe", f"{facts['probe']}, at {', '.join(facts['measured_at'])}"),
        ]
        lines += [f"  {name:<7} {value}" for name, value in rows if value]
    used = [
        rule.id for rule in loaded.ruleset.causes if str(rule.selector.metric) == found[0]["metric"].removesuffix("[*]")
    ]
    lines.append(f"  rules here: {', '.join(used)}" if used else "  no rule here judges it by name")
    return "\n".join(lines)


def _is_ours(draft: Draft) -> bool:
    """Whether a rule is one of those that come with healthcheck, however it was set here.

    Another one may have its name: what a rule watches says which it is.
    """
    says = [draft.entries[key] for key in ("metric", "when") if key in draft.entries] or list(draft.entries.values())
    return any(str(entry.origin).startswith(OURS) for entry in says[:1])


def _without_page(draft: Draft) -> str:
    if _read_page(draft.id):
        return "a rule of yours; healthcheck has another one of this name, whose page is not about this rule"
    return "this rule has no page of its own"


def _page(draft: Draft) -> str:
    """The page of the rule; empty if it has none, or only one of another rule of this name."""
    return _read_page(draft.id) if _is_ours(draft) else ""


def _read_page(rule_id: str) -> str:
    """A page: package data of an installation, ``docs/rules`` of a bare checkout."""
    name = f"{rule_id}.md"
    try:
        text = (resources.files("healthcheck.rulepages") / name).read_text(encoding="utf-8")
    except (ModuleNotFoundError, OSError):
        path = Path(__file__).resolve().parents[2] / "docs" / "rules" / name
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    return text
