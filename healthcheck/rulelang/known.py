"""Which metrics exist: what probes provide, what ``metrics:`` derives, what ``external:`` names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from healthcheck.core.samples import CONTEXT_LABELS
from healthcheck.core.text import suggest
from healthcheck.extend.registry import Registry
from healthcheck.rulelang.rule import Selector

SUGGESTIONS = 100
"""Names that are searched for neighbours; the search is slow, and a person reads no more."""


class KnownMetrics:
    """Answers whether a rule may name a metric, and what to write instead.

    With nothing to go by (a registry without probes and no list) every name is accepted.
    """

    def __init__(
        self, registry: Registry, extra: Iterable[str] | None, derived: Iterable[str], external: Iterable[str]
    ) -> None:
        self.plain: set[str] = set()
        self.families: dict[str, tuple[str, ...]] = {}
        for metric in registry.metrics.values():
            if metric.labels:
                self.families[metric.name] = metric.labels
            else:
                self.plain.add(metric.name)
        self.prefixes = tuple(
            prefix for probe in registry.probes.values() for prefix in getattr(probe, "provides_prefixes", ()) if prefix
        )
        """Families of names that a probe knows only when they come: ``eval.``."""
        self.open_ended = not registry.metrics and extra is None
        self.any_labels = set(derived)
        self.globs: list[str] = []
        self._near: dict[str, str] = {}
        for name in [*external, *(extra or ())]:
            base = name.removesuffix("[]").split("[")[0]
            if any(c in base for c in "*?"):
                self.globs.append(base)
            elif name.endswith("[]"):
                self.families.setdefault(base, ())
            else:
                self.any_labels.add(base)

    def names(self) -> list[str]:
        """All names, without labels."""
        return sorted({*self.plain, *self.families, *self.any_labels})

    def fault(self, selector: Selector) -> tuple[str, str] | None:
        """``(problem, suggestion)`` if a rule may not select this; None if it may."""
        name = selector.metric
        if name.startswith(self.prefixes) and name not in self.plain and name not in self.families:
            return None
        if self.open_ended or name in self.any_labels or any(fnmatch.fnmatchcase(name, g) for g in self.globs):
            return None
        asks_family = any(label not in CONTEXT_LABELS for label, _ in selector.globs)
        if name not in self.plain and name not in self.families:
            return self.unknown(name)
        if asks_family and name not in self.families:
            return f'"{name}" has no parts to select by', f"write `metric: {name}`"
        if not asks_family and name not in self.plain:
            return f'"{name}" is a family; say which of its parts', f"write {name}[*] for all"
        labels = self.families.get(name, ())
        wrong = [label for label, _ in selector.globs if label and label not in CONTEXT_LABELS and label not in labels]
        if wrong and labels:
            return f'"{name}" has no label "{wrong[0]}"', suggest(wrong[0], labels) or f"there is {', '.join(labels)}"
        return None

    def unknown(self, name: str) -> tuple[str, str]:
        """``(problem, suggestion)`` for a metric that nobody provides."""
        if name not in self._near:
            self._near[name] = suggest(name, self.names()) if len(self._near) < SUGGESTIONS else ""
        near = self._near[name]
        mine = f"if your code logs it, add `external: [{name}]`"
        return f'no probe provides "{name}"', f"{near} {mine}".strip()

    def has(self, name: str) -> bool:
        """Whether a formula or a guard may name it (labels aside)."""
        return (
            self.open_ended
            or name in self.any_labels
            or name in self.plain
            or name in self.families
            or any(fnmatch.fnmatchcase(name, g) for g in self.globs)
        )


def rule_hint(rule_id: str, rules: Mapping[str, object]) -> str:
    """``did you mean "loss-spike"?``, or a list of a few ids, or where the many are listed."""
    few = f"there are {', '.join(list(rules)[:8])}" if len(rules) <= 8 else "`healthcheck plan` lists them"
    return suggest(rule_id, rules) or (few if rules else "")
