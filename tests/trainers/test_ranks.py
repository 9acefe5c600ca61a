"""Several ranks: they stop together, at one step, or not at all."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TRAIN = """
    import os, sys, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        x = torch.randn(8, 4)
        y = x.sum(1, keepdim=True)
        if rank == int(os.environ["BAD_RANK"]) and step == 20:
            y = y * float("nan")
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad(); loss.backward()
        try:
            optimizer.step()
        finally:
            finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
            print(f"rank {rank} step {step + 1} finite {finite}", flush=True)
    print(f"rank {rank} ended", flush=True)
    dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch(
    folder: Path,
    world: int,
    *,
    bad_rank: int,
    watched: set[int],
    timeout: float = 600,
    options: tuple[str, ...] = (),
    train: str = TRAIN,
) -> list[tuple[int, str, str]]:
    """Start one process per rank, as a launcher does; returns (exit code, stdout, stderr) by rank."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(train))
    base = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")}
    base |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "BAD_RANK": str(bad_rank),
        "OMP_NUM_THREADS": "1",
        "HEALTHCHECK_RUNS": str(folder / "runs"),
    }
    healthcheck = [
        sys.executable,
        "-c",
        "import sys; from healthcheck.cli import main; sys.exit(main())",
        "run",
        *options,
    ]
    ranks = [
        subprocess.Popen(
            [*(healthcheck if rank in watched else [sys.executable]), str(script)],
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    results = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=timeout)
            results.append((process.returncode, out, err))
    finally:
        for process in ranks:
            process.kill()
    return results


def last_step(out: str) -> int:
    return max(int(n) for n in re.findall(r"step (\d+)", out))


def test_a_nan_on_one_rank_ends_all_ranks_at_the_same_step_with_finite_weights(tmp_path):
    first, second = launch(tmp_path, 2, bad_rank=1, watched={0, 1})
    assert (first[0], second[0]) == (1, 1)
    assert last_step(first[1]) == last_step(second[1])
    assert last_step(first[1]) <= 23
    assert "finite False" not in first[1] + second[1]
    assert "ended" not in first[1] + second[1]
    assert "loss-not-finite on rank 1 only, first seen at step 21" in first[2]
    assert "healthcheck" not in second[2]  # one voice
    report = json.loads((tmp_path / "runs/latest/report.json").read_text())
    assert (report["exit_reason"], report["stop"]["rule"]) == ("stopped", "loss-not-finite")


def test_a_rank_that_nobody_watches_is_named_and_a_stop_is_only_reported_so_that_nobody_leaves_alone(tmp_path):
    first, second = launch(tmp_path, 2, bad_rank=0, watched={0})
    assert "rank 0 ended" in first[1]
    assert "rank 1 ended" in second[1]
    assert "rank 1 is not watched" in first[2]
    assert "would have stopped" in first[2] or "proposed" in first[2]
    assert (first[0], second[0]) == (1, 0)


ALONE = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(40):
        time.sleep(0.3 * rank)
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if rank == int(os.environ["BAD_RANK"]) and step == 35:
            loss = loss * float("nan")
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_a_rank_that_fails_after_the_one_that_speaks_has_gone_says_so_itself(tmp_path: Path) -> None:
    """Rank 0 takes the store with it, and has said OK of itself."""
    first, second = launch(tmp_path, 2, bad_rank=1, watched={0, 1}, train=ALONE)
    assert (first[0], second[0]) == (0, 1)
    assert "of this rank only: rank 1 goes on, or died" in first[2]
    said = [line for line in second[2].splitlines() if line.startswith(("healthcheck", "  "))]
    assert said[0].startswith("healthcheck: rank 1 FAILED")
    assert said[1].startswith("  loss-not-finite at step 36")
    assert said[2] == "  said by this rank itself: the rendezvous store does not answer"
    assert said[3].startswith("  why: healthcheck why runs/")
    assert said[3].endswith("/rank-1")
    assert len(said) == 4


EVERYWHERE = """
version: 1
rules:
  high: {metric: loss, when: {above: 1000}, ranks: all, severity: error, then: [stop]}
"""


def test_a_rule_for_all_ranks_stops_a_training_only_once_it_fires_on_every_rank(tmp_path):
    """Rank 1 is bad from step 10 on, rank 0 from step 20."""
    (tmp_path / "rules.yaml").write_text(EVERYWHERE)
    late = 'if step >= (9 if rank else 19):\n            y = y * 1e4\n        if rank == int(os.environ["BAD_RANK"])'
    results = launch(
        tmp_path,
        2,
        bad_rank=9,
        watched={0, 1},
        options=("--rules", "rules.yaml"),
        train=TRAIN.replace('if rank == int(os.environ["BAD_RANK"])', late),
    )
    assert [code for code, _, _ in results] == [1, 1], results[0][2]
    assert [last_step(out) for _, out, _ in results] == [21, 21]
    assert "all ranks stop at step 21: high on 2 of 2 ranks, first seen at step 20" in results[0][2]


def test_four_ranks_print_one_block_and_write_one_report(tmp_path):
    """A job's log holds one copy of an alert, not four; so do its annotations and its JUnit file."""
    results = launch(
        tmp_path,
        4,
        bad_rank=3,
        watched=set(range(4)),
        options=("--report", "github", "--report", "junit=hc.xml"),
    )
    assert [code for code, _, _ in results] == [1] * 4, results[0][2]
    everything = "".join(err for _, _, err in results)
    assert len(re.findall(r"loss-not-finite on rank 3 only", everything)) == 1
    assert len(re.findall(r"^ERROR ", everything, re.MULTILINE)) <= 1
    assert len(re.findall(r"^healthcheck: STOPPED ", everything, re.MULTILINE)) == 1
    assert len(re.findall(r"^healthcheck [\d.]+: watching ", everything, re.MULTILINE)) == 1
    assert all("healthcheck" not in err for _, _, err in results[1:])
    assert (tmp_path / "hc.xml").is_file()


