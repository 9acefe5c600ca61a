"""What layers are given and put out, by forward hooks and so only if asked for: saturation, outliers, dead units, and layers
that take the batch for time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import largest, numbers, values_of
from healthcheck.probes.graph import CROSS_ENTROPIES, DISTANCES, kind_of, near, shape_of, source_of
from healthcheck.probes.labels import first_few
from healthcheck.probes.looks import SeenModules

Hook = Callable[[Any, Any, Any], None]


class ModuleHooks:
    """The hooks of one probe.

    :param choose: from named modules to those that get a hook, each with it.
    """

    def __init__(self, choose: Callable[[Sequence[tuple[str, Any]]], Iterable[tuple[Any, Hook]]]) -> None:
        self._choose = choose
        self._modules = SeenModules()
        self._handles: list[Any] = []

    def follow(self, modules: Sequence[tuple[str, Any]]) -> None:
        """Put hooks on a model that was not seen before, and take them off the old one."""
        if self._modules.changed(modules):
            self._remove()
            for module, hook in self._choose(modules):
                self._handles.append(module.register_forward_hook(hook))

    def close(self) -> None:
        """Remove all hooks; the next model is a new one."""
        self._remove()
        self._modules.forget()

    def _remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def out_of_graphs(hook: Hook) -> Hook:
    """``hook``, except where a compiled region is traced through its module: there it is nothing.

    Marked as not to be traced it would end a graph at every layer. What is compiled is not seen, then.
    """
    from torch.compiler import is_dynamo_compiling

    def look(module: Any, given: Any, output: Any) -> None:
        if not is_dynamo_compiling():
            hook(module, given, output)

    return look


def _as_vector(values: Mapping[str, Any]) -> Any:
    """0-dim tensors by module as one vector, on the device of the first."""
    import torch

    home = next(iter(values.values())).device
    return torch.stack([value.to(home) for value in values.values()])


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
            "Share of outputs at their limits, in the most saturated layer (sigmoid, tanh and the like).",
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
        names, outputs = list(values), numbers(_as_vector(values))

        def facts() -> Mapping[str, Any]:
            value, name = max(zip(values_of(outputs), names, strict=True))
            return {"which": f"{name}, {value:.3g}"}

        return Sample(key, step, largest(outputs), detail=facts)

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


BATCHES = 10
"""Training passes over which a unit must stay silent."""

_KINDS = ("ReLU", "ReLU6", "Threshold", "Hardtanh")


class DeadUnitProbe:
    """Keeps, per layer, which units were above zero at least once in the last ten passes.

    Units are channels of a convolution (dimension 1 of three and more) and features otherwise
    (the last). Sees ``nn.ReLU`` and its like; a function call such as ``relu(x)`` has no module to
    hook. Hooks are put in place at the first event that shows the model, and removed at the end.
    """

    name = "dead-units"
    listens_to: tuple[EventKind, ...] = (
        EventKind.TRAIN_START,
        EventKind.STEP_START,
        EventKind.LOSS,
        EventKind.STEP_END,
    )
    provides: tuple[Metric, ...] = (
        Metric(
            "units.dead",
            f"Share of the worst ReLU layer's units that were 0 in all of the last {BATCHES} passes.",
            "fraction",
            Cost.DEVICE,
            needs=_NEEDS,
        ),
        Metric(
            "units.dead",
            f"Share of one ReLU layer's units that were 0 in all of the last {BATCHES} passes.",
            "fraction",
            Cost.DEVICE,
            labels=("module",),
            needs=_NEEDS,
        ),
    )

    def __init__(self) -> None:
        self._wanted = False
        self._hooks = ModuleHooks(self._choose)
        self._alive: dict[str, Any] = {}
        self._passes: dict[str, int] = {}

    def plan(self, demand: Demand) -> None:
        self._wanted = demand.wants("units.dead") or demand.wants("units.dead[]")
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
        full = [name for name, passes in self._passes.items() if passes >= BATCHES]
        if not full:
            return ()
        return list(self._samples(event, demand, full))

    def _samples(self, event: Event, demand: Demand, full: list[str]) -> Iterable[Sample]:
        shares = numbers(_as_vector({name: 1.0 - self._alive.pop(name).float().mean() for name in full}))
        for name in full:
            del self._passes[name]
        if demand.wants("units.dead"):

            def facts() -> Mapping[str, Any]:
                share, name = max(zip(values_of(shares), full, strict=True))
                return {"which": f"{name}, {share:.0%} of its units"}

            yield Sample("units.dead", event.step, largest(shares), detail=facts)
        if demand.wants("units.dead[]"):
            for k, name in enumerate(full):
                yield Sample("units.dead", event.step, shares[k], (("module", name),))

    def _choose(self, modules: Sequence[tuple[str, Any]]) -> Iterable[tuple[Any, Hook]]:
        # By the name of the class: subclasses may put out something else.
        for name, module in modules:
            if type(module).__name__ in _KINDS and getattr(module, "min_val", 0.0) >= 0.0:
                yield module, self._hook(name or "model")

    def _hook(self, name: str) -> Any:
        import torch

        def look(module: Any, given: Any, output: Any) -> None:
            # Only passes that train: evaluation and no_grad passes see other data.
            if not torch.is_tensor(output) or not module.training or not torch.is_grad_enabled() or output.dim() < 2:
                return
            # Channels of images; features of everything else, sequences included.
            unit = 1 if output.dim() > 3 else output.dim() - 1
            alive = (output.detach() > 0).any(dim=tuple(d for d in range(output.dim()) if d != unit))
            known = self._alive.get(name)
            if known is None or known.shape != alive.shape:
                self._alive[name], self._passes[name] = alive, 1
            else:
                self._alive[name] = known | alive
                self._passes[name] += 1

        return out_of_graphs(look)


LOOKS = 4
"""Losses with whose rows the layers' inputs are compared."""
LAYERS = 8
"""Layers that get a hook."""


