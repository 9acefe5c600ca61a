"""Why a rule was not judged, whether it applies to this run at all, and what can be done about it.

A rule applies where the run has what it judges: one about GPUs does not apply without a GPU, one about two optimizers
not to a run with one. What applies and was not judged has a reason and, where there is one, a remedy for the person
who runs it. What does not apply is neither counted nor mentioned, except in ``report.json``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from healthcheck.core.alerts import Missing
from healthcheck.core.events import EventKind
from healthcheck.core.protocols import Capabilities, Probe
from healthcheck.core.samples import Metric
from healthcheck.engine.engine import Engine
from healthcheck.engine.summary import WhyNoData, too_short
from healthcheck.extend.registry import Registry
from healthcheck.rulelang.rule import Cause, Derived
from healthcheck.rulelang.sources import is_pack_name


@dataclass(frozen=True, slots=True)
class Need:
    """Something that must be there for a metric to have samples (``Metric.needs``)."""

    lacking: str
    """Why there was no sample: ``no GPU``."""
    remedy: str = ""
    """What can be done. Where there is none, what needs it does not apply to a run without it."""


NEEDS = {
    "cuda": Need("no GPU"),
    "amp": Need("no GradScaler in use"),
    "gate": Need("no rule holds back updates of this optimizer"),
    "clipping": Need("the loop does not clip"),
    "ranks": Need("single process, needs 2 or more ranks"),
    "linux": Need("not on Linux"),
    "epochs": Need("the trainer announces no epochs"),
    "compile": Need("nothing is compiled"),
    "a schedule": Need("no learning rate schedule in use"),
    "optimizer": Need("no optimizer seen"),
    "evaluation": Need("no evaluation seen", "log eval.loss to judge over-fitting"),
    "batches": Need("no DataLoader seen", "use a DataLoader to judge the batches"),
    "padding": Need("no padding token known", "give nn.Embedding its padding_idx to judge padding"),
    "the graph of the loss": Need("the loss was not seen before backward()", "call backward() on the loss itself"),
    "the start of the step": Need(
        "nobody says when a step begins", "draw batches from a DataLoader to judge a step from its start"
    ),
    "tokens": Need("the number of tokens is not known"),
    "max_steps": Need("the length of the run is not known", "give --max-steps to judge the time that is left"),
}
"""What a metric may need. A need that is not listed is a property of the run, in words: ``two optimizers``."""

_BY_LABEL = {
    "optimizer": Need("only one optimizer"),
    "dataset": Need("only one evaluation set"),
    "rank": Need("single process, needs 2 or more ranks"),
    "device": Need("only one device"),
}
"""Label of a selector -> what a run without such series has not."""


_LENGTH = re.compile(r"(\d+) (?:updates|steps)")


def _missing(need: str) -> Missing:
    """What the lack of one need means."""
    length = _LENGTH.fullmatch(need)
    if length:
        return too_short(f"needs {need}", int(length[1]))
    known = NEEDS.get(need) or Need(f"needs {need}")
    return Missing(known.lacking, known.remedy, applies=bool(known.remedy))


def always_applies(rule: Cause) -> bool:
    """Whether a rule was written by the user: without data it is not judged, whatever the run has."""
    return not is_pack_name(rule.origin.path)


def applies_without(rule: Cause, wanted: Collection[str], seen: Collection[str], registry: Registry) -> bool:
    """Whether a rule applies to a record that lacks what it judges, by the metrics that the record does have.

    :param wanted: names of the metrics that are lacking.
    :param seen: names of the metrics that are there.
    """
    if always_applies(rule):
        return True
    known = [metric for metric in registry.metrics.values() if metric.name in wanted]
    if not known or any(label in _BY_LABEL for label, _ in rule.selector.globs):
        return False
    met = {need for metric in registry.metrics.values() if metric.name in seen for need in metric.needs}
    lacking = [need for metric in known for need in metric.needs if need not in met]
    return not lacking or _missing(lacking[0]).applies


class UnjudgedReasons:
    """Knows why a rule's metric gave no sample.

    :param engine: what was seen.
    :param derived: metrics that the rule file defines by formulas.
    :param registry: which probe provides a metric, and what it needs.
    :param quarantined: whether an owner was switched off after errors.
    :param called: whether a probe, by its name, was ever shown what it looks at.

    Made for one look at a run: what its samples and events have met is found out once.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        derived: Iterable[Derived],
        registry: Registry,
        quarantined: Callable[[str], bool],
        called: Callable[[str], bool] = lambda probe: False,
    ) -> None:
        self._engine = engine
        self._derived = {formula.name: formula for formula in derived}
        self._registry = registry
        self._quarantined = quarantined
        self._called = called
        self._met: set[str] | None = None
        """Needs of metrics that this run has met."""

    def why(self, rule: Cause, *, step: int, capabilities: Capabilities | None, seen: Collection[EventKind]) -> Missing:
        """Why a rule was not judged.

        :param step: the last step of the run.
        :param capabilities: of its trainer; None if no trainer came.
        :param seen: kinds of event that came.

        A rule that the user wrote always applies.
        """
        found = self._why(rule, step, capabilities, seen)
        return replace(found, applies=True) if always_applies(rule) else found

    def _why(self, rule: Cause, step: int, capabilities: Capabilities | None, seen: Collection[EventKind]) -> Missing:
        if not step:
            return Missing("no training step was seen")
        # The order is from what is surest to what is only likely: the first answer that holds is given.
        metric, key = rule.selector.metric, rule.selector.key
        gaps = capabilities.gaps if capabilities is not None else {}
        for name in (key, metric):
            if name in gaps:
                return Missing(gaps[name])
        formula = self._derived.get(metric)
        if formula is not None:
            absent = [n for n in formula.inputs if n not in self._engine.lookups.last]
            return _never_logged(absent) if absent else Missing("undefined for all samples", applies=False)
        known = self._registry.metrics.get(key)
        if known is None:
            return _never_logged([metric])
        probe = self._registry.metric_probe[key]
        if self._quarantined(probe.name):
            return Missing(f"the probe {probe.name} was switched off after errors")
        said = self._said_by(probe, key)
        if said:
            return Missing(said, applies=False)
        if capabilities is not None:
            unseen = [k for k in probe.listens_to if k not in capabilities.events]
            if len(unseen) == len(probe.listens_to):
                return Missing(gaps.get(unseen[0].value, f"{capabilities.trainer} does not show {unseen[0]}"))
        lacking = self._lacking(known, seen)
        if lacking:
            # The first one decides: of what is behind it nobody can know.
            return replace(_missing(lacking[0]), reason="; ".join(_missing(need).reason for need in lacking))
        # Updates that nobody sees take the gradients with them; a probe that listens to losses as well is not blind.
        if "before_update" in gaps and {"before_update", "loss"} & {*probe.listens_to} == {"before_update"}:
            return Missing(gaps["before_update"])
        if step < rule.every:
            return too_short(f"first due at step {rule.every:,}", rule.every)
        nothing = f"no sample of {rule.selector} was seen"
        by_label = next((_BY_LABEL[label] for label, _ in rule.selector.globs if label in _BY_LABEL), None)
        if by_label is not None and metric in self._engine.lookups.last:
            return Missing(by_label.lacking, applies=False)
        return Missing(nothing, f"log {metric}" if metric.startswith("eval.") else "")

    def _said_by(self, probe: Probe, key: str) -> str:
        """What the probe itself gives as the reason; empty if it has none, or cannot be asked."""
        ask = getattr(probe, "reason_without", None)
        try:
            return str(ask(key) or "") if ask is not None else ""
        except Exception:  # it only explains: without it there is the usual reason
            return ""

    def _lacking(self, metric: Metric, seen: Collection[EventKind]) -> list[str]:
        """Needs of a metric that this run did not meet: no metric with the same need gave samples, no event says so."""
        if not metric.needs:
            return []
        met = self._met = self._what_is_met(seen) if self._met is None else self._met
        return [need for need in metric.needs if need not in met]

    def _what_is_met(self, seen: Collection[EventKind]) -> set[str]:
        engine = self._engine
        names = {state.cause.selector.metric for state in engine.states if state.samples} | engine.lookups.last.keys()
        met = {need for known in self._registry.metrics.values() if known.name in names for need in known.needs}
        if {EventKind.EVAL_START, EventKind.EVAL_END} & set(seen):
            met.add("evaluation")
        probes = self._registry.probes.values()
        if any(getattr(probe, "only_with", "") == "loss_graph" and self._called(probe.name) for probe in probes):
            met.add("the graph of the loss")
        if sys.platform.startswith("linux"):
            met.add("linux")
        return met


def _never_logged(names: list[str]) -> Missing:
    """Metrics that only the script itself can give. A rule of ours about them is for runs that have them."""
    shown = ", ".join(names)
    return Missing(f"nothing logged {shown}", f"log {shown}", applies=False)


def reasons_of(session: Any, capabilities: Capabilities | None) -> WhyNoData:
    """Why a rule of a live run was not judged, as far as it has come; see :meth:`UnjudgedReasons.why`."""
    reasons = UnjudgedReasons(
        session.engine,
        derived=session.rules.derived,
        registry=session.host.registry,
        quarantined=session.dispatch.is_quarantined,
        called=session.board.was_called,
    )
    return partial(reasons.why, step=session.step, capabilities=capabilities, seen=session.event_cost.keys())
