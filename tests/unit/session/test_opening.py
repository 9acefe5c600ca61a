"""One set of options for everybody who opens a session, and one way to open it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import healthcheck
from healthcheck.assembly import open_session
from healthcheck.core import opener
from healthcheck.run.joining import join
from healthcheck.run.opening import SessionOptions, open_here, program_name

RULES = {"version": 1, "rules": {"high": {"metric": "loss", "when": {"above": 5}}}}


def quiet(**words: Any) -> SessionOptions:
    return SessionOptions(rules=RULES, console=False, record=False, **words)


def test_what_has_a_word_of_its_own_is_stronger_than_the_same_setting() -> None:
    options = SessionOptions(
        observe=True, fail_on="warning", settings={"fail_on": "never", "verbosity": 1}, reports={"json": "hc.json"}
    )
    assert options.all_settings() == {
        "mode": "observe",
        "fail_on": "warning",
        "verbosity": 1,
        "report": {"json": "hc.json"},
    }
    assert SessionOptions(observe=False).all_settings() == {"mode": "act"}
    assert SessionOptions().all_settings() == {}


def test_watch_shows_every_option_that_it_passes_on() -> None:
    shown = inspect.signature(healthcheck.watch).parameters
    assert list(shown)[:2] == ["model", "optimizer"]
    assert {field.name for field in fields(SessionOptions)} <= shown.keys()
    assert "options" not in shown


def test_an_option_that_there_is_not_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="rulez"):
        healthcheck.watch(rulez="x")


def test_words_and_options_open_the_same_session() -> None:
    heard: list[int] = []

    class Listener(healthcheck.Callback):
        def on_step_end(self, event: healthcheck.Event) -> None:
            heard.append(event.step)

    words = open_session(target="t", rules=RULES, console=False, record=False, callbacks=[Listener()], observe=True)
    options = open_session(quiet(name="t", callbacks=[Listener()], observe=True))
    for session in (words, options):
        assert (session.info.target, session.observing, session.list_hooks("step_end")) == ("t", True, ["Listener"])


def test_a_session_for_this_process_is_named_after_its_program() -> None:
    session = open_here(quiet())
    assert session.info.target == program_name()
    assert session.info.argv == sys.argv
    assert open_here(quiet(name="mine", argv=["a.py"])).info.argv == ["a.py"]


def test_ranks_that_a_framework_names_are_known_while_the_session_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    session = open_here(quiet(), (1, 4))
    assert (session.info.rank, session.info.world_size) == (1, 4)
    assert open_here(quiet()).info.world_size == 1


def test_who_comes_second_joins_and_its_rules_are_judged_as_well() -> None:
    notes: list[str] = []

    class Notes:
        name = "notes"

        def note(self, text: str) -> None:
            notes.append(text)

    session = open_here(quiet())
    session.add_report(Notes())
    known = [rule.id for rule in session.rules.rules]
    joining = SessionOptions(rules={"higher": {"metric": "loss", "when": {"above": 9}}}, metrics=["lr"])
    join(session, joining, "HealthCheckCallback")
    join(session, joining, "HealthCheckCallback")  # a second fold of the same callback
    assert session.demand.wants("lr")
    assert session.demand.wants("loss")
    assert [rule.id for rule in session.rules.rules] == [*known, "higher"]
    assert notes == ["rules of HealthCheckCallback joined: higher"]


def test_the_package_hands_its_opener_over_before_anything_heavy_is_loaded() -> None:
    """A callback is imported from a module of its own; that imports the package first, whatever else it does."""
    code = (
        "import sys\n"
        "from healthcheck import opener\n"
        "assert opener.open_session.__module__ == 'healthcheck'\n"
        "assert 'healthcheck.assembly' not in sys.modules and 'dataclasses' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=Path(healthcheck.__file__).parents[1])
    assert opener.open_session is not None
