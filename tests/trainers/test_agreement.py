"""The agreement of ranks through a store: who may leave, and when."""

from __future__ import annotations

import threading

import pytest

from healthcheck.instrument import agreement
from healthcheck.instrument.agreement import StoreAgreement
from healthcheck.run.actor import CHECKPOINT

STOP = {"rule": "loss-not-finite", "severity": 3, "order": 0}


@pytest.fixture(autouse=True)
def nobody_is_given_up(monkeypatch):
    """Who waits for another rank waits for ever: that it goes on shows that it has stopped waiting, not that time is up."""
    monkeypatch.setattr(agreement, "PARTING_SECONDS", 3600.0)
    monkeypatch.setattr(agreement, "LEAVING_SECONDS", 3600.0)


@pytest.fixture
def pair():
    """Two ranks of one job over one store, past their first meeting."""
    store = pytest.importorskip("torch.distributed").HashStore()
    ranks = [StoreAgreement(store, rank, 2, sync_every=1, note=pytest.fail, folder=f"of-{rank}") for rank in (0, 1)]
    for step in (1, 2, 3):
        for rank in ranks:
            assert rank.exchange(step) == []
    return ranks


def test_rank_0_stays_after_an_agreed_stop_until_slower_ranks_have_read_it(pair):
    """The store lives in the process of rank 0; when it left first, slow ranks died instead of stopping."""
    first, second = pair
    second.propose(STOP)
    for rank in pair:
        assert rank.exchange(4) == []
    assert first.exchange(5)[0]["rule"] == "loss-not-finite"
    leaving = threading.Thread(daemon=True, target=first.close)
    leaving.start()
    leaving.join(0.3)
    assert leaving.is_alive()
    assert second.exchange(5)[0]["ranks"] == [1]
    second.close()
    leaving.join(120)
    assert not leaving.is_alive()


def test_without_an_agreed_stop_nobody_waits_for_the_others(pair):
    first, _ = pair
    leaving = threading.Thread(daemon=True, target=first.close)
    leaving.start()
    leaving.join(120)
    assert not leaving.is_alive()


def test_a_rule_for_all_ranks_stops_only_while_it_fires_on_every_rank(pair):
    first, second = pair
    everywhere = {"rule": "loss-flat", "severity": 3, "order": 0, "unanimous": True}
    first.propose(everywhere)
    assert _all_at(pair, 4) == _all_at(pair, 5) == [[], []]
    first.withdraw("loss-flat")  # its episode is over before the other's begins
    second.propose(everywhere)
    assert _all_at(pair, 6) == _all_at(pair, 7) == [[], []]
    first.propose(everywhere)
    assert _all_at(pair, 8) == [[], []]
    for (decided,) in _all_at(pair, 9):
        assert (decided["rule"], decided["ranks"]) == ("loss-flat", [0, 1])


def test_a_rule_that_waits_for_all_ranks_does_not_hold_back_another_rules_stop(pair):
    first = pair[0]
    first.propose({"rule": "loss-flat", "severity": 3, "order": 0, "unanimous": True})
    first.propose(STOP)
    assert _all_at(pair, 4) == [[], []]
    for (decided,) in _all_at(pair, 5):
        assert (decided["rule"], decided["ranks"]) == ("loss-not-finite", [0])


def test_all_ranks_save_before_they_stop_and_once_for_two_that_ask(pair):
    for rank in pair:
        rank.propose({"rule": CHECKPOINT, "path": f"of-{rank.rank}.pt"})
    assert _all_at(pair, 4) == [[], []]
    pair[1].propose(STOP)
    for (decided,) in _all_at(pair, 5):
        assert (decided["rule"], decided["path"], decided["folder"]) == (CHECKPOINT, "of-0.pt", "of-0")
    pair[0].propose({"rule": CHECKPOINT, "path": "last.pt"})
    assert [[d["rule"] for d in decided] for decided in _all_at(pair, 6)] == [["loss-not-finite"]] * 2


def test_a_rank_that_fails_by_an_alert_leaves_last_unless_somebody_hurries_it(pair):
    """A launcher ends all ranks when the first fails; the others may be saving still."""
    first, second = pair
    leaving = threading.Thread(daemon=True, target=second.leave, kwargs={"failing": True, "hurried": lambda: False})
    leaving.start()
    leaving.join(0.3)
    assert leaving.is_alive()
    first.leave(failing=False, hurried=lambda: False)
    leaving.join(120)
    assert not leaving.is_alive()


