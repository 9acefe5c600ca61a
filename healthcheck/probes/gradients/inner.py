"""Gradients of optimizers that step inside the backward pass, measured one by one before each is gone."""

from __future__ import annotations

from typing import Any, NamedTuple

from healthcheck.probes.gradients.statistics import GradientStats
from healthcheck.probes.kernels.foreach import norm_of, plain_values
from healthcheck.probes.transfer.late import LateTable
from healthcheck.protocols import Demand

_OF_NORMS = ("grad_norm", "grad_norm[]", "grads.zero", "grad.layer_ratio")


class InnerPass(NamedTuple):
    """What was measured of one backward pass whose gradients are gone."""

    step: int
    names: list[str]
    parameters: list[Any]
    statistics: GradientStats


class InnerGradients:
    """Collects the statistics of one backward pass. Holds no gradient: that they need not all exist at once is why
    such optimizers are used. One reduction a parameter, a second where a rule asks for the count of non-finite values.
    """

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._params: list[Any] = []
        self._norms: list[Any] = []
        self._counts: list[Any] = []

    def take(self, optimizer: Any, step: int) -> None:
        """Measure what this optimizer is about to use and throw away."""
        import torch

        counted = self._demand.due("grad_nonfinite", step)
        if not counted and not any(self._demand.due(key, step) for key in _OF_NORMS):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, sharded = plain_values(parameter.grad)
                if sharded is not None:  # a collective here would meet others in another order
                    continue
                wide = torch.float32 if gradient.device.type == "mps" else torch.float64
                self._params.append(parameter)
                self._norms.append(torch.linalg.vector_norm(gradient, 2, dtype=wide))
                if counted:
                    self._counts.append((~torch.isfinite(gradient)).sum())

    def result(self, named: Any) -> tuple[list[str], list[Any], GradientStats] | None:
        """Names, parameters and statistics in the model's order, or None; forgets them.

        :param named: all ``(name, parameter)`` of the model.
        """
        params, norms, counts = self._params, self._norms, self._counts
        self._params, self._norms, self._counts = [], [], []
        if not params:
            return None
        import torch

        places = {id(p): (place, name) for place, (name, p) in enumerate(named)}
        found = [places.get(id(p), (len(places) + k, f"param{k}")) for k, p in enumerate(params)]
        order = sorted(range(len(params)), key=lambda k: found[k][0])
        home = norms[0].device
        rows = [torch.stack([norms[k].to(home, non_blocking=True) for k in order])]
        totals, fields = [norm_of(rows[0])], ["norm"]
        if counts:
            rows.append(torch.stack([counts[k].to(home, non_blocking=True) for k in order]).to(rows[0].dtype))
            fields.append("nonfinite")
        rows.append((rows[0] == 0).to(rows[0].dtype))
        fields.append("all_zero")
        totals += [row.sum() for row in rows[1:]]
        stats = GradientStats(
            list(range(len(order))),
            norms=rows[0],
            table=LateTable(torch.cat([torch.stack(totals), *rows])),
            fields=tuple(fields),
            lengths=[params[k].numel() for k in order],
        )
        return [found[k][1] for k in order], [params[k] for k in order], stats
