"""Dropout that stays on while a model is evaluated: the operations of one forward pass in evaluation mode.

``model.eval()`` reaches modules. Dropout that is called as a function (``F.dropout(x)``, ``dropout_p=`` of attention, a
mask from ``bernoulli_``) must ask for ``self.training`` itself, and where it does not, two passes of one batch differ. In a
few pauses of a run the first forward pass is watched operation by operation, by a mode of torch's dispatcher: what is
calculated is the same. Global module hooks tell where the pass begins and ends; those of single modules would switch off
torch's fast paths for attention.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from healthcheck.instrument.compiled import something_is_compiled
from healthcheck.instrument.places import place_of

PAUSES = 3
"""Pauses of a run in which it is looked."""
PASSES = 16
"""Outermost modules that are looked at in each: a model may be called in parts."""

_SWITCHED = {"dropout": (1, 2), "feature_dropout": (1, 2), "alpha_dropout": (1, 2), "native_dropout": (1, 2)}
"""Operations that drop values if they are asked to: positions of the probability, and of whether they do."""
_BY_ITSELF = ("_fused_dropout", "bernoulli_")
"""Operations that always do, with the probability at the second position. Torch hands on no defaults: they are 0.5."""
_OF_ATTENTION = "scaled_dot_product"


class EvaluationDropout:
    """Looks for dropout in forward passes of evaluations. See the head of this file.

    :param wanted: whether anybody wants to know.
    :param is_trained: whether a module is a part of the trained model, or holds it.
    """

    def __init__(self, wanted: Callable[[], bool], is_trained: Callable[[Any], bool]) -> None:
        self._wanted = wanted
        self._is_trained = is_trained
        self._pauses = 0
        self._handles: list[Any] = []
        self._inside: list[Any] = []
        """The modules whose forward pass runs, outermost first, while one is looked at."""
        self._mode: Any = None
        self._thread = 0
        self._passes = 0
        self._found: list[str] | None = None
        self.by_batch: list[str] | None = None
        """Modules in evaluation mode that normalise by the statistics of the batch; whoever takes what was found takes this first."""

    def pause_begins(self) -> None:
        """Look at the first forward passes from now on, if this is one of the first pauses."""
        if self._handles or self._pauses >= PAUSES or not self._wanted() or something_is_compiled():
            return
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        self._pauses += 1
        self._passes = 0
        self._thread = threading.get_ident()
        self._handles = [
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._leaves, always_call=True),
        ]

    def pause_ends(self) -> list[str] | None:
        """Look no further. Returns what was found, None where no forward pass was seen; forgets it.

        Called inside no forward pass.
        """
        self._stop()
        found, self._found = self._found, None
        return found

    def take_by_batch(self) -> list[str] | None:
        """Which modules normalised by the batch in this pause, None where no forward pass was seen; forgets it."""
        found, self.by_batch = self.by_batch, None
        return found if found is not None else [] if self._found is not None else None

    def _stop(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _enters(self, module: Any, args: Any) -> None:
        if threading.get_ident() != self._thread or not self._handles:
            return
        if not self._inside:
            if module.training or not self._is_trained(module):
                return
            self._passes += 1
            self._mode = _mode(self._seen)
            self._mode.__enter__()
        self._inside.append(module)

    def _leaves(self, module: Any, args: Any, output: Any) -> None:
        if not self._inside or threading.get_ident() != self._thread:
            return
        # A pass that was broken off inside calls the hooks of those further out only.
        while self._inside:
            if self._inside.pop() is module:
                break
        if self._inside:
            return
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        if self._found is None:
            self._found = []
        # A model that is called as a whole has been seen; of one in parts, the others are still to come.
        if self._passes >= PASSES or any(True for _ in module.children()):
            self._stop()

    def _seen(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """An operation of the pass: is it dropout, called by a module that is in evaluation mode?"""
        if "batch_norm" in name:
            if self._inside[-1].training or not _of_the_batch(args, kwargs):
                return
            known = self.by_batch = [] if self.by_batch is None else self.by_batch
        elif not _drops(name, args, kwargs):
            return
        elif self._inside[-1].training and any(m is self._inside[-1] for m in self._inside[0].modules()):
            return  # a part of the model that was switched on by itself: Monte Carlo dropout
        else:
            known = self._found = [] if self._found is None else self._found
        place = place_of(sys._getframe(2))
        said = f"{type(self._inside[-1]).__name__}{f' ({place})' if place else ''}"
        if said not in known:
            known.append(said)


def _mode(seen: Callable[[str, tuple[Any, ...], Mapping[str, Any]], None]) -> Any:
    """A dispatch mode that shows every operation and changes nothing."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = func._schema.name.partition("::")[2]
            if "drop" in name or "dot_product" in name or "batch_norm" in name or name == "bernoulli_":
                seen(name, args, kwargs)
            return func(*args, **kwargs)

    return Operations()


def _of_the_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a batch norm that has running statistics takes those of the batch, as in training.

    Input, weight, bias, running mean, running variance, and then whether it trains; other kernels leave out the last.
    """
    has_statistics = len(args) > 4 and hasattr(args[3], "numel")
    return has_statistics and (args[5] if len(args) > 5 else kwargs.get("training", False)) is True


def _drops(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    def given(position: int, key: str) -> Any:
        return args[position] if len(args) > position else kwargs.get(key)

    if name in _SWITCHED:
        place, switch = _SWITCHED[name]
        return bool(given(switch, "train")) and _is_part(given(place, "p"))
    if name in _BY_ITSELF:
        probability = given(1, "p")
        return probability is None or _is_part(probability)
    if _OF_ATTENTION in name:
        # Every kernel has it at a place of its own; all but one hand it on by its name in the schema.
        probability = kwargs.get("dropout_p")
        return _is_part(probability if probability is not None else next((a for a in args if type(a) is float), None))
    return False


def _is_part(probability: Any) -> bool:
    return isinstance(probability, float) and 0.0 < probability < 1.0
