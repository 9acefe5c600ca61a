"""The performance tools on one or two cards, in under four minutes; prints one table.

    python plugins/healthcheck-performance/benchmarks/gpu.py [--cpu] [--out FILE]

FSDP2 with and without prefetching (two cards; interleaved, each from the same seed), a small GPT in float8 with an outlier
planted at step 81 (torchao), and scripts that are bound by their data, their host, arithmetic and memory. ``--cpu`` runs the
same on a processor, small and emulated, to see that it works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[3])]
PLUGIN = "healthcheck_performance"
SEED = 0
Row = tuple[str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="a dry run on the processor")
    parser.add_argument("--out", default="", help="write the rows as JSON, too")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rows", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        rows = PARTS[args.part](args.cpu)
        if int(os.environ.get("RANK", "0")) == 0:
            Path(args.rows).write_text(json.dumps(rows), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)
    import torch

    cards = 0 if args.cpu else torch.cuda.device_count()
    name = torch.cuda.get_device_name() if cards else "processor (dry run: figures mean nothing)"
    print(f"torch {torch.__version__}, {max(cards, 1)} x {name}, seed {SEED}", flush=True)
    rows: list[Row] = []
    for part in PARTS:
        if part == "fsdp" and not args.cpu and cards < 2:
            rows.append(("fsdp", "prefetch", f"left out: it needs two cards, here is {cards}"))
            continue
        rows += run(part, args.cpu)
    width = [max(len(row[i]) for row in rows) for i in range(2)]
    print()
    for row in rows:
        print(f"{row[0]:<{width[0]}}  {row[1]:<{width[1]}}  {row[2]}")
    if args.out:
        Path(args.out).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def run(part: str, cpu: bool) -> list[Row]:
    """One part in processes of its own: what it leaves on a card is gone behind it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if part == "fsdp" else []
        words = [str(HERE), "--part", part, "--rows", str(out), *(["--cpu"] if cpu else [])]
        environment = {**os.environ, "HEALTHCHECK_RUNS": folder}
        if cpu:
            environment |= {"OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, *launcher, *words],
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [(part, "-", "took over 300 s and was ended")]
        if not out.is_file():
            return [(part, "failed", (done.stderr.strip().splitlines() or ["no message"])[-1][:300])]
        rows = [tuple(row) for row in json.loads(out.read_text(encoding="utf-8"))]
    return [*rows, (part, "took", f"{time.monotonic() - began:.0f} s")]


# --------------------------------------------------------------------------- FSDP2


def apart(losses: list[float], others: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, others, strict=True))


