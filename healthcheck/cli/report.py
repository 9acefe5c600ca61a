"""``healthcheck report``: how a recorded run ended; ``--share`` leaves out host, user and paths."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from healthcheck.cli.options import add_format, add_run, loaded_host, print_json
from healthcheck.core.errors import UsageError
from healthcheck.core.text import moment, step
from healthcheck.record.runs import Run, find_run
from healthcheck.record.sharing import names_to_hide, shareable
from healthcheck.reports.tables import table_lines
from healthcheck.reports.wording import actions_done, how_it_ended, judged_line, width_of, with_exit

NAME = "report"
HELP = "how a run ended: alerts, verdict of each rule; --share leaves out host, user and paths"


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--share", action="store_true", help="leave out host, user, paths and the command line")
    add_format(parser, "html", help="html: a page with charts")


def main(args: argparse.Namespace) -> int:
    run = find_run(args.run)
    content: dict[str, Any] = {"run": run.facts, "report": run.report, "alerts": run.alerts}
    if run.report is None:  # the run goes on or was killed: its alerts stand in a file of their own
        content["status"] = run.status
    else:
        del content["alerts"]  # the report has them
    if args.share:
        content = shareable(content, names_to_hide(run.facts))
    if args.format == "json":
        print_json(content)
    elif args.format == "html":
        _write_utf8(_page(run, content))
    else:
        print("\n".join(_text(run, content)))
    return 0


def _write_utf8(page: str) -> None:
    """The page says that it is UTF-8, so it must be, whatever the terminal speaks."""
    out = getattr(sys.stdout, "buffer", None)
    if out is None:
        sys.stdout.write(page)
        return
    sys.stdout.flush()
    out.write(page.encode("utf-8", "replace"))
    out.flush()


def _page(run: Run, content: dict[str, Any]) -> str:
    from healthcheck.reports.page import page_html, recorded_lines

    if content["report"] is None:
        raise UsageError(f"{run.name} has no report yet (the run is {run.status}); a page is made of the report")
    return page_html([content["report"]], recorded_lines(run.folder, loaded_host().registry.units()))


def _text(run: Run, content: dict[str, Any]) -> list[str]:
    facts, report = content["run"], content["report"]
    lines = [f"{run.name}: {facts.get('target', '?')}, began {moment(run.began)}"]
    versions = ", ".join(f"{name} {value}" for name, value in facts.get("versions", {}).items())
    lines.append(f"  {versions}")
    alerts = content["alerts"] if report is None else report["alerts"]
    if report is None:
        lines.append(f"  no report: the run is {content['status']}; last recorded step {step(run.steps)}")
    else:
        lines.append(f"  rules: {report['rules_source']}, mode {report['mode']}")
    for alert in alerts:
        lines += ["", *_alert_lines(alert)]
    if report is not None:
        rows = [
            [rule, entry["verdict"], f"{entry['samples']:,} samples", entry.get("reason", "")]
            for rule, entry in report["rules"].items()
        ]
        lines += ["", *table_lines(rows, "llrl"), "", f"  {judged_line(report['rules'])}"]
        lines += with_exit(f"healthcheck: {how_it_ended(report)}", int(report["exit_code"]), width_of(sys.stdout))
    return lines


def _alert_lines(alert: dict[str, Any]) -> list[str]:
    until = f" to {step(alert['cleared_step'])}" if alert.get("cleared_step") is not None else ", still firing"
    lines = [f"{alert['number']:>3}  {alert['severity']}  {alert['rule']}  step {step(alert['fired_step'])}{until}"]
    lines.append(f"     {alert.get('message', '')}")
    lines += [f"     {key.replace('_', ' ')}: {value}" for key, value in alert.get("facts", {}).items()]
    lines.append(f"     {actions_done(alert)}")
    if alert.get("explained_by"):
        lines.append(f"     explained by {alert['explained_by']}")
    if alert.get("hint"):
        lines.append(f"     try: {alert['hint']}")
    return lines
