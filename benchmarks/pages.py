"""How large the page of a long run is, how long it takes to make, and how long a browser needs to open it.

    python benchmarks/pages.py --steps 100000 --series 20

The run is made of numbers: a loss that falls, with spikes of one sample, one stretch of NaN, and noise. Processor seconds for
making the page; the browser's own clock for opening it (median of three), from disk, in headless Chromium.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from healthcheck.record.lines import SampleEncoder
from healthcheck.record.segments import Segments

KNOWN = ("loss", "grad_norm", "lr", "throughput", "time.step", "memory.allocated")


def make(folder: Path, *, steps: int, series: int, alerts: int, seed: int = 0) -> Path:
    """A record of such a run; returns its folder."""
    folder.mkdir(parents=True)
    chance = random.Random(seed)
    encoder, segments = SampleEncoder(), Segments(folder, 2**30)
    fired = [steps * (2 * n + 1) // (2 * alerts) for n in range(alerts)]
    for begin in range(1, steps + 1, 500):
        lines: list[bytes] = []
        for at in range(begin, min(begin + 500, steps + 1)):
            values = {
                "loss": 3 * math.exp(-5 * at / steps) + 0.2 * chance.random() + 0.3,
                "grad_norm": math.exp(chance.gauss(0, 0.5)),
                "lr": 1e-3 * (1 + math.cos(at / steps * math.pi)),
                "throughput": chance.gauss(500, 20),
                "time.step": 0.02 + 0.001 * chance.random(),
                "memory.allocated": 2e9 + 1e4 * at,
            }
            values |= {f"metric.{n}": chance.gauss(n, 1) for n in range(series - len(KNOWN) - 1)}
            if at in fired:
                values["loss"] = 90.0
            if 0.6 * steps < at < 0.6 * steps + 50:
                values["metric.0"] = math.nan
            if at % max(1, steps // 100) == 0:
                values["eval.loss"] = 3 * math.exp(-5 * at / steps) + 0.4
            lines += encoder.lines(at, at * 0.02, [(name, (), at, "train", value) for name, value in values.items()])
        segments.append(b"".join(lines), ())
    listed = [_alert(number, at) for number, at in enumerate(fired, start=1)]
    rules = {"spike": {"verdict": "warned", "severity": "warning", "origin": "rules.yaml:4", "threshold": "above 50"}}
    report: dict[str, Any] = {
        "format": "healthcheck-report", "version": 1, "verdict": "warned", "exit_code": 0, "exit_reason": "warned",
        "exit_words": "", "target": "long.py", "steps": steps, "unit": "step", "seconds": steps * 0.02, "world_size": 1,
        "rank": 0, "mode": "act", "fail_on": "error", "rules": rules, "off": [], "alerts": listed, "mutes": [],
    }  # fmt: skip
    (folder / "report.json").write_text(json.dumps(report))
    facts = {"format": "healthcheck-run", "version": 1, "name": folder.name, "target": "long.py", "pid": 1, "rank": 0}
    (folder / "run.json").write_text(json.dumps({**facts, "started": "2026-01-01T00:00:00+00:00", "host": "here"}))
    (folder / "rules.yaml").write_text(
        "version: 1\nexternal: [loss]\nrules:\n  spike: {metric: loss, when: {above: 50}, severity: warning}\n"
    )
    return folder


def _alert(number: int, at: int) -> dict[str, Any]:
    return {
        "rule": "spike", "number": number, "severity": "warning", "kind": "measure", "phase": "train", "count": 1, "rank": 0,
        "series": [{"name": "loss", "value": 90.0, "score": 90.0}], "episode": number, "fired_step": at, "fired_sample": at,
        "detected_step": at, "cleared_step": at + 1, "value": 90.0, "score": 90.0, "threshold": "above 50",
        "message": "the loss jumped to 90", "tags": [], "time": at * 0.02, "facts": {}, "actions": [], "fingerprint": "x",
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--series", type=int, default=20)
    parser.add_argument("--alerts", type=int, default=12)
    args = parser.parse_args()
    place = Path(__file__).parents[1] / "tests" / "browser" / "chromium.py"
    spec = importlib.util.spec_from_file_location("chromium", place)
    assert spec is not None
    assert spec.loader is not None
    chromium = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chromium)
    with tempfile.TemporaryDirectory() as folder:
        run = make(Path(folder) / "0101-0000-long", steps=args.steps, series=args.series, alerts=args.alerts)
        record = sum(path.stat().st_size for path in run.glob("samples*"))
        print(f"{args.steps:,} steps x {args.series} series: record {record / 2**20:.1f} MiB")
        code = (
            "import resource, sys; from healthcheck.cli import main; main(['report', sys.argv[1], '--open']); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)"
        )
        made = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
        print(
            f"page {(run / 'page.html').stat().st_size / 1e6:.1f} MB, made in {float(made.stdout.split()[-1]):.1f} s of a processor"
        )
        if chromium.found() is None:
            print("no Chromium here: opening is not measured")
            return 0
        opened = []
        with chromium.Browser(Path(folder) / "profile") as browser:
            for _ in range(3):
                page = browser.open(run / "page.html")
                ready = "document.documentElement.classList.contains('charts-ready') || !window.Bokeh"
                page.wait(ready)
                opened.append(page.run("performance.now()") / 1000)
                problems = page.collect()
            alerts = page.run("document.querySelectorAll('a.ev').length")
        print(f"opened in {median(opened):.2f} s, {alerts} alerts in the strip, complaints: {problems or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
