"""Two networks that play against each other: do their losses pull at the same score in opposite ways, is a critic held, and does
one loss go to nothing while the other grows (of any two optimizers that take turns)?"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.rows import StepRow
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number
from healthcheck.device.tensors import is_tensor, on_host
from healthcheck.probes.activations import Hook, ModuleHooks, out_of_graphs
from healthcheck.probes.graph import DISTANCES, NEUTRAL, all_behind, kind_of, near, saved
from healthcheck.probes.labels import where_called

TURNS = 4
"""Turns of each side that must say the same."""
SETTLED = 30
"""Step from which on it is said that nothing holds a critic: some penalties come once in 16 updates."""
LAST = 40
"""Step after which nothing is looked at any more; a game without a second optimizer ends earlier."""
ALONE = 8
_RISING = ("Relu", "Softplus", "LogSigmoid", "Log", "Exp", "Tanh", "Sigmoid", "LeakyRelu", "Sqrt")
_HELD = ("Sigmoid", "Tanh", "Softmax", "Clamp", "ClampMin", "ClampMax", "Div")
_PLAIN = (
    "T",
    "Addmm",
    "Mm",
    "Convolution",
    "NativeBatchNorm",
    "NativeLayerNorm",
    "NativeGroupNorm",
    "Add",
    "Transpose",
)


class _Score(NamedTuple):
    """One call of a network: memory of its input, and the node of what it put out."""

    given: int
    node: Any


class Pull(NamedTuple):
    """What a loss does to a score."""

    way: float
    """1: the loss grows with the score, -1: it falls."""
    to: float | None
    """The number that the score is pulled to, of a squared error; else None."""
    linear: bool
    """Whether the loss is the score, summed and multiplied with numbers."""


class GameProbe:
    """Looks at the first turns of two networks with an optimizer each, of which one (the critic) reads what the other makes.

    *Same side*: the score of what was made is pulled the same way in the critic's loss and in the other's: the critic learns to call
    it a fake, and so does the generator. *Without a bound*: the critic's loss is the difference of two mean scores and nothing else
    (Wasserstein), and no clamp, penalty or spectral norm holds its weights.
    """

    name = "game"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.AFTER_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.same_side",
            "1 if a generator and its critic pull the score of what was made the same way, in several turns, else 0.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "two networks that play against each other"),
        ),
        Metric(
            "loss.critic_unbound",
            "1 if a critic's loss is a difference of scores, and nothing holds its weights, in several turns, else 0.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "two networks that play against each other"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._hooks = ModuleHooks(self._choose)
        self._owners: dict[int, int] = {}
        """Which optimizer has a parameter, by the ids of both."""
        self._made: dict[int, list[Any]] = {}
        """What the networks of each optimizer have put out in the last steps: kept, so that its memory is not used again."""
        self._scores: dict[int, list[_Score]] = {}
        self._critic: list[Pull] = []
        self._maker: list[Pull] = []
        self._held = False
        self._loose = 0
        """Turns of a critic that nothing seemed to hold."""
        self._after: dict[int, int] = {}
        """How often the weights of an optimizer had been written right after its update."""
        self._said: set[str] = set()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.phase != "train" or self.rests_until == sys.maxsize:
            return ()
        optimizers = event.model.optimizers()
        if event.step > LAST or (event.step > ALONE and len(optimizers) < 2):
            self.close()
            self.rests_until = sys.maxsize
            return ()
        if event.kind is EventKind.AFTER_UPDATE:
            if event.optimizer is not None:
                self._after[id(event.optimizer)] = _written(event.optimizer)
            return ()
        if len(optimizers) < 2 or event.loss_graph is None:
            return ()
        self._owners = {id(p): id(o) for o in optimizers for g in o.param_groups for p in g["params"]}
        self._hooks.follow(event.model.named_modules())
        by_id = {id(o): o for o in optimizers}
        nodes = all_behind(event.loss_graph)
        # A penalty may have a pass of its own, now and then.
        self._held = self._held or any("BackwardBackward" in type(node).__name__ for node in nodes)
        reached = {self._owners.get(id(node.variable)) for node in nodes if kind_of(node) == "AccumulateGrad"}
        for critic, maker in ((c, m) for c in by_id for m in by_id if c != m):
            if critic in reached:
                self._turn(event.loss_graph, nodes, by_id[critic], maker, maker in reached)
        self._scores = {
            owner: [score for score in scores if not any(score.node is node for node in nodes)]
            for owner, scores in self._scores.items()
        }
        for kept in self._made.values():
            del kept[:-4]
        return list(self._found(event))

    def close(self) -> None:
        """Take the hooks off, and let go of what was kept."""
        self._hooks.close()
        self._made, self._scores, self._owners = {}, {}, {}

    def _turn(self, root: Any, nodes: Sequence[Any], critic: Any, maker: int, makes: bool) -> None:
        """One backward pass that reaches the critic; ``makes``: and the other network, whose turn it is, then."""
        places = {_memory(tensor) for tensor in self._made.get(maker, ())}
        scores = [s for s in self._scores.get(id(critic), ()) if any(s.node is node for node in nodes)]
        of_made = [score.node for score in scores if score.given in places]
        pulls = [pull for node in of_made for pull in pulls_at(root, node)]
        if len(of_made) != 1 or len(pulls) != 1:
            return
        (self._maker if makes else self._critic).append(pulls[0])
        if makes or not pulls[0].linear:
            self._held = self._held or not makes
            return
        others = [pull for score in scores if score.node is not of_made[0] for pull in pulls_at(root, score.node)]
        differs = [pull.way for pull in others if pull.linear] == [-pulls[0].way]
        if not differs or self._is_held(root, nodes, critic, [score.node for score in scores]):
            self._held = True
        else:
            self._loose += 1

    def _is_held(self, root: Any, nodes: Sequence[Any], critic: Any, scores: Sequence[Any]) -> bool:
        """Whether anything may hold the critic's weights: a penalty, a clamp, a norm, decay, or a score within limits."""
        if any("BackwardBackward" in type(node).__name__ for node in nodes) or any(kind_of(n) in _HELD for n in scores):
            return True
        if _terms(root) != len(scores) or any(group.get("weight_decay") for group in critic.param_groups):
            return True
        if self._after.get(id(critic), -1) not in (-1, _written(critic)):
            return True
        own = {id(p) for group in critic.param_groups for p in group["params"]}
        return any(
            kind_of(node) not in _PLAIN
            for node in nodes
            for parent, _ in node.next_functions
            if kind_of(parent) == "AccumulateGrad" and id(parent.variable) in own
        )

    def _found(self, event: Event) -> Iterator[Sample]:
        place = where_called(event, "backward")
        critic, maker = self._critic[-TURNS:], self._maker[-TURNS:]
        if "same" not in self._said and len(critic) == len(maker) == TURNS:
            same = len({(pull.way, pull.to) for pull in (*critic, *maker)}) == 1
            if same or len(self._maker) > TURNS:
                self._said.add("same")
            yield Sample("loss.same_side", event.step, float(same), detail=lambda: place)
        if (self._loose >= TURNS and "bound" not in self._said) or (self._held and "bound" not in self._said):
            unbound = not self._held and event.step >= SETTLED
            if unbound or self._held:
                self._said.add("bound")
                yield Sample("loss.critic_unbound", event.step, float(unbound), detail=lambda: place)

    # -- hooks ---------------------------------------------------------------------------

    def _choose(self, modules: Sequence[tuple[str, Any]]) -> Iterator[tuple[Any, Hook]]:
        """The outermost modules all of whose parameters one optimizer has."""
        inside: set[int] = set()
        for _, module in modules:
            own = [self._owners.get(id(p)) for p in module.parameters() if p.requires_grad]
            if id(module) in inside or not own or None in own or len(set(own)) != 1:
                continue
            inside.update(map(id, module.modules()))
            yield module, out_of_graphs(self._noting(own[0]))

    def _noting(self, owner: Any) -> Hook:
        def hook(module: Any, given: Any, output: Any) -> None:
            if not module.training or not is_tensor(output):
                return
            self._made.setdefault(owner, []).append(output.detach())
            if given and is_tensor(given[0]) and output.grad_fn is not None:
                scores = self._scores.setdefault(owner, [])
                scores.append(_Score(_memory(given[0]), output.grad_fn))
                del scores[:-8]

        return hook


