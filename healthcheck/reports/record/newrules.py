"""Rules of packs that the last run here was not judged by: what an upgrade of a pack has brought."""

from __future__ import annotations

import os
from pathlib import Path

from healthcheck.reports.record.runs import load_run
from healthcheck.rulelang.packs import is_pack_name
from healthcheck.rulelang.rule import RuleSet

LOOKED_AT = 20
"""Runs that are looked at, newest first, for one with the same source of rules."""


def new_rules(rules: RuleSet, folder: Path, *, but: Path | None = None) -> list[str]:
    """Ids of pack rules that are judged now and were not known to the last run from the same rules.

    :param folder: where the records are.
    :param but: the folder of the run that is about to begin.

    Empty where there is no such run: on a first run nothing is new.
    """
    try:
        # By name, which begins with the time: a look at each folder would be felt where there are thousands.
        names = sorted((entry.name for entry in os.scandir(folder) if entry.name[:1].isdigit()), reverse=True)
    except OSError:
        return []
    for name in [name for name in names if but is None or name != but.name][:LOOKED_AT]:
        report = load_run(folder / name).report or {}
        if report.get("rules_source") != rules.source or report.get("profile", "") != (rules.profile or ""):
            continue
        known = {*report.get("rules", ()), *report.get("off", ())}
        return [rule.id for rule in rules.rules if rule.id not in known and is_pack_name(rule.origin.path)]
    return []
