"""A plugin that cannot be loaded: all that is wrong with it at once, with the place and the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthcheck.extend.host import PluginHost

HEAD = "import healthcheck\nfrom healthcheck import EventKind, Metric\n\n\n"
PROBE = """
class Probe:
    name = "mine"
    listens_to = {listens_to}
    provides = {provides}

    def sample(self, event, demand):
        return ()


@healthcheck.hookimpl
def healthcheck_register_probes(register):
    register({registered})
"""
GOOD = {
    "listens_to": "(EventKind.STEP_END,)",
    "provides": '(Metric("mine.value", help="a value"),)',
    "registered": "Probe()",
}


def reason(folder: Path, text: str) -> str:
    file = folder / "mine.py"
    file.write_text(text, encoding="utf-8")
    host = PluginHost()
    host.load_local(str(file))
    return host.failures[0].reason if host.failures else ""


def test_all_hooks_that_do_not_fit_are_said_at_once(tmp_path: Path) -> None:
    said = reason(
        tmp_path,
        HEAD
        + "@healthcheck.hookimpl\ndef healthcheck_register_probs(register): ...\n"
        + "@healthcheck.hookimpl\ndef healthcheck_step_end(session, evnt): ...\n"
        + "def healthcheck_train_end(session): ...\n",
    )
    assert [line.strip() for line in said.splitlines()] == [
        '"mine" implements "healthcheck_register_probs", which is not a hook; did you mean "healthcheck_register_probes"?',
        '"mine": healthcheck_step_end has no argument "evnt"; did you mean "event"? it has session, event',
        '"mine" defines "healthcheck_train_end" without @healthcheck.hookimpl; add the mark',
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"listens_to": '("step_end",)'}, "listens_to holds 'step_end', expected EventKind; write for instance"),
        ({"provides": '("mine.value",)'}, "provides holds 'mine.value', expected Metric; write for instance"),
        ({"registered": "Probe"}, "register an object, not a class: register(Probe())"),
        ({}, ""),
    ],
)
def test_a_probe_of_another_shape_is_refused_in_words(tmp_path: Path, wrong: dict[str, str], said: str) -> None:
    answer = reason(tmp_path, HEAD + PROBE.format(**GOOD | wrong))
    assert said in answer
    assert bool(answer) is bool(said)


def test_what_its_code_raises_is_said_with_its_line(tmp_path: Path) -> None:
    said = reason(tmp_path, HEAD + "import no_such_module_of_mine\n")
    assert said == f"ModuleNotFoundError: No module named 'no_such_module_of_mine' ({tmp_path / 'mine.py'}:5)"


def test_a_name_with_a_typo_is_answered_with_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "health.py").write_text("", encoding="utf-8")
    host = PluginHost()
    host.load_local(str(tmp_path / "helath.py"))
    assert host.failures[0].reason.endswith('helath.py; did you mean "health.py"?')
