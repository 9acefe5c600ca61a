"""Warnings of ``healthcheck check``: allowed, but probably not meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite

from healthcheck.core.alerts import Kind, Severity
from healthcheck.core.errors import Problem
from healthcheck.core.text import as_written, suggest
from healthcheck.extend.registry import Registry
from healthcheck.rulelang.comparators import COMPARATORS
from healthcheck.rulelang.document import KeyPath
from healthcheck.rulelang.merge import Draft, Entry, Merged
from healthcheck.rulelang.rule import PLACEHOLDERS, Cause, RuleSet, owners, owns_nonfinite

SMALL_WINDOW = 30
SPIKE_CONDITIONS = ("zscore", "robust_z")
NAN_METRICS = ("loss", "grad_norm")
"""Metrics that turn non-finite when a run breaks; somebody should watch them for it."""


def warnings(rules: RuleSet, merged: Merged, registry: Registry) -> list[Problem]:
    """All lint warnings of a rule set that loaded without errors."""
    found: list[Problem] = []
    for rule in rules.causes:
        found.extend(_of_rule(rule, merged.draft_of(rule), merged.profile_steps, rules.profile))
    for rule_id in rules.off:
        if rule_id in merged.rules:
            found.extend(_of_off(merged.rules[rule_id]))
    found.extend(_unwatched_nan(rules, merged))
    found.extend(_unused_metrics(rules, merged))
    found.extend(_twins(rules, merged))
    found.extend(_missing_units(rules, merged, registry))
    found.extend(_held_back_by_nothing(rules, merged))
    return found


def _of_rule(rule: Cause, draft: Draft, profile_steps: int | None, profile: str) -> Iterator[Problem]:
    yield from _of_actions(rule, draft)
    yield from _of_condition(rule, draft)
    if profile_steps:
        yield from _too_late(rule, draft, profile_steps, profile)
    yield from _evals_of_train_metric(rule, draft)
    yield from _of_words(rule, draft)


def _of_actions(rule: Cause, draft: Draft) -> Iterator[Problem]:
    names = {spec.name for spec in rule.actions}
    if "stop" in names and rule.severity < Severity.ERROR:
        yield _warn(
            draft,
            "then",
            "stop-below-error",
            f"`stop` in a rule of severity {rule.severity}: reports call it a {rule.severity}, but it ends the run",
            "severity says, `then` acts; write `severity: error` if both are meant",
        )
    if "cleanup" in names and rule.cooldown is None:
        yield _warn(
            draft,
            "then",
            "cleanup-without-cooldown",
            "without `cooldown`, `cleanup` runs again at every new episode, however close",
            "add `cooldown: 200`",
        )


def _of_condition(rule: Cause, draft: Draft) -> Iterator[Problem]:
    window = rule.condition.window
    if rule.condition.name in SPIKE_CONDITIONS and 0 < window < SMALL_WINDOW:
        yield _warn(
            draft,
            "when",
            "small-window",
            f"a window of {window} samples says little about what is normal",
            f"use {SMALL_WINDOW} or more",
        )
    if rule.recover is not None and _stricter_recover(rule):
        yield _warn(
            draft,
            "recover",
            "strict-recover",
            f"`recover: {rule.recover.text}` also holds while the rule breaches ({rule.condition.breaches.text})",
            "an alert should end at a calmer score than it began at",
        )
    if not rule.condition.baseline:
        for key in ("outliers", "reseed"):
            if key in draft.entries and draft.entries[key].where[0] != "defaults":
                yield _warn(
                    draft,
                    key,
                    "no-baseline",
                    f"`{key}` means nothing for `{rule.condition.name}`, which has no baseline",
                    "",
                )


def _too_late(rule: Cause, draft: Draft, profile_steps: int, profile: str) -> Iterator[Problem]:
    needed = _steps_needed(rule)
    if needed > profile_steps:
        key = "warmup" if "warmup" in draft.entries else "for" if "for" in draft.entries else "when"
        yield _warn(
            draft,
            key,
            "never-in-time",
            f"needs about {needed:,} steps before it can fire; a run with `--profile {profile}` has {profile_steps:,}",
            "there it ends as not judged, which fails nothing; for an earlier verdict shorten it in that profile",
        )


def _of_words(rule: Cause, draft: Draft) -> Iterator[Problem]:
    hole = re.search(r"\{(" + "|".join(PLACEHOLDERS) + r")[:}]", rule.hint)
    if hole is not None:
        yield _warn(
            draft, "hint", "placeholder-in-hint", f"`{{{hole[1]}}}` is only filled in by `message`, not by `hint`", ""
        )
    if "explains" in draft.entries and not rule.actions:
        yield _warn(draft, "then", "nothing-happens", "`then` is empty: the alert is only recorded", "")


def _stricter_recover(rule: Cause) -> bool:
    """Whether some breaching score would also count as recovered."""
    breach, recover = rule.condition.breaches, rule.recover
    if recover is None:
        return False
    limits = [
        limit
        for comparator in (breach, recover)
        for limit in (comparator.healthy.low, comparator.healthy.high)
        if isfinite(limit)
    ]
    scores = [s for p in limits for s in (p, p - abs(p) * 1e-6 - 1e-9, p + abs(p) * 1e-6 + 1e-9)]
    return any(breach(s) and recover(s) for s in scores)


def _steps_needed(rule: Cause) -> int:
    warmup = int(rule.warmup.amount) if rule.warmup.unit != "seconds" else 0
    samples = max(rule.min_samples, 1) + rule.hold.need - 1
    window = rule.condition.window
    if rule.condition.name in ("no_improvement", "unchanged", "delta"):
        samples = max(samples, window)
    return max(warmup, 0) + rule.hold.need * rule.every if not rule.min_samples else max(warmup, samples * rule.every)


def _evals_of_train_metric(rule: Cause, draft: Draft) -> Iterator[Problem]:
    if rule.phase in ("eval", "test") or rule.selector.metric.split(".")[0] in ("eval", "test"):
        return
    for key in ("warmup", "for"):
        written = draft.value(key)
        if isinstance(written, str) and "eval" in written:
            yield _warn(
                draft,
                key,
                "evals-of-training",
                f'"{written}" counts samples of {rule.selector}, which is not an evaluation metric',
                "write `samples` or `steps`, or add `phase: eval`",
            )


def _of_off(draft: Draft) -> Iterator[Problem]:
    """A file changes keys of a rule that is off: the change does nothing."""
    switch = draft.entries.get("enabled")
    for entry in draft.touched:
        own_switch = switch is not None and switch.document is entry.document
        if isinstance(entry.value, dict) and "enabled" not in entry.value and not own_switch:
            yield entry.document.problem(
                entry.where,
                "rule-is-off",
                f'"{draft.id}" is switched off; this changes nothing',
                key=True,
                severity="warning",
                suggestion="add `enabled: true`",
            )


def _unwatched_nan(rules: RuleSet, merged: Merged) -> Iterator[Problem]:
    owned = owners(rules.causes, rules.derived)
    watched = {r.selector.metric for r in rules.causes if owns_nonfinite(r)}
    for metric in NAN_METRICS:
        rule = next(
            (r for r in rules.causes if r.selector.metric == metric and r.id not in owned and metric not in watched),
            None,
        )
        if rule is not None:
            yield _warn(
                merged.draft_of(rule),
                "metric",
                "nan-unwatched",
                f"no rule watches {metric} for NaN and infinity, so each rule on it reports them itself",
                "extend healthcheck:recommended, or add a rule with `when: nonfinite`",
            )


def _unused_metrics(rules: RuleSet, merged: Merged) -> Iterator[Problem]:
    by_id = {cause.id for cause in rules.causes}
    used = {r.selector.metric for r in rules.causes} | {g.metric for r in rules.causes for g in r.only_if}
    used |= {d for f in rules.derived for d in f.inputs}
    used |= {s.metric for r in rules.causes for s, _ in r.condition.parts if s is not None}
    off = [part for draft in merged.rules.values() for part in draft.parts if part.id not in by_id]
    used |= {str(part.value("metric", "")).split("[")[0] for part in off}
    for formula in rules.derived:
        entry: Entry = merged.metrics[formula.name]
        if formula.name not in used and entry.document.own:
            yield entry.document.problem(
                entry.where, "unused-metric", f'no rule uses "{formula.name}"', key=True, severity="warning"
            )


def _twins(rules: RuleSet, merged: Merged) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for rule in rules.causes:
        key = f"{rule.fingerprint}|{rule.phase}|{rule.hold}|{rule.only_if}|{rule.ranks}"
        if key in seen:
            draft = merged.draft_of(rule)
            yield draft.document.problem(
                draft.where,
                "twin-rules",
                f'"{rule.id}" is the same rule as "{seen[key]}"',
                key=True,
                severity="warning",
            )
        seen.setdefault(key, rule.id)


def _held_back_by_nothing(rules: RuleSet, merged: Merged) -> Iterator[Problem]:
    """``holds_back`` names kinds and tags: a word that is neither here holds nothing back."""
    known = {tag for cause in rules.causes for tag in cause.tags} | {str(kind) for kind in Kind}
    places: dict[tuple[str, KeyPath], tuple[Entry, str]] = {}
    for cause in rules.causes:
        entry = merged.draft_of(cause).entries.get("holds_back")
        for i, word in enumerate(cause.holds_back):
            if entry is not None and entry.document.own and word not in known:
                places[entry.document.path, (*entry.where, i)] = entry, word
    for (_, where), (entry, word) in places.items():
        text = f'"{word}" is no kind, and no rule has such a tag'
        hint = suggest(word, sorted(known))
        yield entry.document.problem(where, "holds-back-nothing", text, severity="warning", suggestion=hint)


def _warn(draft: Draft, key: str, slug: str, message: str, suggestion: str) -> Problem:
    entry = draft.entries.get(key)
    document, where = (entry.document, entry.where) if entry is not None else (draft.document, draft.where)
    return document.problem(
        where, slug, f'rule "{draft.id}": {message}', key=entry is None, severity="warning", suggestion=suggestion
    )


# --------------------------------------------------------------------------- limits whose unit was probably forgotten


SAME_UNIT = ("mean", "median", "percentile", "min", "max")
"""Conditions whose score has the unit of the metric."""
SMALLEST_BYTES = 1024


def _missing_units(rules: RuleSet, merged: Merged, registry: Registry) -> Iterator[Problem]:
    """``memory.fraction`` above 92: a part of one never is. ``memory.allocated`` above 20: that is 20 bytes."""
    for rule in rules.causes:
        metric = registry.metrics.get(rule.selector.key)
        draft = merged.draft_of(rule)
        if metric is not None and metric.unit in ("fraction", "bytes") and draft.document.own:
            yield from _limits(rule, draft, metric.unit)


def _limits(rule: Cause, draft: Draft, unit: str) -> Iterator[Problem]:
    entry = draft.entries["when"]
    where = entry.where
    body = entry.value
    for name in SAME_UNIT:
        if isinstance(body, Mapping) and name in body:
            body, where = body[name], (*where, name)
    if not isinstance(body, Mapping):
        return
    for key in COMPARATORS:
        limit = body.get(key)
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            continue
        if unit == "fraction" and limit > 1:
            percent = f"{as_written(limit)}%"
            fix = (str(limit), percent) if limit <= 100 else None
            text = f"{rule.selector} is a part of 1, and {as_written(limit)} means {as_written(limit * 100)}%"
            hint = f'did you mean "{percent}"?' if fix else "write a percentage, for instance 90%"
        elif unit == "bytes" and 0 < limit < SMALLEST_BYTES:
            fix = None
            text = f"{rule.selector} counts bytes, and this is {as_written(limit)} of them"
            hint = f"did you mean {as_written(limit)}GiB or {as_written(limit)}MiB?"
        else:
            continue
        yield entry.document.problem(
            (*where, key),
            "missing-unit",
            f'rule "{rule.id}": {text}',
            severity="warning",
            suggestion=hint,
            fix=fix,
        )
