"""Many runs summed up: by rule (what fires, where to tune) and by script."""

from __future__ import annotations

from collections import Counter
from typing import Any

from healthcheck.record.runs import Run
from healthcheck.reports.text import columns, plural, shorten

NOISY = 0.25
"""A rule that warned in this part of the runs is worth tuning: it is either too eager or true everywhere."""
ENOUGH_RUNS = 4


def by_rule(runs: list[Run]) -> dict[str, Any]:
    """Per rule: runs that it stopped, would have stopped, in which it failed or warned, was not judged."""
    rules: dict[str, dict[str, Any]] = {}
    noisy: dict[str, Counter[str]] = {}
    unjudged: set[str] = set()
    judged: set[str] = set()
    warned: Counter[str] = Counter()
    for run in runs:
        entries = (run.report or {}).get("rules", {})
        silent = entries and all(entry["verdict"] == "not judged" for entry in entries.values())
        (unjudged if silent else judged).add(run.target)
        for rule, entry in entries.items():
            counts = rules.setdefault(rule, {"stopped": 0, "would_stop": 0, "fired": 0, "not_judged": 0})
            counts["fired"] += bool(entry.get("episodes"))
            counts["not_judged"] += entry["verdict"] == "not judged"
        stop = (run.report or {}).get("stop") or {}
        if stop.get("rule") in rules:
            rules[stop["rule"]]["stopped"] += 1
        held = {
            str(a["rule"])
            for a in run.alerts
            if any(
                o["action"] == "stop" and o.get("held") and o["text"] == "observe mode" for o in a.get("actions", ())
            )
        }
        for rule in held & set(rules):
            rules[rule]["would_stop"] += 1
        warned.update({str(a["rule"]) for a in run.alerts if a["severity"] == "warning" and not a.get("explained_by")})
        for alert in run.alerts:
            noisy.setdefault(str(alert["rule"]), Counter())[run.target] += 1
    for rule, counts in rules.items():
        counts["noisiest"] = list(noisy[rule].most_common(1)[0]) if rule in noisy else None
    return {
        "runs": len(runs),
        "scripts": len({run.target for run in runs}),
        "rules": rules,
        "consider_tuning": [
            rule for rule, n in warned.most_common() if len(runs) >= ENOUGH_RUNS and n >= NOISY * len(runs)
        ],
        "unjudged": sorted(unjudged - judged),
    }


def rule_table(made: dict[str, Any], runs: list[Run], since: str | None = None) -> list[str]:
    """The table, most frequent first, and what to do next."""
    observed = all(run.facts.get("mode") == "observe" for run in runs)
    stopped = sum(counts["stopped"] for counts in made["rules"].values())
    head = f"{plural(made['runs'], 'run')} of {plural(made['scripts'], 'script')}"
    head += ", observe mode: nothing was stopped" if observed else f", {stopped} stopped"
    table = [["rule", "stopped", "would stop", "runs it fired in", "not judged", "noisiest script"]]
    loud = [(rule, c) for rule, c in made["rules"].items() if c["fired"] or c["stopped"] or c["would_stop"]]
    quiet = len(made["rules"]) - len(loud)
    for rule, counts in sorted(loud, key=lambda item: -item[1]["fired"]):
        noisiest = f"{counts['noisiest'][0]} {counts['noisiest'][1]}" if counts["noisiest"] else ""
        cells = [str(counts[key] or "-") for key in ("stopped", "would_stop", "fired", "not_judged")]
        table.append([rule, *cells, noisiest])
    lines = [head, *columns(table, "lrrrrl")] if len(table) > 1 else [head]
    lines.append(f"  {plural(quiet, 'rule')} never fired")
    if made["unjudged"]:
        lines.append(f"  scripts that ran without any rule being judged: {', '.join(made['unjudged'])}")
    unfinished = sum(1 for run in runs if run.report is None)
    if unfinished:
        lines.append(
            f"  {plural(unfinished, 'run')} without a report (running or killed): alerts counted, verdicts not"
        )
    return [*lines, *_next_steps(made, observed, since)]


def _next_steps(made: dict[str, Any], observed: bool, since: str | None) -> list[str]:
    """Which rule to tune with which line, and how to enforce what was only observed."""
    lines = []
    noisy = made["consider_tuning"]
    if noisy:
        lines.append(
            f"  consider tuning: {shorten(noisy)}    healthcheck replay --since {since or '14d'} --only {noisy[0]}"
        )
    if observed and made["runs"]:
        lines.append("  to enforce: delete `mode: observe` from healthcheck.yaml, or set it per rule")
    return lines


def by_script(runs: list[Run]) -> list[dict[str, Any]]:
    """Per script: runs, how they ended, its most frequent rule."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.target, []).append(run)
    rows = []
    for script, own in found.items():
        fired = Counter(str(a["rule"]) for run in own for a in run.alerts if not a.get("explained_by"))
        status = Counter(run.status for run in own)
        top = fired.most_common(1)
        rows.append(
            {"script": script, "runs": len(own), "status": dict(status), "most_frequent": list(top[0]) if top else None}
        )
    return rows


def script_table(made: list[dict[str, Any]], runs: list[Run]) -> list[str]:
    states = list(dict.fromkeys(state for row in made for state in row["status"]))
    table = [["script", "runs", *states, "most frequent alert"]]
    for row in made:
        top = f"{row['most_frequent'][0]} {row['most_frequent'][1]}" if row["most_frequent"] else ""
        table.append([row["script"], str(row["runs"]), *(str(row["status"].get(s, "-")) for s in states), top])
    return columns(table, "l" + "r" * (1 + len(states)) + "l", indent=0)
