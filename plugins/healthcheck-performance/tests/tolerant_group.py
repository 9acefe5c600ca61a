"""One replica group of a fault-tolerant training, a process of its own. Run by test_tolerance.py.

python tolerant_group.py NAME OUT.json STEPS LIGHTHOUSE [die-at-step]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import healthcheck
from healthcheck_performance import FaultTolerance, FaultToleranceParameters


def main() -> None:
    name, out, steps, address = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dies_at = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    parameters = FaultToleranceParameters(
        heartbeat_interval=0.3,
        max_failures=5,
        checkpoint_interval=10,
        lighthouse_address=address,
        replica_prefix=name,
        timeout=15,
    )
    torch.manual_seed(0)
    inner = nn.Linear(4, 1)
    torch_optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
    tolerance = FaultTolerance(parameters, checkpoints=out.parent / "checkpoints")
    model, optimizer = tolerance.wrap(inner, torch_optimizer)
    notes: list[str] = []
    rules = {"version": 1, "extends": ["healthcheck_performance:performance"]}
    torch.manual_seed(7)
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(steps)]
    sizes, skipped = [], []
    watched = {"record": False, "console": False, "plugins": ["healthcheck_performance"]}
    with healthcheck.watch(inner, torch_optimizer, rules=rules, **watched) as health:
        health.session.add_report(SimpleNamespace(name="notes", note=notes.append))
        for number, (x, y) in enumerate(data, start=1):
            if number == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
            health.step(loss=loss)
            sizes.append(len(tolerance.members))
            if tolerance.failures > len(skipped):
                skipped.append(number)
            time.sleep(0.1)
    report = health.report or {}
    content = {
        "sizes": sizes,
        "skipped": skipped,
        "weights": [p.detach().flatten().tolist() for p in inner.parameters()],
        "committed": tolerance.manager.current_step(),
        "failures": tolerance.failures,
        "lost": tolerance.lost,
        "alerts": report.get("alerts", []),
        "metrics": {m: health.session.history(m) for m in ("performance.replicas_lost", "performance.commit_failures")},
        "errors": report.get("internal_errors", []),
    }
    out.write_text(json.dumps(content), encoding="utf-8")
    tolerance.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
