"""A script or module as ``python`` would run it: ``__main__``, ``sys.argv``, ``sys.path``, its code.

Standard library only.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import CodeType, ModuleType
from typing import Any

from healthcheck.errors import UsageError


@dataclass(slots=True)
class Target:
    """What is to be run. ``as_module`` is ``python -m NAME``."""

    name: str
    argv: list[str]
    """Arguments of the script, without its name."""
    as_module: bool = False

    @property
    def shown(self) -> str:
        return f"-m {self.name}" if self.as_module else self.name

    def folder(self) -> str:
        """What ``python`` puts first on ``sys.path``."""
        if self.as_module:
            return os.getcwd()
        path = os.path.realpath(self.name)
        return path if os.path.isdir(path) else os.path.dirname(path)


class MainModule:
    """The interpreter's view of a program, put in place for one run.

    :meth:`restore` gives the former view back; the module itself is kept, for exit functions that
    still use its globals.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.module = ModuleType("__main__")
        self._before = (sys.argv, list(sys.path), sys.modules.get("__main__"), getattr(sys, "orig_argv", None))

    def enter(self) -> CodeType:
        """Set everything up and return the code to run.

        Raises ``UsageError`` for a target that cannot be run, ``SyntaxError`` for one with mistakes,
        and whatever the parent package of a module raises.
        """
        target = self.target
        sys.modules["__main__"] = self.module
        namespace = vars(self.module)
        namespace["__builtins__"] = sys.modules["builtins"]
        if sys.version_info < (3, 14):
            namespace["__annotations__"] = {}
        self._set_path()
        flags = ["-m", target.name] if target.as_module else [target.name]
        if hasattr(sys, "orig_argv"):
            sys.orig_argv = [sys.executable, *flags, *target.argv]
        if target.as_module:
            sys.argv = ["-m", *target.argv]
            spec, code = _module_code(target.name)
            sys.argv = [spec.origin or target.name, *target.argv]
            self._describe(spec.origin, spec.loader, spec, spec.parent)
            return code
        sys.argv = [target.name, *target.argv]
        path = Path(target.name)
        if path.is_dir() or path.suffix in (".zip", ".pyz"):
            sys.path[0] = os.path.abspath(target.name)
            spec, code = _main_inside(target.name)
            self._describe(spec.origin, spec.loader, spec, spec.parent)
            return code
        full = os.path.abspath(target.name)
        if path.suffix == ".pyc":
            compiled = SourcelessFileLoader("__main__", full)
            self._describe(full, compiled, None, None)
            found = compiled.get_code("__main__")
            assert found is not None, "a sourceless loader always has code"
            return found
        loader = SourceFileLoader("__main__", full)
        self._describe(full, loader, None, None)
        return _compile(full)

    def restore(self) -> None:
        argv, path, main, orig_argv = self._before
        sys.argv = argv
        sys.path[:] = path
        if main is not None:
            sys.modules["__main__"] = main
        if orig_argv is not None:
            sys.orig_argv = orig_argv

    def _set_path(self) -> None:
        if getattr(sys.flags, "safe_path", False):
            return
        first = self.target.folder()
        if sys.path:
            sys.path[0] = first
        else:
            sys.path.append(first)

    def _describe(self, file: str | None, loader: Any, spec: ModuleSpec | None, package: str | None) -> None:
        vars(self.module).update(
            __file__=file,
            __cached__=spec.cached if spec is not None else None,
            __doc__=None,
            __loader__=loader,
            __package__=package,
            __spec__=spec,
        )


def _compile(full: str) -> CodeType:
    with open(full, "rb") as file:
        source = file.read()
    return compile(source, full, "exec", dont_inherit=True)


def _module_code(name: str) -> tuple[ModuleSpec, CodeType]:
    """Spec and code of ``python -m name``; a package means its ``__main__``."""
    if name.startswith("."):
        raise UsageError(f"-m {name}: relative module names cannot be run; give the full name")
    parent = name.rpartition(".")[0]
    if parent:
        try:
            importlib.import_module(parent)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{parent}.".startswith(f"{error.name}."):
                raise
            raise UsageError(f"-m {name}: there is no module named {error.name}") from None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"-m {name}: {error}") from None
    if spec is None:
        hint = f"; did you mean -m {name[:-3]}?" if name.endswith(".py") else ""
        raise UsageError(f"-m {name}: there is no module of this name{hint}")
    if spec.submodule_search_locations is not None:
        if importlib.util.find_spec(f"{name}.__main__") is None:
            raise UsageError(f"-m {name}: this is a package without __main__.py")
        return _module_code(f"{name}.__main__")
    code = spec.loader.get_code(name) if spec.loader is not None and hasattr(spec.loader, "get_code") else None
    if code is None:
        raise UsageError(f"-m {name}: there is no Python code for this module")
    return spec, code


def _main_inside(path: str) -> tuple[ModuleSpec, CodeType]:
    """``__main__.py`` of a folder or a zip file."""
    importer = get_importer(os.path.abspath(path))
    spec = importer.find_spec("__main__") if importer is not None else None
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code("__main__") if loader is not None else None
    if spec is None or code is None:
        raise UsageError(f"{path}: there is no __main__.py in it")
    return spec, code
