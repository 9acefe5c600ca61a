"""Rule tests as pytest items, in real pytest runs."""

from __future__ import annotations

import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest

RunTests = Callable[..., pytest.RunResult]

BURST = 'series: {loss: "2.0~0.05 x100, 9.0 x5, 2.0~0.05 x20"}'


def failure(result: pytest.RunResult, test: str) -> str:
    """The block of one failed test: from its FAILED line to the next header."""
    lines = [str(line).rstrip() for line in result.outlines]
    start = next(i for i, line in enumerate(lines) if line.startswith(f"FAILED stability.hctest.yaml::{test}  "))
    end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith(("____", "====")))
    return "\n".join(lines[start:end]) + "\n"


def test_a_rule_test_is_a_pytest_item_with_its_own_name(hctest: RunTests) -> None:
    result = hctest(
        f"""\
  - name: a burst is one episode
    {BURST}
    expect: [{{rule: loss-spike, fires: 103, clears: 108, then: [warn, evidence]}}]
  - name: quiet stays quiet
    series: {{loss: "3.0..2.0~0.02 x200"}}
    expect: none
""",
        "-v",
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["*stability.hctest.yaml::a burst is one episode PASSED*", "*stability.hctest.yaml::quiet stays quiet PASSED*"]
    )


def test_a_failure_shows_the_difference_the_steps_around_it_and_the_key_that_decides(hctest: RunTests) -> None:
    result = hctest(
        """\
  - name: one burst is one episode
    only: [loss-spike]
    series: {loss: "2.0 x100, 9.0 x5, 2.0 x20"}
    expect:
      - {rule: loss-spike, fires: 102}
"""
    )
    result.assert_outcomes(failed=1)
    assert failure(result, "one burst is one episode") == textwrap.dedent(
        """\
        FAILED stability.hctest.yaml::one burst is one episode   (stability.hctest.yaml:4)
          loss-spike: expected to fire at step 102, fired at 103
            step  value  score  state
            101   9.000  3199   pending (1 of 3)
            102   9.000  3202   pending (2 of 3)
            103   9.000  3205   firing            <- `for: 3` at stability.yaml:14
        """
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*pytesting*")


GOLDEN = {
    "an alert that nobody expected": (
        """\
    only: [loss-spike]
    series: {loss: "2.0 x100, 9.0 x5, 2.0 x20"}
    expect: none
""",
        """\
  loss-spike: fired at step 103, and no alert was expected: loss 9 is 3204.6 robust sigmas from its recent median 2
    step  value  score  state
    101   9.000  3199   pending (1 of 3)
    102   9.000  3202   pending (2 of 3)
    103   9.000  3205   firing            <- `for: 3` at stability.yaml:14
""",
    ),
    "a spike in the warm-up": (
        """\
    only: [loss-spike]
    series: {loss: "2.0 x10, 9.0 x5, 2.0 x20"}
    expect: [{rule: loss-spike, fires: 13}]
""",
        """\
  loss-spike: expected to fire at step 13, never fired
    step  value  score  state
    11    9.000  1027   warming (warm-up until step 20)
    12    9.000  1186   warming (warm-up until step 20)
    13    9.000  1344   warming (warm-up until step 20)  <- `warmup: 20 steps` at stability.yaml:3
""",
    ),
    "a score that is too small": (
        """\
    only: [memory-high]
    series: {memory.fraction: "0.5 x30, 0.89 x3"}
    expect: [{rule: memory-high, fires: 33}]
""",
        """\
  memory-high: expected to fire at step 33, never fired
    step  value  score  state
    31    0.890  0.890  ok
    32    0.890  0.890  ok
    33    0.890  0.890  ok     <- `when: {above: 0.9}` at stability.yaml:18
""",
    ),
    "a recovery that comes later": (
        """\
    only: [memory-high]
    series: {memory.fraction: "0.5 x30, 0.95 x3, 0.87 x2, 0.5 x5"}
    expect: [{rule: memory-high, fires: 33, clears: 36}]
""",
        """\
  memory-high: expected to clear at step 36, cleared at 38
    step  value  score  state
    35    0.870  0.870  firing
    36    0.500  0.500  firing (clearing 1 of 3)
    37    0.500  0.500  firing (clearing 2 of 3)
    38    0.500  0.500  ok                        <- `recover: below 0.85` at stability.yaml:19
""",
    ),
    "other actions": (
        """\
    series: {loss: "2.0 x30, nan"}
    expect: [{rule: loss-not-finite, fires: 31, then: [warn]}]
""",
        """\
  loss-not-finite: `then`: expected warn, was evidence, stop (step 31)
    <- `then: [evidence, stop]` at stability.yaml:10
""",
    ),
    "a pause that is too short": (
        """\
    series: {heartbeat: "1 x3, gap 200s"}
    expect: [{rule: hang}]
""",
        """\
  hang: expected to fire, never fired
    step  value  score  state
    1     -      1.000  ok
    2     -      1.000  ok
    3     -      200.0  ok     <- `when: {stale: 300s}` at stability.yaml:24
""",
    ),
    "an alert after a stop": (
        """\
    series: {loss: "2.0 x30, nan, 9.0 x5"}
    expect: [{rule: loss-not-finite, fires: 31}, {rule: loss-spike, fires: 34}]
""",
        """\
  loss-spike: expected to fire at step 34, never fired
  loss-not-finite stopped the run at step 31; `continue_after_stop: true` plays on
""",
    ),
    "a NaN that another rule owns": (
        """\
    continue_after_stop: true
    series: {loss: "2.0 x30, nan x3"}
    expect: [loss-not-finite, {rule: loss-spike, fires: 33}]
""",
        """\
  loss-spike: expected to fire at step 33, never fired
    step  value  score  state
    31    nan    -      ok (loss-not-finite has it)
    32    nan    -      ok (loss-not-finite has it)
    33    nan    -      ok (loss-not-finite has it)
""",
    ),
    "the other rank": (
        """\
    ranks: {0: {loss: "2.0 x40"}, 1: {loss: "2.0 x30, inf"}}
    expect: [{rule: loss-not-finite, fires: 31, rank: 0}]
""",
        """\
  loss-not-finite: expected to fire at step 31 on rank 0, never fired
    step  value  score  state
    29    2.000  0.000  ok
    30    2.000  0.000  ok
    31    2.000  0.000  ok     <- `when: nonfinite` at stability.yaml:7
  loss-not-finite: fired at step 31 on rank 1, and only step 31 was expected: loss is inf
    step  value  score  state
    29    2.000  0.000  ok
    30    2.000  0.000  ok
    31    inf    1.000  firing  <- `when: nonfinite` at stability.yaml:7
""",
    ),
}


def test_every_kind_of_failure_has_its_own_text(hctest: RunTests) -> None:
    """Golden: all failures of one file in one run; none hides another."""
    result = hctest("".join(f"  - name: {name}\n{test}" for name, (test, _) in GOLDEN.items()))
    result.assert_outcomes(failed=len(GOLDEN))
    for name, (_, expected) in GOLDEN.items():
        _, _, text = failure(result, name).partition("\n")
        assert text == expected, name


def test_xfail_is_strict_unless_told_otherwise(hctest: RunTests) -> None:
    result = hctest(
        f"""\
  - name: known gap
    xfail: needs a trend condition
    {BURST}
    expect: none
  - name: passes by now
    xfail: needs a trend condition
    {BURST}
    expect: [loss-spike]
  - name: may pass
    xfail: {{reason: depends on the weather, strict: false}}
    {BURST}
    expect: [loss-spike]
""",
        "-rx",
    )
    result.assert_outcomes(xfailed=1, failed=1, xpassed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*needs a trend condition*", "*known gap*needs a trend condition*"])


def test_names_select_tests_and_x_stops_at_the_first_failure(hctest: RunTests) -> None:
    text = "".join(f"  - name: number {i}\n    {BURST}\n    expect: none\n" for i in range(3))
    hctest(text, "-k", "1").assert_outcomes(failed=1, deselected=2)
    hctest(text, "-x").assert_outcomes(failed=1)


def test_a_mistake_is_a_collection_error_with_the_place_underlined(hctest: RunTests) -> None:
    result = hctest(
        """\
  - name: a
    series: {loss: "2.0 x300, 9.O x5"}
    expect: [{rule: los-spike, fire: 3}]
"""
    )
    result.assert_outcomes(errors=1)
    text = "\n".join(str(line) for line in result.outlines)
    start = text.index("stability.hctest.yaml:5")
    assert text[start:].startswith(
        textwrap.dedent(
            """\
            stability.hctest.yaml:5:31: error[series]: "9.O x5" is not a value
                5 |     series: {loss: "2.0 x300, 9.O x5"}
                  |                               ^^^^^^
              write for instance `2.0`, `2.0~0.05 x300`, `nan`, `_` or `gap 400s`
            stability.hctest.yaml:6:21: error[unknown-rule]: "los-spike" is not a rule of these files
                6 |     expect: [{rule: los-spike, fire: 3}]
                  |                     ^^^^^^^^^
              did you mean "loss-spike"?
            stability.hctest.yaml:6:32: error[unknown-key]: unknown key "fire"
                6 |     expect: [{rule: los-spike, fire: 3}]
                  |                                ^^^^
              did you mean "fires"?
            """
        )
    )
    result.stdout.no_fnmatch_line("*Traceback*")


def test_an_expected_failure_does_not_hide_a_broken_setting(hctest: RunTests) -> None:
    result = hctest(
        f"""\
  - name: a
    xfail: known
    set: {{loss-spike.when.robust_z.windw: 5}}
    {BURST}
    expect: none
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*windw*"])


def test_junit_holds_the_difference_and_the_line(hctest: RunTests, pytester: pytest.Pytester) -> None:
    hctest(f"  - name: surprise\n    {BURST}\n    expect: none\n", "--junitxml=out.xml")
    case = ET.parse(pytester.path / "out.xml").getroot().find(".//testcase")
    assert case is not None
    failed = case.find("failure")
    assert failed is not None
    assert case.get("name") == "surprise"
    assert failed.get("message", "").startswith("loss-spike: fired at step 103")
    assert "stability.hctest.yaml:4" in (failed.text or "")


def test_collection_can_be_switched_off(hctest: RunTests) -> None:
    result = hctest(f"  - name: a\n    {BURST}\n    expect: none\n", "--healthcheck-no-rule-tests")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_python_tests_run_beside_rule_tests(hctest: RunTests, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_python(): pass")
    hctest(f"  - name: a\n    {BURST}\n    expect: [loss-spike]\n").assert_outcomes(passed=2)


@pytest.mark.slow
def test_rule_tests_run_in_parallel_and_their_coverage_is_merged(hctest: RunTests) -> None:
    pytest.importorskip("xdist")
    result = hctest(
        f"  - name: a\n    {BURST}\n    expect: [loss-spike]\n"
        '  - name: b\n    series: {loss: "2.0 x100"}\n    expect: none\n',
        "-pxdist",
        "-n2",
        "--healthcheck-coverage",
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*loss-not-finite: no firing test", "*1 of 4 rules*"])


def test_the_plugin_imports_nothing_heavy_when_there_are_no_rule_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import sys

        def test_nothing_of_ours_is_loaded():
            heavy = ("torch", "yaml", "jsonschema", "rich")
            assert [m for m in heavy if m in sys.modules] == []
            assert "healthcheck.assembly" not in sys.modules
        """
    )
    result = pytester.runpytest_subprocess("-p", "healthcheck.pytesting.plugin")
    result.assert_outcomes(passed=1)
