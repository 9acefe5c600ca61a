"""Trainer adapters: each translates one framework's callbacks into events and gives Controls.

Importing this package imports no framework; a framework's module here does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from healthcheck.hookspecs import hookimpl

_ADAPTERS = {
    "huggingface": (("transformers.trainer", "Trainer"),),
    "lightning": (
        ("lightning.pytorch.trainer.trainer", "Trainer"),
        ("pytorch_lightning.trainer.trainer", "Trainer"),
    ),
    "accelerate": (("accelerate.accelerator", "Accelerator"),),
}
"""Adapter's module here -> classes that it attaches to, as (module, name)."""


@hookimpl
def healthcheck_register_trainers(register: Callable[[str, Callable[..., Any]], None]) -> None:
    """The built-in adapters, for ``attach``: each looks at an object's class before it imports anything."""
    for name, classes in _ADAPTERS.items():
        register(name, _attach_to(name, classes))


def _attach_to(name: str, classes: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    def attach(session: Any, target: Any, **options: Any) -> Any:
        if not any((cls.__module__, cls.__name__) in classes for cls in type(target).__mro__):
            return None
        return importlib.import_module(f"healthcheck.trainers.{name}").attach(target, session, **options)

    return attach
