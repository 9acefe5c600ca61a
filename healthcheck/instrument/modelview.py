"""Names for parameters of a training script that never showed us its model.

Modules are found by one scan of the objects that the garbage collector tracks. Everything is held
by weak references: watching must not keep a model alive that the script has let go.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from healthcheck.device.living import live_objects

LOOK_ANEW = 10
"""Questions after which names are worked out again: a layer that was replaced may live on, in the optimizer at least."""

_WRAPPERS = re.compile(r"(^|\.)(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


def canonical(name: str) -> str:
    """Strip the prefixes that DDP, ``torch.compile``, FSDP and activation checkpointing put in.

    ``module._orig_mod.blocks.0._checkpoint_wrapped_module.fc.weight`` -> ``blocks.0.fc.weight``.
    """
    return _WRAPPERS.sub("", name).lstrip(".")


class FoundModel:
    """Implements :class:`healthcheck.core.events.ModelView` for whatever is being trained.

    :param roots: modules that the user named; without them :meth:`scan` looks for some.
    """

    def __init__(self, roots: Iterable[Any] = ()) -> None:
        self._roots: list[tuple[str, weakref.ref[Any]]] = [(name, weakref.ref(m)) for name, m in _prefixed(list(roots))]
        self._given = bool(self._roots)
        self._candidates: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._cache: tuple[Any, list[tuple[str, weakref.ref[Any]]]] | None = None
        self._modules: tuple[Any, list[tuple[str, weakref.ref[Any]]]] | None = None
        self._asked = 0

    # -- what probes ask --------------------------------------------------------------

    def optimizers(self) -> Sequence[Any]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def named_parameters(self) -> Sequence[tuple[str, Any]]:
        self._asked += 1
        if self._asked % LOOK_ANEW == 0:
            self._cache = self._modules = None
        signature = self._signature()
        if self._cache is not None and self._cache[0] == signature:
            found = _all_alive(self._cache[1])
            if found is not None:
                return found
        named = self._name_parameters()
        self._cache = (signature, [(name, weakref.ref(p)) for name, p in named])
        return named

    def named_modules(self) -> Sequence[tuple[str, Any]]:
        signature = [ref for _, ref in self._roots]
        if self._modules is not None and self._modules[0] == signature:
            found = _all_alive(self._modules[1])
            if found is not None:
                return found
        named: list[tuple[str, Any]] = []
        for prefix, root in self._live_roots():
            named += [(_join(prefix, canonical(name)), module) for name, module in root.named_modules()]
        self._modules = (signature, [(name, weakref.ref(m)) for name, m in named])
        return named

    def roots(self) -> list[Any]:
        """The outermost modules, those that a checkpoint holds."""
        return [module for _, module in self._live_roots()]

    # -- what adapters call -----------------------------------------------------------

    def add_optimizer(self, optimizer: Any) -> None:
        """An optimizer stepped for the first time; look for modules again if it holds strangers.

        From now on modules count only if an optimizer that steps holds a part of them: others are
        leftovers of an earlier model, or not trained.
        """
        self._optimizers.append(weakref.ref(optimizer))
        if self._given:
            return
        known = {id(p) for ref in self._candidates if (root := ref()) is not None for p in root.parameters()}
        if any(id(p) not in known for p in parameters_of(optimizer)):
            self.scan()
        else:
            self._choose(())

    def forget_optimizers(self) -> None:
        """Another training begins: those that stepped before count no longer."""
        self._optimizers = []

    def scan(self, optimizers: Iterable[Any] = (), modules: list[Any] | None = None) -> None:
        """Find the outermost modules among all living objects. Some 20 ms; call it rarely.

        :param optimizers: those that will train, where they have not stepped yet.
        :param modules: all that live, for who has looked already.
        """
        if self._given:
            return
        if modules is None:
            modules = live_objects("Module")
        inner = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
        roots = [module for module in modules if id(module) not in inner and _trains(module)]
        self._candidates = [weakref.ref(root) for root in roots]
        self._choose(optimizers)

    def _choose(self, optimizers: Iterable[Any]) -> None:
        roots = [root for root in (ref() for ref in self._candidates) if root is not None]
        held = {id(p) for o in self.optimizers() or optimizers for p in parameters_of(o)}
        if held:
            roots = [root for root in roots if any(id(p) in held for p in root.parameters())]
        self._roots = [(prefix, weakref.ref(root)) for prefix, root in _prefixed(_without_parts(roots))]
        self._cache = self._modules = None

    # -- inside -----------------------------------------------------------------------

    def _live_roots(self) -> list[tuple[str, Any]]:
        found = ((prefix, ref()) for prefix, ref in self._roots)
        return [(prefix, root) for prefix, root in found if root is not None]

    def _signature(self) -> Any:
        groups = [[len(g["params"]) for g in o.param_groups] for o in self.optimizers()]
        return groups, [ref for _, ref in self._roots]

    def _name_parameters(self) -> list[tuple[str, Any]]:
        named: dict[int, tuple[str, Any]] = {}
        for prefix, root in self._live_roots():
            for name, parameter in root.named_parameters():
                named.setdefault(id(parameter), (_join(prefix, canonical(name)), parameter))
        for number, optimizer in enumerate(self.optimizers()):
            head = f"optimizer{number}." if number else ""
            for i, group in enumerate(optimizer.param_groups):
                for k, parameter in enumerate(group["params"]):
                    named.setdefault(id(parameter), (f"{head}group{i}.param{k}", parameter))
        return list(named.values())


def _all_alive(named: Sequence[tuple[str, weakref.ref[Any]]]) -> list[tuple[str, Any]] | None:
    """What the references lead to; None if something is gone."""
    found = []
    for name, ref in named:
        thing = ref()
        if thing is None:
            return None
        found.append((name, thing))
    return found


def parameters_of(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def living_optimizers() -> list[Any]:
    """Optimizers that hold parameters of their own; wrappers of a framework round one are left out."""
    return living()[0]


def living() -> tuple[list[Any], list[Any]]:
    """:func:`living_optimizers` and all modules, in one walk over what lives."""
    import torch

    found: tuple[list[Any], list[Any]] = [], []
    for thing in live_objects("Optimizer", "Module"):
        found[issubclass(type(thing), torch.nn.Module)].append(thing)
    return [o for o in found[0] if vars(o).get("param_groups")], found[1]


def _trains(module: Any) -> bool:
    if "_parameters" not in vars(module):
        return False  # not initialised yet
    return any(p.requires_grad for p in module.parameters())


def _without_parts(roots: list[Any]) -> list[Any]:
    """Drop a module whose parameters all belong to a larger one (a second handle on a part)."""
    sized = sorted(((root, {id(p) for p in root.parameters()}) for root in roots), key=lambda pair: -len(pair[1]))
    kept: list[tuple[Any, set[int]]] = []
    for root, own in sized:
        if not any(own <= other for _, other in kept):
            kept.append((root, own))
    order = {id(root): i for i, root in enumerate(roots)}
    return sorted((root for root, _ in kept), key=lambda root: order[id(root)])


def _prefixed(roots: list[Any]) -> list[tuple[str, Any]]:
    """No prefix for a single root; else the script's global name for it, or its class."""
    if len(roots) < 2:
        return [("", root) for root in roots]
    names = {id(v): k for k, v in vars(sys.modules["__main__"]).items() if not k.startswith("_")}
    taken: dict[str, int] = {}
    result = []
    for root in roots:
        name = names.get(id(root)) or type(root).__name__.lower()
        taken[name] = taken.get(name, 0) + 1
        result.append((name if taken[name] == 1 else f"{name}{taken[name]}", root))
    return result


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
