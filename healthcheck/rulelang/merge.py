"""Laying documents over each other: ``extends``, ``defaults``, profiles, overrides.

The whole of it in one sentence: **a key you write replaces that whole key of the inherited rule;
nothing inside a key is merged; null returns a key to its default.** Nearer wins: a file over what
it extends, a profile over its file, and no pack (nor a pack's profile) over a key of your own file.
Only ``causes`` is merged, by the name of the cause. Keys of a rule are defaults of its causes; one that a nearer
file writes counts for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from healthcheck.core.errors import Problem
from healthcheck.core.text import nearest, one_line
from healthcheck.rulelang.document import Document, KeyPath
from healthcheck.rulelang.rule import Cause, Origin, without_secrets
from healthcheck.rulelang.schema import RULE_ONLY
from healthcheck.rulelang.validation import did_you_mean

SUGGESTIONS = 100
SEVERITIES = ("info", "warning", "error")
_DEFINING = {"metric", "when"}
"""Keys of which one defines a new rule, as `causes` does where it names any."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One written value and where it stands."""

    value: Any
    document: Document
    where: KeyPath
    rank: int = 0
    """0: a pack; 1: a pack's profile; 2: your file; 3: your file's profile; 4: the command line."""
    turn: int = 0
    """Counts the documents and profiles in the order in which they were laid over each other."""

    @property
    def origin(self) -> Origin:
        return self.document.origin(self.where, key=True)

    @property
    def words(self) -> str:
        """The value as words for people, for the record and the reports that others read: without secrets."""
        # A third of the time that loading takes goes there: what we ship has none.
        return str(self.value) if self.document.shipped else without_secrets(str(self.value))


