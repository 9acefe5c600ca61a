"""In which order plugins are called: documented in docs/plugins/hook-order.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthcheck import hookimpl
from healthcheck.extend.host import PluginHost
from healthcheck.testing import FakeTrainer, open_test_session

PLUGIN = """\
import healthcheck

@healthcheck.hookimpl
def healthcheck_configure(session):
    session.user_state.setdefault("order", []).append("{name} configure")

@healthcheck.hookimpl
def healthcheck_step_end(session):
    session.user_state["order"].append("{name}")
"""


class Later:
    @hookimpl
    def healthcheck_configure(self, session):
        session.user_state["order"].append("later configure")

    @hookimpl
    def healthcheck_step_end(self, session):
        session.user_state["order"].append("later")


@pytest.fixture
def local(tmp_path: Path) -> list[str]:
    names = ("zeta", "alpha", "middle")
    for name in names:
        (tmp_path / f"{name}.py").write_text(PLUGIN.format(name=name))
    return [str(tmp_path / f"{name}.py") for name in names]


def test_loop_hooks_run_in_the_order_of_registration(local: list[str]) -> None:
    """Local plugins as given on the command line, then what is registered in code, then functions."""
    session = open_test_session(plugins=local)
    session.register(Later())
    session.on("step_end", lambda event: event.user_state["order"].append("function"))
    session.user_state["order"].clear()
    FakeTrainer(session).train_step(1.0)
    assert session.user_state["order"] == ["zeta", "alpha", "middle", "later", "function"]
    assert session.list_hooks("step_end")[:4] == ["zeta", "alpha", "middle", "Later"]


def test_configure_runs_last_registered_first_and_at_once_for_late_ones(local: list[str]) -> None:
    """As pluggy calls hooks: whoever comes last may change what those before it see."""
    session = open_test_session(plugins=local)
    session.register(Later())
    called = [text for text in session.user_state["order"] if text.endswith("configure")]
    assert called == ["middle configure", "alpha configure", "zeta configure", "later configure"]


def test_built_ins_come_before_all_others(local: list[str]) -> None:
    from healthcheck.assembly import BUILTINS, plugin_host

    names = [info.name for info in plugin_host(local).infos]
    assert names[: len(BUILTINS)] == list(BUILTINS)
    assert names[-3:] == ["zeta", "alpha", "middle"]


def install(folder: Path, distribution: str, *names: str) -> None:
    """What pip leaves: a folder of metadata whose entry points name modules."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[healthcheck]\n" + "".join(f"{n} = {distribution}_{n}\n" for n in names))
    for name in names:
        (folder / f"{distribution}_{name}.py").touch()


def installed() -> list[str]:
    host = PluginHost()
    host.load_entry_points()
    assert host.failures == []
    return [info.name for info in host.infos if "acme" in info.source]


def test_entry_points_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which pip installed them says nothing."""
    install(tmp_path, "acme", "b", "c", "a")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed() == ["a", "b", "c"]


def test_a_plugin_that_is_installed_while_the_process_lives_is_loaded_by_the_next_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert installed() == []
    install(tmp_path, "acme", "late")
    assert installed() == ["late"]
