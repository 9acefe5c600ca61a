"""``check_plugin``: every mistake of a plugin in one list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from healthcheck import Cost, Event, EventKind, Metric, Sample, Session, hookimpl
from healthcheck.core.protocols import ConditionType, Probe
from healthcheck.testing import check_plugin


class Fine:
    """A plugin without a mistake."""

    @hookimpl
    def healthcheck_step_end(self, session: Session, event: Event) -> None: ...

    @hookimpl
    def healthcheck_alert(self, alert: Any) -> None: ...


def test_a_plugin_that_fits_has_no_mistakes() -> None:
    assert check_plugin(Fine) == []
    assert check_plugin(Fine()) == []


def test_the_built_ins_and_the_example_fit_too() -> None:
    import healthcheck_example

    assert check_plugin(healthcheck_example, "healthcheck_example") == []


def test_a_wrong_argument_is_named_with_a_suggestion() -> None:
    class Plugin:
        @hookimpl
        def healthcheck_step_end(self, evnt): ...

    assert (
        check_plugin(Plugin)[0]
        == 'healthcheck_step_end has no argument "evnt"; did you mean "event"? it has session, event'
    )


def test_a_wrong_annotation_is_named() -> None:
    class Plugin:
        @hookimpl
        def healthcheck_step_end(self, event: Session) -> int:
            return 1

    assert check_plugin(Plugin) == [
        "healthcheck_step_end: event is annotated Session, it is Event",
        "healthcheck_step_end returns nothing, but is annotated -> int",
    ]


def test_a_loop_hook_may_not_wrap() -> None:
    class Plugin:
        @hookimpl(wrapper=True)
        def healthcheck_step_end(self, event):
            return (yield)

    assert "healthcheck_step_end: loop hooks cannot be wrappers" in check_plugin(Plugin)


@pytest.mark.parametrize(
    ("name", "said"),
    [("healthcheck_step_ends", "which is not a hook"), ("healthcheck_step_end", "without @healthcheck.hookimpl")],
)
def test_unknown_hooks_and_missing_marks_are_refused(name: str, said: str) -> None:
    def function(event: Any) -> None: ...

    marked = hookimpl(function) if name.endswith("ends") else function
    plugin = type("Plugin", (), {name: staticmethod(marked)})
    assert any(said in text for text in check_plugin(plugin()))


def test_a_plugin_without_hooks_is_pointed_to_the_mark() -> None:
    assert check_plugin(type("Empty", (), {})()) == [
        '"Empty" implements no hook; mark its functions with @healthcheck.hookimpl'
    ]


class Reads:
    name = "reads"
    listens_to = (EventKind.LOSS,)
    provides = (Metric("reads.loss", help=""), Metric("reads.other", help="x", cost=Cost.DEVICE))

    def sample(self, event):
        import torch

        return [Sample("reads.loss", event.step, torch.as_tensor(event.loss).item())]


def test_a_probe_must_be_documented_and_declare_its_cost() -> None:
    class Plugin:
        @hookimpl
        def healthcheck_register_probes(self, register: Callable[[Probe], None]) -> None:
            register(Reads())

    text = "\n".join(check_plugin(Plugin))
    for part in (
        'probe "reads": its class has no docstring',
        'probe "reads": sample must take 2 arguments',
        'metric "reads.loss" has no help',
        'metric "reads.loss" declares cost free, but works with torch; declare Cost.DEVICE',
        'metric "reads.other" declares cost device, but moves values to the host',
    ):
        assert part in text


def test_schemas_must_be_draft_07_and_conditions_need_help() -> None:
    class Page:
        """Pages somebody."""

        name = "mine.page"
        stage = "observe"
        options_schema: ClassVar = {"type": "objct"}

        def run(self, alert): ...

    class Plugin:
        @hookimpl
        def healthcheck_register_actions(self, register):
            register(Page())

        @hookimpl
        def healthcheck_register_conditions(self, register):
            register(ConditionType("mine.c", {"minimum": "x"}, compile=lambda options, rule: None))  # type: ignore[arg-type,return-value]

    text = "\n".join(check_plugin(Plugin))
    assert 'action "mine.page": its schema is not a draft-07 schema' in text
    assert 'action "mine.page": run must take 2 arguments' in text
    assert 'condition "mine.c": its schema is not a draft-07 schema' in text
    assert 'condition "mine.c" has no help' in text


def plugin_with(kind: str, thing: Any) -> Any:
    """A plugin that registers one thing."""

    def registers(self: Any, register: Any) -> None:
        register(thing)

    return type("Plugin", (), {f"healthcheck_register_{kind}": hookimpl(registers)})


@pytest.mark.parametrize(
    ("kind", "lacks", "said"),
    [
        ("probes", "sample", 'a probe needs "sample"; see healthcheck.Probe'),
        ("actions", "run", 'an action needs "run"; see healthcheck.Action'),
        ("reports", "name", 'a report needs "name"; see healthcheck.Report'),
        ("readers", "read", 'a reader needs "read"; see healthcheck.Reader'),
    ],
)
def test_what_is_not_there_at_all_is_named(kind: str, lacks: str, said: str) -> None:
    has = {"name": "mine.x", "help": "x", "stage": "observe", "listens_to": (), "provides": (), "recognises": len}
    thing = type("Thing", (), {name: value for name, value in has.items() if name != lacks})()
    assert check_plugin(plugin_with(kind, thing), "mine") == [f"mine: {said}"]


def test_a_probe_that_saves_and_never_loads_is_named() -> None:
    class Counts:
        """Counts."""

        name = "counts"
        listens_to = (EventKind.STEP_END,)
        only_when_due = (EventKind.LOSS,)
        rows_with = "maxnorm"
        stretchable = ("counts.other",)
        provides = (Metric("counts.steps", help="steps"),)

        def sample(self, event, demand):
            return ()

        def state_dict(self):
            return {}

        def plan(self): ...

    assert check_plugin(plugin_with("probes", Counts()), "mine") == [
        'probe "counts": plan must take 1 argument, it is ()',
        'probe "counts" has state_dict but no load_state_dict: a resumed run does not go on with its counters',
        'probe "counts": only_when_due holds loss, to which it does not listen',
        'probe "counts": rows_with is "maxnorm", which no row has; did you mean "max_norm"?',
        'probe "counts": stretchable holds "counts.other", which it does not provide',
    ]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda head: head[0] == 35, "recognises raised IndexError for an empty head, as of a folder"),
        (lambda head: 100 if head else 0, "from 0.0 to 1.0; for bytes of another format it answers 100"),
        (lambda head: None, "it answers None"),
    ],
)
def test_a_reader_that_cannot_look_at_other_files_is_named(answer: Callable[[bytes], Any], said: str) -> None:
    class Reads:
        name = "mine.reads"
        help = "files of mine"

        def recognises(self, path, head):
            return answer(head)

        def read(self, path, notes):
            return iter(())

    [problem] = check_plugin(plugin_with("readers", Reads()), "mine")
    assert said in problem


def test_a_report_with_a_method_that_is_never_called_is_named() -> None:
    class Table:
        """A table."""

        name = "mine.table"

        def render(self, reports):
            return ""

        def alerts(self, alert): ...

        def on_cleared(self, alert): ...

    assert check_plugin(plugin_with("reports", Table()), "mine") == [
        'report "mine.table" has a method alerts, which is never called; did you mean "alert"?',
        'report "mine.table" has a method on_cleared, which is never called; did you mean "cleared"?',
    ]


def test_a_pack_must_load(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("version: 1\nrules: {a: {metric: los, when: {above: 1}}}\n")

    class Plugin:
        @hookimpl
        def healthcheck_register_rulepacks(self, register):
            register("p", str(tmp_path / "p.yaml"))

    [problem] = check_plugin(Plugin, "mine")
    assert problem.startswith('rule pack "mine:p": ')
    assert 'did you mean "loss"' in problem


def test_a_registration_that_raises_is_reported() -> None:
    class Plugin:
        @hookimpl
        def healthcheck_register_probes(self, register):
            raise KeyError("oh")

    assert check_plugin(Plugin, "mine") == ["mine raised while it registered: KeyError: 'oh'"]


def test_a_collective_in_a_plugin_is_a_mistake() -> None:
    class Averages:
        """Adds up a number over the ranks."""

        @hookimpl
        def healthcheck_step_end(self, event: Event) -> None:
            import torch.distributed as dist

            dist.all_reduce(event.loss)

    [said] = check_plugin(Averages)
    assert "it calls dist.all_reduce" in said
    assert "event.run.ranks" in said
