"""Alerts name the line of the user's code where an optimizer was built or a function called, if that was seen."""

from __future__ import annotations

import gc
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.core.runinfo import Places

NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        return self.head(self.body(x).relu())
"""
TRAIN = """
import threading
import torch
from net import Net

def train():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(
        [*net.body.parameters(), *net.unused.parameters()], lr=0.001)
    for i in range(60):
        x = torch.randn(16, 8)
        loss = torch.nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()

{call}
"""
RULES = """
version: 1
rules:
  no-gradient: {metric: params.no_gradient, when: {above: 0}}
  not-held: {metric: params.not_in_optimizer, when: {above: 0}}
  piles-up: {metric: grads.leftover, when: {above: 0.5}}
"""


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def places(folder: Path, watched: Callable[..., Any], *how: str, call: str) -> tuple[dict[str, str], str]:
    """Rule -> place, and the text of the script."""
    text = TRAIN.replace("{call}", textwrap.dedent(call))
    (folder / "train.py").write_text(text)
    (folder / "net.py").write_text(NETWORK)
    (folder / "places.yaml").write_text(RULES)
    ended = watched("run", "--rules", "places.yaml", "--report", "json=hc.json", *how, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    report = json.loads((folder / "hc.json").read_text())
    return {alert["rule"]: str(alert["where"] or "") for alert in report["alerts"]}, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "call"),
    [
        (("train.py",), "train()"),
        (("-m", "train"), "train()"),
        (("train.py",), "one = threading.Thread(target=train)\none.start()\none.join()"),
    ],
    ids=["script", "module", "thread"],
)
def test_an_alert_names_the_line_that_made_or_called_it(
    tmp_path: Path, healthcheck_warm: Callable[..., Any], how: tuple[str, ...], call: str
) -> None:
    found, text = places(tmp_path, healthcheck_warm, *how, call=call)
    assert found == {
        "no-gradient": f"net.py:{line_of(NETWORK, 'self.unused')}",
        "not-held": f"train.py:{line_of(text, 'torch.optim.SGD')}",
        "piles-up": f"train.py:{line_of(text, 'loss.backward()')}",
    }


TARGET = """
import copy
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
target = copy.deepcopy(net)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for i in range(80):
    x = torch.randn(16, 4)
    with torch.no_grad():
        wanted = 0.9 * target(x) + x[:, :1]
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(net(x), wanted).backward()
    optimizer.step()
    if i % 10 == 9:
        target.load_state_dict(target.state_dict())  # should be net's
"""
NO_STEP = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for epoch in range(40):
    optimizer.zero_grad()
    for i in range(3):
        x = torch.randn(16, 4)
        torch.nn.functional.mse_loss(net(x), x[:, :1]).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
"""
NO_EVAL_CALL = """
import torch
from torch.nn.functional import cross_entropy
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
x = torch.randn(640, 6)
y = x[:, :3].argmax(1)
for i in range(300):
    rows = torch.randint(0, 500, (32,))
    optimizer.zero_grad()
    cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()
    if i % 50 == 49:
        with torch.no_grad():
            held_out = cross_entropy(net(x[500:]), y[500:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        (TARGET, "copy-not-updated", "target.load_state_dict"),
        (NO_STEP, "update-loop-broken", "backward()"),
        (NO_EVAL_CALL, "train-eval-mode", "held_out = cross_entropy"),
    ],
    ids=["a copy that loads itself", "passes without an update", "a held-out loss in train mode"],
)
def test_causes_about_the_loop_name_the_call_that_they_are_about(
    tmp_path: Path, healthcheck_warm: Callable[..., Any], text: str, rule: str, line: str
) -> None:
    (tmp_path / "train.py").write_text(text)
    healthcheck_warm("run", "--report", "json=hc.json", "train.py", cwd=tmp_path)
    alerts = json.loads((tmp_path / "hc.json").read_text())["alerts"]
    assert {alert["rule"]: alert["where"] for alert in alerts}[rule] == f"train.py:{line_of(text, line)}"


class Thing:
    pass


class TestPlaces:
    def test_an_object_is_not_kept_and_its_successor_does_not_inherit(self) -> None:
        kept = Places()
        for number in range(50):
            thing = Thing()
            kept.note(thing, f"train.py:{number}")
            assert kept.made(thing) == f"train.py:{number}"
            del thing
        gc.collect()
        assert kept._of == {}

    def test_the_first_place_of_an_object_counts(self) -> None:
        kept, thing = Places(), Thing()
        kept.note(thing, "train.py:1")
        kept.note(thing, "train.py:2")
        kept.note(thing, "train.py:3", "stepped")
        assert (kept.made(thing), kept.made(thing, "stepped")) == ("train.py:1", "train.py:3")

    def test_of_a_function_that_is_called_in_two_places_none_is_named(self) -> None:
        kept = Places()
        kept.note_call("zero_grad", "train.py:9")
        assert kept.called("zero_grad") == "train.py:9"
        kept.note_call("zero_grad", "train.py:12")
        assert kept.called("zero_grad") == ""
        assert kept.called("clip") == ""

    def test_what_cannot_be_referred_to_weakly_has_no_place(self) -> None:
        kept, number = Places(), 7
        kept.note(number, "train.py:1")
        assert kept.made(number) == ""


def test_frames_of_libraries_are_no_place_of_the_user() -> None:
    import sys

    from healthcheck.instrument.places import place_of

    def here() -> str:
        return place_of(sys._getframe(0))

    assert here().startswith("tests/trainers/test_places.py:")
    namespace: dict[str, Any] = {"place_of": place_of, "sys": sys}
    exec(compile("found = place_of(sys._getframe(0))", json.__file__, "exec"), namespace)
    assert namespace["found"].startswith("tests/trainers/test_places.py:")  # past the library's frame
