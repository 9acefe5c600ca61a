"""Mutated rule files, rule tests, accepted files and records, through the parsers in this process.

    python benchmarks/fuzz.py --rules 20000 --records 5000 --seed 1

Whatever bytes come, there is no traceback, no hang (2 s of processor time each) and no raw control character in what is
said. Each input is made from its seed alone, so a failure is repeated with ``--only rules:SEED``. What fails is printed and kept
in a folder of its own; the exit code is 1 then. ``tests/fuzz/test_any_bytes.py`` does a thousand of them.

``--atheris FOLDER`` has coverage guide the mutations of rule files instead, until it is interrupted (pip install atheris).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 2.0
"""Seconds of processor time for one input."""
RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

TOKENS = [
    b"\x1b[31m", b"\x1b]0;owned\x07", b"\n::error::x", "\u202e".encode(), b"\x00", b"\xff\xfe", b"\xc3", b"\x85", b'"\\UFFFFFFFF"', b'"\\x1b"',
    b"9" * 400, b"-" + b"9" * 400, b"1e400", b"-.inf", b".nan", b"0x" + b"f" * 300, b"1_0", b"1:30:00", b"2024-01-01", b"!!python/object:os.system x",
    b"!!binary aGk=", b"&a [*a]", b"&a", b"*a", b"<<: *a", b"- " * 300, b"[" * 500, b"{a: " * 200, b"a" * 300, b"../../../etc/passwd", b"/dev/zero",
    b"~", b"null", b"true", b"on", b"off", b"''", b'"', b"'", b"|", b">", b"%TAG ! x", b"---", b"...", b"\t", b"\r\n", b": ", b"#", b"{", b"}", b"[", b"]",
    b"3 of 5", b"5 of 3", b"10 steps", b"-1", b"0", b"1e-320", b"NaN", b"Infinity", b"version: 2", b"extends: [x]", b"inf", b"{}", b"[]", b"{value!r}",
    b"{value:.400f}", b"healthcheck:recommended@999999999999", b"a:b", b"metrics: {m: loss / 0}", b"m: ((((", b"99 years", b"200%", b"1e9GiB",
]  # fmt: skip

RULE = b"""version: 1
extends: [healthcheck:numerics]
external: [kl, my.metric]
metrics:
  gap: {value: "eval.loss - loss"}
  smooth: "mean(loss, 20)"
defaults: {severity: warning}
rules:
  a: {metric: loss, when: {robust_z: {above: 8, window: 200}}, for: 3 of 5, recover: {below: 4}, warmup: 100, then: [warn, {checkpoint: {path: x}}]}
  b: {metric: "grad_norm[encoder.*]", when: {all: [{above: 1}, {slope: {above: 0.1, window: 20}}]}, only_if: {lr: {above: 0}}, every: 10}
  c: {metric: kl, when: {any: [nonfinite, {outside: [0, 1]}]}, message: "kl {value:.3g} {score}", hint: "x", tags: [t], docs: "http://x", cooldown: 10}
  loss-spike: off
  loss-divergence: {for: 5}
profiles:
  ci: {rules: {a: off}}
settings: {mode: observe, report: {json: out.json}, overhead_budget: 1%}
"""
RULE_TEST = b"""healthcheck_tests: 1
rules:
  - version: 1
    rules: {a: {metric: loss, when: {above: 3}}}
tests:
  - name: one
    series: {loss: "2.3 x10, nan, 1~0.05 x20, gap 5, _ x3, 1..9 x5"}
    expect: [{rule: a, fires: 11}]
"""
ACCEPTED = b"""version: 1
accepted:
  - {rule: loss-spike, reason: known, until: 2030-01-01}
  - {rule: grad-*, series: "grad_norm[a]", target: train.py, reason: "x"}
