"""What the tests of the rule language share: a registry with every kind of thing in it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from healthcheck.core.errors import RuleFileError
from healthcheck.core.protocols import EMPTY, Condition, Scorer
from healthcheck.core.samples import Metric
from healthcheck.extend.host import PluginHost
from healthcheck.extend.registry import Registry
from healthcheck.rulelang import conditions
from healthcheck.rulelang.compile import load_rules


class FixedProbe:
    """Declares the metrics that the example files watch; it never samples."""

    name = "fixed"
    listens_to = ()
    provides = (
        *(Metric(name, "") for name in ("loss", "eval.loss", "grad_norm", "lr", "heartbeat", "throughput", "progress")),
        *(Metric(name, "") for name in ("time.step", "time.data", "clip.applied", "amp.skipped", "amp.scale")),
        *(Metric(name, "") for name in ("memory.fraction", "memory.allocated", "memory.fragmentation")),
        *(Metric(name, "") for name in ("memory.epoch_floor", "compile.recompiles", "compile.graph_breaks")),
        Metric("grad_norm", "", labels=("parameter",)),
        Metric("update_ratio", "", labels=("parameter",)),
        Metric("lr", "", labels=("group",)),
    )

    def sample(self, event: Any, demand: Any) -> Any:
        return ()


class FixedAction:
    """An action with options of its own, without torch."""

    def __init__(self, name: str, stage: str, **options: Any) -> None:
        self.name = name
        self.stage = stage
        self.options_schema = {"properties": options}

    def run(self, alert: Any, context: Any) -> Any:
        raise NotImplementedError


ACTIONS = (
    FixedAction("note", "observe"),
    FixedAction("warn", "observe"),
    FixedAction("evidence", "observe"),
    FixedAction("dump_stacks", "observe"),
    FixedAction("cleanup", "mitigate", gc={"type": "boolean"}, empty_cache={"type": "boolean"}),
    FixedAction("skip_update", "mitigate"),
    FixedAction(
        "stop",
        "stop",
        mode={"enum": ["graceful", "abort"]},
        checkpoint={"type": "boolean"},
        exit_code={"type": "integer"},
    ),
)


EXAMPLES: dict[str, Any] = {
    "above": 5,
    "below": 5,
    "at_least": 5,
    "at_most": 5,
    "equals": 5,
    "outside": [1, 5],
    "nonfinite": {"count": 2, "window": 5},
    "zscore": {"above": 5, "window": 20},
    "robust_z": {"above": 5, "window": 20, "log": True, "min_ratio": 1.2},
    "ratio": {"above": 2, "window": 20},
    "mean": {"above": 5, "window": 20},
    "min": {"above": 5, "window": 20},
    "max": {"above": 5, "window": 20},
    "percentile": {"above": 5, "p": 90, "window": 20},
    "delta": {"above": 1, "over": 5},
    "increase": {"above": 1, "window": 20},
    "slope": {"above": 0, "over": 20},
    "drift": {"above": 10, "window": 20},
    "rebound": {"above": 1.05, "sigmas": 3, "fell": "5%", "behind": "10%"},
    "drawdown": {"above": 0.5, "sigmas": 3},
    "gain": {"below": 0.5, "confidence": 0.9},
    "superiority": {"below": 0.55, "independent": 10, "direction": "down"},
    "no_improvement": {"over": 10, "min_rel": 0.01, "smooth": 3},
    "unchanged": {"over": 3},
    "stale": {"after": "300s", "times": 3},
    "missing": 100,
    "outlier": {"above": 1.3, "across": "rank"},
}
VARIANTS: list[tuple[str, Any]] = [
    *EXAMPLES.items(),
    ("nonfinite", True),
    ("robust_z", {"above": 5, "window": 20}),
    *(("ratio", {"above": 2, "window": 20, "to": to}) for to in ("mean", "ewma", "best", "first")),
    ("ratio", {"below": 0.5, "to": "best"}),
    ("slope", {"above": 0, "over": 40, "confidence": 0.9}),
    ("slope", {"above": 0, "over": 20, "per": "step", "relative": True}),
    ("no_improvement", {"over": 10}),
    ("rebound", {"above": 1.5, "smooth": 4}),
]
"""Every built-in condition but `all` and `any`, some of them with other options."""


def registry() -> Registry:
    """Built-in conditions, the actions and metrics above."""
    host = PluginHost()
    host.load_builtins([conditions])
    add = host.registry.adder("actions", "healthcheck")
    for action in ACTIONS:
        add(action)
    host.registry.adder("probes", "healthcheck")(FixedProbe())
    return host.registry


def condition(name: str, options: Any = True, **rule: Any) -> Condition:
    """One compiled condition."""
    return next(kind for kind in conditions.CONDITIONS if kind.name == name).compile(options, rule)


def noisy(n: int, *, seed: int = 0, level: float = 2.0, noise: float = 0.05) -> list[float]:
    """A calm loss curve."""
    draw = random.Random(seed)
    return [level + draw.gauss(0.0, noise) for _ in range(n)]


def scores(compiled: Condition, values: list[float]) -> list[float | None]:
    """The score of every value, non-finite ones left out unless the condition judges them."""
    scorer = compiled.start()
    return [
        update(scorer, v, i + 1) if math.isfinite(v) or compiled.judges_nonfinite else None
        for i, v in enumerate(values)
    ]


def update(scorer: Scorer, value: float, step: int) -> float | None:
    """The score of a run of one sample."""
    ((score, _),) = scorer.update((value,), (step,), EMPTY)
    return score


BASE = """\
version: 1
defaults: {warmup: 50}
rules:
  loss-high: {metric: loss, when: {above: 5}, for: 3, severity: error, tags: [loss]}
  lr-zero: {metric: lr, when: {equals: 0}}
  opt-in: {metric: lr, when: {above: 1}, enabled: false}
profiles:
  ci:
    defaults: {warmup: 5}
    rules: {lr-zero: off, loss-high: {for: 1}}
"""


def load(known, *sources, **options):
    return load_rules(list(sources), registry=known, **options)


def errors(known, *sources, **options):
    with pytest.raises(RuleFileError) as raised:
        load_rules(list(sources), registry=known, **options)
    return [str(p) for p in raised.value.problems]
