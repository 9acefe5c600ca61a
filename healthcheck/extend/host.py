"""Loading plugins safely: built-ins, entry points, local files. One host per session.

A plugin that cannot be loaded is one clear warning, never an ended run (``strict`` turns it into
a :class:`~healthcheck.core.errors.PluginError`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from healthcheck.core.errors import PluginError, UsageError
from healthcheck.core.text import suggest
from healthcheck.extend import hookspecs
from healthcheck.extend.guard import calls_foreign, describe, passes_on, place_of
from healthcheck.extend.hookspecs import PREFIX, PROJECT
from healthcheck.extend.registry import BUILTIN, Registry

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "healthcheck"
DISABLE_VARIABLE = "HEALTHCHECK_DISABLE_PLUGINS"
"""Comma-separated plugin names, or ``all``: neither installed nor configured plugins, only those of ``-p``."""
TRACE_VARIABLE = "HEALTHCHECK_TRACE"

_REGISTRATION = ("settings", "probes", "conditions", "actions", "reports", "readers", "rulepacks", "trainers")


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One loaded plugin, as ``healthcheck plugins`` shows it."""

    name: str
    source: str
    """``built in``, ``entry point of acme-health 1.2``, or the path of a local file."""
    plugin: object
    hooks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """One plugin that was not loaded, and why."""

    name: str
    source: str
    reason: str
    hook: str = "load"
    """The registration hook that raised, where it was one of the last two: ``configure``, ``modify_rules``."""

    def __str__(self) -> str:
        return f'plugin "{self.name}" ({self.source}) was not loaded: {self.reason}'


def disabled_plugins() -> set[str]:
    """Names in ``HEALTHCHECK_DISABLE_PLUGINS``; ``all`` stands for every plugin that ``-p`` does not name."""
    return {name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()}


def plugin_name(where: str) -> str:
    """What a local plugin is called: the stem of a file, the name of a module."""
    return Path(where).stem if where.endswith(".py") else where


