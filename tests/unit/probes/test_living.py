"""What lives in the process is known without a search where its making was watched."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from healthcheck.device import living
from healthcheck.device.living import Births, live_objects


@pytest.fixture
def births() -> Births:
    return Births(from_the_start=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_things_that_have_died_are_not_listed_any_more(births: Births) -> None:
    kept = nn.Linear(1, 1)
    births.born(kept)
    births.born(nn.Linear(1, 1))
    gc.collect()
    assert births.alive(["Module"]) == [kept]


def test_only_the_kinds_that_are_asked_for_are_listed(births: Births) -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    births.born(net)
    births.born(optimizer)
    assert births.alive(["Optimizer"]) == [optimizer]
    assert births.alive(["Module", "Optimizer"]) == [net, optimizer]


def test_what_was_made_before_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, searches = Net(), []
    births = Births(from_the_start=False)
    search = living._search
    monkeypatch.setattr(living, "_search", lambda kinds: searches.append(set(kinds)) or search(kinds))
    assert any(thing is net for thing in births.alive(["Module"]))
    assert any(thing is net for thing in births.alive(["Module", "Optimizer"]))
    assert searches == [{"Module", "Optimizer", "LRScheduler"}]


def test_a_kind_whose_making_is_not_seen_any_more_is_searched_for(births: Births) -> None:
    births.lose("Module")
    net = Net()
    assert any(thing is net for thing in births.alive(["Module"]))


def test_thousands_of_short_lived_modules_do_not_pile_up(births: Births) -> None:
    for _ in range(20_000):
        births.born(nn.Identity())
    assert len(births._refs) <= 2048


def test_copies_and_schedulers_of_a_watched_script_are_known_without_a_search(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import copy, pickle
            import torch
            from torch import nn
            from healthcheck.device import living

            def never(kinds):
                raise SystemExit(f"searched for {kinds}")

            living._search = never
            net = nn.Sequential(nn.Linear(4, 4))
            ema = copy.deepcopy(net)
            third = pickle.loads(pickle.dumps(net))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            first = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
            second = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
            both = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [5])
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            for step in range(30):
                optimizer.zero_grad()
                net(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
            everything = living.live_objects("Module", "Optimizer", "LRScheduler")
            for thing in (net, net[0], ema, ema[0], third, third[0], optimizer, first, second, both, plateau):
                assert sum(thing is other for other in everything) == 1, type(thing)
            print("all are known")
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "healthcheck", "run", str(script)], capture_output=True, text=True, cwd=tmp_path
    )
    assert "all are known" in done.stdout, done.stdout + done.stderr


def test_nobody_follows_once_a_run_is_over() -> None:
    assert Births.followed is None
    net = Net()
    for thing in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert any(thing is other for other in live_objects("Module"))
