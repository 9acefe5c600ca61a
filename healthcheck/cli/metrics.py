"""``healthcheck metrics``: which metrics there are; with a run: what was normal in it. What matters first fits one screen;
``--all`` has the rest."""

from __future__ import annotations

import argparse
from typing import Any

from healthcheck.cli.options import add_format, add_plugin_option, loaded_host, print_json
from healthcheck.core.samples import Metric
from healthcheck.core.text import number, shorten, step
from healthcheck.record.runs import Run, find_run
from healthcheck.reports.recorded import SeriesSummary, approaches, summarise
from healthcheck.reports.tables import cut, prose, table_lines
from healthcheck.reports.wording import by_severity, checks, excused

NAME = "metrics"
HELP = "metrics that rules may name; with RUN: what was normal in that run, and how close rules came; --all: everything"

COMMON = (
    "loss",
    "eval.loss",
    "grad_norm",
    "lr",
    "update_ratio",
    "throughput",
    "time.step",
    "time.data",
    "memory.allocated",
    "memory.host",
    "params.nonfinite",
    "amp.scale",
)
"""What people look at first, in this order."""
MOST_SERIES, MOST_RULES = 9, 4
"""Rows of the two tables of the short view of a run."""
NAME_WIDTH = 30
"""Longer names of series are shortened in the short view; ``--all`` has them whole."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run (`latest`); without it the catalogue")
    add_plugin_option(parser)
    parser.add_argument("--all", action="store_true", help="all metrics; with RUN: every series and every rule")
    add_format(parser)


def main(args: argparse.Namespace) -> int:
    host = loaded_host(args)
    if args.run is None:
        metrics, owners = host.registry.metrics, host.registry.owners
        if args.format == "json":
            print_json([_metric_json(m, owners.get(("metrics", key), "")) for key, m in metrics.items()])
        else:
            print("\n".join(_catalogue(metrics) if args.all else _common(metrics)))
        return 0
    run = find_run(args.run)
    units = host.registry.units()
    if args.format == "json":
        print_json(_run_json(run))
    elif args.all:
        print("\n".join(_run_text(run, units)))
    else:
        own = {metric.name for metric in host.registry.metrics.values()}
        print("\n".join(_run_short(run, units, own)))
    return 0


def _common(metrics: dict[str, Metric]) -> list[str]:
    """The metrics that most rules are about, and where the others are."""
    rows = [[name, metrics[name].unit or "-", metrics[name].help] for name in COMMON if name in metrics]
    lines = [f"{name.ljust(17)} {unit.ljust(9)} {text}" for name, unit, text in rows]
    return [
        "the metrics that people look at first",
        *(line for text in lines for line in prose(text, "  ", " " * 30)),
        "",
        f"{len(metrics) - len(rows)} more: healthcheck metrics --all        about one: healthcheck explain NAME",
        "your own: healthcheck.log(x=value) in the script, external: [x] in the rule file",
    ]


def _metric_json(metric: Metric, owner: str) -> dict[str, Any]:
    return {
        "name": metric.key,
        "unit": metric.unit,
        "cost": metric.cost.value,
        "needs": list(metric.needs),
        "labels": list(metric.labels),
        "help": metric.help,
        "plugin": owner,
    }


def _catalogue(metrics: dict[str, Metric]) -> list[str]:
    """The catalogue as a table; families are written as rules name them."""
    rows = []
    for _, metric in sorted(metrics.items()):
        name = f"{metric.name}[*]" if metric.labels else metric.name
        rows.append([name, metric.unit or "-", metric.cost.value, ", ".join(metric.needs) or "-", metric.help])
    return [
        *table_lines(rows, heads=("metric", "unit", "cost", "needs", "what it is"), indent=0),
        "",
        "cost: free = known already, host = work on the host, device = kernels but no wait, sync = waits for the device",
        "your own: healthcheck.log(name=value) in the script, and `external: [name]` in the rule file",
    ]


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "run": run.name,
        "steps": run.steps,
        "complete": run.samples.complete,
        "series": [summary.to_json() for summary in summarise(run.samples.batches)],
        "rules": [approach.to_json() for approach in approaches((run.report or {}).get("rules", {}))],
    }


def _run_short(run: Run, units: dict[str, str], known: set[str]) -> list[str]:
    """One screen: alerts, then the series that matter, then the rules that came closest to firing.

    :param known: metrics of probes; any other is one that the script logs itself.
    """
    lines = prose(f"{run.shown}: {run.target}, {step(run.steps)} steps, {run.status}", further="  ")
    alerts = [a for a in run.alerts if not excused(a)]
    if alerts:
        names = [f"{a['rule']} at step {step(a['fired_step'])}" for a in by_severity(alerts)]
        lines += cut(prose(f"alerts: {shorten(names, 3)}", "  ", "    "), 2)
        lines += prose(f"why: healthcheck why {run.name}", "  ", "    ")
    summaries = summarise(run.samples.batches)
    chosen = _first_ones(summaries, run, known)
    rows = []
    for found in chosen:
        unit = units.get(found.metric, "")
        shown = (found.minimum, found.median, found.maximum, found.last)
        bad = f"{found.nonfinite:,} not finite" if found.nonfinite else ""
        rows.append([_shortened(found.name), *(number(v, unit) for v in shown), bad])
    if not summaries:
        lines.append("  no samples were recorded")
    heads = ("metric", "min", "median", "max", "last", "")
    lines += ["", *table_lines(rows, "lrrrrl", heads=heads)] if rows else []
    lines += _nearest_lines(run)
    left = len(summaries) - len(chosen)
    if left:
        lines += [
            "",
            *prose(f"{left:,} more series and every rule: healthcheck metrics {run.name} --all", "  ", "    "),
        ]
    return lines


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 15]}...{name[-12:]}"


def _first_ones(summaries: list[SeriesSummary], run: Run, known: set[str]) -> list[SeriesSummary]:
    """Series of rules that fired, then what a script logs itself, then what is looked at first, then any that moved."""
    fired = [str(alert["series"][0]["name"]) for alert in by_severity(run.alerts) if alert.get("series")]

    def order(found: SeriesSummary) -> tuple[int, int]:
        if found.name in fired:
            return 0, fired.index(found.name)
        if found.name in COMMON[:3]:
            return 1, COMMON.index(found.name)
        if found.metric not in known:
            return 2, 0
        return (3, COMMON.index(found.name)) if found.name in COMMON else (4, 0)

    def worth_a_row(found: SeriesSummary) -> bool:
        if order(found)[0] < 4 or found.nonfinite:
            return True
        return not _of_family(found) and found.minimum != found.maximum

    return sorted(filter(worth_a_row, summaries), key=order)[:MOST_SERIES]


def _of_family(found: SeriesSummary) -> bool:
    """Whether a series is one of many: ``grad_norm[layers.0.weight]``; ``loss[optimizer=1]`` is one of few."""
    return "[" in found.name and "=" not in found.name


def _nearest_lines(run: Run) -> list[str]:
    """The rules that came closest to firing without doing so, where that can be said of a plain limit."""
    if run.report is None:
        return ["", f"  the run is {run.status}: how close rules came is written at the end"]
    found = [(part, a) for a in approaches(run.report.get("rules", {})) if (part := a.part_of_limit) is not None]
    near = sorted((pair for pair in found if pair[0] >= 0.1), key=lambda pair: -pair[0])[:MOST_RULES]
    rows = [[a.rule, number(a.score), a.threshold, step(a.step or 0)] for _, a in near]
    if not rows:
        return []
    return ["", *table_lines(rows, "lrlr", heads=("closest to firing, no alert", "reached", "fires", "at step"))]


def _run_text(run: Run, units: dict[str, str]) -> list[str]:
    """Every series of a run, and every rule."""
    summaries = summarise(run.samples.batches)
    rows = []
    for found in summaries:
        unit = units.get(found.metric, "")
        shown = (found.minimum, found.median, found.p99, found.maximum, found.last, found.mad)
        rows.append(
            [
                found.name,
                f"{found.samples:,}",
                *(number(v, unit) for v in shown),
                f"{found.nonfinite:,}" if found.nonfinite else "-",
            ]
        )
    lines = [f"{run.shown}: {run.target}, {step(run.steps)} steps, {run.status}"]
    if not summaries:
        lines.append("  no samples were recorded")
    else:
        heads = ("metric", "samples", "min", "median", "p99", "max", "last", "MAD", "non-finite")
        lines += table_lines(rows, "lrrrrrrrr", heads=heads)
    if not run.samples.complete:
        lines.append("  the record was thinned to stay small: early steps count less here")
    return lines + _approach_lines(run)


def _approach_lines(run: Run) -> list[str]:
    if run.report is None:
        return ["  no report (the run is " + run.status + "): closest approaches are written at the end"]
    rows = []
    silent = []
    for found in approaches(dict(checks(run.report["rules"]))):
        if found.verdict == "not judged":
            silent.append([found.rule, found.reason])
        else:
            at = step(found.step) if found.step is not None else "-"
            rows.append([found.rule, number(found.score), at, found.verdict, found.threshold])
    lines = []
    if rows:
        heads = ("rule", "closest", "at step", "verdict", "fires")
        lines = ["", "closest approach of each rule", *table_lines(rows, "lrrll", heads=heads)]
    if silent:
        lines += ["", "not judged", *table_lines(silent)]
    return lines
