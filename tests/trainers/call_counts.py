"""Counts Python calls into healthcheck in the steps of a training, in a process of its own.

    python tests/trainers/call_counts.py --rules healthcheck:recommended --script plain --layers 8 [--device cuda]

Prints JSON: calls of every counted step, and for how many of them it was worked out who is called when. What a test
process has patched and imported before would add to the counts, so each count has a process. Comprehensions and
generators are frames of their own on Python 3.11, and are counted.
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import sys
import tempfile
import textwrap
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import healthcheck
from healthcheck.assembly import open_session, plugin_host
from healthcheck.instrument.script import ScriptTrainer
from healthcheck.rulelang.compile import load_rules
from healthcheck.run.board import ProbeBoard
from healthcheck.run.judge import BLOCK_SECONDS

OURS = str(Path(healthcheck.__file__).parent)
WARM = 320
"""Steps until windows are full and probes look at their usual pace."""
COUNTED = 640
STEP = BLOCK_SECONDS / 20
"""Seconds that a step takes by the clock of the run: a block is 20 steps, however busy the machine is."""

PLAIN = """
    import counting
    import torch
    from torch import nn

    torch.manual_seed(0)
    body = [layer for _ in range({layers}) for layer in (nn.Linear(8, 8), nn.LayerNorm(8))]
    model = nn.Sequential(nn.Embedding(32, 8), *body, nn.Linear(8, 32)).to("{device}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 32, (8, 16, 5), device="{device}")
    for step in range({steps}):
        counting.step_begins()
        batch = ids[step % 8]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        loss.backward()
        optimizer.step()
    counting.step_begins()
"""

FED = """
    import counting
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).to("{device}")
    decayed, others = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{{"params": decayed}}, {{"params": others, "weight_decay": 0.0}}], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 1000)
    rows = [{{"x": x, "labels": x[:3].argmax()}} for x in torch.randn(4 * {steps}, 8)]
    for batch in torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True):
        counting.step_begins()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["x"].to("{device}")), batch["labels"].to("{device}"))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    counting.step_begins()
"""
"""With what trainers of frameworks do in every step: a loader, groups, clipping, a schedule."""

TURNS = """
    import counting
    import torch
    from torch import nn

    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).to("{device}")
    critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).to("{device}")
    of_made, of_critic = torch.optim.Adam(made.parameters(), 1e-4), torch.optim.Adam(critic.parameters(), 1e-4)
    judge, true, false = nn.BCEWithLogitsLoss(), torch.ones(32, 1).to("{device}"), torch.zeros(32, 1).to("{device}")
    for step in range({steps}):
        counting.step_begins()
        of_critic.zero_grad()
        judge(critic(torch.randn(32, 2).to("{device}")), true).backward()
        fake = made(torch.randn(32, 4).to("{device}"))
        judge(critic(fake.detach()), false).backward()
        of_critic.step()
        of_made.zero_grad()
        judge(critic(fake), true).backward()
        of_made.step()
    counting.step_begins()
"""
"""Two optimizers that take turns, three backward passes in a step."""

SCRIPTS = {"plain": PLAIN, "fed": FED, "turns": TURNS}

TWENTY = """
version: 1
rules:
  loss-not-finite: {metric: loss, when: nonfinite, severity: error, then: [stop]}
  loss-high: {metric: loss, when: {above: 1000}}
  loss-spike: {metric: loss, when: {zscore: {above: 8, window: 100}}}
  loss-jump: {metric: loss, when: {ratio: {above: 3, to: median, window: 50}}, for: 3}
  loss-rises: {metric: loss, when: {slope: {above: 0.1, over: 200}}, severity: info}
  gradients-not-finite: {metric: grad_norm, when: nonfinite, severity: error, then: [skip_update]}
  gradients-high: {metric: grad_norm, when: {above: 1000}}
  gradients-spike: {metric: grad_norm, when: {zscore: {above: 8, window: 100}}}
  gradients-gone: {metric: grad_norm, when: {below: 1.0e-9}, for: 20}
  gradients-zero: {metric: grads.zero, when: {above: 20}, every: 50}
  rate-high: {metric: lr, when: {above: 1}}
  rate-zero: {metric: lr, when: {below: 1.0e-12}, for: 50}
  rate-jump: {metric: lr.jump, when: {above: 5}}
  update-large: {metric: update_ratio, when: {above: 1}, every: 50}
  weights-not-finite: {metric: params.nonfinite, when: {above: 0}, every: 500}
  step-slow: {metric: time.step, when: {ratio: {above: 50, to: median, window: 100}}}
  throughput-low: {metric: throughput, when: {ratio: {below: 0.01, to: median, window: 100}}, for: 50}
  memory-high: {metric: memory.host_fraction, when: {above: 0.999}, every: 50}
  data-slow: {metric: time.data, when: {above: 100}}
  updates-thrown-away: {metric: amp.skipped, when: {above: 0}, for: 50}
"""
"""Twenty rules as somebody writes them who knows which numbers he wants."""


class SteppedClock:
    """Time that moves from step to step. It is read in C, as the live clock is."""

    def __init__(self) -> None:
        self._now = [0.0]
        self.monotonic = self.wall = functools.partial(operator.getitem, self._now, 0)

    def step(self) -> None:
        self._now[0] += STEP


class Counter:
    """Calls of functions in our package, for each step after the first :data:`WARM`."""

    def __init__(self, clock: SteppedClock) -> None:
        self.steps: list[int] = []
        self.planned = 0
        """Counted steps for which it was worked out who is called when."""
        self._clock = clock
        self._begun = 0

    def step_begins(self) -> None:
        self._begun += 1
        self._clock.step()
        if self._begun == WARM + COUNTED + 1:
            sys.setprofile(None)
        elif self._begun > WARM:
            self.steps.append(0)
            sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self.steps[-1] += 1
            self.planned += frame.f_code is ProbeBoard.begin_step.__code__


def count(rules: str, script: str, layers: int, device: str) -> dict[str, Any]:
    """Train an unmodified script under a pack, or under ``twenty`` rules."""
    clock = SteppedClock()
    with tempfile.TemporaryDirectory() as folder:
        off: list[str] = []
        if rules == "twenty":
            rules = str(Path(folder, "rules.yaml"))
            Path(rules).write_text(TWENTY, encoding="utf-8")
        else:
            pack = load_rules([f"version: 1\nextends: [{rules}]"], registry=plugin_host().registry)
            # On a busy machine they would have something to say.
            clocked = ("time.", "throughput", "monitor.")
            off = [rule.id for rule in pack.causes if rule.selector.metric.startswith(clocked)]
        session = open_session(
            target="train.py",
            rules=rules,
            off=off,
            settings={"overhead_budget": "off"},
            console=False,
            record=False,
            clock=clock,
        )
        counter = Counter(clock)
        sys.modules["counting"] = SimpleNamespace(step_begins=counter.step_begins)  # type: ignore[assignment]
        train = Path(folder, "train.py")
        source = SCRIPTS[script].format(layers=layers, steps=WARM + COUNTED, device=device)
        train.write_text(textwrap.dedent(source), encoding="utf-8")
        ended = ScriptTrainer(session).run(str(train), [])
    said = [str(error) for error in (*session.internal_errors, *session.dispatch.errors)]
    said += [f"alert: {alert.rule}" for alert in session.alerts]
    return {"steps": counter.steps, "planned": counter.planned, "exit": ended, "said": said}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default="healthcheck:recommended")
    parser.add_argument("--script", choices=SCRIPTS, default="plain")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    print(json.dumps(count(given.rules, given.script, given.layers, given.device)))
