"""Copies of the trained model that should follow it and do not: target networks, averaged weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import number, smallest
from healthcheck.device.living import live_objects
from healthcheck.probes.labels import first_few, where_made
from healthcheck.probes.looks import Searches

TENSORS, VALUES = 4, 256
"""Largest tensors of a copy that are compared, and values of each."""
ALIKE = 0.5
"""Relative distance under which weights are those of a copy, some steps apart."""
ROUNDING, SHARE = 1e-5, 1e-3
"""Relative change that may be rounding, and part of the model's change that an average moves in any case."""
WRITTEN = 10
"""How often the model's own running statistics must have been written before a copy's may be called old."""
EVALUATIONS = 2
"""Calls of ``eval()`` on a copy after which it counts as evaluated."""
RARELY = 5
"""Steps between two of these calls, at the least: whoever calls it in each step takes it for a teacher, not for a result."""

AT_ONCE = 0.01
"""Distance of a copy from the model, as a part of the model's way since the last look, under which it is no average."""
AWAY = -0.5
"""Cosine between a copy's change and the way to the model under which it moves away."""

_KEYS = (
    "copies.rewritten",
    "copies.evaluated",
    "copies.statistics",
    "copies.at_once",
    "copies.away",
    "copies.gradients",
)


@dataclass(slots=True)
class _Copy:
    """A module that is not trained, made like one that is."""

    name: str
    module: Callable[[], Any]
    original: Callable[[], Any]
    alike: Any
    """Whether its weights were nearly those of the original when it was found: a boolean tensor."""
    since: int
    """Step at which it was found."""
    first: Any
    before: Any
    before_original: Any
    """Values at the first look, at the last one, and of the original then."""
    version: int
    gradients: Sequence[tuple[int, int]]
    """Its gradients at the last look, so that new ones show; empty if it has none."""
    statistics: Sequence[tuple[int, int]]
    """Of each normalisation layer with running statistics: how often its own were written by then, and the original's."""


