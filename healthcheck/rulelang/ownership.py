"""Which rule owns the non-finite samples of a metric: one event, one alert.

A NaN breaches every numeric rule. But where an enabled ``nonfinite`` rule covers the same metric
and phase, it owns such samples and the others skip them (rule-language 5.3). Ownership goes by the
base name of the metric: labels are ignored. A derived metric is not finite only because one of its
inputs is not: where all of them are owned, so is what is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from healthcheck.rulelang.rule import Derived, Rule


def owners(rules: Iterable[Rule], derived: Iterable[Derived] = ()) -> dict[str, str]:
    """Rule id -> id of the ``nonfinite`` rule that owns the non-finite samples it would see.

    :param derived: the formulas of the rule set.

    Rules that nobody excuses are not in the result. Where several ``nonfinite`` rules cover a
    metric, each judges for itself and the first in file order is named.
    """
    listed = list(rules)
    dedicated = [rule for rule in listed if owns_nonfinite(rule)]
    formulas = {formula.name: formula for formula in derived}
    found: dict[str, str] = {}
    for rule in listed:
        if rule.condition.judges_nonfinite:
            continue
        owning = [
            next((o for o in dedicated if _covers(o, metric, rule.phase)), None)
            for metric in _inputs(rule.selector.metric, formulas)
        ]
        if owning and owning[0] is not None and None not in owning:
            found[rule.id] = owning[0].id
    return found


def _inputs(metric: str, formulas: Mapping[str, Derived]) -> list[str]:
    """The metrics from which a metric is computed in the end; itself if it is not derived."""
    formula = formulas.get(metric)
    if formula is None:
        return [metric]
    return [raw for name in formula.inputs if name != metric for raw in _inputs(name, formulas)]


def owns_nonfinite(rule: Rule) -> bool:
    """Whether the rule is the plain ``when: nonfinite``, or a count that one sample reaches."""
    return rule.condition.judges_nonfinite and rule.condition.breaches(1.0)


def _covers(owner: Rule, metric: str, phase: str) -> bool:
    return owner.selector.metric == metric and owner.phase in ("any", phase)