def pulls_at(root: Any, score: Any) -> list[Pull]:
    """What a loss does to a score, once for each way from one to the other; empty where that is not known."""
    waiting, found = [(root, Pull(1.0, None, linear=True))], list[Pull]()
    for _ in range(64):
        if not waiting:
            return list(dict.fromkeys(found))
        node, pull = waiting.pop()
        if node is score:
            found.append(pull)
            continue
        kind = kind_of(node)
        parents = [parent for parent, _ in node.next_functions]
        if kind in ("Mean", "Sum", *NEUTRAL):
            waiting.append((parents[0], pull))
        elif kind in ("Add", "Sub", "Neg", "Rsub"):
            for place, parent in enumerate(parents):
                turned = kind in ("Neg", "Rsub") or (kind == "Sub" and place == 1)
                waiting.append((parent, pull._replace(way=-pull.way if turned else pull.way)))
        elif kind in ("Mul", "Div") and parents.count(None) == len(parents) - 1:
            factor: Any = saved(node, "other" if parents[0] is not None else "self")
            if is_tensor(factor) and (factor.numel() != 1 or not on_host(factor)):
                continue
            sign = -1.0 if is_tensor(factor) and float(factor) < 0 else 1.0
            waiting.append((parents[0] or parents[1], pull._replace(way=sign * pull.way)))
        elif kind in _RISING:
            waiting.append((parents[0], pull._replace(linear=False)))
        elif kind in ("BinaryCrossEntropyWithLogits", "BinaryCrossEntropy", "MseLoss", "L1Loss"):
            target: Any = saved(node, "target")
            if not is_tensor(target) or not on_host(target) or target.numel() == 0:
                continue
            low, high = float(target.min()), float(target.max())
            if kind.startswith("Binary"):
                if high < 0.5 or low > 0.5:
                    way = pull.way if high < 0.5 else -pull.way
                    waiting.append((parents[0], Pull(way, None, linear=False)))
            elif low == high:
                waiting.append((parents[0], Pull(pull.way, low, linear=False)))
        waiting = [(parent, how) for parent, how in waiting if parent is not None]
    return []


