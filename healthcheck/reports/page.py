"""The HTML page of a run: how it ended, its alerts with their pictures, how it went, where time went, every rule.

One file that needs nothing else: no font, no picture, no connection (its own content policy forbids them). It follows the
reader's light or dark setting, fits a telephone, prints, and says every state in words. Charts are SVG; with the extra
``page`` a library draws them again once the page is open, and they can be zoomed (:mod:`healthcheck.reports.interactive`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from healthcheck.core.digest import sha256
from healthcheck.core.text import decode_number, duration, number, plural, size_text, step
from healthcheck.reports.charts import Curve, Picture, chart, escape, marks_of
from healthcheck.reports.pagedata import PageData
from healthcheck.reports.pagestyle import CSS, SORT
from healthcheck.reports.recorded import FIRST, Recorded, Series
from healthcheck.reports.strips import heat_map, step_parts, timeline
from healthcheck.reports.wording import actions_done, how_it_ended, judged_line, verdict_word

MOST_ALERTS = 100
FEW = 8
"""Rules of one verdict that are shown without a click."""
MOST_CHARTS = 24
"""Charts beside the main ones; the rest of the series is in the record."""
LAYERED = ("grad_norm", "weight_norm", "params.norm", "update_ratio")
"""Metrics by layer that are worth a heat map first."""
SPEED = ("throughput", "tokens_per_sec", "time.step", "time.data", "memory.allocated", "memory.reserved", "memory.host")
_ORDER = ("failed", "warned", "cannot tell", "partly judged", "not judged", "ok", "does not apply")
_EXCUSES = {"explained_by": "explained by", "muted": "muted", "accepted": "accepted"}


def page_html(
    reports: Sequence[Mapping[str, Any]], data: PageData | None = None, *, interactive: bool | None = None
) -> str:
    """The whole document.

    :param reports: contents of ``report.json``; several (a replay, a test session) share one page.
    :param data: what else is known of the run, where there is one run with a record.
    :param interactive: whether charts can be zoomed; None: if the extra ``page`` is installed.
    """
    return _Page(reports, data).text(interactive)


class _Page:
    """One page in the making: charts are numbered as they are drawn, so that a script finds them."""

    def __init__(self, reports: Sequence[Mapping[str, Any]], data: PageData | None) -> None:
        self._reports = reports
        self._data = data if len(reports) == 1 and data is not None else PageData()
        self._drawn: list[tuple[str, Picture]] = []

    def text(self, interactive: bool | None) -> str:
        reports = self._reports
        names = [str(report.get("path") or report.get("target") or "run") for report in reports]
        title = f"healthcheck: {names[0]}" if len(names) == 1 else f"healthcheck: {plural(len(names), 'run')}"
        body: list[str] = []
        if len(reports) != 1:
            body += _contents(reports, names)
        for index, (name, report) in enumerate(zip(names, reports, strict=True)):
            body += self._run(name, report, f"r{index}-")
        scripts = [SORT, *self._scripts(interactive)]
        allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
        policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {allowed}"
        parts = [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{escape(title)}</title>",
            f"<style>{CSS}</style>",
            "<main>",
            *body,
            "</main>",
            *(f"<script>{script}</script>" for script in scripts),
            "</html>",
        ]
        return "\n".join(parts) + "\n"

    def _scripts(self, interactive: bool | None) -> list[str]:
        if not self._drawn or interactive is False:
            return []
        from healthcheck.reports.interactive import installed, scripts

        return scripts(self._drawn) if interactive or installed() else []

    def _chart(self, picture: Picture) -> str:
        key = f"chart-{len(self._drawn)}"
        self._drawn.append((key, picture))
        return chart(picture, key=key)

    # -- one run --------------------------------------------------------------------------

    def _run(self, name: str, report: Mapping[str, Any], prefix: str) -> list[str]:
        data, alerts = self._data, report["alerts"]
        sections: list[tuple[str, str]] = []
        if alerts:
            sections.append(("Alerts", self._alerts(alerts, prefix)))
        sections.append(("Training", self._training(data.record, alerts)))
        sections.append(("Layers", _layers(data.record, alerts)))
        sections.append(("Performance", self._performance(report, data.record, alerts)))
        sections.append(("Ranks", _rank_times(data.record) + _ranks(data)))
        sections.append(("Rules", _rules(report["rules"], prefix, alerts)))
        sections.append(("Evidence and environment", _evidence(data) + _environment(data.facts, report)))
        sections.append(("Errors of the watching itself", _problems(report)))
        shown = [(head, inner) for head, inner in sections if inner]
        links = "".join(f'<a href="#{prefix}{_slug(head)}">{head}</a>' for head, _ in shown)
        going = str(report.get("unfinished") or "")
        word = going.upper() or verdict_word(report)
        ended = f"{how_it_ended(report)}; exit {report['exit_code']}"
        if going:
            ended = f"no report: the run is {going}; last recorded step {step(int(report['steps']))}"
        parts = [
            f'<header id="{prefix}top"><h1>{escape(name)} {_badge(word, str(report["verdict"]))}</h1>',
            f"<p class=said>{escape(ended)}</p>",
            f"<p>{escape(judged_line(report['rules']))}</p>",
            _facts(report, data),
            f"<nav>{links}</nav>" if len(shown) > 2 else "",
            "</header>",
        ]
        if data.record.series:
            first = int(report.get("resumed_from") or 0)
            last = max(int(report["steps"]), data.record.last_step)
            took = duration(float(report["seconds"]))
            parts.append(timeline(first, last, marks_of(alerts, prefix), data.events, seconds=took))
        if data.problem:
            parts.append(f"<p><small>{escape(data.problem)}</small></p>")
        parts += [f'<h2 id="{prefix}{_slug(head)}">{head}</h2>{inner}' for head, inner in shown]
        return parts

    def _alerts(self, alerts: Sequence[Mapping[str, Any]], prefix: str) -> str:
        shown = alerts[:MOST_ALERTS]
        own = [alert for alert in shown if not alert.get("explained_by")]
        rest = [alert for alert in shown if alert.get("explained_by")]
        made = "".join(self._alert(alert, prefix) for alert in own)
        if rest:  # the same story again: at a click
            inner = "".join(self._alert(alert, prefix) for alert in rest)
            made += f"<details><summary>{plural(len(rest), 'alert')} explained by others</summary>{inner}</details>"
        if len(alerts) > len(shown):
            made += f"<p>{len(alerts) - len(shown):,} more alerts: healthcheck report</p>"
        return made

    def _alert(self, alert: Mapping[str, Any], prefix: str) -> str:
        severity = str(alert["severity"])
        until = f" to {step(alert['cleared_step'])}" if alert.get("cleared_step") is not None else ", not cleared"
        pictures = self._data.pictures.get(int(alert["number"]), [])
        unit = pictures[0].unit if pictures else ""
        value = f"value {number(decode_number(alert['value']), unit)}" if alert.get("value") is not None else ""
        normal = f"normal {number(decode_number(alert['normal']), unit)}" if alert.get("normal") is not None else ""
        limit = f"limit {alert['threshold']}" if alert.get("threshold") else ""
        said = [f"{key.replace('_', ' ')}: {fact}" for key, fact in alert.get("facts", {}).items()]
        if int(alert.get("count", 1)) > 1:
            said.append(f"{alert['count']:,} series: {', '.join(fact['name'] for fact in alert['series'])}")
        said += [f"also {other['cause']}: {other['message']}" for other in alert.get("also", ())]
        kept = [str(outcome["path"]) for outcome in alert.get("actions", ()) if outcome.get("path")]
        said += [f"evidence: {_below_the_run(path)}" for path in kept]
        said += [f"{words}: {alert[key]}" for key, words in _EXCUSES.items() if alert.get(key)]
        where = f"<p>at <code>{escape(str(alert['where']))}</code></p>" if alert.get("where") else ""
        hint = f"<p class=try><b>try</b> {escape(str(alert['hint']))}</p>" if alert.get("hint") else ""
        other = self._data.other
        for picture in pictures:
            _lay_under(picture, other)
        return (
            f'<article class="{escape(severity)}" id="{prefix}{escape(str(alert["rule"]))}-{int(alert["number"])}">'
            f"<h3><span class=sev>{escape(severity.upper())}</span> {escape(str(alert['rule']))} "
            f"<small>step {step(alert['fired_step'])}{until}</small></h3>"
            f"<p>{escape(str(alert.get('message', '')))}</p>{where}"
            f"<p class=numbers>{escape(', '.join(filter(None, (value, normal, limit))))}</p>"
            f"{hint}{''.join(self._chart(picture) for picture in pictures)}"
            f"<p><b>done</b> {escape(actions_done(alert))}</p>"
            f"<ul>{_items(said)}</ul></article>"
        )

    # -- how it went ------------------------------------------------------------------------

    def _training(self, record: Recorded, alerts: Sequence[Mapping[str, Any]]) -> str:
        """Train and held-out loss in one chart, then what most readers look for, then the rest at a click."""
        losses = [one for one in record.whole() if one.metric in ("loss", "eval.loss")]
        others = [one for one in record.whole() if one.metric not in ("loss", "eval.loss", *SPEED)]
        marks = marks_of(alerts)
        made = []
        if losses:
            curves = [Curve(one.name, one.steps, one.values, f"c{n % 6}", n == 0) for n, one in enumerate(losses[:6])]
            title = "train and held-out loss" if len(losses) > 1 else losses[0].name
            picture = Picture(title, curves, marks=marks, tall=True, first=record.first_step, last=record.last_step)
            _lay_under(picture, self._data.other, [one.name for one in losses])
            made.append(self._chart(picture))
        lively = [one for one in others if one.metric in FIRST or not one.flag]
        quiet = [one for one in others if one not in lively]
        made += [self._small(one, marks) for one in lively[:6]]
        charts = f"<div class=charts>{''.join(made)}</div>" if made else ""
        rest = (lively[6:] + quiet)[:MOST_CHARTS]
        if rest:
            inner = "".join(self._small(one, marks) for one in rest)
            left = len(lively) + len(quiet) - 6 - len(rest)
            note = f"<p><small>{left:,} more series in the record</small></p>" if left > 0 else ""
            charts += (
                f"<details><summary>{len(rest)} more series</summary><div class=charts>{inner}</div>{note}</details>"
            )
        return charts

    def _small(self, one: Series, marks: Sequence[Any], style: str = "c0") -> str:
        picture = Picture(one.name, [Curve(one.name, one.steps, one.values, style, True)], one.unit, marks=list(marks))
        picture.first, picture.last = self._data.record.first_step, self._data.record.last_step
        _lay_under(picture, self._data.other)
        return self._chart(picture)

    def _performance(self, report: Mapping[str, Any], record: Recorded, alerts: Sequence[Mapping[str, Any]]) -> str:
        """What the run waited for and why that is thought, the parts of a step, speed and memory over time."""
        found = report.get("performance") or {}
        facts = {
            "training time": duration(float(found["training_seconds"])) if found.get("training_seconds") else None,
            "steps": f"{number(found['steps_per_second'])} per second" if found.get("steps_per_second") else None,
            "samples": f"{number(found['samples_per_second'])} per second" if found.get("samples_per_second") else None,
            "tokens": f"{number(found['tokens_per_second'])} per second" if found.get("tokens_per_second") else None,
            "peak memory": _peak(found.get("memory") or {}),
            "torch.compile": duration(float(found["compile_seconds"])) if found.get("compile_seconds") else None,
        }
        made = _list(facts) if found else ""
        reached = found.get("verdict")
        if reached:
            advice = f"<p class=try><b>try</b> {escape(str(reached['advice']))}</p>" if reached.get("advice") else ""
            head = f"{reached['bound']} bound: {reached['text']}"
            made += f"<article class=info><h3>{escape(head)}</h3>{advice}</article>"
        for name, finding in (found.get("findings") or {}).items():
            if reached and name == reached.get("finding") and not finding.get("rows"):
                continue
            advice = f"; try: {finding['advice']}" if finding.get("advice") else ""
            made += f"<p>{escape(str(finding['text']) + advice)} <small>({escape(str(finding.get('from', '')))})</small></p>"
            made += _rows_table(finding.get("rows") or ())
        speed = [one for name in SPEED for one in record.whole() if one.metric == name]
        marks = marks_of(alerts)
        charts = "".join(self._small(one, marks, "c2") for one in speed[:6])
        return made + step_parts(record, found) + (f"<div class=charts>{charts}</div>" if charts else "")


def _below_the_run(path: str) -> str:
    """``alerts/001`` of the path of a bundle: the page may be read elsewhere."""
    return "/".join(re.split(r"[/\\]", path.rstrip("/\\"))[-2:])


def _lay_under(picture: Picture, other: Recorded | None, names: Sequence[str] = ()) -> None:
    """Add the same series of another run to a chart, by its steps."""
    if other is None:
        return
    for name in names or [picture.curves[0].label]:
        known = other.series.get(name)
        if known is not None and len(known.values) > 1:
            picture.curves.append(Curve(f"{name}, {other.name}", known.steps, known.values, "other"))


def _digest(script: str) -> str:
    return base64.b64encode(sha256(script.encode()).digest()).decode()


def _slug(head: str) -> str:
    return head.lower().replace(" ", "-")


def _contents(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    rows = [
        f'<tr><td><a href="#r{index}-top">{escape(name)}</a></td><td>{_badge(verdict_word(report), str(report["verdict"]))}</td>'
        f"<td class=n>{step(int(report['steps']))}</td><td class=n>{len(report['alerts']):,}</td></tr>"
        for index, (name, report) in enumerate(zip(names, reports, strict=True))
    ]
    head = "<tr><th>run</th><th>verdict</th><th class=n>steps</th><th class=n>alerts</th></tr>"
    return [f"<h1>{plural(len(reports), 'run')}</h1>", _table(head, rows)]


def _table(head: str, rows: Sequence[str]) -> str:
    return f'<div class=wide><table class="sortable"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _list(facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<div><dt>{key}</dt><dd>{escape(str(value))}</dd></div>" for key, value in facts.items() if value)
    return f"<dl class=facts>{rows}</dl>" if rows else ""


def _facts(report: Mapping[str, Any], data: PageData) -> str:
    overhead = report.get("overhead") or {}
    good = report.get("last_good_checkpoint") or {}
    return _list(
        {
            "steps": step(int(report["steps"])),
            "took": duration(float(report["seconds"])),
            "began": str(data.facts.get("started", "")).replace("T", " ")[:16],
            "rules": report.get("rules_source"),
            "profile": report.get("profile"),
            "mode": "observe: nothing is stopped or changed" if report.get("mode") == "observe" else "act",
            "trainer": report.get("trainer"),
            "ranks": report.get("world_size") if report.get("world_size", 1) > 1 else None,
            "resumed from": f"step {step(report['resumed_from'])}" if report.get("resumed_from") else None,
            "cost of watching": f"{overhead['fraction'] * 100:.1f} % of the time" if "fraction" in overhead else None,
            "last good checkpoint": f"step {step(good['step'])}: {good['path']}" if good.get("path") else None,
            "drawn in grey": data.other.name if data.other is not None else None,
        }
    )


def _peak(memory: Mapping[str, Any]) -> str | None:
    if not memory.get("peak_bytes"):
        return None
    of = f" of {size_text(memory['capacity_bytes'])}" if memory.get("capacity_bytes") else ""
    where = "" if memory.get("device") == "cpu" else f" on {memory.get('device')}"
    return f"{size_text(memory['peak_bytes'])}{of}{where}"


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of a finding: its columns are the keys of its rows."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "<tr>" + "".join(f"<th>{escape(str(column))}</th>" for column in columns) + "</tr>"

    def cell(value: Any) -> str:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return f'<td class=n data-key="{value}">{escape(number(float(value)))}</td>'
        return f"<td>{escape(str(value if value is not None else ''))}</td>"

    return _table(head, [f"<tr>{''.join(cell(row.get(column)) for column in columns)}</tr>" for row in rows[:100]])


def _layers(record: Recorded, alerts: Sequence[Mapping[str, Any]]) -> str:
    """A heat map for each metric that was measured by layer or tensor; what alerts have named is marked."""
    bad = []
    for alert in alerts:
        bad += [str(fact["name"]).partition("[")[2].rstrip("]") for fact in alert.get("series", ())]
        first = str(alert.get("facts", {}).get("first", ""))
        bad += [first.partition(",")[0]] if first else []
    metrics = dict.fromkeys(one.metric for one in record.series.values() if one.parameter)
    chosen = sorted(metrics, key=lambda metric: (metric not in LAYERED, list(metrics).index(metric)))[:6]
    maps = []
    for metric in chosen:
        family = record.family(metric)
        if sum(len(one.values) > 1 for one in family) >= 2:
            maps.append(heat_map(metric, family, bad=[name for name in bad if name], unit=family[0].unit))
    return "".join(maps)


def _rank_times(record: Recorded) -> str:
    """How long each rank is by itself: the one that the others wait for is the darkest."""
    family = [one for one in record.series.values() if one.metric == "ranks.time"]
    title = "Seconds of a step in which a rank waits for no other"
    return heat_map(title, sorted(family, key=lambda one: int(dict(one.labels)["rank"])), unit="s")


def _ranks(data: PageData) -> str:
    rows = [
        f"<tr><td>{escape(rank)}</td><td>{escape(str(alert['severity']))}</td><td>{escape(str(alert['rule']))}</td>"
        f"<td class=n>{step(alert['fired_step'])}</td><td>{escape(str(alert.get('message', '')))}</td></tr>"
        for rank, alerts in data.ranks
        for alert in alerts
    ]
    head = "<tr><th>rank</th><th>severity</th><th>rule</th><th class=n>step</th><th>what</th></tr>"
    return _table(head, rows) if rows else ""


def _rules(rules: Mapping[str, Mapping[str, Any]], prefix: str, alerts: Sequence[Mapping[str, Any]]) -> str:
    first = {str(alert["rule"]): int(alert["number"]) for alert in reversed(alerts)}
    groups: dict[str, list[str]] = {"": [], "not judged": [], "ok": [], "does not apply": []}
    for rule, entry in sorted(rules.items(), key=lambda item: _ORDER.index(str(item[1]["verdict"]))):
        closest = entry.get("closest") or {}
        near = f"{number(decode_number(closest['score']))} at step {step(closest['step'])}" if closest else ""
        key = f' data-key="{decode_number(closest["score"])}"' if closest else ""
        name = escape(rule)
        if rule in first:
            name = f'<a href="#{prefix}{name}-{first[rule]}">{name}</a>'
        verdict = str(entry["verdict"])
        why = "; ".join(str(entry[key]) for key in ("reason", "remedy") if entry.get(key)) or entry.get("threshold", "")
        groups[verdict if verdict in groups and rule not in first else ""].append(
            f"<tr><td>{name}</td><td>{_badge(verdict, verdict)}</td><td{key}>{escape(near)}</td>"
            f"<td>{escape(str(why))}</td>"
            f"<td>{escape(str(entry.get('origin', '')))}</td></tr>"
        )
    return "".join(_rule_table(group, rows) for group, rows in groups.items() if rows)


def _rule_table(group: str, rows: Sequence[str]) -> str:
    """What fired stands open; dozens of rules that are fine or had no data open at a click."""
    head = "<tr><th>rule</th><th>verdict</th><th>closest</th><th>limit, or why not judged</th><th>from</th></tr>"
    table = _table(head, rows)
    if not group:
        return table
    state = " open" if len(rows) <= FEW else ""
    return f"<details{state}><summary>{len(rows)} {group}</summary>{table}</details>"


def _evidence(data: PageData) -> str:
    made = []
    for bundle in data.evidence:
        files = ", ".join(f"{name} ({size_text(size)})" for name, size in bundle["files"].items())
        more = f" and {bundle['more']} more" if bundle["more"] else ""
        what = f"alert {bundle['number']}" if bundle["number"] else "kept on request"
        made.append(f"<h3>{escape(what)} <small>{escape(bundle['folder'])}, {size_text(bundle['bytes'])}</small></h3>")
        made.append(f"<p class=numbers>{escape(files + more)}</p>")
        if bundle["parameters"]:
            made.append("<p><small>the worst parameters and gradients</small></p>" + _rows_table(bundle["parameters"]))
    if data.beside:
        made.append(f"<p class=numbers>{escape(', '.join(data.beside[:20]))}</p>")
    return "".join(made)


def _environment(facts: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in (facts.get("versions") or {}).items())
    overhead = report.get("overhead") or {}
    known = {
        "command": " ".join(map(str, facts.get("argv", ()))),
        "folder": facts.get("folder"),
        "host": facts.get("host"),
        "versions": versions,
        "job": ", ".join(f"{name}={value}" for name, value in (facts.get("job") or {}).items()),
        "our own time": duration(float(overhead["host_seconds"])) if overhead.get("host_seconds") else None,
        "steps left out": f"{overhead['steps_left_out']:,}" if overhead.get("steps_left_out") else None,
    }
    rows = "".join(f"<dt>{key}</dt><dd>{escape(str(value))}</dd>" for key, value in known.items() if value)
    return f"<dl>{rows}</dl>" if facts and rows else ""


def _problems(report: Mapping[str, Any]) -> str:
    problems = [f"action {e['action']} for {e['rule']}: {e['error']}" for e in report.get("action_errors", ())]
    problems += [f"plugin {e['plugin']} in {e['hook']}: {e['error']}" for e in report.get("plugin_errors", ())]
    problems += [str(e["error"]) for e in report.get("internal_errors", ())]
    return f"<ul>{_items(problems)}</ul>" if problems else ""


def _badge(shown: str, verdict: str) -> str:
    return f'<span class="badge {escape(verdict.replace(" ", "-"))}">{escape(shown)}</span>'


def _items(texts: Iterable[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)
