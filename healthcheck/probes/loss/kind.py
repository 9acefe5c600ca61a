"""What sort of loss it is, where that changes what its curve means: read from torch's own graph of it.

The loss of reinforcement learning is no measure of success: it is taken over what the policy does by then, against
returns or targets that grow while the agent gets better. And a loss with a hinge is rightly nothing once it is solved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.graph.looks import PAUSE, GraphLooks
from healthcheck.probes.graph.nodes import (
    DISTANCES,
    NEUTRAL,
    REDUCING,
    kind_of,
    parents_of,
    past_neutral,
    shape_of,
    source_of,
)
from healthcheck.probes.graph.walk import saved
from healthcheck.probes.values import is_tensor, on_host
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

LOOKS = (1, 2, 5, 20)
"""Backward passes at which it is looked, until something is found: a few dozen nodes each time."""
NODES = 128
"""Nodes between the loss and its parts that are followed."""
LARGE_WEIGHT = 2.0
"""No mask and no usual weight of a token or class is larger."""

_BETWEEN = (
    *REDUCING,
    *NEUTRAL,
    "Minimum",
    "Maximum",
    "Min",
    "Max",
    "Clamp",
    "Where",
    "MaskedFill",
    "Exp",
    "Stack",
    "Cat",
)
_AVERAGING = ("Mean", "Sum", "Div", "Add", "Pow", "Stack", "Cat", *NEUTRAL)
_HINGES = ("Clamp", "ClampMin", "Relu", "MultiMarginLoss", "MultilabelMarginLoss")


class LossKindProbe:
    """Tells two kinds of loss by what they are made of. A run whose loss is of neither kind has no sample.

    Of chosen actions is a loss in which one output per row was picked and compared with a number (Q-learning), or
    in which log probabilities are each multiplied with a number that may be negative or large (policy gradients;
    Williams 1992), or in which a ratio of probabilities is (PPO; Schulman et al. 2017). Weights are read on the host
    only.
    """

    name = "loss-kind"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.of_actions",
            "In runs whose loss is one of reinforcement learning: 1 where log probabilities of chosen actions are weighted"
            " by returns, 2 where values of chosen actions are compared with targets. Other runs have no such value.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "a loss of reinforcement learning"),
        ),
        Metric(
            "loss.hinged",
            "1 in runs whose loss is cut off at a margin, and so rightly 0 once it is solved. Other runs have no such value.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "a loss with a margin"),
        ),
    )

    def __init__(self) -> None:
        self._looks = GraphLooks(LOOKS)
        self._said: set[str] = set()
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if len(self._said) == 2:
            self.rests_until = event.step + PAUSE
            return ()
        if not self._looks.due(event):
            self.rests_until = self._looks.rests_until
            return ()
        found = {metric: value for metric, value in _kinds(event.loss_graph) if metric not in self._said}
        self._said.update(found)
        return [Sample(metric, event.step, value) for metric, value in found.items()]


def _kinds(root: Any) -> Iterator[tuple[str, float]]:
    for node in _made_of(root, _BETWEEN):
        kind = kind_of(node)
        if kind in DISTANCES or (kind == "Sub" and not _is_log_probability(node)):
            if any(_one_per_row(parent) for parent, _ in node.next_functions):
                yield "loss.of_actions", 2.0
        elif kind == "Mul" and _weighs_log_probabilities(node):
            yield "loss.of_actions", 1.0
    if any(kind_of(node) in _HINGES for node in _made_of(root, _AVERAGING)):
        yield "loss.hinged", 1.0


def _made_of(root: Any, through: Sequence[str]) -> Iterator[Any]:
    """The node of the loss and what is before it, through nodes of these kinds."""
    waiting: list[Any] = [root]
    seen: set[Any] = set()
    while waiting and len(seen) < NODES:
        node = waiting.pop(0)
        if node in seen:
            continue
        seen.add(node)
        yield node
        if kind_of(node) in through:
            waiting += parents_of(node)


def _one_per_row(node: Any) -> bool:
    """Whether a node picks one of the outputs of each row: ``q.gather(1, actions)``, ``q[rows, actions]``."""
    for _ in range(8):
        kind, shape = kind_of(node), shape_of(node)
        if kind == "Gather":
            return bool(shape) and shape[-1] == 1
        if kind == "Index":
            given = tuple(int(n) for n in getattr(node, "_saved_self_sym_sizes", ()))
            return len(given) == 2 and shape == given[:1] and given[1] > 1
        if kind not in NEUTRAL:
            return False
        node = source_of(node)
    return False


def _is_log_probability(node: Any) -> bool:
    """Of one class per row (a gather of logits less their logarithmic sum), or of a Gaussian."""
    for _ in range(12):
        kind = kind_of(node)
        if kind == "Gather" or (kind == "Index" and _one_per_row(node)):
            before = past_neutral(source_of(node))
            if kind_of(before) in ("LogSoftmax", "Log"):
                return True
            return kind_of(before) == "Sub" and any(
                kind_of(past_neutral(parent)) == "Logsumexp" for parent, _ in before.next_functions
            )
        if kind == "Div" and kind_of(source_of(node)) == "Neg" and kind_of(source_of(source_of(node))) == "Pow":
            return True
        if kind not in (*NEUTRAL, "Sub", "Neg", "Sum", "Exp", "Clamp", "Add", "Stack", "Cat"):
            return False
        node = source_of(node)
    return False


def _weighs_log_probabilities(node: Any) -> bool:
    """``log_prob * advantage``, or ``exp(log_prob - old) * advantage``."""
    parents = [parent for parent, _ in node.next_functions]
    graphs = [parent for parent in parents if parent is not None]
    if len(graphs) != 1 or not _is_log_probability(graphs[0]):
        return False
    if kind_of(past_neutral(graphs[0])) in ("Exp", "Clamp"):
        return True
    weights: Any = saved(node, "other" if parents[0] is not None else "self")
    if not is_tensor(weights) or not on_host(weights):
        return False
    return bool(((weights < 0) | (weights > LARGE_WEIGHT)).any())
