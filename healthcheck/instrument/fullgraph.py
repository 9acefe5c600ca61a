"""Whether what a program compiles fits into one graph each: every ``torch.compile`` asks for ``fullgraph``, or for none.

For tests, not for training: functions run through Dynamo's ``eager`` backend, which finds the same graph breaks as any other
and needs no C++ compiler and little time. What AOTAutograd or Inductor would refuse is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from healthcheck.instrument.patching import Patches


class CompileTest:
    """While installed, ``torch.compile`` and ``Module.compile`` compile for a test.

    :param fullgraph: raise at the first graph break, as ``torch.compile(fullgraph=True)`` does; else go on behind it.
    :param backend: ``eager``; empty leaves the one that was asked for.
    :param whole_model: compile the first module that is trained, where the program compiles nothing before.
    """

    def __init__(self, *, fullgraph: bool, backend: str = "eager", whole_model: bool = False) -> None:
        self.fullgraph = fullgraph
        self.backend = backend
        self.compiled: list[str] = []
        """What was compiled, by name, in order."""
        self.modules: list[Any] = []
        """The modules among it."""
        self.chosen = ""
        """The class that was compiled for the test alone; empty where the program compiles by itself."""
        self._whole_model = whole_model
        self._patches = Patches()
        self._hook: Any = None

    def install(self) -> None:
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._patches.replace(torch, "compile", self._compile)
        self._patches.replace(torch.nn.Module, "compile", self._compile_module)
        if self._whole_model:
            self._hook = register_module_forward_pre_hook(self._first_call)

    def restore(self) -> None:
        self._patches.restore()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        options = {**given, "fullgraph": self.fullgraph}
        if self.backend:
            options = {key: value for key, value in options.items() if key not in ("mode", "options")}
            options["backend"] = self.backend
        return options

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(model: Any = None, **given: Any) -> Any:
            if model is None:  # a decorator with arguments
                return lambda function: compile(function, **given)
            self._note(model)
            return original(model, **self._options(given))

        return compile

    def _compile_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(module: Any, *args: Any, **given: Any) -> Any:
            self._note(module)
            return original(module, **self._options(given))

        return compile

    def _note(self, what: Any) -> None:
        import torch

        if isinstance(what, torch.nn.Module):
            self.modules.append(what)
        self.compiled.append(getattr(what, "__qualname__", type(what).__name__))

    def _first_call(self, module: Any, args: Any) -> None:
        if self._hook is None or not module.training or not any(p.requires_grad for p in module.parameters()):
            return
        self._hook.remove()
        self._hook = None
        if not self.compiled:
            self.chosen = type(module).__name__
            module.compile()  # from its next call on


class Modules:
    """The modules that were compiled, as :class:`healthcheck.ModelView` has them."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules

    def named_modules(self) -> Sequence[tuple[str, Any]]:
        return [pair for module in self._modules for pair in module.named_modules()]

    def named_parameters(self) -> Sequence[tuple[str, Any]]:
        return [pair for module in self._modules for pair in module.named_parameters()]

    def optimizers(self) -> Sequence[Any]:
        return ()
