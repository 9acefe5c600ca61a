"""Telemetry arrives at an OTLP/HTTP receiver in this test, which decodes it with the official protobufs."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed: `make outward` has it")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")

from healthcheck.testing import FakeTrainer, check_plugin, open_test_session, play
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from healthcheck_otel import Plugin

RULES: dict[str, Any] = {
    "version": 1,
    "external": ["memory.seen", "norms"],
    "rules": {
        "nan": {"metric": "loss", "when": "nonfinite", "severity": "error", "hint": "lower the learning rate"},
        "mem": {"metric": "memory.host", "when": {"above": 1e15}},
        "norms": {"metric": "grad_norm[*]", "when": {"above": 1e9}},
    },
}


class Collector:
    """Takes what is posted to /v1/metrics, /v1/logs and /v1/traces; with ``hangs`` it does not answer."""

    def __init__(self) -> None:
        self.got: dict[str, list[Any]] = {"metrics": [], "logs": [], "traces": []}
        self.hangs = threading.Event()
        self.released = threading.Event()
        kinds = {
            "metrics": ExportMetricsServiceRequest, "logs": ExportLogsServiceRequest, "traces": ExportTraceServiceRequest,
        }  # fmt: skip
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if collector.hangs.is_set():
                    collector.released.wait(60)
                    return
                signal = self.path.rpartition("/")[2]
                collector.got[signal].append(kinds[signal].FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def gauges(self) -> dict[str, tuple[str, list[tuple[float, dict[str, str]]]]]:
        """Name -> unit and points of the last export that had it."""
        found = {}
        for request in self.got["metrics"]:
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        data = metric.gauge if metric.HasField("gauge") else metric.sum
                        found[metric.name] = (metric.unit, [
                            (p.as_double or p.as_int, {a.key: a.value.string_value for a in p.attributes})
                            for p in data.data_points
                        ])  # fmt: skip
        return found

    def events(self) -> list[tuple[str, str, dict[str, Any]]]:
        return [
            (record.event_name, record.body.string_value,
             {a.key: a.value.string_value or a.value.int_value for a in record.attributes})
            for request in self.got["logs"] for resource in request.resource_logs
            for scope in resource.scope_logs for record in scope.log_records
        ]  # fmt: skip

    def spans(self) -> list[Any]:
        return [
            span for request in self.got["traces"] for resource in request.resource_spans
            for scope in resource.scope_spans for span in scope.spans
        ]  # fmt: skip


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    started = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", started.url)
    yield started
    started.released.set()
    started.http.shutdown()
    started.http.server_close()


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The plugin as a local file: the same whether its distribution is installed or not."""
    monkeypatch.setenv("HEALTHCHECK_DISABLE_PLUGINS", "otel")
    path = tmp_path / "otel.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})\n"
        "from healthcheck_otel import Plugin\n_plugin = Plugin()\n"
        + "".join(f"{name} = _plugin.{name}\n" for name in dir(Plugin) if name.startswith("healthcheck_"))
    )
    return str(path)


def test_the_plugin_fits_the_specification() -> None:
    assert check_plugin(Plugin, "otel") == []


def test_samples_are_gauges_with_ucum_units_and_without_names_of_parameters(collector: Collector, local: str) -> None:
    report = play(RULES, {"loss": "2, 1.5", "grad_norm[head.weight]": "1 x2"}, plugins=[local]).report
    gauges = collector.gauges()
    assert gauges["healthcheck.loss"] == ("", [(1.5, {"phase": "train", "rank": "0"})])
    unit, [(value, _)] = gauges["healthcheck.memory.host"]
    assert unit == "By"
    assert value > 1e6
    assert "head.weight" not in str(collector.got["metrics"])
    assert report["otel"] == {"undelivered": [], "problem": ""}


def test_an_alert_is_an_event_and_the_run_a_span_that_holds_it(collector: Collector, local: str) -> None:
    report = play(RULES, {"loss": "2, nan, nan"}, plugins=[local]).report
    assert report["otel"] == {"undelivered": [], "problem": ""}  # the collector has confirmed it
    [(name, body, attributes)] = collector.events()
    assert (name, attributes["healthcheck.rule"], attributes["healthcheck.step"]) == ("healthcheck.alert", "nan", 2)
    assert attributes["healthcheck.hint"] == "lower the learning rate"
    assert "loss" in body
    [span] = collector.spans()
    assert (span.name, [event.name for event in span.events], span.status.code) == (
        "healthcheck.run", ["healthcheck.alert"], 2,
    )  # fmt: skip
    assert collector.gauges()["healthcheck.alerts"] == (
        "{alert}",
        [(1, {"rule": "nan", "severity": "error", "rank": "0"})],
    )


def test_without_an_endpoint_and_a_provider_nothing_happens(local: str) -> None:
    assert "otel" not in play(RULES, {"loss": "2, nan"}, plugins=[local]).report


def test_it_can_be_switched_off(collector: Collector, local: str) -> None:
    rules = {**RULES, "settings": {"otel.export": "off"}}
    assert "otel" not in play(rules, {"loss": "2, nan"}, plugins=[local]).report
    assert collector.got == {"metrics": [], "logs": [], "traces": []}


def test_a_collector_that_hangs_costs_no_step_and_four_seconds_at_the_end(collector: Collector, local: str) -> None:
    collector.hangs.set()
    session = open_test_session({**RULES, "settings": {"otel.every": 0.2}}, plugins=[local])
    trainer = FakeTrainer(session)
    for loss in (*[2.0] * 50, float("nan")):
        trainer.train_step(loss)
    began = time.monotonic()
    [lost] = trainer.finish()["otel"]["undelivered"]
    assert time.monotonic() - began < 5
    assert (lost["rule"], lost["step"]) == ("nan", 51)


SCRIPT = """
import torch
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
mine = MeterProvider([reader])
metrics.set_meter_provider(mine)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(80):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).mean().backward()
    optimizer.step()
names = {m.name for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics}
assert metrics.get_meter_provider() is mine
print("NAMES", sorted(names))
"""


@pytest.mark.slow
def test_a_provider_that_the_script_has_set_is_used_and_stays_as_it_is(
    collector: Collector, local: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {**os.environ, "HEALTHCHECK_RUNS": str(tmp_path / "runs"), "WANDB_API_KEY": "f00dface" * 5}
    command = [sys.executable, "-m", "healthcheck", "run", "-p", local, "train.py", "--token", "sk-argvargv12345"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180)
    assert "healthcheck.loss" in result.stdout, result.stdout + result.stderr
    assert collector.gauges() == {}  # metrics went to the script's provider; it has none for traces
    assert [span.name for span in collector.spans()] == ["healthcheck.run"]
    sent = str(collector.got) + result.stderr
    assert "f00dface" not in sent
    assert "sk-argvargv12345" not in sent
    assert json.loads(next((tmp_path / "runs").glob("*/report.json")).read_text())["otel"]["undelivered"] == []