def test_a_rank_that_was_told_to_end_does_not_wait_for_the_others(pair):
    leaving = threading.Thread(daemon=True, target=pair[0].leave, kwargs={"failing": True, "hurried": lambda: True})
    leaving.start()
    leaving.join(120)
    assert not leaving.is_alive()


def _all_at(ranks, step):
    return [rank.exchange(step) for rank in ranks]


def test_ranks_under_other_rules_are_named_once_by_rank_0():
    store = pytest.importorskip("torch.distributed").HashStore()
    said: dict[int, list[str]] = {rank: [] for rank in range(3)}
    ranks = [
        StoreAgreement(store, rank, 3, sync_every=1, note=said[rank].append, config="old" if rank == 2 else "new")
        for rank in range(3)
    ]
    for step in (1, 2, 3, 4):
        for rank in ranks:
            rank.exchange(step)
    (text,) = said[0]
    assert text.startswith("rank 2 runs under other rules than rank 0")
    assert said[1] == said[2] == []


def _training(store, ranks=(0, 1)):
    return [StoreAgreement(store, rank, 2, sync_every=1, note=lambda text: None) for rank in ranks]


@pytest.fixture
def store():
    return pytest.importorskip("torch.distributed").HashStore()


def test_what_one_training_decided_does_not_stop_the_next_of_the_same_job(store):
    for _ in range(2):
        pair = _training(store)
        for step in (1, 2, 3):
            assert _all_at(pair, step) == [[], []]
        pair[1].propose(STOP)
        assert _all_at(pair, 4) == [[], []]
        assert [decided["rule"] for (decided,) in _all_at(pair, 5)] == ["loss-not-finite"] * 2
        for rank in reversed(pair):
            rank.close()
    healthy = _training(store)
    assert [_all_at(healthy, step) for step in range(1, 9)] == [[[], []]] * 8
    assert all(rank.ready for rank in healthy)


def test_two_trainings_at_once_decide_each_for_itself(store):
    one, other = _training(store), _training(store)
    for step in (1, 2, 3):
        assert _all_at(one, step) == _all_at(other, step) == [[], []]
    one[0].propose(STOP)
    assert _all_at(one, 4) == _all_at(other, 4) == [[], []]
    assert len(_all_at(one, 5)[0]) == 1
    assert _all_at(other, 5) == [[], []]


def test_a_training_that_one_rank_had_for_itself_does_not_set_the_ranks_apart(store):
    (alone,) = _training(store, ranks=(0,))
    for step in (1, 2, 3):
        assert alone.exchange(step) == []
    alone.close()
    pair = _training(store)
    for step in (1, 2, 3):
        assert _all_at(pair, step) == [[], []]
    pair[0].propose(STOP)
    assert _all_at(pair, 4) == [[], []]
    assert [decided["ranks"] for (decided,) in _all_at(pair, 5)] == [[0], [0]]


def test_the_most_severe_rule_decides_and_its_most_certain_cause_over_all_ranks_speaks(pair):
    first, second = pair
    spike = {"rule": "loss-spike", "severity": 1, "order": 0, "mode": "graceful", "exit_code": 1, "reason": "a spike"}
    broken = {"rule": "state-broken", "severity": 2, "mode": "abort", "exit_code": 3}
    first.propose(spike)
    first.propose({**broken, "cause": "drifted", "order": 5, "reason": "drifted", "step": 4})
    second.propose({**broken, "cause": "lost", "order": 4, "severity": 1, "reason": "a state is lost", "step": 3})
    assert _all_at(pair, 4) == [[], []]
    for (decided,) in _all_at(pair, 5):
        assert (decided["rule"], decided["cause"], decided["reason"]) == ("state-broken", "lost", "a state is lost")
        assert (decided["mode"], decided["exit_code"], decided["ranks"]) == ("abort", 3, [0, 1])


def test_a_cause_for_all_ranks_waits_for_the_same_cause_on_each_of_them(pair):
    first, second = pair
    everywhere = {"rule": "loss-flat", "severity": 3, "order": 0, "unanimous": True}
    first.propose({**everywhere, "cause": "one"})
    second.propose({**everywhere, "cause": "two"})
    assert _all_at(pair, 4) == _all_at(pair, 5) == [[], []]
    first.withdraw("loss-flat.one")
    first.propose({**everywhere, "cause": "two"})
    assert _all_at(pair, 6) == [[], []]
    for (decided,) in _all_at(pair, 7):
        assert (decided["rule"], decided["cause"], decided["ranks"]) == ("loss-flat", "two", [0, 1])
