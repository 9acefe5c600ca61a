"""A step that is noted in a row and one that is shown by events give the same samples."""

from __future__ import annotations

import gc
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import healthcheck
from healthcheck.assembly import open_session
from healthcheck.core.clock import VirtualClock
from healthcheck.core.rows import StepRow
from healthcheck.core.samples import Sample
from healthcheck.device import mailbox
from healthcheck.device.deferred import DeviceScalar
from healthcheck.instrument.script import InProcess, ScriptTrainer
from healthcheck.instrument.step_rows import StepNotes
from healthcheck.probes import gradients
from healthcheck.probes.steps import HeartbeatProbe, PaceProbe, StepTimeProbe

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "probes"))
from standin import LateMemory, elsewhere, written

BEGIN = """
    import torch
    from torch import nn
    from training import tick

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))

    def loss_of():
        return nn.functional.cross_entropy(model(x), y)

    def forward():
        tick()
        return loss_of()
"""

PLAIN = """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(40):
        optimizer.zero_grad()
        forward().backward()
        tick()
        optimizer.step()
"""
ONE_IDLE = """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    never_steps = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(20):
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()
"""
ACCUMULATION = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(50):
        optimizer.zero_grad()
        for part in range(1 + step % 3):
            (forward() / (1 + step % 3)).backward()
        optimizer.step()
"""
AVERAGED = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(30):
        optimizer.zero_grad()
        for part in range(2):
            forward().backward()
        optimizer.step()
"""
TWO_OPTIMIZERS = """
    other = nn.Linear(3, 1)
    first = torch.optim.Adam(model.parameters(), lr=0.01)
    second = torch.optim.Adam(other.parameters(), lr=0.02)
    for step in range(50):
        second.zero_grad()
        forward().mean().backward()
        other(model(x).detach()).square().mean().backward()
        second.step()
        if step % 5 != 3:
            first.zero_grad()
            (forward() - 0.1 * other(model(x)).mean()).backward()
            first.step()
"""
SCALER = """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    for step in range(50):
        optimizer.zero_grad()
        loss = forward()
        scaler.scale(loss * float("inf") if step in (20, 21) else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
"""
CLOSURE = """
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    for step in range(30):
        tick()
        optimizer.step(closure)
"""
SCHEDULER = """
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 15)
    for step in range(40):
        optimizer.zero_grad()
        forward().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
"""
RATE_BY_HAND = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        for group in optimizer.param_groups:
            group["lr"] = 0.3 if step == 47 else 0.01 * (1 + step % 25)
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()
"""
NEVER_CLEARED = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step in range(40):
        if step % 4 != 1:
            forward().backward()
        optimizer.step()
"""
DATA_AND_EVALUATION = """
    data = torch.utils.data.TensorDataset(x, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(10):
        model.train()
        for xs, ys in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
            optimizer.zero_grad()
            tick()
            nn.functional.cross_entropy(model(xs), ys).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for xs, ys in torch.utils.data.DataLoader(data, batch_size=8):
                tick()
                model(xs)
"""
MARKED_LABELS = """
    marked = y.clone()
    marked[::3] = -100
    rows = [{"x": x[i], "labels": marked[i]} for i in range(16)] + [{"x": x[0], "labels": marked[1]}] * 15
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        for n, batch in enumerate(torch.utils.data.DataLoader(rows, batch_size=3, shuffle=epoch > 1)):
            tick()
            nn.functional.cross_entropy(model(batch["x"]), batch["labels"]).backward()
            if n % 2:
                optimizer.step()
                optimizer.zero_grad()
"""
USED_UP = """
    class Stream(torch.utils.data.IterableDataset):
        rows = iter([(x[i % 16], y[i % 16]) for i in range(48)])

        def __iter__(self):
            return self.rows

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(Stream(), batch_size=4)
    xs, ys = x, y
    for epoch in range(130):
        for xs, ys in loader:
            optimizer.zero_grad()
            tick()
            nn.functional.cross_entropy(model(xs), ys).backward()
            optimizer.step()
        optimizer.zero_grad()
        tick()
        nn.functional.cross_entropy(model(xs), ys).backward()
        optimizer.step()
"""
NEW_OPTIMIZER = """
    for fold in range(3):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01 / (1 + fold))
        for step in range(25):
            optimizer.zero_grad()
            forward().backward()
            optimizer.step()
"""
NOT_FINITE = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(40):
        optimizer.zero_grad()
        loss = forward()
        (loss * float("nan") if step in (12, 30) else loss).backward()
        optimizer.step()
"""
LOOPS = {name.lower(): text for name, text in list(globals().items()) if name.isupper() and isinstance(text, str)}
del LOOPS["begin"]


class Listener:
    """Keeps what arrives."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    @healthcheck.hookimpl
    def healthcheck_samples(self, session: Any, step: int, samples: Any) -> None:
        self.samples += samples


