"""Values on the host are read at once; the device side is tested where there is a device."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from standin import LateMemory, written

from healthcheck.core.rows import StepRow
from healthcheck.core.samples import Sample
from healthcheck.device import tensors
from healthcheck.device.deferred import SLOTS, DeviceScalar, DeviceVector, Slots
from healthcheck.device.mailbox import StepMailbox, Transfer, _packed
from healthcheck.device.pages import OwnPage

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")


def test_host_values_arrive_at_once_in_order_as_numbers() -> None:
    mailbox = StepMailbox()
    mailbox.post(1, [Sample("a", 1, torch.tensor(0.5)), Sample("b", 1, 2), Sample("c", 1, True)])
    mailbox.post(2, [Sample("a", 2, 1.5)])
    arrived = mailbox.ready()
    assert [(s.metric, s.step, s.value) for s in arrived] == [
        ("a", 1, 0.5),
        ("b", 1, 2.0),
        ("c", 1, 1.0),
        ("a", 2, 1.5),
    ]
    assert all(type(s.value) is float for s in arrived)
    assert mailbox.ready() == [] == mailbox.drain()


def test_what_is_no_number_is_not_delivered() -> None:
    mailbox = StepMailbox()
    mailbox.post(1, [Sample("text", 1, "fine"), Sample("vector", 1, torch.ones(3)), Sample("a", 1, 1.0)])
    assert [s.metric for s in mailbox.ready()] == ["a"]


def test_nan_is_delivered() -> None:
    mailbox = StepMailbox()
    mailbox.post(1, [Sample("loss", 1, torch.tensor(float("nan")))])
    (sample,) = mailbox.ready()
    assert sample.value != sample.value


def test_where_every_read_is_a_wait_values_are_read_in_one_step_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "HOST", frozenset())
    mailbox = StepMailbox()
    for step in range(1, 26):
        mailbox.post(step, [Sample("loss", step, torch.tensor(float(step))), Sample("lr", step, 0.1)])
    arrived = mailbox.ready()
    assert [s.step for s in arrived if s.metric == "loss"] == [10, 20]
    assert [s.step for s in arrived if s.metric == "lr"] == list(range(1, 26))
    assert [(s.step, s.value) for s in mailbox.drain()] == [(25, 25.0)]


@pytest.mark.gpu
@needs_cuda
def test_device_values_come_late_complete_and_without_a_wait() -> None:
    mailbox = StepMailbox()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 5):
            value = torch.full((), float(step), device="cuda")
            mailbox.post(step, [Sample("loss", step, value), Sample("lr", step, 0.1)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    arrived = mailbox.drain()
    assert [(s.metric, s.step, s.value) for s in arrived if s.metric == "loss"] == [
        ("loss", step, float(step)) for step in range(1, 5)
    ]


@pytest.mark.gpu
@needs_cuda
def test_the_number_under_way_is_bounded() -> None:
    mailbox = StepMailbox(max_in_flight=2)
    torch.cuda._sleep(2_000_000_000)
    for step in range(10):
        mailbox.post(step, [Sample("loss", step, torch.ones((), device="cuda")), Sample("lr", step, 0.1)])
    assert mailbox.dropped == 8
    arrived = mailbox.drain()
    assert sum(s.metric == "lr" for s in arrived) == 10
    assert sum(s.metric == "loss" for s in arrived) == 2


def sent(transfer: Transfer, own: Slots | None = None) -> list[float]:
    """What stands on the page that a transfer is copied to, scalars first."""
    packed, begin = _packed(transfer, own or Slots(torch.zeros(SLOTS, dtype=torch.float64), SLOTS))
    numbers = packed.double().tolist()
    return numbers[: len(transfer.tensors)] + numbers[begin:] if transfer.vectors else numbers[: len(transfer.tensors)]


def transfer_of(scalars: list[torch.Tensor], vectors: list[DeviceVector]) -> Transfer:
    transfer = Transfer(0)
    for leaf in (*map(DeviceScalar, scalars), *vectors):
        transfer.add(leaf)
    return transfer


@pytest.mark.parametrize("count", [0, 1, 3, 9, SLOTS, SLOTS + 5])
@pytest.mark.parametrize("vectors", [0, 1, 2])
@pytest.mark.parametrize("slots", [False, True], ids=["without slots", "with slots"])
def test_scalars_and_vectors_of_any_type_are_packed_into_one_vector(count: int, vectors: int, slots: bool) -> None:
    """As on a device; only the copy itself needs one."""
    types = [torch.float32, torch.int64, torch.bfloat16, torch.bool]
    scalars = [torch.tensor(n % 2, dtype=types[n % 4]).reshape([1] * (n % 3)) for n in range(count)]
    given = []
    for n in range(vectors):
        whole = torch.zeros(SLOTS + 3, dtype=torch.float64)
        whole[SLOTS:] = torch.tensor([n + 0.5, math.nan, math.inf])
        given.append(DeviceVector(whole[SLOTS:], Slots(whole, SLOTS)) if slots else DeviceVector(whole[SLOTS:].clone()))
    if not count and not vectors:
        return
    found = sent(transfer_of(scalars, given))
    wanted = [float(n % 2) for n in range(count)]
    for n in range(vectors):
        wanted += [n + 0.5, math.nan, math.inf]
    assert found == pytest.approx(wanted, nan_ok=True)


def test_what_two_samples_are_made_of_is_sent_once() -> None:
    loss, vector = torch.tensor(1.5), DeviceVector(torch.tensor([2.0, 3.0]))
    transfer = transfer_of([loss, loss], [vector, vector])
    assert sent(transfer) == [1.5, 2.0, 3.0]


def test_a_vector_that_the_device_writes_to_the_host_itself_is_not_copied() -> None:
    vector = written([2.0, 3.0], looks=2)
    memory = LateMemory()
    mailbox = StepMailbox(memory=memory)
    mailbox.post(1, [Sample("a", 1, vector[1])])
    mailbox.post(2, [Sample("b", 2, 0.5)])
    assert mailbox.oldest == 1
    assert mailbox.ready() == [] == mailbox.ready(), "its mark does not stand there yet, and nothing overtakes it"
    assert [(s.metric, s.value) for s in mailbox.ready()] == [("a", 3.0), ("b", 0.5)]
    assert vector.tensor is None
    assert vector.own_page is None, "the page is free for other numbers"
    assert memory.copies == 0


def test_who_asks_for_everything_waits_for_what_the_device_writes() -> None:
    vector = written([2.0, 3.0], looks=100)
    mailbox = StepMailbox(memory=LateMemory())
    mailbox.post(1, [Sample("a", 1, vector[0])])
    assert [(s.metric, s.value) for s in mailbox.drain()] == [("a", 2.0)]


def test_rows_have_what_a_device_has_written_as_soon_as_its_mark_stands_there() -> None:
    mailbox = StepMailbox(memory=LateMemory())
    rows = []
    for step in (1, 2, 3):
        loss = DeviceScalar(torch.tensor(0.0))
        row = StepRow(step, loss=loss, numbers=written([7.0, step / 2], looks=3 * (step == 2)))
        loss.vector, loss.position, loss.tensor = row.numbers, 1, None
        rows.append(row)
    assert mailbox.receive(rows) == 2 == mailbox.oldest
    assert rows[0].loss == 0.5
    assert rows[0].numbers is None
    assert rows[1].loss.value() == 1.0, "who cannot do without it waits"
    assert mailbox.receive(rows) is None
    assert [row.loss for row in rows] == [0.5, 1.0, 1.5]


@pytest.mark.gpu
@needs_cuda
def test_a_page_is_used_again_when_its_numbers_were_read_or_nobody_can_ask_for_them() -> None:
    page = OwnPage(2)
    assert page.free
    page.awaited, vector = 5, DeviceVector(torch.zeros(2), None, page, 5)
    page.holder = weakref.ref(vector)
    assert not page.free
    page.mark.value = 5
    assert not page.free, "somebody may ask for its numbers"
    assert vector.here
    assert page.free
    page.awaited, vector = 6, DeviceVector(torch.zeros(2), None, page, 6)
    page.holder = weakref.ref(vector)
    del vector
    assert not page.free, "the device may still write to it"
    page.mark.value = 6
    assert page.free
