"""What the model predicts, read from what torch keeps for the backward pass of the loss: one answer for every input, no
more than label frequencies, or a latent code that says nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, largest, number, smallest
from healthcheck.device.tensors import is_tensor, on_host
from healthcheck.probes.graph import (
    CROSS_ENTROPIES,
    DISTANCES,
    NEUTRAL,
    REDUCING,
    cross_entropy_of,
    kind_of,
    log_probabilities,
    made_by,
    made_of,
    near,
    past_neutral,
    saved,
    shape_of,
    signed,
    source_of,
)
from healthcheck.probes.looks import LOOK_EVERY, CloserLooks, ask_again, next_look, spread_over_ranks

ROWS, COLUMNS = 64, 32
"""Rows and columns of a batch of answers that are looked at, at even distances."""
FEW = 8
"""Rows below which a batch says nothing of how answers differ."""
LARGE = 100
"""Size of targets from which on they are compared with the answers, and times of these that are out of reach."""
RARE = 0.1
"""What a label counts for where there are two classes."""

_PREDICTIONS, _EMBEDDINGS, _CLASS, _REACH = _KEYS = (
    "predictions.spread",
    "embeddings.spread",
    "targets.one_class",
    "targets.reach",
)
_CALM = {_PREDICTIONS: (0.01, math.inf), _EMBEDDINGS: (0.03, math.inf), _CLASS: (0.0, 0.0), _REACH: (0.0, 10.0)}
"""Values between which each is many times away from what the packs' rules name."""
_CLOSELY = dict.fromkeys(_KEYS, LOOK_EVERY) | {_CLASS: 5}
"""Steps between two looks while its values are not: the first number of its rules' ``every``."""
_EMBEDDED = {
    "Cdist": "x1",
    "EuclideanDist": "x1",
    "LinalgVectorNorm": "self",
    "Norm": "self",
    "Div": "self",
}
"""Operations of losses on distances and angles, and where each keeps the vectors that it compares."""
_OF_NUMBERS = frozenset((*DISTANCES, "BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"))
_THROUGH = frozenset((
    *_EMBEDDED,
    *REDUCING, *NEUTRAL, "Max", "Min", "Amax", "Amin", "Relu", "ClampMin", "Clamp", "Softplus", "MaskedFill", "Where",
    "Exp", "Log", "Rsub",
))  # fmt: skip