SAME_BITS = """
    import hashlib, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for step in range(60):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    state = b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())
    print("weights", hashlib.sha256(state).hexdigest())
    if dist.get_rank() == int(__import__("os").environ["BAD_RANK"]):
        torch.empty(1 << 52)
    dist.all_reduce(torch.ones(1))
"""


def test_ranks_that_are_compared_train_to_the_same_bits_and_the_rank_that_failed_first_is_named(tmp_path: Path) -> None:
    weights = []
    for watched in (set(), {0, 1}):
        folder = tmp_path / str(len(watched))
        folder.mkdir()
        results = launch(folder, 2, bad_rank=1, watched=watched, train=SAME_BITS)
        weights.append([out.split()[-1] for _, out, _ in results])
    assert weights[0] == weights[1]
    said = " ".join(results[0][2].replace("exit 1", "").split())  # the exit code stands at the end of the first line
    assert "(rank 1: out-of-memory at step 60)" in said
    assert "compared no longer" not in results[0][2]


MUTED = """
    import os, subprocess, sys, time, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for step in range(60):
        if rank == 0 and step == 10 and os.environ["BAD_RANK"] == "1":
            asked = [sys.executable, "-m", "healthcheck", "mute", "latest", "too-high", "--for", "1000", "--reason", "known"]
            subprocess.run(asked, check=True)
            time.sleep(1.5)
        x = torch.randn(8, 4)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        if rank == 1 and step > 40:
            loss = loss * 1e6
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(f"rank {rank} made {step + 1} steps", flush=True)
    dist.destroy_process_group()
"""
TOO_HIGH = "version: 1\nrules:\n  too-high: {metric: loss, when: {above: 1000}, severity: error, then: [stop]}\n"


def test_a_rule_of_several_ranks_is_muted_on_all_of_them_at_one_step(tmp_path: Path) -> None:
    (tmp_path / "high.yaml").write_text(TOO_HIGH)
    options = ("--rules", str(tmp_path / "high.yaml"))
    ended = launch(tmp_path, 2, bad_rank=1, watched={0, 1}, options=options, train=MUTED)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert all(f"rank {rank} made 60 steps" in out for rank, (_, out, _) in enumerate(ended))
    assert "too-high is muted for 1,000 steps" in ended[0][2]

    ended = launch(tmp_path, 2, bad_rank=-1, watched={0, 1}, options=options, train=MUTED)
    assert [code for code, _, _ in ended] == [1, 1], ended


SHORT_STEPS = """
    import os, sys, time, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from healthcheck.run import budget, current
    budget.ALLOWANCE = 0.02  # used up at once: what follows is the rest of a long run
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    apart = os.environ.get("APART")
    model = model if apart else DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    account = current.current().budget
    for step in range(1, int(os.environ["STEPS"]) + 1):
        x = torch.randn(64, 4)
        y = x.sum(1, keepdim=True)
        if rank == int(os.environ["BAD_RANK"]) and account.left_out > 150 and account.common and not account.in_turn(step):
            y = y * float("nan")  # in a step that nobody was to watch
        if apart and rank:
            time.sleep(0.02)
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad(); loss.backward()
        try:
            optimizer.step()
        finally:
            finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
            print(f"rank {rank} step {step} finite {finite}", flush=True)
    print(f"rank {rank} left out {account.left_out}, two in {account.common}", flush=True)
    dist.destroy_process_group()
"""


def test_ranks_whose_budget_is_used_up_leave_out_the_same_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPS", "500")
    ranks = launch(tmp_path, 2, bad_rank=-1, watched={0, 1}, train=SHORT_STEPS)
    assert [code for code, _, _ in ranks] == [0, 0]
    left_out = [re.findall(r"left out (\d+), two in (\d+)", out) for _, out, _ in ranks]
    assert left_out[0] == left_out[1]
    assert int(left_out[0][0][0]) > 100
    report = json.loads((tmp_path / "runs/latest/report.json").read_text())
    assert report["overhead"]["steps_left_out"] == int(left_out[0][0][0])
    assert "internal error" not in ranks[0][2]


def test_a_rank_that_sees_a_nan_in_a_step_that_is_left_out_keeps_its_weights_those_of_the_others(tmp_path, monkeypatch):
    """It watches that step alone; an update that it held back would be made on the others."""
    monkeypatch.setenv("STEPS", "3000")
    ranks = launch(tmp_path, 2, bad_rank=1, watched={0, 1}, train=SHORT_STEPS)
    assert [code for code, _, _ in ranks] == [1, 1]
    finite = [re.findall(r"step (\d+) finite (\w+)", out) for _, out, _ in ranks]
    assert finite[0] == finite[1]
    assert "False" in dict(finite[0]).values()
    assert last_step(ranks[0][1]) < 3000
    assert re.search(r"all ranks stop at step \d+: loss-not-finite", ranks[0][2])


def test_ranks_that_are_at_no_step_together_are_not_said_to_disagree_because_they_do_not_leave_out_steps(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("STEPS", "150")
    monkeypatch.setenv("APART", "1")
    ranks = launch(tmp_path, 2, bad_rank=-1, watched={0, 1}, train=SHORT_STEPS)
    assert [code for code, _, _ in ranks] == [0, 0], ranks
    assert "do not agree" not in ranks[0][2] + ranks[1][2]
    assert "of this rank only" not in ranks[0][2]