class _Manager(pluggy.PluginManager):
    """Asks only functions with our prefix whether they are hooks: a module has a hundred other names."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return super().parse_hookimpl_opts(plugin, name) if name.startswith(PREFIX) else None


class PluginHost:
    """The plugins of one session and all that they registered."""

    def __init__(self, *, strict: bool = False) -> None:
        self.manager = _Manager(PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self.registry = Registry()
        self.infos: list[PluginInfo] = []
        self.failures: list[PluginFailure] = []
        self.strict = strict
        if os.environ.get(TRACE_VARIABLE, "") not in ("", "0"):
            self.manager.trace.root.setwriter(lambda text: print(text, end="", file=sys.stderr))
            self.manager.enable_tracing()

    # -- loading ----------------------------------------------------------------------

    def load_builtins(self, plugins: Iterable[object]) -> None:
        """Register the built-ins. They use the same hooks as everybody; errors here are ours."""
        for plugin in plugins:
            self._register(plugin, BUILTIN, "built in", label=getattr(plugin, "__name__", type(plugin).__name__))

    def load_entry_points(self) -> None:
        """Load the installed distributions that announce themselves in group ``healthcheck``."""
        disabled = disabled_plugins()
        if "all" in disabled:
            return
        for point in _installed(tuple((entry, _identity(entry)) for entry in sys.path)):
            if point.name in disabled:
                continue
            dist = point.dist
            source = f"entry point of {dist.name} {dist.version}" if dist is not None else "entry point"
            self._load(point.name, source, point.load)

    def load_local(self, where: str) -> None:
        """Load a plugin from a file (``tools/health.py``) or an importable module (``pkg.health``)."""
        path = Path(where)
        if where.endswith(".py") or path.is_file():
            self._load(path.stem, str(path), lambda: _import_file(path))
        else:
            self._load(where, "module", lambda: _import_module(where))

    def register(self, plugin: object, name: str | None = None) -> str:
        """Register an object as a plugin; returns its name.

        Raises ``PluginError`` when it does not fit the hook specification.
        """
        if isinstance(plugin, type):
            plugin = plugin()
        label = name or getattr(plugin, "name", None) or getattr(plugin, "__name__", None) or type(plugin).__name__
        self._register(plugin, str(label), "registered in code", label=str(label))
        return str(label)

    def _load(self, name: str, source: str, load: Callable[[], Any]) -> None:
        try:
            if name == BUILTIN:
                raise PluginError(f'the name "{BUILTIN}" is reserved')
            plugin = load()
            if isinstance(plugin, type):
                plugin = plugin()
            self._register(plugin, name, source, label=name)
        except BaseException as error:
            if passes_on(error):
                raise
            if not any(
                info.name == name for info in self.infos
            ):  # else it is another plugin of that name that has them
                self.registry.remove_owner(name)
            self._not_loaded(PluginFailure(name, source, _reason(error)), error)

    def _not_loaded(self, failure: PluginFailure, error: BaseException) -> None:
        if self.strict:
            raise PluginError(str(failure)) from error
        self.failures.append(failure)

    # -- trainers ---------------------------------------------------------------------

    def attach(
        self, session: Any, target: Any, options: Mapping[str, Any], failed: Callable[[str, BaseException], None]
    ) -> Any:
        """The adapter of whoever knows this object; ``failed`` hears of plugins that raise.

        Raises ``UsageError`` for an object that no loaded plugin knows.
        """
        trainers = self.registry.trainers
        for name, attach in trainers.items():
            owner = self.registry.owners[("trainers", name)]
            try:
                adapter = attach(session, target, **options)
            except BaseException as error:
                # Of our own it says what is wrong with the object, and so does a usage error of anybody.
                if owner == BUILTIN or isinstance(error, UsageError):
                    raise
                failed(owner, error)
                continue
            if adapter is not None:
                return adapter
        known = "; ".join(str(getattr(attach, "takes", name)) for name, attach in trainers.items()) or "nothing"
        given = f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
        raise UsageError(
            f"attach() cannot watch {given}; it takes an object: {known}. "
            "A model and its optimizers are given to healthcheck.watch()"
        )

    # -- the hooks that see a session ---------------------------------------------------

    def modify_rules(self, rules: list[Any]) -> None:
        """Let plugins change compiled rules in place. Those of one that raises, or leaves other things, are as before."""
        for info in self._last_first("modify_rules"):
            before = list(rules)
            failed = self._call(info, "modify_rules", {"rules": rules})
            strange = next((item for item in rules if not hasattr(item, "causes")), None)
            if failed is None and strange is not None:
                failed = PluginError(f"it left a {type(strange).__name__} among the rules")
            if failed is not None:
                rules[:] = before
                self._unload(info, "modify_rules", failed)

    def configure(self, session: Any, *, only: str = "") -> None:
        """Tell plugins that a session is ready; one that raises is not loaded.

        :param only: the name of a plugin that came later.
        """
        for info in self._last_first("configure"):
            if not only or info.name == only:
                failed = self._call(info, "configure", {"session": session})
                if failed is not None:
                    self._unload(info, "configure", failed)

    def _last_first(self, hook: str) -> list[PluginInfo]:
        """Plugins with that hook in the order of pluggy."""
        listening = [info for info in reversed(self.infos) if hook in info.hooks]
        return sorted(listening, key=lambda info: _rank(_implementation(info.plugin, hook)))

    @calls_foreign(lambda of: (of["info"].name, of["hook"]))
    def _call(self, info: PluginInfo, hook: str, given: dict[str, Any]) -> BaseException | None:
        """Call one hook of one plugin; returns what it raised."""
        # One by one and not through pluggy, where one that raises silences the rest and nobody knows which it was.
        self.manager.trace(f"{PREFIX}{hook}", info.name)
        function = _implementation(info.plugin, hook)
        taken = inspect.signature(function).parameters
        try:
            function(**{name: value for name, value in given.items() if name in taken})
        except BaseException as error:
            if passes_on(error) or info.source == "built in":
                raise
            return error
        return None

    def _unload(self, info: PluginInfo, hook: str, error: BaseException) -> None:
        """Take a plugin back that was loaded, with all that it registered."""
        self.registry.remove_owner(info.name)
        self.infos.remove(info)
        self.manager.unregister(info.plugin)
        self._not_loaded(PluginFailure(info.name, info.source, _reason(error, f" in {hook}"), hook), error)

    def _register(self, plugin: object, owner: str, source: str, *, label: str) -> None:
        if owner != BUILTIN and any(info.name == label for info in self.infos):
            raise PluginError(f'a plugin called "{label}" is loaded already')
        # pluggy ignores what it does not know; a hook with a typo would be a plugin that does nothing, silently.
        implementations = list(implementations_of(plugin))
        _refuse_unknown(plugin, implementations, label)
        self.manager.register(plugin, label)
        try:
            # Called here and not through pluggy, so that each registration knows whose it is.
            for kind in _REGISTRATION:
                for name, function in implementations:
                    if name == f"{PREFIX}register_{kind}":
                        function(self.registry.adder(kind, owner))
            for name, function in implementations:
                if name == f"{PREFIX}add_commands":
                    function(self.registry.adder("commands", owner))
        except BaseException:
            self.manager.unregister(plugin)
            raise
        hooks = tuple(name.removeprefix(PREFIX) for name, _ in implementations)
        self.infos.append(PluginInfo(label, source, plugin, hooks))


def _implementation(plugin: object, hook: str) -> Callable[..., Any]:
    return next(function for name, function in implementations_of(plugin) if name == PREFIX + hook)


def _options(function: Callable[..., Any]) -> dict[str, Any]:
    """What the mark ``@healthcheck.hookimpl(...)`` says."""
    return dict(getattr(function, f"{PROJECT}_impl", None) or {})


def _rank(function: Callable[..., Any]) -> int:
    options = _options(function)
    return 0 if options.get("tryfirst") else 2 if options.get("trylast") else 1


def _reason(error: BaseException, where: str = "") -> str:
    if isinstance(error, PluginError):
        return f"{error}{where}"
    # A syntax error names its own place.
    return describe(error) if isinstance(error, SyntaxError) else f"{describe(error)}{where} ({place_of(error)})"


@lru_cache(maxsize=1)
def _installed(search_path: tuple[tuple[str, object], ...]) -> list[EntryPoint]:
    """Entry points of our group by name: the order in which pip installed them says nothing.

    Looking through a hundred distributions takes most of the time that a session needs to open, so a process that
    opens several looks again only when the search path, or a folder of it, has changed.
    """
    from importlib.metadata import entry_points

    return sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)


def _identity(entry: str) -> object:
    """Changes when something is installed into a folder of the search path."""
    try:
        found = os.stat(entry or ".")
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def implementations_of(plugin: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Hook implementations of a plugin, in the order in which it defines them."""
    holder = plugin if isinstance(plugin, ModuleType) else type(plugin)
    names = (
        [n for base in reversed(inspect.getmro(holder)) for n in vars(base)]
        if isinstance(holder, type)
        else list(vars(holder))
    )
    for name in dict.fromkeys([*names, *getattr(plugin, "__dict__", {})]):
        if name.startswith(PREFIX):
            function = getattr(plugin, name, None)
            if callable(function) and getattr(function, f"{PROJECT}_impl", None) is not None:
                yield name, function


