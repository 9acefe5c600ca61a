"""What the layers put out: saturated squashing functions and outliers. Needs forward hooks, so only if asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.model.modulehooks import Hook, ModuleHooks, largest_of, out_of_graphs
from healthcheck.probes.values import scalar
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

NEAR = 1e-3
"""Distance from its limit at which an output counts as saturated: its slope is about 0.002 there, or less."""

_LIMITS: dict[str, tuple[float, float]] = {
    "Tanh": (-1.0, 1.0),
    "Sigmoid": (0.0, 1.0),
    "Softsign": (-1.0, 1.0),
}
_NEEDS = ("layers outside compiled graphs",)
_SATURATED, _LARGEST, _KURTOSIS = _KEYS = ("activations.saturated", "activations.max", "activations.kurtosis")


class ActivationProbe:
    """Looks at the outputs of layers in the training passes of the steps that a rule asks for.

    Saturation: of ``nn.Tanh``, ``nn.Sigmoid`` and ``nn.Softsign``; a call of the function has no module to hook.
    Largest value and kurtosis (3 for a normal distribution): of linear, convolution and normalisation layers, which
    bear the outliers that low precision cannot hold. Given is the worst layer. With hooks in place torch does not take
    its fused path for attention in eval mode.
    """

    name = "activations"
    listens_to: tuple[EventKind, ...] = (
        EventKind.TRAIN_START,
        EventKind.STEP_START,
        EventKind.LOSS,
        EventKind.STEP_END,
    )
    provides: tuple[Metric, ...] = (
        Metric(
            _SATURATED,
            "Part of the worst squashing layer's outputs that are at a limit.",
            "fraction",
            Cost.DEVICE,
            needs=_NEEDS,
        ),
        Metric(_LARGEST, "Largest absolute output of a layer.", cost=Cost.DEVICE, needs=_NEEDS),
        Metric(_KURTOSIS, "Kurtosis of the outputs of the worst layer; 3 is normal.", cost=Cost.DEVICE, needs=_NEEDS),
    )

    def __init__(self) -> None:
        self._wanted: set[str] = set()
        self._hooks = ModuleHooks(self._choose)
        self._due: set[str] = set()
        self._seen: dict[str, dict[str, Any]] = {}

    def plan(self, demand: Demand) -> None:
        self._wanted = {key for key in _KEYS if demand.wants(key)}
        if not self._wanted:
            self.close()

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.close()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if self._wanted and event.model is not None:
            self._hooks.follow(event.model.named_modules())
        if event.kind is not EventKind.STEP_END:
            return ()
        samples = [self._worst(key, values, event.step) for key, values in self._seen.items() if values]
        # The forward passes of the next step have not begun.
        self._due = {key for key in self._wanted if demand.due(key, event.step + 1)}
        self._seen = {key: {} for key in self._due}
        return samples

    def _worst(self, key: str, values: Mapping[str, Any], step: int) -> Sample:
        def facts() -> Mapping[str, Any]:
            name = max(values, key=lambda n: float(values[n]))
            return {"which": f"{name}, {float(values[name]):.3g}"}

        return Sample(key, step, scalar(largest_of(values)), detail=facts)

    def _choose(self, modules: Sequence[tuple[str, Any]]) -> Iterable[tuple[Any, Hook]]:
        from torch import nn
        from torch.nn.modules.batchnorm import _NormBase
        from torch.nn.modules.conv import _ConvNd

        spread = (nn.Linear, _ConvNd, _NormBase, nn.LayerNorm, nn.GroupNorm)
        for name, module in modules:
            limits = _LIMITS.get(type(module).__name__)
            if limits is not None and _SATURATED in self._wanted:
                yield module, self._hook(name, {_SATURATED: _share_at(limits)})
            elif isinstance(module, spread) and self._wanted & {_LARGEST, _KURTOSIS}:
                yield module, self._hook(name, {_LARGEST: _largest, _KURTOSIS: _kurtosis})

    def _hook(self, name: str, measures: Mapping[str, Callable[[Any], Any]]) -> Any:
        import torch

        def look(module: Any, given: Any, output: Any) -> None:
            if not self._due or not module.training or not torch.is_grad_enabled() or not torch.is_tensor(output):
                return
            if not output.is_floating_point() or not output.numel():
                return
            values = output.detach()
            for key, measure in measures.items():
                if key in self._due:
                    number, kept = measure(values), self._seen[key].get(name)
                    self._seen[key][name] = number if kept is None else torch.maximum(kept, number)

        return out_of_graphs(look)


def _share_at(limits: tuple[float, float]) -> Callable[[Any], Any]:
    low, high = limits
    return lambda values: ((values < low + NEAR) | (values > high - NEAR)).float().mean()


def _largest(values: Any) -> Any:
    return values.abs().max().float()


def _kurtosis(values: Any) -> Any:
    centred = values.float() - values.float().mean()
    variance = centred.square().mean()
    return centred.pow(4).mean() / variance.square().clamp(min=1e-30)
