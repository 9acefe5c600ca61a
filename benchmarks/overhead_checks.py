"""What a ratio does not show: waits, copies, memory, and that without rules nothing is there."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from overhead_models import CASES
from overhead_variants import OURS

import healthcheck

FULL = "recommended + per parameter, update ratio every 10"
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


def _training(case: str, device: str, rules: Any) -> tuple[Callable[[], None], Any, Any]:
    """``(step, watched loop or None, model)``."""
    torch.manual_seed(0)
    chosen = CASES[case]
    model = chosen.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = chosen.data(device)
    health = healthcheck.watch(model, optimizer, rules=rules, console=False, record=False) if rules else None

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=chosen.autocast):
            loss = model(data)
        loss.backward()
        optimizer.step()
        if health is not None:
            health.step(loss=loss)

    return step, health, model


def no_waits(case: str, steps: int = 30) -> dict[str, Any]:
    """Run where every wait that CUDA reports is an error, from the first step with all optimizer state on."""
    step, health, _ = _training(case, "cuda", OURS[FULL])
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            step()
        error = ""
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    health.close()
    errors = [e["error"] for e in health.session.internal_errors] + [e.error for e in health.session.dispatch.errors]
    judged = len(health.history("grad_norm"))
    return {"steps": steps, "error": error or "; ".join(errors), "judged": judged, "passed": not error and not errors}


def one_copy(case: str, steps: int = 10) -> dict[str, Any]:
    """Copies to the host and waits in a profiler trace of so many steps, with us less those without."""
    counts = {}
    for name, rules in (("bare", None), ("watched", OURS[FULL])):
        step, health, _ = _training(case, "cuda", rules)
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as trace:
            for _ in range(steps):
                step()
        counts[name] = _counted(trace)
        if health is not None:
            health.close()
    ours = {key: counts["watched"][key] - counts["bare"][key] for key in ("copies", *WAITS)}
    passed = ours["copies"] <= steps and not any(ours[key] for key in WAITS)
    return {"steps": steps, "ours": ours, "passed": passed}


def _counted(trace: Any) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for event in trace.events():
        if "Memcpy DtoH" in event.name:
            counts["copies"] += 1
        elif event.name in WAITS:
            counts[event.name] += 1
    return counts


def extra_memory(case: str) -> dict[str, Any]:
    """Device memory that watching takes, against max(64 MiB, 1 % of the parameters' bytes)."""
    peaks = []
    for rules in (None, OURS[FULL]):
        step, health, model = _training(case, "cuda", rules)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(12):
            step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        if health is not None:
            health.close()
        del step, model, health
        torch.cuda.empty_cache()
    extra, allowed = peaks[1] - peaks[0], max(64 * 2**20, weights // 100)
    return {"extra_mib": extra / 2**20, "allowed_mib": allowed / 2**20, "passed": extra <= allowed}


def nothing_attached(device: str) -> dict[str, Any]:
    """``watch`` without rules: no hook on the optimizer, no replaced function, nobody who listens."""
    clip = torch.nn.utils.clip_grad_norm_
    inner = torch.nn.utils.clip_grad._get_total_norm
    model = torch.nn.Linear(4, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    health = healthcheck.watch(model, optimizer, rules=OURS["no rules"], console=False, record=False)
    seen = {
        "hooks": len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
        "module_hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "watching": health.session.watching,
        "replaced": torch.nn.utils.clip_grad_norm_ is not clip or torch.nn.utils.clip_grad._get_total_norm is not inner,
    }
    health.close()
    return {**seen, "passed": not any(seen.values())}
