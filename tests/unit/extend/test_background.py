"""The sender that plugins share: it never blocks, tries again, and ends within its time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from healthcheck import BackgroundSender, NotSent, find_runs, read_run


class Place:
    """Where things are sent: it fails as often as ``fails`` says, and hangs while ``hold`` is held."""

    def __init__(self, fails: int = 0, error: Exception | None = None) -> None:
        self.got: list[list[str]] = []
        self.calls: list[float] = []
        self.fails = fails
        self.error = error or NotSent("it answered 503")
        self.hold = threading.Lock()

    def __call__(self, items: Sequence[str]) -> None:
        self.calls.append(time.monotonic())
        with self.hold:
            pass
        if self.fails:
            self.fails -= 1
            raise self.error
        self.got.append(list(items))


def sender_to(place: Place, **keys: object) -> BackgroundSender[str]:
    return BackgroundSender(place, name="test", **{"pause": 0.01, **keys})  # type: ignore[arg-type]


def test_what_was_put_arrives_in_order_before_close_returns() -> None:
    place = Place()
    sender = sender_to(place)
    assert all(sender.put(word) for word in "abc")
    assert sender.close() == []
    assert place.got == [["a"], ["b"], ["c"]]
    assert sender.sent == 3


def test_nothing_is_started_where_nothing_is_put() -> None:
    before = threading.active_count()
    sender = sender_to(Place())
    assert threading.active_count() == before
    assert sender.close() == []


def test_what_fails_is_tried_again_with_longer_pauses() -> None:
    place = Place(fails=3)
    sender = sender_to(place, pause=0.05)
    sender.put("a")
    while not place.got:
        time.sleep(0.005)
    first, second, third, fourth = place.calls
    assert second - first >= 0.05
    assert third - second >= 0.1
    assert fourth - third >= 0.2
    assert sender.close() == []


def test_after_its_attempts_an_item_is_given_up_with_the_last_reason_and_the_next_is_sent() -> None:
    place = Place(fails=2)
    sender = sender_to(place, attempts=2)
    sender.put("a")
    sender.put("b")
    while not place.got:
        time.sleep(0.005)
    assert [(lost.item, lost.reason) for lost in sender.close()] == [("a", "it answered 503")]
    assert place.got == [["b"]]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotSent("it refused: 403", again=False), "it refused: 403"),
        (ValueError("https://user:secret@host"), "ValueError"),
    ],
)
def test_what_cannot_get_better_is_not_tried_again_and_the_text_of_other_errors_is_not_kept(
    error: Exception, reason: str
) -> None:
    place = Place(fails=9, error=error)
    sender = sender_to(place)
    sender.put("a")
    assert [lost.reason for lost in sender.close()] == [reason]
    assert len(place.calls) == 1


def test_a_hanging_side_costs_put_nothing_and_close_no_more_than_its_time() -> None:
    place = Place()
    with place.hold:
        sender = sender_to(place)
        for word in ("a", "b", "c"):
            sender.put(word)
        began = time.monotonic()
        lost = sender.close(within=0.3)
        took = time.monotonic() - began
    assert 0.25 <= took < 2
    assert [one.item for one in lost] == ["a", "b", "c"]
    assert all("not sent before the end of the run" in one.reason for one in lost)


def test_two_senders_spend_their_last_seconds_together() -> None:
    places = [Place(), Place()]
    senders = [sender_to(place) for place in places]
    with places[0].hold, places[1].hold:
        for sender in senders:
            sender.put("a")
            sender.begin_closing(within=0.5)
        began = time.monotonic()
        assert [len(sender.close()) for sender in senders] == [1, 1]
        assert time.monotonic() - began < 0.9


def test_at_the_end_long_pauses_are_cut_short() -> None:
    place = Place(fails=1, error=NotSent("busy", after=60))
    sender = sender_to(place, longest_pause=60)
    sender.put("a")
    while not place.calls:
        time.sleep(0.005)
    assert sender.close(within=3) == []
    assert place.got == [["a"]]


def test_a_gap_between_sends_makes_batches_of_what_comes_meanwhile() -> None:
    place = Place()
    sender = sender_to(place, gap=0.2, batch=10)
    sender.put("a")
    while not place.got:
        time.sleep(0.005)
    for word in "bcd":
        sender.put(word)
    assert sender.close() == []
    assert place.got == [["a"], ["b", "c", "d"]]


def test_a_full_queue_drops_ordinary_items_and_keeps_important_ones() -> None:
    place = Place()
    with place.hold:
        sender = sender_to(place, capacity=2)
        sender.put("under way")
        while not place.calls:
            time.sleep(0.005)
        assert sender.put("a")
        assert sender.put("b")
        assert not sender.put("c")
        assert sender.put("alert", important=True)
        assert sender.dropped == 2
    assert sender.close() == []
    assert [items[0] for items in place.got] == ["under way", "b", "alert"]


def test_a_forked_child_sends_nothing() -> None:
    place = Place()
    sender = sender_to(place)
    sender.put("a")
    child = os.fork()
    if not child:
        os._exit(0 if not sender.put("b") and sender.close() == [] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sender.close() == []
    assert place.got == [["a"]]


LOGS = """
import torch
from healthcheck import BackgroundSender
from torch.utils.tensorboard import SummaryWriter

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
writer = SummaryWriter("events")
sender = BackgroundSender(lambda items: [writer.add_scalar("sent", n, n) for n in items], name="test")
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()
    sender.put(step)
    writer.add_scalar("own", step, step)
assert sender.close() == []
"""


def test_what_a_sender_logs_is_not_taken_for_the_scripts_own(
    tmp_path: Path, healthcheck_command: Callable[..., Any]
) -> None:
    """A plugin that sends samples to TensorBoard must not hear of them again."""
    pytest.importorskip("tensorboard")
    (tmp_path / "train.py").write_text(LOGS)
    result = healthcheck_command("run", "train.py")
    assert result.returncode == 0, result.stderr
    [found] = find_runs([str(tmp_path / "runs" / "latest")])
    names = read_run(found).series()
    assert "own" in names
    assert "sent" not in names