@dataclass(slots=True)
class Draft:
    """One rule or cause before it is compiled: its keys, each from where it was last written."""

    id: str
    document: Document
    where: KeyPath
    entries: dict[str, Entry] = field(default_factory=dict)
    touched: list[Entry] = field(default_factory=list)
    """Every place that wrote something about it, for the hint that an override changes nothing."""
    causes: dict[str, Draft] = field(default_factory=dict)
    """By name; of a rule that is not its own only cause."""
    named: bool = False
    """Whether a person names it: in a file of theirs, or by the pack that it is in."""

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key as written; ``default`` where nobody wrote it."""
        entry = self.entries.get(key)
        return default if entry is None else entry.value

    def words(self, key: str) -> str:
        """As :attr:`Entry.words`; empty where nobody wrote it."""
        entry = self.entries.get(key)
        return "" if entry is None else entry.words

    @property
    def parts(self) -> list[Draft]:
        """What is compiled: the rule itself, or each of its causes with the keys of the rule as defaults."""
        return [self.part(cause) for cause in self.causes.values()] if self.causes else [self]

    def part(self, cause: Draft) -> Draft:
        """A cause with all that the rule says for it. A key that a nearer file gives the rule is one for all causes."""
        entries = dict(cause.entries)
        for key, entry in self.entries.items():
            own = entries.get(key)
            kept = key in OF_A_CAUSE or (key == "enabled" and entry.value is not False)
            if own is None or (not kept and _strength(entry) > _strength(own)):
                entries[key] = entry
        return Draft(f"{self.id}.{cause.id}", cause.document, cause.where, entries, cause.touched)


OF_A_CAUSE = ("metric", "when", "kind")
"""Keys by which causes differ: one that a rule is given later does not take their place."""


def _strength(entry: Entry) -> tuple[int, int]:
    from_profile = entry.where[:1] == ("profiles",) and entry.where[2:3] == ("defaults",)
    return (min(entry.rank, 1) if from_profile else entry.rank), entry.turn


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

    def draft_of(self, cause: Cause) -> Draft:
        """What a compiled cause was made of."""
        draft = self.rules[cause.rule]
        return draft.part(draft.causes[cause.name]) if cause.name else draft


class Merger:
    """Applies documents in order; ``is_bad`` tells which values the schema refused already."""

    def __init__(self, is_bad: Callable[[Document, KeyPath], bool]) -> None:
        self.result = Merged()
        self.is_bad = is_bad
        self._turn = 0

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
            present, _, cause = rename(rule_id, self.result.renamed).partition(".")
            draft = self.result.rules.get(present)
            is_rule = draft is not None and (not cause or cause in draft.causes)
            if not is_rule and not (has_keys and (body.keys() & _DEFINING or body.get("causes"))):
                self._unknown(rule_id, profile.document, (*profile.where, "rules", rule_id), has_keys)

    def _file(self, document: Document) -> None:
        data, result = document.data, self.result
        rank = 2 if document.own else 0
        self._turn += 1
        defaults = {
            key: Entry(value, document, ("defaults", key), rank, self._turn)
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
        self._turn += 1
        for key, value in _map(entry.value, "defaults").items():
            if self.is_bad(document, (*where, "defaults", key)):
                continue
            new = Entry(value, document, (*where, "defaults", key), entry.rank, self._turn)
            for draft in self.result.rules.values():
                known = draft.entries.get(key)
                if known is None or known.rank < 2 or known.where[0] == "defaults":
                    self._write(draft, key, new)
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
        defines = has_keys and bool(body.keys() & _DEFINING or body.get("causes"))
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
        present, _, cause = present.partition(".")
        draft = self.result.rules.get(present)
        if draft is None:
            if cause or not defines:
                self._unknown(present, document, where, has_keys)
                return
            draft = self.result.rules[present] = Draft(present, document, where)
            draft.entries.update({k: e for k, e in defaults.items() if e.value is not None})
        elif document is not draft.document or where[0] == "profiles":
            draft.touched.append(Entry(body, document, where, rank))
        # A pack that a person names brings its own rules; those that it only changes are as automatic as before.
        draft.named |= document.own or (document.named and draft.document is document)
        if cause:
            self._cause(draft, cause, body, document, where, rank)
            return
        if defines and "enabled" not in body:
            off = draft.entries.get("enabled")
            if off is not None and off.rank >= 2 and off.document.layer != document.layer and document.own:
                self._write(draft, "enabled", Entry(True, document, where, rank, self._turn))
        for key, value in self._written(draft, body, document, where, rank).items():
            if key != "causes":
                self._write(draft, key, Entry(value, document, (*where, key), rank, self._turn))
            elif value is None:
                draft.causes.clear()
            else:
                for name, inner in value.items():
                    self._cause(draft, name, inner, document, (*where, "causes", name), rank)

    def _written(self, draft: Draft, body: Any, document: Document, where: KeyPath, rank: int) -> Mapping[str, Any]:
        """The keys of a rule or cause that the schema let pass; ``off``, ``on`` and a severity are written at once."""
        if not isinstance(body, Mapping):
            self._write(draft, "enabled", Entry(body not in ("off", False), document, where, rank, self._turn))
            if body in SEVERITIES:
                self._write(draft, "severity", Entry(body, document, where, rank, self._turn))
            return {}
        kept = {}
        for key, value in body.items():
            # Within `causes` each cause is looked at for itself.
            apart = key == "causes" and (value is None or isinstance(value, Mapping))
            if apart or not self.is_bad(document, (*where, key)):
                kept[key] = value
        return kept

    def _write(self, draft: Draft, key: str, new: Entry) -> None:
        """Set a key, or with null return it to its default.

        Nearer wins: a pack's profile does not change what your own file says. What people wrote in one layer, another must
        not undo: that is a mistake of theirs, not an order.
        """
        known = draft.entries.get(key)
        written = known is not None and known.rank >= 2 and known.where[0] != "defaults"
        others = known if written else None
        if key == "enabled" and new.value is False and others is None and draft.document.own:
            others = Entry(None, draft.document, draft.where, 2)  # a rule of theirs is switched off
        document = new.document
        if (
            others is not None
            and document.own
            and others.document.layer != document.layer
            and others.value != new.value
        ):
            there = f"{others.document.path} says {one_line(repr(others.value))}" if written else "it is a rule of "
            there = there if written else f"{there}{others.document.path}"
            self.result.problems.append(
                document.problem(
                    new.where,
                    "conflict",
                    f'"{draft.id}": `{key}: {one_line(repr(new.value))}`, but {there}',
                    key=True,
                    suggestion="rules that join a run are judged beside its own: give one of the two another id",
                )
            )
            return
        if known is None or known.rank <= new.rank:
            if new.value is None:
                draft.entries.pop(key, None)
            else:
                draft.entries[key] = new

    def _cause(self, draft: Draft, name: str, body: Any, document: Document, where: KeyPath, rank: int) -> None:
        """What one file writes about one cause of a rule."""
        if not isinstance(body, Mapping) and self.is_bad(document, where):
            return
        known = draft.causes.get(name)
        if known is None:
            if not isinstance(body, Mapping):
                self._unknown_cause(draft, name, document, where)
                return
            made = Draft(name, document, where)
            kind = body.get("kind")
            # One that a nearer file adds goes before those that are less certain.
            after = [n for n, other in draft.causes.items() if document is not other.document and _less(other, kind)]
            draft.causes[name] = made
            if after:
                draft.causes = _before(draft.causes, name, after[0])
            known = made
        elif document is not known.document or where[0] == "profiles":
            known.touched.append(Entry(body, document, where, rank))
        for key, value in self._written(known, body, document, where, rank).items():
            if key in RULE_ONLY:
                if where[-2:-1] == ("causes",):
                    continue  # the schema has said so; written as `rule.cause: {...}` it takes it for a rule
                text = f"`{key}` is of the whole rule, not of one cause"
                hint = f"write it under `{draft.id}:`"
                self.result.problems.append(
                    document.problem((*where, key), "of-the-rule", text, key=True, suggestion=hint)
                )
                continue
            self._write(known, key, Entry(value, document, (*where, key), rank, self._turn))

    def _unknown_cause(self, draft: Draft, name: str, document: Document, where: KeyPath) -> None:
        near = nearest(name, draft.causes)
        there = f"there are {', '.join(draft.causes)}" if draft.causes else f'"{draft.id}" is its own only cause'
        fix = (name, near) if near else None
        text = f'"{one_line(name)}" is not a cause of "{draft.id}"'
        hint = did_you_mean(near) or there
        self.result.problems.append(document.problem(where, "unknown-cause", text, key=True, suggestion=hint, fix=fix))

    def _unknown(self, rule_id: str, document: Document, where: KeyPath, has_keys: bool) -> None:
        """Report what neither is a rule nor defines one."""
        if document.broken_within(where):
            return  # what would define it may be what had to be left out
        near = nearest(rule_id, self.result.rules) if len(self.result.problems) < SUGGESTIONS else ""
        needs = "a new rule needs `metric` and `when`, or `causes`" if has_keys else "check `extends`"
        hint, fix = did_you_mean(near) or needs, (rule_id, near) if near else None
        text = f'"{one_line(rule_id)}" is not a rule'
        self.result.problems.append(document.problem(where, "unknown-rule", text, key=True, suggestion=hint, fix=fix))


def _map(data: Any, key: str) -> Mapping[str, Any]:
    value = data.get(key) if isinstance(data, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _less(cause: Draft, kind: Any) -> bool:
    """Whether a cause is less certain than a kind, as both are written."""
    order = {"fact": 0, "trend": 2}
    return order.get(cause.value("kind"), 1) > order.get(kind, 1)


def _before(causes: Mapping[str, Draft], name: str, other: str) -> dict[str, Draft]:
    """The same causes, ``name`` standing before ``other``."""
    moved = causes[name]
    found: dict[str, Draft] = {}
    for key, cause in causes.items():
        if key == other:
            found[name] = moved
        if key != name:
            found[key] = cause
    return found


def rename(rule_id: str, renamed: Mapping[str, str]) -> str:
    """The present id of a rule, which may be ``rule.cause`` now; ``renamed`` comes from the packs' ``renamed:`` blocks."""
    seen = set()
    while rule_id in renamed and rule_id not in seen:
        seen.add(rule_id)
        rule_id = renamed[rule_id]
    return rule_id
