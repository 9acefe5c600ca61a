"""``healthcheck why``: the reasons of one alert, recomputed from the record by the real engine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from healthcheck.commands.choosing import add_choice, numbered, rule_ids, run_and_alert, worst_first
from healthcheck.commands.loading import loaded_host
from healthcheck.commands.options import add_plugin_option
from healthcheck.commands.why_text import alert_text, silent_text
from healthcheck.core.strictjson import strict
from healthcheck.dispatch import suggest
from healthcheck.errors import HealthCheckError, UsageError
from healthcheck.plugins import PluginHost
from healthcheck.record.runs import Run
from healthcheck.reports.why import explain_alert
from healthcheck.rulelang.rule import RuleSet

NAME = "why"
HELP = "why an alert fired: the steps around it, with value, normal, score and state"


def configure(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, "the most severe")
    add_plugin_option(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: for scripts")


def main(args: argparse.Namespace) -> int:
    run, wanted = run_and_alert(list(args.what), NAME)
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
    if wanted is None:
        return next(iter(worst_first(run.alerts)), None)
    if wanted.isdigit():
        return numbered(run, int(wanted))
    for alert in run.alerts:
        if alert["rule"] == wanted:
            return alert
    known = rule_ids(run) or [rule.id for rule in rules.rules] if rules is not None else rule_ids(run)
    if wanted in known:
        return None
    raise UsageError(f'{run.name} had no rule "{wanted}"; {suggest(wanted, known) or "its rules: " + ", ".join(known)}')


def _silent_json(run: Run, rule: str | None) -> str:
    entries = (run.report or {}).get("rules", {})
    chosen = {rule: entries.get(rule)} if rule is not None else entries
    return json.dumps({"run": run.name, "alert": None, "rules": chosen}, indent=1, allow_nan=False)
