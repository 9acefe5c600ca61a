"""Which rank a hang is due to, from what each rank says of itself; the flight recorder's entries are those of torch 2.13."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from healthcheck.instrument.hangs import flights_of, matched, record_flights, recorded


def entry(
    number: int, name: str = "gloo:all_reduce", size: int = 3, *, done: bool = False, group: str = "0"
) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "op_id": number,
        "process_group": [group, "default_pg"],
        "profiling_name": name,
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "state": "completed" if done else "scheduled",
        "retired": done,
    }


def word(*entries: dict[str, Any], at: str = "train.py:9 in step", doing: str = "", **more: Any) -> dict[str, Any]:
    return {"at": at, "doing": doing, "flights": flights_of({"entries": list(entries)}), **more}


HERE = entry(40, done=True)
WAITS = entry(41)


def test_who_did_not_enter_is_named_with_its_line() -> None:
    words = {0: word(HERE, WAITS), 1: word(HERE, at="train.py:31 in load"), 2: word(HERE, WAITS)}
    found = matched(words, 3)
    assert found["ranks"] == "1"
    assert "has not entered all_reduce [3] Float (number 41 of its group)" in found["cause"]
    assert found["there"] == "train.py:31 in load"


def test_who_waits_for_its_data_is_told_from_who_is_elsewhere() -> None:
    words = {0: word(HERE, WAITS), 1: word(HERE, doing="data"), 2: word(HERE, WAITS)}
    found = matched(words, 3)
    assert found["ranks"] == "1"
    assert "waits for its data loader" in found["cause"]


def test_another_collective_is_named_where_most_agree_and_both_where_not() -> None:
    other = entry(41, "gloo:broadcast")
    three = matched({0: word(HERE, WAITS), 1: word(HERE, other), 2: word(HERE, WAITS)}, 3)
    assert three["ranks"] == "1"
    assert "broadcast [3] Float" in three["cause"]
    two = matched({0: word(HERE, WAITS), 1: word(HERE, other)}, 2)
    assert two["ranks"] == "0, 1"
    assert "cannot tell" in two["which"]


def test_another_size_is_another_collective() -> None:
    found = matched({0: word(WAITS), 1: word(entry(41, size=4)), 2: word(WAITS)}, 3)
    assert found["ranks"] == "1"
    assert "all_reduce [4] Float" in found["cause"]


def test_who_did_not_leave_is_named() -> None:
    done = entry(41, done=True)
    found = matched({0: word(done), 1: word(WAITS), 2: word(done)}, 3)
    assert found["ranks"] == "1"
    assert "did not leave" in found["cause"]


def test_who_does_not_answer_is_named_and_who_has_ended_is_told_from_it() -> None:
    words = {0: word(WAITS), 2: word(WAITS)}
    assert "does not answer" in matched(words, 3)["cause"]
    assert matched(words, 3)["ranks"] == "1"
    assert "has ended" in matched(words, 3, ended=[1])["cause"]


def test_all_in_the_same_collective_is_unknown_and_nobody_is_named() -> None:
    found = matched({rank: word(HERE, WAITS) for rank in range(3)}, 3)
    assert "ranks" not in found
    assert "cannot tell" in found["cause"]


def test_groups_are_matched_each_by_itself() -> None:
    """Ranks 0 and 1 share a group of their own, which is further than that of all."""
    pair = entry(90, group="1", done=True)
    words = {0: word(pair, HERE, WAITS), 1: word(pair, HERE), 2: word(HERE, WAITS)}
    assert matched(words, 3)["ranks"] == "1"


def test_transfers_between_two_ranks_are_no_collectives() -> None:
    assert flights_of({"entries": [{**entry(5), "is_p2p": True}]}) == {}


def test_without_a_recorder_our_own_hooks_are_used_and_that_is_said() -> None:
    inside = {"at": "train.py:9", "inside": True, "count": 41, "last": "all_reduce [3] float32"}
    words = {0: inside, 1: {"at": "train.py:31 in load", "inside": False, "count": 40}, 2: inside}
    found = matched(words, 3)
    assert found["ranks"] == "1"
    assert "no flight recorder" in found["seen by"]


def test_a_rank_that_has_left_what_others_are_in_is_not_blamed_by_our_own_hooks() -> None:
    inside = {"at": "train.py:9", "inside": True, "count": 41}
    words = {0: inside, 1: {"at": "train.py:10", "inside": False, "count": 41}}
    assert "ranks" not in matched(words, 2)


def test_the_recorder_is_switched_on_only_where_nobody_has_decided() -> None:
    environment: dict[str, str] = {}
    record_flights(environment)
    assert environment == {"TORCH_FR_BUFFER_SIZE": "1000"}
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        decided = {name: "0"}
        record_flights(decided)
        assert decided == {name: "0"}


def test_the_recorder_of_nccl_is_read_beside_that_of_all_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of torch are stood in for: NCCL needs cards."""
    both = {
        "_dump_fr_trace_json": lambda: json.dumps({"entries": [entry(3, "gloo:barrier", done=True, group="1")]}),
        "_dump_nccl_trace_json": lambda: json.dumps({"entries": [entry(41, "nccl:all_reduce"), entry(40, done=True)]}),
    }
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**both))
    assert recorded() == {
        "1/default_pg": [3, "barrier [3] Float", True],
        "0/default_pg": [41, "all_reduce [3] Float", False],
    }
