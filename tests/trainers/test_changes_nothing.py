"""The promise: a watched run and a plain one differ in nothing but what goes to stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TRAIN = """
    import hashlib, random, sys
    import torch
    torch.manual_seed(0)
    random.seed(0)
    def train(kind, clip, accumulate):
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
        make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.005, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2)}
        optimizer = make[kind](model.parameters())
        data = torch.utils.data.TensorDataset(torch.randn(200, 8), torch.randn(200, 1))
        loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
        losses = []
        for i, (x, y) in enumerate(loader):
            loss = (model(x) - y).square().mean() / accumulate
            loss.backward()
            losses.append(loss.item())
            if (i + 1) % accumulate == 0:
                if clip == "norm":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if clip == "value":
                    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
                print(f"\\rstep {i}", end="")
        model.eval()
        with torch.no_grad():
            print(model(torch.ones(1, 8)).item().hex())
        state = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values() if v is not None)]
        print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in state)).hexdigest())
        print(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(), random.random(), losses)
    for case in sys.argv[1:]:
        kind, clip, accumulate = case.split("-")
        train(kind, clip, int(accumulate))
    print(torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.get_num_threads())
"""

CASES = ("sgd-none-1", "adamw-norm-4", "adamw-value-2")
"""Optimizer, clipping, micro-batches; one training after the other."""


@pytest.mark.slow
def test_weights_moments_losses_random_state_and_output_have_the_same_bits(
    script: Callable[..., Path], tmp_path: Path
) -> None:
    path = script(TRAIN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HEALTHCHECK_RUNS": str(tmp_path / "runs")}
    watch = ("-c", "import sys; from healthcheck.cli import main; sys.exit(main())", "run", "--observe")

    plain, watched = (
        subprocess.run([sys.executable, *how, path, *CASES], capture_output=True, cwd=tmp_path, env=environment)
        for how in ((), watch)
    )

    assert plain.returncode == 0, plain.stderr
    assert watched.returncode == 0, watched.stderr
    assert b"watching" in watched.stderr
    assert watched.stdout == plain.stdout
    assert plain.stdout.count(b"\rstep 3\r") == len(CASES)


def test_torch_is_not_imported_before_the_script_does(
    healthcheck_command: Callable, script: Callable[..., Path]
) -> None:
    """A script that sets CUDA_VISIBLE_DEVICES before its import must be heard."""
    path = script(
        """
        import sys
        print([m for m in ("torch", "numpy", "transformers", "lightning") if m in sys.modules])
        """
    )

    assert healthcheck_command("run", path).stdout == "[]\n"


def test_a_model_that_the_script_lets_go_is_not_kept_alive(play: Callable) -> None:
    played = play(
        """
        import gc, weakref, torch
        def train():
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for i in range(3):
                model(torch.ones(4, 2)).mean().backward()
                optimizer.step()
            return weakref.ref(model), weakref.ref(model.weight), weakref.ref(optimizer)
        gone = train()
        gc.collect()
        print([ref() is None for ref in gone])
        assert all(ref() is None for ref in gone)
        """,
        rules={"version": 1, "rules": {"r": {"metric": "grad_norm", "when": {"above": 1e9}}}},
        listen=False,
    )

    assert played.code == 0
