"""``healthcheck plugins``: who is loaded, from where, and who is not and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]

GOOD = """
import healthcheck
from healthcheck import ActionOutcome

class Page:
    name = "acme.page"
    stage = "observe"
    options_schema = {"type": "object"}

    def run(self, alert, context):
        return ActionOutcome.of(self.name, "paged")

@healthcheck.hookimpl
def healthcheck_register_actions(register):
    register(Page())

@healthcheck.hookimpl
def healthcheck_step_end(session, event):
    pass
"""


def test_a_local_plugin_is_listed_with_its_source_and_what_it_adds(healthcheck_here: Run, tmp_path: Path) -> None:
    (tmp_path / "acme.py").write_text(GOOD)
    done = healthcheck_here("plugins", "-p", "acme.py")
    assert done.returncode == 0, done.stderr
    assert "acme   acme.py" in done.stdout
    assert "actions:  acme.page" in done.stdout
    assert "listens to: step_end" in done.stdout
    assert "stop" not in done.stdout  # names of the built-ins only with -v


def test_verbose_names_the_built_ins(healthcheck_here: Run) -> None:
    done = healthcheck_here("plugins", "-v")
    # The built-ins come first; a plugin that this machine has installed is listed behind them.
    actions = next(line for line in done.stdout.splitlines() if line.startswith("  actions:"))
    assert {"stop", "warn", "evidence", "cleanup", "skip_update"} <= set(
        actions.removeprefix("  actions:").strip().split(", ")
    )


def test_a_plugin_that_does_not_load_is_named_with_the_reason(healthcheck_here: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere")
    done = healthcheck_here("plugins", "-p", "broken.py")
    assert done.returncode == 0
    assert "NOT LOADED broken   broken.py" in done.stdout
    assert "no_such_module_anywhere" in done.stdout
    assert healthcheck_here("plugins", "-p", "broken.py", "--strict-plugins").returncode == 3


def test_json_holds_the_same(healthcheck_here: Run, tmp_path: Path) -> None:
    (tmp_path / "acme.py").write_text(GOOD)
    (tmp_path / "gone.py").write_text("raise SystemExit(3)")
    listed = json.loads(healthcheck_here("plugins", "-p", "acme.py", "-p", "gone.py", "--format", "json").stdout)
    (acme,) = [p for p in listed["plugins"] if p["name"] == "acme"]
    assert acme["adds"] == {"actions": ["acme.page"]}
    assert [f["name"] for f in listed["failures"]] == ["gone"]


def test_switched_off_plugins_cannot_take_stop_with_them(healthcheck_here: Run) -> None:
    done = healthcheck_here("plugins", "-v", env={"HEALTHCHECK_DISABLE_PLUGINS": "all"})
    assert done.returncode == 0
    assert " stop" in done.stdout
