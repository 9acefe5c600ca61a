"""Known alerts do not fail a run; only what is new does."""

from __future__ import annotations

import pytest

from healthcheck.core.errors import RuleFileError
from healthcheck.rulelang.accepted import FILE_NAME, Acceptance, add_accepted, find_accepted, load_accepted


def test_what_is_written_is_read_again_and_comments_stay(tmp_path) -> None:
    path = tmp_path / FILE_NAME
    first = Acceptance("no-gradient", 'frozen: "on purpose"', series="grad_norm[head.*]", since="2026-11-27")
    assert add_accepted(path, [first, first]) == [first]
    path.write_text(path.read_text() + "  # a remark\n")
    second = Acceptance("loss-spike", "known data", script="train_rl.py")
    assert add_accepted(path, [first, second]) == [second]
    entries = load_accepted(path).entries
    assert [(e.rule, e.reason, e.series, e.script, e.since) for e in entries] == [
        (first.rule, first.reason, first.series, "*", first.since),
        (second.rule, second.reason, "*", second.script, ""),
    ]
    assert entries[1].origin.line > entries[0].origin.line
    assert "# a remark" in path.read_text()


def test_an_alert_is_accepted_only_if_all_of_its_series_are(tmp_path) -> None:
    path = tmp_path / FILE_NAME
    add_accepted(
        path, [Acceptance("no-gradient", "frozen", series="grad_norm[head.*]"), Acceptance("loss-spike", "data")]
    )
    accepted = load_accepted(path)
    assert accepted.reason("no-gradient", ["grad_norm[head.a]", "grad_norm[head.b]"]) == "frozen"
    assert accepted.reason("no-gradient", ["grad_norm[head.a]", "grad_norm[body.b]"]) == ""
    assert [e.rule for e in accepted.unused()] == ["loss-spike"]


def test_scripts_are_known_by_path_or_name() -> None:
    entry = Acceptance("a", "b", script="train_*.py")
    assert entry.covers("a", "loss", "jobs/train_rl.py")
    assert not entry.covers("a", "loss", "jobs/sft.py")


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("accepted: []\n", ["1:1: error[no-version]: the file does not say `version: 1`"]),
        ("version: 2\n", ["1:10: error[newer-version]: version 2 needs a newer healthcheck"]),
        ("version: one\n", ['1:10: error[bad-value]: "one" is not a version of accepted alerts (write `version: 1`)']),
        ("- a\n", ["1:1: error[bad-value]: the file is not a map of keys (begin with `version: 1`)"]),
        ("version: 1\naccepted: {a: b}\n", ["2:11: error[bad-value]: expected a list of {rule, reason}"]),
        ("version: 1\naccepted: [a]\n", ["2:12: error[bad-value]: expected {rule: ..., reason: ...}"]),
        ("version: 1\naccepted: [{rule: a}]\n", ["2:12: error[missing-key]: `reason` is missing here"]),
        (
            "version: 1\naccepted:\n  - {rul: a, reason: 3}\n  - {}\n",
            [
                '3:6: error[unknown-key]: unknown key "rul" (did you mean "rule"?)',
                "3:22: error[bad-value]: `reason` is text; found the number 3",
                "4:5: error[missing-key]: `rule` is missing here",
                "4:5: error[missing-key]: `reason` is missing here",
            ],
        ),
        ("version: 1\nacepted: []\n", ['2:1: error[unknown-key]: unknown key "acepted" (did you mean "accepted"?)']),
        ("version: 1\naccepted: [{rule: a, reason: }]\n", ["2:30: error[bad-value]: `reason` is text"]),
        ("", [" error[empty]: the file is empty"]),
        ("version: 1\naccepted: [\n", ["2:11: error[syntax]: this `[` is never closed"]),
        ("version: 1\nversion: 1\n", ['2:1: error[duplicate-key]: duplicate key "version" (first at line 1)']),
    ],
)
def test_mistakes_are_all_named_with_their_places(tmp_path, text, answers) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(RuleFileError) as raised:
        load_accepted(tmp_path / FILE_NAME)
    found = [str(p).removeprefix(f"{tmp_path / FILE_NAME}:") for p in raised.value.problems]
    assert len(found) == len(answers)
    assert all(line.startswith(answer) for line, answer in zip(found, answers, strict=True)), found


def test_a_file_without_entries_accepts_nothing(tmp_path) -> None:
    (tmp_path / FILE_NAME).write_text("version: 1\n")
    assert load_accepted(tmp_path / FILE_NAME).entries == []


def test_the_nearest_file_up_to_the_repository_root_is_found(tmp_path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert find_accepted(tmp_path / "a" / "b") is None
    (tmp_path / FILE_NAME).write_text("version: 1\naccepted: []\n")
    assert find_accepted(tmp_path / "a" / "b") == tmp_path / FILE_NAME