def trained(loop: str, *, rows: bool) -> dict[str, list[tuple[int, Any, float]]]:
    """The series of a run: name -> ``(step, value, time)`` of each sample. Time goes on when the script says so."""
    clock, listener = VirtualClock(), Listener()
    gc.collect()  # else the model of the run before is taken for a copy of this one's
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(StepNotes, "allowed", rows)
        for probe, given in ((HeartbeatProbe, ()), (StepTimeProbe, ()), (PaceProbe, (lambda: 0.0,))):
            patch.setattr(probe.__init__, "__defaults__", (clock.monotonic, *given))
        patch.setitem(sys.modules, "training", SimpleNamespace(tick=lambda: clock.advance(0.09375)))
        session = open_session(
            target="train.py",
            rules="healthcheck:recommended",
            settings={"overhead_budget": "off"},
            observe=True,
            console=False,
            record=False,
            clock=clock,
            metrics=(
                "lr[]",
                "grad_norm[]",
                "loss.best",
                "micro_batches",
                "time.data",
                "throughput",
                "lr",
                "loss.chance",
                "batch.nonfinite",
            ),
        )
        session.register(listener)
        script = Path(folder, "train.py")
        script.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(loop))
        assert ScriptTrainer(session).run(str(script), []) in (0, 1)
    assert session.internal_errors == [] == session.dispatch.errors
    series: dict[str, list[tuple[int, Any, float]]] = {}
    for sample in listener.samples:
        if not sample.metric.startswith(("memory.", "monitor.")):  # as the machine has it
            value = 0.0 if sample.metric == "time.data" else sample.value
            series.setdefault(f"{sample.metric}{sample.labels}", []).append((sample.step, value, sample.time))
    return series


@pytest.mark.parametrize("loop", ["plain", "scheduler", "two_optimizers"])
@pytest.mark.parametrize("looks", [1, 30])
def test_so_they_do_where_a_device_writes_numbers_to_the_host_itself(
    loop: str, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the gradients, and the loss with them, as the kernel does it on a card."""
    measured = gradients.gradient_stats

    def with_loss(params: Any, hold: Any = None) -> Any:
        stats = measured(params, hold)
        if stats is not None:
            stats.numbers = written(stats.numbers.numbers(), looks)
        return stats

    look = gradients.GradientProbe.look

    def looked(probe: gradients.GradientProbe, row: StepRow, update: Any) -> None:
        look(probe, row, update)
        if row.numbers is not None and isinstance(row.loss, float):
            vector = row.numbers = written([*row.numbers.numbers(), row.loss], looks)
            row.found["gradients"][0].numbers = vector
            row.loss = DeviceScalar(torch.tensor(row.loss))
            row.loss.vector, row.loss.position, row.loss.tensor = vector, vector.size - 1, None

    elsewhere(monkeypatch)
    monkeypatch.setattr(mailbox, "PinnedMemory", LateMemory)
    monkeypatch.setattr(gradients, "gradient_stats", with_loss)
    monkeypatch.setattr(gradients.GradientProbe, "look", looked)

    noted, shown = trained(LOOPS[loop], rows=True), trained(LOOPS[loop], rows=False)

    assert {name: repr(series) for name, series in noted.items()} == {name: repr(s) for name, s in shown.items()}


@pytest.mark.parametrize("loop", ["plain", "scheduler", "two_optimizers"])
def test_so_they_do_where_numbers_come_late_from_a_device(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch)
    monkeypatch.setattr(mailbox, "PinnedMemory", LateMemory)

    noted, shown = trained(LOOPS[loop], rows=True), trained(LOOPS[loop], rows=False)

    assert {name: repr(series) for name, series in noted.items()} == {name: repr(s) for name, s in shown.items()}


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_rows_give_the_samples_that_events_give(loop: str) -> None:
    noted, shown = trained(LOOPS[loop], rows=True), trained(LOOPS[loop], rows=False)

    assert sorted(noted) == sorted(shown)
    assert {name: repr(series) for name, series in noted.items()} == {name: repr(s) for name, s in shown.items()}


@pytest.mark.parametrize(("bad", "looked_at"), [((20,), True), ((60,), False), ((59, 60), True)])
def test_what_is_looked_at_now_and_then_is_looked_at_another_time_where_the_loss_is_not_finite(
    bad: tuple[int, ...], looked_at: bool
) -> None:
    """But not early in a run, nor if the step before was no better: what is seen then may be why."""
    rules = """
    version: 1
    rules:
      loss: {metric: loss, when: nonfinite}
      memory: {metric: memory.host, when: {above: 1000000000000000}, every: 10}
    """
    session = open_session(target="t", rules=textwrap.dedent(rules), console=False, record=False)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with InProcess(session):
        for step in range(1, 101):
            loss = model(torch.ones(2, 4)).square().mean() * (float("nan") if step in bad else 1.0)
            optimizer.zero_grad()
            (loss if step not in bad else loss.detach().requires_grad_()).backward()
            optimizer.step()
    assert session.internal_errors == []
    assert [alert.fired_step for alert in session.alerts] == [bad[0]]
    seen = [step for step, _ in session.history("memory.host", 1000)]
    assert (bad[-1] in seen) is looked_at
    assert [step for step in seen if step not in bad] == [step for step in range(10, 91, 10) if step not in bad]


def test_updates_without_a_pass_of_their_own_are_noticed_in_a_run_that_has_had_none_for_long() -> None:
    """Gradients are not looked at in each step then; rows say that an update had no pass."""
    loop = """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(420):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
        if step >= 300:
            optimizer.step()
    """
    reused = trained(loop, rows=True)["updates.reused()"]
    due = [*range(20, 201, 10), 240, 280]
    assert [(step, value) for step, value, _ in reused if step <= 300] == [(step, 0.0) for step in due]
    assert [(step, value) for step, value, _ in reused if step >= 360] == [(step, 0.5) for step in range(360, 540, 40)]
