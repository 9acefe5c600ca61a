"""Real loops of four large trainers on one card: the same losses with healthcheck as without, and a NaN that is stopped.

    python benchmarks/on_a_card.py --packages FOLDER
    python benchmarks/on_a_card.py --packages FOLDER --only torchtitan --cpu --steps 14

FOLDER holds one folder of unpacked wheels for each trainer (``megatron``, ``torchtitan``, ``dream``, ``automodel``) and, if
healthcheck's own requirements are not installed, one called ``common``. Each run is a process of its own with a time limit; trainers run
side by side. The scripts are in ``benchmarks/big_trainers``: one loop each, which knows of healthcheck only where its adapter is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "big_trainers"
ROOT = HERE.parent

REAL = {
    "megatron": "megatron-core: GPTModel (local layers), DistributedDataParallel, get_megatron_optimizer, forward_backward_no_pipelining",
    "torchtitan": "Trainer, its debug model of Llama 3, fully_shard, optimizers, schedule, metrics; tokens made here, no tokenizer",
    "dream": "BaseTrainer, its world, setup, step with its checks, validation, callbacks; a network of the script's own",
    "automodel": "TrainFinetuneRecipeForNextTokenPrediction: setup, step scheduler, forward and backward, checkpoints off",
}
ADAPTED = ("torchtitan", "dream", "automodel")
"""Trainers that have an adapter: run under it as well as under ``healthcheck run``."""


@dataclass
class Ran:
    """One process: what it printed, and what it said of itself at the end."""

    code: int
    seconds: float
    output: str
    losses: list[str] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def fault(self) -> str:
        """The last lines that say why it failed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [n for n, line in enumerate(lines) if "Error" in line.split(":")[0]]
        place = [line for line in lines if line.lstrip("[rank0]: ").startswith("File ")]
        return " <- ".join([*([lines[errors[-1]]] if errors else lines[-1:]), *place[-2:][::-1]])[:600]

    def said(self) -> list[str]:
        """Alerts at warning or above, and healthcheck's closing line."""
        begins = (
            "WARN ",
            "ERROR ",
            "healthcheck: OK",
            "healthcheck: STOPPED",
            "healthcheck: INTERNAL",
            "healthcheck: FAILED",
        )
        return [" ".join(line.split()) for line in self.output.splitlines() if line.startswith(begins)]


def environment(name: str, packages: Path | None, records: str) -> dict[str, str]:
    paths = [str(ROOT)]
    if packages is not None:
        paths += [str(packages / folder) for folder in (name, "common") if (packages / folder).is_dir()]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "HEALTHCHECK_RUNS": records,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        "TOKENIZERS_PARALLELISM": "false",
    }


