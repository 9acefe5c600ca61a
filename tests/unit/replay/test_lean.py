"""What judging a log loads: memory of a replay is mostly modules, and those for an alert are no exception."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from healthcheck.core.digest import sha256

HEAVY = (
    *("_hashlib", "difflib", "html.entities", "tarfile", "ctypes", "torch", "rich", "yaml", "jsonschema"),
    "healthcheck.instrument.step_rows",
)
"""OpenSSL, tables and readers that a replay has no use for, and what watches a training."""


def run(code: str, *arguments: str, **environment: str) -> str:
    command, env = [sys.executable, "-c", code, *arguments], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return done.stdout.strip()


def test_a_replay_with_an_alert_loads_nothing_heavy_for_it(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = [{"step": step, "loss": 1.0 if step != 150 else float("nan"), "lr": 1e-3} for step in range(1, 200)]
    log.write_text("\n".join(map(json.dumps, rows)))
    code = (
        "import sys\n"
        "from healthcheck.cli.replay import Given, judge_of\n"
        "found = judge_of(Given({'rules': ['healthcheck:recommended']}))(sys.argv[1])\n"
        f"print([alert['rule'] for alert in found.report['alerts']], [m for m in {HEAVY} if m in sys.modules])\n"
    )
    cache = str(tmp_path / "rules")
    run(code, str(log), HEALTHCHECK_CACHE=cache)  # reads the packs, which takes YAML and a validator, and keeps them
    assert run(code, str(log), HEALTHCHECK_CACHE=cache) == "['not-learning', 'loss-not-finite'] []"


@pytest.mark.parametrize("missing", [[], ["_sha2"], ["_sha256"], ["_sha2", "_sha256"]])
def test_a_digest_is_the_same_whoever_computes_it(missing: list[str]) -> None:
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({missing}))\n"
        "from healthcheck.core.digest import sha256\n"
        "own = sha256(b'loss|nan', b'', bytes(range(256)) * 300).hexdigest()\n"
        "print('_hashlib' in sys.modules, own)\n"
    )
    expected = hashlib.sha256(b"loss|nan" + bytes(range(256)) * 300).hexdigest()
    loaded, own = run(code).split()
    assert own == expected == sha256(b"loss|nan", bytes(range(256)) * 300).hexdigest()
    # Each Python has one of the two; where a build has neither, OpenSSL is the only way.
    assert (loaded == "False") == any(find_spec(name) for name in {"_sha2", "_sha256"}.difference(missing))