"""
CSV = b"step,loss,lr,val_loss,grad_norm\n" + b"".join(
    b"%d,%.3f,0.001,%.2f,1.5\n" % (i, 2 - i / 50, 2.1) for i in range(40)
)
JSONL = b"".join(b'{"step": %d, "loss": %.3f, "lr": 1e-3, "time": %d}\n' % (i, 2 - i / 50, i) for i in range(40))
LOG = b"".join(
    b"epoch 1 step %d/100 loss: %.3f lr 1e-3 (0.2 s/it)\n{'loss': 1.2, 'epoch': 0.1}\n" % (i, 2 - i / 50)
    for i in range(30)
)
STATE = json.dumps(
    {"log_history": [{"step": i, "loss": 2 - i / 50, "epoch": i / 10} for i in range(30)], "global_step": 30}
).encode()
SAMPLES = b"".join(
    b'{"step":%d,"t":%d,"m":{"loss":%.2f,"grad_norm[a]":"nan"}}\n' % (i, i, 2 - i / 50) for i in range(30)
)
RECORDS = {"log.csv": CSV, "log.jsonl": JSONL, "train.log": LOG, "trainer_state.json": STATE, "samples.jsonl": SAMPLES}


@lru_cache(maxsize=1)
def rule_files() -> list[bytes]:
    """What is mutated: our packs, the rule files of the tests, and one with a bit of everything."""
    found = [*(ROOT / "rules").glob("*.yaml"), *(ROOT / "tests/rulefile").rglob("*.yaml")]
    return [RULE] * 20 + [
        path.read_bytes() for path in sorted(found) if ".hctest" not in path.name and path.stat().st_size < 8000
    ]


def mutated(rng: random.Random, text: bytes) -> bytes:
    """One to eight changes: bytes, pieces and lines removed, doubled, swapped; hostile tokens put in or in place of words."""
    for _ in range(rng.choice((1, 1, 2, 3, 5, 8))):
        at, to = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        to = min(to, at + rng.choice((1, 4, 20, 200)))
        kind = rng.randrange(8)
        if kind == 0:
            text = text[:at] + text[to:]
        elif kind == 1:
            text = text[:to] + text[at:to] * rng.choice((1, 2, 50)) + text[to:]
        elif kind == 2:
            text = text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
        elif kind == 3:
            text = text[:at] + rng.choice(TOKENS) + text[at:]
        elif kind in (4, 5):
            words = list(re.finditer(rb"[\w.\-]+", text)) or [re.match(rb"", text)]
            word = rng.choice(words)
            assert word is not None
            text = text[: word.start()] + rng.choice(TOKENS) + text[word.end() :]
        elif kind == 6:
            lines = text.split(b"\n")
            rng.shuffle(lines) if rng.random() < 0.2 else lines.insert(rng.randrange(len(lines)), rng.choice(lines))
            text = b"\n".join(lines)
        else:
            text = text[:at] + rng.choice(rule_files())[at:to] + text[to:]
        text = text[:100_000]
    return text


@lru_cache(maxsize=1)
def host() -> object:
    from healthcheck.assembly import plugin_host

    return plugin_host()


def said_of_rules(path: Path) -> str:
    from healthcheck.rulelang.compile import load_all
    from healthcheck.rulelang.problems import render_github, render_text

    loaded = load_all([str(path)], registry=host().registry)  # type: ignore[attr-defined]
    return render_text(loaded.problems) + render_github(loaded.problems)


def said_by(*words: str) -> str:
    """What a whole command says; it must end with one of its documented codes."""
    from healthcheck.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(list(words))
    assert code in (0, 1, 4, 5), f"exit code {code}: {out.getvalue()[-500:]}"
    assert "internal error" not in out.getvalue(), out.getvalue()[-800:]
    return out.getvalue()


def said_of_rule_test(path: Path) -> str:
    from healthcheck.rulelang.problems import render_text
    from healthcheck.ruletests.loading import load_tests

    return render_text(load_tests(path)[1])


def said_of_accepted(path: Path) -> str:
    from healthcheck.core.errors import RuleFileError
    from healthcheck.rulelang.accepted import load_accepted
    from healthcheck.rulelang.problems import render_text

    try:
        load_accepted(path)
    except RuleFileError as error:
        return render_text(error.problems)
    return ""


KINDS: dict[str, Callable[[random.Random, Path], Callable[[], str]]] = {}


def kind(
    make: Callable[[random.Random, Path], Callable[[], str]],
) -> Callable[[random.Random, Path], Callable[[], str]]:
    KINDS[make.__name__] = make
    return make


@kind
def rules(rng: random.Random, folder: Path) -> Callable[[], str]:
    path = folder / "rules.yaml"
    path.write_bytes(mutated(rng, rng.choice(rule_files())))
    return (lambda: said_by("check", str(path))) if rng.random() < 0.05 else lambda: said_of_rules(path)


@kind
def accepted(rng: random.Random, folder: Path) -> Callable[[], str]:
    path = folder / "healthcheck-accepted.yaml"
    path.write_bytes(mutated(rng, ACCEPTED))
    return lambda: said_of_accepted(path)


@kind
def ruletests(rng: random.Random, folder: Path) -> Callable[[], str]:
    path = folder / "mine.hctest.yaml"
    path.write_bytes(mutated(rng, RULE_TEST))
    return lambda: said_of_rule_test(path)


@kind
def records(rng: random.Random, folder: Path) -> Callable[[], str]:
    name = rng.choice(sorted(RECORDS))
    for other in RECORDS:
        (folder / other).unlink(missing_ok=True)
    path = folder / name
    path.write_bytes(mutated(rng, RECORDS[name]))
    return lambda: said_by("replay", str(path), "--rules", "healthcheck:ci-smoke")


def failure(name: str, seed: int, folder: Path) -> str:
    """What is wrong with one input, made of its seed; empty if nothing is."""
    run = KINDS[name](random.Random(f"{name}:{seed}"), folder)
    began = time.process_time()
    try:
        said = run()
    except BaseException:
        return traceback.format_exc()
    took = time.process_time() - began
    if took > LIMIT:
        return f"{took:.1f} s of processor time"
    raw = RAW.search(said)
    return f"raw {raw[0]!a} in what is said: {said[max(0, raw.start() - 60) : raw.end() + 60]!a}" if raw else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in KINDS:
        parser.add_argument(f"--{name}", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1, help="of the first input; the others follow")
    parser.add_argument("--only", metavar="KIND:SEED")
    parser.add_argument("--atheris", metavar="FOLDER")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="healthcheck-fuzz-"))
    os.chdir(folder)
    if given.atheris:
        return guided(given.atheris, folder)
    if given.only:
        name, _, seed = given.only.partition(":")
        print(failure(name, int(seed), folder) or "nothing is wrong with it", f"({folder})")
        return 0
    failed: collections.Counter[str] = collections.Counter()
    began, tried = time.process_time(), 0
    for name in KINDS:
        for seed in range(given.seed, given.seed + getattr(given, name)):
            wrong, tried = failure(name, seed, folder), tried + 1
            if wrong:
                key = wrong.strip().splitlines()[-1][:100]
                failed[f"{name}: {key}"] += 1
                if failed[f"{name}: {key}"] == 1:
                    print(f"--- {name}:{seed}\n{wrong[-1500:]}")
    print(
        f"{tried:,} inputs from seed {given.seed}, {sum(failed.values())} failures, {time.process_time() - began:.0f} s of processor time"
    )
    for key, count in failed.most_common():
        print(f"{count:6}  {key}")
    return 1 if failed else 0


def guided(corpus: str, folder: Path) -> int:
    """Mutations of rule files that coverage guides."""
    import atheris

    with atheris.instrument_imports():
        import healthcheck.rulelang.compile  # noqa: F401

    path = folder / "rules.yaml"

    def one(data: bytes) -> None:
        path.write_bytes(data)
        assert not RAW.search(said_of_rules(path))

    Path(corpus).mkdir(parents=True, exist_ok=True)
    for n, text in enumerate(rule_files()[19:]):
        (Path(corpus) / f"seed-{n}").write_bytes(text)
    atheris.Setup([sys.argv[0], corpus], one)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
