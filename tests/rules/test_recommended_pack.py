"""The packs' own rule tests, run the way a user runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_the_rule_tests_of_all_packs_pass(healthcheck_command: Callable[..., Any], repository: Path) -> None:
    done = healthcheck_command("test", repository / "rules")
    assert done.returncode == 0, done.stdout[-3000:]
