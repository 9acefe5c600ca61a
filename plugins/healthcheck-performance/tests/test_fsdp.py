"""FSDP2 prefetching over gloo, two ranks on the processor: order recorded, set, shown, watched and undone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed"),
]
RANKS = Path(__file__).parent / "fsdp_ranks.py"
ORDER = ["(root)", "early", "middle", "late", "last"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks saw: without prefetching, with it, and with blocks that change places."""
    out = tmp_path_factory.mktemp("fsdp") / "out.json"
    paths = [str(RANKS.parents[1]), str(RANKS.parents[3]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*torchrun, str(RANKS), str(out)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    content: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return content


def test_the_order_of_the_first_step_is_set_and_undone_and_no_weight_changes(found: dict[str, Any]) -> None:
    plain, ahead = found["plain"], found["ahead"]
    assert ahead["weights"] == plain["weights"]
    assert ahead["seen"]["forward"] == {
        "(root)": ["early", "middle"],
        "early": ["late"],
        "middle": ["last"],
        "late": [],
        "last": [],
    }
    backward = ahead["seen"]["backward"]
    first = next(name for name, after in backward.items() if len(after) == 2)
    assert (first, backward[first], backward["late"]) == ("last", ["(root)", "late"], ["early"])
    assert set(ahead["left"].values()) == {0}
    assert ahead["hooks"] == plain["hooks"]
    assert any(note.strip() == f"forward: {' > '.join(ORDER)}" for note in ahead["notes"])
    assert ahead["changed"] == 0
    rows = [row["module"] for row in ahead["findings"]["performance.fsdp"]["rows"] if row["pass"] == "forward"]
    assert rows == ORDER


def test_unsharding_with_the_batch_changes_no_weight(found: dict[str, Any]) -> None:
    assert found["unsharded"]["weights"] == found["plain"]["weights"]
    assert found["unsharded"]["early"] >= 8 > found["plain"]["early"] == 0


def test_another_order_later_is_said(found: dict[str, Any]) -> None:
    changing = found["changing"]
    assert changing["changed"] == 2
    [note] = [note for note in changing["notes"] if "another order" in note]
    assert "at step 5: place 2 is middle, in the first step it was early" in note
