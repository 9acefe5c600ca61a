"""Weights themselves: are they finite, and are tied ones still tied?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.gradients.blame import bad_weight_facts
from healthcheck.probes.kernels.foreach import l2_norms
from healthcheck.probes.names import first_few
from healthcheck.probes.values import scalar
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

TIES_EVERY = 50
"""Steps between two looks at tied weights: they are lost by an assignment, never gradually."""


class WeightProbe:
    """Counts weights that are not finite, or nothing at all: when a rule is due, and before a checkpoint is trusted."""

    name = "weights"
    stretchable = ("params.nonfinite", "params.zero")
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END, EventKind.CHECKPOINT_SAVED)
    only_when_due = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric("params.nonfinite", "Parameters that hold a NaN or infinity.", cost=Cost.DEVICE),
        Metric("params.zero", "Trainable weight matrices that are zero throughout.", cost=Cost.DEVICE),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        saved = event.kind is EventKind.CHECKPOINT_SAVED
        keys = {key for key in self.stretchable if demand.wants(key) and (saved or demand.due(key, event.step))}
        if not keys or event.model is None:
            return ()
        named = [(name, p) for name, p in event.model.named_parameters() if _can_be_bad(p)]
        return list(self._samples(event.step, keys, named)) if named else ()

    @staticmethod
    def _samples(step: int, keys: Collection[str], named: Sequence[tuple[str, Any]]) -> Iterable[Sample]:
        # A float64 norm of finite float32 weights cannot overflow: non-finite means non-finite.
        norms = l2_norms([p for _, p in named])
        if "params.nonfinite" in keys:
            bad = (~norms.isfinite()).sum()
            yield Sample("params.nonfinite", step, scalar(bad), detail=lambda: {"weights": bad_weight_facts(named)})
        if "params.zero" in keys:
            import torch

            matrices = torch.tensor([p.dim() > 1 and p.requires_grad for _, p in named]).to(norms.device)
            zero = (norms == 0) & matrices

            def facts() -> Mapping[str, Any]:
                return {"which": first_few(n for (n, _), flag in zip(named, zero.tolist(), strict=True) if flag)}

            yield Sample("params.zero", step, scalar(zero.sum()), detail=facts)


class TiedWeightProbe:
    """Notices weights that were one tensor and are two, or that the model's own settings tie.

    At the first look it notes which modules share a parameter; a transformers-style config with
    ``tie_word_embeddings`` says by itself that input and output embeddings should be one.
    """

    name = "tied-weights"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric("params.tied_lost", "Pairs of weights that should be one tensor and are not.", cost=Cost.HOST),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._ties: list[list[str]] | None = None

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None:
            return ()
        modules = event.model.named_modules()
        if not modules:
            return ()
        if self._ties is not None and event.step < self.rests_until:  # the second optimizer of a step
            return ()
        self.rests_until = event.step - event.step % TIES_EVERY + TIES_EVERY
        if self._ties is None:
            self._ties = _shared(modules)
        held = _held(modules)
        lost = [
            f"{first} and {name}"
            for first, *others in self._ties
            for name in others
            if name in held and first in held and held[name] is not held[first]
        ]
        lost += [text for text in _broken_promises(modules) if text not in lost]

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(lost)}

        return (Sample("params.tied_lost", event.step, float(len(lost)), detail=facts),)


def _can_be_bad(parameter: Any) -> bool:
    real = parameter.is_floating_point() or parameter.is_complex()  # quantised integers are always finite
    return bool(real and parameter.numel() and parameter.device.type != "meta")


def _held(modules: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Every parameter under every name that it has, unlike ``named_parameters``."""
    return {
        f"{name}.{key}" if name else key: parameter
        for name, module in modules
        for key, parameter in getattr(module, "_parameters", {}).items()
        if parameter is not None
    }


def _shared(modules: Iterable[tuple[str, Any]]) -> list[list[str]]:
    """Names that stand for one tensor, by tensor. Names only, so that no model is kept alive."""
    owners: dict[int, list[str]] = {}
    for name, parameter in _held(modules).items():
        owners.setdefault(id(parameter), []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def _broken_promises(modules: Iterable[tuple[str, Any]]) -> Iterable[str]:
    for name, module in modules:
        config = getattr(module, "config", None)
        if not getattr(config, "tie_word_embeddings", False):
            continue
        given, wanted = getattr(module, "get_input_embeddings", None), getattr(module, "get_output_embeddings", None)
        if not callable(given) or not callable(wanted):
            continue
        first, last = given(), wanted()
        one, other = getattr(first, "weight", None), getattr(last, "weight", None)
        if one is not None and other is not None and one is not other and one.shape == other.shape:
            yield f"input and output embeddings of {name or type(module).__name__}"
