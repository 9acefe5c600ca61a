"""What a run is bound by: real trainings on the processor, and what a device would have recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import healthcheck
from healthcheck_performance import Analyzer, analyse
from healthcheck_performance.operators import MODULE, Reading, read_profile


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(384, 384) for _ in range(3)))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Pointwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Any:
        y = x.expand(500_000) * self.weight
        for _ in range(4):
            y = torch.tanh(y) + 1
        return y


class Slow(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.03)
        return torch.randn(8)


def python_work(step: int) -> None:
    total = 0
    for i in range(300_000):
        total += i * step


def trained(model: nn.Module, batches: Any, work: Callable[[int], Any] = lambda step: None) -> Any:
    analyzer = Analyzer(at=6, active=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    options: dict[str, Any] = {"record": False, "console": False, "plugins": ["healthcheck_performance"]}
    rules = {"version": 1, "rules": {}}
    with healthcheck.watch(model, optimizer, rules=rules, callbacks=[analyzer], **options) as health:
        for step, x in enumerate(batches, start=1):
            loss = model(x).pow(2).mean()
            loss.backward()
            work(step)
            optimizer.step()
            optimizer.zero_grad()
            health.step(loss=loss)
            if step == 16:
                break
    finding = (health.report or {})["performance"]["findings"]["performance.bound"]
    assert finding["bound"] == analyzer.verdict.bound
    assert sum(analyzer.verdict.shares.values()) == pytest.approx(1)
    return analyzer.verdict


def same(x: Any) -> Any:
    return (x for _ in range(16))


def test_matrix_products_are_compute_bound() -> None:
    verdict = trained(Matrix(), same(torch.randn(512, 384)))
    assert verdict.bound == "compute", verdict.shares
    assert any(row["part"] == "achieved TFLOP/s" and row["value"] > 0 for row in verdict.evidence)


def test_a_loop_in_python_is_host_bound() -> None:
    verdict = trained(nn.Linear(8, 1), same(torch.randn(4, 8)), python_work)
    assert verdict.bound == "host", verdict.shares
    assert "Python" in verdict.advice


def test_a_slow_loader_is_data_bound() -> None:
    loader = torch.utils.data.DataLoader(Slow(), batch_size=2)
    verdict = trained(nn.Linear(8, 1), loader)
    assert verdict.bound == "data", verdict.shares
    assert "loader workers" in verdict.advice


def test_pointwise_operators_are_memory_bound() -> None:
    verdict = trained(Pointwise(), same(torch.randn(1)))
    assert verdict.bound == "memory", verdict.shares


# What a device records, made by hand: this machine has none. benchmarks/gpu.py does the same with a real one.


def event(name: str, start: float, end: float, *, kind: str = "CUDA", parent: Any = None, **facts: Any) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=f"DeviceType.{kind}",
        time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
        cpu_parent=parent,
        thread=1,
        sequence_nr=facts.pop("sequence_nr", -1),
        fwd_thread=facts.pop("fwd_thread", 0),
        self_cpu_time_total=facts.pop("host", 0.0),
        self_device_time_total=facts.pop("device", 0.0),
        self_cpu_memory_usage=0,
        self_device_memory_usage=0,
        is_user_annotation=name.startswith(("ProfilerStep", MODULE)),
        flops=facts.pop("flops", 0),
    )


def device_profile(*kernels: tuple[str, float, float], wall: float = 10_000.0) -> Reading:
    step = event("ProfilerStep*", 0, wall, kind="CPU")
    return read_profile([step, *(event(*kernel) for kernel in kernels)], "NVIDIA H200")


def test_kernels_that_fill_the_step_say_compute_or_memory() -> None:
    matrix = analyse(device_profile(("nvjet_tst_128x256", 0, 9000), ("vectorized_elementwise", 9000, 9500)))
    other = analyse(device_profile(("nvjet_tst_128x256", 0, 2000), ("vectorized_elementwise", 2000, 9500)))
    assert matrix is not None
    assert other is not None
    assert (matrix.bound, other.bound) == ("compute", "memory")


def matrix_products(
    device: str = "NVIDIA H200", *, kernel: str = "nvjet_tst_192x192_64x4", others: float = 0.0, copy: float = 0.0
) -> Reading:
    """Three bfloat16 layers of 8192 x 8192 on 8192 rows: 8 products of 1.1 TFLOP in a step, at 60 % of an H200's peak."""
    took = 2 * 8192**3 / (0.6 * 989e12) * 1e6  # microseconds
    kernels = [event(kernel, i * took, (i + 1) * took) for i in range(8)]
    at = 8 * took
    if others:
        kernels.append(event("vectorized_elementwise_kernel", at, at + others))
        at += others
    if copy:
        kernels.append(event("Memcpy HtoD (Pageable -> Device)", at, at + copy))
        at += copy
    calls = [event("aten::mm", i, i + 1, kind="CPU", flops=2 * 8192**3) for i in range(8)]
    return read_profile([event("ProfilerStep*", 0, at, kind="CPU"), *kernels, *calls], device)


