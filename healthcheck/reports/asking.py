"""A rule in one line, as a person asks it: ``robust_z(loss, window 200) above 8, in 2 samples running``."""

from __future__ import annotations

from healthcheck.rulelang.rule import Rule

_NORMAL = {"robust_z": "median", "zscore": "mean", "ratio": "baseline", "no_improvement": "best", "outlier": "siblings"}
_SCORE = {"robust_z": "z", "zscore": "z", "ratio": "ratio", "slope": "slope", "outlier": "ratio"}


_BY_VALUE = frozenset(
    {
        "threshold",
        "above",
        "below",
        "at_least",
        "at_most",
        "equals",
        "outside",
        "no_improvement",
        "unchanged",
    }
)
"""Conditions whose bound is a sentence about the metric itself."""


def asks(rule: Rule) -> str:
    """What must be true for this rule to fire, with the units of counting."""
    condition = rule.condition
    bound = condition.breaches.text
    name = condition.name
    if name in _BY_VALUE:
        text = f"{rule.selector} {bound}"
    elif name in ("missing", "stale"):
        text = f"no {rule.selector} for {bound}"
    elif condition.judges_nonfinite:
        text = f"{rule.selector} not finite"
    else:
        window = int(getattr(condition, "window", 0) or 0)
        inner = f"{rule.selector}, window {window}" if window > 1 else str(rule.selector)
        text = f"{name}({inner}) {bound}"
    parts = [text]
    hold = rule.hold
    if hold.seconds:
        parts.append(f"for {hold.seconds:g} s")
    elif hold.of > 1:
        parts.append(
            f"in {hold.need} samples running" if hold.need == hold.of else f"in {hold.need} of {hold.of} samples"
        )
    if rule.warmup.amount:
        parts.append(f"after {rule.warmup}")
    if rule.every > 1:
        parts.append(f"every {rule.every} steps")
    if rule.phase != "any":
        parts.append(f"in {rule.phase}")
    parts += [f"only if {guard.metric} {guard.test.text}" for guard in rule.only_if]
    return ", ".join(parts)


def headings(rule: Rule | None) -> tuple[str, str]:
    """What the columns of a trace are called: (normal, score)."""
    name = rule.condition.name if rule is not None else ""
    return _NORMAL.get(name, "normal"), _SCORE.get(name, "score")
