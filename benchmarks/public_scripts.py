"""Public training scripts, run short with and without `healthcheck run`: what is said of them, and whether they print the same.

    python benchmarks/public_scripts.py --repositories FOLDER [--only WORD] [--steps 120]

FOLDER holds a clone of each repository, as `owner+name` (bare or not) or `owner/name`; the script reads the commit that is
listed here out of it. Data sets and packages that only draw or log are replaced (`benchmarks/stand_ins`): pictures, texts and
graphs are made here, small, and the same in both runs. Each script ends after so many updates. None is changed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STAND_INS = HERE / "stand_ins"
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
    "but",
    "at",
    "are",
    "this",
    "have",
    "from",
    "or",
    "had",
    "an",
    "they",
]


@dataclass(frozen=True)
class Script:
    """One script of a repository, with its arguments and what it needs."""

    repository: str
    path: str
    arguments: str = ""
    prepare: Callable[[Path], None] | None = None
    folder: str = ""
    """Where it is started, below the repository; else where it is."""
    paths: tuple[str, ...] = field(default=())
    """Folders of the repository to import from."""


COMMITS = {
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "karpathy/makemore": "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "yunjey/pytorch-tutorial": "0500d3df5a2a8080ccfccbc00aca0eacc21818db",
    "eriklindernoren/PyTorch-GAN": "36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    "vwxyzjn/cleanrl": "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    "tanelp/tiny-diffusion": "726b6bbbf2c9e3d23dff9eaea2fda10d0af6a78c",
    "tkipf/pygcn": "1600b5b748b3976413d1e307540ccc62605b4d6d",
    "jcjohnson/pytorch-examples": "0003fcdc606a79951e53bf8f46f8574fa4739f23",
    "MorvanZhou/PyTorch-Tutorial": "dbe154a9e56635e51c6b0c2ccea8ae36cfb585a7",
}


def text(words: int, seed: int) -> str:
    drawn, at, said = random.Random(seed), seed % len(WORDS), []
    for _ in range(words):
        at = (at * 5 + drawn.randrange(3)) % len(WORDS)
        said.append(WORDS[at])
    return " ".join(said)


def wikitext(work: Path, below: str = "word_language_model/data/wikitext-2") -> None:
    data = work / below
    data.mkdir(parents=True, exist_ok=True)
    for seed, (name, words) in enumerate({"train": 20000, "valid": 2000, "test": 2000}.items()):
        lines = [text(20, seed * 1000 + line) for line in range(words // 20)]
        (data / f"{name}.txt").write_text("\n".join(lines) + "\n")


def names(work: Path) -> None:
    drawn = random.Random(1)
    parts = ["an", "be", "ka", "lo", "mi", "no", "ri", "sa", "to", "vi"]
    (work / "names.txt").write_text(
        "\n".join("".join(drawn.choices(parts, k=drawn.randint(2, 4))) for _ in range(3000))
    )


def characters(work: Path) -> None:
    import pickle

    import numpy as np

    folder = work / "data/shakespeare_char"
    folder.mkdir(parents=True, exist_ok=True)
    symbols = sorted(set(text(5000, 0)))
    number = {symbol: n for n, symbol in enumerate(symbols)}
    for name, seed in (("train", 0), ("val", 1)):
        np.array([number[symbol] for symbol in text(5000, seed)], dtype=np.uint16).tofile(folder / f"{name}.bin")
    known = {"vocab_size": len(symbols), "itos": dict(enumerate(symbols)), "stoi": number}
    (folder / "meta.pkl").write_bytes(pickle.dumps(known))


def citations(work: Path, below: str = "data/cora", papers: int = 1600) -> None:
    drawn = random.Random(1)
    folder = work / below
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [drawn.randrange(7) for _ in range(papers)]
    rows = []
    for paper, kind in enumerate(kinds):
        used = {
            drawn.randrange(kind * 20, kind * 20 + 20) if drawn.random() < 0.4 else drawn.randrange(140)
            for _ in range(8)
        }
        rows.append("\t".join([str(paper), *("1" if n in used else "0" for n in range(140)), f"kind{kind}"]))
    (folder / "cora.content").write_text("\n".join(rows) + "\n")
    links = []
    while len(links) < 4000:
        one, other = drawn.randrange(papers), drawn.randrange(papers)
        if one != other and (kinds[one] == kinds[other] or drawn.random() < 0.1):
            links.append(f"{one}\t{other}")
    (folder / "cora.cites").write_text("\n".join(links) + "\n")


GAN = "--n_epochs 1 --batch_size 32 --n_cpu 1 --img_size 16"
SMALL_GPT = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --dtype=float32 --eval_interval=40 --eval_iters=4"
    " --log_interval=10 --block_size=32 --batch_size=8 --n_layer=2 --n_head=2 --n_embd=32 --max_iters=150"
    " --lr_decay_iters=150 --dropout=0.0"
)
RL = "--total-timesteps 6000 --num-envs 2 --cuda False"
SCRIPTS = (
    Script("pytorch/examples", "mnist/main.py", "--epochs 4 --no-accel --batch-size 32"),
    Script("pytorch/examples", "mnist_rnn/main.py", "--epochs 4"),
    Script(
        "pytorch/examples",
        "vae/main.py",
        "--epochs 4 --no-accel",
        lambda work: (work / "vae/results").mkdir(exist_ok=True),
    ),
    Script("pytorch/examples", "regression/main.py"),
    Script(
        "pytorch/examples", "mnist_forward_forward/main.py", "--epochs 20 --no_accel --train_size 200 --test_size 100"
    ),
    Script(
        "pytorch/examples",
        "dcgan/main.py",
        "--dataset fake --imageSize 64 --batchSize 16 --ngf 8 --ndf 8 --niter 20 --workers 0",
    ),
    Script(
        "pytorch/examples",
        "word_language_model/main.py",
        "--epochs 3 --emsize 32 --nhid 32 --lr 0.002 --use-optimizer",
        wikitext,
    ),
    Script("pytorch/examples", "reinforcement_learning/reinforce.py"),
    Script("pytorch/examples", "reinforcement_learning/actor_critic.py"),
    Script(
        "karpathy/minGPT",
        "projects/adder/adder.py",
        "--trainer.max_iters=150 --trainer.device=cpu --trainer.num_workers=0",
        folder=".",
        paths=(".",),
    ),
    Script("karpathy/nanoGPT", "train.py", SMALL_GPT, characters),
    Script("karpathy/makemore", "makemore.py", "--max-steps 150 -n 0 --n-layer 2 --n-embd 32", names),
    *(
        Script("yunjey/pytorch-tutorial", f"tutorials/{path}/main.py")
        for path in (
            "01-basics/linear_regression",
            "01-basics/logistic_regression",
            "01-basics/feedforward_neural_network",
            "02-intermediate/convolutional_neural_network",
            "02-intermediate/recurrent_neural_network",
            "02-intermediate/bidirectional_recurrent_neural_network",
            "03-advanced/generative_adversarial_network",
            "03-advanced/variational_autoencoder",
        )
    ),
    *(
        Script("eriklindernoren/PyTorch-GAN", f"implementations/{name}/{name}.py", GAN)
        for name in ("gan", "wgan", "lsgan", "cgan")
    ),
    Script("vwxyzjn/cleanrl", "cleanrl/ppo.py", RL, folder=".", paths=(".",)),
    Script(
        "vwxyzjn/cleanrl",
        "cleanrl/dqn.py",
        "--total-timesteps 3000 --learning-starts 500 --cuda False",
        folder=".",
        paths=(".",),
    ),
    Script("tanelp/tiny-diffusion", "ddpm.py", "--dataset moons --num_epochs 2 --eval_batch_size 50"),
    Script("tkipf/pygcn", "pygcn/train.py", "--epochs 120", citations, folder="pygcn", paths=(".",)),
    Script("jcjohnson/pytorch-examples", "nn/two_layer_net_optim.py"),
    Script("jcjohnson/pytorch-examples", "nn/dynamic_net.py"),
    Script("MorvanZhou/PyTorch-Tutorial", "tutorial-contents/302_classification.py"),
    Script("MorvanZhou/PyTorch-Tutorial", "tutorial-contents/403_RNN_regressor.py"),
    Script("MorvanZhou/PyTorch-Tutorial", "tutorial-contents/406_GAN.py"),
)

_TIMES = re.compile(
    r"\d+(\.\d+)?( ?(ms|s|it/s|s/it|seconds?|SPS)\b|%)|(ms/batch|time|SPS|Took|mfu):? *-?\d+(\.\d+)?%?", re.I
)


def git_folder(folder: Path, repository: str) -> Path | None:
    for base in (folder / repository.replace("/", "+"), folder / repository):
        for place in (base / "repo", base / "repo" / ".git", base / ".git", base):
            if (place / "HEAD").exists():
                return place
    return None


def lay_out(script: Script, folder: Path, work: Path) -> bool:
    """The Python files of a repository at its commit, and what the script needs beside them."""
    place = git_folder(folder, script.repository)
    if place is None:
        return False
    git = ["git", f"--git-dir={place}"]
    commit = COMMITS[script.repository]
    listed = subprocess.run([*git, "ls-tree", "-r", "--name-only", commit], capture_output=True, text=True, check=True)
    for path in listed.stdout.splitlines():
        if path.endswith(".py") and (path.count("/") < 2 or path.startswith(str(Path(script.path).parent))):
            target = work / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(
                subprocess.run([*git, "show", f"{commit}:{path}"], capture_output=True, check=True).stdout
            )
    if script.prepare is not None:
        script.prepare(work)
    return True


def run(script: Script, work: Path, steps: int, report: Path | None) -> tuple[int, str, str]:
    """Exit code, what it printed to stdout with times blotted out, and the end of stderr."""
    place = (work / script.path).resolve()
    where = work / script.folder if script.folder else place.parent
    command = [sys.executable, str(place), *script.arguments.split()]
    if report is not None:
        command = [sys.executable, "-m", "healthcheck", "run", "--report", f"json={report}", *command[1:]]
    paths = [str(STAND_INS), *(str((work / path).resolve()) for path in script.paths)]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PUBLIC_STEPS": str(steps),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return 124, "", "took longer than 10 minutes"
    return done.returncode, _TIMES.sub("#", done.stdout), done.stderr[-2000:]


def results(folder: Path, only: str, steps: int) -> Iterator[dict[str, Any]]:
    for script in SCRIPTS:
        if only not in f"{script.repository}/{script.path}":
            continue
        with tempfile.TemporaryDirectory() as temporary:
            plain = Path(temporary) / "plain"
            report = Path(temporary) / "report.json"
            if not lay_out(script, folder, plain):
                yield {"script": script, "said": "not run: no clone", "same": False, "steps": 0}
                continue
            plain_run = run(script, plain, steps, None)
            plain.rename(Path(temporary) / "before")
            lay_out(script, folder, plain)  # the same paths, which scripts may print
            watched_run = run(script, plain, steps, report)
            said = json.loads(report.read_text()) if report.exists() else {"alerts": [], "steps": 0}
            alerts = [
                f"{a['rule']}.{a['cause']}" if a.get("cause") else a["rule"]
                for a in said["alerts"]
                if a["severity"] != "info"
            ]
            words = ", ".join(dict.fromkeys(alerts)) or "silent"
            if plain_run[0] or watched_run[0]:
                words = f"exit {plain_run[0]} and {watched_run[0]}: " + (plain_run[2] or watched_run[2]).strip()[-300:]
            yield {"script": script, "said": words, "same": plain_run[:2] == watched_run[:2], "steps": said["steps"]}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| Repository | Commit | Script | Arguments | Updates | Said | Same output |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        script = row["script"]
        same = "yes" if row["same"] else "no"
        cells = (
            script.repository,
            COMMITS[script.repository][:7],
            f"`{script.path}`",
            f"`{script.arguments}`" if script.arguments else "",
        )
        lines.append("| " + " | ".join([*cells, str(row["steps"]), row["said"], same]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    rows = []
    for row in results(given.repositories, given.only, given.steps):
        rows.append(row)
        print(table([row]).splitlines()[-1], flush=True)
    quiet = sum(row["said"] == "silent" and row["same"] for row in rows)
    repositories = len({row["script"].repository for row in rows})
    print(f"{quiet} of {len(rows)} scripts of {repositories} repositories: nothing above info, same output")


if __name__ == "__main__":
    main()
