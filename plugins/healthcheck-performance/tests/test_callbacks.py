"""Every class and parameter of Dream Trainer's performance document, in its collection and under ``healthcheck.watch``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from healthcheck import UsageError
from healthcheck_performance import callbacks
from healthcheck_performance.callbacks import (
    AutoAnalyzer,
    CompilationMonitor,
    FaultToleranceCallback,
    FaultToleranceParameters,
    FindGraphBreaksCallback,
    Fp8Quantization,
    MemoryProfiler,
    OptimizeFSDP,
    PerformanceReporter,
    ProfileCallback,
    ThroughputMonitor,
    WarmupCallback,
)

# Dynamo looks at the gradient of what it passes on behind a graph break; torchft leaves a socket to the interpreter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
DRIVERS = Path(__file__).resolve().parents[3] / "tests" / "trainers" / "drivers"
sys.path.insert(0, str(DRIVERS))
dream_loop = pytest.importorskip("dream_loop", reason="Dream Trainer's loop is beside the tests of the repository")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "performance-callbacks.md"


class DreamModel(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)) if inner is None else inner

    def forward(self, x: Any) -> Any:
        return {"loss": self.inner(x).pow(2).mean()}


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``fit([callbacks], steps=20)``: a run of Dream Trainer's loop; returns its trainer and the report of our callback."""
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def run(given: list[Any], *, steps: int = 20, model: nn.Module | None = None) -> Any:
        torch.manual_seed(0)
        collection = dream_loop.CallbackCollection(given)
        batches = [{"x": torch.randn(4, 8)} for _ in range(steps)]
        trainer = dream_loop.Trainer(DreamModel() if model is None else model, batches, collection)
        for name in ("pre_launch", "post_configure"):
            getattr(collection, name)()
        trainer.fit()
        health = collection["HealthCheckCallback"]
        return SimpleNamespace(trainer=trainer, report=health.report, model=trainer.model)

    return run


def profiler(folder: Path) -> Any:
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=2),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder)),
        record_shapes=True,
        profile_memory=True,
        with_stack=False,
        acc_events=True,
    )


def test_profile_callback_runs_the_profiler_that_it_is_given(fit: Callable[..., Any], tmp_path: Path) -> None:
    ran = fit([ProfileCallback(profiler(tmp_path / "logs"))])
    assert len(list((tmp_path / "logs").glob("*.pt.trace.json"))) == 2
    assert "performance.profile" in ran.report["performance"]["findings"]


