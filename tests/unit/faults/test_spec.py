"""How faults are written."""

from __future__ import annotations

import pytest

from healthcheck.core.errors import UsageError
from healthcheck.faults.spec import FOREVER, KINDS, Fault, parse_fault, parse_faults


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nan-grad@120", Fault("nan-grad", 120, 120)),
        ("spike@120", Fault("spike", 120, 122, 100.0)),
        ("spike@1,200..1,205", Fault("spike", 1200, 1205, 100.0)),
        ("spike@120:50x", Fault("spike", 120, 122, 50.0)),
        ("hang@3:45s", Fault("hang", 3, 3, 45.0)),
        ("leak@1:16MiB", Fault("leak", 1, FOREVER, 16 * 2.0**20)),
        ("lr-zero@5..9", Fault("lr-zero", 5, 9)),
    ],
)
def test_a_fault_is_a_kind_at_a_step(text: str, found: Fault) -> None:
    assert parse_fault(text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nan-grd@3", 'did you mean "nan-grad"'),
        ("nan-grad", "write for instance nan-grad@120"),
        ("nan-grad@0", "steps count from 1"),
        ("spike@9..3", "comes before the first"),
        ("nan-grad@3:5", "takes no amount"),
        ("hang@3:-5s", "hang"),
        ("hang@3:soon", "hang"),
    ],
)
def test_a_mistake_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_fault(text)


def test_all_mistakes_of_a_command_line_are_told_at_once() -> None:
    with pytest.raises(UsageError) as error:
        parse_faults(["nan-grd@3", "spike@1", "x"], option="--inject")
    assert len(str(error.value).splitlines()) == 2


def test_the_promised_faults_are_all_there() -> None:
    promised = "nan-grad nan-loss nan-weight nan-input spike slow-divergence freeze lr-zero no-zero-grad leak slow-data hang scaler-overflow"
    assert set(promised.split()) == set(KINDS)