def run(name: str, how: list[str], given: list[str], options: argparse.Namespace) -> Ran:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *how, str(SCRIPTS / f"train_{name}.py"), "--steps", str(options.steps), *given]
        if options.cpu:
            command.append("--cpu")
        try:
            ended = subprocess.run(
                command,
                cwd=folder,
                env=environment(name, options.packages, folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=options.limit,
            )
            code, output = ended.returncode, ended.stdout
        except subprocess.TimeoutExpired as error:
            printed = error.stdout or ""
            code = 124
            output = (
                printed.decode(errors="replace") if isinstance(printed, bytes) else printed
            ) + f"\nover {options.limit} s"
    ran = Ran(code, time.monotonic() - began, output)
    for line in output.splitlines():
        found = re.search(r"step \d+ loss (-?0x\S+|nan|-?inf)$", line)  # a progress bar may stand before it
        if found:
            ran.losses.append(found[1])
        elif "result {" in line:
            ran.result = json.loads(line[line.index("result {") + len("result ") :])
    return ran


def verdict(ran: Ran, plain: Ran, bad: int, steps: int) -> str:
    """What a watched run did, against the plain one."""
    if not ran.result:
        return f"FAILED: {ran.fault}"
    before = ran.losses[: bad - 1] if bad else ran.losses  # some print the NaN too
    alike = before == plain.losses[: len(before)]
    parts = [f"{len(ran.losses)} steps printed", "losses equal" if alike else "LOSSES DIFFER", f"exit {ran.code}"]
    alerts = [line for line in ran.said() if line.startswith(("WARN", "ERROR"))]
    if bad:
        # An update that cannot be held back without a wait is said to be such; the stop comes with the next step then.
        late = "cannot gate" in ran.output
        parts.append(
            "weights finite" if ran.result["finite"] else "weights not finite" + (", as was said" if late else "")
        )
        named = any(line.startswith("ERROR") and f"step {bad}:" in line for line in ran.said())
        stopped = next((s for s in (bad, bad + 1) if any(f"STOPPED at step {s} " in line for line in ran.said())), None)
        raised = stopped is None and "SCRIPT FAILED" in ran.output
        parts.append(f"named at step {bad}" if named else "NOT NAMED")
        own = f"its own check raised, from the gradients of step {bad}" if raised else "NOT STOPPED"
        parts.append(f"stopped at step {stopped}" if stopped else own)
        ended = stopped == bad or raised or (late and stopped == bad + 1)
        good = alike and named and ended and ran.code == 1 and (ran.result["finite"] or late)
    else:
        parts.append(f"{len(alerts)} alerts")
        good = alike and not alerts and ran.code == 0 and len(ran.losses) == steps
    return ("as it should: " if good else "NOT AS IT SHOULD: ") + ", ".join(parts)


def tried(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All runs of one trainer; each answer is a line of the table."""
    watched = ["-m", "healthcheck", "run"]
    rows: dict[str, Any] = {"trainer": name, "real": REAL[name]}
    runs: dict[str, Ran] = {"plain": run(name, [], [], options)}
    plain = runs["plain"]
    rows["version"] = plain.result.get("version", "?")
    rows["stand-ins"] = plain.result.get("stand_ins", [])
    rows["machine"] = {key: plain.result.get(key) for key in ("device", "torch", "python", "parameters")}
    if not plain.result or len(plain.losses) != options.steps:
        rows["plain"] = f"FAILED with code {plain.code}: {plain.fault}"
    else:
        rows["plain"] = f"{len(plain.losses)} steps, {plain.losses[0]} to {plain.losses[-1]}, exit {plain.code}"
        bad = ["--nan-at", str(options.nan_at)]
        runs["healthy, healthcheck run"] = run(name, watched, [], options)
        runs["NaN, healthcheck run"] = run(name, watched, bad, options)
        if name in ADAPTED:
            runs["healthy, adapter"] = run(name, [], ["--watched"], options)
            runs["NaN, adapter"] = run(name, [], ["--watched", *bad], options)
        runs["NaN, plain"] = run(name, [], bad, options)
        if "cannot gate" in runs["NaN, healthcheck run"].output:  # what that line advises
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as rules:
                rules.write("version: 1\nextends: [healthcheck:recommended]\nsettings: {gate: sync}\n")
                rules.flush()
                runs["NaN, healthcheck run, gate: sync"] = run(name, [*watched, "--rules", rules.name], bad, options)
        for what, ran in runs.items():
            if what not in ("plain", "NaN, plain"):
                rows[what] = verdict(ran, plain, options.nan_at if "NaN" in what else 0, options.steps)
        lost = runs["NaN, plain"]
        state = "finite" if lost.result.get("finite") else "NOT finite"
        rows["NaN, plain"] = f"{len(lost.losses)} steps printed, exit {lost.code}, weights {state}"
        if any("DIFFER" in str(text) for text in rows.values()):  # is it the trainer that does not repeat?
            again = run(name, [], [], options)
            rows["plain, again"] = (
                "losses equal" if again.losses == plain.losses else "LOSSES DIFFER: this trainer does not repeat itself"
            )
    rows["seconds"] = {what: round(ran.seconds, 1) for what, ran in runs.items()}
    for what, ran in runs.items():
        if options.out:
            (options.out / f"{name}-{what.replace(', ', '-').replace(' ', '-')}.txt").write_text(ran.output)
        if "FAILED" in str(rows.get(what)) or "NOT AS" in str(rows.get(what)) or options.verbose:
            print(
                f"\n--- {name}, {what}: the end of what it printed\n" + "\n".join(ran.output.splitlines()[-30:]),
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="folder of unpacked wheels, one folder for each trainer")
    parser.add_argument("--only", action="append", choices=list(REAL), help="repeatable")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--nan-at", type=int, default=12)
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for one process")
    parser.add_argument("--side-by-side", type=int, default=4, help="trainers at a time")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal on the processor")
    parser.add_argument("--out", type=Path, help="folder for what every process printed")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.packages is not None:
        options.packages = options.packages.resolve()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    names = options.only or list(REAL)
    with ThreadPoolExecutor(options.side_by_side) as pool:
        rows = list(pool.map(lambda name: tried(name, options), names))
    for row in rows:
        print(f"\n== {row['trainer']} {row['version']}")
        for key, value in row.items():
            if key not in ("trainer", "version"):
                print(f"  {key}: {value}")
    whole = ("FAILED", "NOT AS IT SHOULD")
    return int(any(word in str(value) for row in rows for value in row.values() for word in whole))


if __name__ == "__main__":
    sys.exit(main())
