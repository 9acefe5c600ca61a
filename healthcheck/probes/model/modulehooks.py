"""Forward hooks of a probe: put on the model that trains, taken off when it is replaced or nobody asks any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from healthcheck.probes.model.seen import SeenModules

Hook = Callable[[Any, Any, Any], None]


class ModuleHooks:
    """The hooks of one probe.

    :param choose: from named modules to those that get a hook, each with it.
    """

    def __init__(self, choose: Callable[[Sequence[tuple[str, Any]]], Iterable[tuple[Any, Hook]]]) -> None:
        self._choose = choose
        self._modules = SeenModules()
        self._handles: list[Any] = []

    def follow(self, modules: Sequence[tuple[str, Any]]) -> None:
        """Put hooks on a model that was not seen before, and take them off the old one."""
        if self._modules.changed(modules):
            self._remove()
            for module, hook in self._choose(modules):
                self._handles.append(module.register_forward_hook(hook))

    def close(self) -> None:
        """Remove all hooks; the next model is a new one."""
        self._remove()
        self._modules.forget()

    def _remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def out_of_graphs(hook: Hook) -> Hook:
    """``hook``, except where a compiled region is traced through its module: there it is nothing.

    Marked as not to be traced it would end a graph at every layer. What is compiled is not seen, then.
    """
    from torch.compiler import is_dynamo_compiling

    def look(module: Any, given: Any, output: Any) -> None:
        if not is_dynamo_compiling():
            hook(module, given, output)

    return look


def largest_of(values: Mapping[str, Any]) -> Any:
    """The largest of 0-dim tensors by module, on the device of the first."""
    import torch

    home = next(iter(values.values())).device
    return torch.stack([value.to(home) for value in values.values()]).max()
