"""Which way a loss is trained: whether a distance, which cannot fall below zero, is made larger on purpose or by mistake."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.graph.nodes import (
    CROSS_ENTROPIES,
    DISTANCES,
    NEUTRAL,
    NODES,
    kind_of,
    parents_of,
    past_neutral,
    source_of,
)
from healthcheck.probes.graph.walk import saved
from healthcheck.probes.values import is_tensor, on_host
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

LOOKS = 6
"""Looks in a run: what a loss is made of does not change from step to step."""

_NEVER_NEGATIVE = (*DISTANCES, "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_KEEPING = (*NEUTRAL, "Mean", "Sum", "Add")


class LossSignProbe:
    """Follows the graph of the loss to the distances that it is made of, and their signs on the way.

    Told is a loss that consists of such distances alone (cross entropy, squared and absolute errors) and makes each of
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
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._looks = 0
        self._sign: tuple[int, float] = (0, 0.0)
        """Of which step, and which: 1 and -1 for errors that are all made smaller or larger, 0 for others."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.LOSS:
            if event.loss_graph is not None and event.phase == "train" and demand.due("loss.maximised", event.step):
                signs = set(_signs(event.loss_graph))
                self._sign = (event.step, signs.pop() if len(signs) == 1 else 0.0)
            return ()
        step, sign = self._sign
        if step != event.step or event.optimizer is None:
            return ()
        self._sign = (0, 0.0)
        self._looks += 1
        if self._looks >= LOOKS:
            self.rests_until = sys.maxsize
        up = bool(event.optimizer.param_groups[0].get("maximize", False))
        facts = {"optimizer": "maximize=True"} if up else {"loss": "with a minus in front of it"}
        value = float(sign == (1.0 if up else -1.0))
        return (Sample("loss.maximised", step, value, detail=(lambda: facts) if value else None),)


def _signs(root: Any) -> Iterator[float]:
    """The sign of each part of the loss; 0 for one that is no error."""
    waiting, seen = [(root, 1.0)], 0
    while waiting:
        node, sign = waiting.pop()
        seen += 1
        kind = kind_of(node)
        if seen > NODES:
            yield 0.0
        elif _is_error(node, kind):
            yield sign
        elif kind in _KEEPING:
            waiting += [(parent, sign) for parent in parents_of(node)]
        elif kind in ("Neg", "Rsub") or (kind == "Sub" and node.next_functions[0][0] is None):
            waiting += [(parent, -sign) for parent in parents_of(node)]
        elif kind == "Sub":
            (first, _), *rest = node.next_functions
            waiting += [(first, sign), *((parent, -sign) for parent, _ in rest if parent is not None)]
        elif kind in ("Mul", "Div") and (factor := _factor(node)):
            waiting += [(parent, sign * factor) for parent in parents_of(node)]
        else:
            yield 0.0
        if seen > NODES:
            return


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
