"""What a rank says of its copy of the model, so that it can be compared with those of other ranks.

Read at the moment before an update, when weights are those of the step, gradients are final and the state is that of the update
before. Two steps in a row now and then: who averages gradients in every other step only is caught in one of them.
"""

from __future__ import annotations

import operator
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from healthcheck.core.digest import sha256
from healthcheck.core.events import Event, EventKind, ModelView
from healthcheck.core.protocols import Demand
from healthcheck.core.rows import StepRow, Update
from healthcheck.core.runinfo import RankTalk, RunFacts, weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.checksums import Sums, checksums, folded, parts_for, positional_sums
from healthcheck.device.sampling import strided_view
from healthcheck.device.tensors import GRADIENT, local_part, no_grad, on_host
from healthcheck.probes.batches import content_hash, named_tensors
from healthcheck.probes.gradients import waiting_allowed
from healthcheck.probes.labels import first_few
from healthcheck.probes.parity import SLOTS, Found, ParityJudge, common, group_text, slots_of
from healthcheck.probes.replica_groups import Copies, averages, copies_of, state_of

FIRST = 5
"""The step of the first comparison."""
EVERY = 50
"""Steps from one comparison to the next, where no rule says otherwise."""
SHARE = 0.001
"""Part of the training time that reading may take; where it takes more, comparisons are made half as often, and so on."""
SPARSEST = 64
"""How many times as seldom at most."""
MOST = {"cpu": 1 << 22}
MOST_ELSEWHERE = 1 << 26
"""Elements of all weights (and of the state) that are summed up in one comparison. The next one takes the next part, so that
all bits have had their turn after a few."""
GRADIENT_ELEMENTS = 256
"""Elements of a gradient that are compared. Gradients that are not averaged differ in all of them."""
VALUES = 64
"""Elements of a tensor that ranks show each other once it is known to differ."""
REPLY_WITHIN = 40
"""Steps after a comparison in which questions may come."""
KEPT = 3
"""Comparisons of which the checksums of each tensor are kept, for questions."""
ODD = 8
"""Steps with unusual writes to the weights that are kept in mind."""

_VERSION = operator.attrgetter("_version")


@dataclass(slots=True)
class _Reading:
    """What was read for one comparison, as long as a device has not delivered all of it."""

    step: int
    copies: Copies
    word: dict[str, Any]
    gradients: list[Sums] = field(default_factory=list)
    weights: Sums | None = None
    state: Sums | None = None
    rows: list[StepRow] = field(default_factory=list)
    batches: list[int | None] = field(default_factory=list)


