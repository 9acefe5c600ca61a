"""Laying documents over each other: ``extends``, ``defaults``, profiles, overrides.

The whole of it in one sentence: **a key you write replaces that whole key of the inherited rule;
nothing inside a key is merged; null returns a key to its default.** Nearer wins: a file over what
it extends, a profile over its file, and no pack (nor a pack's profile) over a key of your own file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from healthcheck.core.errors import Problem
from healthcheck.extend.dispatch import nearest
from healthcheck.rulelang.document import Document, KeyPath
from healthcheck.rulelang.quantities import shorten
from healthcheck.rulelang.rule import Origin
from healthcheck.rulelang.validation import did_you_mean

SUGGESTIONS = 100
SEVERITIES = ("info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Entry:
    """One written value and where it stands."""

    value: Any
    document: Document
    where: KeyPath
    rank: int = 0
    """0: a pack; 1: a pack's profile; 2: your file; 3: your file's profile; 4: the command line."""

    @property
    def origin(self) -> Origin:
        return self.document.origin(self.where, key=True)


@dataclass(slots=True)
class Draft:
    """One rule before it is compiled: its keys, each from where it was last written."""

    id: str
    document: Document
    where: KeyPath
    entries: dict[str, Entry] = field(default_factory=dict)
    touched: list[Entry] = field(default_factory=list)
    """Every place that wrote something about it, for the hint that an override changes nothing."""

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key as written; ``default`` where nobody wrote it."""
        entry = self.entries.get(key)
        return default if entry is None else entry.value

    def write(self, key: str, new: Entry) -> None:
        """Set a key, or with null return it to its default."""
        known = self.entries.get(key)
        if known is not None and known.rank > new.rank:
            return  # nearer wins: a pack's profile does not change what your own file says
        if new.value is None:
            self.entries.pop(key, None)
        else:
            self.entries[key] = new


@dataclass(slots=True)
class Merged:
    """All documents as one."""

    rules: dict[str, Draft] = field(default_factory=dict)
    metrics: dict[str, Entry] = field(default_factory=dict)
    external: list[Entry] = field(default_factory=list)
    mutes: list[Entry] = field(default_factory=list)
    settings: dict[str, Entry] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    profiles: dict[str, list[Entry]] = field(default_factory=dict)
    profile_steps: int | None = None
    problems: list[Problem] = field(default_factory=list)


