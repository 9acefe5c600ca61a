"""The agreement of ranks through a store: who may leave, and when."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from healthcheck.instrument import agreement
from healthcheck.instrument.agreement import StoreAgreement
from healthcheck.run.actor import CHECKPOINT, MUTE

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
    assert _all_at(pair, 4) == [[], []]
    assert [decided["ranks"] for (decided,) in _all_at(pair, 5)] == [[1], [1]]
    leaving = threading.Thread(daemon=True, target=first.close)
    leaving.start()
    leaving.join(0.3)
    assert leaving.is_alive()
    second.close()
    leaving.join(120)
    assert not leaving.is_alive()


def test_all_ranks_mute_a_rule_at_one_step_however_many_ask_and_again_when_asked_later(pair):
    mute = {"rule": MUTE, "cause": "loss-spike", "steps": 100, "reason": "known"}
    other = {**mute, "cause": "slow-steps"}
    pair[0].propose(mute)
    pair[0].propose(other)
    pair[1].propose({**mute, "reason": "known, too"})
    assert _all_at(pair, 4) == [[], []]
    for decided in _all_at(pair, 5):
        assert [(d["rule"], d["cause"], d["reason"]) for d in decided] == [
            (MUTE, "loss-spike", "known"),
            (MUTE, "slow-steps", "known"),
        ]
    assert _all_at(pair, 6) == _all_at(pair, 7) == [[], []]
    pair[0].propose(mute)
    assert _all_at(pair, 8) == [[], []]
    assert [[d["cause"] for d in decided] for decided in _all_at(pair, 9)] == [["loss-spike"]] * 2


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
    for (decided,) in _all_at(pair, 5):
        assert (decided["rule"], decided["path"], decided["folder"]) == (CHECKPOINT, "of-0.pt", "of-0")
    pair[1].propose(STOP)
    pair[0].propose({"rule": CHECKPOINT, "path": "last.pt"})
    assert _all_at(pair, 6) == [[], []]
    # What was asked for until all have decided goes along with it.
    assert [[d["rule"] for d in decided] for decided in _all_at(pair, 7)] == [[CHECKPOINT, "loss-not-finite"]] * 2


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
    """All ranks at the end of one step: each waits there for the others where something is to be decided."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: rank.exchange(step), ranks))


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


# --------------------------------------------------------------------------- ranks out of step


def soak(seed: int, *, every: int, ranks: int = 3, steps: int = 60, dies: bool = False) -> list[tuple[int, str, float]]:
    """Ranks as threads, each as fast as it likes, that meet in a collective every so many steps; one asks for a stop.

    Returns of each rank its last step, why it no longer agrees (empty: it does), and the seconds of its longest exchange.
    """
    store = pytest.importorskip("torch.distributed").HashStore()
    choose = random.Random(seed)
    asks, at = choose.randrange(ranks), choose.randrange(1, steps - every)
    paces = [choose.choice((0.0, 0.0005, 0.003)) for _ in range(ranks)]
    late = choose.randrange(ranks)
    victim = (asks + 1) % ranks if dies else -1
    meeting = threading.Barrier(ranks)
    ends: list[tuple[int, str, float]] = [(0, "", 0.0)] * ranks

    def run(rank: int) -> None:
        mine = StoreAgreement(store, rank, ranks, sync_every=1, note=lambda text: None, patience=0.3)
        longest, step = 0.0, 0
        if rank == late:
            time.sleep(0.1)
        for step in range(1, steps + 1):
            time.sleep(paces[rank])
            if rank == victim and step == at:
                meeting.abort()
                break
            if step % every == 0:
                try:
                    meeting.wait(60)
                except threading.BrokenBarrierError:
                    break
            if rank == asks and step == at:
                mine.propose(STOP)
            began = time.monotonic()
            decided = mine.exchange(step)
            longest = max(longest, time.monotonic() - began)
            if decided:
                break
        ends[rank] = step, mine.broken, longest
        mine.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a rank hangs"
    return ends


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("every", [1, 7, 30])
def test_ranks_out_of_step_stop_together_or_all_only_report(every, seed, monkeypatch):
    monkeypatch.setattr(agreement, "PARTING_SECONDS", 1.0)
    ends = soak(seed, every=every)
    assert len({step for step, _, _ in ends}) == 1, "one rank left alone"
    assert max(longest for _, _, longest in ends) < 2.0
    if every == 1:
        assert {broken for _, broken, _ in ends} == {""}
        assert ends[0][0] < 60, "ranks in step do stop"


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_dies_holds_up_the_others_for_a_moment_only(seed, monkeypatch):
    monkeypatch.setattr(agreement, "PARTING_SECONDS", 1.0)
    assert max(longest for _, _, longest in soak(seed, every=5, dies=True)) < 2.0


