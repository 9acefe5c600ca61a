"""The weights before the first update: twins that stay twins, and layers that blow their input up.

Methods: symmetry breaking as in Goodfellow, Bengio, Courville (2016), 8.4; gain of a layer against its fan-in as in
Glorot and Bengio (2010) and He et al. (2015).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.names import first_few
from healthcheck.probes.values import on_host, scalar
from healthcheck.probes.weights.sampling import local_part
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

ROWS = 8
"""Rows of a matrix that are compared, and from which its spread is taken."""

Named = Sequence[tuple[str, Any]]


class InitialWeightProbe:
    """Looks once, before the first update, at the trainable weight matrices of linear and convolution layers.

    *Alike*: all rows are the same and not zero. Units that start alike get the same gradient and stay alike, if the
    layer behind them treats them alike too: two such layers are a fault, one is none. *Gain*: standard deviation times
    the root of the fan-in, by which a layer multiplies the size of its input; 0.5 to 1.5 is usual. Weights that are
    shared with an embedding are left out, as are frozen and zero ones (adapters begin at zero).
    """

    name = "initial-weights"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric("init.alike", "Weight matrices whose rows all begin as the same vector.", cost=Cost.DEVICE),
        Metric("init.gain", "Largest standard deviation times root of the fan-in, over the layers.", cost=Cost.DEVICE),
        Metric("init.gain_ratio", "Largest gain of a layer divided by the smallest.", cost=Cost.DEVICE),
    )

    def __init__(self) -> None:
        self._looked = False
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if self._looked or event.model is None:
            return ()
        self._looked = True
        self.rests_until = sys.maxsize
        if event.step > 1:  # a run that goes on has no beginning
            return ()
        layers = _layers(event.model.named_modules())
        return list(self._samples(event.step, layers)) if layers else ()

    def _samples(self, step: int, layers: Named) -> Iterable[Sample]:
        import torch

        names = [name for name, _ in layers]
        looks = [_look(weight) for _, weight in layers]
        home = looks[0][0].device
        alike = torch.stack([same.to(home) for same, _ in looks])
        gains = torch.stack([gain.to(home) for _, gain in looks])

        def which() -> Mapping[str, Any]:
            return {"which": first_few(n for n, flag in zip(names, alike.tolist(), strict=True) if flag)}

        def largest() -> Mapping[str, Any]:
            values = gains.tolist()
            worst = max(range(len(values)), key=values.__getitem__)
            return {"which": f"{names[worst]}, gain {values[worst]:.3g}; median {sorted(values)[len(values) // 2]:.3g}"}

        yield Sample("init.alike", step, scalar(alike.sum()), detail=which)
        yield Sample("init.gain", step, scalar(gains.max()), detail=largest)
        smallest = torch.where(gains > 0, gains, torch.full_like(gains, float("inf"))).min()
        if not on_host(smallest) or bool(smallest.isfinite()):
            yield Sample("init.gain_ratio", step, scalar(gains.max() / smallest), detail=largest)


def _layers(modules: Named) -> list[tuple[str, Any]]:
    from torch import nn
    from torch.nn.modules.conv import _ConvNd

    embedded = {id(m.weight) for _, m in modules if isinstance(m, nn.Embedding)}
    found = []
    for name, module in modules:
        if not isinstance(module, (nn.Linear, _ConvNd)):
            continue
        weight = getattr(module, "weight", None)
        if weight is None or not weight.requires_grad or id(weight) in embedded or weight.device.type == "meta":
            continue
        local = local_part(weight)
        # Depthwise kernels may well be alike: each has a channel of its own.
        if local.dim() > 1 and local.shape[0] > 1 and local[0].numel() > 1 and local.is_floating_point():
            found.append((name or "model", local))
    return found


def _look(weight: Any) -> tuple[Any, Any]:
    """Whether all rows are alike and not zero, and the gain: two 0-dim tensors on the weight's device."""
    rows = weight.reshape(weight.shape[0], -1)
    rows = rows[:: max(1, rows.shape[0] // ROWS)].float()
    alike = (rows == rows[0]).all() & (rows[0] != 0).any()
    gain = (rows.var() * rows.shape[1]).sqrt() if rows.numel() > 1 else rows.new_zeros(())
    return alike, gain