def fsdp(cpu: bool) -> list[Row]:
    """Step time with FSDP2's own prefetching and with ours, interleaved."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import healthcheck
    from healthcheck_performance import Analyzer, FSDPPrefetch

    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if cpu else torch.device("cuda", local)
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if cpu else "nccl")
    depth, width, sequence, batch = (3, 32, 16, 2) if cpu else (16, 2048, 512, 4)
    warm, steps = (2, 6) if cpu else (8, 40)
    rules = {"version": 1, "rules": {"r": {"metric": "loss", "when": "nonfinite"}}}

    def train(prefetch: int, analyse: bool = False) -> tuple[float, list[float], float, Any]:
        torch.manual_seed(SEED)
        with device:
            model = gpt(depth, width, 256)
        policy = MixedPrecisionPolicy() if cpu else MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tools: list[Any] = [FSDPPrefetch(prefetch)] if prefetch else []
        analyzer = Analyzer(at=warm + 2, active=3, ranks="all")
        if analyse:
            tools.append(analyzer)
        torch.manual_seed(SEED + dist.get_rank())
        data = torch.randint(0, 256, (batch, sequence), device=device)
        losses, times = [], []
        if not cpu:
            torch.cuda.reset_peak_memory_stats()
        with healthcheck.watch(
            model, optimizer, rules=rules, record=False, console=False, callbacks=tools, plugins=[PLUGIN]
        ) as health:
            for step in range(warm + steps):
                if step == warm:
                    wait(cpu)
                    began = time.perf_counter()
                loss = model(data)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                health.step(loss=loss)
                if step < 5:
                    losses.append(float(loss.detach()))
            wait(cpu)
            times.append((time.perf_counter() - began) / steps)
        peak = 0.0 if cpu else torch.cuda.max_memory_allocated() / 2**30
        return times[0], losses, peak, analyzer.verdict

    order = [0, 1, 2, 0, 1, 2, 0, 1, 2]
    found: dict[int, list[tuple[float, list[float], float, Any]]] = {0: [], 1: [], 2: []}
    for prefetch in order[: 3 if cpu else 9]:
        found[prefetch].append(train(prefetch))
    rows = []
    base = statistics.median(one[0] for one in found[0])
    # Some kernels of a backward pass add in another order each time: what repetitions differ by is not the prefetching's.
    again, between = ([apart(one[1], found[0][0][1]) for one in kept] for kept in (found[0][1:], found[1] + found[2]))
    for prefetch, kept in found.items():
        took = statistics.median(one[0] for one in kept)
        spread = max(one[0] for one in kept) / min(one[0] for one in kept)
        what = f"prefetch {prefetch}" if prefetch else "as FSDP2 does"
        text = f"{took * 1e3:.2f} ms a step ({base / took:.3f} x the speed; runs differ by {spread:.2f}), peak {kept[0][2]:.2f} GiB"
        rows.append(("fsdp", what, text))
    text = f"repeated without prefetching up to {max(again, default=0.0):.2g} apart, with it up to {max(between):.2g}"
    rows.append(("fsdp", "losses of 5 steps", text))
    verdict = train(0, analyse=True)[3]
    rows.append(("fsdp", "bound", verdict.text if verdict is not None else "no verdict"))
    if verdict is not None:
        rows.append(("fsdp", "shares", shares(verdict)))
    dist.barrier()
    return rows


# --------------------------------------------------------------------------- float8


def float8(cpu: bool) -> list[Row]:
    """A small GPT in bfloat16 and in float8, with an outlier planted at step 81."""
    import importlib.util

    import torch

    import healthcheck
    from healthcheck_performance import Float8

    if importlib.util.find_spec("torchao") is None:
        return [("float8", "left out", "torchao is not installed: pip install --no-deps torchao")]
    device = torch.device("cpu" if cpu else "cuda")
    depth, width, sequence, batch = (2, 32, 16, 2) if cpu else (8, 1024, 512, 8)
    steps, planted = 120, 81
    pack = {"version": 1, "extends": [f"{PLUGIN}:performance"]}

    def train(eight: bool, outlier: bool) -> tuple[Any, list[float], float]:
        torch.manual_seed(SEED)
        with device:
            model = gpt(depth, width, 256)
        model = model.to(torch.float32 if cpu else torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        tools = [Float8(emulate=cpu, exclude=["head"])] if eight else []
        torch.manual_seed(SEED)
        period = torch.randint(0, 256, (batch, 8), device=device)
        data = period.repeat(1, sequence // 8)
        losses = []
        with healthcheck.watch(
            model, optimizer, rules=pack, record=False, console=False, callbacks=tools, plugins=[PLUGIN]
        ) as health:
            for step in range(1, steps + 1):
                model.outlier = 1e5 if outlier and step >= planted else 0.0
                if step == 21:
                    wait(cpu)
                    began = time.perf_counter()
                loss = model(data)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                health.step(loss=loss)
                losses.append(loss.detach())
                if step == 80:
                    wait(cpu)
                    took = (time.perf_counter() - began) / 60
        return health, [float(loss) for loss in losses], took

    rows: list[Row] = []
    _, losses, took = train(False, False)
    rows.append(("float8", "bfloat16", f"loss {losses[0]:.3f} -> {losses[-1]:.4f}, {took * 1e3:.2f} ms a step"))
    healthy, losses, took = train(True, False)
    alerts = [alert["rule"] for alert in healthy.report["alerts"] if alert["rule"].startswith("float8")]
    text = f"loss {losses[0]:.3f} -> {losses[-1]:.4f}, {took * 1e3:.2f} ms a step (eager), float8 alerts: {alerts or 'none'}"
    rows.append(("float8", "tensorwise", text))
    spoilt, losses, _ = train(True, True)
    name = f"module=blocks.{depth - 1}.up,tensor=input"
    for metric in ("float8_amax", "float8_underflow"):
        values = dict(spoilt.session.history(f"performance.{metric}[{name}]"))
        rows.append(
            (
                "float8",
                f"{metric} step 80, 90",
                f"{values.get(80, float('nan')):.4g} -> {values.get(90, float('nan')):.4g}",
            )
        )
    alerts = [(a["rule"], a["fired_step"]) for a in spoilt.report["alerts"] if a["rule"].startswith("float8")]
    rows.append(("float8", "outlier at step 81", f"alerts: {alerts}"))
    if not cpu:
        from healthcheck import UsageError

        try:
            with torch.device("cpu"):
                Float8().convert(gpt(1, 32, 16))
            rows.append(("float8", "model on the processor", "NOT refused"))
        except UsageError as error:
            rows.append(("float8", "model on the processor", f"refused: {str(error)[:70]}"))
    return rows


# --------------------------------------------------------------------------- bounds


def bounds(cpu: bool) -> list[Row]:
    """Four trainings, each bound by something else."""
    import torch
    from torch import nn

    import healthcheck
    from healthcheck_performance import Analyzer

    device = torch.device("cpu" if cpu else "cuda")
    big = 256 if cpu else 8192

    class Slow(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4000

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.005)
            return torch.randn(256)

    class Pointwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            y = x * self.weight
            for _ in range(6):
                y = torch.tanh(y) + 1
            return y

    def tiny() -> nn.Module:
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(60 if cpu else 200)))

    def same(x: Any) -> Any:
        return (x for _ in range(60))

    def python_work() -> None:
        sum(i * i for i in range(200_000))

    loader = torch.utils.data.DataLoader(Slow(), batch_size=4)
    cases: list[tuple[str, Any, Any, Any]] = [
        ("data", nn.Linear(256, 256), loader, None),
        ("host", tiny(), same(torch.randn(8, 16)), python_work if cpu else None),
        ("host", nn.Linear(256, 256), same(torch.randn(64, 256)), python_work),
        ("compute", nn.Sequential(*(nn.Linear(big, big) for _ in range(3))), same(torch.randn(big, big)), None),
        ("memory", Pointwise(), same(torch.randn(10**5 if cpu else 2 * 10**8)), None),
    ]
    rows: list[Row] = []
    for number, (expected, model, batches, work) in enumerate(cases):
        torch.manual_seed(SEED)
        type_ = torch.bfloat16 if expected == "compute" and not cpu else torch.float32
        model = model.to(device=device, dtype=type_)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        analyzer = Analyzer(at=20, active=4)
        options: dict[str, Any] = {"record": False, "console": False, "plugins": [PLUGIN], "callbacks": [analyzer]}
        placed = {}
        with healthcheck.watch(model, optimizer, rules={"version": 1, "rules": {}}, **options) as health:
            for step, x in enumerate(batches, start=1):
                # Fixed inputs are copied once and stay on the card; those of the loader are copied, as they would be.
                if number == 0 or not placed:
                    placed["x"] = x.to(device, type_)
                x = placed["x"]
                loss = model(x).float().pow(2).mean()
                loss.backward()
                if work is not None:
                    work()
                optimizer.step()
                optimizer.zero_grad()
                health.step(loss=loss)
                if step == 40:
                    break
        verdict = analyzer.verdict
        said = "no verdict" if verdict is None else verdict.text
        right = verdict is not None and verdict.bound == expected
        rows.append(("bound", f"{expected}-bound script {number + 1}", f"{'right' if right else 'WRONG'}: {said}"))
        if verdict is not None:
            rows.append(("bound", "shares", shares(verdict)))
        del model, optimizer, placed
        if not cpu:
            torch.cuda.empty_cache()
    return rows


# --------------------------------------------------------------------------- shared


def shares(verdict: Any) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in verdict.shares.items())


def wait(cpu: bool) -> None:
    if not cpu:
        import torch

        torch.cuda.synchronize()


def gpt(depth: int, width: int, vocabulary: int) -> Any:
    """A small language model whose loss is the next token's; ``outlier`` is added to one value before the last layer."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any, outlier: float) -> Any:
            b, t, w = x.shape
            q, k, v = (
                y.view(b, t, -1, 16 if w < 64 else 64).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1)
            )
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
            h = self.norm_2(x)
            x = x + self.down(nn.functional.gelu(self.up(h)))
            if outlier:  # measured, and of no effect on the training
                spike = torch.zeros_like(h)
                spike[0, 0, 0] = outlier
                x = x + self.up((h + spike).detach())[..., :w].detach() * 0
            return x

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block() for _ in range(depth))
            self.head = nn.Linear(width, vocabulary)
            self.outlier = 0.0

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            for i, block in enumerate(self.blocks):
                x = block(x, self.outlier if i == depth - 1 else 0.0)
            logits = self.head(x[:, :-1]).float()
            return nn.functional.cross_entropy(logits.reshape(-1, vocabulary), tokens[:, 1:].reshape(-1))

    return Gpt()


PARTS = {"bounds": bounds, "float8": float8, "fsdp": fsdp}

if __name__ == "__main__":
    main()
