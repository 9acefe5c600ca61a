"""Whether the main thread waits for a person, and whether this process may be ended from another thread."""

from __future__ import annotations

import os
import sys
from types import FrameType

_DEBUGGERS = ("bdb", "pdb", "ipdb", "pudb", "pydevd", "debugpy", "_pydevd_bundle", "remote_pdb", "web_pdb")
_PROMPTS = {
    ("code", "raw_input"),
    ("cmd", "cmdloop"),
    ("_pyrepl", ""),
    ("prompt_toolkit", ""),
    ("IPython", "prompt_for_code"),
    ("IPython", "raw_input"),
    ("ptpython", ""),
    ("bpython", ""),
    ("ipykernel", "raw_input"),
    ("ipykernel", "_input_request"),
}
"""(package, function) that wait for someone to type; an empty function means all of the package."""
_EXECUTING = {("IPython", "run_code"), ("code", "runcode")}
"""Frames of a shell that runs somebody's code at this moment: what is inside is training, not typing."""


def waits_for_a_person(frame: FrameType | None) -> bool:
    """True if the main thread stands in a debugger, ``breakpoint()``, or at an interactive prompt.

    :param frame: the innermost frame of the main thread; None if it runs no Python code.
    """
    if frame is None:
        return hasattr(sys, "ps1")  # the plain prompt waits in C
    shell_waits = False
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".")[0]
        function = frame.f_code.co_name
        if package in _DEBUGGERS or _traced_by_debugger(frame):
            return True
        if not shell_waits:
            if _listed(_EXECUTING, package, function):
                return _debugger_outside(frame.f_back)
            if _listed(_PROMPTS, package, function):
                return True
        if package == "ipykernel":
            shell_waits = True  # no cell runs: the kernel waits for the next one
        frame = frame.f_back
    return shell_waits


def _debugger_outside(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).split(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


# Between two stops of a debugger none of its frames need be on the stack; its trace function is.
def _traced_by_debugger(frame: FrameType) -> bool:
    """A debugger set its trace function on this frame (coverage tools do as well, and do not count)."""
    owner = getattr(frame.f_trace, "__self__", None)
    module = type(owner).__module__ if owner is not None else getattr(frame.f_trace, "__module__", "")
    return str(module).split(".")[0] in _DEBUGGERS


def _listed(table: set[tuple[str, str]], package: str, function: str) -> bool:
    return (package, function) in table or (package, "") in table


def no_exit_here() -> str:
    """Why this process must not be ended by ``os._exit``, in words; empty if it may."""
    if "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:  # children inherit the variable only
        return "a test run"
    shell = sys.modules.get("IPython")
    if shell is not None and getattr(shell, "get_ipython", lambda: None)() is not None:
        return "a notebook or an interactive shell"
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "an interactive shell"
    return ""
