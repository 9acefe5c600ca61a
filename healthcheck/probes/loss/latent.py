"""How much a latent code says: the divergence between its distribution and the prior, as the loss has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.graph.nodes import kind_of, near
from healthcheck.probes.graph.walk import saved
from healthcheck.probes.values import is_tensor, scalar
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

_LINEAR = ("Add", "Sub", "Rsub")


class LatentProbe:
    """Finds the divergence of two Gaussians in the graph of the loss, and computes its value.

    Two ways of writing it are known: from mean and log variance, ``mu**2 + logvar.exp() - logvar - 1`` (Kingma and
    Welling, 2014), and ``torch.distributions.kl_divergence`` of two ``Normal``. Recognised by a logarithm and its
    exponential that stand in one sum with a square of the same shape.
    """

    name = "latent"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "latent.kl",
            "Divergence of the latent code's distribution from the prior, in nats per sample.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a divergence from a prior in the loss"),
        ),
    )

    def __init__(self) -> None:
        self._step = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        step = event.step
        if event.loss_graph is None or event.phase != "train" or step == self._step:
            return ()
        if not demand.due("latent.kl", step):
            return ()
        self._step = step
        value = _divergence(event.loss_graph)
        return () if value is None else (Sample("latent.kl", step, scalar(value)),)


def _divergence(root: Any) -> Any:
    """Mean over samples of the sum over the code, as a 0-dim tensor; None where no such term stands in the loss."""
    nodes = list({id(node): node for node in near(root)}.values())
    added = {id(parent) for node in nodes if kind_of(node) in _LINEAR for parent, _ in node.next_functions}
    squares = [square for node in nodes if (square := _square(node)) is not None]
    for node in nodes:
        kind = kind_of(node)
        ratio: Any
        mean: Any
        if kind not in ("Exp", "Log") or id(node.next_functions[0][0]) not in added:
            continue
        # The exponential keeps its result, the logarithm its input: both are the ratio of the variances.
        ratio = saved(node, "result" if kind == "Exp" else "self")
        own = node.next_functions[0][0] if kind == "Log" else None
        for maker, mean in squares:
            if maker is not own and is_tensor(ratio) and mean.shape == ratio.shape and mean.dim() > 1:
                ratio, mean = ratio.detach().float(), mean.detach().float()
                terms = (mean.square() + ratio - 1 - ratio.clamp(min=1e-30).log()) / 2
                return terms.flatten(1).sum(1).mean()
    return None


def _square(node: Any) -> tuple[Any, Any] | None:
    """The node, and what was squared there."""
    kind = kind_of(node)
    inputs = node.next_functions
    by_itself = kind == "Mul" and len(inputs) == 2 and inputs[0][0] is inputs[1][0] is not None
    if not by_itself and (kind != "Pow" or node._saved_exponent != 2):
        return None
    squared: Any = saved(node, "self")
    return (node, squared) if is_tensor(squared) else None
