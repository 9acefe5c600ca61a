"""Whatever a plugin raises, wherever and whenever: the training has the same weights, and the report says whose it was.

As SQLite tests what calls it: every place in which code of a plugin runs, every kind of error, at several calls.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import healthcheck
from healthcheck.core.errors import StopTraining
from healthcheck.core.events import EventKind

STEPS = 6
NAME = "sweep_plugin"
RULES = """
version: 1
external: [mine]
rules:
  first: {metric: grad_norm, when: {above: -1}, severity: warning, then: [warn, sweep_plugin.act]}
  second: {metric: mine, when: {above: 0}, severity: warning, then: [warn, sweep_plugin.act]}
  third: {metric: grad_norm, when: {above: -2}, severity: warning, then: [warn, sweep_plugin.act]}
  scored: {metric: grad_norm, when: {sweep_plugin.limit: {above: 1000}}}
  probed: {metric: sweep.value, when: {above: 1000}}
"""


class OfAPlugin(BaseException):
    """Neither Exception nor anything that Python knows."""


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class LeavesInText(Exception):
    def __str__(self) -> str:
        raise SystemExit(9)

    __repr__ = __str__


def recurse() -> None:
    recurse()


def read_past_the_end() -> None:
    next(iter(()))


def raising(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


ERRORS: dict[str, Callable[[], None]] = {
    "Exception": raising(RuntimeError("boom")),
    "KeyError": raising(KeyError("loss")),
    "SystemExit": raising(SystemExit(7)),
    "SystemExit-0": raising(SystemExit(0)),
    "GeneratorExit": raising(GeneratorExit()),
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "BaseException": raising(OfAPlugin("boom")),
    "StopIteration": read_past_the_end,
    "RecursionError": recurse,
    "MemoryError": raising(MemoryError()),
    "no-text": raising(NoText()),
    "leaves-in-text": raising(LeavesInText()),
    "two-lines": raising(RuntimeError("boom\n::error::forged\x1b[2J")),
}

LOOP = ("train_start", "step_start", "backward_end", "before_update", "after_update", "step_end", "train_end")
JUDGEMENT = ("samples", "transition", "alert", "performance", "report_section")
PARTS = ("probe.sample", "probe.plan", "action.run", "condition.start", "condition.update", "condition.bound")
REPORT = tuple(f"report.{name}" for name in ("start", "samples", "transition", "alert", "acted", "note", "finish"))
BEFORE = (
    "load",
    "register_probes",
    "register_conditions",
    "register_actions",
    "register_reports",
    "modify_rules",
    "configure",
)


class Trap:
    """Counts the calls of every place, and raises in one of them at one call."""

    def __init__(self, where: str = "", at: int = 0, error: Callable[[], None] | None = None) -> None:
        self.where, self.at, self.error = where, at, error
        self.calls: Counter[str] = Counter()

    def __call__(self, where: str) -> None:
        self.calls[where] += 1
        if where == self.where and self.calls[where] == self.at and self.error is not None:
            self.error()


class Scorer:
    normal = None
    memoryless = False

    def __init__(self, trap: Trap) -> None:
        self.trap = trap
        trap("condition.start")

    def update(self, values: Any, steps: Any, quiet: Any) -> Any:
        self.trap("condition.update")
        return [(value, None) for value in values]

    def bound(self, healthy: Any) -> Any:
        self.trap("condition.bound")

    def state(self) -> Any:
        return {}

    def restore(self, state: Any) -> None: ...


def plugin(trap: Trap) -> ModuleType:
    """A module with every hook and one of every kind of thing that can be registered."""
    trap("load")
    module = ModuleType(NAME)

    def hook(name: str, function: Callable[..., Any]) -> None:
        setattr(module, f"healthcheck_{name}", healthcheck.hookimpl(function))

    class Probe:
        name = "sweep.probe"
        listens_to = (EventKind.STEP_END,)
        provides = (healthcheck.Metric("sweep.value", help="one"),)

        def plan(self, demand: Any) -> None:
            trap("probe.plan")

        def sample(self, event: Any, demand: Any) -> Any:
            trap("probe.sample")
            yield healthcheck.Sample("sweep.value", event.step, 1.0)

    class Act:
        name = f"{NAME}.act"
        stage = "observe"
        options_schema: dict[str, Any] = {}  # noqa: RUF012

        def run(self, alert: Any, context: Any) -> Any:
            trap("action.run")
            return healthcheck.ActionOutcome(self.name, True, "acted")

    def compile(options: Any, rule: Any) -> Any:
        threshold = healthcheck.Threshold("above", 1000.0)
        return healthcheck.CompiledCondition(f"{NAME}.limit", threshold, lambda *sides: Scorer(trap), bounded=True)

    parts = {
        "probes": Probe(),
        "actions": Act(),
        "conditions": healthcheck.ConditionType(f"{NAME}.limit", {"type": "object"}, compile),
        "reports": type(
            "Report",
            (),
            {"name": f"{NAME}.report"}
            | {name.partition(".")[2]: (lambda self, *given, at=name: trap(at)) for name in REPORT},
        )(),
    }
    for kind, part in parts.items():

        def register(register: Any, kind: str = kind, part: Any = part) -> None:
            register(part)
            trap(f"register_{kind}")

        hook(f"register_{kind}", register)
    for name in LOOP:
        hook(name, lambda session, event, name=name: trap(name))
    hook("samples", lambda session, step, samples: trap("samples"))
    hook("transition", lambda session, transition: trap("transition"))
    hook("alert", lambda session, alert: trap("alert"))
    hook("performance", lambda session, performance: (performance.clear(), trap("performance"))[1])
    hook("report_section", lambda session, report: (report.clear(), trap("report_section")))

    def modify_rules(rules: list[Any]) -> None:
        kept = list(rules)
        rules.clear()
        trap("modify_rules")
        rules[:] = kept

    hook("modify_rules", modify_rules)
    hook("configure", lambda session: trap("configure"))
    return module


def train(watched: Callable[..., Any] | None = None) -> tuple[list[float], Any]:
    """A few steps of a linear model; weights at the end, and the session that watched."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            if watched is not None:
                healthcheck.log(mine=1.0)
            optimizer.step()

    session = None
    if watched is None:
        steps()
    else:
        with watched(model, optimizer) as loop:
            session = loop.session
            steps()
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()], session


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return train()[0]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, plain: list[float]) -> Callable[..., dict[str, Any]]:
    """``sweep(trap)``: trains under that plugin, asserts that training is untouched, returns the report."""

    def run(trap: Trap, rules: str = RULES, **options: Any) -> dict[str, Any]:
        monkeypatch.delitem(sys.modules, NAME, raising=False)
        monkeypatch.setattr("importlib.import_module", _importing(trap))

        def watch(model: Any, optimizer: Any) -> Any:
            return healthcheck.watch(
                model, optimizer, rules=rules, plugins=[NAME], console=False, record=False, **options
            )

        weights, session = train(watch)
        assert weights == plain
        return dict(session.report)

    return run