class PredictionProbe(CloserLooks):
    """Looks at the answers and targets that the loss was computed from, in the steps that a rule asks for.

    *Spread of predictions*: how far answers of one batch lie apart, in nats for classifiers and as a part of the
    targets' own spread for regressions; 0 is one answer for every input. Left out are losses whose targets do not
    differ. *Spread of embeddings*: of vectors whose distances or angles make up the loss, as a part of their length.
    *One class*: labels in a row that were of one and the same class, under a linear layer (those of contrastive losses
    are alike by design). *Reach*: size of the targets of a regression divided by that of the answers, where the
    targets are in their hundreds or more; else 0.

    No hook and no copy: torch has these tensors for its backward pass, and they are let go at once.
    """

    name = "predictions"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            _PREDICTIONS,
            "Spread of the model's outputs over one batch; 0 means the same output for every input.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss",),
        ),
        Metric(
            _EMBEDDINGS,
            "Spread of the vectors that the loss compares, relative to their length; 0 means that all are equal.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a loss that compares vectors"),
        ),
        Metric(
            _CLASS,
            f"Labels of a classifier in a row, of the batches looked at, that were all of one class; of two classes {RARE} each.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "class labels"),
        ),
        Metric(
            _REACH,
            f"Size of a regression's targets, where it is above {LARGE}, divided by that of the predictions; else 0.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a regression"),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._look_at = dict.fromkeys(_KEYS, 0)
        """Step at which each metric is looked at again: a loss that has never shown it will hardly do so at the next step."""
        self._shown: set[str] = set()
        self._calm: dict[str, bool] = {}
        """Of each, whether its last value that has arrived was a calm one."""
        self._class: int | None = None
        self._alike = 0.0
        """Labels in a row of the class ``_class``."""

    def plan(self, demand: Demand) -> None:
        self._look_at = {key: self._look_at.get(key, 0) for key in _KEYS if demand.wants(key)}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        step = event.step
        if event.loss_graph is None or event.phase != "train" or step == self._step:
            return ()
        due = set[str]()
        for key, at in self._look_at.items():
            if step < at:
                continue
            if key in demand.due_now or (at and not step % _CLOSELY[key] and not self._calm.get(key, True)):
                due.add(key)
            else:
                self._look_at[key] = demand.next_due((key,), step)
        if not due:
            self.rests_until = min(self._look_at.values())
            return ()
        self._step = step
        found: dict[str, list[Any]] = {}
        self._look(event.loss_graph, due, found)
        # A loss shows the same parts in every step, or takes turns with others.
        self._shown.update(found)
        samples = []
        for key, values in found.items():
            value = number(values[0]) if len(values) == 1 else _combined(key, values)
            if not spread_over_ranks(values[0]):
                value = calculate(partial(self._note, key), value)
            samples.append(Sample(key, step, value))
        for key in due:
            at = demand.next_due((key,), step)
            if key not in self._shown:
                at = max(at, ask_again(step))
            elif not self._calm.get(key, True):
                at = min(at, next_look(step, _CLOSELY[key]))
            self._look_at[key] = at
        self.rests_until = min(self._look_at.values())
        return samples

    def _note(self, key: str, value: float) -> float:
        low, high = _CALM[key]
        self._calm[key] = low <= value <= high
        return value

    def _look(self, root: Any, due: set[str], found: dict[str, list[Any]]) -> None:
        """Add to ``found``, by key, what each part of the loss says of what is due."""
        for node, kind in made_of(root, _THROUGH):
            if kind in CROSS_ENTROPIES:
                self._of_classes(node, due, found)
            elif kind in _OF_NUMBERS:
                _of_numbers(node, kind, due, found)
            elif kind in _EMBEDDED and _EMBEDDINGS in due:
                vectors = saved(node, _EMBEDDED[kind])
                if is_tensor(vectors) and _are_vectors(node, vectors):
                    _add(found, _EMBEDDINGS, _apart(_rows(vectors, 1), angles=kind == "Div"))
            elif kind in ("Sub", "Mm") and _EMBEDDINGS in due:
                source = _each_with_each(node)
                compared: Any = None if source is None else made_by(source, ROWS)
                if is_tensor(compared) and compared.dim() == 2 and compared.shape[0] >= FEW:
                    _add(found, _EMBEDDINGS, _apart(_rows(compared, 1), angles=False))

    def _of_classes(self, node: Any, due: set[str], found: dict[str, list[Any]]) -> None:
        if _PREDICTIONS not in due and _CLASS not in due:
            return
        labels: Any = saved(node, "target")
        answers = log_probabilities(node)
        if answers is None or labels is None or labels.numel() < FEW:
            return
        low, high = labels.detach().aminmax()
        differ = low != high
        if _PREDICTIONS in due:
            # What is masked, such as each row itself among the candidates of a contrastive loss, is minus infinity.
            rows = _rows(answers, -1).nan_to_num(0.0, 0.0, 0.0)
            if rows.shape[0] >= FEW:
                found.setdefault(_PREDICTIONS, []).append(_where(differ, rows.std(0).max()))
        if _CLASS in due and on_host(labels):
            more, known = 0.0, None
            if not bool(differ):
                known = int(labels.reshape(-1)[0])
                linear = kind_of(past_neutral(source_of(past_neutral(source_of(node))))) == "Addmm"
                # One of two classes may be rare: its absence says a tenth of what that of all others of ten does.
                weight = 1.0 if answers.shape[-1] > 2 else RARE
                more = 0.0 if known < 0 or not linear else weight * labels.numel()
            self._alike = self._alike + more if more and known == self._class else more
            self._class = known
            found.setdefault(_CLASS, []).append(self._alike)


def _are_vectors(node: Any, values: Any) -> bool:
    """Whether these are the rows of a batch; of a division, whether by their lengths; of a length, whether of differences.

    A length by itself compares nothing: that of a gradient in a penalty, of a capsule, of weights.
    """
    if values.dim() != 2 or values.shape[0] < FEW or values.shape[1] < 2:
        return False
    if kind_of(node) in ("LinalgVectorNorm", "Norm"):
        source = past_neutral(source_of(node))
        if kind_of(source) == "Add":  # a small number against a root of zero
            source = past_neutral(source_of(source))
        return kind_of(source) in ("Sub", "Rsub")
    lengths = saved(node, "other") if kind_of(node) == "Div" else None
    return lengths is None or tuple(lengths.shape) in ((values.shape[0], 1), tuple(values.shape))