def test_healthy_ranks_far_apart_do_not_wait_for_each_other(store):
    """Local SGD: one rank may be many steps ahead of another, and nobody has asked for anything."""
    ranks = [StoreAgreement(store, rank, 2, sync_every=1, note=pytest.fail) for rank in (0, 1)]
    for step in range(1, 40):
        ranks[1].exchange(step)
    began = time.monotonic()
    for step in range(1, 31):
        ranks[0].exchange(step)
    for step in range(40, 60):
        ranks[1].exchange(step)
    assert time.monotonic() - began < 1.0
    assert [rank.broken for rank in ranks] == ["", ""]


def test_giving_up_is_heard_by_all_ranks(store, monkeypatch):
    """A rank that decides for itself that nobody agrees any more would be the only one that goes on, or the only one to leave."""
    monkeypatch.setattr(agreement, "ROUNDS", 2)
    notes: list[str] = []
    ranks = [StoreAgreement(store, rank, 2, sync_every=1, note=notes.append, patience=0.01) for rank in (0, 1)]
    for rank in ranks:
        rank.exchange(1)
    ranks[1].exchange(1)
    ranks[1].propose(STOP)
    for step in range(2, 10):
        assert ranks[1].exchange(step) == []
    assert ranks[1].broken == "the ranks were at no step together"
    assert ranks[0].exchange(2) == []
    assert ranks[0].broken == ranks[1].broken
    assert len(notes) == 2


def test_a_question_that_cannot_be_written_costs_the_other_ranks_no_wait(store):
    """Its number was taken before: whoever read that waited five minutes for the content, in the middle of the training."""
    notes: list[str] = []
    ranks = [StoreAgreement(store, rank, 2, sync_every=1, note=notes.append) for rank in (0, 1)]
    for step in (1, 2):
        for rank in ranks:
            rank.exchange(step)
    ranks[0].talk.ask("mine", {"of": object()})
    began = time.monotonic()
    for step in (3, 4):
        assert [rank.exchange(step) for rank in ranks] == [[], []]
    assert time.monotonic() - began < agreement.WRITTEN_SECONDS / 2
    assert [rank.broken for rank in ranks] == ["", ""]
    (note,) = notes
    assert note.startswith("ranks are compared no longer: TypeError")


class LosesOneKey:
    """A store from which one rank cannot read a key, as over a connection that breaks at that moment."""

    def __init__(self, store, key):
        self._store, self._key = store, key

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get(self, key):
        if key.endswith(self._key):
            raise RuntimeError("connection reset")
        return self._store.get(key)


def test_a_rank_that_fails_while_the_others_wait_for_its_word_does_not_hold_them_up(store):
    notes: list[str] = []
    stores = (LosesOneKey(store, "/rank/1"), store)
    ranks = [StoreAgreement(of, rank, 2, sync_every=1, note=notes.append) for rank, of in enumerate(stores)]
    for step in (1, 2):
        for rank in ranks:
            rank.exchange(step)
    ranks[0].propose(STOP)
    began = time.monotonic()
    assert [rank.exchange(3) for rank in ranks] == [[], []]
    assert time.monotonic() - began < agreement.WRITTEN_SECONDS / 2
    assert all("rendezvous store does not answer" in rank.broken for rank in ranks)