class BatchLayoutProbe:
    """Compares what recurrent and attention layers with ``batch_first=False`` were given with the rows of the loss.

    Such a layer takes an input of shape (T, B, features). Where the loss has one row per sample, as many as the layer's
    first dimension and not as many as its second, the layer was given (B, T, features): it runs along the batch, and
    what a sample is answered depends on its neighbours. A loss with a row per token tells nothing, nor does a batch
    of one sample. The hooks are taken off after the first few steps.
    """

    name = "batch-layout"
    rests_always = True
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    provides: tuple[Metric, ...] = (
        Metric(
            "layers.mixing",
            f"Layers that read the batch dimension as time, at each of the first {LOOKS} losses.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "layers with batch_first=False"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._shapes: dict[str, tuple[int, int]] = {}
        self._hooks = ModuleHooks(self._choose)
        self._looks = 0
        self._found: set[str] | None = None

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.phase != "train" or self.rests_until:
            return ()
        if not self._shapes:
            self._hooks.follow(event.model.named_modules())
            self._looks += 1
        elif event.loss_graph is not None:
            answers = list(_answers(event.loss_graph))
            mixing = {
                name for name, shape in self._shapes.items() if answers and all(_mixes(*shape, a) for a in answers)
            }
            self._found = mixing if self._found is None else self._found & mixing
            self._shapes.clear()
            self._looks += 1
        if self._looks <= LOOKS:
            return ()
        self.close()
        self.rests_until = sys.maxsize
        found = sorted(self._found or ())

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(found), "batch_first": "False"}

        return () if self._found is None else (Sample("layers.mixing", event.step, float(len(found)), detail=facts),)

    def close(self) -> None:
        """Take the hooks off."""
        self._hooks.close()

    def _choose(self, modules: Sequence[tuple[str, Any]]) -> Iterator[tuple[Any, Hook]]:
        from torch import nn

        kinds = (nn.RNNBase, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        chosen = [(name, m) for name, m in modules if isinstance(m, kinds) and not _batch_first(m)]
        for name, module in chosen[:LAYERS]:
            yield module, out_of_graphs(self._noting(name))

    def _noting(self, name: str) -> Hook:
        def hook(module: Any, given: Any, output: Any) -> None:
            shape: Sequence[int] = getattr(given[0], "shape", ()) if given else ()
            if len(shape) == 3 and module.training:
                self._shapes[name] = (int(shape[0]), int(shape[1]))

        return hook


def _batch_first(module: Any) -> bool:
    return bool(getattr(getattr(module, "self_attn", module), "batch_first", True))


def _mixes(first: int, second: int, answers: tuple[int, ...]) -> bool:
    """Whether answers of this shape are one for each of the layer's ``first``, and none are for its ``second``.

    Answers of shape (T, B), as of a layer that was given (T, B, features), are one for each of both.
    """
    return second > 1 and len(answers) <= 2 and answers[0] == first and second not in answers


def _answers(root: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of the answers that a loss compares."""
    for node in near(root):
        if kind_of(node) in (*CROSS_ENTROPIES, *DISTANCES, "BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"):
            shape = shape_of(source_of(node))
            if shape:
                yield tuple(shape)
