"""Two rule sets over the same records: only what changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.text import plural, step


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between the reports of one run."""

    path: str
    rule: str
    what: str
    """``fires``, ``silent``, ``moved``, ``severity``, ``judged``, ``not judged``."""
    text: str

    def to_json(self) -> dict[str, str]:
        return {"path": self.path, "rule": self.rule, "what": self.what, "text": self.text}


def changes(path: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> list[Change]:
    """What the new rules say of a run that the old ones did not, rule by rule, in the order of the new file."""
    found: list[Change] = []
    for rule in dict.fromkeys([*new["rules"], *old["rules"]]):
        now, then = _episodes(new, rule), _episodes(old, rule)
        if now == then:
            found += _verdict_change(path, rule, new, old)
            continue
        if not then:
            found.append(Change(path, rule, "fires", f"now fires at {_steps(now)}{_new_rule(rule, old)}"))
        elif not now:
            found.append(Change(path, rule, "silent", f"no longer fires (fired at {_steps(then)}){_gone(rule, new)}"))
        elif [s for s, _ in now] != [s for s, _ in then]:
            found.append(Change(path, rule, "moved", f"fires at {_steps(now)}, was {_steps(then)}"))
        else:
            found.append(Change(path, rule, "severity", f"at {_steps(now)}: {now[0][1]}, was {then[0][1]}"))
    return found


def _episodes(report: Mapping[str, Any], rule: str) -> list[tuple[int, str]]:
    """Step and weight of each alert; a muted one weighs otherwise than one that counts."""
    return [
        (a["fired_step"], "muted" if a.get("muted") else str(a["severity"]))
        for a in report["alerts"]
        if a["rule"] == rule
    ]


def _steps(episodes: Sequence[tuple[int, str]]) -> str:
    shown = ", ".join(step(at) for at, _ in episodes[:3])
    more = f" and {len(episodes) - 3} more" if len(episodes) > 3 else ""
    return f"step {shown}{more} ({episodes[0][1]})"


def _new_rule(rule: str, old: Mapping[str, Any]) -> str:
    return "" if rule in old["rules"] else "; the old rules do not have it"


def _gone(rule: str, new: Mapping[str, Any]) -> str:
    return "" if rule in new["rules"] else "; the new rules do not have it"


def _verdict_change(path: str, rule: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> list[Change]:
    """A rule that was judged and is not any more, or the other way round: never passed over."""
    now, then = new["rules"].get(rule), old["rules"].get(rule)
    if now is None or then is None or (now["verdict"] == "not judged") == (then["verdict"] == "not judged"):
        return []
    if now["verdict"] == "not judged":
        return [Change(path, rule, "not judged", f"no longer judged: {now.get('reason', '')}")]
    return [Change(path, rule, "judged", f"now judged ({now['verdict']}); was not: {then.get('reason', '')}")]


def change_lines(found: Sequence[Change], runs: int) -> list[str]:
    """Text: the changes by rule, and a count."""
    signs = {"fires": "+", "silent": "-", "moved": "~", "severity": "~", "judged": "+", "not judged": "-"}
    lines: list[str] = []
    by_rule: dict[str, list[Change]] = {}
    for change in found:
        by_rule.setdefault(change.rule, []).append(change)
    for rule, listed in by_rule.items():
        lines.append(rule)
        lines += [f"  {signs[c.what]} {c.path}: {c.text}" for c in listed]
    changed = len({c.path for c in found})
    if not found:
        return [f"no difference on {plural(runs, 'run')}"]
    more = sum(c.what in ("fires", "judged") for c in found)
    less = sum(c.what in ("silent", "not judged") for c in found)
    moved = len(found) - more - less
    counts = ", ".join(f"{n} {word}" for n, word in ((more, "more"), (less, "fewer"), (moved, "changed")) if n)
    return [*lines, f"{plural(changed, 'run')} of {runs} change: {counts}"]
