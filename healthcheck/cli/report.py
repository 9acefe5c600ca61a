"""``healthcheck report``: how a recorded run ended, on one screen: alerts first. ``--all`` has every alert, fact and rule;
``--share`` leaves out host, user and paths."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.cli.choosing import rules_of
from healthcheck.cli.options import add_format, add_plugin_option, add_run, loaded_host, print_json
from healthcheck.core.errors import UsageError
from healthcheck.core.text import moment, plural, step, width_of
from healthcheck.record.runs import Run, find_run
from healthcheck.record.sharing import names_to_hide, shareable
from healthcheck.reports.tables import SCREEN, cut, prose, table_lines
from healthcheck.reports.wording import actions_done, by_severity, excused, how_it_ended, judged_line, with_exit

NAME = "report"
HELP = "how a run ended, alerts first, on one screen; --all: every alert and rule"


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--all", action="store_true", help="every alert with all its facts, and every rule")
    parser.add_argument("--share", action="store_true", help="leave out host, user, paths and the command line")
    add_format(parser, "html", help="html: a page with charts")
    parser.add_argument(
        "--open", action="store_true", help="write the page into the run's folder and open it in a browser"
    )
    parser.add_argument("--with", dest="other", metavar="RUN", help="html: draw another run below this one")
    add_plugin_option(parser)


def main(args: argparse.Namespace) -> int:
    run = find_run(args.run)
    content: dict[str, Any] = {"run": run.facts, "report": run.report, "alerts": run.alerts}
    if run.report is None:  # the run goes on or was killed: its alerts stand in a file of their own
        content["status"] = run.status
    else:
        del content["alerts"]  # the report has them
    if args.share:
        content = shareable(content, names_to_hide(run.facts))
    if args.other and not args.open and args.format != "html":
        raise UsageError("--with draws a second run into a page: add --open, or --format html")
    if args.open:
        _open(run, _page(run, content, args), shared=args.share)
    elif args.format == "json":
        print_json(content)
    elif args.format == "html":
        _write_utf8(_page(run, content, args))
    else:
        print("\n".join(_whole(run, content) if args.all else _short(run, content)))
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


def _page(run: Run, content: dict[str, Any], args: argparse.Namespace) -> str:
    from healthcheck.reports.page import page_html
    from healthcheck.reports.pagedata import page_data

    host = loaded_host(args)
    rules, problem = rules_of(run, host)
    report = content["report"] or _so_far(run, content)
    data = page_data(
        run,
        report["alerts"],
        host.registry.units(),
        report=report,
        rules=rules,
        problem=problem,
        other=find_run(args.other) if args.other else None,
        hidden=names_to_hide(run.facts) if args.share else None,
    )
    return page_html([report], data)


def _so_far(run: Run, content: dict[str, Any]) -> dict[str, Any]:
    """In place of the report of a run that goes on or was killed: what is known of it."""
    last = next((batch.now for batch in reversed(run.samples.batches)), 0.0)
    return {
        "target": content["run"].get("target", "?"),
        "verdict": "not judged",
        "exit_code": "unknown",
        "exit_words": f"no report, the run is {content['status']}",
        "steps": run.steps,
        "unit": "step",
        "seconds": last,
        "mode": content["run"].get("mode", "act"),
        "rules_source": content["run"].get("rules_source"),
        "rules": {},
        "alerts": content["alerts"],
        "unfinished": content["status"],
    }


def _open(run: Run, page: str, *, shared: bool) -> None:
    """Beside the record, where only its owner may read; the browser is one more process that may not be there."""
    import webbrowser

    path = run.folder / ("page-shared.html" if shared else "page.html")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}); healthcheck report --format html > page.html"
        ) from None
    path.chmod(0o600)
    opened = False
    try:
        opened = webbrowser.open(path.absolute().as_uri())
    except webbrowser.Error:
        pass
    print(path if opened else f"{path}    (no browser was found: open it yourself)")


def _short(run: Run, content: dict[str, Any]) -> list[str]:
    """What fits a screen: the worst alerts, a line for the others, how the run ended and where the rest is."""
    facts, report = content["run"], content["report"]
    head = f"{run.name}: {facts.get('target', '?')}, began {moment(run.began)}"
    lines = prose(head, further="  ")
    alerts = content["alerts"] if report is None else report["alerts"]
    if report is None:
        ending = [f"  no report: the run is {content['status']}; last recorded step {step(run.steps)}"]
    else:
        ending = prose(f"healthcheck: {how_it_ended(report)}  exit {report['exit_code']}", further="  ")
        ending += prose(judged_line(report["rules"]), "  ", "    ")
    pointers = ["every rule"] if report is not None else []
    own = [a for a in alerts if not excused(a) and not a.get("explained_by")]
    aside = [a for a in alerts if excused(a) or a.get("explained_by")]
    blocks = [_short_lines(alert) for alert in by_severity(own)]
    others = prose(_named(aside), "  also  ", "        ") if aside else []
    # Two lines for the pointers below, one each for the gaps and for "more alerts".
    room = SCREEN - len(lines) - len(ending) - len(others[:2]) - 5
    shown = 0
    for block in blocks:
        if shown and len(block) > room:
            break
        lines += ["", *block] if not shown else block
        room -= len(block)
        shown += 1
    lines += others[:2] if len(others) <= 2 else [others[0], f"        and {plural(len(aside), 'alert')} in all"]
    if shown < len(blocks) or len(others) > 2:
        if shown < len(blocks):
            lines.append(f"  {plural(len(blocks) - shown, 'more alert')}")
        pointers.insert(0, "every alert")
    pointing = f"  {' and '.join(pointers)}: healthcheck report {run.name} --all" if pointers else ""
    why = f"  one alert in detail: healthcheck why {run.name} N" if alerts else ""
    return [*lines, "", *ending, *filter(None, (why, pointing))]


def _named(alerts: Sequence[Mapping[str, Any]]) -> str:
    """``b at step 51 (explained by a); c at step 60 (muted)``; a rule that fired often stands once."""
    named: dict[str, str] = {}
    for alert in alerts:
        why = "muted" if alert.get("muted") else "accepted" if alert.get("accepted") else ""
        why = why or f"explained by {alert['explained_by']}"
        named.setdefault(str(alert["rule"]), f"{alert['rule']} at step {step(alert['fired_step'])} ({why})")
    return "; ".join(named.values())


def _short_lines(alert: Mapping[str, Any]) -> list[str]:
    """What happened and what to try: an alert in a few lines."""
    until = f" to {step(alert['cleared_step'])}" if alert.get("cleared_step") is not None else ", still firing"
    head = f"{alert['number']:>3}  {alert['severity']}  {alert['rule']}  step {step(alert['fired_step'])}{until}"
    lines = [head]
    if alert.get("message"):
        lines += cut(prose(str(alert["message"]), "     "), 2)
    where = alert.get("where") or alert.get("facts", {}).get("where")
    if where:
        lines.append(f"     at {where}")
    if alert.get("hint"):
        lines += cut(prose(f"try: {alert['hint']}", "     ", "          "), 2)
    return lines


def _whole(run: Run, content: dict[str, Any]) -> list[str]:
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
