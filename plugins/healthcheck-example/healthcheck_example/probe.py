"""A probe: one number per step about the weights."""

from __future__ import annotations

from collections.abc import Iterable

from healthcheck.events import Event, EventKind
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample


class WeightNorm:
    """L2 norm of all parameters after the update.

    Costs a few kernels; the value stays on its device until the mailbox brings it over.
    """

    name = "example-weight-norm"
    listens_to: tuple[EventKind, ...] = (EventKind.AFTER_UPDATE,)
    provides: tuple[Metric, ...] = (Metric("example.weight_norm", help="L2 norm of all parameters", cost=Cost.DEVICE),)

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        # A rule with `every: 10` makes this due at every tenth step; in between, do no work.
        if event.model is None or not demand.due("example.weight_norm", event.step):
            return
        from torch.nn.utils import get_total_norm

        weights = [parameter.detach() for _, parameter in event.model.named_parameters()]
        if weights:  # no parameters is not a norm of zero
            yield Sample("example.weight_norm", event.step, get_total_norm(weights))
