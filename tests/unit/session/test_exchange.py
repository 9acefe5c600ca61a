"""What ranks tell each other through a store: several of them in one process, over torch's own stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

dist = pytest.importorskip("torch.distributed")

from healthcheck.instrument.exchange import PATIENCE, StoreExchange, packed, unpacked  # noqa: E402


class Job:
    """The exchanges of all ranks of a job; questions go round as messages of the agreement do."""

    def __init__(self, store: Any, world: int, fanout: int = 64, ended: int = 0) -> None:
        self.ended = ended
        self.ranks = [
            StoreExchange(store, rank, world, hears=rank == 0, broadcast=self.broadcast, fanout=fanout)
            for rank in range(world)
        ]

    def broadcast(self, message: Mapping[str, Any]) -> None:
        for rank in self.ranks:
            rank.hear(message)

    def turn(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].turn("m", lambda: self.ended)

    def heard(self) -> list[tuple[int, Mapping[int, Mapping[str, Any]]]]:
        return list(self.ranks[0].heard("x"))


def stores(folder: Path) -> dict[str, Any]:
    return {
        "hash": dist.HashStore(),
        "file": dist.FileStore(str(folder / "store"), 4),
        "prefix": dist.PrefixStore("p", dist.HashStore()),
    }


@pytest.mark.parametrize("kind", ["hash", "file", "prefix"])
def test_what_all_ranks_say_is_heard_by_one_at_its_next_turn(kind: str, tmp_path: Path) -> None:
    job = Job(stores(tmp_path)[kind], 4)
    for rank in job.ranks:
        rank.say("x", 50, {"v": rank.rank})
    job.turn()
    job.turn(0)
    assert job.heard() == [(50, {rank: {"v": rank} for rank in range(4)})]
    assert job.heard() == []
    assert job.ranks[1].heard("x") == ()


def test_a_rank_that_says_nothing_is_waited_for_and_then_left_out() -> None:
    job = Job(dist.HashStore(), 3)
    for rank in (0, 2):
        job.ranks[rank].say("x", 50, {"v": rank})
    for _ in range(PATIENCE):
        job.turn(0, 2)
        assert job.heard() == []
    job.turn(0, 2)
    assert job.heard() == [(50, {0: {"v": 0}, 2: {"v": 2}})]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    job = Job(dist.HashStore(), 2, ended=1)
    job.ranks[0].say("x", 50, {"v": 0})
    for _ in range(3):
        job.turn(0)
    assert job.heard() == [(50, {0: {"v": 0}})]


def test_a_word_of_another_step_is_never_mistaken_for_that_of_this_one() -> None:
    job = Job(dist.HashStore(), 2)
    for step in (14, 28, 42):  # all under one key
        job.ranks[0].say("x", step, {"v": step})
        job.turn(0)
    job.ranks[1].say("x", 28, {"v": 28})
    job.turn(1, 0)
    job.ranks[1].say("x", 42, {"v": 42})
    job.turn(1, 0)
    for step, words in job.heard():
        assert {word["v"] for word in words.values()} == {step}


def test_with_many_ranks_leaders_read_for_their_group_and_nothing_is_lost() -> None:
    job = Job(dist.HashStore(), 11, fanout=4)
    for rank in job.ranks:
        rank.say("x", 7, {"same": [1, 2], "own": rank.rank, **({"odd": True} if rank.rank == 5 else {})})
    for _ in range(3):
        job.turn()
    [(step, words)] = job.heard()
    assert step == 7
    assert words == {rank: {"same": [1, 2], "own": rank, **({"odd": True} if rank == 5 else {})} for rank in range(11)}


def test_a_question_reaches_every_rank_once() -> None:
    job = Job(dist.HashStore(), 3)
    job.ranks[0].ask("x", {"slots": [3]})
    job.turn(0)
    assert [rank.asked("x") for rank in job.ranks] == [[{"slots": [3]}]] * 3
    assert not any(rank.asked("x") for rank in job.ranks)


def test_a_word_that_is_too_long_is_refused_where_it_is_said() -> None:
    job = Job(dist.HashStore(), 2)
    with pytest.raises(ValueError, match=r"4,096 at most"):
        job.ranks[1].say("x", 1, {"v": "a" * 5000})


def test_what_ranks_have_in_common_is_written_once() -> None:
    found: dict[int, Mapping[str, Any]] = {rank: {"big": list(range(100)), "own": rank} for rank in range(64)}
    found[3] = {"own": 3}
    assert unpacked(packed(found)) == found
    assert len(str(packed(found))) < len(str(found)) / 5
