"""``healthcheck why``: the reasons of one alert, recomputed from the record by the real engine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from healthcheck.commands.loading import loaded_host
from healthcheck.commands.options import add_plugin_option
from healthcheck.commands.why_text import alert_text, silent_text
from healthcheck.dispatch import suggest
from healthcheck.errors import HealthCheckError, UsageError
from healthcheck.plugins import PluginHost
from healthcheck.reports.runs import Run, find_run
from healthcheck.reports.strict import strict
from healthcheck.reports.why import explain_alert
from healthcheck.rulelang.rule import RuleSet

NAME = "why"
HELP = "why an alert fired: the steps around it, with value, normal, score and state"

_SEVERITIES = {"error": 2, "warning": 1, "info": 0}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="*",
        metavar="[RUN] [N | RULE]",
        help="a run (default: latest), and which of its alerts (default: the most severe)",
    )
    add_plugin_option(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: for scripts")


def main(args: argparse.Namespace) -> int:
    run, wanted = _parse(list(args.what))
    host = loaded_host(args.plugins)
    rules, problem = _rules(run, host)
    alert = _choose(run, wanted, rules)
    if alert is None:
        print(_silent_json(run, wanted) if args.format == "json" else "\n".join(silent_text(run, wanted)))
        return 0
    units = {metric.name: metric.unit for metric in host.registry.metrics.values()}
    explanation = explain_alert(run, alert, rules, problem)
    if args.format == "json":
        print(json.dumps(strict(explanation.to_json()), indent=1, allow_nan=False))
    else:
        print("\n".join(alert_text(explanation, units)))
    return 0


def _parse(words: list[str]) -> tuple[Run, str | None]:
    """The run and the alert that are meant; one word alone may be either."""
    if len(words) > 2:
        raise UsageError("healthcheck why takes a run and an alert: healthcheck why [RUN] [N | RULE]")
    if len(words) == 2:
        return find_run(words[0]), words[1]
    if not words:
        return find_run(), None
    word = words[0]
    if word.isdigit():
        return find_run(), word
    try:
        latest = find_run()
    except UsageError:
        return find_run(word), None
    if word in _rule_ids(latest):
        return latest, word
    try:
        return find_run(word), None
    except UsageError as error:
        hint = suggest(word, _rule_ids(latest))
        if hint:
            raise UsageError(f'"{word}" is neither a run nor a rule of {latest.name}; {hint}') from None
        raise error


def _rule_ids(run: Run) -> list[str]:
    known = dict.fromkeys(str(alert["rule"]) for alert in run.alerts)
    return list(known | dict.fromkeys((run.report or {}).get("rules", {})))


def _rules(run: Run, host: PluginHost) -> tuple[RuleSet | None, str]:
    """The rules that judged the run, or None and why they cannot be compiled here."""
    from healthcheck.assembly import load_rules_for

    if not run.rules_file.is_file():
        return None, "the record has no rules.yaml"
    try:
        return load_rules_for(rules=[str(run.rules_file)], host=host), ""
    except HealthCheckError as error:
        return None, f"its rules cannot be read here ({str(error).splitlines()[0]}); a plugin may be missing: -p PLUGIN"


def _choose(run: Run, wanted: str | None, rules: RuleSet | None) -> dict[str, Any] | None:
    alerts = run.alerts
    if wanted is None:
        worst = sorted(
            alerts,
            key=lambda a: (
                bool(a.get("muted")),
                bool(a.get("explained_by")),
                -_SEVERITIES.get(a["severity"], 0),
                a["number"],
            ),
        )
        return worst[0] if worst else None
    if wanted.isdigit():
        for alert in alerts:
            if alert["number"] == int(wanted):
                return alert
        numbers = f"1 to {len(alerts)}" if alerts else "none"
        raise UsageError(f"{run.name} has no alert {wanted}; its alerts: {numbers}")
    for alert in alerts:
        if alert["rule"] == wanted:
            return alert
    known = _rule_ids(run) or [rule.id for rule in rules.rules] if rules is not None else _rule_ids(run)
    if wanted in known:
        return None
    raise UsageError(f'{run.name} had no rule "{wanted}"; {suggest(wanted, known) or "its rules: " + ", ".join(known)}')


def _silent_json(run: Run, rule: str | None) -> str:
    entries = (run.report or {}).get("rules", {})
    chosen = {rule: entries.get(rule)} if rule is not None else entries
    return json.dumps({"run": run.name, "alert": None, "rules": chosen}, indent=1, allow_nan=False)