def _terms(root: Any) -> int:
    """Parts that a sum has."""
    waiting, count = [root], 0
    for _ in range(32):
        if not waiting:
            break
        node = waiting.pop()
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if kind_of(node) in ("Add", "Sub", "Neg", "Rsub", "Mul", "Div") and parents:
            waiting += parents
        else:
            count += 1
    return count


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _written(optimizer: Any) -> int:
    return sum(int(p._version) for group in optimizer.param_groups for p in group["params"])


# --------------------------------------------------------------------------------------------------
# Balance of two optimizers that take turns.


FIRST = 5
"""Losses whose mean is what a side began with."""
KEEP = 0.8
"""Part of the running mean that stays when a loss is added."""
NOTHING = 0.05
"""A side has won below this part of its first losses."""


@dataclass(slots=True)
class _Side:
    """The losses of one optimizer."""

    count: int = 0
    first: float = 0.0
    level: float = 0.0
    regression: bool = False
    """Its loss is the distance to targets that differ from sample to sample: a critic that fits its values."""
    settled: bool = False
    won: bool = False
    """Whether it is settled, and next to nothing is left of its loss."""

    def add(self, loss: float, differ: float) -> None:
        self.count += 1
        self.regression = self.regression or differ > 0
        if self.count <= FIRST:
            self.first += (loss - self.first) / self.count
            self.level = self.first
        else:
            self.level = KEEP * self.level + (1 - KEEP) * loss
        self.settled = self.count > FIRST and self.first > 0 and self.level >= 0
        self.won = self.settled and self.level < NOTHING * self.first and not self.regression


