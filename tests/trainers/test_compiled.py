"""A compiled update: the same graphs, breaks and bits as without us, and what cannot be seen there is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.convert_frame
from torch import nn
from torch._dynamo.utils import counters

import healthcheck
from healthcheck.assembly import open_session
from healthcheck.instrument.script import InProcess
from healthcheck.run.ending import Ending

pytestmark = pytest.mark.filterwarnings("ignore:.*record_function.*")

RULES = {
    "version": 1,
    "rules": {
        "bad": {"metric": "grad_norm", "when": "nonfinite", "severity": "error", "then": ["skip_update"]},
        "loss": {"metric": "loss", "when": "nonfinite"},
        "ratio": {"metric": "update_ratio", "when": {"above": 1e9}},
        "clip": {"metric": "clip.ratio", "when": {"above": 1e9}},
    },
}
STEPS = 6


class Descent(torch.optim.Optimizer):
    """An optimizer of somebody's own: unlike torch's it fits into one graph."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "own": Descent,
}


def updates(shape: str, model: nn.Module, optimizer: Any, **options: Any) -> Callable[[], Any]:
    """What the user compiles: the step, or something round it."""
    parameters = list(model.parameters())

    def called() -> None:
        optimizer.step()

    def clipped() -> None:
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()

    def cut() -> None:
        nn.utils.clip_grad_value_(parameters, 0.05)
        optimizer.step()

    chosen = {"step": optimizer.step, "called": called, "clipped": clipped, "cut": cut}[shape]
    return torch.compile(chosen, backend="eager", **options)  # type: ignore[no-any-return]


class Trained:
    """One small training, with the update compiled; without us, under ``watch``, or as a script is watched."""

    def __init__(self, how: str, name: str, shape: str, bad: Sequence[int] = (), **options: Any) -> None:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        data = torch.randn(STEPS, 4, 6)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        session = open_session(rules=RULES, target="x", console=False, record=False) if how == "script" else None
        self.norms: list[float] = []
        self.losses: list[float] = []
        with nullcontext() if session is None else InProcess(session):
            optimizer = OPTIMIZERS[name](model.parameters())
            health = None
            if how == "watch":
                health = healthcheck.watch(model, optimizer, rules=RULES, console=False, record=False)
                session = health.session
            update = updates(shape, model, optimizer, **options)
            for step in range(1, STEPS + 1):
                if how == "plain" and step in bad:
                    continue
                optimizer.zero_grad()
                loss = model(data[step - 1]).pow(2).mean()
                loss.backward()
                if step in bad:
                    model[2].bias.grad[1] = float("nan")
                self.norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
                update()
                self.losses.append(loss.item())
                if health is not None:
                    health.step(loss=loss)
        if health is not None:
            health.close()
        elif session is not None:
            session.finish(Ending())
        self.session = session
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.graphs = dict(counters["stats"])
        self.breaks = Counter(counters["graph_break"])
        self.compilations = sorted(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values())

    def series(self, name: str) -> list[float]:
        assert self.session is not None
        return [value for _, value in self.session.history(name)]

    def reason(self, rule: str) -> str | None:
        assert self.session is not None
        assert self.session.report is not None
        return self.session.report["rules"][rule].get("reason")


@pytest.fixture(autouse=True)
def _forget_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()  # its caches hold optimizers


def assert_undisturbed(watched: Trained, plain: Trained) -> None:
    assert all(torch.equal(a, b) for a, b in zip(watched.weights, plain.weights, strict=True))
    assert watched.graphs == plain.graphs
    assert watched.breaks <= plain.breaks
    assert max(watched.compilations, default=0) <= max(plain.compilations, default=0)
    assert len(watched.compilations) <= len(plain.compilations)
    assert watched.session is not None
    assert watched.session.internal_errors == []
    assert watched.session.step == STEPS


