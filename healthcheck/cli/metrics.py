"""``healthcheck metrics``: which metrics there are; with a run: what was normal in it."""

from __future__ import annotations

import argparse
from typing import Any

from healthcheck.cli.options import add_format, add_plugin_option, loaded_host, print_json
from healthcheck.core.samples import Metric
from healthcheck.core.text import number, step
from healthcheck.record.runs import Run, find_run
from healthcheck.reports.statistics import approaches, summarise
from healthcheck.reports.tables import table_lines
from healthcheck.reports.wording import checks

NAME = "metrics"
HELP = "all metrics that rules may name; with RUN: what was normal in that run, and how close each rule came"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run (`latest`); without it the catalogue")
    add_plugin_option(parser)
    parser.add_argument("--all", action="store_true", help="with RUN: also each series of families (per parameter)")
    add_format(parser)


def main(args: argparse.Namespace) -> int:
    host = loaded_host(args)
    if args.run is None:
        metrics, owners = host.registry.metrics, host.registry.owners
        if args.format == "json":
            print_json([_metric_json(m, owners.get(("metrics", key), "")) for key, m in metrics.items()])
        else:
            print("\n".join(_catalogue(metrics)))
        return 0
    run = find_run(args.run)
    units = host.registry.units()
    if args.format == "json":
        print_json(_run_json(run))
    else:
        print("\n".join(_run_text(run, units, families=args.all)))
    return 0


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
        "cost: free = known anyway, host = host work, device = kernels without a wait, sync = waits for the device",
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


def _run_text(run: Run, units: dict[str, str], *, families: bool) -> list[str]:
    summaries = summarise(run.samples.batches)
    hidden = 0
    rows = []
    for found in summaries:
        # `grad_norm[layers.0.weight]` is one of a family; `loss[optimizer=1]` is a series of its own, and few.
        if not families and "[" in found.name and "=" not in found.name:
            hidden += 1
            continue
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
    if hidden:
        lines.append(f"  {hidden:,} more series of families (per parameter): --all")
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
