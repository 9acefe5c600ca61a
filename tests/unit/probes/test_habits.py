"""What calls of torch say by how often they come, in runs of the command, each beside what only looks like it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
X = torch.randn(400, 8); Y = (X[:, :3].sum(1) > 0).long()
def build(): return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
def draw(m):
    if isinstance(m, nn.Linear): nn.init.xavier_uniform_(m.weight)
def train(net, opt, updates=60, seed=None, each=None):
    for i in range(updates):
        if seed is not None: torch.manual_seed(seed(i))
        k = torch.randint(0, 400, (20,))
        loss = F.cross_entropy(net(X[k]), Y[k]); opt.zero_grad(); loss.backward(); opt.step()
        if each is not None: each(i, loss)
def read(net, opt, loader, passes, leave=None, look=None):
    for p in range(passes):
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
            if i == leave: break
        if look is not None: look()
def schedule(opt): return torch.optim.lr_scheduler.LambdaLR(opt, lambda e: 0.5 ** e)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 20, shuffle=True)
net = build(); opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
"""

FAULTS = {
    "repeated-data.same-seed": "train(net, opt, seed=lambda i: 7)",
    "part-does-not-train.drawn-again": "train(net, opt); net.apply(draw); train(net, opt)",
    "checkpoint-not-restored.drawn-after-load": "net.load_state_dict(build().state_dict()); net.apply(draw); train(net, opt)",
    "schedule-broken.waits-for-a-rise": (
        "s = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode='max', patience=1)\n"
        "train(net, opt, each=lambda i, loss: s.step(2.0 - i / 100) if i % 10 == 9 else None)"
    ),
    "update-loop-broken.first-batch-only": "read(net, opt, loader, 40, leave=0)",
    "schedule-broken.not-resumed": (
        "s = schedule(opt); read(net, opt, loader, 4, look=s.step); kept = opt.state_dict()\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9); s = schedule(opt); opt.load_state_dict(kept)\n"
        "read(net, opt, loader, 3, look=s.step)"
    ),
}
HEALTHY = {
    "passes that are cut in their middle, and looks at first batches": (
        "def look():\n    for x, y in loader: break\nread(net, opt, loader, 12, leave=9, look=look)"
    ),
    "batches drawn by next": (
        "it = lambda: next(iter(loader))\nfor _ in range(60):\n    x, y = it(); loss = F.cross_entropy(net(x), y)\n"
        "    opt.zero_grad(); loss.backward(); opt.step()"
    ),
    "a schedule that is resumed as well": (
        "s = schedule(opt); read(net, opt, loader, 4, look=s.step); kept = opt.state_dict(), s.state_dict()\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9); s = schedule(opt)\n"
        "opt.load_state_dict(kept[0]); s.load_state_dict(kept[1]); read(net, opt, loader, 3, look=s.step)"
    ),
    "a seed of its own for each step": "train(net, opt, seed=lambda i: 7 + i)",
    "another fold with an optimizer of its own": (
        "train(net, opt); net.apply(draw)\nopt = torch.optim.SGD(net.parameters(), lr=0.05); train(net, opt)"
    ),
    "drawn before it is loaded": "net.apply(draw); net.load_state_dict(build().state_dict()); train(net, opt)",
    "a new head on loaded weights": (
        "net.load_state_dict(build().state_dict()); net.insert(3, nn.Linear(16, 16)); net.insert(3, nn.Linear(16, 16))\n"
        "draw(net[-1]); opt = torch.optim.SGD(net.parameters(), lr=0.05); train(net, opt)"
    ),
    "an accuracy that rises and stays": (
        "s = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode='max', patience=1)\n"
        "train(net, opt, each=lambda i, loss: s.step(min(i, 20) / 100) if i % 10 == 9 else None)"
    ),
}


def causes(run: Callable[..., Any], script: str, folder: Path) -> set[str]:
    (folder / "train.py").write_text(HEAD + script + "\n", encoding="utf-8")
    run("run", "--report", f"json={folder / 'report.json'}", folder / "train.py")
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return {f"{a['rule']}.{c['cause']}" for a in report["alerts"] for c in (a, *a.get("also", ()))}


@pytest.mark.parametrize("cause", FAULTS)
def test_it_is_named(cause: str, healthcheck_warm: Callable[..., Any], tmp_path: Path) -> None:
    assert cause in causes(healthcheck_warm, FAULTS[cause], tmp_path)


@pytest.mark.parametrize("name", HEALTHY)
def test_it_is_left_alone(name: str, healthcheck_warm: Callable[..., Any], tmp_path: Path) -> None:
    assert not causes(healthcheck_warm, HEALTHY[name], tmp_path) & set(FAULTS)


def test_where_nobody_shows_these_calls_nothing_is_said_of_them() -> None:
    """A loop under ``watch()``: a probe without facts gives no sample, so that its causes are not judged."""
    import torch

    from healthcheck.core.events import Event, EventKind
    from healthcheck.core.runinfo import RunFacts
    from healthcheck.probes.habits import HabitProbe

    class All:
        def due(self, metric: str, step: int) -> bool:
            return True

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    event = Event(EventKind.BEFORE_UPDATE, 20, run=RunFacts(), optimizer=optimizer)
    demand: Any = All()
    assert not list(HabitProbe().sample(event, demand))
    assert event.run is not None
    event.run.habits.seen = True
    assert {sample.value for sample in HabitProbe().sample(event, demand)} == {0.0}
