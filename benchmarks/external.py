"""Scoreboards of other people: their faulty and healthy programs under ``healthcheck run``, with nothing else said.

    python benchmarks/external.py --repo TrainCheck-Evaluation-Workloads --repo Bug_Reproducibility_DL_Bugs
    python benchmarks/external.py --repo ... --forms ../shared/cases/external     # small forms of what cannot run here
    python benchmarks/external.py --repo ... --only 60335387 --show

Repositories (a clone, bare or not; none of it is part of this one): OrderLab/TrainCheck-Evaluation-Workloads (OSDI 2025: 18 silent
errors, 18 healthy programs), mehilshah/Bug_Reproducibility_DL_Bugs (EMSE 2024: its PyTorch bugs), mehilshah/AIFaultBench (770 issues;
those whose reproduction updates weights and ends without an error). No program is changed. They end after so many updates, their data
and the packages that they need are stand-ins (``stand_ins/``), and what asks for CUDA trains on the CPU. torch is imported once; each program
runs in a fork. ``right`` was written down before a program was run: the causes that name its fault; without a reading of the program it is empty.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from public_scripts import STAND_INS, citations, git_folder, wikitext
from scoring import named_causes

SECONDS = 150
SILENT = "silent-issue-detection/bug-reprod-scripts"
HEALTHY = "fp_rate/workloads"
TRAINCHECK, BUGS, AIFAULTS = "TrainCheck", "Bug_Reproducibility", "AIFaultBench"


@dataclass(frozen=True)
class Program:
    """One program of a scoreboard."""

    board: str
    name: str
    path: str = ""
    """In its repository, or (``form``) below ``--forms``; nothing where it cannot be run here."""
    fault: str = ""
    """What is wrong with it; nothing for a healthy one."""
    right: tuple[str, ...] = ()
    """Rules or causes that name the fault."""
    arguments: str = ""
    steps: int = 300
    onset: int = 1
    """The first update at which the fault is there."""
    ranks: int = 1
    form: bool = False
    prepare: Callable[[Path], None] | None = None
    why_not: str = ""


@dataclass
class Outcome:
    """What became of one program."""

    program: Program
    verdict: str
    said: list[tuple[str, int, str]] = field(default_factory=list)
    steps: int = 0
    delay: int | None = None
    seconds: float = 0.0
    ended: str = ""


def _waves(work: Path) -> None:
    """Sine waves as ``generate_sine_wave.py`` makes them, a tenth as long."""
    import numpy as np
    import torch

    shift = np.random.default_rng(2).integers(-80, 80, (20, 1))
    torch.save(np.sin((np.arange(100) + shift) / 20.0).astype("float64"), work / "traindata.pt")


def _download(work: Path) -> None:
    """The graph as gcn's program downloads it: what it asks ``requests`` for lies here."""
    citations(work, "cora", 2708)
    with tarfile.open(work / "cora.tgz", "w:gz") as packed:
        packed.add(work / "cora", "cora")
    (work / "requests.py").write_text(
        "import contextlib, types\n\n\n@contextlib.contextmanager\ndef get(*args, **more):\n"
        "    with open('cora.tgz', 'rb') as raw:\n        yield types.SimpleNamespace(raw=raw)\n"
    )


def _silent(name: str, path: str, fault: str, right: Sequence[str], **more: Any) -> Program:
    return Program(TRAINCHECK, name, f"{SILENT}/{path}", fault, tuple(right), **more)


def _form(name: str, path: str, fault: str, right: Sequence[str], **more: Any) -> Program:
    return Program(TRAINCHECK, name, path, fault, tuple(right), form=True, **more)


def _healthy(name: str, path: str, arguments: str = "", **more: Any) -> Program:
    return Program(TRAINCHECK, name, f"{HEALTHY}/{path}", arguments=arguments, **more)


def _bug(name: str, fault: str, right: Sequence[str], **more: Any) -> Program:
    return Program(BUGS, name, f"Bugs/{name}/main.py", fault, tuple(right), **more)


def _without(board: str, name: str, fault: str, why_not: str) -> Program:
    return Program(board, name, fault=fault, why_not=why_not)


