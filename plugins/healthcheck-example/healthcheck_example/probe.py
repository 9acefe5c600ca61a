"""A probe: one number per step about the weights."""

from __future__ import annotations

from collections.abc import Iterable

from healthcheck import Cost, Demand, Event, EventKind, Metric, Sample

WEIGHT_NORM = Metric(
    "healthcheck_example.weight_norm",
    help="L2 norm of all parameters",
    cost=Cost.DEVICE,
)


class WeightNorm:
    """L2 norm of all parameters after the update.

    Costs a few kernels; the value stays on its device until it is brought to the host, a step or two later.
    """

    name = "healthcheck_example-weight-norm"
    listens_to: tuple[EventKind, ...] = (EventKind.AFTER_UPDATE,)
    provides: tuple[Metric, ...] = (WEIGHT_NORM,)

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        # A rule with `every: 10` makes this due at every tenth step; in between, do no work.
        if event.model is None or not demand.due(WEIGHT_NORM.key, event.step):
            return
        from torch.nn.utils import get_total_norm

        weights = [parameter.detach() for _, parameter in event.model.named_parameters()]
        if weights:  # no parameters is not a norm of zero
            yield Sample(WEIGHT_NORM.name, event.step, get_total_norm(weights))