def test_a_rank_waits_a_moment_only_for_what_another_one_never_writes(store, monkeypatch):
    """It was killed between two words."""
    monkeypatch.setattr(agreement, "WRITTEN_SECONDS", 0.2)
    notes: list[str] = []
    ranks = [StoreAgreement(store, rank, 2, sync_every=1, note=notes.append) for rank in (0, 1)]
    for step in (1, 2):
        for rank in ranks:
            rank.exchange(step)
    store.add(f"{ranks[0]._meeting}/messages", 1)
    began = time.monotonic()
    assert ranks[0].exchange(3) == []
    assert time.monotonic() - began < 60
    (note,) = notes
    assert "rendezvous store does not answer" in note


def test_rank_0_hears_at_the_end_what_failed_elsewhere_and_says_whom_it_cannot_see(pair):
    first, second = pair
    assert second.close("loss-not-finite at step 10") == ("", "", "")
    assert first.close() == ("rank 1: loss-not-finite at step 10", "", "")


def test_rank_0_hears_of_a_warning_elsewhere_which_fails_nothing(pair):
    first, second = pair
    second.close("", "loss-spike at step 7")
    assert first.close() == ("", "rank 1: loss-spike at step 7", "")


def test_a_rank_that_nobody_watches_does_not_hide_what_failed_on_a_third_one(store):
    first, third = (StoreAgreement(store, rank, 3, sync_every=1, note=lambda text: None) for rank in (0, 2))
    for step in (1, 2, 3):
        assert _all_at((first, third), step) == [[], []]
    third.close("loss-not-finite at step 3")
    assert first.close() == ("rank 2: loss-not-finite at step 3", "", "rank 1 is not watched")


def test_ranks_of_a_run_without_a_sync_point_meet_at_its_end(store):
    first, second = (StoreAgreement(store, rank, 2, sync_every=10, note=pytest.fail) for rank in (0, 1))
    for rank in (first, second):
        assert rank.exchange(3) == []
    with ThreadPoolExecutor(2) as pool:
        ends = pool.submit(first.close), pool.submit(second.close, "loss-not-finite at step 3")
    assert [end.result() for end in ends] == [("rank 1: loss-not-finite at step 3", "", ""), ("", "", "")]


def test_a_rank_that_stands_in_for_rank_0_hears_the_others(store):
    second, third = (
        StoreAgreement(store, rank, 3, sync_every=1, note=lambda text: None, speaks=rank == 1) for rank in (1, 2)
    )
    for step in (1, 2):
        _all_at((second, third), step)
    third.close("loss-not-finite at step 2")
    assert second.close() == ("rank 2: loss-not-finite at step 2", "", "rank 0 is not watched")


def test_a_rank_knows_whether_the_one_that_speaks_hears_of_its_end(pair, store):
    first, second = pair
    second.close("loss-not-finite at step 3")
    first.close()
    assert [rank.unheard for rank in pair] == ["", ""]
    late, early = _training(store, (1, 0))
    for step in (1, 2, 3):
        assert _all_at((late, early), step) == [[], []]
    early.close()
    late.close("loss-not-finite at step 30")
    assert late.unheard == "the rank that speaks for all had ended before"


def test_a_rank_whose_end_is_read_at_once_knows_that_it_is_heard(store):
    """The one that speaks waits for it, and has read it before its own next word to the store."""

    class Slow:
        """A store whose answer to this rank's being done takes a moment."""

        def __getattr__(self, name):
            return getattr(store, name)

        def add(self, key, amount):
            answer = store.add(key, amount)
            if key.endswith("/done") and amount:
                time.sleep(0.5)
            return answer

    first = StoreAgreement(store, 0, 2, sync_every=1, note=pytest.fail)
    second = StoreAgreement(Slow(), 1, 2, sync_every=1, note=pytest.fail)
    for step in (1, 2):
        _all_at((first, second), step)
    with ThreadPoolExecutor(2) as pool:
        ends = pool.submit(first.close), pool.submit(second.close, "loss-not-finite at step 3")
    assert [end.result().failed for end in ends] == ["rank 1: loss-not-finite at step 3", ""]
    assert second.unheard == ""