class CopyProbe:
    """Compares copies of the trained model with what they were at the look before, and with the model.

    A copy is a module of the class and the shapes of a trained one, in no optimizer, whose weights were close to the other's
    when it was found. Most copies are frozen on purpose (teachers, reference models), so that it
    proves nothing that one stands still. Two things do: it was written to, and is what it was (*rewritten*); or the script
    puts it, and not the model, into eval mode now and then to evaluate it (*evaluated*). And where its weights follow, in
    eval mode, its running statistics have to as well (*statistics*). An average trails the model by many updates: one that
    is within a hundredth of the last ones takes nearly all from the model at each update (*at once*; a copy made whole is
    exactly the model), and one whose changes point the other way is pushed off (*away*). A copy in train mode that gets
    new gradients and never changes was meant to train (*gradients*). Of those that are evaluated it is said at the end how
    far they have come: an average with a decay of 0.9999 has gone a hundredth of the way after a hundred updates.
    """

    name = "copies"
    rests_for_all = True
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE, EventKind.TRAIN_END)
    provides: tuple[Metric, ...] = (
        Metric(
            "copies.rewritten",
            "Copies of the trained model that were written to since the last look and did not change, while the model did.",
            cost=Cost.DEVICE,
            needs=("a copy of the trained model",),
        ),
        Metric(
            "copies.evaluated",
            "Copies of the trained model that are evaluated and still have the weights of the beginning.",
            cost=Cost.DEVICE,
            needs=("a copy of the trained model",),
        ),
        Metric(
            "copies.statistics",
            "Normalisation layers of copies in eval mode whose running statistics were never written, though the weights were.",
            cost=Cost.HOST,
            needs=("a copy of the trained model",),
        ),
        Metric(
            "copies.at_once",
            "Copies that were written to since the last look and are all but the model of the last update, though not quite.",
            cost=Cost.DEVICE,
            needs=("a copy of the trained model",),
        ),
        Metric(
            "copies.away",
            "Copies that were written to since the last look and moved away from the model.",
            cost=Cost.DEVICE,
            needs=("a copy of the trained model",),
        ),
        Metric(
            "copies.gradients",
            "Copies in train mode that get gradients, that no optimizer has, and that are what they were, while the model trains.",
            cost=Cost.DEVICE,
            needs=("a copy of the trained model",),
        ),
        Metric(
            "copies.way",
            "At the end of a run: how far a copy that is evaluated has come, as a part of the model's own way; the least of them.",
            cost=Cost.DEVICE,
            needs=("a copy of the trained model that is evaluated",),
        ),
    )

    def __init__(self) -> None:
        self._searches = Searches()
        self.rests_until = self._searches.coming
        self._copies: list[_Copy] = []
        self._stale = False
        """Whether there were old statistics when a copy was written last."""
        self._way: tuple[Any, str] | None = None
        """Of the copy that has come least far, at the last look."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        step = event.step
        if event.kind is EventKind.TRAIN_END:
            way, self._way = self._way, None
            return () if way is None else (Sample("copies.way", step, way[0], detail=lambda: {"which": way[1]}),)
        if event.model is None or event.optimizer is None or event.optimizer_index > 0:
            return ()
        due = [key for key in _KEYS if demand.due(key, step)]
        samples = self._look(event, due) if due and self._copies else []
        if self._searches.due(step):
            self._copies += _search(event, [copy.module() for copy in self._copies])
        coming = self._searches.coming
        self.rests_until = min(coming, demand.next_due(_KEYS, step)) if self._copies else coming
        return samples

    def _look(self, event: Event, due: Sequence[str]) -> list[Sample]:
        rewritten: list[tuple[str, Any]] = []
        evaluated: list[tuple[str, Any]] = []
        ways: list[Any] = []
        stale: list[str] = []
        at_once: list[tuple[str, Any]] = []
        away: list[tuple[str, Any]] = []
        idle: list[tuple[str, Any]] = []
        since, written = event.step, False
        self._copies = [copy for copy in self._copies if copy.module() is not None and copy.original() is not None]
        for copy in self._copies:
            module, original = copy.module(), copy.original()
            now, now_original = _values(module), _values(original)
            version = _version(module)
            if now is None or now_original is None or now.shape != copy.before.shape:
                continue
            trains = (now_original != copy.before_original).any() & (now != now_original).any() & copy.alike
            if version != copy.version and not (event.run is not None and module in event.run.loaded_themselves):
                rewritten.append(
                    (copy.name, _stood_still(now, copy.before, now_original, copy.before_original) & trains)
                )
            if copy.gradients:
                gradients = _gradients(module)
                if module.training and gradients and gradients != copy.gradients:
                    idle.append((copy.name, (now == copy.first).all() & trains))
                copy.gradients = gradients
                copy.before, copy.before_original, copy.version = now, now_original, version
                continue
            if version != copy.version:
                apart, model_way = (now - now_original).norm(), (now_original - copy.before_original).norm()
                at_once.append((copy.name, (apart > 0) & (apart <= AT_ONCE * model_way) & copy.alike))
                away.append((copy.name, _moves_away(now, copy.before, copy.before_original) & trains))
            if version != copy.version and not module.training:
                stale += _stale_statistics(copy, module, original)
                written = True
            if _is_evaluated(module, event):
                evaluated.append(
                    (copy.name, _stood_still(now, copy.first, now_original, copy.before_original) & trains)
                )
                since = min(since, copy.since)
                gone, model_gone = (now - copy.first).norm(), (now_original - copy.first).norm()
                ways.append(
                    (gone / model_gone.clamp(min=1e-12)).where(copy.alike & (model_gone > 0), gone.new_ones(()))
                )
            copy.before, copy.before_original, copy.version = now, now_original, version
        if ways:
            self._way = smallest([number(way) for way in ways]), first_few(name for name, _ in evaluated)
        where = where_made(event, self._copies[0].module()) if len(self._copies) == 1 else {}
        samples = [
            _counted(key, found, event.step, since, where)
            for key, found in (
                ("copies.rewritten", rewritten),
                ("copies.evaluated", evaluated),
                ("copies.at_once", at_once),
                ("copies.away", away),
                ("copies.gradients", idle),
            )
            if key in due and found
        ]
        # An average that is made once in an epoch says nothing new in between.
        if "copies.statistics" in due and self._copies and (written or not self._stale):
            self._stale = bool(stale)
            facts = {"which": first_few(stale)}
            detail = (lambda: facts) if stale else None
            samples.append(Sample("copies.statistics", event.step, float(len(stale)), detail=detail))
        return samples


def _counted(key: str, found: Sequence[tuple[str, Any]], step: int, since: int, where: Mapping[str, str]) -> Sample:
    import torch

    flags = torch.stack([flag for _, flag in found])

    def facts() -> Mapping[str, Any]:
        which: dict[str, str] = {"which": first_few(name for name, _ in found), **where}
        return which | ({"since": f"step {since:,}, or longer"} if key == "copies.evaluated" else {})

    return Sample(key, step, number(flags.sum()), detail=facts)


def _search(event: Event, known: Sequence[Any]) -> list[_Copy]:
    """Modules that live in this process and are made like one that is trained."""
    assert event.model is not None
    held = {id(p) for o in (*event.model.optimizers(), event.optimizer) for g in o.param_groups for p in g["params"]}
    trained: dict[Any, Any] = {}
    for _, module in event.model.named_modules():
        own = list(module.parameters())
        if own and not held.isdisjoint(map(id, own)):
            trained.setdefault(signature(module), module)
    kinds = {type(module) for module in trained.values()}
    seen = {id(part) for module in known if module is not None for part in module.modules()}
    likely = [module for module in live_objects("Module") if type(module) in kinds and id(module) not in seen]
    found: list[tuple[Any, Any]] = []
    for module in likely:
        own = list(module.parameters())
        if own and held.isdisjoint(map(id, own)):
            original = trained.get(signature(module))
            if original is not None:
                found.append((module, original))
    inside = {id(part) for module, _ in found for part in module.modules() if part is not module}
    copies = []
    for module, original in found:
        if id(module) not in inside:
            now, now_original = _values(module), _values(original)
            if now is not None and now_original is not None:
                alike = (now - now_original).norm() <= ALIKE * now_original.norm()
                copies.append(
                    _Copy(
                        _called(module),
                        weak(module),
                        weak(original),
                        alike,
                        event.step,
                        now,
                        now,
                        now_original,
                        _version(module),
                        _gradients(module),
                        _statistics(module, original),
                    )
                )
    return copies


def _statistics(module: Any, original: Any) -> list[tuple[int, int]]:
    """How often the running statistics of each normalisation layer were written, of a copy and of the original."""
    return [(_writes(norm), _writes(other)) for _, (norm, other) in _norms(module, original)]


def _writes(norm: Any) -> int:
    """Torch's own updates of the statistics show in the count of batches alone; whoever copies them writes them."""
    counted = norm.num_batches_tracked
    return int(norm.running_mean._version) + (0 if counted is None else int(counted._version))


