"""The composition root: the only module that names everybody.

Plugins, rules, mailbox, run folder and reports are put together here, and nowhere else. Torch is
not imported by anything in this module until a run needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from healthcheck.core.runinfo import RunInfo
from healthcheck.core.text import visible
from healthcheck.extend.host import PluginHost, disabled_plugins, plugin_name
from healthcheck.rulelang.accepted import find_accepted, load_accepted
from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.discover import Discovery, configured_plugins, discover
from healthcheck.rulelang.rule import Origin, RuleSet
from healthcheck.rulelang.settings import resolve
from healthcheck.rulelang.sources import Joining
from healthcheck.run.opening import SessionOptions
from healthcheck.run.session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack

BUILTINS = (
    "healthcheck.rulelang.conditions",
    "healthcheck.probes",
    "healthcheck.actions",
    "healthcheck.trainers",
    "healthcheck.reports",
    "healthcheck.readers",
)
"""Modules with the built-in hook implementations. An explicit tuple, so that switching plugin
autoload off cannot remove ``stop``."""


RUN_OPTIONS = ("max_steps", "max_time", "verbosity", "live")
"""Settings of one run only: they come from the command line or from code, never from a file."""


def plugin_host(local: Iterable[str] = (), *, strict: bool = False) -> PluginHost:
    """Load built-ins, installed plugins and local ones. Needs no torch.

    :param local: files or modules (``-p``).
    :param strict: raise ``PluginError`` instead of collecting failures.
    """
    host = PluginHost(strict=strict)
    host.load_builtins(importlib.import_module(name) for name in BUILTINS)
    host.load_entry_points()
    for where in local:
        host.load_local(where)
    return host


def running_host(given: Iterable[str] = (), *, strict: bool = False) -> PluginHost:
    """The plugins of what runs code of this folder anyway: ``run``, ``watch()``, rule tests and watched tests.

    Beside installed plugins those that ``[tool.healthcheck]`` of the nearest ``pyproject.toml`` names, whichever file
    the rules are in. Commands that read use :func:`plugin_host`, which runs nothing that lies around.

    :param given: named by whoever runs (``-p``): they count, whatever ``HEALTHCHECK_DISABLE_PLUGINS`` says.
    """
    given = list(given)
    return plugin_host([*not_loaded_for_reading(given), *given], strict=strict)


def not_loaded_for_reading(given: Iterable[str] = ()) -> list[str]:
    """Configured plugins, less those that are switched off or named anyway."""
    disabled, named = disabled_plugins(), {plugin_name(where) for where in given}
    if "all" in disabled:
        return []
    return [where for where in configured_plugins() if plugin_name(where) not in disabled | named]


class RuleChoice(TypedDict, total=False):
    """Which rules, and what the command line or code changes of them; every key may be missing."""

    rules: Any
    """Path, pack name, YAML text or dict, or a list of these, or what ``discover`` found; None discovers the
    nearest ``healthcheck.yaml``, then ``[tool.healthcheck]``, then the recommended pack."""
    profile: str | None
    off: Sequence[str]
    only: Sequence[str]
    set: Sequence[str]
    """``RULE.KEY=VALUE``."""
    mute: Sequence[str]
    """``RULE@A..B``."""
    force: bool
    """Lets ``mute`` name rules for NaN."""


def load_rules_for(
    *,
    host: PluginHost,
    settings: Mapping[str, Any] | None = None,
    notes: list[str] | None = None,
    joining: Sequence[Joining] = (),
    **choice: Unpack[RuleChoice],
) -> RuleSet:
    """Find, read, merge and compile the chosen rules.

    :param settings: what the command line said; beats environment, file and pack.
    :param notes: sentences worth saying once are appended here.
    :param joining: layers over the chosen rules; see :mod:`healthcheck.run.joining`.

    Raises ``RuleFileError`` with all problems of all files.
    """
    rules = choice.get("rules")
    found = rules if isinstance(rules, Discovery) else discover(rules)
    if notes is not None:
        notes.extend(found.notes)
    ruleset = load_rules(
        found.sources,
        registry=host.registry,
        profile=choice.get("profile"),
        off=choice.get("off", ()),
        only=choice.get("only", ()),
        set=choice.get("set", ()),
        mute=choice.get("mute", ()),
        force=choice.get("force", False),
        joining=joining,
    )
    ruleset.source = found.label
    given = {name: value for name, value in (settings or {}).items() if name not in RUN_OPTIONS}
    written = {**ruleset.settings, **found.settings, **found.plugin_settings(host.registry.settings)}
    origins = {**ruleset.setting_origins, **found.setting_origins}
    resolved = resolve(written, origins, os.environ, given, host.registry.settings)
    ruleset.settings = {**resolved.values, **{name: v for name, v in (settings or {}).items() if name in RUN_OPTIONS}}
    ruleset.setting_origins = {name: Origin(came) for name, came in resolved.origins.items() if came != "default"}
    return ruleset


def open_session(options: SessionOptions | None = None, *, target: str = "", **words: Any) -> Session:
    """Open a session for one run. Adapters bind their controls to it and emit events.

    :param options: all that may be said of the run.
    :param target: instead of ``options``, with ``words``: its name, and what else :class:`SessionOptions` has.

    Raises ``UsageError`` (``RuleFileError`` with all problems) before anything is run.
    """
    from healthcheck.device.device_time import DeviceTime
    from healthcheck.device.mailbox import StepMailbox
    from healthcheck.record.folder import job_size, process_rank
    from healthcheck.reports.files import kinds_of, parse_reports

    given = options if options is not None else SessionOptions(name=target, **words)
    notes: list[str] = []
    found = discover(given.rules)
    host = running_host(given.plugins, strict=given.strict_plugins)

    def load(chosen: SessionOptions, joining: Sequence[Joining], notes: list[str] | None = None) -> RuleSet:
        return load_rules_for(
            host=host,
            settings=given.all_settings(),
            notes=notes,
            joining=joining,
            rules=found,
            profile=chosen.profile,
            off=chosen.off,
            only=chosen.only,
            set=chosen.set,
            mute=chosen.mute,
            force=chosen.force,
        )

    ruleset = load(given, (), notes)
    notes.extend(str(failure) for failure in host.failures)
    parse_reports(ruleset.settings.get("report"), kinds_of(host.registry.reports))  # mistakes before anything runs
    if not given.console:
        ruleset.settings["verbosity"] = -2
    run_dir, voice = _record_of(given, ruleset.settings, notes)
    info = RunInfo(
        target=given.name,
        run_dir=run_dir,
        rank=process_rank(),
        voice=voice,
        world_size=job_size(),
        argv=list(given.argv),
        notes=notes,
    )
    known = find_accepted(Path.cwd())
    session = Session(
        ruleset,
        host,
        mailbox=StepMailbox(),
        info=info,
        clock=given.clock,
        extra_metrics=tuple(given.metrics),
        accepted=load_accepted(known) if known is not None else None,
        say=_say if given.console else None,
        device_time=DeviceTime(),
    )
    session.layers.load, session.layers.opened_with = load, given
    for callback in given.callbacks:
        session.register(callback)
    return session


def _record_of(given: SessionOptions, settings: Mapping[str, Any], notes: list[str]) -> tuple[Path | None, bool | None]:
    from healthcheck.record.folder import open_run_dir

    if isinstance(given.record, Path):
        given.record.mkdir(mode=0o700, parents=True, exist_ok=True)
        return given.record, None
    if not given.record:
        return None, None
    return open_run_dir(given.name, settings, notes, rank_zero_comes=given.rank_zero_comes)


def _say(text: str) -> None:
    """One line on stderr; a closed stderr is nobody's problem here."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(visible(text) + "\n")
