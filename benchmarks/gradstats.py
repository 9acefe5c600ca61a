"""What gradient statistics cost: host and device time a step, against torch's own and the memory's bandwidth.

    python benchmarks/gradstats.py --json gradstats.json

Needs a CUDA or ROCm device. All numbers of one table come from one process on one card; the floor is
the time in which a plain sum reads the same bytes once from cold caches.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from healthcheck.core.events import Event, EventKind
from healthcheck.device.deferred import DeviceVector
from healthcheck.probes.gradient_statistics import GradientPass, gradient_stats
from healthcheck.probes.trained_parameters import TrainedParameters

SHAPES = {
    "150 tensors, 124M": (150, 124_000_000),
    "1,000 tensors, 124M": (1_000, 124_000_000),
    "3,000 tensors, 1.3B": (3_000, 1_300_000_000),
}


def gradients(count: int, elements: int, dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """A transformer's mix: a third small vectors, the rest matrices of about equal size."""
    small = count // 3
    size = elements // (count - small) // 64 * 64
    params = []
    for index in range(count):
        n = 768 if index < small else size
        parameter = nn.Parameter(torch.empty(n, dtype=dtype, device=device))
        parameter.grad = torch.randn(n, device=device).to(dtype)
        params.append(parameter)
    return params


def device_us(work: Callable[[], Any], flush: torch.Tensor, repeats: int = 30) -> float:
    """Median device time, with the cache overwritten before each run."""
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # lets the host run ahead, so that launch gaps are not measured
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


def host_us(work: Callable[[], Any], repeats: int = 60) -> float:
    """Median time until the call returns, with an idle device."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def read_floor(params: list[nn.Parameter], flush: torch.Tensor) -> float:
    """Device time of reading as many bytes once: a sum over one contiguous vector."""
    total = sum(p.numel() for p in params)
    vector = torch.ones(total, dtype=params[0].dtype, device=params[0].device)
    return device_us(lambda: torch.sum(vector, dtype=torch.float32), flush)


def moved(params: list[nn.Parameter]) -> None:
    """New addresses for all gradients, as after ``zero_grad(set_to_none=True)`` under memory pressure."""
    fresh = [p.grad.clone() for p in params if p.grad is not None]
    for p, g in zip(params, fresh, strict=True):
        p.grad = g


class View:
    """What a trainer shows of a model: its optimizer, and names on demand."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.named = [(f"p{i}", p) for i, p in enumerate(params)]
        self.optimizer = torch.optim.SGD(params, lr=0.1)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self.named


def as_in_a_step(params: list[nn.Parameter]) -> Callable[[], None]:
    """What a step does: find the parameters and measure; the device writes the result to the host itself."""
    one_pass, trained = GradientPass(), TrainedParameters()
    event = Event(EventKind.BACKWARD_END, 1, model=View(params))

    def step() -> None:
        stats = one_pass.measure(trained.of(event), trained.names)
        assert stats is not None
        assert isinstance(stats.numbers, DeviceVector)

    return step


def measure(name: str, count: int, elements: int, dtype: torch.dtype) -> dict[str, Any]:
    params = gradients(count, elements, dtype, "cuda")
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    step = as_in_a_step(params)
    grads = [p.grad for p in params if p.grad is not None]
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"case": name, "dtype": str(dtype).removeprefix("torch.")}
    row["host_us"] = host_us(step)
    row["device_us"] = device_us(step, flush)
    row["floor_us"] = read_floor(params, flush)
    few = 20 if count > 1000 else 40
    row["foreach_host_us"] = host_us(lambda: gradient_stats(params), few)
    row["total_norm_host_us"] = host_us(lambda: nn.utils.get_total_norm(grads), few)
    row["total_norm_device_us"] = device_us(lambda: nn.utils.get_total_norm(grads), flush, 10)
    moving = []
    for _ in range(10):
        moved(params)
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        moving.append((time.perf_counter() - began) * 1e6)
    row["host_us_new_addresses"] = statistics.median(moving)
    row["device_over_floor"] = row["device_us"] / row["floor_us"]
    row["total_norm_over_ours_host"] = row["total_norm_host_us"] / row["host_us"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--largest", type=int, default=1_300_000_000, help="leave out cases with more elements")
    args = parser.parse_args()
    facts = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    print(facts)
    rows = []
    for name, (count, elements) in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            if elements <= args.largest:
                row = measure(name, count, elements, dtype)
                rows.append(row)
                print(
                    f"{name:22} {row['dtype']:9} host {row['host_us']:6.0f} us (moved {row['host_us_new_addresses']:6.0f})"
                    f"  device {row['device_us']:7.0f} us = {row['device_over_floor']:.2f} of the floor"
                    f"  get_total_norm host {row['total_norm_host_us']:7.0f} us = {row['total_norm_over_ours_host']:.1f} times"
                    f"  foreach host {row['foreach_host_us']:6.0f} us",
                    flush=True,
                )
                torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**facts, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