@pytest.mark.parametrize(
    ("how", "name", "shape"),
    [
        pytest.param("watch", "adamw", "clipped", marks=pytest.mark.slow),
        pytest.param("script", "adamw", "step", marks=pytest.mark.slow),
        pytest.param("script", "momentum", "clipped", marks=pytest.mark.slow),
        pytest.param("watch", "fused", "step", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_update_is_seen_and_compiled_as_if_it_were_not(how: str, name: str, shape: str) -> None:
    plain, watched = Trained("plain", name, shape), Trained(how, name, shape)
    assert_undisturbed(watched, plain)
    assert watched.series("grad_norm") == pytest.approx(plain.norms, rel=1e-5)
    assert watched.series("loss") == pytest.approx(plain.losses, rel=1e-6)
    assert len(watched.series("update_ratio")) == STEPS
    if shape == "clipped":
        assert watched.series("clip.ratio") == pytest.approx([min(1.0, 0.5 / n) for n in plain.norms], rel=1e-3)


@pytest.mark.parametrize(("shape", "bad"), [("step", {1}), pytest.param("called", {2, 5}, marks=pytest.mark.slow)])
def test_a_bad_compiled_update_is_held_back_and_nothing_is_compiled_for_that(shape: str, bad: set[int]) -> None:
    plain, watched = Trained("plain", "adamw", shape, sorted(bad)), Trained("watch", "adamw", shape, sorted(bad))
    assert_undisturbed(watched, plain)
    assert watched.session is not None
    assert watched.session.alerts[0].fired_step == min(bad)


@pytest.mark.parametrize(
    ("how", "shape"),
    [
        ("watch", "clipped"),
        pytest.param("script", "clipped", marks=pytest.mark.slow),
        pytest.param("script", "called", marks=pytest.mark.slow),
    ],
)
def test_a_step_inside_one_whole_graph_is_counted_and_the_rest_is_said_to_be_missing(how: str, shape: str) -> None:
    """``fullgraph=True`` fails at the first function that the compiler may not look into."""
    plain = Trained("plain", "own", shape, fullgraph=True)
    watched = Trained(how, "own", shape, fullgraph=True)
    assert_undisturbed(watched, plain)
    assert watched.series("loss")
    assert watched.reason("ratio") == "the step of Descent is compiled into a larger graph"
    assert watched.session is not None
    assert watched.session.report is not None
    assert "skip_update" not in watched.session.report["capabilities"]["controls"]
    if shape == "clipped":  # the loop's own norm is all that leaves the graph
        assert watched.series("grad_norm")[-1] == pytest.approx(plain.norms[-1], rel=1e-5)
    else:
        assert watched.reason("bad") == watched.reason("ratio")


@pytest.mark.slow
def test_gradients_cut_inside_a_graph_are_missing_and_not_measured_afterwards() -> None:
    plain, watched = Trained("plain", "adamw", "cut"), Trained("watch", "adamw", "cut")
    assert_undisturbed(watched, plain)
    assert watched.series("grad_norm") == []
    assert watched.reason("bad") == "gradients are clipped inside a compiled graph"


def state_of_torch() -> list[Any]:
    """What watching a compiled update replaces, beside the hooks."""
    return [
        torch.optim.AdamW.step.__code__,
        torch.optim.Optimizer.__dict__["_patch_step_function"],
        torch.autograd.backward,
        torch.nn.utils.clip_grad._clip_grads_with_norm_,
        torch._dynamo.optimize,
    ]


@pytest.fixture(params=["watch", "script"])
def watching(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Makes a context in which a training is watched."""
    torch._dynamo.reset()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    session = open_session(rules=RULES, target="x", console=False, record=False)
    if request.param == "watch":
        yield lambda: healthcheck.watch(model, optimizer, rules=RULES, console=False, record=False)
    else:
        yield lambda: InProcess(session)
    session.finish(Ending())


def test_nothing_of_the_compiler_is_touched_while_nothing_is_compiled(watching: Callable[[], Any]) -> None:
    """Public hooks and plain functions are enough: whoever reads a traceback or steps through it finds no tricks."""
    before = state_of_torch()
    with watching():
        assert all(a is b for a, b in zip(before[:2], state_of_torch(), strict=False))


@pytest.mark.parametrize("compiled_before", [True, False])
def test_torch_is_given_back_as_it_was(watching: Callable[[], Any], compiled_before: bool) -> None:
    before = state_of_torch()
    if compiled_before:
        torch.compile(nn.Linear(2, 1), backend="eager")
    with watching():
        torch.compile(nn.Linear(2, 1), backend="eager")
        assert torch.optim.AdamW.step.__code__ is not before[0]
    assert all(a is b for a, b in zip(before, state_of_torch(), strict=True))


def test_a_module_that_compiles_itself_is_noticed_too(watching: Callable[[], Any]) -> None:
    before = state_of_torch()
    with watching():
        nn.Linear(2, 1).compile(backend="eager")
        assert torch.optim.AdamW.step.__code__ is not before[0]
