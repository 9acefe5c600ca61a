"""Which rule owns the non-finite samples of a metric: one event, one alert.

A NaN breaches every numeric rule. But where an enabled ``nonfinite`` rule covers the same metric
and phase, it owns such samples and the others skip them (rule-language 5.3). Ownership goes by the
base name of the metric: labels are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable

from healthcheck.rulelang.rule import Rule


def owners(rules: Iterable[Rule]) -> dict[str, str]:
    """Rule id -> id of the ``nonfinite`` rule that owns the non-finite samples it would see.

    Rules that nobody excuses are not in the result. Where several ``nonfinite`` rules cover a
    metric, each judges for itself and the first in file order is named.
    """
    listed = list(rules)
    dedicated = [rule for rule in listed if owns_nonfinite(rule)]
    found: dict[str, str] = {}
    for rule in listed:
        if rule.condition.judges_nonfinite:
            continue
        owner = next((o for o in dedicated if _covers(o, rule)), None)
        if owner is not None:
            found[rule.id] = owner.id
    return found


def owns_nonfinite(rule: Rule) -> bool:
    """Whether the rule is the plain ``when: nonfinite``, or a count that one sample reaches."""
    return rule.condition.judges_nonfinite and rule.condition.breaches(1.0)


def _covers(owner: Rule, rule: Rule) -> bool:
    same_metric = owner.selector.metric == rule.selector.metric
    return same_metric and (owner.phase == "any" or owner.phase == rule.phase)