class Merger:
    """Applies documents in order; ``is_bad`` tells which values the schema refused already."""

    def __init__(self, is_bad: Callable[[Document, KeyPath], bool]) -> None:
        self.result = Merged()
        self.is_bad = is_bad

    def merge(self, documents: Iterable[Document], profile: str | None) -> Merged:
        listed = [d for d in documents if isinstance(d.data, dict)]
        result = self.result
        for document in listed:
            result.renamed.update({k: v for k, v in _map(document.data, "renamed").items() if isinstance(v, str)})
        for document in listed:
            self._file(document)
        for name, entries in result.profiles.items():
            for entry in entries:
                if name == profile:
                    self._profile(entry)
                else:
                    self._check_ids(entry)
        return result

    def _check_ids(self, profile: Entry) -> None:
        """A profile that is not applied must not name rules that exist nowhere either."""
        for rule_id, body in _map(profile.value, "rules").items():
            has_keys = isinstance(body, Mapping)
            is_rule = rename(rule_id, self.result.renamed) in self.result.rules
            if not is_rule and not (has_keys and ("metric" in body or "when" in body)):
                self._unknown(rule_id, profile.document, (*profile.where, "rules", rule_id), has_keys)

    def _file(self, document: Document) -> None:
        data, result = document.data, self.result
        rank = 2 if document.own else 0
        defaults = {
            key: Entry(value, document, ("defaults", key), rank)
            for key, value in _map(data, "defaults").items()
            if not self.is_bad(document, ("defaults", key))
        }
        for rule_id, body in _map(data, "rules").items():
            self._rule(rule_id, body, document, ("rules", rule_id), rank, defaults)
        for name, formula in _map(data, "metrics").items():
            if not self.is_bad(document, ("metrics", name)):
                result.metrics[name] = Entry(formula, document, ("metrics", name), rank)
        for block, target in (("external", result.external), ("mute", result.mutes)):
            for i, value in enumerate(data.get(block) if isinstance(data.get(block), list) else ()):
                if not self.is_bad(document, (block, i)):
                    target.append(Entry(value, document, (block, i), rank))
        self._settings(document, ("settings",), _map(data, "settings"), rank)
        for name, body in _map(data, "profiles").items():
            if isinstance(body, Mapping):
                result.profiles.setdefault(name, []).append(Entry(body, document, ("profiles", name), rank + 1))

    def _settings(self, document: Document, where: KeyPath, written: Mapping[str, Any], rank: int) -> None:
        for name, value in written.items():
            if self.is_bad(document, (*where, name)):
                continue
            known = self.result.settings.get(name)
            if known is None or known.rank <= rank:
                self.result.settings[name] = Entry(value, document, (*where, name), rank)

    def _profile(self, entry: Entry) -> None:
        document, where = entry.document, entry.where
        for key, value in _map(entry.value, "defaults").items():
            if self.is_bad(document, (*where, "defaults", key)):
                continue
            new = Entry(value, document, (*where, "defaults", key), entry.rank)
            for draft in self.result.rules.values():
                known = draft.entries.get(key)
                if known is None or known.rank < 2 or known.where[0] == "defaults":
                    draft.write(key, new)
        for rule_id, body in _map(entry.value, "rules").items():
            self._rule(rule_id, body, document, (*where, "rules", rule_id), entry.rank, {})
        self._settings(document, (*where, "settings"), _map(entry.value, "settings"), entry.rank)
        steps = entry.value.get("steps")
        if isinstance(steps, int):
            self.result.profile_steps = steps

    def _rule(
        self, rule_id: str, body: Any, document: Document, where: KeyPath, rank: int, defaults: Mapping[str, Entry]
    ) -> None:
        """What one file writes about one rule: its keys, or only ``off``, ``on`` or a severity."""
        has_keys = isinstance(body, Mapping)
        if not has_keys and self.is_bad(document, where):
            return
        present = rename(rule_id, self.result.renamed)
        if present != rule_id:
            self.result.problems.append(
                document.problem(
                    where,
                    "renamed-rule",
                    f'"{rule_id}" is now called "{present}"; the old id works for two minor releases',
                    key=True,
                    severity="warning",
                    suggestion="`healthcheck check --fix` rewrites it",
                    fix=(rule_id, present),
                )
            )
        draft = self.result.rules.get(present)
        if draft is None:
            if not (has_keys and ("metric" in body or "when" in body)):
                self._unknown(present, document, where, has_keys)
                return
            draft = self.result.rules[present] = Draft(present, document, where)
            draft.entries.update({k: e for k, e in defaults.items() if e.value is not None})
        elif document is not draft.document or where[0] == "profiles":
            draft.touched.append(Entry(body, document, where, rank))
        if not has_keys:
            draft.write("enabled", Entry(body not in ("off", False), document, where, rank))
            if body in SEVERITIES:
                draft.write("severity", Entry(body, document, where, rank))
            return
        for key, value in body.items():
            at = (*where, key)
            if not self.is_bad(document, at):
                draft.write(key, Entry(value, document, at, rank))

    def _unknown(self, rule_id: str, document: Document, where: KeyPath, has_keys: bool) -> None:
        """Report what neither is a rule nor defines one."""
        if document.broken_within(where):
            return  # what would define it may be what had to be left out
        near = nearest(rule_id, self.result.rules) if len(self.result.problems) < SUGGESTIONS else ""
        needs = "a new rule needs `metric` and `when`" if has_keys else "check `extends`"
        hint, fix = did_you_mean(near) or needs, (rule_id, near) if near else None
        text = f'"{shorten(rule_id)}" is not a rule'
        self.result.problems.append(document.problem(where, "unknown-rule", text, key=True, suggestion=hint, fix=fix))


def _map(data: Any, key: str) -> Mapping[str, Any]:
    value = data.get(key) if isinstance(data, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def rename(rule_id: str, renamed: Mapping[str, str]) -> str:
    """The present id of a rule; ``renamed`` comes from the packs' ``renamed:`` blocks."""
    seen = set()
    while rule_id in renamed and rule_id not in seen:
        seen.add(rule_id)
        rule_id = renamed[rule_id]
    return rule_id
