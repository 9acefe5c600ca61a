"""Last values of metrics that guards ask for, and derived metrics computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from healthcheck.rulelang.rule import Derived, Rule
from healthcheck.samples import NO_LABELS, Sample, decode_number, encode_number


class Lookups:
    """Remembers what some rule looks up; computes a derived metric where all its bare inputs are."""

    def __init__(self, rules: Iterable[Rule], derived: Sequence[Derived]) -> None:
        self.derived = list(derived)
        self.last: dict[str, tuple[int, float]] = {}
        """Metric -> (step, value) of its last sample, for the metrics in :attr:`tracked`."""
        self._users: dict[str, list[Derived]] = {}
        for metric in self.derived:
            for name in metric.inputs:
                self._users.setdefault(name, []).append(metric)
        self.tracked = {guard.metric for rule in rules for guard in rule.only_if} | set(self._users)

    def holds(self, rule: Rule) -> bool:
        """Whether all guards of a rule hold. A guard without samples counts as satisfied."""
        for guard in rule.only_if:
            seen = self.last.get(guard.metric)
            if seen is not None and not guard.test(seen[1]):
                return False
        return True

    def extend(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The samples of one step, and behind them the derived ones that they give.

        A derived metric has a value at a step when all its bare inputs have one there, whichever
        evaluation of that step brought them; it is computed once per evaluation, from the last.
        """
        if not any(sample.metric in self.tracked for sample in samples):
            return samples
        extended = list(samples)
        begin = 0
        while begin < len(extended):  # derived metrics may build on each other
            ready: dict[int, tuple[Derived, Sample]] = {}
            for sample in extended[begin:]:
                self._take(sample, ready)
            begin = len(extended)
            for metric, trigger in ready.values():
                made = self._compute(metric, trigger)
                if made is not None:
                    extended.append(made)
        return extended

    def _take(self, sample: Sample, ready: dict[int, tuple[Derived, Sample]]) -> None:
        if sample.metric not in self.tracked or sample.labels:
            return
        self.last[sample.metric] = (sample.step, sample.value)
        for metric in self._users.get(sample.metric, ()):
            metric.feed(sample.metric, sample.value)
            if sample.metric in metric.triggers:
                ready[id(metric)] = (metric, sample)

    def _compute(self, metric: Derived, trigger: Sample) -> Sample | None:
        for name in metric.triggers:
            seen = self.last.get(name)
            if seen is None or seen[0] != trigger.step:
                return None
        value = metric.compute(lambda name: self.last[name][1] if name in self.last else None)
        if value is None:
            return None
        return Sample(metric.name, trigger.step, value, NO_LABELS, trigger.phase, trigger.time)

    def state_dict(self) -> dict[str, Any]:
        return {
            "derived": {d.name: {"text": d.text, "state": d.state()} for d in self.derived},
            "last": {name: [step, encode_number(value)] for name, (step, value) in self.last.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for metric in self.derived:
            entry = saved["derived"].get(metric.name)
            if entry is not None and entry["text"] == metric.text:
                metric.restore(entry["state"])
        self.last = {name: (int(step), decode_number(value)) for name, (step, value) in saved["last"].items()}
