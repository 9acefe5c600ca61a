"""The HTML page of a run: alerts, charts and every rule, in one file without a script."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from healthcheck.core.samples import decode_number, series_name
from healthcheck.core.text import duration, number, plural, step, visible_lines
from healthcheck.record.lines import Batch, read_samples
from healthcheck.reports.wording import actions_done, how_it_ended, judged_line, verdict_word


def escape(text: str) -> str:
    """Text from anywhere as text of the page: no markup, and nothing that is not seen."""
    return html.escape(visible_lines(text))


CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #ffffff; --panel: #f5f6f8; --rule: #d5d9de;
  --bad: #b42318; --warn: #8a5a00; --good: #1a6b35; --line: #2457a6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4af; --paper: #14171b; --panel: #1d2127;
  --rule: #353b43; --bad: #ff8b7e; --warn: #e3b341; --good: #6fce8a; --line: #83b0f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 1.25rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 1rem 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 0 0 .3rem; }
p { margin: .2rem 0; overflow-wrap: anywhere; }
small, dt, .numbers, .axis, figcaption span { color: var(--soft); font-size: .87rem; font-weight: normal; }
.said { font-family: ui-monospace, monospace; }
.badge { display: inline-block; padding: 0 .5em; border: 1px solid currentColor; border-radius: 3px; font-size: .75rem;
  font-weight: 600; white-space: nowrap; vertical-align: middle; }
.badge.failed, .badge.stopped, .badge.script-failed, .badge.internal-error, .error .sev { color: var(--bad); }
.badge.warned, .warning .sev { color: var(--warn); }
.badge.ok { color: var(--good); }
.badge.not-judged, .badge.interrupted, .badge.does-not-apply, .info .sev { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .8rem 0; }
dd { margin: 0; overflow-wrap: anywhere; }
article { background: var(--panel); border-left: 4px solid var(--soft); padding: .7rem .9rem; margin: .6rem 0; }
article.error { border-color: var(--bad); }
article.warning { border-color: var(--warn); }
article ul { margin: .3rem 0; padding-left: 1.2rem; overflow-wrap: anywhere; }
article:target { outline: 2px solid var(--line); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--panel); padding: .6rem .7rem; }
figcaption span { display: block; }
svg { display: block; width: 100%; height: 6rem; margin-top: .3rem; }
svg path { fill: none; vector-effect: non-scaling-stroke; }
.line { stroke: var(--line); stroke-width: 1.4; stroke-linejoin: round; }
.mark { stroke: var(--bad); stroke-dasharray: 3 3; }
.broken { stroke: var(--bad); stroke-width: 2; }
.axis { display: flex; justify-content: space-between; margin: 0; }
.wide { overflow-x: auto; }
details { margin-top: .8rem; }
summary { cursor: pointer; color: var(--soft); font-weight: 600; padding: .2rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
td:nth-child(1) { white-space: nowrap; }
.n { text-align: right; }
a { color: var(--line); }
@media print { article, figure { break-inside: avoid; } }
"""

# --------------------------------------------------------------------------------------------------
# Small line charts as inline SVG: one series over the steps of a run, with the steps of alerts marked.
#
# Nothing here is drawn by a script: a page that is opened on a login node, in a mail or in ten years shows the same.


WIDTH, HEIGHT = 320.0, 96.0
"""View box of one chart; the page scales it to the width of its column."""
BUCKETS = 160
"""Places along the steps; of each the lowest and the highest value are drawn, so that a spike of one sample stays."""
FIRST = ("loss", "eval.loss", "grad_norm", "lr", "throughput", "time.step", "memory.allocated")
"""What most readers look for, shown before other series."""
LOG_FROM = 50.0
"""Ratio of the largest to the smallest value from which positive values are drawn by their logarithms."""


@dataclass(slots=True)
class Line:
    """One series of a run."""

    name: str
    metric: str
    unit: str = ""
    """Unit of the metric, as in :func:`healthcheck.core.text.number`."""
    points: list[tuple[int, float]] = field(default_factory=list)
    """(step, value); values may be non-finite."""

    @property
    def tells(self) -> bool:
        """Whether there is anything to see: two values that differ, or one that is not finite."""
        return len(self.points) > 1 and len({value for _, value in self.points}) > 1


