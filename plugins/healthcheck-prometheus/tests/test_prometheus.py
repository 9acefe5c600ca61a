"""The exporter, scraped by a real Prometheus server where there is one (PATH, or PROMETHEUS_BIN), else by the parser of
prometheus-client; and the text file."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed: `make outward` has it")

from healthcheck.testing import FakeTrainer, check_plugin, open_test_session, play
from prometheus_client.parser import text_string_to_metric_families

from healthcheck_prometheus import Plugin

NAME = "prometheus"
EXAMPLES = Path(__file__).resolve().parents[1] / "healthcheck_prometheus" / "examples"
RULES: dict[str, Any] = {
    "version": 1,
    "rules": {
        "nan": {"metric": "loss", "when": "nonfinite", "severity": "error"},
        "mem": {"metric": "memory.host", "when": {"above": 1e15}},
        "norms": {"metric": "grad_norm[*]", "when": {"above": 1e9}},
        "rates": {"metric": "lr[*]", "when": {"above": 1e9}},
    },
}


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The plugin as a local file: the same whether its distribution is installed or not."""
    monkeypatch.setenv("HEALTHCHECK_DISABLE_PLUGINS", NAME)
    path = tmp_path / f"{NAME}_.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})\n"
        f"from healthcheck_{NAME} import Plugin\n_plugin = Plugin()\n"
        + "".join(f"{name} = _plugin.{name}\n" for name in dir(Plugin) if name.startswith("healthcheck_"))
    )
    return str(path)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def binary(name: str) -> str:
    folder = os.environ.get("PROMETHEUS_BIN", "")
    found = shutil.which(name, path=folder or None)
    if found is None:
        pytest.skip(f"there is no {name} here: apt install prometheus, or PROMETHEUS_BIN=FOLDER")
    return found


def values(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_the_plugin_fits_the_specification() -> None:
    assert check_plugin(Plugin, NAME) == []


def test_a_text_file_has_the_last_values_with_base_units_and_bounded_labels(local: str, tmp_path: Path) -> None:
    rules = {**RULES, "settings": {"prometheus.textfile": str(tmp_path / "run.prom"), "prometheus.every": 0.1}}
    series = {
        "loss": "3, 2, nan",
        "grad_norm[head.weight]": "1 x3",
        "loss[optimizer=1]": "5 x3",
        "lr[group=1]": "0.1 x3",
    }
    play(rules, series, plugins=[local])
    text = (tmp_path / "run.prom").read_text()
    found = values(text)
    assert "head" not in text
    usual = {"run": "test", "rank": "0", "phase": "train"}
    assert found["healthcheck_memory_host_bytes"][0][1] > 1e6
    assert ({**usual, "optimizer": "1"}, 5.0) in found["healthcheck_loss"]
    assert ({**usual, "group": "1"}, 0.1) in found["healthcheck_lr"]
    assert found["healthcheck_alerts_total"] == [
        ({"run": "test", "rank": "0", "rule": "nan", "severity": "error"}, 1.0)
    ]
    assert found["healthcheck_run_exit_code"] == [({"run": "test", "rank": "0"}, 1.0)]
    assert found["healthcheck_step"][0][1] == 3.0


def test_the_exporter_answers_while_the_run_goes_on_and_an_alert_that_is_over_is_closed(local: str) -> None:
    port = free_port()
    session = open_test_session({**RULES, "settings": {"prometheus.port": port}}, plugins=[local])
    trainer = FakeTrainer(session)

    def scraped() -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return values(answer.read().decode())

    trainer.train_step(2.5)
    trainer.train_step(float("nan"))
    assert scraped()["healthcheck_alert_open"][0][1] == 1.0
    for _ in range(5):
        trainer.train_step(1.5)
    found = scraped()
    assert found["healthcheck_loss"][0][1] == 1.5
    assert found["healthcheck_alert_open"][0][1] == 0.0
    trainer.finish()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def test_a_port_that_is_taken_is_named_and_training_goes_on(local: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        rules = {**RULES, "settings": {"prometheus.port": taken.getsockname()[1]}}
        played = play(rules, {"loss": "2 x3"}, plugins=[local])
    assert any("no exporter on port" in note for note in played.session.info.notes)
    assert played.steps == 3


@pytest.mark.slow
def test_a_prometheus_server_scrapes_it(local: str, tmp_path: Path) -> None:
    server, here = binary("prometheus"), free_port()
    port = free_port()
    (tmp_path / "prometheus.yml").write_text(
        f"scrape_configs: [{{job_name: t, scrape_interval: 200ms, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
    )
    process = subprocess.Popen(
        [server, "--config.file", str(tmp_path / "prometheus.yml"), "--storage.tsdb.path", str(tmp_path / "data"),
         "--web.listen-address", f"127.0.0.1:{here}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        session = open_test_session({**RULES, "settings": {"prometheus.port": port}}, plugins=[local])
        trainer = FakeTrainer(session)
        trainer.train_step(2.5)
        trainer.train_step(float("nan"))
        query = urllib.parse.urlencode({"query": 'healthcheck_alerts_total{rule="nan"}'})
        limit, result = time.monotonic() + 60, []
        while not result and time.monotonic() < limit:
            time.sleep(0.5)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{here}/api/v1/query?{query}", timeout=5) as answer:
                    result = json.load(answer)["data"]["result"]
            except OSError:
                continue
        trainer.finish()
    finally:
        process.terminate()
        process.wait(20)
    [found] = result
    assert found["value"][1] == "1"
    assert {k: found["metric"][k] for k in ("job", "run", "rule", "severity")} == {
        "job": "t", "run": "test", "rule": "nan", "severity": "error",
    }  # fmt: skip


def test_the_example_rules_are_valid_and_the_dashboard_names_what_is_exported() -> None:
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) == 5
    assert all("healthcheck_" in expression for expression in expressions)
    checked = subprocess.run(
        [binary("promtool"), "check", "rules", str(EXAMPLES / "alerts.yml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr + checked.stdout
    assert "3 rules found" in checked.stdout
