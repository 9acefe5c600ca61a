"""``check_plugin(plugin)``: everything about a plugin that can be wrong before it runs."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from healthcheck.core.errors import HealthCheckError
from healthcheck.core.events import EventKind
from healthcheck.core.samples import Cost, Metric
from healthcheck.core.text import suggest
from healthcheck.extend import hookspecs
from healthcheck.extend.guard import describe
from healthcheck.extend.hookspecs import PREFIX, PROJECT
from healthcheck.extend.host import PluginHost, implementations_of
from healthcheck.instrument.collectives import FUNCTIONS
from healthcheck.run.plans import ROW_FACTS
from healthcheck.testing.conditioncheck import check_condition

_LOOP = {hookspecs.loop_hook(kind) for kind in EventKind}

REPORT_METHODS: dict[str, tuple[str, ...]] = {
    "start": ("session",),
    "samples": ("step", "samples"),
    "transition": ("transition",),
    "alert": ("alert",),
    "amended": ("alert",),
    "cleared": ("alert",),
    "acted": ("alert",),
    "note": ("text",),
    "finish": ("report",),
    "render": ("reports",),
}
"""Methods of a report and how many arguments each is called with."""


def check_plugin(plugin: Any, name: str | None = None) -> list[str]:
    """Compare a plugin with the hook specification and look at all that it registers.

    :param plugin: module, class or object, as an entry point would give it.
    :param name: the entry point's name; packs are called ``name:pack``.

    Returns one sentence for every mistake; a plugin that fits gives ``[]``. Looked at: names,
    marks, arguments and annotations of hooks; docstrings; schemas (draft-07); declared costs;
    signatures of probes, actions, reports and readers; rule packs, which must load; collectives, which a plugin must not call.
    """
    plugin = plugin() if isinstance(plugin, type) else plugin
    label = (
        name or getattr(plugin, "name", None) or getattr(plugin, "__name__", type(plugin).__name__).rpartition(".")[2]
    )
    problems = [text for hook, function in _hooks(plugin) for text in _check_hook(hook, function)]
    host = PluginHost(strict=True)
    host.load_builtins(_builtins())
    try:
        host.register(plugin, label)
    except HealthCheckError as error:
        refused = [line.strip() for line in str(error).splitlines()]
        return [*problems, *(line for line in refused if not any(known in line for known in problems))]
    except Exception as error:
        return [*problems, f"{label} raised while it registered: {describe(error)}"]
    if not any(info.hooks for info in host.infos if info.name == label):
        problems.append(f'"{label}" implements no hook; mark its functions with @healthcheck.hookimpl')
    return [*problems, *_check_registered(host, label), *_collectives(plugin)]


def _collectives(plugin: Any) -> Iterator[str]:
    """Calls at which a rank waits for all others: one that the plugin is not loaded on, or that is in another step, never comes."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plugin if inspect.ismodule(plugin) else type(plugin))))
    except (OSError, TypeError, SyntaxError):  # written in a terminal, or not in Python
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value).rpartition(".")[2]
        if node.func.attr in (*FUNCTIONS, "new_group") and owner in ("dist", "distributed", "distributed_c10d"):
            yield (
                f"it calls {ast.unparse(node.func)}: ranks need not be in the same step when a plugin is called, and would wait for "
                "each other for ever; use event.run.ranks"
            )


def _builtins() -> list[Any]:
    from healthcheck.assembly import BUILTINS

    return [importlib.import_module(name) for name in BUILTINS]