def test_find_graph_breaks_writes_its_log_and_the_training_goes_on(fit: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    ran = fit([FindGraphBreaksCallback(log_file="breaks.log", skip=0, fullgraph=False)], model=compiled(Breaks()))
    text = Path("breaks.log").read_text(encoding="utf-8")
    assert f"{__file__}:" in text
    assert "Graph break due to:" in text
    assert ran.report["steps"] == 20
    torch._dynamo.reset()


def test_find_graph_breaks_with_fullgraph_raises(fit: Callable[..., Any]) -> None:
    torch._dynamo.reset()

    class Late(DreamModel):
        def forward(self, x: Any) -> Any:
            self.__dict__.setdefault("made", torch.compile(self.inner, backend="eager"))
            return {"loss": self.made(x).pow(2).mean()}

    original = torch.compile
    with pytest.raises(Exception, match="Data-dependent branching"):
        fit([FindGraphBreaksCallback("full.log", fullgraph=True)], model=Late(Breaks()))
    torch.compile = original  # a trainer that fails calls no post_fit
    torch.nn.Module.compile = _module_compile  # type: ignore[method-assign]
    torch._dynamo.reset()


_module_compile = torch.nn.Module.compile


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        if y.mean() > 100:
            y = y * 2
        return y


def compiled(inner: nn.Module) -> DreamModel:
    return DreamModel(torch.compile(inner, backend="eager"))  # type: ignore[arg-type]


def test_throughput_is_measured_after_the_warm_up(fit: Callable[..., Any]) -> None:
    monitor = ThroughputMonitor(warmup_steps=5)
    ran = fit([monitor])
    assert len(monitor.tool.values) <= 15
    assert monitor.tool.mean > 0
    assert ran.report["performance"]["findings"]["performance.throughput"]["value"] == monitor.tool.mean


def test_warm_up_holds_for_those_behind_it(fit: Callable[..., Any]) -> None:
    monitor = ThroughputMonitor(warmup_steps=1)
    fit([WarmupCallback(steps=12), monitor])
    assert monitor.tool.skip == 12
    assert len(monitor.tool.values) <= 8


def test_compile_times_are_known_by_function(fit: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    monitor = CompilationMonitor()
    fit([monitor], model=compiled(Breaks()))
    assert sum(monitor.compile_times.values()) > 0
    assert len(monitor.graph_breaks) == 1
    torch._dynamo.reset()


def test_memory_is_written_every_so_many_steps(fit: Callable[..., Any]) -> None:
    monitor = MemoryProfiler(profile_every=5)
    fit([monitor])
    stats = json.loads(Path("memory_profile.json").read_text(encoding="utf-8"))
    assert stats == monitor.memory_stats
    assert {entry["step"] for entry in stats} <= {5, 10, 15, 20}
    assert stats


def test_the_reporter_writes_what_was_measured(fit: Callable[..., Any]) -> None:
    fit([PerformanceReporter(), AutoAnalyzer(at=5)])
    text = Path("performance_report.txt").read_text(encoding="utf-8")
    assert "Total time" in text
    assert "Where the time goes" in text


def test_the_analyzer_says_what_the_run_is_bound_by(fit: Callable[..., Any]) -> None:
    analyzer = AutoAnalyzer(at=5)
    ran = fit([analyzer], steps=30)
    assert analyzer.verdict.bound in ("compute", "memory", "host")
    assert ran.report["performance"]["findings"]["performance.bound"]["bound"] == analyzer.verdict.bound


def test_optimize_fsdp_without_fsdp_modules_changes_nothing(fit: Callable[..., Any]) -> None:
    callback = OptimizeFSDP(prefetch=2, display=True)
    assert (callback.tool.prefetch, callback.tool.display) == (2, True)
    ran = fit([callback])
    assert ran.report["internal_errors"] == []
    assert not callback.tool.set_up
    with pytest.raises(UsageError, match="at least 1"):
        OptimizeFSDP(prefetch=0)


def test_float8_parameters_are_mapped_or_refused(fit: Callable[..., Any]) -> None:
    assert fit([Fp8Quantization(enabled=False)]).report["steps"] == 20
    assert Fp8Quantization(amax_history_len=16).tool._kept == 16
    with pytest.raises(UsageError, match=r"removed in 0\.8"):
        Fp8Quantization(amax_compute_algo="max")
    with pytest.raises(UsageError, match="not one of most_recent, max"):
        Fp8Quantization(amax_compute_algo="median")
    with pytest.raises(UsageError, match="at least 1"):
        Fp8Quantization(amax_history_len=0)


def test_float8_on_a_processor_is_an_error_before_training(fit: Callable[..., Any]) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed (make performance)")
    with pytest.raises(UsageError, match="no float8 arithmetic"):
        fit([Fp8Quantization(enabled=True)])


def test_float8_emulated_trains_and_keeps_the_history(fit: Callable[..., Any]) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed (make performance)")
    model = DreamModel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)))
    ran = fit([Fp8Quantization(emulate=True, amax_history_len=4)], model=model)
    assert type(ran.model.inner[1]).__name__ == "Float8Linear"
    assert ran.report["steps"] == 20


