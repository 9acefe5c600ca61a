"""Random rules of every condition and random series, for properties that must hold whatever the rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from hypothesis import strategies as st

from healthcheck.assembly import plugin_host
from healthcheck.core.samples import Sample
from healthcheck.extend.registry import Registry

STEPS = 60


@cache
def registry() -> Registry:
    return plugin_host().registry


# -- random rules of every condition --------------------------------------------------

window = st.integers(4, 15)
limit = st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 5.0])
comparator = st.one_of(
    st.builds(lambda k, v: {k: v}, st.sampled_from(["above", "below", "at_least", "at_most", "equals"]), limit),
    st.builds(lambda v: {"outside": [v - 1.0, v + 1.0]}, limit),
)


def windowed(name: str, key: str = "window", **extra: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    options = st.fixed_dictionaries({key: window, **extra})
    return st.builds(lambda test, more: {name: {**test, **more}}, comparator, options)


CONDITIONS: dict[str, st.SearchStrategy[Any]] = {
    "comparators": comparator,
    "nonfinite": st.just("nonfinite"),
    "nonfinite count": st.builds(
        lambda c, w: {"nonfinite": {"count": min(c, w), "window": w}}, st.integers(1, 3), window
    ),
    "zscore": windowed("zscore"),
    "robust_z": windowed("robust_z"),
    "robust_z of logs": windowed("robust_z", log=st.just(True), min_ratio=st.sampled_from([1.0, 1.5])),
    "ratio": windowed("ratio", to=st.sampled_from(["median", "mean", "ewma", "first"])),
    "ratio to best": windowed("ratio", to=st.just("best"), mode=st.sampled_from(["min", "max"])),
    "mean": windowed("mean"),
    "min": windowed("min"),
    "max": windowed("max"),
    "percentile": windowed("percentile", p=st.sampled_from([10, 50, 95])),
    "delta": windowed("delta", "over"),
    "increase": windowed("increase"),
    "slope": windowed("slope", "over"),
    "drift": st.builds(lambda n, v: {"drift": {"window": n, "above": v}}, window, st.sampled_from([1, 5, 25])),
    "no_improvement": st.builds(
        lambda n, m: {"no_improvement": {"over": n, "min_rel": 0.01, "mode": m}},
        window,
        st.sampled_from(["min", "max"]),
    ),
    "rebound": st.builds(
        lambda a, z, f, b: {"rebound": {"above": a, "sigmas": z, "fell": f, "behind": b}},
        st.sampled_from([1.01, 1.5]),
        st.sampled_from([0, 2]),
        st.sampled_from([0, 0.05]),
        st.sampled_from([0, 0.2]),
    ),
    "drawdown": st.builds(
        lambda a, z: {"drawdown": {"above": a, "sigmas": z}}, st.sampled_from([0.2, 1]), st.sampled_from([0, 2])
    ),
    "gain": st.builds(
        lambda b, d: {"gain": {"below": b, "direction": d}}, st.sampled_from([0.5, 2]), st.sampled_from(["up", "down"])
    ),
    "superiority": st.builds(
        lambda b, d: {"superiority": {"below": b, "direction": d}},
        st.sampled_from([0.55, 0.7]),
        st.sampled_from(["up", "down"]),
    ),
    "unchanged": st.builds(lambda n: {"unchanged": {"over": n}}, st.integers(2, 5)),
    "stale": st.builds(lambda s: {"stale": {"after": f"{s}s", "first": "2s"}}, st.integers(2, 6)),
    "missing": st.builds(lambda n: {"missing": n}, st.integers(2, 6)),
    "outlier": st.builds(lambda v: {"outlier": {"above": v, "across": "rank"}}, st.sampled_from([1.1, 1.5, 2.0])),
    "all": st.builds(lambda a, b: {"all": [a, {"metric": "gnorm", **b}]}, comparator, comparator),
    "any": st.builds(lambda a, b: {"any": [a, {"metric": "gnorm", **b}]}, comparator, comparator),
}

ADAPTS = ("zscore", "robust_z", "robust_z of logs", "ratio", "ratio to best")
"""Conditions for which `outliers` and `reseed` mean something."""


@st.composite
def rule(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    metric = {"outlier": "step_time[rank=*]"}.get(kind) or draw(
        st.sampled_from(["loss", "layer[*]", "gap"] if kind not in ("stale", "missing") else ["loss", "layer[*]"])
    )
    made: dict[str, Any] = {"metric": metric, "when": draw(CONDITIONS[kind])}
    optional: dict[str, st.SearchStrategy[Any]] = {
        "for": st.sampled_from([1, 2, 3, "2 of 4", "3s"]),
        "every": st.integers(1, 4),
        "warmup": st.sampled_from([5, "4 samples", "6s"]),
        "cooldown": st.integers(1, 8),
        "phase": st.sampled_from(["any", "train"]),
    }
    if kind not in ("comparators", "nonfinite", "nonfinite count", "stale", "missing", "all", "any", "unchanged"):
        optional["recover"] = st.builds(lambda v: {"below": v}, limit)
    if kind in ADAPTS:
        optional["outliers"] = st.sampled_from(["include", "exclude", "clip"])
        optional["reseed"] = st.integers(2, 3)
        optional["min_samples"] = st.integers(2, 3)
    if kind != "outlier":
        optional["only_if"] = st.just({"guard": 0})
    for key, values in optional.items():
        if draw(st.booleans()):
            made[key] = draw(values)
    made["then"] = ["warn", {"stop": {"after": 2}}] if draw(st.booleans()) else ["warn"]
    return made


@st.composite
def rule_file(draw: st.DrawFn) -> dict[str, Any]:
    kinds = draw(st.lists(st.sampled_from(sorted(CONDITIONS)), min_size=1, max_size=4))
    return {
        "version": 1,
        "external": ["loss", "layer", "gnorm", "guard", "step_time"],
        "metrics": {"gap": "loss - ewma(gnorm, 5) / mean(loss, 4)"},
        "rules": {f"rule-{i}": draw(rule(kind)) for i, kind in enumerate(kinds)},
    }


# -- random series --------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    loss: float | None
    gnorm: float | None
    layers: tuple[float | None, float | None]
    guard: float | None
    pause: float


def random_series(seed: int, length: int) -> list[Step]:
    """Values that wander, jump, stand still, break and stay away; one seed stands for them in reports."""
    random = Random(seed)
    level = {name: random.uniform(-2, 2) for name in ("loss", "gnorm", "l0", "l1")}

    def value(name: str) -> float | None:
        kind = random.random()
        if kind < 0.12:
            return None
        if kind < 0.20:
            return random.choice([math.nan, math.inf, -math.inf])
        if kind < 0.35:
            level[name] = random.choice([0.0, 1.0, 10.0, -3.0])
        elif kind < 0.80:
            level[name] += random.gauss(0, 0.3)
        return level[name]

    return [
        Step(
            value("loss"),
            value("gnorm"),
            (value("l0"), value("l1")),
            random.choice([None, 0.0, 0.0, 1.0]),
            random.choice([1.0, 1.0, 1.0, 5.0]),
        )
        for _ in range(length)
    ]


def samples(number: int, at: Step) -> list[Sample]:
    made = [("loss", (), at.loss), ("gnorm", (), at.gnorm), ("guard", (), at.guard)]
    made += [("layer", (("parameter", f"l{i}"),), v) for i, v in enumerate(at.layers)]
    made += [("step_time", (("rank", str(i)),), v) for i, v in enumerate((*at.layers, at.loss))]
    return [Sample(metric, number, v, labels) for metric, labels, v in made if v is not None]
