"""How the loss was put together: mistakes (squashed twice, over the wrong dimension, broadcast against its targets), its
kind where that changes what its curve means, and its sign.

A mistaken loss raises no error, falls a little, and stays far above what the model could reach. Torch's own record of
the operations behind it shows the mistake at the second step. The loss of reinforcement learning is no measure of
success: it is taken over what the policy does by then, against returns or targets that grow while the agent gets
better. And a loss with a hinge is rightly nothing once it is solved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number, smallest
from healthcheck.device.tensors import is_tensor, on_host
from healthcheck.probes.graph import (
    CROSS_ENTROPIES,
    DISTANCES,
    NEUTRAL,
    NODES,
    REDUCING,
    dimension,
    kind_of,
    made_of,
    near,
    parents_of,
    past_neutral,
    saved,
    shape_of,
    source_of,
)
from healthcheck.probes.labels import where_called, where_made
from healthcheck.probes.looks import PAUSE, CloserLooks, GraphProbe, spread_over_ranks
from healthcheck.probes.loss_comparisons import arguments_swapped, normalised_over_batch
from healthcheck.probes.loss_mistakes import one_per_row, products_of_each_with_each, shape_mistakes

LOOKS = (2, 50, 200, 1000)
"""Backward passes whose graph is looked at: a few dozen nodes each time. The first may be a trial of the script's, and a
second training may have a loss of its own."""

_SQUASHING = ("Relu", "Sigmoid", "Tanh")
"""Activations that belong between layers; behind the last one they take half of the logits away, or their size."""


class LossGraphProbe(GraphProbe):
    """Counts constructions in the graph of the loss that are mistakes wherever they stand.

    Only what needs no guess: a softmax under a cross entropy that takes one itself, a sigmoid under one that takes one
    itself, an activation on the logits of either, the negative log likelihood or the divergence of values that are no log
    probabilities, a softmax over the batch, a prediction of shape (N, 1) against N targets.
    """

    name = "loss-graph"
    looks_at = (1, *LOOKS)
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.misbuilt",
            "Mistakes found in how the loss is computed, at the 2nd and the 50th backward pass and at two later ones.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._first = True

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        root = event.loss_graph
        if self._first:
            # A trial of the script's, perhaps. What changed places there is not finite soon after.
            self._first = False
            if not any(arguments_swapped(root)):
                return ()
        ways = (_mistakes, shape_mistakes, products_of_each_with_each, arguments_swapped, normalised_over_batch)
        found = list(dict.fromkeys(said for way in ways for said in way(root)))
        facts = {"which": "; ".join(found)} | where_called(event, "backward")
        return (Sample("loss.misbuilt", event.step, float(len(found)), detail=lambda: facts),)


def _mistakes(root: Any) -> Iterator[str]:
    for node in near(root):
        kind = kind_of(node)
        given = source_of(node)
        if kind in CROSS_ENTROPIES:
            yield from _of_cross_entropy(node, given)
        elif kind == "BinaryCrossEntropyWithLogits":
            squashed = kind_of(past_neutral(given))
            if squashed == "Softmax":
                yield "binary_cross_entropy_with_logits of a softmax: logits are any number, one of each label for itself"
            elif squashed == "Sigmoid":
                yield "binary_cross_entropy_with_logits of a sigmoid: it takes the sigmoid itself"
            elif squashed in _SQUASHING:
                yield f"binary_cross_entropy_with_logits of a {squashed.lower()}: logits are any number, above and below 0"
        elif kind in (*DISTANCES, "Sub") and (shapes := _broadcast(node)):
            n = shape_of(node)[0] if kind == "Sub" else _saved_shape(node)[0]
            yield f"{shapes}: compared each with each, {n} x {n}"
        elif kind == "Sub" and (what := _without_logarithm(node)):
            yield f"kl_div of {what}: its first argument must be log probabilities (log_softmax)"


def _of_cross_entropy(node: Any, given: Any) -> Iterator[str]:
    kind = kind_of(past_neutral(given))
    if kind == "LogSoftmax":
        log_softmax = past_neutral(given)
        squashed = kind_of(past_neutral(source_of(log_softmax)))
        if squashed == "Softmax":
            yield "cross entropy of a softmax: it takes the softmax itself"
        elif squashed in _SQUASHING:
            yield f"cross entropy of a {squashed.lower()}: logits are any number, above and below 0"
        elif given is log_softmax and len(shape_of(given)) == 2 and dimension(given, 2) == 0:
            yield "log_softmax over dimension 0, which is the batch; the classes are dimension 1"
    elif kind == "Log" and kind_of(over := past_neutral(source_of(past_neutral(given)))) == "Softmax":
        if len(shape_of(over)) == 2 and dimension(over, 2) == 0:
            yield "softmax over dimension 0, which is the batch; the classes are dimension 1"
    elif kind == "Softmax":
        yield "nll_loss of a softmax: it expects log probabilities (log_softmax), or use cross_entropy on the logits"
    elif kind == "Addmm":
        yield "nll_loss of the output of a linear layer: it expects log probabilities, or use cross_entropy"


def _without_logarithm(node: Any) -> str:
    """What stands for the logarithms in ``t * log t - t * log p``, torch's ``kl_div`` of a distribution t; else empty.

    Reads a few values of ``t``, on the host: the same difference may be made of other things.
    """
    # The first term of torch's `kl_div`, `xlogy(t, t)`, has no gradient; the second is `t * input`.
    parents = [parent for parent, _ in node.next_functions]
    if len(parents) != 2 or parents[0] is not None or kind_of(parents[1]) != "Mul":
        return ""
    factors = [parent for parent, _ in parents[1].next_functions]
    given = past_neutral(factors[1] if factors[0] is None else factors[0])
    known: Any = saved(parents[1], "self" if factors[0] is None else "other")
    if None not in factors or not _are_probabilities(known):
        return ""
    return {"Softmax": "a softmax", "Sigmoid": "a sigmoid", "Addmm": "the output of a linear layer"}.get(
        kind_of(given), ""
    )


def _are_probabilities(values: Any) -> bool:
    """Rows that are no number below 0, add up to 1, and are not all of one class only."""
    if not is_tensor(values) or not on_host(values) or values.dim() < 2 or not values.numel():
        return False
    rows = values.detach().reshape(-1, values.shape[-1])[:16].float()
    return bool((rows >= 0).all() & ((rows.sum(1) - 1).abs() < 0.01).all() & (rows.amax(1) < 0.999).any())


def _broadcast(node: Any) -> str:
    """A prediction (N, 1) against N targets, or N predictions against targets (N, 1), in words: N x N differences.

    Targets have no gradient: a difference of two predictions, each with each, may well be meant.
    """
    shape = shape_of(node) if kind_of(node) == "Sub" else _saved_shape(node)
    parents = parents_of(node)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 2 or len(parents) != 1:
        return ""
    n, given = shape[0], source_of(parents[0]) if kind_of(parents[0]) == "Expand" else parents[0]
    if shape_of(given) == (n, 1):
        return f"a prediction of shape ({n}, 1) against {n} targets"
    if shape_of(given) == (n,) and _one_number_per_row(node, given, n):
        return f"{n} predictions against targets of shape ({n}, 1)"
    return ""


def _one_number_per_row(node: Any, given: Any, n: int) -> bool:
    """Whether the targets have the shape (N, 1), or are a table of numbers (N, N) for which one row is learnt."""
    targets: Any = saved(node, "target")
    if is_tensor(targets):  # broadcast: a column that is read again and again
        return bool(targets.dim() == 2 and targets.stride(1) == 0)
    # A difference by hand does not keep the targets. Predictions have lost a dimension; a learnt row never had one.
    rows = past_neutral(given)
    return rows is not given and len(shape_of(rows)) == 2 and shape_of(rows)[0] == n


def _saved_shape(node: Any) -> tuple[int, ...]:
    kept = saved(node, "self")
    return tuple(kept.shape) if kept is not None else ()


KIND_LOOKS = (1, 2, 5, 20)
"""Backward passes whose graph is looked at until something is found: a few dozen nodes each time."""
KIND_NODES = 128
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


class LossKindProbe(GraphProbe):
    """Tells two kinds of loss by what they are made of. A run whose loss is of neither kind has no sample.

    Of chosen actions is a loss in which one output per row was picked and compared with a number (Q-learning), or
    in which log probabilities are each multiplied with a number that may be negative or large (policy gradients;
    Williams 1992), or in which a ratio of probabilities is (PPO; Schulman et al. 2017). Weights are read on the host
    only.
    """

    name = "loss-kind"
    looks_at = KIND_LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.of_actions",
            "In runs whose loss is one of reinforcement learning: 1 where log probabilities of chosen actions are weighted"
            " by returns, 2 where values of chosen actions are compared with targets. Not given for other runs.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "a loss of reinforcement learning"),
        ),
        Metric(
            "loss.hinged",
            "1 in runs whose loss has a margin and is rightly 0 once the task is solved. Not given for other runs.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "a loss with a margin"),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if len(self._said) == 2:
            self.rests_until = event.step + PAUSE
            return ()
        if not self.due(event):
            return ()
        found = {metric: value for metric, value in _kinds(event.loss_graph) if metric not in self._said}
        self._said.update(found)
        return [Sample(metric, event.step, value) for metric, value in found.items()]


def _kinds(root: Any) -> Iterator[tuple[str, float]]:
    for node, kind in made_of(root, _BETWEEN, KIND_NODES):
        if kind in DISTANCES or (kind == "Sub" and not _is_log_probability(node)):
            if any(one_per_row(parent) for parent, _ in node.next_functions):
                yield "loss.of_actions", 2.0
        elif kind == "Mul" and _weighs_log_probabilities(node):
            yield "loss.of_actions", 1.0
    if any(kind in _HINGES for _, kind in made_of(root, _AVERAGING, KIND_NODES)):
        yield "loss.hinged", 1.0


def _is_log_probability(node: Any) -> bool:
    """Of one class per row (a gather of logits less their logarithmic sum), or of a Gaussian."""
    for _ in range(12):
        kind = kind_of(node)
        if kind == "Gather" or (kind == "Index" and one_per_row(node)):
            before = past_neutral(source_of(node))
            if kind_of(before) == "Expand":  # several actions were drawn for each state
                before = past_neutral(source_of(before))
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
    weights = _weights(node)
    if weights is None or not on_host(weights):
        return False
    # A mask or a weight of a class may be 0 here and there; where all are 0, nothing is weighed.
    return bool(((weights < 0) | (weights > LARGE_WEIGHT)).any() | ~weights.any())


def _weights(node: Any) -> Any:
    """What a product with one trained factor is multiplied with; None where it is not kept."""
    weights: Any = saved(node, "other" if node.next_functions[0][0] is not None else "self")
    return weights if is_tensor(weights) else None


class AdvantageProbe(CloserLooks):
    """Looks whether the numbers that log probabilities of actions are multiplied with are all zero in a batch.

    So it is where the rewards within each group are alike, or the estimate of the value is the return itself: such a batch
    teaches nothing. The same operations as in :class:`LossKindProbe`.
    """

    name = "advantages"
    closely = 5
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "advantages.zero",
            "1 if all advantages of a batch (what log probabilities of actions are multiplied with) are 0, else 0.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a loss of reinforcement learning"),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._shown = self._teaches = False
        """Whether the last batch that was looked at had an advantage."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        step, keys = event.step, ("advantages.zero",)
        if event.loss_graph is None or event.phase != "train" or not self.looks(event, demand, keys):
            return ()
        weighed = [
            weights
            for node, kind in made_of(event.loss_graph, _BETWEEN, KIND_NODES)
            if kind == "Mul" and _weighs_log_probabilities(node) and (weights := _weights(node)) is not None
        ]
        if not weighed:
            if self._shown:  # losses of several kinds take turns
                self.rest(demand, keys, calm=True)
            else:
                self.rest_long(demand, keys)
            return ()
        self._shown = True
        found = [number((weights == 0).all()) for weights in weighed]
        facts = {"advantages": f"{max(weights.numel() for weights in weighed):,} in this batch, all 0"}
        sample = Sample("advantages.zero", step, calculate(self._note, smallest(found)), detail=lambda: facts)
        self.rest(demand, keys, calm=self._teaches or any(map(spread_over_ranks, weighed)))
        return (sample,)

    def _note(self, zero: float) -> float:
        self._teaches = not zero
        return zero


