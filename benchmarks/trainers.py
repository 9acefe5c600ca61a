"""What watching costs real trainers: HF Trainer, Lightning, Accelerate and a plain loop, as their users run them.

    python benchmarks/trainers.py --seconds 400 --json trainers.json
    python benchmarks/trainers.py --device cpu --seconds 120
    python benchmarks/trainers.py --only loop-10m,hf-10m --pairs 3
    python benchmarks/trainers.py --budget 1% --allowance 0.2    a long run, which has used up its allowance
    python benchmarks/trainers.py --pool one.json two.json       the rounds of several runs, as of one

Each training runs once, in this process, with watching on and off in random blocks of steps, and off a second time beside
it: *nothing again* is the noise of the machine. A ratio is made of each round of three blocks; median of the rounds, and
its 95 % bootstrap interval. Where half of the interval of *nothing again* is more than 0.01, nothing can be said: "not
resolved". With ``--pairs`` the same trainings run in processes of their own besides, with and without ``healthcheck run`` in
turn and under the same budget, as a check: mean step times of the last four fifths of their steps.

A framework that is not installed is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from overhead import facts
from overhead_models import GPT
from overhead_tables import bootstrap

from healthcheck.assembly import open_session
from healthcheck.instrument.script import InProcess
from healthcheck.run import budget
from healthcheck.run.ending import Ending

OnStep = Callable[[], bool]
"""Called after every step; True: it was the last one."""
HALF_WIDTH = 0.01
WARM_UP, SETTLE = {"cuda": 60, "cpu": 20}, 2
"""Steps before the first block, and steps at the beginning of each that are not timed."""
STATES = ("nothing", "nothing again", "watched")


@dataclass(frozen=True)
class Training:
    """One trainer with one model."""

    needs: str
    """A package that must be there; empty: torch alone."""
    bound_by: str
    block: int
    """Steps of a block."""
    run: Callable[[str, OnStep], None]
    """Trains on a device until the function says that it was the last step."""


# -- the trainings ------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random texts, the same for each index."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, self.vocabulary, (self.length,), generator=generator)
        return {"input_ids": ids, "labels": ids}


SIZES = {"tiny": (2, 64, 2, 256, 64), "10m": (6, 384, 6, 512, 128), "124m": (12, 768, 12, 50257, 512)}
"""Layers, width, heads, vocabulary, length of a text."""


def hugging_face(size: str) -> Callable[[str, OnStep], None]:
    def run(device: str, on_step: OnStep) -> None:
        from transformers import (
            GPT2Config,
            GPT2LMHeadModel,
            PrinterCallback,
            Trainer,
            TrainerCallback,
            TrainingArguments,
        )

        layers, width, heads, vocabulary, length = SIZES[size]
        config = GPT2Config(
            n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=max(512, length)
        )

        class Steps(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                control.should_training_stop = on_step() or control.should_training_stop

        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder,
                per_device_train_batch_size=16 if device == "cuda" else 4,
                max_steps=1_000_000,
                logging_steps=10,
                save_strategy="no",
                report_to=[],
                bf16=device == "cuda",
                use_cpu=device == "cpu",
                learning_rate=1e-4,
                dataloader_num_workers=4 if device == "cuda" else 0,
                disable_tqdm=True,
            )
            model = GPT2LMHeadModel(config)
            trainer = Trainer(model=model, args=args, train_dataset=Tokens(vocabulary, length), callbacks=[Steps()])
            trainer.remove_callback(PrinterCallback)  # what it prints would come between the rows
            trainer.train()

    return run


def lightning(layers: int, batch: int) -> Callable[[str, OnStep], None]:
    def run(device: str, on_step: OnStep) -> None:
        import lightning as pl

        class Convolutions(pl.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                parts = [part for _ in range(layers) for part in (nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64))]
                activated = [
                    each for part in parts for each in ([part] if isinstance(part, nn.Conv2d) else [part, nn.ReLU()])
                ]
                self.net = nn.Sequential(
                    nn.Conv2d(3, 64, 3, padding=1), *activated, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
                )

            def training_step(self, batch: Any, index: int) -> Any:
                inputs, labels = batch
                loss = nn.functional.cross_entropy(self.net(inputs), labels)
                self.log("train_loss", loss)
                return loss

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), 1e-3)

        class Steps(pl.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, *more: Any) -> None:
                trainer.should_stop = on_step() or trainer.should_stop

        data = torch.utils.data.TensorDataset(torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,)))
        workers = 4 if device == "cuda" else 0
        loader = torch.utils.data.DataLoader(
            data, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )
        pl.Trainer(
            max_epochs=-1,
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Steps()],
            precision="bf16-mixed" if device == "cuda" else 32,
        ).fit(Convolutions(), loader)

    return run


def accelerate(size: str) -> Callable[[str, OnStep], None]:
    def run(device: str, on_step: OnStep) -> None:
        from accelerate import Accelerator

        layers, width, heads, vocabulary, length = SIZES[size]
        accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if device == "cuda" else "no")
        model: Any = GPT(layers, width, heads, vocabulary, length)
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-4)
        loader: Any = torch.utils.data.DataLoader(Tokens(vocabulary, length + 1), 16 if device == "cuda" else 4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch["input_ids"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if on_step():
                return

    return run


def plain(size: str) -> Callable[[str, OnStep], None]:
    """A loop as nanoGPT has it: clipped, cosine by hand, the loss read every ten steps."""

    def run(device: str, on_step: OnStep) -> None:
        layers, width, heads, vocabulary, length = SIZES[size]
        model = GPT(layers, width, heads, vocabulary, length).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=device == "cuda")
        data = torch.randint(0, vocabulary, (1_000_000,))
        step, over = 0, False
        while not over:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / 100)
            starts = torch.randint(len(data) - length - 1, (16 if device == "cuda" else 4,))
            ids = torch.stack([data[i : i + length + 1] for i in starts.tolist()])
            ids = ids.pin_memory().to(device, non_blocking=True) if device == "cuda" else ids
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(ids)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 10 == 0:
                loss.item()
            step += 1
            over = on_step()

    return run


TRAININGS: dict[str, dict[str, Training]] = {
    "cuda": {
        "hf-124m": Training("transformers", "device", 8, hugging_face("124m")),
        "hf-10m": Training("transformers", "host", 20, hugging_face("10m")),
        "lightning-conv": Training("lightning", "host", 20, lightning(12, 128)),
        "accelerate-10m": Training("accelerate", "host", 20, accelerate("10m")),
        "loop-10m": Training("", "host", 20, plain("10m")),
        "loop-124m": Training("", "device", 8, plain("124m")),
    },
    "cpu": {
        "hf-tiny": Training("transformers", "host", 10, hugging_face("tiny")),
        "lightning-conv": Training("lightning", "host", 6, lightning(2, 8)),
        "accelerate-tiny": Training("accelerate", "host", 10, accelerate("tiny")),
        "loop-tiny": Training("", "host", 10, plain("tiny")),
    },
}


# -- measuring ------------------------------------------------------------------------------


class Blocks:
    """Switches watching on and off, block by block in random order, and times the blocks."""

    def __init__(self, watching: InProcess, device: str, block: int, seconds: float) -> None:
        self.session, self.machine = watching.session, watching.machine
        self.device, self.block = device, block
        self.until = time.monotonic() + seconds
        self.rounds: list[dict[str, float]] = []
        self.own = self.watched = 0.0
        """Seconds that are ours by our own timers, and those of all watched blocks."""
        self._random = random.Random(0)
        self._order: list[str] = []
        self._times: dict[str, float] = {}
        self._state = ""
        """Of the block at hand; empty while the training warms up, watched."""
        self._left = WARM_UP[device]
        self._began = 0.0, 0
        self._resume: Callable[[], None] | None = None

    def step(self) -> bool:
        """A step is over."""
        self._left -= 1
        if self._left == self.block and self._state:
            self._began = self._clock(), self.session.own_ns
        if self._left:
            return False
        if self._state:
            took, own = self._clock() - self._began[0], self.session.own_ns - self._began[1]
            self._times[self._state] = took
            if self._state == "watched":
                self.own, self.watched = self.own + own / 1e9, self.watched + took
        if not self._order:
            if self._times:
                self.rounds.append(self._times)
            if time.monotonic() > self.until:
                return True
            self._times, self._order = {}, self._random.sample(STATES, len(STATES))
        self._switch(self._order.pop())
        self._left = self.block + SETTLE
        return False

    def _switch(self, state: str) -> None:
        self._state = state
        now = self.session.clock.monotonic()
        if state == "watched" and self._resume is not None:
            self._resume()
            self._resume = None
            self.session.active.resume(now)
        elif state != "watched" and self._resume is None:
            self._resume = self.machine.pause()
            self.session.active.pause(now)  # the budget is a part of the time that is watched

    def _clock(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def measure(training: Training, device: str, seconds: float, settings: dict[str, Any]) -> dict[str, Any]:
    session = open_session(target="benchmark", console=False, record=False, observe=True, settings=settings)
    watching = InProcess(session)
    blocks = Blocks(watching, device, training.block, seconds)
    with watching:
        training.run(device, blocks.step)
    session.finish(Ending())
    rounds = blocks.rounds
    row: dict[str, Any] = {"rounds": len(rounds), "block": training.block, "bound_by": training.bound_by}
    if len(rounds) < 3:
        return {**row, "error": f"{len(rounds)} rounds in {seconds:.0f} s are not enough"}
    row["step_ms"] = statistics.median(r["nothing"] for r in rounds) / training.block * 1e3
    row["ratios"] = {name: [round(r[name] / r["nothing"], 6) for r in rounds] for name in STATES[1:]}
    row["own"] = blocks.own / blocks.watched
    return judged(row)


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """With the median and its interval of what stands in ``ratios``, and whether that says anything."""
    found = {name: [statistics.median(ratios), *bootstrap(ratios)] for name, ratios in row["ratios"].items()}
    again = found["nothing again"]
    return {**row, **found, "resolved": (again[2] - again[1]) / 2 <= HALF_WIDTH}


def pooled(files: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Rows made of the rounds of all these runs; step times and own shares are their means."""
    there: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        for name, row in json.loads(Path(file).read_text())["rows"].items():
            if "ratios" in row:
                there.setdefault(name, []).append(row)
    found = {}
    for name, rows in there.items():
        ratios = {state: [ratio for row in rows for ratio in row["ratios"][state]] for state in STATES[1:]}
        means = {key: statistics.fmean(row[key] for row in rows) for key in ("step_ms", "own")}
        pairs = [pair for row in rows for pair in row.get("pairs", ())]
        rounds = sum(row["rounds"] for row in rows)
        found[name] = judged({**rows[0], **means, "ratios": ratios, "rounds": rounds, "pairs": pairs})
    return found


