"""Pictures whose channels lie between their pixels: they were given their shape by a view, not by a transpose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import number, smallest
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import all_behind, kind_of, saved
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import GraphProbe

LOOKS = (2, 3, 10, 50)
"""Backward passes whose graph is looked at."""
CHANNELS = range(3, 17)
"""Channels of a picture that is judged."""
FLAGS = 0.95
"""Part of the values that is 0 or 1 in what is no picture."""
ROWS = 64
"""Rows of a batch that are read at most."""


class ChannelOrderProbe(GraphProbe):
    """Compares neighbouring values with those that are as many places apart as there are channels, in what convolutions read.

    In memory (height, width, channels) is red, green, blue, red, green, blue ... Read as (channels, height, width), each plane has
    the three colours in turn: a pixel is like the third one from it, and unlike the second and the fourth. In a picture the
    second is at least as much alike as the third. Signals are left out: a season may be as long as they have channels.
    """

    name = "channel-order"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "inputs.by_channels",
            "Mean difference of values as many places apart as there are channels, divided by that of values one place nearer or"
            " farther, whichever is smaller.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a convolution that reads several channels of pictures"),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        ratios = [number(ratio) for ratio in _ratios(event.loss_graph)]
        if not ratios:
            return ()
        place = where_called(event, "backward")
        return (Sample("inputs.by_channels", event.step, smallest(ratios), detail=lambda: place),)


def _ratios(root: Any) -> Iterator[Any]:
    for node in all_behind(root):
        if kind_of(node) == "Convolution" and node.next_functions[0][0] is None:
            read: Any = saved(node, "input")
            if is_tensor(read) and read.dim() == 4 and read.is_floating_point():
                channels = int(read.shape[1])
                if channels in CHANNELS and read.shape[-1] > 2 * channels + 2 and int(node._saved_groups) == 1:
                    yield by_channels(read.detach()[:ROWS].float(), channels)


def by_channels(values: Any, channels: int) -> Any:
    """See :class:`ChannelOrderProbe`; 1 where all values are alike, or flags (symbols of a sequence, one channel each).

    :param values: (rows, channels, height, width).
    """
    flags = ((values == 0) | (values == 1)).float().mean()
    nearer, same, farther = (_apart(values, channels + more) for more in (-1, 0, 1))
    other = nearer.minimum(farther)
    return (same / other.clamp(min=1e-12)).where((other > 0) & (flags < FLAGS), 1.0)


def _apart(values: Any, places: int) -> Any:
    return (values[..., places:] - values[..., :-places]).abs().mean()