TEXT = "--emsize 32 --nhid 32 --epochs 3"
PROGRAMS = (
    _silent(
        "pytorch-51800",
        "pytorch-51800/mnist_51800_buggy.py",
        "evaluated before the first update: spectral norm is not set up yet",
        [],
    ),
    _silent(
        "pytorch-forum-84911",
        "pytorch-forum-84911/bug.py",
        "everything but batch norm is frozen, the optimizer's own layer too",
        ["part-does-not-train"],
        steps=120,
    ),
    _silent(
        "stackoverflow-60335387",
        "stackoverflow-60335387/bug.py",
        "zero_grad forgotten",
        ["gradients-not-cleared"],
        steps=200,
    ),
    _form(
        "stackoverflow-67180955",
        "workers67180955.py",
        "loader workers draw the same numbers",
        ["repeated-data.worker-seeds", "repeated-data"],
    ),
    _form("mmpretrain-702", "freeze702.py", "frozen stage's batch norm trains", ["train-eval-mode.frozen-norm-moves"]),
    _form("transformers-33844", "dropeval33844.py", "dropout in evaluation", ["train-eval-mode.dropout-in-evaluation"]),
    _form("AC-2665", "ac2665.py", "the optimizer holds a copy's parameters", ["part-does-not-train"]),
    _form(
        "pytorch-104336", "ddp104336.py", "DDP's parameters are replaced", ["ddp-bypassed", "replicas-differ"], ranks=2
    ),
    _form(
        "x-jxmnop-ddp-out-of-sync",
        "ddpjxmnop.py",
        "every other step goes round DDP",
        ["ddp-bypassed", "replicas-differ"],
        ranks=2,
    ),
    _form(
        "baichuan2-86, pytorch-84803, pytorch-96600, deepspeed-1801",
        "ddpsdc.py",
        "replicas drift apart (one form for four)",
        ["replicas-differ"],
        ranks=2,
        onset=51,
    ),
    _without(
        TRAINCHECK,
        "pytorch-115607",
        "dynamo's steps without gradients",
        "its call of dynamo (save_config) is gone from torch 2.13",
    ),
    _without(TRAINCHECK, "deepspeed-5794", "all_to_all out of step, hangs", "needs DeepSpeed and four GPUs"),
    _without(TRAINCHECK, "lightning-thunder-725", "autocast left out", "needs lightning-thunder of that commit"),
    _without(TRAINCHECK, "transformers-17877", "tokenizer's ids", "no training: tokenizer and generation"),
    _without(TRAINCHECK, "transformers-23723", "max_new_tokens", "no training: generation of Whisper"),
    _without(TRAINCHECK, "transformers-34204", "a batch of 50 becomes one", "no training: a processor alone"),
    _healthy("autocast", "autocast/main.py", steps=6),
    _healthy(
        "dcgan",
        "dcgan/main.py",
        "--dataset fake --imageSize 64 --batchSize 16 --ngf 8 --ndf 8 --niter 20 --workers 0",
        steps=240,
    ),
    _without(TRAINCHECK, "ddp-multigpu", "", "needs NCCL and two GPUs"),
    _healthy(
        "gat",
        "gat/main.py",
        "--epochs 60 --lr 0.005 --l2 5e-4 --dropout-p 0.6 --num-heads 2 --hidden-dim 16 --val-every 20",
        prepare=lambda work: citations(work, "cora", 2708),
    ),
    _healthy(
        "gcn",
        "gcn/main.py",
        "--epochs 200 --lr 0.01 --l2 5e-4 --dropout-p 0.5 --hidden-dim 16 --val-every 20",
        prepare=_download,
    ),
    _healthy(
        "mnist-forward-forward",
        "mnist-forward-forward/main.py",
        "--epochs 20 --no_cuda --train_size 200 --test_size 100",
    ),
    _healthy("mnist-hogwild", "mnist-hogwild/main.py", "--epochs 30 --num-processes 0"),
    _healthy("mnist-rnn", "mnist-rnn/main.py", "--epochs 30 --test-batch-size 40"),
    _healthy("mnist", "mnist/main.py", "--epochs 6"),
    _healthy("regression", "regression/main.py"),
    _healthy("reinforce-actor-critic", "reinforce-actor-critic/actor_critic.py"),
    _healthy("reinforce-reinforce", "reinforce-reinforce/reinforce.py"),
    _healthy("resnet18", "resnet18/main.py", "--dummy --epochs 2 --batch-size 16 --workers 0", steps=40),
    _healthy("siamese-network", "siamese-network/main.py", "--epochs 20", steps=100),
    _healthy("time-sequence-prediction", "time-sequence-prediction/train.py", "--steps 3", prepare=_waves),
    _healthy("vae", "vae/main.py", "--epochs 20"),
    _healthy(
        "word-language-model-lstm",
        "word-language-model-lstm/main.py",
        f"{TEXT} --tied",
        prepare=lambda work: wikitext(work, "data/wikitext-2"),
    ),
    _healthy(
        "word-language-model-transformer",
        "word-language-model-transformer/main.py",
        f"{TEXT} --model Transformer --lr 5",
        prepare=lambda work: wikitext(work, "data/wikitext-2"),
    ),
    _bug("039", "the running loss is never set back (only printed)", []),
    _bug(
        "042",
        "log_softmax over one output into BCELoss: constant",
        ["loss-misused", "vanishing-gradient", "not-learning"],
        steps=2000,
    ),
    _bug("052", "accuracy of a regression is printed (only printed)", []),
    _bug("060", "softmax before the cross entropy, two of three classes", ["loss-misused", "not-learning"]),
    _bug("066", "predictions of one logit by argmax (only printed)", [], steps=400),
    _bug(
        "067",
        "sigmoids all through an autoencoder: stays at the mean picture",
        ["not-learning", "vanishing-gradient"],
        steps=320,
    ),
    _bug("075", "the learned number is detached from the loss", ["part-does-not-train"]),
    _bug(
        "077",
        "flowers unscaled at lr 0.1 into 3 ReLU: chance",
        ["not-learning", "inputs-unscaled", "collapse"],
        steps=900,
    ),
)
"""As a person read them: board, name, path, fault, right causes. What is not listed of Bug_Reproducibility is run as well; it raises."""


