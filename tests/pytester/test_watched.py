"""Watched tests: real pytest runs over real torch training, as in a project of somebody else."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
# Inner runs drop the modules that they import, and torch's compiler, which comes with the first optimizer, cannot
# be imported twice: it has to be there before.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()

TOY = """\
import pytest, torch


def train(lr=0.1, steps=40):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        x = torch.randn(16, 8)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model

"""

RULES = """\
version: 1
rules:
  loss-not-finite:
    metric: loss
    when: nonfinite
    severity: error
    then: [evidence, stop]
    explains: [grads-not-finite]
    message: "loss is {value}"
    hint: lower the learning rate
  grads-not-finite: {metric: grad_norm, when: nonfinite, severity: error}
"""

RunTests = Callable[..., pytest.RunResult]


@pytest.fixture
def watched(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> RunTests:
    """``watched(tests, *options)``: runs pytest over the toy and these tests, beside ``rules.yaml``."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("HEALTHCHECK_RUNS", raising=False)
    pytester.makefile(".yaml", rules=RULES)

    def run(tests: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_toy=TOY + tests)
        return pytester.runpytest("--assert=plain", "-p", "healthcheck.pytest_plugin", *options)

    return run


def block(result: pytest.RunResult, headline: str) -> list[str]:
    """The lines of a failure from its headline to the closing line."""
    lines = [str(line) for line in result.outlines]
    start = next(i for i, line in enumerate(lines) if line.startswith(headline))
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("healthcheck: "))
    return lines[start : end + 1]


def test_lr_100_fails_with_one_readable_block_and_lr_01_passes(watched: RunTests) -> None:
    result = watched(
        """
@pytest.mark.healthcheck(rules="rules.yaml")
@pytest.mark.parametrize("lr", [0.1, 100.0])
def test_train(lr):
    train(lr)
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    lines = block(result, "loss-not-finite: ")
    text = "\n".join(lines)
    assert re.fullmatch(r"loss-not-finite: loss is (nan|inf) at step \d+", lines[0])
    for part in (
        r"  value     (nan|inf)",
        r"  normal    [\d.,e+]+, 1 step earlier",
        r"  try       lower the learning rate",
    ):
        assert re.search(part, text), part
    assert re.search(r"  rule      .*rules\.yaml:3 \(error\)", text)
    evidence = re.search(r"  evidence  (\S+)", text)
    assert evidence is not None
    assert (Path(evidence[1]) / "README").exists() or any(Path(evidence[1]).iterdir())
    assert len(lines) <= 11
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*healthcheck/pytesting*")
    result.stdout.fnmatch_lines(["FAILED test_toy.py::test_train?100.0? - loss-not-finite: loss is *"])


def test_a_test_that_trains_nothing_fails(watched: RunTests) -> None:
    """Green although nothing was looked at is the worst result."""
    result = watched("@pytest.mark.healthcheck(rules='rules.yaml')\ndef test_nothing(): pass\n")
    result.assert_outcomes(failed=1)
    assert block(result, "nothing was judged")[0] == "nothing was judged: no training step was seen"


def test_max_steps_ends_training_and_the_test_passes_if_it_was_healthy(watched: RunTests) -> None:
    result = watched(
        """
@pytest.mark.healthcheck(rules="rules.yaml", max_steps=5)
def test_short(healthcheck):
    train(steps=1_000_000)
""",
        "-rP",
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["training was ended as asked (asked for 5 steps); code of the test after it did not run"]
    )
    result.stdout.fnmatch_lines(["test_toy.py::test_short  ok * 5 steps"])


def test_after_a_limited_block_the_test_goes_on(watched: RunTests) -> None:
    watched(
        """
def test_goes_on(healthcheck):
    with healthcheck.limit(7):
        train(steps=1_000_000)
    assert healthcheck.steps == 7
    assert len(healthcheck.series("loss")) == 7
    assert [step for step, _ in healthcheck.history("loss")] == list(range(1, 8))
    assert healthcheck.alerts == []
    with pytest.raises(KeyError, match="metrics="):
        healthcheck.series("units.dead")
"""
    ).assert_outcomes(passed=1)


def test_the_own_failure_of_a_test_comes_first_and_keeps_its_traceback(watched: RunTests) -> None:
    result = watched(
        """
@pytest.mark.healthcheck(rules="rules.yaml", fail_on="never", set=["loss-not-finite.then=[warn]"])
def test_mine():
    train(lr=100.0, steps=12)
    assert 1 == 2, "mine"
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E       AssertionError: mine", "*Captured healthcheck call*", "loss-not-finite: loss is *"]
    )


