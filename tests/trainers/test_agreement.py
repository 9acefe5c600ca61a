"""The agreement of ranks through a store: who may leave, and when."""

from __future__ import annotations

import threading

import pytest

from healthcheck.trainers.agreement import StoreAgreement

STOP = {"rule": "loss-not-finite", "severity": 3, "order": 0}


@pytest.fixture
def pair():
    """Two ranks of one job over one store, past their first meeting."""
    store = pytest.importorskip("torch.distributed").HashStore()
    ranks = [StoreAgreement(store, rank, 2, sync_every=1, note=pytest.fail) for rank in (0, 1)]
    for step in (1, 2, 3):
        for rank in ranks:
            assert rank.exchange(step) is None
    return ranks


def test_rank_0_stays_after_an_agreed_stop_until_slower_ranks_have_read_it(pair):
    """The store lives in the process of rank 0; when it left first, slow ranks died instead of stopping."""
    first, second = pair
    second.propose(STOP)
    for rank in pair:
        assert rank.exchange(4) is None
    assert first.exchange(5)["rule"] == "loss-not-finite"
    leaving = threading.Thread(target=first.close)
    leaving.start()
    leaving.join(0.3)
    assert leaving.is_alive()
    assert second.exchange(5)["ranks"] == [1]
    second.close()
    leaving.join(10)
    assert not leaving.is_alive()


def test_without_an_agreed_stop_nobody_waits_for_the_others(pair):
    first, _ = pair
    leaving = threading.Thread(target=first.close)
    leaving.start()
    leaving.join(10)
    assert not leaving.is_alive()


def test_a_rule_for_all_ranks_stops_only_while_it_fires_on_every_rank(pair):
    first, second = pair
    everywhere = {"rule": "loss-flat", "severity": 3, "order": 0, "unanimous": True}
    first.propose(everywhere)
    assert _all_at(pair, 4) == _all_at(pair, 5) == [None, None]
    first.withdraw("loss-flat")  # its episode is over before the other's begins
    second.propose(everywhere)
    assert _all_at(pair, 6) == _all_at(pair, 7) == [None, None]
    first.propose(everywhere)
    assert _all_at(pair, 8) == [None, None]
    for decided in _all_at(pair, 9):
        assert (decided["rule"], decided["ranks"]) == ("loss-flat", [0, 1])


def test_a_rule_that_waits_for_all_ranks_does_not_hold_back_another_rules_stop(pair):
    first = pair[0]
    first.propose({"rule": "loss-flat", "severity": 3, "order": 0, "unanimous": True})
    first.propose(STOP)
    assert _all_at(pair, 4) == [None, None]
    for decided in _all_at(pair, 5):
        assert (decided["rule"], decided["ranks"]) == ("loss-not-finite", [0])


def _all_at(ranks, step):
    return [rank.exchange(step) for rank in ranks]
