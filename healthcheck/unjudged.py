"""Why a rule could not be judged in a run: in words that say what would have to be there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable

from healthcheck.engine.engine import Engine
from healthcheck.events import EventKind
from healthcheck.protocols import Capabilities
from healthcheck.registry import Registry
from healthcheck.rulelang.rule import Derived, Rule

NEEDS = {
    "cuda": "no GPU",
    "amp": "no GradScaler in use",
    "gate": "no rule holds back updates of this optimizer",
    "clipping": "the loop does not clip",
    "evaluation": "no evaluation seen",
    "ranks": "single process, needs 2 or more ranks",
    "linux": "not on Linux",
    "epochs": "the trainer announces no epochs",
    "optimizer": "no optimizer seen",
    "compile": "nothing is compiled",
    "tokens": "the number of tokens is not known",
    "max_steps": "the length of the run is not known",
}
"""What a metric may need (``Metric.needs``) -> why there was no sample."""


class UnjudgedReasons:
    """Knows why a rule's metric gave no sample.

    :param engine: what was seen.
    :param derived: metrics that the rule file defines by formulas.
    :param registry: which probe provides a metric, and what it needs.
    :param quarantined: whether an owner was switched off after errors.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        derived: Iterable[Derived],
        registry: Registry,
        quarantined: Callable[[str], bool],
    ) -> None:
        self._engine = engine
        self._derived = derived
        self._registry = registry
        self._quarantined = quarantined

    def why(self, rule: Rule, *, step: int, capabilities: Capabilities | None, seen: Collection[EventKind]) -> str:
        """One sentence fragment for the report.

        :param step: the last step of the run.
        :param capabilities: of its trainer; None if no trainer came.
        :param seen: kinds of event that came.
        """
        if not step:
            return "no training step was seen"
        # The order is from what is surest to what is only likely: the first answer that holds is given.
        key = rule.selector.key
        gaps = capabilities.gaps if capabilities is not None else {}
        for name in (key, rule.selector.metric):
            if name in gaps:
                return gaps[name]
        for derived in self._derived:
            if derived.name == rule.selector.metric:
                missing = [n for n in derived.inputs if n not in self._engine.lookups.last]
                return f"no sample of {', '.join(missing)}" if missing else "undefined for all samples"
        metric = self._registry.metrics.get(key)
        if metric is None:
            return f"nothing logged {rule.selector.metric}"
        probe = self._registry.metric_probe[key]
        if self._quarantined(probe.name):
            return f"the probe {probe.name} was switched off after errors"
        if capabilities is not None:
            unseen = [k for k in probe.listens_to if k not in capabilities.events]
            if len(unseen) == len(probe.listens_to):
                return gaps.get(unseen[0].value, f"{capabilities.trainer} does not show {unseen[0]}")
        met = self._needs_met(seen) if metric.needs else set()
        lacking = [need for need in metric.needs if need not in met]
        if lacking:
            return "; ".join(NEEDS.get(need, f"needs {need}") for need in lacking)
        # Updates that nobody sees take the gradients with them; a probe that listens to losses as well is not blind.
        if "before_update" in gaps and {"before_update", "loss"} & {*probe.listens_to} == {"before_update"}:
            return gaps["before_update"]
        if step < rule.every:
            return f"first due at step {rule.every:,}"
        return f"no sample of {rule.selector} was seen"

    def _needs_met(self, seen: Collection[EventKind]) -> set[str]:
        """What this run did have: another metric with the same need gave samples, or an event says so."""
        engine = self._engine
        metrics = {state.rule.selector.metric for state in engine.states if state.samples} | engine.lookups.last.keys()
        known = self._registry.metrics.values()
        met = {need for metric in known if metric.name in metrics for need in metric.needs}
        if {EventKind.EVAL_START, EventKind.EVAL_END} & set(seen):
            met.add("evaluation")
        if sys.platform.startswith("linux"):
            met.add("linux")
        return met