def _norms(module: Any, original: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    from torch.nn.modules.batchnorm import _NormBase

    for (name, norm), other in zip(module.named_modules(), original.modules(), strict=False):
        both = isinstance(norm, _NormBase) and isinstance(other, _NormBase)
        if both and norm.running_mean is not None and other.running_mean is not None:
            yield name, (norm, other)


def _stale_statistics(copy: _Copy, module: Any, original: Any) -> list[str]:
    """Layers whose statistics nobody has written since the copy was found, while the original's were written often.

    Torch counts what is written in place; a buffer that was replaced has a count of its own, which is another one.
    """
    found = []
    now = _statistics(module, original)
    for (name, _), (own, others), (own_now, others_now) in zip(
        _norms(module, original), copy.statistics, now, strict=False
    ):
        if own_now == own and others_now >= others + WRITTEN:
            found.append(name or type(module).__name__)
    return found


def signature(module: Any) -> Any:
    """What a module and its copy have in common: the class, and the shapes of all parameters."""
    return type(module), tuple([tuple(p.shape) for p in module.parameters()])


def _called(module: Any) -> str:
    """The script's global name for it, else its class."""
    names = (name for name, thing in vars(sys.modules["__main__"]).items() if thing is module)
    return next(names, type(module).__name__)


def _stood_still(now: Any, before: Any, model: Any, model_before: Any) -> Any:
    """Whether a copy has not changed but for rounding, next to nothing beside the change of the model since the last look."""
    change = (now - before).norm()
    return (change <= ROUNDING * now.norm()) & (change <= SHARE * (model - model_before).norm())


def _moves_away(now: Any, before: Any, model: Any) -> Any:
    """Whether a copy's change since the last look points away from where the model was then, and is more than rounding."""
    change, way = now - before, model - before
    sizes = change.norm() * way.norm()
    return (change.norm() > ROUNDING * now.norm()) & ((change * way).sum() < AWAY * sizes)


def _largest(module: Any) -> list[Any]:
    return sorted(module.parameters(), key=lambda p: -int(p.numel()))[:TENSORS]


def _values(module: Any) -> Any:
    """A few values of its largest tensors, as they are now; None where they cannot be read."""
    import torch

    largest = _largest(module)
    if any(type(p.data) is not torch.Tensor or p.is_meta or p.device != largest[0].device for p in largest):
        return None
    return torch.cat([p.detach().flatten()[:VALUES].float() for p in largest])


def _version(module: Any) -> int:
    """How often its largest tensors have been written, as torch counts it."""
    return sum(int(p._version) for p in _largest(module))


def _gradients(module: Any) -> list[tuple[int, int]]:
    """Which gradients its largest tensors have, and how often each was added to."""
    return [(id(p.grad), int(p.grad._version)) for p in _largest(module) if p.grad is not None]


def _is_evaluated(module: Any, event: Event) -> bool:
    if event.run is None:
        return False
    calls = sum(n for holder, n in event.run.set_to_eval.items() if any(part is module for part in holder.modules()))
    return EVALUATIONS <= calls <= event.step / RARELY and not event.run.model_evaluated