def _refuse_unknown(plugin: object, implementations: list[tuple[str, Callable[..., Any]]], label: str) -> None:
    known = {name for name in vars(hookspecs) if name.startswith(PREFIX)}
    marked = {name for name, _ in implementations}
    wrong = [
        f'"{label}" implements "{name}", which is not a hook; {suggest(name, known) or "see docs"}'
        for name, _ in implementations
        if name not in known
    ]
    for name, function in implementations:
        if name in known:
            wrong += _unknown_arguments(name, function, label)
        if _options(function).get("wrapper") or _options(function).get("hookwrapper"):
            wrong.append(
                f'"{label}": {name} is a wrapper; hooks are called one by one, so that there is nothing to wrap'
            )
    wrong += [
        f'"{label}" defines "{name}" without @healthcheck.hookimpl; add the mark'
        for name in dir(plugin)
        if name in known and name not in marked and callable(getattr(plugin, name))
    ]
    if wrong:
        raise PluginError("\n  ".join(wrong))


def _unknown_arguments(hook: str, function: Callable[..., Any], label: str) -> Iterator[str]:
    offered = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    for parameter in inspect.signature(function).parameters.values():
        is_plain = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_plain and parameter.default is parameter.empty and parameter.name not in offered:
            hint = suggest(parameter.name, offered)
            yield f'"{label}": {hook} has no argument "{parameter.name}"; {hint + " " if hint else ""}it has {", ".join(offered)}'


def _import_module(name: str) -> ModuleType:
    """A module that was named: here the working directory counts too, behind all that is installed."""
    here = os.getcwd()
    sys.path.append(here)
    try:
        return importlib.import_module(name)
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = suggest(path.name, [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else [])
        raise PluginError(f"no such file: {path}{'; ' if near else ''}{near}")
    name = f"healthcheck_local_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
