"""``healthcheck plan``: what would be watched, what may stop the run, what cannot be judged here. Runs nothing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from healthcheck.cli.options import (
    add_format,
    add_plugin_option,
    add_rule_options,
    loaded_host,
    print_json,
    rule_choice,
)
from healthcheck.core.errors import UsageError
from healthcheck.core.text import plural, shorten, wrapped
from healthcheck.record.runs import new_rules, reading_folder
from healthcheck.reports.planned import Plan, by_reason, make_plan
from healthcheck.reports.tables import prose_width, table_lines
from healthcheck.rulelang.rule import RuleSet
from healthcheck.run.budget import what_the_budget_leaves_out

NAME = "plan"
HELP = "what would be watched, what may stop the run, which rules cannot be judged here and why; runs nothing"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "script", nargs="?", metavar="SCRIPT", help="the script that you would run; only its place is looked at"
    )
    add_rule_options(parser)
    parser.add_argument("--new", action="store_true", help="only rules of packs that the last run here did not know")
    parser.add_argument("--observe", action="store_true", help="plan for observe mode")
    parser.add_argument("--max-steps", type=int, metavar="N", help="which windows cannot fill in a run of N steps")
    add_plugin_option(parser)
    add_format(parser)


def main(args: argparse.Namespace) -> int:
    from healthcheck.assembly import load_rules_for
    from healthcheck.rulelang.discover import discover

    if args.script is not None and not args.script.startswith("-") and not Path(args.script).exists():
        raise UsageError(f"no such script: {args.script}")
    host = loaded_host(args)
    for note in discover(args.rules).notes:
        print(f"healthcheck: {note}", file=sys.stderr)
    rules = load_rules_for(
        host=host,
        **rule_choice(args),
        settings={"mode": "observe"} if args.observe else {},
    )
    if args.new:
        wanted = set(new_rules(rules, reading_folder()))
        rules.rules = rules.keeping(lambda cause: cause.id in wanted or cause.rule in wanted).rules
    plan = make_plan(rules, host.registry, max_steps=args.max_steps)
    if args.format == "json":
        print_json(plan_json(plan, rules, args.max_steps))
    else:
        print("\n".join(_text(plan, rules, args.script, args.max_steps)))
    return 0


def plan_json(plan: Plan, rules: RuleSet, max_steps: int | None) -> dict[str, Any]:
    return {
        "source": rules.source,
        "profile": rules.profile or None,
        "mode": rules.settings.get("mode", "act"),
        "max_steps": max_steps,
        "rules": [planned.to_json() for planned in plan.rules],
        "off": plan.off,
        "metrics": plan.metrics,
        "derived": plan.derived,
        "logged_by_script": plan.logged,
        "probes": plan.probes,
    }


def _text(plan: Plan, rules: RuleSet, script: str | None, max_steps: int | None) -> list[str]:
    """All that is printed, in lines that fit the terminal; what fires when stands in ``explain`` and in the JSON."""
    width = prose_width()
    what = f" for {script}" if script else ""
    length = f", {plural(max_steps, 'step')}" if max_steps is not None else ""
    profile = f", profile {rules.profile}" if rules.profile else ""
    source = f" of {rules.source}" if rules.source else ""
    count = plural(len({planned.rule.rule for planned in plan.rules}), "rule")
    checks = f" ({plural(len(plan.rules), 'check')})" if len(plan.rules) > 1 else ""
    lines = wrapped(f"{count}{checks}{source}{profile}{what}{length}", width, "  ", "")
    stops = [planned.rule.id for planned in plan.rules if planned.may_stop]
    observe = rules.settings.get("mode") == "observe"
    stoppers = f"may stop the run: {', '.join(stops) if stops else 'none'}" + (" (observe mode)" if observe else "")
    lines += wrapped(stoppers, width, "    ", "  ")
    table = []
    for planned in plan.rules:
        if not planned.outside:
            here = f"no: {planned.blocked}" if planned.blocked else planned.depends or "yes"
            then = " ".join(planned.actions)
            table.append([planned.rule.id, str(planned.rule.severity), then, planned.cost.value, here])
    lines += ["", *table_lines(table, heads=("rule", "severity", "then", "cost", "judged here"))]
    blocked = by_reason((p.rule.id, p.blocked) for p in plan.rules)
    if blocked:
        lines += ["", f"not judged here, though they apply: {sum(map(len, blocked.values()))} of {len(table)}"]
        lines += _listed(blocked, width)
        required = [p.rule.id for p in plan.rules if p.blocked and p.rule.required]
        if required:
            lines += wrapped(f"required, so the run would fail: {', '.join(required)}", width, "    ", "  ")
    outside = by_reason((p.rule.id, p.outside) for p in plan.rules)
    if outside:
        lines += ["", f"do not apply here: {sum(map(len, outside.values()))} of {len(plan.rules)}"]
        lines += _listed(outside, width)
    more = [
        f"metrics: {shorten([_named(key, every) for key, every in plan.metrics.items()], 40)}",
        f"probes: {', '.join(plan.probes) or 'none'}",
        *(f"derived: {name} = {text}" for name, text in plan.derived.items()),
    ]
    if plan.logged:
        more.append(f"only if the script logs it: {', '.join(plan.logged)}")
    if plan.off:
        more.append(f"off: {', '.join(plan.off)}")
    lines += ["", *(line for text in more for line in wrapped(text, width, "  ", ""))]
    share = rules.settings.get("overhead_budget")
    if share is not None:
        lines += ["", *wrapped(what_the_budget_leaves_out(float(share)), width, "  ", "")]
    return lines


def _listed(reasons: dict[str, list[str]], width: int) -> list[str]:
    return [line for why, ids in reasons.items() for line in wrapped(f"{why}: {', '.join(ids)}", width, "    ", "  ")]


def _named(key: str, every: int) -> str:
    name = key.replace("[]", "[*]")
    return f"{name} (every {every} steps)" if every > 1 else name
