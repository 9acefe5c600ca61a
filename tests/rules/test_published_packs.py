"""Published packs keep their meaning: `healthcheck:recommended@1` judges tomorrow as it judges today.

A pack may change only under a new version. To publish one: raise `pack: {version: n}`, keep the old file beside it
as `NAME@N.yaml` (extending packs pinned at that version), and run this test with HEALTHCHECK_UPDATE_GOLDEN=1.
Before the first release the forms of version 1 may be written anew the same way. See docs/reference/stability.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.rulelang.loader import load_file
from healthcheck.rulelang.rule import Rule
from healthcheck.rulelang.sources import pack_version

RULES = Path(__file__).resolve().parents[2] / "rules"
PUBLISHED = Path(__file__).parent / "published"
NAMES = sorted(p.stem for p in RULES.glob("*.yaml") if not p.name.endswith(".hctest.yaml") and "@" not in p.stem)


def newest(name: str) -> int:
    return pack_version(load_file(RULES / f"{name}.yaml"))


def form(pinned: str) -> dict[str, dict[str, Any]]:
    """What decides when a rule fires and what then; words may be improved under one version."""
    loaded = load_rules_for(host=plugin_host(), rules=f"healthcheck:{pinned}")
    return {rule.id: judged(rule) for rule in loaded.causes}


def judged(rule: Rule) -> dict[str, Any]:
    return {
        "metric": str(rule.selector),
        "except": list(rule.selector.excluded),
        "when": rule.when,
        "for": str(rule.hold),
        "recover": rule.recover.text if rule.recover is not None else None,  # type: ignore[attr-defined]
        "warmup": str(rule.warmup),
        "min_samples": rule.min_samples,
        "every": rule.every,
        "cooldown": rule.cooldown,
        "only_if": [guard.metric for guard in rule.only_if],
        "phase": rule.phase,
        "severity": rule.severity.name.lower(),
        "then": [action.name for action in rule.actions],
    }


PINS = [f"{name}@{version}" for name in NAMES for version in range(1, newest(name) + 1)]


@pytest.mark.parametrize("pinned", PINS)
def test_a_pinned_pack_is_as_it_was_published(pinned: str) -> None:
    path = PUBLISHED / f"{pinned}.yaml"
    now = form(pinned)
    if os.environ.get("HEALTHCHECK_UPDATE_GOLDEN", "") not in ("", "0"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(now, sort_keys=True, width=120), encoding="utf-8")
    was = load_file(path).data
    changed = sorted(rule for rule in was.keys() | now.keys() if was.get(rule) != now.get(rule))
    assert not changed, f"{pinned} was published otherwise: {', '.join(changed)}; see this file's first lines"


def test_no_published_form_has_lost_its_pack() -> None:
    assert {path.stem for path in PUBLISHED.glob("*.yaml")} == set(PINS)


def test_without_a_pin_the_newest_form_is_used() -> None:
    assert form("recommended") == form(f"recommended@{newest('recommended')}")
