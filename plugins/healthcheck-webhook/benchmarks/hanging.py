"""What a service that hangs costs a step: training with an alert under way to it, and to one that answers, in interleaved pairs.

    python plugins/healthcheck-webhook/benchmarks/hanging.py [--pairs 30] [--steps 400] [--with-otel]

A server on this machine takes the request and does not answer for a minute. An alert fires at the third step; in one block its message
hangs for the rest of the block, in the other it goes to a server that answers at once. The geometric mean of the ratios of mean step
times, with its 95 % interval (Student, over pairs), must contain 1. The end of each run is cut to 0.2 s: only steps are timed here; that
a run ends in time is what the tests show. With ``--with-otel`` the same server stands for a collector as well. Seed 0.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PLUGINS / "healthcheck-webhook"), str(PLUGINS / "healthcheck-otel")]

import healthcheck
import torch

RELEASED = threading.Event()
RULES = {"version": 1, "rules": {"high": {"metric": "loss", "when": {"at_least": 0}, "for": 3}}}
AS_A_FILE = """
import healthcheck_{name}
_plugin = healthcheck_{name}.Plugin()
for _name in dir(_plugin):
    if _name.startswith("healthcheck_"):
        globals()[_name] = getattr(_plugin, _name)
"""


class Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Hangs(Answers):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        RELEASED.wait(60)


def served(handler: type[BaseHTTPRequestHandler]) -> str:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def block(steps: int, plugins: list[str], url: str) -> float:
    """Mean seconds of a step, the first ones left out."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(64, 256)
    os.environ |= {"BENCHMARK_URL": url, "OTEL_EXPORTER_OTLP_ENDPOINT": url}
    rules = {**RULES, "settings": {"webhook.url_env": "BENCHMARK_URL", "webhook.timeout": 60}}
    with healthcheck.watch(model, optimizer, rules=rules, plugins=plugins, console=False, record=False) as health:
        for step in range(steps):
            if step == 50:
                began = time.perf_counter()
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            health.step(loss=loss)
        took = time.perf_counter() - began
    return took / (steps - 50)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--with-otel", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    names = ["webhook", *(["otel"] if given.with_otel else [])]
    hangs, answers = served(Hangs), served(Answers)
    os.environ["HEALTHCHECK_DISABLE_PLUGINS"] = ",".join(names)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name in names:
            path = Path(folder) / f"{name}_file.py"
            path.write_text(AS_A_FILE.format(name=name))
            files.append(str(path))
            __import__(f"healthcheck_{name}").LAST_SECONDS = 0.2
        block(given.steps, files, answers)
        for pair in range(given.pairs):
            order = (True, False) if pair % 2 else (False, True)
            found = {state: block(given.steps, files, hangs if state else answers) for state in order}
            ratios.append(math.log(found[True] / found[False]))
    RELEASED.set()
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))
    student = 2.045 if len(ratios) >= 30 else 2.78  # 29 and 4 degrees of freedom
    low, high = math.exp(mean - student * error), math.exp(mean + student * error)
    print(
        f"{' and '.join(names)}, {given.pairs} pairs of {given.steps} steps: hanging / answering = {math.exp(mean):.4f}, "
        f"95 % {low:.4f} to {high:.4f}"
    )
    return 0 if low <= 1 <= high else 1


if __name__ == "__main__":
    raise SystemExit(main())