def lines_of(batches: Iterable[Batch], units: Mapping[str, str]) -> list[Line]:
    """The series that are worth a chart; families (one series per parameter) are left out.

    :param units: metric -> unit.
    """
    found: dict[str, Line] = {}
    for batch in batches:
        for sample in batch.samples:
            if any(key == "parameter" for key, _ in sample.labels):
                continue
            name = series_name(sample.metric, sample.labels)
            found.setdefault(name, Line(name, sample.metric, units.get(sample.metric, ""))).points.append(
                (sample.step, sample.value)
            )
    order = {metric: n for n, metric in enumerate(FIRST)}
    return sorted((line for line in found.values() if line.tells), key=lambda line: order.get(line.metric, len(order)))


def recorded_lines(record: Path, units: Mapping[str, str]) -> list[Line]:
    """The series of the record in a run folder; empty where there is none."""
    try:
        with open(record / "samples.jsonl", "rb") as file:
            return lines_of(read_samples(file).batches, units)
    except OSError:
        return []


def chart(line: Line, marks: Mapping[int, str]) -> str:
    """One chart with its caption as a ``figure`` element.

    :param marks: step of an alert -> its rule.
    """
    unit = line.unit
    finite = [value for _, value in line.points if math.isfinite(value)]
    broken = [at for at, value in line.points if not math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    first, last = line.points[0][0], line.points[-1][0]
    log = low > 0 and high / low >= LOG_FROM
    said = f"{number(low, unit)} to {number(high, unit)}" if finite else "no finite value"
    said += f", last {number(line.points[-1][1], unit)}" + (", log scale" if log else "")
    if broken:
        said += f", {plural(len(broken), 'value')} not finite from step {step(broken[0])}"
    place = _Scale(first, last, *(map(math.log, (low, high)) if log else _wide_enough(low, high)))
    drawn = [f'<path class="line" d="{_path(line.points, place, log)}"/>'] if finite else []
    drawn += [
        f'<path class="mark" d="M{place.x(at):.1f} 0V{HEIGHT:g}"><title>{escape(rule)}, step {step(at)}</title></path>'
        for at, rule in marks.items()
        if first <= at <= last
    ]
    # One mark a bucket: all of a run that stays broken, in a bounded number of elements.
    columns = sorted({round(place.x(at) / WIDTH * BUCKETS) for at in broken})
    drawn += [f'<path class="broken" d="M{n * WIDTH / BUCKETS:.1f} {HEIGHT:g}v-10"/>' for n in columns]
    name = escape(line.name)
    return (
        f"<figure><figcaption><b>{name}</b> <span>{escape(said)}</span></figcaption>"
        f'<svg viewBox="0 -2 {WIDTH:g} {HEIGHT + 4:g}" role="img" preserveAspectRatio="none" '
        f'aria-label="{name}, steps {step(first)} to {step(last)}: {escape(said)}">{"".join(drawn)}</svg>'
        f'<p class="axis"><span>step {step(first)}</span><span>{step(last)}</span></p></figure>'
    )


def _wide_enough(low: float, high: float) -> tuple[float, float]:
    """A range in which a value that hardly changes looks like one: at least two hundredths of its size."""
    missing = (0.02 * max(abs(low), abs(high)) - (high - low)) / 2
    return (low - missing, high + missing) if missing > 0 else (low, high)


@dataclass(frozen=True, slots=True)
class _Scale:
    first: float
    last: float
    low: float
    high: float

    def x(self, at: float) -> float:
        return (at - self.first) / ((self.last - self.first) or 1) * WIDTH

    def y(self, value: float) -> float:
        return HEIGHT / 2 if self.high == self.low else (self.high - value) / (self.high - self.low) * HEIGHT


def _path(points: Sequence[tuple[int, float]], place: _Scale, log: bool) -> str:
    """The line, broken where a value is not finite."""
    parts: list[str] = []
    pen = "M"
    for at, value in _thinned(points):
        if not math.isfinite(value):
            pen = "M"
            continue
        parts.append(f"{pen}{place.x(at):.1f} {place.y(math.log(value) if log else value):.1f}")
        pen = "L"
    return "".join(parts)


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most four points a bucket: the first that is not finite, the lowest, the highest and the last."""
    if len(points) <= 4 * BUCKETS:
        return list(points)
    kept: list[tuple[int, float]] = []
    for n in range(BUCKETS):
        bucket = points[n * len(points) // BUCKETS : (n + 1) * len(points) // BUCKETS]
        finite = [p for p in bucket if math.isfinite(p[1])]
        wanted = {id(p): p for p in [p for p in bucket if not math.isfinite(p[1])][:1]}
        if finite:
            for p in (min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1]), finite[-1]):
                wanted[id(p)] = p
        kept += [p for p in bucket if id(p) in wanted]
    return kept


# --------------------------------------------------------------------------------------------------
# One HTML file that tells a run, or several: how it ended, its alerts, its series, every rule.
#
# The file needs nothing else: no script, no font, no picture, no connection (its own content policy forbids
# them). It follows the reader's light or dark setting, fits a telephone and says every state in words.


MOST_ALERTS = 100
MOST_CHARTS = 12
FEW = 8
"""Rules of one verdict that are shown without a click."""
_ORDER = ("failed", "warned", "partly judged", "not judged", "ok", "does not apply")


def page_html(reports: Sequence[Mapping[str, Any]], lines: Sequence[Line] = ()) -> str:
    """The whole document.

    :param reports: contents of ``report.json``; several (a replay, a test session) share one page.
    :param lines: the series of the run, where there is one run with a record.
    """
    names = [str(report.get("path") or report.get("target") or "run") for report in reports]
    title = f"healthcheck: {names[0]}" if len(names) == 1 else f"healthcheck: {plural(len(names), 'run')}"
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title>",
        f"<style>{CSS}</style>",
        "<main>",
    ]
    if len(reports) != 1:
        parts += _contents(reports, names)
    for index, (name, report) in enumerate(zip(names, reports, strict=True)):
        parts += _run(name, report, f"r{index}-", lines if len(reports) == 1 else ())
    return "\n".join([*parts, "</main>", "</html>"]) + "\n"


def _contents(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    rows = [
        f'<tr><td><a href="#r{index}-top">{escape(name)}</a></td><td>{_badge(verdict_word(report), str(report["verdict"]))}</td>'
        f"<td class=n>{step(int(report['steps']))}</td><td class=n>{len(report['alerts']):,}</td></tr>"
        for index, (name, report) in enumerate(zip(names, reports, strict=True))
    ]
    head = "<tr><th>run</th><th>verdict</th><th class=n>steps</th><th class=n>alerts</th></tr>"
    return [f"<h1>{plural(len(reports), 'run')}</h1>", f"<div class=wide><table>{head}{''.join(rows)}</table></div>"]


def _run(name: str, report: Mapping[str, Any], prefix: str, lines: Sequence[Line]) -> list[str]:
    said = f"{how_it_ended(report)}; exit {report['exit_code']}"
    parts = [
        f'<header id="{prefix}top"><h1>{escape(name)} {_badge(verdict_word(report), str(report["verdict"]))}</h1>',
        f"<p class=said>{escape(said)}</p>",
        f"<p>{escape(judged_line(report['rules']))}</p>",
        _facts(report),
        "</header>",
    ]
    if report["alerts"]:
        shown = report["alerts"][:MOST_ALERTS]
        own_blocks = [alert for alert in shown if not alert.get("explained_by")]
        rest = [alert for alert in shown if alert.get("explained_by")]
        parts.append(f"<h2>Alerts</h2>{''.join(_alert(alert, prefix) for alert in own_blocks)}")
        if rest:  # the same story again: at a click
            inner = "".join(_alert(alert, prefix) for alert in rest)
            parts.append(
                f"<details><summary>{plural(len(rest), 'alert')} explained by others</summary>{inner}</details>"
            )
        if len(report["alerts"]) > len(shown):
            parts.append(f"<p>{len(report['alerts']) - len(shown):,} more alerts: healthcheck report</p>")
    if lines:
        marks = {
            int(alert["fired_step"]): str(alert["rule"])
            for alert in reversed(report["alerts"])
            if not alert.get("explained_by")
        }
        wanted = {fact["name"] for alert in report["alerts"] for fact in alert["series"]}
        chosen = sorted(lines, key=lambda line: line.name not in wanted)[:MOST_CHARTS]
        charts = "".join(chart(line, marks) for line in chosen)
        note = f"<p>Dashed lines: alerts. {len(lines) - len(chosen):,} more series in the record.</p>"
        parts.append(f"<h2>Series</h2><div class=charts>{charts}</div>{note if len(lines) > len(chosen) else ''}")
    parts.append(f"<h2>Rules</h2>{_rules(report['rules'], prefix, report['alerts'])}")
    problems = [f"action {e['action']} for {e['rule']}: {e['error']}" for e in report.get("action_errors", ())]
    problems += [f"plugin {e['plugin']} in {e['hook']}: {e['error']}" for e in report.get("plugin_errors", ())]
    problems += [str(e["error"]) for e in report.get("internal_errors", ())]
    if problems:
        parts.append(f"<h2>Errors of the watching itself</h2><ul>{_items(problems)}</ul>")
    return parts


def _facts(report: Mapping[str, Any]) -> str:
    overhead = report.get("overhead") or {}
    good = report.get("last_good_checkpoint") or {}
    facts = {
        "rules": report.get("rules_source"),
        "profile": report.get("profile"),
        "mode": "observe: nothing is stopped or changed" if report.get("mode") == "observe" else "act",
        "trainer": report.get("trainer"),
        "ranks": report.get("world_size") if report.get("world_size", 1) > 1 else None,
        "resumed from": f"step {step(report['resumed_from'])}" if report.get("resumed_from") else None,
        "took": duration(float(report["seconds"])),
        "cost of watching": f"{overhead['fraction'] * 100:.1f} % of the time" if "fraction" in overhead else None,
        "last good checkpoint": f"step {step(good['step'])}: {good['path']}" if good.get("path") else None,
    }
    rows = "".join(f"<dt>{key}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items() if value)
    return f"<dl>{rows}</dl>"


def _alert(alert: Mapping[str, Any], prefix: str) -> str:
    severity = str(alert["severity"])
    until = f" to {step(alert['cleared_step'])}" if alert.get("cleared_step") is not None else ", not cleared"
    value = f"value {number(decode_number(alert['value']))}" if alert.get("value") is not None else ""
    normal = f"normal {number(decode_number(alert['normal']))}" if alert.get("normal") is not None else ""
    limit = f"limit {alert['threshold']}" if alert.get("threshold") else ""
    said = [f"{key.replace('_', ' ')}: {fact}" for key, fact in alert.get("facts", {}).items()]
    if int(alert.get("count", 1)) > 1:
        said.append(f"{alert['count']:,} series: {', '.join(fact['name'] for fact in alert['series'])}")
    said += [f"evidence: {outcome['path']}" for outcome in alert.get("actions", ()) if outcome.get("path")]
    said += [f"{words}: {alert[key]}" for key, words in _EXCUSES.items() if alert.get(key)]
    hint = f"<p class=try><b>try</b> {escape(str(alert['hint']))}</p>" if alert.get("hint") else ""
    return (
        f'<article class="{escape(severity)}" id="{prefix}{escape(str(alert["rule"]))}-{int(alert["number"])}">'
        f"<h3><span class=sev>{escape(severity.upper())}</span> {escape(str(alert['rule']))} "
        f"<small>step {step(alert['fired_step'])}{until}</small></h3>"
        f"<p>{escape(str(alert.get('message', '')))}</p>"
        f"<p class=numbers>{escape(', '.join(filter(None, (value, normal, limit))))}</p>"
        f"<p><b>done</b> {escape(actions_done(alert))}</p>"
        f"<ul>{_items(said)}</ul>{hint}</article>"
    )


_EXCUSES = {"explained_by": "explained by", "muted": "muted", "accepted": "accepted"}


def _rules(rules: Mapping[str, Mapping[str, Any]], prefix: str, alerts: Sequence[Mapping[str, Any]]) -> str:
    first = {str(alert["rule"]): int(alert["number"]) for alert in reversed(alerts)}
    groups: dict[str, list[str]] = {"": [], "not judged": [], "ok": [], "does not apply": []}
    for rule, entry in sorted(rules.items(), key=lambda item: _ORDER.index(str(item[1]["verdict"]))):
        closest = entry.get("closest") or {}
        near = f"{number(decode_number(closest['score']))} at step {step(closest['step'])}" if closest else ""
        name = escape(rule)
        if rule in first:
            name = f'<a href="#{prefix}{name}-{first[rule]}">{name}</a>'
        verdict = str(entry["verdict"])
        why = "; ".join(str(entry[key]) for key in ("reason", "remedy") if entry.get(key)) or entry.get("threshold", "")
        groups[verdict if verdict in groups and rule not in first else ""].append(
            f"<tr><td>{name}</td><td>{_badge(verdict, verdict)}</td><td>{escape(near)}</td>"
            f"<td>{escape(str(why))}</td>"
            f"<td>{escape(str(entry.get('origin', '')))}</td></tr>"
        )
    return "".join(_rule_table(group, rows) for group, rows in groups.items() if rows)


def _rule_table(group: str, rows: Sequence[str]) -> str:
    """What fired stands open; dozens of rules that are fine or had no data open at a click, without a script."""
    head = "<tr><th>rule</th><th>verdict</th><th>closest</th><th>limit, or why not judged</th><th>from</th></tr>"
    table = f"<div class=wide><table>{head}{''.join(rows)}</table></div>"
    if not group:
        return table
    state = " open" if len(rows) <= FEW else ""
    return f"<details{state}><summary>{len(rows)} {group}</summary>{table}</details>"


def _badge(shown: str, verdict: str) -> str:
    return f'<span class="badge {escape(verdict.replace(" ", "-"))}">{escape(shown)}</span>'


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)
