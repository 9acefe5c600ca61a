"""Errors of those who watch: kept once, said once, and one that looks like memory has the memory cleaned up."""

from __future__ import annotations

import pytest

from healthcheck.core.errors import StopTraining, UnknownHookError
from healthcheck.core.events import EventKind
from healthcheck.extend.dispatch import Dispatch
from healthcheck.run.errorlog import ErrorLog, looks_like_memory


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("x"), True),
        (RuntimeError("CUDA error: an illegal access"), True),
        (OSError("Cannot allocate"), True),
        (ValueError("memory"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_an_error_looks_like_memory_by_its_type_or_its_words(error: BaseException, expected: bool) -> None:
    assert looks_like_memory(error) is expected


def test_a_fault_of_ours_is_said_once_and_counted() -> None:
    said: list[str] = []
    log = ErrorLog(said.append, lambda: None)
    for step in (3, 4):
        log.ours(ValueError("boom"), "emit", step, 0.5)
    (entry,) = log.internal
    assert (entry["error"], entry["step"], entry["count"], entry["method"], entry["epoch"]) == (
        "ValueError: boom",
        3,
        2,
        "emit",
        0.5,
    )
    assert said == ["healthcheck: internal error at step 3, training goes on: ValueError: boom"]


def test_memory_is_cleaned_up_once_a_run_and_a_cleanup_that_fails_is_said_too() -> None:
    cleaned: list[str] = []

    def clean() -> str:
        cleaned.append("now")
        return "released 3 MiB"

    log = ErrorLog(lambda text: None, clean)
    log.ours(MemoryError("one"), "", 1, None)
    log.ours(MemoryError("two"), "", 2, None)
    assert [entry.get("cleanup") for entry in log.internal] == ["released 3 MiB", None]
    assert cleaned == ["now"]

    def broken() -> str:
        raise RuntimeError("no device")

    log = ErrorLog(lambda text: None, broken)
    log.ours(MemoryError("one"), "", 1, None)
    assert log.internal[0]["cleanup"] == "cleanup failed: RuntimeError: no device"


def noting(on_error: str = "warn") -> tuple[Dispatch, ErrorLog, list[str]]:
    said: list[str] = []
    log = ErrorLog(said.append, lambda: None)
    dispatch = Dispatch(
        on_error=on_error, say=log.say_plugin, note=lambda owner, hook, error: log.plugin(owner, hook, error, 2.0)
    )
    return dispatch, log, said


def test_an_error_of_a_plugin_is_kept_with_what_only_the_session_knows() -> None:
    dispatch, log, said = noting()

    def bad(event: object) -> None:
        raise KeyError("mine")

    dispatch.on("step_end", bad, owner="acme")
    for step in (1, 2, 3, 4):
        dispatch.call("step_end", step, None, None)
    (error,) = dispatch.errors
    (entry,) = log.plugin_entries([error], [])
    assert (entry["plugin"], entry["step"], entry["count"], entry["quarantined"], entry["epoch"]) == (
        "acme",
        1,
        3,
        True,
        2.0,
    )
    assert len(said) == 2  # the first time, and when it is switched off
    assert said[1].endswith("it is switched off for the rest of this run")
    assert not dispatch.has_hooks("step_end")


def test_a_report_is_called_by_the_methods_that_it_has_and_switched_off_after_three_errors() -> None:
    class Report:
        name = "mine"

        def __init__(self) -> None:
            self.heard: list[object] = []

        def note(self, text: str) -> None:
            self.heard.append(text)
            raise OSError("disk full")

        def samples(self, step: int, samples: list[object]) -> None:
            self.heard.append((step, samples))

    dispatch, _, said = noting()
    report = Report()
    dispatch.compile_reports([report])
    dispatch.report("samples", 7, 7, [])
    dispatch.report("transition", 7, "nobody has this method")
    for text in ("one", "two", "three", "four"):
        dispatch.report("note", 8, text)
    dispatch.report("samples", 9, 9, [])
    assert report.heard == [(7, []), "one", "two", "three"]
    assert len(said) == 2


def test_a_stop_passes_through_and_on_error_raise_lets_errors_out() -> None:
    dispatch, _, _ = noting(on_error="raise")

    def stops(event: object) -> None:
        raise StopTraining("now")

    def bad(event: object) -> None:
        raise ValueError("boom")

    dispatch.on(EventKind.LOSS, stops)
    dispatch.on(EventKind.STEP_END, bad)
    with pytest.raises(StopTraining):
        dispatch.call("loss", 1, None, None)
    assert dispatch.errors == []
    with pytest.raises(ValueError, match="boom"):
        dispatch.call("step_end", 1, None, None)


def test_whoever_keeps_a_table_of_listeners_hears_when_one_comes_or_goes() -> None:
    dispatch, _, _ = noting()
    changes: list[list[str]] = []
    dispatch.changed = lambda: changes.append(dispatch.list_hooks("loss"))
    remove = dispatch.on("loss", lambda event: None, owner="acme")
    dispatch.on("loss", lambda event: None, owner="other")
    remove()
    dispatch.quarantine("other")
    assert changes == [["acme"], ["acme", "other"], ["other"], []]


def test_a_hook_that_does_not_exist_is_refused_with_a_suggestion() -> None:
    dispatch, _, _ = noting()
    with pytest.raises(UnknownHookError, match='did you mean "loss"'):
        dispatch.on("los", print)
