"""A stand-in for matplotlib: it draws nothing."""

import sys
import types
from typing import Any


class Nothing(types.ModuleType):
    """Takes every call, and has every attribute."""

    __path__: list[str] = []  # noqa: RUF012
    __file__ = __file__

    def __getattr__(self, name: str) -> Any:
        return Nothing(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Nothing("nothing")

    def __iter__(self) -> Any:
        return iter((Nothing("one"), Nothing("two")))

    def __getitem__(self, key: Any) -> Any:
        return Nothing("item")

    def __setitem__(self, key: Any, value: Any) -> None: ...


for name in ("pyplot", "cm", "ticker", "gridspec", "animation"):
    sys.modules[f"matplotlib.{name}"] = Nothing(name)
    globals()[name] = sys.modules[f"matplotlib.{name}"]


def use(*args: Any) -> None: ...