# -- pairs of processes -----------------------------------------------------------------------


def alone(name: str, device: str, steps: int) -> None:
    """One training by itself: the mean of its step times, for the process that called."""
    times: list[float] = []

    def step() -> bool:
        if device == "cuda" and len(times) % 20 == 0:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        return len(times) >= steps

    TRAININGS[device][name].run(device, step)
    rest = times[len(times) // 5 :]
    print(f"STEP {(rest[-1] - rest[0]) / (len(rest) - 1) * 1e3:.4f}", flush=True)


WATCHED = (
    "import sys; from healthcheck.run import budget; budget.ALLOWANCE = float(sys.argv.pop(1)); "
    "from healthcheck.cli import main; sys.exit(main(sys.argv[1:]))"
)
"""The command, with another allowance."""


def pairs(name: str, device: str, count: int, steps: int, settings: dict[str, Any]) -> list[tuple[float, float]]:
    """Milliseconds of a step without and with us, for each of so many pairs of processes."""
    here = [__file__, "--alone", name, "--device", device, "--steps", str(steps)]
    places = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    found = []
    for _ in range(count):
        pair = []
        with tempfile.TemporaryDirectory() as folder:
            rules = Path(folder, "budget.yaml")
            content = {"version": 1, "extends": ["healthcheck:recommended"], "settings": settings}
            rules.write_text(json.dumps(content), encoding="utf-8")
            watched = ["-c", WATCHED, str(budget.ALLOWANCE), "run", "--observe", "--rules", str(rules)]
            for start in ([], watched):
                done = subprocess.run(
                    [sys.executable, *start, *here],
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
                    capture_output=True,
                    text=True,
                )
                said = [line for line in done.stdout.splitlines() if line.startswith("STEP ")]
                if not said:
                    raise RuntimeError(f"{'with' if start else 'without'} us: {done.stderr.strip().splitlines()[-1:]}")
                pair.append(float(said[-1].split()[1]))
        found.append((pair[0], pair[1]))
    return found


# -- what is printed ----------------------------------------------------------------------------


def shown(values: list[float]) -> str:
    return f"{values[0]:.4f} [{values[1]:.4f}, {values[2]:.4f}]"


def line(name: str, row: dict[str, Any]) -> str:
    pair = ", ".join(f"{without:.2f} -> {with_us:.2f}" for without, with_us in row.get("pairs", ())) or "-"
    if "error" in row:
        return f"| {name} | {row['error']} | | | | | {pair} |"
    watched = shown(row["watched"]) + ("" if row["resolved"] else ", not resolved")
    size = f"{row['rounds']} x {row['block']} steps"
    own = f"{row['own']:.1%}"
    return f"| {name} | {row['bound_by']} | {row['step_ms']:.2f} ms, {size} | {shown(row['nothing again'])} | {watched} | {own} | {pair} |"


HEAD = (
    "| training | bound by | step | nothing again | watched | it says of itself | pairs of processes, ms |\n"
    "|---|---|---|---|---|---|---|"
)


def table(rows: dict[str, dict[str, Any]], about: dict[str, str]) -> str:
    first = f"{about['device']}; torch {about['torch']}, Python {about['python']}, healthcheck {about['healthcheck']}"
    first += f" at {about['commit']}; {about['date']}. `{about['command']}`"
    return "\n".join([first, "", HEAD, *(line(name, row) for name, row in rows.items())])


def run(
    device: str,
    seconds: float,
    *,
    only: list[str] | None = None,
    pair_count: int = 0,
    pair_steps: int | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """All trainings that can run here, within about so many seconds (pairs of processes come on top)."""
    chosen = {name: TRAININGS[device][name] for name in only or TRAININGS[device]}
    rows: dict[str, dict[str, Any]] = {}
    there = {name: t for name, t in chosen.items() if not t.needs or importlib.util.find_spec(t.needs) is not None}
    for name, training in chosen.items():
        if name not in there:
            rows[name] = {"error": f"left out: {training.needs} is not installed"}
        else:
            try:
                rows[name] = measure(training, device, seconds / len(there), settings or {})
                if pair_count:
                    steps = pair_steps or (300 if device == "cuda" else 100)
                    rows[name]["pairs"] = pairs(name, device, pair_count, steps, settings or {})
            except Exception as error:  # one framework's trouble is not the others'
                rows[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200].replace("|", "/")}
        print(line(name, rows[name]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(TRAININGS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=300, help="for all trainings together, without pairs")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--pairs", type=int, default=0, help="pairs of processes for each training")
    parser.add_argument("--pair-steps", type=int, help="steps of each of these processes")
    parser.add_argument("--pool", nargs="+", metavar="JSON", help="print what these runs have found together")
    parser.add_argument(
        "--budget", default="off", help="overhead_budget while it is measured (off: every step is watched)"
    )
    parser.add_argument(
        "--allowance",
        type=float,
        metavar="SECONDS",
        help="of our own time, before the budget binds; else that of every run",
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=300, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    if args.alone:
        alone(args.alone, args.device, args.steps)
        return
    if args.pool:
        abouts = [json.loads(Path(file).read_text())["about"] for file in args.pool]
        print(table(pooled(args.pool), {**abouts[0], "device": " and ".join(a["device"] for a in abouts)}))
        return
    if args.allowance is not None:
        budget.ALLOWANCE = args.allowance
    only = args.only.split(",") if args.only else None
    unknown = set(only or ()) - TRAININGS[args.device].keys()
    if unknown:
        parser.error(f"no such training: {', '.join(sorted(unknown))}; there are {', '.join(TRAININGS[args.device])}")
    settings = {"overhead_budget": args.budget}
    rows = run(
        args.device, args.seconds, only=only, pair_count=args.pairs, pair_steps=args.pair_steps, settings=settings
    )
    about = facts(args.device)
    if args.json:
        Path(args.json).write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    print("\n" + table(rows, about))


if __name__ == "__main__":
    main()
