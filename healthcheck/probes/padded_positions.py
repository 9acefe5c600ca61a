"""Padding that counts in a loss over positions, whatever its classes are: tags, the next tokens, a yes or no."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import number
from healthcheck.device.tensors import is_tensor, on_host
from healthcheck.probes.graph import CROSS_ENTROPIES, all_behind, kind_of, near, saved, signed
from healthcheck.probes.language import LOOKS, OUT_OF_SIGHT, layers_of
from healthcheck.probes.looks import GraphProbe

FEW = 16
"""Padded positions below which nothing is reported: so few targets are alike by chance."""
LEAST_TOKENS = 8
"""Rows of an embedding from which on it may be one of tokens."""
_BINARY = ("BinaryCrossEntropyWithLogits", "BinaryCrossEntropy")
_KEY = "targets.at_padding"


class PaddedPositionsProbe(GraphProbe):
    """Compares the targets of a loss over positions with the positions at which the model reads padding.

    A position is padding where the index that an embedding reads is its ``padding_idx``, behind or before another such
    (so that an end of text that is the padding token is none), or the one token that rows of different length end with, where attention hides it as a key from every query, or
    where it is behind the length with which its row was packed for an RNN. Its target *counts* if it is neither the
    ``ignore_index`` nor of weight 0, in a loss that torch averages or sums itself: what a script multiplies with its
    own mask is not judged. Reported only where all these targets are one and the same value, that of the filling:
    who is asked for what it cannot see (masked autoencoders) has different ones.

    Everything is read from what torch keeps for its backward pass, at three passes of a run. Nothing is computed again.
    """

    name = "padded-positions"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            _KEY,
            "Share of the targets that count in the loss and stand at positions of padding, all with one value; else 0.",
            "fraction",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "targets of padded rows"),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        share = _share(event.loss_graph)
        return () if share is None else (Sample(_KEY, event.step, number(share)),)


def _share(root: Any) -> Any:
    """The largest share of any loss and any way to tell padding, as a 0-dim tensor; None where nothing is known."""
    targets = [found for node in near(root) if (found := _targets(node)) is not None]
    if not targets:
        return None
    nodes = all_behind(root)
    lookups = [node for node in nodes if kind_of(node) == "Embedding"]
    shares = [
        share
        for lookup in lookups
        for hidden in _padding(nodes, lookup, lookups)
        for wanted, counts in targets
        if (share := _counted(hidden, wanted, counts)) is not None
    ]
    if not shares:
        return None
    import torch

    return torch.stack(shares).max()


def _targets(loss: Any) -> tuple[Any, Any] | None:
    """Targets of one loss, flat, and which of them count; None for a loss that is none over positions."""
    kind = kind_of(loss)
    if kind not in CROSS_ENTROPIES and kind not in _BINARY:
        return None
    wanted: Any = saved(loss, "target")
    if not int(loss._saved_reduction) or not is_tensor(wanted) or wanted.numel() < FEW:
        return None
    wanted, weight = wanted.detach().reshape(-1), saved(loss, "weight")
    if kind in _BINARY:
        return None if weight is not None else (wanted, wanted == wanted)
    ignored = signed(int(loss._saved_ignore_index))
    counts = (wanted != ignored) & (wanted >= 0)
    if weight is not None:
        counts &= weight.detach()[wanted.clamp(min=0)] != 0
    return wanted, counts


def _padding(nodes: Sequence[Any], lookup: Any, lookups: Sequence[Any]) -> Iterator[Any]:
    """Which positions are padding, boolean (rows, length), in each way in which that shows."""
    read = saved(lookup, "indices")
    if not is_tensor(read) or read.dim() != 2 or min(read.shape) < 2:
        return
    read = read.detach()
    token = signed(int(lookup._saved_padding_idx))
    if token >= 0:
        pads = read == token
        hidden = pads.clone()
        # The first one of a run may be an end of text, on whichever side the padding is.
        hidden[:, 1:] &= pads[:, :-1]
        hidden[:, 0] &= pads[:, 1]
        yield hidden
    elif (filled := padding_of(lookup, read)) is not None:
        yield filled & filled.roll(1, 1)  # without the first of each row, which may be an end of text
    rows, length = read.shape
    for layer in layers_of(nodes, lookups):
        if layer.reads(lookup) and layer.length == length and not layer.causal:
            hidden = hidden_keys(layer.mask, layer.weights, rows, length)
            # Without a mask nothing is hidden. On a device nobody waits to know that.
            if hidden is not None and (not on_host(hidden) or bool(hidden.any())):
                yield hidden.to(read.device)
    for node in nodes:
        if kind_of(node) == "PackPaddedSequence":
            hidden = _behind_the_length(node, lookup, rows, length)
            if hidden is not None:
                yield hidden.to(read.device)


def padding_of(lookup: Any, read: Any) -> Any:
    """Which positions an embedding reads as padding: boolean, (rows, length); nowhere where that is not sure.

    Its ``padding_idx``; without one, the token with which rows end, again and again, each as often as it is too short: at least
    twice in two rows or more, not everywhere as often, nowhere all along, and nowhere else.

    :param read: the tokens, (rows, length).
    :returns: None for an embedding of so few values that they are no tokens (segments, flags).
    """
    token = signed(int(lookup._saved_padding_idx))
    if token >= 0:
        return read == token
    if int(lookup._saved_weight_sym_argsize_0) < LEAST_TOKENS:
        return None
    there = read == read[:, -1].mode().values
    ends = there.flip(1).cumprod(1).flip(1).bool()
    lengths = ends.sum(1)
    some = ((lengths > 1).sum() > 1) & (lengths.max() > lengths.min()) & (lengths.max() < read.shape[1])
    sure = (there == ends).all() & some & (lengths.sum() >= FEW)
    return ends & sure


def hidden_keys(mask: Any, weights: Any, rows: int, length: int) -> Any:
    """Keys that no query of their row sees: (rows, length); None where masks do not differ by row."""
    matrix = mask if weights is None else weights
    if matrix is None:
        return None
    matrix = matrix.detach()
    if weights is not None:
        hidden = matrix == 0
    else:
        import torch

        hidden = ~matrix if matrix.dtype == torch.bool else matrix <= OUT_OF_SIGHT
    if hidden.dim() < 3 or hidden.shape[-1] != length or hidden.shape[0] % rows:
        return None
    # Rows and heads may be one dimension, with the heads of a row behind each other.
    return hidden.reshape(rows, -1, length).all(1)


def _behind_the_length(pack: Any, lookup: Any, rows: int, length: int) -> Any:
    """Positions behind the end of their row, of a batch that was packed out of what this embedding gave."""
    import torch

    sizes = saved(pack, "result1")
    node, order = pack, None
    for _ in range(8):
        node = node.next_functions[0][0] if node.next_functions else None
        if node is None or node is lookup:
            break
        if kind_of(node) == "IndexSelect":  # rows were sorted by length first
            order = saved(node, "index")
    if node is not lookup or not is_tensor(sizes) or int(sizes[0]) != rows:
        return None
    lengths = (sizes[:, None] > torch.arange(rows)[None]).sum(0)
    if order is not None:
        order = order.to(lengths.device)
        lengths = torch.empty_like(lengths).scatter_(0, order, lengths)
    return torch.arange(length)[None] >= lengths[:, None]


def _counted(hidden: Any, wanted: Any, counts: Any) -> Any:
    """Share of the targets that count and are padding, a 0-dim tensor; 0 where they differ; None where these are not
    the targets of these positions."""
    import torch

    if hidden.device != wanted.device:
        return None
    if wanted.numel() == hidden.numel() - hidden.shape[0]:
        hidden = hidden[:, :-1]  # the last token of a row has no next one
    if wanted.numel() != hidden.numel():
        return None
    found = hidden.reshape(-1) & counts
    highest = torch.finfo(wanted.dtype).max if wanted.is_floating_point() else torch.iinfo(wanted.dtype).max
    alike = wanted.masked_fill(~found, highest).min() == wanted.masked_fill(~found, -highest).max()
    number_of = found.sum()
    return number_of / counts.sum().clamp(min=1) * (alike & (number_of >= FEW))