@pytest.mark.slow
def test_skips_and_expected_failures_stay_what_they_are(watched: RunTests) -> None:
    watched(
        """
from healthcheck.testing import HealthCheckFailed

@pytest.mark.healthcheck(rules="rules.yaml")
def test_skip():
    pytest.skip("not today")

@pytest.mark.healthcheck(rules="rules.yaml")
@pytest.mark.xfail(raises=HealthCheckFailed, strict=True)
def test_known():
    train(lr=100.0)
"""
    ).assert_outcomes(skipped=1, xfailed=1)


def test_all_is_given_back_after_the_test(watched: RunTests) -> None:
    watched(
        """
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

def state():
    return torch.Tensor.backward, torch.autograd.backward, torch.optim.Optimizer.zero_grad, len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks), torch.save

BEFORE = state()

@pytest.mark.healthcheck(rules="rules.yaml")
def test_watched(inject):
    assert state() != BEFORE
    train()

def test_after():
    import healthcheck
    assert state() == BEFORE
    assert healthcheck.current() is None
"""
    ).assert_outcomes(passed=2)


@pytest.mark.slow
def test_one_session_inside_another_is_refused_in_one_sentence(watched: RunTests) -> None:
    result = watched(
        """
import healthcheck

def test_nested():
    with healthcheck.watch(rules="healthcheck:recommended", console=False, record=False):
        pass

@pytest.fixture
def around():
    with healthcheck.watch(rules="healthcheck:recommended", console=False, record=False) as health:
        yield health

@pytest.mark.healthcheck(rules="rules.yaml")
def test_inside(around):
    train()
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["another session watches this process already (*); sessions cannot be nested"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("rulez='rules.yaml'", '*has no argument "rulez"; did you mean "rules"?*'),
        ("rules='gone.yaml'", "*gone.yaml*"),
        ("rules={'version': 1, 'rules': {'a': {'metric': 'los', 'when': {'above': 1}}}}", '*did you mean "loss"?*'),
        ("'rules.yaml'", "*takes keywords only*"),
        ("reference='final_los'", '*there is no measure "final_los"*'),
    ],
)
def test_a_mistake_in_the_marker_is_a_failure_that_says_what_to_write(
    watched: RunTests, arguments: str, said: str
) -> None:
    result = watched(f"@pytest.mark.healthcheck({arguments})\ndef test_it(): train(steps=3)\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([said])
    result.stdout.no_fnmatch_line("*healthcheck/pytesting*")


def test_a_plugin_that_raises_fails_the_test_with_its_name_and_place(
    watched: RunTests, pytester: pytest.Pytester
) -> None:
    """Monitoring breaks quietly in training and loudly in tests."""
    pytester.makepyfile(
        broken="import healthcheck\n@healthcheck.hookimpl\ndef healthcheck_step_end(event):\n    raise RuntimeError('oh')\n"
    )
    result = watched(
        "@pytest.mark.healthcheck(rules='rules.yaml', plugins='broken.py')\ndef test_it(): train(steps=3)\n"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(['plugin "broken" raised in step_end at step 1: RuntimeError: oh', "  at *broken.py:4"])


@pytest.mark.slow
def test_options_and_ini_keys_stand_in_for_the_marker(watched: RunTests, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nhealthcheck_rules = rules.yaml\nhealthcheck_fail_on = never\n")
    tests = "@pytest.mark.healthcheck\ndef test_it(): train(lr=100.0)\n"
    # `never` lets alerts pass, but a stop that a rule asked for is never a pass.
    watched(tests).assert_outcomes(failed=1)
    watched(tests, "--healthcheck-rules", "rules.yaml", "--healthcheck-fail-on", "error").assert_outcomes(failed=1)
    pytester.makefile(".yaml", quiet="version: 1\nrules: {r: {metric: loss, when: nonfinite, severity: error}}")
    watched(tests, "--healthcheck-rules", "quiet.yaml").assert_outcomes(passed=1)
    watched(tests, "--healthcheck-rules", "quiet.yaml", "--healthcheck-fail-on", "error").assert_outcomes(failed=1)


@pytest.mark.slow
def test_reports_of_all_watched_tests_are_one_file(watched: RunTests, pytester: pytest.Pytester) -> None:
    tests = """
@pytest.mark.healthcheck(rules="rules.yaml")
@pytest.mark.parametrize("lr", [0.1, 100.0])
def test_train(lr):
    train(lr)
"""
    watched(tests, "--healthcheck-report", "junit=hc.xml", "--healthcheck-report", "json=hc.json", "--junitxml=py.xml")
    suites = ET.parse(pytester.path / "hc.xml").getroot()
    assert [(suite.attrib["name"], suite.attrib["failures"]) for suite in suites] == [
        ("test_toy.py::test_train[0.1]", "0"),
        ("test_toy.py::test_train[100.0]", "2"),
    ]
    assert [r["verdict"] for r in json.loads((pytester.path / "hc.json").read_text())] == ["ok", "failed"]
    properties = {p.attrib["name"]: p.attrib["value"] for p in ET.parse(pytester.path / "py.xml").iter("property")}
    assert properties["healthcheck_verdict"] in ("ok", "failed")
    assert "healthcheck_alerts" in properties


def test_an_unknown_report_is_refused_before_anything_runs(watched: RunTests) -> None:
    result = watched("def test_it(): pass\n", "--healthcheck-report", "junt=x")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(['*there is no report "junt"; did you mean "junit"?*'])


@pytest.mark.slow
def test_the_last_failed_test_runs_again(watched: RunTests) -> None:
    tests = """
@pytest.mark.healthcheck(rules="rules.yaml")
@pytest.mark.parametrize("lr", [0.1, 100.0])
def test_train(lr):
    train(lr)
"""
    watched(tests)
    watched(tests, "--lf").assert_outcomes(failed=1)


@pytest.mark.slow
def test_with_healthcheck_off_tests_run_unwatched(watched: RunTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHCHECK", "off")
    watched("@pytest.mark.healthcheck(rules='rules.yaml')\ndef test_it(): train(lr=100.0)\n").assert_outcomes(passed=1)


@pytest.mark.slow
def test_an_injected_fault_fires_the_rule_and_is_told(watched: RunTests) -> None:
    result = watched(
        """
@pytest.mark.healthcheck(rules="rules.yaml")
def test_broken(inject):
    inject("nan-grad@5")
    train()

def test_too_late(inject, healthcheck):
    inject("spike", at=900)
    train(steps=5)
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    assert block(result, "grads-not-finite")[0].endswith("at step 5")
    result.stdout.fnmatch_lines(["injected nan-grad at step 5: *"])


@pytest.mark.slow
def test_a_reference_is_written_compared_and_kept_with_its_tolerance(
    watched: RunTests, pytester: pytest.Pytester
) -> None:
    tests = """
import os
@pytest.mark.healthcheck(rules="rules.yaml", reference="final_loss")
def test_it():
    train(steps=int(os.environ.get("STEPS", "40")))
"""
    missing = watched(tests)
    missing.stdout.fnmatch_lines(["test_toy.reference.yaml has no final_loss for test_it"])
    path = pytester.path / "test_toy.reference.yaml"
    watched(tests, "--healthcheck-update-reference").stdout.fnmatch_lines(
        ["reference written: test_toy.reference.yaml"]
    )
    watched(tests).assert_outcomes(passed=1)
    text = path.read_text()
    value = float(re.search(r"value: ([\d.e-]+)", text)[1])  # type: ignore[index]
    path.write_text(text.replace(f"value: {value}", f"value: {value / 2}\n      tolerance: 10%"))
    worse = watched(tests)
    worse.assert_outcomes(failed=1)
    worse.stdout.fnmatch_lines(["final_loss is *, reference *, above by more than 10%"])
    watched(tests, "--healthcheck-update-reference").assert_outcomes(passed=1)
    assert "tolerance: 10%" in path.read_text()


@pytest.mark.slow
def test_numbers_can_be_played_into_the_watch(watched: RunTests) -> None:
    result = watched(
        """
from healthcheck.testing import play

@pytest.mark.healthcheck(rules="rules.yaml")
def test_smoke(healthcheck):
    play(healthcheck, {"loss": "2.3 x10, nan"})
"""
    )
    result.assert_outcomes(failed=1)
    assert block(result, "loss-not-finite")[0] == "loss-not-finite: loss is nan at step 11"


@pytest.mark.slow
def test_two_workers_give_one_table_and_one_report(watched: RunTests, pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(
        test_toy=TOY
        + """
@pytest.mark.healthcheck(rules="rules.yaml", reference="final_loss")
@pytest.mark.parametrize("lr", [0.1, 0.05, 100.0])
def test_train(lr):
    train(lr)
"""
    )
    options = ("-p", "healthcheck.pytest_plugin", "-p", "xdist", "-n", "2", "--healthcheck-report", "junit=hc.xml")
    result = pytester.runpytest_subprocess(*options, "--healthcheck-update-reference")
    result.assert_outcomes(passed=2, failed=1)
    assert len(ET.parse(pytester.path / "hc.xml").getroot()) == 3
    assert block(result, "loss-not-finite")
    result.stdout.fnmatch_lines(["FAILED test_toy.py::test_train?100.0? - loss-not-finite: *"])
    table = [
        line for line in result.outlines if re.match(r"test_toy.py::test_train\[.*\] +(ok|failed) +\d+ steps", line)
    ]
    assert len(table) == 3
    assert (pytester.path / "test_toy.reference.yaml").read_text().count("final_loss") == 2


@pytest.mark.slow
@pytest.mark.framework("transformers")
def test_hf_trainer_inside_a_test(watched: RunTests) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    result = watched(
        """
from transformers import Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": x.sum()}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 1)
    def forward(self, x, labels=None):
        out = self.body(x).squeeze(-1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}

@pytest.mark.healthcheck(rules="rules.yaml")
@pytest.mark.parametrize("lr", [1e-2, 1e20])
def test_hf(lr, tmp_path):
    torch.manual_seed(0)
    arguments = TrainingArguments(output_dir=str(tmp_path), learning_rate=lr, max_steps=30, per_device_train_batch_size=8,
        report_to=[], use_cpu=True, disable_tqdm=True, max_grad_norm=0.0, optim="sgd", logging_steps=1000, save_strategy="no")
    Trainer(model=Model(), args=arguments, train_dataset=Data()).train()
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    assert block(result, "loss-not-finite")


@pytest.mark.slow
@pytest.mark.framework("lightning")
def test_lightning_inside_a_test(watched: RunTests) -> None:
    pytest.importorskip("lightning")
    result = watched(
        """
import lightning

class Module(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr, self.body = lr, torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        [x] = batch
        return ((self.body(x) - x.sum(1, keepdim=True)) ** 2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

@pytest.mark.healthcheck(rules="rules.yaml")
@pytest.mark.parametrize("lr", [1e-2, 1e20])
def test_lightning(lr, tmp_path):
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=8)
    trainer = lightning.Trainer(max_steps=20, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)
    trainer.fit(Module(lr), loader)
""",
        "-W",
        "ignore",
    )
    result.assert_outcomes(passed=1, failed=1)
    assert block(result, "loss-not-finite")


UNUSED = """\
import sys
def pytest_unconfigure(config):
    heavy = [m for m in ("torch", "yaml", "jsonschema", "rich", "pluggy_", "healthcheck.assembly") if m in sys.modules]
    assert not heavy, heavy
    assert "healthcheck.pytest_plugin" in sys.modules
"""


def test_unused_the_plugin_imports_nothing_heavy(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project that does not train must not pay for us in each pytest start."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(UNUSED)
    pytester.makepyfile("def test_it(): pass\n")
    result = pytester.runpytest_subprocess("-p", "healthcheck.pytest_plugin")
    result.assert_outcomes(passed=1)
    assert result.ret == 0, sys.version