# --------------------------------------------------------------------------- what is there


@dataclass
class Repository:
    """A clone, bare or not: what is in its newest commit."""

    place: Path
    git: bool

    @staticmethod
    def at(path: Path) -> Repository:
        for folder in (path / ".git", path / "repo" / ".git", path / "repo", path):
            if (folder / "HEAD").exists():
                return Repository(folder, True)
        found = git_folder(path.parent, path.name)
        return Repository(found, True) if found else Repository(path, False)

    def names(self) -> list[str]:
        if not self.git:
            return [str(p.relative_to(self.place)) for p in sorted(self.place.rglob("*")) if p.is_file()]
        command = ["git", f"--git-dir={self.place}", "ls-tree", "-r", "-z", "--name-only", "HEAD"]
        return (
            subprocess.run(command, capture_output=True, check=True)
            .stdout.decode(errors="replace")
            .strip("\0")
            .split("\0")
        )

    def content(self, name: str) -> bytes:
        """Nothing where a clone was made without its large files."""
        if not self.git:
            return (self.place / name).read_bytes()
        return subprocess.run(
            ["git", f"--git-dir={self.place}", "show", f"HEAD:{name}"], capture_output=True, check=False
        ).stdout

    def lay_out(self, folder: str, work: Path) -> None:
        """The text files of a folder, below ``work``."""
        for name in self.names():
            if name.startswith(f"{folder}/") and name.endswith((".py", ".txt", ".data", ".json", ".csv", ".cites")):
                target = work / name.removeprefix(f"{folder}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self.content(name))


def board_of(repository: Repository) -> str:
    names = repository.names()
    for board, mark in ((TRAINCHECK, f"{HEALTHY}/"), (BUGS, "Bugs/"), (AIFAULTS, "index.csv")):
        if any(name.startswith(mark) for name in names):
            return board
    raise SystemExit(f"external: {repository.place}: none of the three repositories; names begin with {names[:3]}")


def programs(boards: dict[str, Repository]) -> list[Program]:
    """Those of the list, and the rest of the PyTorch bugs as they are found."""
    listed = [p for p in PROGRAMS if p.board in boards]
    if BUGS in boards:
        known = {p.path for p in listed}
        for name in boards[BUGS].names():
            if name.startswith("Bugs/") and name.endswith("/main.py") and name not in known:
                text = boards[BUGS].content(name).decode(errors="replace")
                if "import torch" in text or "from torch" in text:
                    listed.append(_bug(name.split("/")[1], "as its report says", []))
    if AIFAULTS in boards:
        for name in boards[AIFAULTS].names():
            if name.endswith("/repro.py"):
                text = boards[AIFAULTS].content(name).decode(errors="replace")
                if "torch" in text and ".backward(" in text and ".step(" in text:
                    listed.append(Program(AIFAULTS, name.split("/")[-2], name, "as its report says"))
    return listed


# --------------------------------------------------------------------------- one program


def run(program: Program, boards: dict[str, Repository], forms: Path | None, *, show: bool) -> Outcome:
    """Run one program watched, and say what was said of it."""
    if program.why_not or (program.form and forms is None):
        return Outcome(program, "not run", ended=program.why_not or "needs --forms")
    with tempfile.TemporaryDirectory() as temporary:
        work, report = Path(temporary) / "work", Path(temporary) / "report.json"
        work.mkdir()
        script = work / Path(program.path).name
        if program.form:
            assert forms is not None
            shutil.copy(forms / program.path, script)
        else:
            boards[program.board].lay_out(str(Path(program.path).parent), work)
        if program.prepare is not None:
            program.prepare(work)
        started = time.monotonic()
        code = _watched(program, script, report)
        seconds = time.monotonic() - started
        printed = (work / "printed.txt").read_text(errors="replace") if (work / "printed.txt").exists() else ""
        if show:
            print(printed[-6000:])
        found = json.loads(report.read_text()) if report.exists() else {"alerts": [], "steps": 0}
    said = [one for alert in found["alerts"] for one in named_causes(alert) if one[2] != "info"]
    outcome = Outcome(program, "", said, found.get("steps", 0), seconds=seconds)
    raised = [line for line in printed.splitlines() if line and not line[0].isspace() and "Error" in line.split(":")[0]]
    if code not in (0, 1) or (raised and "Traceback" in printed):
        outcome.ended = f"stopped after {SECONDS} s" if code < 0 else raised[-1][:80] if raised else f"exit {code}"
    outcome.verdict = _verdict(outcome)
    return outcome


def _verdict(outcome: Outcome) -> str:
    program, said = outcome.program, outcome.said
    if outcome.ended == "exit 5":
        return "no training"
    if outcome.ended and not outcome.ended.startswith("stopped"):
        return "raises"
    if not program.fault:
        return "false alarm" if said else "silent"
    fitting = [one for one in said if one[0] in program.right or one[0].partition(".")[0] in program.right]
    if fitting:
        outcome.delay = max(0, min(step or 0 for _, step, _ in fitting) - program.onset)
        return "named"
    return "another word" if said else "silent"


def _environment(program: Program, script: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")}
    return env | {
        "PYTHONPATH": f"{STAND_INS}{os.pathsep}{script.parent}",
        "PUBLIC_STEPS": str(program.steps),
        "PUBLIC_CPU": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "HEALTHCHECK_RUNS": str(script.parent / "runs"),
        "CUDA_VISIBLE_DEVICES": "",
    }


def _watched(program: Program, script: Path, report: Path) -> int:
    words = ["run", "--report", f"json={report}", str(script), *program.arguments.split()]
    env = _environment(program, script)
    if program.ranks > 1:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={program.ranks}",
            "--no-python",
        ]
        del env["PUBLIC_STEPS"], env["PUBLIC_CPU"]
        with (script.parent / "printed.txt").open("w") as printed:
            done = subprocess.run(
                [*command, sys.executable, "-m", "healthcheck", *words],
                env=env, cwd=script.parent, stdout=printed, stderr=printed, timeout=SECONDS, check=False,
            )  # fmt: skip
        return 0 if report.exists() else done.returncode
    child = os.fork()
    if child == 0:
        _child(words, env, script.parent)
    return _end_of(child)


def _child(words: list[str], env: dict[str, str], work: Path) -> None:
    """In the fork: the command ``healthcheck run``, with torch imported before."""
    code = 70
    try:
        os.setsid()
        output = os.open(work / "printed.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(work)
        sys.path[1:1] = [str(STAND_INS)]  # the first place is the script's
        sys.argv[:] = ["healthcheck", *words]
        exec(
            compile((STAND_INS / "sitecustomize.py").read_text(), "sitecustomize.py", "exec"),
            {"__name__": "sitecustomize"},
        )
        from healthcheck.cli import main as healthcheck

        code = healthcheck(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_of(child: int) -> int:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(child, signal.SIGINT)  # the run ends as by Ctrl-C, with its report
    time.sleep(10)
    if os.waitpid(child, os.WNOHANG) == (0, 0):
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return -1


# --------------------------------------------------------------------------- tables


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for board in dict.fromkeys(o.program.board for o in outcomes):
        ours = [o for o in outcomes if o.program.board == board]
        faults = [o for o in ours if o.program.fault]
        ran = [o for o in faults if o.verdict not in ("not run", "raises", "no training")]
        named = [o for o in ran if o.verdict == "named"]
        delays = sorted(o.delay for o in named if o.delay is not None)
        yield (
            f"{board}: {len(named)} of {len(ran)} faults that ran and did not raise named with their cause"
            f" ({sum(o.program.form for o in named)} of them in a small form), another word for {sum(o.verdict == 'another word' for o in ran)},"
            f" silent {sum(o.verdict == 'silent' for o in ran)}; median delay {delays[len(delays) // 2] if delays else '-'} updates;"
            f" {sum(o.verdict == 'raises' for o in faults)} raise, {sum(o.verdict == 'no training' for o in faults)} do not train,"
            f" {sum(o.verdict == 'not run' for o in faults)} not run"
        )
        healthy = [o for o in ours if not o.program.fault and o.verdict not in ("not run", "raises")]
        if healthy:
            alarms = sum(o.verdict == "false alarm" for o in healthy)
            yield f"{board}: {alarms} of {len(healthy)} healthy programs with a warning"


def row(outcome: Outcome) -> str:
    program = outcome.program
    said = ", ".join(dict.fromkeys(f"{name} at {step}" for name, step, _ in outcome.said[:4])) or outcome.ended
    how = "" if outcome.verdict == "not run" else "small form" if program.form else "own program"
    delay = "" if outcome.delay is None else str(outcome.delay)
    cells = [
        program.board,
        program.name,
        program.fault or "healthy",
        how,
        str(outcome.steps or ""),
        outcome.verdict,
        said,
        delay,
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = "| board | program | fault | run as | updates | verdict | said | delay |\n|---|---|---|---|---|---|---|---|"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repo", type=Path, action="append", default=[], metavar="PATH", help="a clone of one of the repositories"
    )
    parser.add_argument(
        "--forms", type=Path, metavar="FOLDER", help="small forms of silent errors that need other machines"
    )
    parser.add_argument("--only", default="", help="programs whose name or board has this in it")
    parser.add_argument("--show", action="store_true", help="what each printed, too")
    args = parser.parse_args()
    boards = {board_of(repository): repository for repository in map(Repository.at, args.repo)}
    import torch

    import healthcheck.cli  # noqa: F401 - imported once, for all forks

    torch.set_num_threads(1)
    outcomes = []
    print(HEAD, flush=True)
    for program in programs(boards):
        if args.only in f"{program.board}/{program.name}":
            outcomes.append(run(program, boards, args.forms, show=args.show))
            print(row(outcomes[-1]), flush=True)
    print("\n" + "\n".join(summary(outcomes)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