def _hooks(plugin: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    known = {n for n in vars(hookspecs) if n.startswith(PREFIX)}
    for hook, function in implementations_of(plugin):
        if hook in known:
            yield hook, function


def _check_hook(hook: str, function: Callable[..., Any]) -> Iterator[str]:
    spec = inspect.signature(getattr(hookspecs, hook))
    own = inspect.signature(function)
    options = getattr(function, f"{PROJECT}_impl")
    if hook in _LOOP and (options.get("wrapper") or options.get("hookwrapper")):
        yield f"{hook}: loop hooks cannot be wrappers"
    for parameter in own.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield f"{hook}: *args and **kwargs get nothing; name the arguments: {', '.join(spec.parameters)}"
            continue
        expected = spec.parameters.get(parameter.name)
        if expected is None:
            hint = suggest(parameter.name, spec.parameters)
            yield f'{hook} has no argument "{parameter.name}"; {hint + " " if hint else ""}it has {", ".join(spec.parameters)}'
        elif not _same(parameter.annotation, expected.annotation):
            yield f"{hook}: {parameter.name} is annotated {_bare(parameter.annotation)}, it is {_bare(expected.annotation)}"
    if not _same(own.return_annotation, spec.return_annotation):
        yield f"{hook} returns nothing, but is annotated -> {_bare(own.return_annotation)}"


def _same(own: Any, expected: Any) -> bool:
    """Whether two annotations mean the same, as far as their last names tell; none at all is fine."""
    if own is inspect.Parameter.empty or "Any" in _bare(own).replace("[", " ").split() or _bare(own) == "object":
        return True
    return _bare(own) == _bare(expected)


def _bare(annotation: Any) -> str:
    """``Callable[[Probe], None]`` without module names and quotes."""
    import re

    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    if not isinstance(annotation, str) and getattr(annotation, "__args__", None):
        text = str(annotation)
    text = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=\w)", "", text)
    return re.sub(r"[\s'\"]", "", text.replace("NoneType", "None"))


# --------------------------------------------------------------------------- what it registered


def _check_registered(host: PluginHost, owner: str) -> Iterator[str]:
    registry, found = host.registry, host.registry.of(owner)
    for name in found.get("probes", ()):
        yield from _check_probe(name, registry.probes[name])
    for name in found.get("conditions", ()):
        condition = registry.conditions[name]
        if not condition.help:
            yield f'condition "{name}" has no help; say in one sentence when it fires'
        unfit = [*_schema(f'condition "{name}"', condition.schema)]
        unfit += _takes(f'condition "{name}": compile', condition.compile, 2)
        yield from unfit or check_condition(condition)
    for name in found.get("actions", ()):
        action = registry.actions[name]
        yield from _documented(f'action "{name}"', action)
        yield from _schema(f'action "{name}"', getattr(action, "options_schema", None))
        yield from _takes(f'action "{name}": run', getattr(action, "run", None), 2)
    for name in found.get("reports", ()):
        yield from _documented(f'report "{name}"', registry.reports[name])
        yield from _check_report(name, registry.reports[name])
    for name in found.get("readers", ()):
        reader = registry.readers[name]
        if not getattr(reader, "help", ""):
            yield f'reader "{name}" has no help; say which files it reads'
        yield from _check_reader(name, reader)
    for name in found.get("packs", ()):
        yield from _check_pack(host, name)
    for name in found.get("settings", ()):
        yield from _check_setting(registry.settings[name])


def _check_probe(name: str, probe: Any) -> Iterator[str]:
    what = f'probe "{name}"'
    yield from _documented(what, probe)
    yield from _takes(f"{what}: sample", getattr(probe, "sample", None), 2)
    wrong = [kind for kind in probe.listens_to if kind not in set(EventKind)]
    if wrong or not probe.listens_to:
        yield f"{what}: listens_to must hold members of EventKind, not {wrong or 'nothing'}"
    yield from _optional(what, probe)
    source = _source(type(probe))
    provided: list[Any] = list(probe.provides)  # an author's, not yet checked
    for metric in provided:
        if not isinstance(metric, Metric):
            yield f"{what}: provides holds {metric!r}, which is not a healthcheck.Metric"
            continue
        if not metric.help:
            yield f'{what}: metric "{metric.name}" has no help'
        declared: Any = metric.cost
        if not isinstance(declared, Cost):
            yield f'{what}: metric "{metric.name}" has cost {metric.cost!r}, which is not a healthcheck.Cost'
        elif metric.cost in (Cost.FREE, Cost.HOST) and "torch" in source:
            yield f'{what}: metric "{metric.name}" declares cost {metric.cost.value}, but works with torch; declare Cost.DEVICE'
        elif metric.cost is not Cost.SYNC and any(call in source for call in (".item()", ".tolist()", ".cpu()")):
            yield (
                f'{what}: metric "{metric.name}" declares cost {metric.cost.value}, but moves values to the host; '
                "yield the tensor as it is, or declare Cost.SYNC"
            )


