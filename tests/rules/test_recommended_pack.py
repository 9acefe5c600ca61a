"""The pack's own rule tests, run the way a user runs them, and each rule in both polarities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml


def test_the_packs_rule_tests_pass(healthcheck_command: Callable[..., Any], repository: Path) -> None:
    done = healthcheck_command("test", repository / "rules" / "recommended.hctest.yaml")
    assert done.returncode == 0, done.stdout[-3000:]


def test_every_rule_is_expected_somewhere_and_silent_somewhere(repository: Path) -> None:
    rules = yaml.safe_load((repository / "rules" / "recommended.yaml").read_text())["rules"]
    tests = yaml.safe_load((repository / "rules" / "recommended.hctest.yaml").read_text())["tests"]
    expected = {entry["rule"] for test in tests if test["expect"] != "none" for entry in test["expect"]}
    assert expected == set(rules)
    silent_on = {metric for test in tests if test["expect"] == "none" for metric in test["series"]}
    assert {rule["metric"] for rule in rules.values()} <= silent_on