def test_large_matrix_products_are_compute_bound_and_the_evidence_says_how_near_to_the_peak_they_come() -> None:
    verdict = analyse(matrix_products(others=1500.0))
    assert verdict is not None
    assert verdict.bound == "compute"
    rows = {row["part"]: row for row in verdict.evidence}
    assert rows["TFLOP/s while arithmetic runs"]["value"] == pytest.approx(593.4)
    assert rows["TFLOP/s while arithmetic runs"]["of_peak"] == pytest.approx(0.6)
    assert rows["achieved TFLOP/s"]["of_peak"] == pytest.approx(0.6 * verdict.share, abs=1e-4)


def test_arithmetic_in_kernels_of_unknown_names_counts_for_what_it_takes_at_the_peak() -> None:
    verdict = analyse(matrix_products(kernel="my_fused_mlp"))
    assert verdict is not None
    assert verdict.bound == "compute"
    assert verdict.share == pytest.approx(0.6)
    unknown = analyse(matrix_products("Somebody's card", kernel="my_fused_mlp"))  # no peak, nothing to tell it by
    assert unknown is not None
    assert unknown.bound == "memory"


def test_copies_of_batches_over_the_bus_are_no_work_of_the_device() -> None:
    verdict = analyse(matrix_products(others=1500.0, copy=20_000.0))  # 268 MB a step from memory that is not pinned
    assert verdict is not None
    assert verdict.bound == "data"
    assert "copies from host to device" in verdict.text
    assert "pin_memory" in verdict.advice
    assert verdict.shares["memory"] < 0.1


def test_a_copy_that_computation_hides_costs_nothing_and_one_back_is_the_hosts() -> None:
    hidden = device_profile(("gemm", 0, 9000), ("Memcpy HtoD (Pinned -> Device)", 1000, 8000))
    assert hidden.to_device_us == 0
    back = analyse(device_profile(("gemm", 0, 3000), ("Memcpy DtoH (Device -> Pageable)", 3000, 9500)))
    assert back is not None
    assert back.bound == "host"
    assert "device to host" in back.text
    within = analyse(device_profile(("gemm", 0, 3000), ("Memcpy DtoD (Device -> Device)", 3000, 9500)))
    assert within is not None
    assert within.bound == "memory"


def test_only_communication_that_nothing_hides_counts() -> None:
    hidden = device_profile(("gemm", 0, 9000), ("ncclDevKernel_AllGather", 1000, 8000))
    assert (hidden.communication_us, hidden.overlapped_us) == (0, 7000)
    exposed = analyse(device_profile(("gemm", 0, 3000), ("ncclDevKernel_AllGather", 2500, 9500)))
    assert exposed is not None
    assert exposed.bound == "communication"


def test_a_device_that_idles_waits_for_its_data_if_that_was_measured_and_else_for_its_host() -> None:
    idle = device_profile(("gemm", 0, 1500))
    host, data = analyse(idle, data_wait=0.0), analyse(idle, data_wait=0.008)
    assert host is not None
    assert data is not None
    assert (host.bound, data.bound) == ("host", "data")


def test_the_usual_step_counts_and_not_the_slower_one_under_the_profiler() -> None:
    verdict = analyse(device_profile(("gemm", 0, 4000)), usual_step=0.0042)
    assert verdict is not None
    assert verdict.bound == "compute"


def test_a_backward_operator_belongs_to_the_module_of_its_forward_one() -> None:
    module = event(f"{MODULE}encoder", 0, 10, kind="CPU")
    forward = event("aten::addmm", 0, 5, kind="CPU", parent=module, sequence_nr=7, host=5.0)
    node = event("AddmmBackward0", 20, 30, kind="CPU", sequence_nr=7, fwd_thread=1, host=1.0)
    backward = event("aten::mm", 21, 29, kind="CPU", parent=node, host=8.0)
    reading = read_profile([event("ProfilerStep*", 0, 40, kind="CPU"), module, forward, node, backward])
    assert {(o.name, o.module) for o in reading.operators} == {
        ("aten::addmm", "encoder"),
        ("AddmmBackward0", "encoder"),
        ("aten::mm", "encoder"),
    }