class LossBalanceProbe:
    """Follows the losses of optimizers that take turns, such as those of a GAN.

    A discriminator that separates perfectly has a loss near zero and leaves the generator no gradient; the generator's
    loss (non-saturating: Goodfellow et al., 2014) grows without bound. Losses that begin below zero are passed over:
    they have no zero to go to, but for the saturating loss of a generator, which comes up to it from below. Nobody wins
    by a regression: the critic of an actor that learns to tell returns has a small loss, and is no discriminator (whose
    targets are one number for all that is real, and one for all that is not).

    One answer a step, at its first update, from all updates since the answer before: two samples of one series in a step would
    have to be sorted one by one wherever samples are judged.
    """

    name = "loss-balance"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE)
    noted = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.one_sided",
            f"One optimizer's loss divided by its first size, while another's is below {NOTHING:.0%} of its own; else 0.",
            needs=("two optimizers",),
        ),
        Metric(
            "loss.starved",
            f"1 while one optimizer's loss is below {NOTHING:.0%} of its first size and another's has come up from below zero"
            " to as little of its own; else 0.",
            needs=("two optimizers",),
        ),
    )

    def __init__(self) -> None:
        self.events_from = 0
        """Step from which on the graph of a loss is to be seen, where steps are noted in rows."""
        self._loss: Any = None
        self._differ: Any = 0.0
        self._sides: dict[int, _Side] = {}
        self._indices: set[int] = set()
        """Optimizers that have made an update with a loss of their own."""
        self._given: dict[int, int] = {}
        """Step of the last update, by optimizer."""
        self._said = -1
        """Step of the last answer: one is given at the first update of each."""
        self._unsaid: list[tuple[int, Any, Any]] = []
        """Updates since the one before: which optimizer, its loss, and whether its targets differ."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.row is not None:
            new = self._anyone_new()
            if new and not event.row.found.get(self.name):
                event.row.found[self.name] = _targets_differ(event.loss_graph)
            self.events_from = event.step if new else sys.maxsize
            return ()
        if event.kind is EventKind.LOSS:
            self._loss = number(event.loss)
            self._differ = _targets_differ(event.loss_graph) if self._anyone_new() else 0.0
            return ()
        loss, self._loss = self._loss, None
        differ, self._differ = self._differ, 0.0
        return () if loss is None else self._samples(event.optimizer_index, event.step, loss, differ, 0.0)

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made: list[Sample] = []
        for row in rows:
            index = row.optimizer_index
            if len(self._indices) == 1 and index in self._indices:  # with one optimizer there is nobody to lose against
                continue
            if row.loss is not None and row.seen and self._given.get(index) != row.step:
                differ = row.found.get(self.name, 0.0)
                made += self._samples(index, row.step, row.loss, differ, row.update_time)
        return made

    def _samples(self, index: int, step: int, loss: Any, differ: Any, time: float) -> Sequence[Sample]:
        """An update of this optimizer was made with this loss."""
        self._given[index] = step
        if index not in self._indices:
            self._indices.add(index)
            self.events_from = 0
        if len(self._indices) < 2:
            return ()
        unsaid = self._unsaid
        unsaid.append((index, loss, differ))
        if step == self._said:
            return ()
        self._said, self._unsaid = step, []
        indices, losses, differ_ = zip(*unsaid, strict=True)
        one_sided = calculate(partial(self._judge, indices), *losses, *differ_)  # in the order of the steps
        starved = calculate(self._starved, one_sided)  # after the losses have been added to their sides
        return (
            Sample("loss.one_sided", step, one_sided, time=time),
            Sample("loss.starved", step, starved, time=time),
        )

    def _anyone_new(self) -> bool:
        """Whether the kind of some side's loss is still to be found out."""
        sides = self._sides.values()
        return len(self._indices) > 1 and (len(sides) < len(self._indices) or any(s.count <= FIRST for s in sides))

    def _judge(self, indices: Sequence[int], *numbers: float) -> float:
        """:param numbers: the loss of each update, then whether the targets of each differ."""
        for index, loss, differ in zip(indices, numbers, numbers[len(indices) :], strict=False):
            if loss - loss == 0.0:  # the rule on the loss itself names the others
                side = self._sides.get(index)
                if side is None:
                    side = self._sides[index] = _Side()
                side.add(loss, differ)
        growth = 0.0
        for winner in self._sides.values():
            if winner.won:
                for side in self._sides.values():
                    if side.settled and side is not winner:
                        growth = max(growth, side.level / side.first)
        return growth

    def _starved(self, _: float) -> float:
        """A generator's saturating loss, log(1 - D(G(z))), ends at zero from below when nothing of it is believed."""
        sides = self._sides.values()
        for winner in sides:
            if winner.won:
                lost = (s for s in sides if s.count > FIRST and s.first < -0.1 and abs(s.level) < NOTHING * -s.first)
                return float(any(lost))
        return 0.0


def _targets_differ(root: Any) -> Any:
    """1 if the loss holds a distance to targets that are not all one number, else 0."""
    # A discriminator's least-squares loss has one target for a whole batch, a critic's has one for each state.
    for node in near(root):
        targets: Any = saved(node, "target") if kind_of(node) in DISTANCES else None
        if is_tensor(targets) and targets.numel() > 1:
            low, high = targets.detach().aminmax()
            return number((low != high).float())
    return 0.0