SIGN_LOOKS = 6
"""Looks in a run: what a loss is made of does not change from step to step."""

_NEVER_NEGATIVE = (*DISTANCES, "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_KEEPING = (*NEUTRAL, "Mean", "Sum", "Add")


class LossSignProbe:
    """Follows the graph of the loss to the distances that it is made of, and their signs on the way.

    Reported is a loss that consists of such distances alone (cross entropy, squared and absolute errors) and makes each of
    them *larger*: it was negated, or the optimizer maximises. A sum with a term of another kind, or with one that is made
    smaller, is left alone, as is what torch's graph does not show.
    """

    name = "loss-sign"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.maximised",
            "1 if the loss is made of errors alone and training makes them larger, else 0.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
        Metric(
            "loss.entropy_minimised",
            "1 if a loss of policy gradients grows with the entropy of the policy, so that training makes it smaller, else 0.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "a policy gradient with a term for its entropy"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._looks = 0
        self._sign: tuple[int, float, float] = (0, 0.0, 0.0)
        """Of which step, and which: 1 and -1 for errors that are all made smaller or larger, 0 for others. The last one is that
        of the policy's entropy."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.LOSS:
            if event.loss_graph is not None and event.phase == "train" and demand.due("loss.maximised", event.step):
                signs = set(_signs(event.loss_graph))
                entropy = _sign_of_entropy(event.loss_graph)
                self._sign = (event.step, signs.pop() if len(signs) == 1 else 0.0, entropy)
            return ()
        step, sign, entropy = self._sign
        if step != event.step or event.optimizer is None:
            return ()
        self._sign = (0, 0.0, 0.0)
        self._looks += 1
        if self._looks >= SIGN_LOOKS:
            self.rests_until = sys.maxsize
        up = bool(event.optimizer.param_groups[0].get("maximize", False))
        facts = {"optimizer": "maximize=True"} if up else {"loss": "negated"}
        facts |= where_made(event, event.optimizer) if up else where_called(event, "backward")
        value = float(sign == (1.0 if up else -1.0))
        samples = [Sample("loss.maximised", step, value, detail=(lambda: facts) if value else None)]
        if entropy:
            down = float(entropy == (-1.0 if up else 1.0))
            place = where_called(event, "backward")
            samples.append(Sample("loss.entropy_minimised", step, down, detail=(lambda: place) if down else None))
        return samples


def _sign_of_entropy(root: Any) -> float:
    """1 if a loss of policy gradients grows with the entropy of the policy, -1 if it falls; 0 where it has no such term.

    Entropies are known by the product of probabilities with their own logarithms, as ``Categorical.entropy`` and scripts
    make it. Of losses without weighted log probabilities nothing is said: who makes predictions sharper does so on purpose.
    """
    if not any(kind == "Mul" and _weighs_log_probabilities(n) for n, kind in made_of(root, _BETWEEN, KIND_NODES)):
        return 0.0
    waiting, seen = [(root, 1.0)], 0
    while waiting and seen < KIND_NODES:
        node, sign = waiting.pop()
        seen += 1
        kind = kind_of(node)
        if kind == "Mul" and _times_own_logarithm(node):
            return -sign
        waiting += _parts_of(node, kind, sign) or ()
    return 0.0


def _times_own_logarithm(node: Any) -> bool:
    """Whether probabilities are multiplied with log probabilities, both of them trained: ``p * log p``."""
    parents = [past_neutral(parent) for parent, _ in node.next_functions if parent is not None]
    if len(parents) != 2:
        return False
    kinds = [kind_of(parent) for parent in parents]
    for own, (other, kind) in ((kinds[0], (parents[1], kinds[1])), (kinds[1], (parents[0], kinds[0]))):
        if own not in ("Softmax", "Exp"):
            continue
        if kind in ("LogSoftmax", "Log"):
            return True
        less = past_neutral(source_of(other)) if kind == "Clamp" else other
        if kind_of(less) == "Sub" and any(
            kind_of(past_neutral(parent)) == "Logsumexp" for parent, _ in less.next_functions
        ):
            return True
    return False


def _signs(root: Any) -> Iterator[float]:
    """The sign of each part of the loss; 0 for one that is no error."""
    waiting, seen = [(root, 1.0)], 0
    while waiting:
        node, sign = waiting.pop()
        seen += 1
        kind = kind_of(node)
        # Too long a way back: a sign that is not seen counts as unknown.
        if seen > NODES:
            yield 0.0
        elif _is_error(node, kind):
            yield sign
        elif (parts := _parts_of(node, kind, sign)) is not None:
            waiting += parts
        else:
            yield 0.0
        if seen > NODES:
            return


def _parts_of(node: Any, kind: str, sign: float) -> list[tuple[Any, float]] | None:
    """What a part of the loss is made of, each with its sign in the loss; None where signs are not known any further.

    :param sign: of the part itself.
    """
    if kind in _KEEPING:
        return [(parent, sign) for parent in parents_of(node)]
    if kind in ("Neg", "Rsub") or (kind == "Sub" and node.next_functions[0][0] is None):
        return [(parent, -sign) for parent in parents_of(node)]
    if kind == "Sub":
        (first, _), *rest = node.next_functions
        return [(first, sign), *((parent, -sign) for parent, _ in rest if parent is not None)]
    if kind in ("Mul", "Div") and (factor := _factor(node)):
        return [(parent, sign * factor) for parent in parents_of(node)]
    return None


def _is_error(node: Any, kind: str) -> bool:
    if kind in CROSS_ENTROPIES:  # of log probabilities; of anything else it may well be below zero
        return kind_of(past_neutral(source_of(node))) == "LogSoftmax"
    return kind in _NEVER_NEGATIVE


def _factor(node: Any) -> float:
    """1 or -1: the sign of the number that a part is multiplied with or divided by; 0 where both sides are trained.

    A number on a device is taken for positive: it is the scale of a GradScaler, and asking would be a wait.
    """
    inputs = [parent for parent, _ in node.next_functions]
    if len(inputs) != 2 or inputs.count(None) != 1 or (kind_of(node) == "Div" and inputs[0] is None):
        return 0.0
    number: Any = saved(node, "self" if inputs[0] is None else "other")
    if not is_tensor(number) or number.numel() != 1:
        return 0.0
    return -1.0 if on_host(number) and float(number) < 0 else 1.0
