"""Layers that take the first dimension for time where it is the batch: samples are mixed, and nothing complains."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.graph.nodes import CROSS_ENTROPIES, DISTANCES, kind_of, near, shape_of, source_of
from healthcheck.probes.model.modulehooks import Hook, ModuleHooks, out_of_graphs
from healthcheck.probes.names import first_few
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

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
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    provides: tuple[Metric, ...] = (
        Metric(
            "layers.mixing",
            f"Layers that take the batch for time, in each of the first {LOOKS} losses.",
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