def _importing(trap: Trap) -> Callable[..., Any]:
    import importlib

    real = importlib.import_module
    return lambda name, *more, **how: plugin(trap) if name == NAME else real(name, *more, **how)


@pytest.fixture(scope="module")
def usual() -> Counter[str]:
    """How often each place is called in a run in which nothing goes wrong."""
    trap = Trap()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.import_module", _importing(trap))
        train(
            lambda model, optimizer: healthcheck.watch(
                model, optimizer, rules=RULES, plugins=[NAME], console=False, record=False
            )
        )
    return trap.calls


def cases(places: tuple[str, ...], *later: str) -> list[Any]:
    return [
        pytest.param(place, error, moment, id=f"{place}-{error}-{moment}")
        for place in places
        for error in ERRORS
        for moment in ("first", *(later if error in DIFFERENT else ()))
    ]


ONCE = ("train_start", "train_end", "performance", "report_section", "report.start", "report.finish", "probe.plan")
OFTEN = tuple(
    place
    for place in (*LOOP, *JUDGEMENT, *PARTS, *REPORT)
    if place not in (*ONCE, "report.note", "condition.bound", "condition.start")
)
DIFFERENT = ("SystemExit", "StopIteration", "leaves-in-text")
"""Errors that are tried at later calls too."""


@pytest.mark.parametrize(
    ("place", "error", "moment"), [*cases(OFTEN, "third", "last"), *cases(ONCE), *cases(("condition.start",), "last")]
)
def test_an_error_of_a_plugin_touches_nothing_and_has_its_owner(
    place: str, error: str, moment: str, sweep: Callable[..., dict[str, Any]], usual: Counter[str]
) -> None:
    last = usual[place]
    assert last, f"{place} is never called: the test tests nothing"
    # The rules are compiled before anything runs: a condition that cannot even be made then is a mistake in them.
    at = {"first": 2 if place == "condition.start" else 1, "third": min(3, last), "last": last}[moment]
    trap = Trap(place, at, ERRORS[error])
    report = sweep(trap)
    assert trap.calls[place] >= at
    assert (report["exit_code"], report["verdict"], report["steps"]) == (0, "warned", STEPS)
    assert report["internal_errors"] == []
    if place == "action.run":
        (entry,) = report["action_errors"]
        assert entry["action"] == f"{NAME}.act"
    elif place != "report.finish":  # the report is complete by then: said on the console only
        (entry,) = report["plugin_errors"]
        assert entry["plugin"].startswith(("sweep", NAME))
        assert __file__ in entry["place"]
    if place.startswith("condition"):
        assert report["rules"]["scored"]["verdict"] == "not judged"
        assert "sweep_plugin.limit raised" in report["rules"]["scored"]["reason"]
    assert report["rules"]["first"]["verdict"] == "warned"


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize(("place", "error", "moment"), cases(BEFORE))
def test_a_plugin_that_raises_while_it_registers_is_not_loaded(
    place: str, error: str, moment: str, observe: bool, sweep: Callable[..., dict[str, Any]]
) -> None:
    trap = Trap(place, 1, ERRORS[error])
    # A rule that names what was not loaded would be a mistake of its own.
    known = (
        RULES
        if place in ("modify_rules", "configure")
        else "version: 1\nrules: {first: {metric: grad_norm, when: {above: -1}}}"
    )
    report = sweep(trap, rules=known, observe=observe)
    (entry,) = report["plugin_errors"]
    assert entry["plugin"] == NAME
    assert entry["hook"] == (place if place in ("modify_rules", "configure") else "load")
    assert report["exit_code"] == 0
    assert report["internal_errors"] == []
    heard = {name for name in trap.calls if name in (*LOOP, *JUDGEMENT, *REPORT, "probe.sample", "action.run")}
    assert heard == set(), "nothing of a plugin that is not loaded is called"
    assert "first" in report["rules"]


@pytest.mark.parametrize("hook", ["step_end", "before_update"])
def test_a_stop_that_nobody_asked_for_is_an_error_of_whoever_raises_it(
    hook: str, sweep: Callable[..., dict[str, Any]]
) -> None:
    report = sweep(Trap(hook, 2, raising(StopTraining("mine"))))
    (entry,) = report["plugin_errors"]
    assert (entry["plugin"], entry["hook"]) == (NAME, hook)