def test_recipes_by_model_are_taken_and_inference_is_refused(fit: Callable[..., Any]) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed (make performance)")
    layers = (nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1))
    callback = Fp8Quantization(model_to_recipe={"model": "rowwise"}, emulate=True, modules=["inner.2"])
    ran = fit([callback], model=DreamModel(nn.Sequential(*layers)))
    assert type(ran.model.inner[2]).__name__ == "Float8Linear"
    assert type(ran.model.inner[1]) is nn.Linear
    assert ran.model.inner[2].config.cast_config_input.scaling_granularity.name == "AXISWISE"
    with pytest.raises(UsageError, match="inference is no training"):
        fit([Fp8Quantization(model_to_recipe={"model": "inference"}, emulate=True)])


def test_fault_tolerance_that_is_not_enabled_does_nothing(fit: Callable[..., Any]) -> None:
    ran = fit([FaultToleranceCallback(FaultToleranceParameters(enable=False))])
    assert ran.report["steps"] == 20


@pytest.mark.slow
def test_a_dream_trainer_trains_alone_in_its_quorum(fit: Callable[..., Any]) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed (make performance)")
    from healthcheck_performance import start_lighthouse

    lighthouse = start_lighthouse(FaultToleranceParameters(), "127.0.0.1:0", join_timeout=0.2)
    address = lighthouse.address().replace("[::]", "127.0.0.1")
    callback = FaultToleranceCallback(
        FaultToleranceParameters(lighthouse_address=address, replica_prefix="only", timeout=20)
    )
    try:
        ran = fit([callback], steps=5)
    finally:
        lighthouse.shutdown()
    assert callback.tolerance.manager.current_step() == 5
    assert callback.tolerance.failures == 0
    alone = fit([ThroughputMonitor()], steps=5)
    for one, other in zip(ran.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.allclose(one, other)


def test_fault_tolerance_takes_its_parameters() -> None:
    config = FaultToleranceParameters(checkpoint_interval=100, max_failures=3, heartbeat_interval=60)
    assert config.heartbeat_timeout > config.heartbeat_interval
    assert config.retries == 3
    assert FaultToleranceParameters(max_consecutive_failures=7).retries == 7
    assert FaultToleranceCallback(config).tolerance.parameters is config


def test_without_a_lighthouse_fault_tolerance_says_how_to_start_one(
    fit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed (make performance)")
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(UsageError, match="healthcheck lighthouse"):
        fit([FaultToleranceCallback(FaultToleranceParameters())])


def test_all_of_them_work_under_watch_as_well(train: Callable[..., Any], tmp_path: Path) -> None:
    analyzer, monitor = AutoAnalyzer(at=5), ThroughputMonitor(warmup_steps=2)
    given = [
        WarmupCallback(3),
        monitor,
        MemoryProfiler(profile_every=5),
        CompilationMonitor(),
        FindGraphBreaksCallback("breaks.log"),
        OptimizeFSDP(),
        analyzer,
        PerformanceReporter(),
    ]
    ran = train(callbacks=given, steps=24)
    assert ran.report["internal_errors"] == []
    assert monitor.tool.values
    assert analyzer.verdict is not None
    assert Path("performance_report.txt").is_file()
    assert Path("memory_profile.json").is_file()


def test_the_page_has_a_row_for_every_class_and_parameter_and_names_tests_that_exist() -> None:
    import inspect

    page = PAGE.read_text(encoding="utf-8")
    here = Path(__file__).parent
    tests = {
        line.split("(")[0][4:]
        for file in here.glob("test_*.py")
        for line in file.read_text("utf-8").splitlines()
        if line.startswith("def test_")
    }
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    named = {word for row in rows for word in row.split("`")[1::2] if word.startswith("test_")}
    assert named
    assert named <= tests
    for name in callbacks.__all__:
        kind = getattr(callbacks, name)
        parameters = [p for p in inspect.signature(kind).parameters if p != "self"]
        of_class = [row for row in rows if row.startswith(f"| `{name}`")]
        assert of_class, name
        for parameter in parameters:
            assert any(f"| `{parameter}`" in row for row in of_class), f"{name}.{parameter}"