class ReplicaProbe:
    """Reads on every rank, and judges on the one that hears the others.

    Copies are what ``DistributedDataParallel`` wraps, less what it is shown to ignore, and what a device mesh replicates (HSDP).
    Buffers are none: running statistics of ranks differ by design.
    """

    name = "replicas"
    listens_to: tuple[EventKind, ...] = (EventKind.TRAIN_START, EventKind.BATCH_READY, EventKind.BEFORE_UPDATE)
    noted = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "ddp.replaced_parameters",
            "Trainable parameters of a DDP model that are others than those that were wrapped: their gradients are not averaged.",
            cost=Cost.HOST,
            needs=("DistributedDataParallel on several ranks",),
        ),
        *(
            Metric(f"ranks.{name}", help, cost=Cost.DEVICE, needs=("several ranks with copies of one model",))
            for name, help in (
                (
                    "gradients_apart",
                    "Ranks whose gradients differ from those of most when they update their copy of the model.",
                ),
                (
                    "weights_apart",
                    "Ranks whose copy of the weights differs from that of most, in a way that has no other name.",
                ),
                ("single_value_apart", "Ranks whose copy of the weights differs from that of most in a single value."),
                (
                    "changed_apart",
                    "Ranks that changed their copy of the weights outside of an update, when others did not.",
                ),
                ("state_apart", "Ranks whose optimizer state differs from that of most, at equal weights."),
            )
        ),
        *(
            Metric(f"ranks.{name}", help, cost=Cost.HOST, needs=("several data-parallel ranks",))
            for name, help in (
                ("lr_apart", "Data-parallel ranks whose learning rate differs from that of most."),
                (
                    "start_apart",
                    "Ranks that differ from most in software, script, optimizer settings or the tensors of the model.",
                ),
                ("equal_batches", "Data-parallel ranks that were given the same two batches in a row as another one."),
            )
        ),
    )

    def __init__(self) -> None:
        self.idle = True
        """Nothing to do, as on a single rank: the board leaves a probe out that says so."""
        self.rests_until = self.events_from = 0
        self._run: RunFacts | None = None
        self._every = EVERY
        self._sparse = 1
        self._judge = ParityJudge()
        self._copies: Copies | None = None
        self._reading: _Reading | None = None
        self._kept: deque[tuple[int, list[str], list[int], list[int]]] = deque(maxlen=KEPT)
        """Step, names, checksums and sizes of the last comparisons."""
        self._owes: tuple[int, dict[str, Any]] | None = None
        """A question about values that is answered at this step."""
        self._answering: tuple[int, dict[str, Any], list[str], Sums, list[Any]] | None = None
        self._optimizer: Callable[[], Any] = lambda: None
        self._state: tuple[list[Any], int] = ([], 0)
        self._writes: tuple[int, int] | None = None
        """Step and sum of the version counters at the last look."""
        self._usual: deque[int] = deque(maxlen=9)
        self._odd: deque[tuple[int, int]] = deque(maxlen=ODD)
        self._read_at = 0
        self._batch: dict[int, int | None] = {}
        self._spent = 0
        self._began: tuple[int, int] | None = None
        self._said_start = False
        self._found: list[Sample] = []

    def plan(self, demand: Demand) -> None:
        """The shortest interval that a rule asks for."""
        wanted = [demand.every_of(metric.key) for metric in self.provides if demand.wants(metric.key)]
        self._every = min([every for every in wanted if every > 1], default=EVERY)

    # -- when ---------------------------------------------------------------------------

    @property
    def _talk(self) -> RankTalk | None:
        return self._run.ranks if self._run is not None else None

    def _checks_at(self, step: int) -> int | None:
        """The comparison to which a step belongs: its own, or that of the next one; None if to none."""
        every = self._every * self._sparse
        for check in (step, step + 1):
            if check % every == 0 or (check == FIRST and every > FIRST):
                return check
        return None

    def _next(self, step: int) -> int:
        """The first step after this one that is read."""
        if step < FIRST - 1:
            return FIRST - 1
        every = self._every * self._sparse
        if self._checks_at(step) == step + 1:
            return step + 1
        return max(step + 1, step - step % every + every - 1)

    def _rest(self, step: int) -> None:
        self.events_from = self.rests_until = self._next(step)
        talk = self._talk
        waits = self._reading is not None or self._owes is not None or self._answering is not None
        if waits or (talk is not None and self._read_at and step < self._read_at + REPLY_WITHIN):
            self.rests_until = step + 1  # where no rows are noted, this is the only way to be asked again

    # -- what the board calls ---------------------------------------------------------------

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.TRAIN_START:
            self._run = event.run
            self.idle = event.run is None or event.run.world_size < 2
            if self.idle:
                self.rests_until = self.events_from = sys.maxsize
            else:
                self._rest(max(0, event.step - 1))
            return ()
        if self.idle or self._run is None:
            return ()
        if event.kind is EventKind.BATCH_READY:
            if self._checks_at(event.step) is not None and event.step not in self._batch:
                self._batch = {k: v for k, v in self._batch.items() if k >= event.step - 1}
                self._batch[event.step] = content_hash(list(named_tensors(event.batch)))
            return ()
        if event.row is None and event.optimizer is not None and event.optimizer_index == 0 and event.model is not None:
            self._look(event.step, event.optimizer, event.model, None)
        self._turn(event.step)
        self._rest(event.step)
        found, self._found = self._found, []
        return found

    def look(self, row: StepRow, update: Update) -> None:
        """The moment before an update that is noted in a row."""
        if self.idle or update.optimizer_index or not update.final or update.optimizer is None:
            return
        self._look(row.step, update.optimizer, update.model, row)

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        if self.idle or not rows[-1].over:
            return ()
        step = rows[-1].step
        self._turn(step)
        self._rest(step)
        found, self._found = self._found, []
        for sample in found:
            sample.time = rows[-1].time
        return found

    # -- reading --------------------------------------------------------------------------

    def _look(self, step: int, optimizer: Any, model: ModelView, row: StepRow | None) -> None:
        began = perf_counter_ns()
        if self._copies is not None:
            self._count_writes(step)
        check = self._checks_at(step)
        if check is not None and self._read_at != step:
            self._read_at = step
            with no_grad():
                self._read(step, check, optimizer, model, row)
            self._spent += perf_counter_ns() - began
        owes = self._owes
        if owes is not None and step >= owes[0]:
            self._owes = None
            if step == owes[0]:
                with no_grad():
                    self._show_values(step, owes[1])

    def _count_writes(self, step: int) -> None:
        """Torch counts the writes to each tensor. Between two updates there are always as many, but for an unusual one."""
        assert self._copies is not None
        total = sum(map(_VERSION, self._copies.params))
        before, self._writes = self._writes, (step, total)
        if before is None or step != before[0] + 1:
            return
        extra = total - before[1]
        if len(self._usual) == self._usual.maxlen and extra != common(self._usual):
            self._odd.append((step - 1, extra - common(self._usual)))
        self._usual.append(extra)

    def _read(self, step: int, check: int, optimizer: Any, model: ModelView, row: StepRow | None) -> None:
        assert self._run is not None
        known = self._copies
        copies = self._copies = copies_of(self._run, model, optimizer)
        self._run.replicas.data_group = copies.data_group if copies is not None else ()
        if copies is None or (known is not None and known.layout != copies.layout):
            self._writes = None
            self._usual.clear()
        self._find_replaced(step)
        if copies is None:
            self._reading = None
            return
        if step < check or self._reading is None or self._reading.step != check:
            self._reading = _Reading(check, copies, {})
        reading = self._reading
        gradients = [None if g is None else _sampled(g) for g in map(GRADIENT, copies.params)]
        if copies.group:
            reading.gradients.append(checksums(gradients))
        if row is not None:
            reading.rows.append(row)
        reading.batches.append(self._batch.get(step))
        if step < check:
            reading.word["y"] = int(averages(self._run, copies))
            return
        self._finish_reading(reading, copies, optimizer, check)

    def _finish_reading(self, reading: _Reading, copies: Copies, optimizer: Any, check: int) -> None:
        assert self._run is not None
        word = reading.word
        turn = check // self._every
        if copies.group:
            most = MOST.get(local_part(copies.params[0]).device.type, MOST_ELSEWHERE)
            parts = parts_for(copies.elements, most)
            reading.weights = checksums(copies.params, turn % parts, parts)
            if self._optimizer() is not optimizer or turn < 3 or turn % 10 == 0:
                self._optimizer, self._state = weak(optimizer), state_of(optimizer, copies)
            state, word["u"] = self._state
            if (
                any(group.get("weight_decay") for group in optimizer.param_groups)
                and "W" not in type(optimizer).__name__
            ):
                word["z"] = 1  # decay that goes through the gradients: the state depends on the weights
            if state:
                parts = parts_for(sum(int(t.numel()) for t in state), most)
                reading.state = checksums(state, turn % parts, parts)
        word["y"] = int(word.get("y", 1) and averages(self._run, copies))
        word["g"], word["d"] = group_text(copies.group), group_text(copies.data_group)
        word["l"], word["c"], word["m"] = copies.layout, len(copies.params), copies.wrapped
        word["r"] = [_rate(group.get("lr")) for group in optimizer.param_groups[:8]]
        if None in word["r"]:
            del word["r"]
        if not self._said_start:
            self._said_start = True
            word["s"] = _start(optimizer)

    def _find_replaced(self, step: int) -> None:
        assert self._run is not None
        wrappers = self._run.replicas.wrappers()
        if not wrappers:
            return
        replaced: list[str] = []
        for wrapper in wrappers:
            held = {id(p) for p in getattr(wrapper, "_module_parameters", None) or wrapper.module.parameters()}
            ignored = getattr(wrapper, "parameters_to_ignore", ())
            replaced += [
                name
                for name, p in wrapper.module.named_parameters()
                if p.requires_grad and id(p) not in held and name not in ignored
            ]
        facts = {"which": first_few(replaced)} if replaced else {}
        self._found.append(Sample("ddp.replaced_parameters", step, float(len(replaced)), detail=lambda: facts))
        self._replaced = len(replaced)

    _replaced = 0

    # -- talking ----------------------------------------------------------------------------

    def _turn(self, step: int) -> None:
        """Between two steps: say what has arrived, answer, and judge what was heard."""
        talk = self._talk
        if talk is None:
            return
        if self._reading is not None and self._reading.step <= step:
            self._say(talk, self._reading)
        if self._answering is not None:
            self._say_values(talk)
        for question in talk.asked("parity"):
            self._answer(talk, question, step)
        if not talk.hears:
            return
        for check, words in talk.heard("parity"):
            self._take(self._judge.check(check, words), step)
        for check, words in talk.heard("parity.tensors"):
            self._judge.tensors(check, words)
        for check, words in talk.heard("parity.values"):
            self._take(self._judge.values(check, words), step)
        while self._judge.questions:
            question = dict(self._judge.questions.pop(0))
            if "values" in question:
                # Far enough ahead that every rank has heard of it before.
                question["step"] = step + self._ahead()
            talk.ask("parity", question)

    def _ahead(self) -> int:
        every = getattr(self._talk, "sync_every", 1)
        return 2 * int(every) + 2

    def _take(self, found: Iterable[Found], step: int) -> None:
        for one in found:
            self._found.append(Sample(one.metric, step, one.value, detail=lambda facts=one.facts: facts))  # type: ignore[misc]

    def _say(self, talk: RankTalk, reading: _Reading) -> None:
        began = perf_counter_ns()
        copies, word = reading.copies, reading.word
        weights = reading.weights.values() if reading.weights is not None else []
        state = reading.state.values() if reading.state is not None else []
        gradients = [sums.values() for sums in reading.gradients]
        if weights is None or state is None or None in gradients or any(not row.over for row in reading.rows):
            return
        self._reading = None
        if "g" not in word:  # of its two steps only one was seen
            return
        if weights:
            word["w"] = folded(weights, SLOTS)
            sizes = [int(p.numel()) for p in copies.params]
            self._kept.append((reading.step, copies.names, weights, sizes))
        if state:
            word["t"] = [zlib.crc32(repr(part).encode()) for part in (folded(state, SLOTS),)]
        if len(gradients) == 2:
            word["n"] = [zlib.crc32(repr(sums).encode()) for sums in gradients]
        if self._replaced:
            word["x"] = self._replaced
        if len(reading.batches) == 2 and None not in reading.batches:
            word["b"] = reading.batches
        losses = [_bits(row.loss) for row in reading.rows]
        if len(losses) == 2 and None not in losses:
            word["o"] = losses
        talk.say("parity", reading.step, word)
        self._pace(reading.step, perf_counter_ns() - began)

    def _pace(self, step: int, spent: int) -> None:
        """Compare half as often where reading takes more than its share of the time."""
        spent += self._spent
        self._spent = 0
        now = perf_counter_ns()
        before, self._began = self._began, (step, now)
        if before is None or step <= before[0] or self._every * self._sparse * 2 > SPARSEST * self._every:
            return
        if spent > SHARE * (now - before[1]) and step > 4 * self._every:
            self._sparse *= 2

    def _answer(self, talk: RankTalk, question: Any, step: int) -> None:
        if talk.rank not in question["of"]:
            # Its word is waited for: a short one.
            self._say_nothing(talk, question)
            return
        if "values" in question:
            self._owes = (int(question["step"]), dict(question))
            return
        for check, names, marks, sizes in self._kept:
            if check == question["step"]:
                sums = [[_short(names[i]), marks[i], sizes[i]] for i in slots_of(names, question["slots"])]
                talk.say("parity.tensors", check, {"sums": sums})
                return

    @staticmethod
    def _say_nothing(talk: RankTalk, question: Any) -> None:
        if "values" in question:
            talk.say("parity.values", int(question["step"]), {})
        else:
            talk.say("parity.tensors", int(question["step"]), {})

    def _show_values(self, step: int, question: dict[str, Any]) -> None:
        copies = self._copies
        if copies is None:
            return
        where = {_short(name): p for name, p in zip(copies.names, copies.params, strict=True)}
        names = [name for name in question["values"] if name in where]
        params = [where[name] for name in names]
        views = [strided_view(local_part(p), VALUES // (1 + 3 * bool(n))) for n, p in enumerate(params)]
        with waiting_allowed():  # it is known that something is wrong
            values = [view.cpu().double().tolist() for view in views]
        self._answering = (step, question, names, positional_sums(params), values)

    def _say_values(self, talk: RankTalk) -> None:
        assert self._answering is not None
        step, question, names, sums, values = self._answering
        numbers = sums.values()
        if numbers is None:
            return
        self._answering = None
        held, params = _both(self._copies)
        sizes = dict(zip(map(_short, held), (int(p.numel()) for p in params), strict=True))
        shown = [
            [name, sizes.get(name, 0), numbers[2 * n : 2 * n + 2], [float(f"{v:.9g}") for v in values[n]]]
            for n, name in enumerate(names)
        ]
        while len(repr(shown)) > 3500 and len(shown) > 1:
            shown.pop()
        talk.say(
            "parity.values", step, {"for": question["for"], "values": shown, "odd": [list(pair) for pair in self._odd]}
        )


def _both(copies: Copies | None) -> tuple[list[str], list[Any]]:
    return (copies.names, copies.params) if copies is not None else ([], [])


def _short(name: str) -> str:
    return name if len(name) <= 100 else f"...{name[-97:]}"


def _sampled(gradient: Any) -> Any:
    import torch

    local = local_part(gradient)
    return strided_view(local, GRADIENT_ELEMENTS) if local.layout is torch.strided and local.numel() else None


def _bits(loss: Any) -> str | None:
    """A loss to the last bit, where it has enough of them that two are not equal by chance; None of others."""
    arrived = getattr(loss, "on_device", None)
    if arrived is not None:
        loss = arrived()  # a float once it is here: nobody waits for it
    if not isinstance(loss, float) or loss - loss != 0.0:
        return None
    digits = loss.hex().partition("p")[0].rstrip("0")
    return loss.hex() if len(digits.partition(".")[2]) > 3 else None


def _rate(lr: Any) -> float | None:
    if hasattr(lr, "device"):
        return float(lr) if on_host(lr) else None
    return float(lr) if isinstance(lr, (int, float)) else None


def _start(optimizer: Any) -> dict[str, Any]:
    """What must be the same on all ranks from the first step: software, script, settings of the optimizer."""
    import torch

    defaults = {
        key: value
        for key, value in getattr(optimizer, "defaults", {}).items()
        if isinstance(value, (int, float, tuple))
    }
    script = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
    try:
        code = sha256(Path(script).read_bytes()).hexdigest()[:12]
    except OSError:
        code = ""
    return {
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "script": code,
        "optimizer": f"{type(optimizer).__name__} {defaults}"[:300],
    }
