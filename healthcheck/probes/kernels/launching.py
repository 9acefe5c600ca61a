"""Launching a Triton kernel that is compiled already, past the dispatch over types, alignments and settings.

That dispatch costs the host several times what the launch does, at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def direct_launch(compiled: Any, programs: int) -> Callable[..., None] | None:
    """A function ``launch(stream, *arguments)`` for a compiled kernel on so many programs.

    Arguments are all those of the kernel in order, tensors as addresses, constants included; ``stream`` is the
    raw handle. None where this Triton is not known to take it so. Profilers that hook into Triton's launcher do
    not see these launches.
    """
    import triton

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version == (3, 6) and all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
        compiled._init_handles()
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

        def launch(stream: int, *arguments: Any) -> None:
            run(programs, 1, 1, stream, function, packed, None, None, None, *arguments)

        return launch
    if version > (3, 6) and hasattr(type(compiled), "__getitem__"):
        runner = compiled[(programs, 1, 1)]
        return lambda stream, *arguments: runner(*arguments, stream=stream)
    return None