def _each_with_each(node: Any) -> Any:
    """The node of vectors (N, D) that are compared among themselves by hand: ``e[:, None] - e[None]``, ``e @ e.T``."""
    if len(node.next_functions) != 2:
        return None
    first, second = (_past_factor(past_neutral(parent)) for parent, _ in node.next_functions)
    shape = shape_of(first)
    if first is None or first is not second or len(shape) != 2 or shape[0] < FEW or shape[1] < 2:
        return None
    across = (shape[0], shape[0], shape[1]) if kind_of(node) == "Sub" else (shape[0], shape[0])
    return first if shape_of(node) == across else None


def _past_factor(node: Any) -> Any:
    """What stands behind a multiplication with a number: ``2 * e @ e.T``."""
    if kind_of(node) in ("Mul", "Div") and [parent for parent, _ in node.next_functions].count(None) == 1:
        factor: Any = saved(node, "other")
        if not is_tensor(factor) or factor.numel() == 1:
            return past_neutral(source_of(node))
    return node


def _add(found: dict[str, list[Any]], key: str, value: Any) -> None:
    found.setdefault(key, []).append(value)


def _of_numbers(node: Any, kind: str, due: set[str], found: dict[str, list[Any]]) -> None:
    answers: Any = saved(node, "self")
    targets: Any = saved(node, "target")
    if not is_tensor(answers) or not is_tensor(targets) or answers.shape != targets.shape or not answers.dim():
        return
    if answers.shape[0] < FEW:
        return
    rows, wanted = _rows(answers, None), _rows(targets, None)
    apart, differ = rows.std(0).max(), wanted.std(0).max()
    size = wanted.square().mean().sqrt()
    reach = _where(size > LARGE, size / rows.square().mean().sqrt().clamp(min=1e-6), 0.0)
    if _PREDICTIONS in due:
        # Answers that have yet to get where the targets are lie close together on the way; the reach says it.
        counts = (differ > 0) & (reach < LARGE)
        _add(found, _PREDICTIONS, _where(counts, _ratio(apart, differ) if kind in DISTANCES else apart))
    if _REACH in due and kind in DISTANCES:
        _add(found, _REACH, reach)


