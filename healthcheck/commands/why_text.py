"""The text of ``healthcheck why``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from healthcheck.engine.trace import TraceRow
from healthcheck.record.runs import Run
from healthcheck.reports.text import columns, number, shorten, step
from healthcheck.reports.why import Explanation, own_numbers
from healthcheck.reports.wording import actions_done, count_line
from healthcheck.samples import decode_number
from healthcheck.verdicts import State

MOST_PENDING = 5


def alert_text(found: Explanation, units: Mapping[str, str]) -> list[str]:
    """All lines for one alert.

    :param units: metric name -> unit.
    """
    alert = found.alert
    cleared = alert.get("cleared_step")
    until = f", cleared at {step(cleared)}" if cleared is not None else ", still firing at the end"
    place = f", rule at {found.origin}" if found.origin else ""
    lines = [f"{alert['rule']} fired at step {step(alert['fired_step'])}{until}         {found.run.shown}{place}"]
    if alert.get("message"):
        lines.append(f"  said    {alert['severity']}: {alert['message']}")
    if found.asks:
        lines.append(f"  asks    {found.asks}")
    if found.problem:
        lines.append(f"  note    {found.problem}")
    lines += _table(found)
    lines += [f"  {name.ljust(7)} {text}" for name, text in _facts(found, units) if text]
    return lines + ranks_text(found.run)


def ranks_text(run: Run) -> list[str]:
    """Where alerts of other ranks are told."""
    lines = []
    for other in run.other_ranks[:8]:
        rules = shorten(list(dict.fromkeys(str(alert["rule"]) for alert in other.alerts)), 3)
        lines.append(f"  {other.name}: {rules}    healthcheck why {other.shown}")
    if len(run.other_ranks) > 8:
        lines.append(f"  and {len(run.other_ranks) - 8} more ranks with alerts: {run.shown}/rank-*")
    return lines


def _facts(found: Explanation, units: Mapping[str, str]) -> list[tuple[str, str]]:
    alert = found.alert
    seen = [f"{key.replace('_', ' ')}: {value}" for key, value in alert.get("facts", {}).items()]
    if alert.get("count", 1) > 1:
        names = [str(series["name"]) for series in alert["series"]]
        seen.append(f"{alert['count']:,} series: {shorten(names, 3)}")
    if alert["detected_step"] != alert["fired_step"]:
        seen.append(f"value of step {step(alert['fired_step'])} seen at step {step(alert['detected_step'])}")
    evidence = [
        _near(str(o.get("path") or o["text"]))
        + f"        read it: healthcheck evidence {found.run.name} {alert['number']}"
        for o in alert.get("actions", ())
        if o["action"] == "evidence" and o["done"]
    ]
    around = [change.text(found.first_step, units.get(change.metric, "")) for change in found.changes]
    around += [f"{name} unchanged" for name in found.steady]
    return [
        ("seen", "; ".join(seen)),
        ("around", "; ".join(around)),
        ("also", "; ".join(_also(found))),
        ("muted", str(alert.get("muted") or "")),
        ("kept", "; ".join(evidence)),
        ("try", str(alert.get("hint") or "")),
        ("closest", _closest(found)),
    ]


def _near(path: str) -> str:
    """The path as people type it: relative to the working directory where it lies below."""
    try:
        return Path(path).relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path


def _also(found: Explanation) -> list[str]:
    texts = []
    for other in found.also[:4]:
        text = f"{other['rule']} at {step(other['fired_step'])}"
        if other.get("explained_by") == found.alert["rule"]:
            text += " (same cause; held back)"
        elif found.alert.get("explained_by") == other["rule"]:
            text += " (explains this one, whose actions were held back)"
        texts.append(text)
    if len(found.also) > 4:
        texts.append(f"{len(found.also) - 4} more")
    return texts


def _closest(found: Explanation) -> str:
    if found.closest is None or (found.rule is not None and found.rule.condition.judges_nonfinite):
        return ""
    score = found.headings[1]
    text = f"before: {score} {number(found.closest.score)} at step {step(found.closest.step)}"
    if command_exists("replay"):
        text += f".    tune: healthcheck replay latest --only {found.alert['rule']} --sweep ..."
    return text


def _table(found: Explanation) -> list[str]:
    rows = [*found.before, *_thinned(found.episode)]
    if not rows:
        value, normal, score = own_numbers(found.alert)
        fired = TraceRow(found.alert["fired_step"], "", value, normal, score, State.FIRING, fired=True)
        rows = [fired]
    normal_name, score_name = found.headings
    series = str(found.alert["series"][0]["name"]) if found.alert.get("series") else "value"
    plain = all(
        row.score is None or row.score == row.value or row.score != row.score for row in rows if row is not None
    )
    plain = plain or (found.rule is not None and found.rule.condition.judges_nonfinite)
    with_normal = any(row is not None and row.normal is not None for row in rows)
    table = [["step", series] + ([normal_name] if with_normal else []) + ([] if plain else [score_name])]
    states = [""]
    for row in rows:
        if row is None:
            table.append(["..."] + [""] * (len(table[0]) - 1))
            states.append("")
            continue
        cells = [step(row.step), number(row.value)]
        if with_normal:
            cells.append(number(row.normal))
        if not plain:
            cells.append(number(row.score))
        table.append(cells)
        states.append(_state(found, row))
    states[0] = "state"
    body = columns(table, "r" * len(table[0]))
    width = max(map(len, body))
    return [f"{line.ljust(width)}    {state}".rstrip() for line, state in zip(body, states, strict=True)]


def _state(found: Explanation, row: TraceRow) -> str:
    if row.fired:
        return f"FIRING -> {actions_done(found.alert)}"
    if row.cleared:
        return "ok again"
    if row.state is State.PENDING:
        return f"pending {row.progress}".rstrip()
    return str(row.state)


def _thinned(rows: Sequence[TraceRow]) -> list[Any]:
    """An episode in a few rows: the way to the alert, the worst while firing, the end; None for left out."""
    at = next((i for i, row in enumerate(rows) if row.fired), 0)
    way = list(rows[: at + 1])
    shown: list[Any] = way if len(way) <= MOST_PENDING + 1 else [*way[:2], None, *way[-3:]]
    rest = list(rows[at + 1 :])
    if len(rest) <= 3:
        return [*shown, *rest]
    worst = max(rest[:-1], key=lambda row: abs(row.score) if row.score is not None else 0.0)
    middle = [None, worst] if worst is not rest[0] else [worst]
    return [*shown, *middle, None, rest[-1]]


def silent_text(run: Run, rule: str | None) -> list[str]:
    """What to say where nothing fired: the verdict, and how close it came."""
    entries: dict[str, Any] = (run.report or {}).get("rules", {})
    if rule is not None:
        entry = entries.get(rule)
        if entry is None:
            return [f"{rule} did not fire in {run.name} so far (no report: the run is {run.status})"]
        if entry["verdict"] == "not judged":
            return [f"{rule} was not judged in {run.name}: {entry.get('reason', '')}"]
        return [f"{rule} did not fire in {run.name}: {entry['samples']:,} samples judged", *_approaches({rule: entry})]
    if run.report is None:
        return [f"no alert in {run.name} so far; the run is {run.status} (no report)", *ranks_text(run)]
    head = f"no alert in {run.name}: {run.report.get('exit_words', '')}, {step(run.steps)} steps"
    return [head, f"  {count_line(entries)}", *ranks_text(run), *_approaches(entries)]


def _approaches(entries: dict[str, Any], most: int = 5) -> list[str]:
    rows = [
        [
            rule,
            f"closest {number(decode_number(entry['closest']['score']))}",
            str(entry.get("threshold", "")),
            f"step {step(entry['closest']['step'])}",
        ]
        for rule, entry in entries.items()
        if entry.get("closest")
    ]
    return columns(rows[:most])


def command_exists(name: str) -> bool:
    """Whether a command is there already: a hint must not name one that is not."""
    return importlib.util.find_spec(f"healthcheck.commands.{name}") is not None
