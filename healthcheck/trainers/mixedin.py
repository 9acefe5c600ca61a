"""A mixin for an object that exists already: what a subclass would have done from the beginning."""

from __future__ import annotations

import types
from typing import Any


def mix_in(mixin: type, target: Any) -> None:
    """Give ``target`` the methods of ``mixin``, in front of those of its own class.

    Its class becomes a new one of the same name, ``class Own(mixin, Own)``; other objects of the old
    class stay as they are. Does nothing where the mixin is there already.
    """
    kind = type(target)
    if issubclass(kind, mixin):
        return
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    mixed = types.new_class(kind.__name__, (mixin, kind), exec_body=lambda space: space.update(named))
    object.__setattr__(target, "__class__", mixed)  # classes that keep track of what is set need not see this