def _rows(values: Any, classes: int | None) -> Any:
    """A few rows and columns of a batch, float32. ``classes``: the dimension that is one answer; all but the first if None."""
    values = values.detach()
    values = values.reshape(values.shape[0], -1) if classes is None else values.movedim(classes, -1).flatten(0, -2)
    count, width = values.shape
    return values[:: max(1, -(-count // ROWS)), :: max(1, -(-width // COLUMNS))].float()


def _apart(vectors: Any, *, angles: bool) -> Any:
    """Circular variance (Mardia, 1972) of the directions; without ``angles`` the spread of the lengths, too."""
    import torch

    lengths = vectors.norm(dim=1)
    apart = 1 - (vectors / lengths.clamp(min=1e-30).unsqueeze(1)).mean(0).norm()
    if not angles:
        apart = torch.maximum(apart, _ratio(lengths.std(), lengths.mean()))
    return _where(lengths.max() > 0, apart)


def _ratio(part: Any, whole: Any) -> Any:
    return _where(whole > 0, part / whole.clamp(min=1e-30))


def _where(condition: Any, value: Any, other: float = 1.0) -> Any:
    import torch

    return torch.where(condition, value, torch.full_like(value, other))


def _combined(key: str, values: list[Any]) -> Any:
    """The worst of several parts of one loss: the smallest spread, the largest of the rest."""
    given = list(map(number, values))
    return largest(given) if key in (_REACH, _CLASS) else smallest(given)


FREQUENCY_ROWS = 256
"""Labels of a batch for which the two answers are compared, at even distances; all of them are counted."""
SETTLED = 20
"""Batches after which the counts are worth a comparison."""
KNOWS_MORE = 0.9
"""Part of the cost of frequencies below which a model surely knows more than those."""

_KEY = "loss.over_frequencies"


class FrequencyProbe(CloserLooks):
    """Compares the model's answers with those of somebody who only counts labels, on the same labels.

    Both pay the negative logarithm of the probability that they gave to each label. The counter gives every label its
    frequency in the batches looked at before, with one half added to each (Krichevsky and Trofimov, 1981), so that it
    knows nothing of the batch at hand. Read from what torch keeps for the backward pass of a cross entropy: weights of
    classes and label smoothing do not enter.
    """

    name = "label-frequencies"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            _KEY,
            "Cross entropy of the model divided by that of the label frequencies so far; 1 is no better than knowing only those.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a cross entropy"),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._counts: Any = None
        self._looks = 0
        self._knows_more = False

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.loss_graph is None or event.phase != "train" or not self.looks(event, demand, (_KEY,)):
            return ()
        node: Any = cross_entropy_of(event.loss_graph)
        answers = None if node is None else log_probabilities(node)
        labels: Any = None if answers is None else saved(node, "target")
        if answers is None or labels is None or labels.numel() < FEW:
            self.rest_long(demand, (_KEY,))
            return ()
        if type(answers).__name__ != "Tensor":  # spread over ranks: what is computed of it may be exchanged
            self.rest_long(demand, (_KEY,))
            return ()
        if answers.numel() != labels.numel() * answers.shape[-1]:
            self.rest_long(demand, (_KEY,))
            return ()
        value = self._compare(answers.flatten(0, -2), labels.detach().flatten(), signed(int(node._saved_ignore_index)))
        if self._looks <= SETTLED:
            self.rest(demand, (_KEY,), calm=False)
            return ()
        sample = Sample(_KEY, event.step, calculate(self._note, number(value)))
        self.rest(demand, (_KEY,), calm=self._knows_more)
        return (sample,)

    def _note(self, value: float) -> float:
        self._knows_more = value < KNOWS_MORE
        return value

    def _compare(self, answers: Any, labels: Any, left_out: int) -> Any:
        import torch

        classes = answers.shape[-1]
        known = self._counts
        if known is None or known.shape[0] != classes or known.device != labels.device:
            known = self._counts = torch.full((classes,), 0.5, device=labels.device)
            self._looks = 0
        counts = (labels != left_out) & (labels >= 0) & (labels < classes)
        # What is left out keeps its place, with the weight 0.
        labels = labels.clamp(0, classes - 1)
        frequencies = (known / known.sum()).log()
        apart = max(1, labels.shape[0] // FREQUENCY_ROWS)
        some, weights = labels[::apart], counts[::apart].float()
        given = answers[::apart].gather(1, some.unsqueeze(1)).squeeze(1).float()
        cost, base = (given * weights).sum(), (frequencies[some] * weights).sum()
        # After the comparison: the counter must not know the batch at hand.
        known.index_add_(0, labels, counts.float())
        self._looks += 1
        return torch.where(base < 0, cost / base.clamp(max=-1e-6), torch.zeros_like(base))


_LINEAR = ("Add", "Sub", "Rsub")
INFORMS = 0.05
"""Nats per sample above which a latent code surely says something."""


class LatentProbe(CloserLooks):
    """Finds the divergence of two Gaussians in the graph of the loss, and computes its value.

    Two ways of writing it are known: from mean and log variance, ``mu**2 + logvar.exp() - logvar - 1`` (Kingma and
    Welling, 2014), and ``torch.distributions.kl_divergence`` of two ``Normal``. Recognised by a logarithm and its
    exponential that stand in one sum with a square of the same shape.
    """

    name = "latent"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "latent.kl",
            "Divergence of the latent code's distribution from the prior, in nats per sample.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a divergence from a prior in the loss"),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._informs = False

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        step, keys = event.step, ("latent.kl",)
        if event.loss_graph is None or event.phase != "train" or not self.looks(event, demand, keys):
            return ()
        value = _divergence(event.loss_graph)
        if value is None:
            self.rest_long(demand, keys)
            return ()
        sample = Sample("latent.kl", step, calculate(self._note, number(value)))
        self.rest(demand, keys, calm=self._informs or spread_over_ranks(value))
        return (sample,)

    def _note(self, value: float) -> float:
        self._informs = value > INFORMS
        return value


def _divergence(root: Any) -> Any:
    """Mean over samples of the sum over the code, as a 0-dim tensor; None where no such term stands in the loss."""
    nodes = [(node, type(node).__name__.partition("Backward")[0]) for node in {id(n): n for n in near(root)}.values()]
    ratios = [(node, kind) for node, kind in nodes if kind in ("Exp", "Log")]
    if not ratios:
        return None
    added = {id(parent) for node, kind in nodes if kind in _LINEAR for parent, _ in node.next_functions}
    squares = [square for node, kind in nodes if kind in ("Mul", "Pow") if (square := _square(node)) is not None]
    for node, kind in ratios:
        ratio: Any
        mean: Any
        if id(node.next_functions[0][0]) not in added:
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
