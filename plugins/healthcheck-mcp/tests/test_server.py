"""The server, driven by the SDK's own client over stdio, on the record of a real run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

mcp = pytest.importorskip("mcp", reason="the package mcp is not installed: `make outward` has an environment with it")

from mcp import Client
from mcp.client.stdio import StdioServerParameters

HOME = Path(__file__).resolve().parents[1]
SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = torch.randn(256, 8)
labels = data[:, 0] * 2 + torch.randn(256) * 0.1
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data, labels), batch_size=32, shuffle=True)
for epoch in range(12):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of two runs: predictions [32, 1] against targets [32], and the same with equal shapes."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "fixed.py").write_text(SCRIPT.replace("model(x), y)", "model(x).squeeze(1), y)"))
    env = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")}
    env |= {"HEALTHCHECK_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1", "SECRET_TOKEN": "hf_SECRETsecretSECRET"}
    for name in ("fixed.py", "train.py"):
        command = [sys.executable, "-m", "healthcheck", "run", name, "--api-key", "sk-argvsecret123456"]
        subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False)
    return folder / "runs"


@pytest.fixture(scope="module")
def ask(root: Path) -> Callable[..., dict[str, Any]]:
    """``ask("why", run="latest")``: what the server answers, over stdio, as the SDK's client hears it."""

    def ask(tool: str, **arguments: Any) -> dict[str, Any]:
        async def asked() -> str:
            code = f"import sys; sys.path.insert(0, {str(HOME)!r}); from healthcheck_mcp.server import main; main()"
            server = StdioServerParameters(
                command=sys.executable, args=["-c", code, "--root", str(root)], env=dict(os.environ)
            )
            async with Client(server) as client:
                result = await client.call_tool(tool, arguments)
                return str(result.content[0].text)

        text = asyncio.run(asked())
        assert len(text.encode()) < (4000 if tool == "why" else 16_000)
        assert "SECRETsecret" not in text
        assert "sk-argvsecret" not in text
        answered: dict[str, Any] = json.loads(text)["data"]
        return answered

    return ask


def test_why_names_cause_place_and_remedy(ask: Callable[..., dict[str, Any]]) -> None:
    alert = ask("why")["alert"]
    assert (alert["rule"], alert["cause"]) == ("loss-misused", "wrong-input")
    assert alert["where"] == "train.py:13"  # where the loss is differentiated
    assert "equal shapes" in alert["hint"]


def test_the_other_questions_are_answered_from_the_same_record(ask: Callable[..., dict[str, Any]]) -> None:
    runs: Any = ask("list_runs")
    assert [run["script"] for run in runs] == ["train.py", "fixed.py"]
    report = ask("report", run=runs[1]["name"])
    assert (report["verdict"], report["alerts"]) == ("ok", [])
    series = ask("series", metric="loss", points=4)
    assert (series["of"], len(series["points"])) == (96, 4)
    assert "grad_norm" in json.dumps(ask("series"))
    assert "loss-misused" in json.dumps(ask("explain", name="loss-misused"))
    assert ask("plan", rules="version: 1\nrules: {a: {metric: loss, when: {above: 3}}}")["rules"][0]["rule"] == "a"


def test_replay_judges_with_changed_rules(ask: Callable[..., dict[str, Any]]) -> None:
    rules = "version: 1\nrules: {high: {metric: loss, when: {above: 0.0001}, severity: error}}"
    [judged] = ask("replay", rules=rules)
    assert [alert["rule"] for alert in judged["alerts"]] == ["high"]
    [silent] = ask("replay", changes=["loss-misused.enabled=false"])
    assert "loss-misused" not in {alert["rule"] for alert in silent["alerts"]}
    [chosen] = ask("replay", only=["loss-misused"])
    assert [alert["rule"] for alert in chosen["alerts"]] == ["loss-misused"]


def test_what_reaches_outside_is_refused_in_words(ask: Callable[..., dict[str, Any]]) -> None:
    assert "id" in ask("why", run="../../etc")["refused"]
    assert "extends" in ask("replay", rules="version: 1\nextends: [/etc/passwd]")["refused"]


def test_the_tools_say_that_they_only_read(root: Path) -> None:
    async def tools() -> list[Any]:
        code = f"import sys; sys.path.insert(0, {str(HOME)!r}); from healthcheck_mcp.server import main; main()"
        server = StdioServerParameters(command=sys.executable, args=["-c", code, "--root", str(root)])
        async with Client(server) as client:
            return list((await client.list_tools()).tools)

    listed = asyncio.run(tools())
    assert {tool.name for tool in listed} == {
        "list_runs", "why", "report", "series", "evidence", "explain", "plan", "replay",
    }  # fmt: skip
    assert all(tool.annotations.read_only_hint and tool.description for tool in listed)
