"""Rule tests from text: a rule file and a test file in a folder of their own, run without pytest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.extend.host import PluginHost
from healthcheck.ruletests.run import Result, RuleTestBook

RULES = """\
version: 1
external: [kl]
metrics:
  gap: kl / loss
rules:
  loss-not-finite: {metric: loss, when: nonfinite, severity: error, explains: [loss-high], then: [evidence, stop]}
  loss-high: {metric: loss, when: {above: 5}, then: [warn]}
  loss-long: {metric: loss, when: {above: 5}, for: 10s, then: [note]}
  kl-gone: {metric: kl, when: {missing: {after: 5, first: 10_000}}, then: [note]}
  gap-high: {metric: gap, when: {above: 1}, then: [note], warmup: 3}
  memory-high:
    {metric: memory.fraction, when: {above: 0.9}, cooldown: 10, then: [cleanup, stop: {after: 3}]}
  grads: {metric: "grad_norm[*]", when: {above: 10}, then: [warn]}
  watched-only: {metric: kl, when: {above: 100}, mode: observe, then: [warn, stop]}
profiles:
  strict:
    rules: {loss-high: error}
"""

Book = Callable[..., RuleTestBook]
Run = Callable[..., Result]


@pytest.fixture(scope="session")
def host() -> PluginHost:
    return plugin_host()


@pytest.fixture
def book(tmp_path: Path, host: PluginHost) -> Book:
    """``book(tests)``: the tests (YAML below ``tests:``) over the rules above."""

    def make(tests: str, head: str = "", rules: str = RULES) -> RuleTestBook:
        (tmp_path / "team.yaml").write_text(rules, encoding="utf-8")
        file = tmp_path / "team.hctest.yaml"
        text = f"healthcheck_tests: 1\nrules: [team.yaml]\n{head}tests:\n{tests}"
        file.write_text(text, encoding="utf-8")
        return RuleTestBook(file, partial(load_rules_for, host=host), host.registry, shown="team.hctest.yaml")

    return make


@pytest.fixture
def run(book: Book) -> Run:
    """``run(body)``: one test; ``body`` holds its keys."""

    def play(body: str, **options: str) -> Result:
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        made = book(f"  - name: the test\n{lines}", **options)
        return made.run(made.tests[0])

    return play
