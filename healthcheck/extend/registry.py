"""What plugins have registered: probes, conditions, actions, reports, readers, packs, commands.

Names are unique; built-in names are reserved. Registration is a cold path: mistakes raise
:class:`~healthcheck.core.errors.PluginError` and the plugin is not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from healthcheck.core.errors import PluginError
from healthcheck.core.events import EventKind
from healthcheck.core.protocols import Action, ConditionType, Probe, Reader, Report
from healthcheck.core.samples import Metric

T = TypeVar("T")

BUILTIN = "healthcheck"
"""Owner of everything that ships in this distribution."""


_NEEDED = {
    "probes": ("name", "listens_to", "provides", "sample"),
    "conditions": ("name", "schema", "compile"),
    "actions": ("name", "stage", "run"),
    "reports": ("name",),
    "readers": ("name", "recognises", "read"),
}
_EXAMPLES = {
    "listens_to": "listens_to = (EventKind.AFTER_UPDATE,)",
    "provides": 'provides = (Metric("mine.value", help="..."),)',
}


@dataclass(frozen=True, slots=True)
class PluginSetting:
    """A key of ``settings:`` that a plugin has added."""

    schema: Mapping[str, Any]
    help: str


@dataclass(slots=True)
class Registry:
    """All that is registered, each with its owner (the plugin's name)."""

    probes: dict[str, Probe] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    """By :attr:`Metric.key`."""
    metric_probe: dict[str, Probe] = field(default_factory=dict)
    conditions: dict[str, ConditionType] = field(default_factory=dict)
    actions: dict[str, Action] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    readers: dict[str, Reader] = field(default_factory=dict)
    packs: dict[str, str] = field(default_factory=dict)
    """``owner:name`` -> path."""
    settings: dict[str, PluginSetting] = field(default_factory=dict)
    trainers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    commands: dict[str, tuple[str, Callable[[list[str]], int]]] = field(default_factory=dict)
    owners: dict[tuple[str, str], str] = field(default_factory=dict)
    """``(kind, name)`` -> owner."""

    def adder(self, kind: str, owner: str) -> Callable[..., None]:
        """The ``register`` callback that a registration hook of ``owner`` is given."""

        def register(*given: Any) -> None:
            if isinstance(given[0], type):
                raise PluginError(f"{owner}: register an object, not a class: register({given[0].__name__}())")
            for needed in _NEEDED.get(kind, ()):
                if not hasattr(given[0], needed):
                    what = kind[:-1]
                    article = "an" if what == "action" else "a"
                    raise PluginError(
                        f'{owner}: {article} {what} needs "{needed}"; see healthcheck.{what.capitalize()}'
                    )
            getattr(self, f"_add_{kind}")(owner, *given)

        return register

    def remove_owner(self, owner: str) -> None:
        """Take back all that a plugin registered (it failed half-way)."""
        for (kind, name), who in list(self.owners.items()):
            if who == owner:
                del self.owners[kind, name]
                if kind == "metrics":
                    self.metric_probe.pop(name, None)
                getattr(self, kind).pop(name, None)

    def units(self) -> dict[str, str]:
        """Name of each metric -> its unit, for whoever prints values; a family and its members share both."""
        return {metric.name: metric.unit for metric in self.metrics.values()}

    def of(self, owner: str) -> dict[str, list[str]]:
        """What one plugin added, by kind: for ``healthcheck plugins``."""
        found: dict[str, list[str]] = {}
        for (kind, name), who in self.owners.items():
            if who == owner:
                found.setdefault(kind, []).append(name)
        return found

    def _add(self, kind: str, table: dict[str, T], owner: str, name: str, thing: T, *, dotted: bool = False) -> None:
        holder = self.owners.get((kind, name))
        if holder is not None:
            raise PluginError(f'{owner}: {kind[:-1]} "{name}" exists already (from {holder}); choose another name')
        if dotted and owner != BUILTIN and "." not in name:
            raise PluginError(
                f'{owner}: {kind[:-1]} "{name}" needs a name of its own with a dot, such as "{owner}.{name}"'
            )
        table[name] = thing
        self.owners[kind, name] = owner

    def _add_probes(self, owner: str, probe: Probe) -> None:
        for wanted, kind in (("listens_to", EventKind), ("provides", Metric)):
            wrong = [entry for entry in getattr(probe, wanted) if not isinstance(entry, kind)]
            if wrong:
                raise PluginError(
                    f'{owner}: probe "{probe.name}": {wanted} holds {wrong[0]!r}, expected {kind.__name__}; '
                    f"write for instance {_EXAMPLES[wanted]}"
                )
        self._add("probes", self.probes, owner, probe.name, probe)
        for metric in probe.provides:
            self._add("metrics", self.metrics, owner, metric.key, metric)
            self.metric_probe[metric.key] = probe

    # Names of conditions, actions and settings stand in rule files of people who have other plugins as well: those of plugins
    # carry a dot, so that a name that we add later cannot be taken already.

    def _add_conditions(self, owner: str, condition: ConditionType) -> None:
        self._add("conditions", self.conditions, owner, condition.name, condition, dotted=True)

    def _add_actions(self, owner: str, action: Action) -> None:
        if getattr(action, "stage", None) not in ("observe", "mitigate", "stop"):
            raise PluginError(f'{owner}: action "{action.name}" needs stage = "observe", "mitigate" or "stop"')
        self._add("actions", self.actions, owner, action.name, action, dotted=True)

    def _add_reports(self, owner: str, report: Report) -> None:
        self._add("reports", self.reports, owner, report.name, report)

    def _add_readers(self, owner: str, reader: Reader) -> None:
        self._add("readers", self.readers, owner, reader.name, reader)

    def _add_rulepacks(self, owner: str, name: str, path: str) -> None:
        if ":" in name:
            raise PluginError(f'{owner}: pack name "{name}" must not contain a colon; users write {owner}:name')
        self._add("packs", self.packs, owner, f"{owner}:{name}", str(path))

    def _add_settings(self, owner: str, name: str, schema: Mapping[str, Any], help: str) -> None:
        self._add("settings", self.settings, owner, name, PluginSetting(schema, help), dotted=True)

    def _add_trainers(self, owner: str, name: str, attach: Callable[..., Any]) -> None:
        self._add("trainers", self.trainers, owner, name, attach)

    def _add_commands(self, owner: str, name: str, help: str, main: Callable[[list[str]], int]) -> None:
        self._add("commands", self.commands, owner, name, (help, main))