def _optional(what: str, probe: Any) -> Iterator[str]:
    """What a probe may have besides, and only in the right form."""
    optional = (("plan", 1), ("close", 0), ("state_dict", 0), ("load_state_dict", 1), ("reason_without", 1))
    for method, count in optional:
        if hasattr(probe, method):
            yield from _takes(f"{what}: {method}", getattr(probe, method), count)
    if hasattr(probe, "state_dict") != hasattr(probe, "load_state_dict"):
        have, lack = ("state_dict", "load_state_dict")[:: 1 if hasattr(probe, "state_dict") else -1]
        yield f"{what} has {have} but no {lack}: a resumed run does not go on with its counters"
    for name in ("only_when_due", "answers_once"):
        unheard = [kind for kind in getattr(probe, name, ()) if kind not in probe.listens_to]
        if unheard:
            yield f"{what}: {name} holds {unheard[0]}, to which it does not listen"
    needed = getattr(probe, "rows_with", "")
    if needed and needed not in ROW_FACTS:
        hint = suggest(needed, sorted(ROW_FACTS))
        yield f'{what}: rows_with is "{needed}", which no row has{f"; {hint}" if hint else ""}'
    given = {metric.key for metric in probe.provides if isinstance(metric, Metric)}
    unknown = sorted(set(getattr(probe, "stretchable", ())) - given)
    if unknown:
        yield f'{what}: stretchable holds "{unknown[0]}", which it does not provide'


def _check_reader(name: str, reader: Any) -> Iterator[str]:
    what = f'reader "{name}"'
    unfit = [*_takes(f"{what}: recognises", reader.recognises, 2), *_takes(f"{what}: read", reader.read, 2)]
    yield from unfit
    if unfit:
        return
    for said, head in (("an empty head, as of a folder", b""), ("bytes of another format", bytes(range(256)))):
        try:
            sure = reader.recognises(Path("run.log"), head)
        except Exception as error:
            yield f"{what}: recognises raised {type(error).__name__} for {said}: no recorded run could be looked at"
            return
        if not isinstance(sure, (int, float)) or not 0.0 <= sure <= 1.0:
            yield f"{what}: recognises must answer how sure it is, from 0.0 to 1.0; for {said} it answers {sure!r}"
            return


def _check_report(name: str, report: Any) -> Iterator[str]:
    methods = [method for method in REPORT_METHODS if callable(getattr(report, method, None))]
    if not methods:
        yield f'report "{name}" has none of the methods {", ".join(REPORT_METHODS)}'
    for method in vars(type(report)):
        meant = difflib.get_close_matches(method.removeprefix("on_"), REPORT_METHODS, n=1, cutoff=0.8)
        if meant and method not in REPORT_METHODS and callable(getattr(report, method)):
            yield f'report "{name}" has a method {method}, which is never called; did you mean "{meant[0]}"?'
    for method in methods:
        yield from _takes(f'report "{name}": {method}', getattr(report, method), len(REPORT_METHODS[method]))


def _check_pack(host: PluginHost, name: str) -> Iterator[str]:
    from healthcheck.assembly import load_rules_for

    try:
        load_rules_for(host=host, rules=name)
    except HealthCheckError as error:
        yield f'rule pack "{name}": {error}'


def _check_setting(setting: Any) -> Iterator[str]:
    what = f'setting "{setting.name}"'
    if not setting.help:
        yield f"{what} has no help; say in one sentence what it changes"
    yield from _schema(what, setting.schema)
    yield from _takes(f"{what}: parse", setting.parse, 1)


def _schema(what: str, schema: Any) -> Iterator[str]:
    from jsonschema import Draft7Validator, SchemaError

    if schema is None:
        yield f"{what} has no schema of its options"
        return
    try:
        Draft7Validator.check_schema(schema)
    except SchemaError as error:
        yield f"{what}: its schema is not a draft-07 schema: {error.message}"


def _documented(what: str, thing: Any) -> Iterator[str]:
    if not inspect.cleandoc(type(thing).__doc__ or ""):
        yield f"{what}: its class has no docstring; `healthcheck` shows it to people"


def _takes(what: str, function: Any, count: int) -> Iterator[str]:
    """Whether a function can be called with so many positional arguments."""
    if not callable(function):
        yield f"{what} is missing"
        return
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        yield f"{what} must take {count} argument{'s' if count > 1 else ''}, it is {inspect.signature(function)}"
    except ValueError:
        return  # a builtin without a signature


def _source(kind: type) -> str:
    try:
        return textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return ""
