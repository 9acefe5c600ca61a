"""Values behind the loss at which an operation has no finite derivative: a logarithm, a root or a division at zero."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import number, value_of
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import NEUTRAL, REDUCING, kind_of, past_neutral, saved, source_of
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import GraphProbe

LOOKS = (1, 2, 20, 100, 500)
"""Backward passes in whose graph such operations are looked for."""
NODES = 128
"""Nodes behind the loss among which they are looked for."""
MOST = 8
"""Operations that are followed."""

_THROUGH = frozenset((
    *REDUCING, *NEUTRAL, "Where", "MaskedFill", "Clamp", "ClampMin", "Exp", "Log", "Rsub", "Gather", "Cat", "Stack",
    "Minimum", "Maximum", "Expand", "IndexSelect", "Relu", "Softplus", "LogSigmoid",
))  # fmt: skip
_READ = {
    "Log": "self",
    "Log2": "self",
    "Log10": "self",
    "Sqrt": "result",
    "Rsqrt": "result",
    "Div": "other",
    "Pow": "self",
}
"""Operations without a finite derivative at zero (at infinity, for what ``rsqrt`` gives), and what each keeps."""


@dataclass(frozen=True, slots=True)
class _Place:
    """An operation behind the loss: the way there, by number of the input at each node, and what it is."""

    way: tuple[int, ...]
    kind: str
    what: str


class UndefinedDerivativeProbe(GraphProbe):
    """Follows the operations of a loss that have no finite derivative at zero, in runs that have any, step by step.

    A value of exactly zero there makes the gradient infinite, or NaN where what came later hides it: the derivative of
    ``torch.where(mask, x.log(), 0)`` at a masked zero is 0 times infinity. The graph is read before the backward pass and
    gone after it, so that the values are counted in each step.
    """

    name = "undefined-derivatives"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.undefined_derivatives",
            "Values behind the loss at which a logarithm, a root or a division has no finite derivative.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "such an operation in the loss"),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._places: list[_Place] = []
        self._found: list[tuple[str, Any, int]] = []
        """Of this step: operation, how many values, of how many."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.LOSS:
            if event.phase == "train":
                self._read(event)
            return ()
        found, self._found = self._found, []
        if not found:
            return ()
        place = where_called(event, "backward")

        def facts() -> Mapping[str, Any]:
            bad = [(what, value_of(bad), of) for what, bad, of in found]
            causes = [f"{what}, where {n:,.0f} of {of:,} values are 0" for what, n, of in bad if n]
            return {"cause": "; ".join(dict.fromkeys(causes))} | place

        counts = [bad for _, bad, _ in found]
        return (Sample("loss.undefined_derivatives", event.step, sum(counts[1:], counts[0]), detail=facts),)

    def _read(self, event: Event) -> None:
        graph = event.loss_graph
        if self.due(event):
            self._places = list(_places(graph))
        if not self._places:
            return
        self.rests_until = 0  # they are read at every pass
        for place in self._places:
            node = graph
            for turn in place.way:
                inputs = node.next_functions if node is not None else ()
                node = inputs[turn][0] if turn < len(inputs) else None
            values: Any = saved(node, _READ[place.kind]) if kind_of(node) == place.kind else None
            if is_tensor(values) and values.is_floating_point():
                bad = values.detach().isinf() if place.kind == "Rsqrt" else values.detach() == 0
                self._found.append((place.what, number(bad.sum()), int(values.numel())))


def _places(root: Any) -> Iterator[_Place]:
    """Such operations among what the loss is made of, nearest first."""
    waiting: list[tuple[Any, tuple[int, ...]]] = [(root, ())]
    known, found = {id(root): root}, 0
    for node, way in waiting:
        kind = kind_of(node)
        if kind in _READ and (what := _what(node, kind)):
            yield _Place(way, kind, what)
            found += 1
        if kind in _THROUGH or kind in _READ:
            for turn, (parent, _) in enumerate(node.next_functions):
                if parent is not None and id(parent) not in known:
                    known[id(parent)] = parent  # kept: torch's wrapper of a node may come back under another id
                    waiting.append((parent, (*way, turn)))
        if found >= MOST or len(known) >= NODES:
            return


def _what(node: Any, kind: str) -> str:
    """The operation in words; empty where it has a finite derivative everywhere."""
    if kind == "Div":  # a number or a tensor without a gradient is the script's business
        return "a division" if len(node.next_functions) > 1 and node.next_functions[1][0] is not None else ""
    if kind == "Pow":
        power = getattr(node, "_saved_exponent", None)
        return f"a power of {power:g}" if isinstance(power, float) and power < 1 and power != 0 else ""
    if kind in ("Sqrt", "Rsqrt"):
        return "sqrt"
    given = past_neutral(source_of(node))
    return "log(1 - p)" if kind_of(given) == "Rsub" else "log"
