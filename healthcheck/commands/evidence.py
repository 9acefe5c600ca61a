"""``healthcheck evidence``: what was kept for an alert, readable without torch; or ask a run that goes on for it now."""

from __future__ import annotations

import argparse
import json

from healthcheck.commands.choosing import add_choice, numbered, run_and_alert, worst_first
from healthcheck.commands.evidence_text import bundle_text, list_text
from healthcheck.core.strictjson import strict
from healthcheck.dispatch import suggest
from healthcheck.errors import UsageError
from healthcheck.record.evidence import Bundle, bundles_of
from healthcheck.record.requests import LOOK_SECONDS, ask_for_evidence
from healthcheck.record.runs import Run

NAME = "evidence"
HELP = "what was kept for an alert: parameters, batch, series, environment, and how to load the files"


def configure(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, "the only one with evidence, else a list")
    parser.add_argument(
        "--now", action="store_true", help="ask a run that goes on to keep evidence of its next step, without an alert"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: for scripts")


def main(args: argparse.Namespace) -> int:
    run, wanted = run_and_alert(list(args.what), NAME)
    if args.now:
        return _ask(run, wanted)
    bundles = bundles_of(run)
    chosen = bundles if wanted is None else _chosen(run, bundles, wanted)
    if args.format == "json":
        content = {"run": run.name, "bundles": [bundle.to_json() for bundle in chosen]}
        print(json.dumps(strict(content), indent=1, allow_nan=False))
    elif len(chosen) == 1:
        print("\n".join(bundle_text(run, chosen[0])))
    else:
        print("\n".join(list_text(run, chosen)))
    return 0


def _chosen(run: Run, bundles: list[Bundle], wanted: str) -> list[Bundle]:
    """The bundles of one alert (ranks and repetitions make several). Raises ``UsageError`` that says why there is none."""
    if wanted.isdigit():
        number = int(wanted)
        found = [bundle for bundle in bundles if bundle.number == number]
        if not found:
            alert = numbered(run, number)
            raise UsageError(f"alert {wanted} ({alert['rule']}) of {run.name} has no evidence: {_why_none(alert)}")
        return found
    found = [bundle for bundle in bundles if bundle.rule == wanted]
    if found:
        return found
    alerts = worst_first(alert for alert in run.alerts if alert["rule"] == wanted)
    if alerts:
        raise UsageError(f"{wanted} of {run.name} has no evidence: {_why_none(alerts[0])}")
    kept = list(dict.fromkeys(bundle.rule for bundle in bundles))
    hint = suggest(wanted, kept) or (f"kept for: {', '.join(kept)}" if kept else "this run kept none")
    raise UsageError(f'{run.name} has no evidence of "{wanted}"; {hint}')


def _why_none(alert: dict[str, object]) -> str:
    outcomes = alert.get("actions")
    for outcome in outcomes if isinstance(outcomes, list) else ():
        if outcome.get("action") == "evidence":
            return str(outcome.get("text"))
    return "its rule does not ask for it (then: [evidence])"


def _ask(run: Run, wanted: str | None) -> int:
    if wanted is not None:
        raise UsageError("healthcheck evidence: --now takes a run and no alert")
    if run.status not in ("running", "unfinished"):
        raise UsageError(
            f"healthcheck evidence: {run.name} has ended ({run.status}); what it kept: healthcheck evidence {run.name}"
        )
    if int(run.facts.get("world_size") or 1) > 1:
        raise UsageError(
            "healthcheck evidence: --now asks runs of a single process only; ranks would stop for it one by one"
        )
    try:
        ask_for_evidence(run.folder)
    except OSError as error:
        raise UsageError(f"healthcheck evidence: {run.folder} cannot be written ({error.strerror})") from None
    print(
        f"asked {run.name} for evidence of its next step; it looks every {LOOK_SECONDS:g} s\n"
        f"then: healthcheck evidence {run.name}"
    )
    return 0