def test_a_rank_that_takes_longer_over_a_stop_of_all_leaves_it_to_the_one_that_speaks(pair, monkeypatch):
    for name in ("PARTING_SECONDS", "ENDS_SECONDS"):
        monkeypatch.setattr(agreement, name, 0.0)  # the other writes its evidence for longer
    first, second = pair
    second.propose(STOP)
    assert _all_at(pair, 4) == [[], []]
    assert [decided["ranks"] for (decided,) in _all_at(pair, 5)] == [[1], [1]]
    first.close("loss-not-finite at step 5")
    second.close("loss-not-finite at step 5")
    assert second.unheard == ""


def test_a_rank_speaks_up_for_a_stop_that_was_decided_after_the_one_that_speaks_had_ended(pair, monkeypatch):
    monkeypatch.setattr(agreement, "ENDS_SECONDS", 0.0)
    first, second = pair
    first.close()
    second.propose(STOP)
    decided = [stop["rule"] for step in (4, 5) for stop in second.exchange(step)]
    assert decided == ["loss-not-finite"]
    second.close("loss-not-finite at step 5")
    assert second.unheard == "the rank that speaks for all had ended before"


def test_a_rank_knows_that_none_speaks_or_that_the_store_has_gone(store):
    second, third = (
        StoreAgreement(store, rank, 3, sync_every=1, note=lambda text: None, speaks=False) for rank in (1, 2)
    )
    for step in (1, 2):
        _all_at((second, third), step)
    third.close("loss-not-finite at step 2")
    assert third.unheard == "no rank speaks for all"
    second.store = None
    second.close("loss-not-finite at step 9")
    assert second.unheard == "the rendezvous store does not answer"


# --------------------------------------------------------------------------- when updates may be held back


def test_ranks_in_step_hold_back_updates_from_the_same_step_on_and_until_the_same_step(store):
    """One that holds back its update before another knows that all are there would have other weights from then on."""
    ranks = [StoreAgreement(store, rank, 3, sync_every=2, note=lambda text: None) for rank in range(3)]
    for rank in (1, 0, 2):  # the last one sees all at once, the others at their next sync point
        ranks[rank].exchange(2)
    assert {rank.together(step) for rank in ranks for step in (1, 2, 3, 4)} == {False}
    _all_at(ranks, 4)
    assert {rank.together(step) for rank in ranks for step in (5, 6, 100)} == {True}
    ranks[1]._give_up("for a test", 6)
    for rank in (0, 2):
        ranks[rank].exchange(8)
    assert [[rank.together(step) for step in (7, 8, 9)] for rank in ranks] == [[True, True, False]] * 3


def test_where_a_rank_is_not_watched_no_update_is_held_back_by_the_others_alone(store):
    ranks = [StoreAgreement(store, rank, 3, sync_every=1, note=lambda text: None) for rank in (0, 1)]
    for step in range(1, 8):
        _all_at(ranks, step)
    assert {rank.together(step) for rank in ranks for step in (1, 7, 8)} == {False}


def test_a_rank_that_begins_late_is_not_called_unwatched(store):
    """Two hundred quick steps are over before a rank that loads its data has made its first."""
    early = StoreAgreement(store, 1, 2, sync_every=1, note=pytest.fail)
    for step in range(1, 200):
        early.exchange(step)
    late = StoreAgreement(store, 0, 2, sync_every=1, note=pytest.fail)
    late.exchange(1)
    early.exchange(200)
    assert [rank.broken for rank in (late, early)] == ["", ""]


def test_rank_0_does_not_vouch_for_a_rank_that_goes_on(pair, monkeypatch):
    monkeypatch.setattr(agreement, "ENDS_SECONDS", 0.1)
    assert pair[0].close() == ("", "", "rank 1 goes on, or died")
