"""Statistics of all gradients in one launch: a Triton kernel over a table of their addresses.

Foreach kernels cost the host about two microseconds a tensor and read the gradients once per
statistic. Here the host collects addresses, uploads them only where one changed, and launches once;
the device reads every gradient once, at the speed of its memory.

Each program takes one chunk of one gradient. The last program of a gradient to finish adds up its
chunks, the last gradient to finish adds up all gradients: no atomic additions of floats, so that equal
gradients give equal bits. Imported only where Triton and a CUDA or ROCm device are there.

Steps whose numbers nobody reads leave four running words on the device (:data:`~healthcheck.device.between.WORDS`): what
looks at one step in n loses neither a NaN nor a spike of a single step.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import platform
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from healthcheck.device.between import WORDS
from healthcheck.device.deferred import SLOTS, DeviceVector, Slots
from healthcheck.device.pages import OwnPage
from healthcheck.device.shortcuts import direct_launch
from healthcheck.device.tensors import dense

FIELDS = ("norm", "largest", "nonfinite", "zeros", "all_zero")
"""Rows of the result: L2 norm, largest finite absolute value, elements that are NaN or infinite,
elements that are zero, and 1 where a gradient has only zeros."""

CHUNK = 32768  # elements of one program
TILE_ROWS, TILE_COLUMNS, WARPS = 8, 1024, 4

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
for _name, _kind in (("float8_e4m3fn", tl.float8e4nv), ("float8_e5m2", tl.float8e5)):
    if hasattr(torch, _name):
        ELEMENTS[getattr(torch, _name)] = _kind


SCALARS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
"""Types of a single number that the kernel can read; 0 stands for none."""


@triton.jit(do_not_specialize=["loss", "loss_type", "given", "given_type", "step", "unread"])  # type: ignore[untyped-decorator]
def statistics(  # type: ignore[no-untyped-def]
    addresses,
    lengths,
    first_chunk,
    owner_of,
    partial,
    arrived,
    words,
    limits,
    flag,
    result,
    page,
    loss,
    loss_type,
    given,
    given_type,
    step,
    unread,
    offset,
    tensors,
    chunks,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One chunk; see the module.

    ``addresses``, ``lengths``: int64 per tensor. ``first_chunk``, ``arrived``: int32, one more than tensors;
    ``arrived`` is zero before and after. ``owner_of``: int32 per chunk. ``partial``: float32 ``[5, chunks]``.
    ``result``: float64 ``[5 + 5 * tensors + 3 + 4 + 1]``: five totals, then five rows, then the loss, the norm that the loop
    has worked out, and whether a limit is broken, then the running words as they were before this step. ``page``: the same
    in pinned memory of the host, which the device can write: what nobody has to copy costs the host nothing. The last place
    is for the mark, an int64 that is written when everything else stands there for the host to see. ``words``: float64
    ``[4]``. ``unread``: 1 if nobody reads the result of the step whose number ``step`` is: it goes into the words. Otherwise
    they are handed out and begin anew, and ``step`` is the mark.

    ``loss``, ``given``: address of one element of ``loss_type`` and ``given_type`` (:data:`SCALARS`), the second the loop's
    own norm. ``limits``: float64 ``[4]``: what loss and norm must be at least and at most. ``flag``: float32, 1 where one
    of them breaks its limit (NaN always does), else 0: as a fused optimizer reads ``found_inf``.
    """
    chunk = tl.program_id(0) + offset
    owner = tl.load(owner_of + chunk)
    first = tl.load(first_chunk + owner)
    last = tl.load(first_chunk + owner + 1)
    begin = (chunk - first).to(tl.int64) * CHUNK
    size = tl.minimum(tl.load(lengths + owner) - begin, CHUNK).to(tl.int32)
    base = tl.load(addresses + owner).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    base += begin

    # The loop does as little as it can: in bf16 it is arithmetic that bounds it. What a sum of squares
    # that is not finite means (NaN, infinity, or finite values beyond 1.8e19) is found out afterwards.
    TINY: tl.constexpr = 8.271806125530277e-25
    INFINITY: tl.constexpr = float("inf")
    column = tl.arange(0, COLUMNS)
    square = tl.zeros([COLUMNS], tl.float32)
    largest = tl.zeros([COLUMNS], tl.float32)
    zeros = tl.zeros([COLUMNS], tl.int32)
    tile = tl.arange(0, ROWS)[:, None] * COLUMNS + column[None, :]
    whole = size // (ROWS * COLUMNS) * (ROWS * COLUMNS)
    for start in range(0, whole, ROWS * COLUMNS):
        x = tl.load(base + start + tile).to(tl.float32)
        square += tl.sum(x * x, axis=0)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=0))
        zeros += tl.sum((x == 0.0).to(tl.int32), axis=0)
    for start in range(whole, size, COLUMNS):
        there = start + column < size
        x = tl.load(base + start + column, mask=there, other=0.0).to(tl.float32)
        square += x * x
        largest = tl.maximum(largest, tl.abs(x))
        zeros += ((x == 0.0) & there).to(tl.int32)

    squares = tl.sum(square, axis=0)
    peak_here = tl.max(largest, axis=0)
    small_squares = squares * TINY * TINY
    bad_here = 0.0
    if not (squares < INFINITY):
        # Once more, 2**-80 smaller, and apart from what is no number.
        scaled = tl.zeros([COLUMNS], tl.float32)
        largest = tl.zeros([COLUMNS], tl.float32)
        nonfinite = tl.zeros([COLUMNS], tl.int32)
        for start in range(0, size, COLUMNS):
            there = start + column < size
            x = tl.load(base + start + column, mask=there, other=0.0).to(tl.float32)
            finite = tl.abs(x) < INFINITY
            small = x * TINY
            scaled += small * small
            largest = tl.maximum(largest, tl.where(finite, tl.abs(x), 0.0))
            nonfinite += tl.where(finite, 0, 1)
        small_squares = tl.sum(scaled, axis=0)
        peak_here = tl.max(largest, axis=0)
        bad_here = tl.sum(nonfinite, axis=0).to(tl.float32)
    tl.store(partial + chunk, squares)
    tl.store(partial + chunks + chunk, small_squares)
    tl.store(partial + 2 * chunks + chunk, peak_here)
    tl.store(partial + 3 * chunks + chunk, bad_here)
    tl.store(partial + 4 * chunks + chunk, tl.sum(zeros, axis=0).to(tl.float32))
    tl.debug_barrier()
    if tl.atomic_add(arrived + owner, 1) == last - first - 1:
        s = tl.zeros([COLUMNS], tl.float64)
        c = tl.zeros([COLUMNS], tl.float64)
        m = tl.zeros([COLUMNS], tl.float32)
        n = tl.zeros([COLUMNS], tl.float64)
        z = tl.zeros([COLUMNS], tl.float64)
        for start in range(first, last, COLUMNS):
            there = start + column < last
            at = partial + start + column
            s += tl.load(at, mask=there, other=0.0, cache_modifier=".cg").to(tl.float64)
            c += tl.load(at + chunks, mask=there, other=0.0, cache_modifier=".cg").to(tl.float64)
            m = tl.maximum(m, tl.load(at + 2 * chunks, mask=there, other=0.0, cache_modifier=".cg"))
            n += tl.load(at + 3 * chunks, mask=there, other=0.0, cache_modifier=".cg").to(tl.float64)
            z += tl.load(at + 4 * chunks, mask=there, other=0.0, cache_modifier=".cg").to(tl.float64)
        total = tl.sum(s, axis=0)
        peak = tl.max(m, axis=0).to(tl.float64)
        bad = tl.sum(n, axis=0)
        none = tl.sum(z, axis=0)
        # 2**80 undoes the scaling. Squares below 1e-45 are lost, but a norm is never below the peak.
        norm = tl.where(total < INFINITY, tl.sqrt(total), tl.sqrt(tl.sum(c, axis=0)) * 1.2089258196146292e24)
        norm = tl.where(norm < peak, peak, norm)
        width = tensors
        row = result + 5
        seen = page + 5
        empty = tl.where((peak == 0.0) & (bad == 0.0), 1.0, 0.0).to(tl.float64)
        tl.store(row + owner, norm)
        tl.store(row + width + owner, peak)
        tl.store(row + 2 * width + owner, bad)
        tl.store(row + 3 * width + owner, none)
        tl.store(row + 4 * width + owner, empty)
        tl.store(seen + owner, norm)
        tl.store(seen + width + owner, peak)
        tl.store(seen + 2 * width + owner, bad)
        tl.store(seen + 3 * width + owner, none)
        tl.store(seen + 4 * width + owner, empty)
        tl.store(arrived + owner, 0)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tensors, 1) == tensors - 1:
            ts = tl.zeros([COLUMNS], tl.float64)
            tm = tl.zeros([COLUMNS], tl.float64)
            tn = tl.zeros([COLUMNS], tl.float64)
            tz = tl.zeros([COLUMNS], tl.float64)
            ta = tl.zeros([COLUMNS], tl.float64)
            for start in range(0, tensors, COLUMNS):
                there = start + column < tensors
                at = row + start + column
                norms = tl.load(at, mask=there, other=0.0, cache_modifier=".cg")
                ts += norms * norms
                tm = tl.maximum(tm, tl.load(at + width, mask=there, other=0.0, cache_modifier=".cg"))
                tn += tl.load(at + 2 * width, mask=there, other=0.0, cache_modifier=".cg")
                tz += tl.load(at + 3 * width, mask=there, other=0.0, cache_modifier=".cg")
                ta += tl.load(at + 4 * width, mask=there, other=0.0, cache_modifier=".cg")
            all_norm = tl.sqrt(tl.sum(ts, axis=0))
            all_peak = tl.max(tm, axis=0)
            all_bad = tl.sum(tn, axis=0)
            all_none = tl.sum(tz, axis=0)
            all_empty = tl.sum(ta, axis=0)
            tl.store(result, all_norm)
            tl.store(result + 1, all_peak)
            tl.store(result + 2, all_bad)
            tl.store(result + 3, all_none)
            tl.store(result + 4, all_empty)
            tl.store(page, all_norm)
            tl.store(page + 1, all_peak)
            tl.store(page + 2, all_bad)
            tl.store(page + 3, all_none)
            tl.store(page + 4, all_empty)
            count = tl.load(words, cache_modifier=".cg")
            count_step = tl.load(words + 1, cache_modifier=".cg")
            peak_norm = tl.load(words + 2, cache_modifier=".cg")
            peak_step = tl.load(words + 3, cache_modifier=".cg")
            if unread != 0:
                at_step = step.to(tl.float64)
                broken = (all_bad > 0.0) | (all_norm != all_norm)
                higher = (all_norm > peak_norm) & (all_bad == 0.0)
                tl.store(words, tl.where(broken, count + tl.maximum(all_bad, 1.0), count))
                tl.store(words + 1, tl.where(broken & (count == 0.0), at_step, count_step))
                tl.store(words + 2, tl.where(higher, all_norm, peak_norm))
                tl.store(words + 3, tl.where(higher, at_step, peak_step))
            else:
                value = _scalar(loss, loss_type)
                own = _scalar(given, given_type)
                # What is judged: the loop's norm, except where only its float32 overflowed.
                norm = tl.where((given_type == 0) | (tl.abs(own) >= INFINITY) | (own != own), all_norm, own)
                kept = (value >= tl.load(limits)) & (value <= tl.load(limits + 1))
                kept = kept | (loss_type == 0)
                kept = kept & (norm >= tl.load(limits + 2)) & (norm <= tl.load(limits + 3))
                breach = tl.where(kept, 0.0, 1.0)
                tl.store(flag, breach.to(tl.float32))
                tl.store(result + 5 + 5 * tensors, value)
                tl.store(result + 6 + 5 * tensors, own)
                tl.store(result + 7 + 5 * tensors, breach.to(tl.float64))
                tl.store(page + 5 + 5 * tensors, value)
                tl.store(page + 6 + 5 * tensors, own)
                tl.store(page + 7 + 5 * tensors, breach.to(tl.float64))
                before = result + 8 + 5 * tensors
                there = page + 8 + 5 * tensors
                tl.store(before, count)
                tl.store(before + 1, count_step)
                tl.store(before + 2, peak_norm)
                tl.store(before + 3, peak_step)
                tl.store(there, count)
                tl.store(there + 1, count_step)
                tl.store(there + 2, peak_norm)
                tl.store(there + 3, peak_step)
                tl.store(words, 0.0)
                tl.store(words + 1, 0.0)
                tl.store(words + 2, 0.0)
                tl.store(words + 3, 0.0)
                # Of all programs, for the whole system: what the host finds behind the mark is complete.
                tl.debug_barrier()
                mark = (there + 4).to(tl.pointer_type(tl.int64))
                tl.atomic_xchg(mark, step.to(tl.int64), sem="release", scope="sys")
            tl.store(arrived + tensors, 0)


@triton.jit
def _scalar(address, kind):  # type: ignore[no-untyped-def]
    """One number of a type of :data:`SCALARS` as float64; 0 where there is none."""
    value = tl.full((), 0.0, tl.float64)
    if kind == 1:
        value = tl.load(address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    if kind == 2:
        value = tl.load(address.to(tl.pointer_type(tl.bfloat16))).to(tl.float64)
    if kind == 3:
        value = tl.load(address.to(tl.pointer_type(tl.float16))).to(tl.float64)
    if kind == 4:
        value = tl.load(address.to(tl.pointer_type(tl.float64)))
    return value


def usable(tensor: Any) -> bool:
    """Whether the kernel can read this local, dense tensor: real, of a known type, without gaps."""
    if tensor.dtype not in ELEMENTS or tensor.layout is not torch.strided or tensor.device.type != "cuda":
        return False
    if tensor.element_size() == 1 and (torch.version.hip or torch.cuda.get_device_capability(tensor.device) < (8, 9)):
        return False
    return not tensor.numel() or dense(tensor)


PLACES = 16
"""Sets of addresses that are kept on the device. Memory that a script frees and allocates again in each step mostly goes round
between two."""
HOST_READS_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")
"""Whether the host reads memory in the order in which a program says so. ARM (Grace) may have read numbers before the mark that stands behind
them, and no plain read of Python's forbids it."""
_MARKS = itertools.count(1)
"""Of the launches of this process: no page ever shows a mark that somebody else waits for."""
_PAGES: dict[int, deque[OwnPage]] = {}
"""Pages by the numbers they hold, the next one to be used first. Never given back: torch does not know that a kernel may still
write to one, and would hand it to somebody else."""


class GradientTable:
    """What the kernel needs to know of a list of tensors on one device; everything but addresses is constant.

    :param tensors: local dense tensors for which :func:`usable` is true. They are not kept.
    :param words: running words of an earlier table for the same parameters, on the same device; None: new ones.

    Uses 24 bytes of device memory per 32,768 elements and 24 per tensor.
    """

    fields = FIELDS
    scalars = SCALARS

    def __init__(self, tensors: Sequence[Any], words: Any = None) -> None:
        self.device = tensors[0].device
        self.count = len(tensors)
        self._aligned = [t.data_ptr() % 16 == 0 for t in tensors]
        lengths = [int(t.numel()) for t in tensors]
        # An empty tensor (a shard of which this rank holds nothing) has one chunk without elements.
        per_tensor = [max(1, -(-n // CHUNK)) for n in lengths]
        self._chunks = sum(per_tensor)
        # Chunks of one type and alignment stand together: one launch each, usually one in all.
        self._launches: list[tuple[Any, bool, int, int]] = []
        owners: list[int] = []
        order: dict[tuple[Any, bool], list[int]] = {}
        for index, tensor in enumerate(tensors):
            order.setdefault((tensor.dtype, self._aligned[index]), []).append(index)
        starts = [0] * (self.count + 1)
        position = 0
        numbering: list[int] = []
        for (dtype, aligned), members in order.items():
            begin = position
            for index in members:
                starts[len(numbering)] = position
                owners += [len(numbering)] * per_tensor[index]
                numbering.append(index)
                position += per_tensor[index]
            self._launches.append((ELEMENTS[dtype], aligned, begin, position - begin))
        starts[self.count] = position
        self._order = numbering
        self.in_order = numbering == list(range(self.count))
        self.columns = sorted(range(self.count), key=numbering.__getitem__)
        """Position in the list given -> column of the result."""

        def upload(values: list[int], dtype: Any) -> Any:
            return torch.tensor(values, dtype=dtype, pin_memory=True).to(self.device, non_blocking=True)

        self._lengths = upload([lengths[i] for i in numbering], torch.int64)
        self._starts = upload(starts, torch.int32)
        self._owners = upload(owners, torch.int32)
        self._partial = torch.empty(5, self._chunks, dtype=torch.float32, device=self.device)
        self._arrived = torch.zeros(self.count + 1, dtype=torch.int32, device=self.device)
        if words is None or words.device != self.device:
            words = torch.zeros(len(WORDS), dtype=torch.float64, device=self.device)
        self.words = words
        self.known: list[tuple[list[int], Any, int]] = []
        """Where these tensors have been: addresses, and the same on the device with the address of that."""
        self.writes = HOST_READS_IN_ORDER
        """Whether the device writes results to the host itself."""
        self._trial: tuple[Any, OwnPage, int] | None = None
        """The first launch: an event behind it, its page and its mark, until somebody has looked whether that came."""
        self._last: DeviceVector | None = None
        self._memory: Any = None
        self._result = 0
        self.at_loss = len(FIELDS) * (self.count + 1)
        """Where in a result the loss stands. Behind it: the norm that was given, and whether a limit is broken."""
        self._size = self.at_loss + 3 + len(WORDS)
        self._pages = _PAGES.setdefault(self._size, deque([OwnPage(self._size)]))
        self.flag = torch.zeros((), dtype=torch.float32, device=self.device)
        """1 if the last measurement that was given limits broke one of them, else 0."""
        self._limits = torch.empty(4, dtype=torch.float64, device=self.device)
        self._known_limits: tuple[float, ...] = ()
        self._unread: Any = None
        """Where the numbers go that nobody reads."""
        self._all_aligned = all(self._aligned)
        self._stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        self._left = torch.cuda.current_stream(self.device)
        """The stream of the last launch. An ``ExternalStream`` of address 0 would be another than the default one."""
        self._fixed = [
            t.data_ptr()
            for t in (
                self._lengths,
                self._starts,
                self._owners,
                self._partial,
                self._arrived,
                self.words,
                self._limits,
                self.flag,
            )
        ]
        # An address that is there in any case: Triton makes other code for an integer that fits into 32 bits.
        self._no_scalars = (self._fixed[0], 0, self._fixed[0], 0)
        self._direct: list[Any] = []  # launchers of compiled kernels: no dispatch over types and alignments

    def measure(
        self,
        place: tuple[list[int], Any, int],
        final: bool = True,
        loss: Any = None,
        given: Any = None,
        limits: tuple[float, float, float, float] | None = None,
    ) -> DeviceVector:
        """Statistics as a float64 vector on the device: five totals, then five rows with a column per tensor, then
        ``loss``, ``given`` and 1 if a limit is broken (else 0), then the running words of the steps since the last call.

        :param place: where the tensors are now: what :meth:`move` gives, one of :attr:`known`.
        :param final: whether nobody changes the vector any more; then the device writes it to the host itself.
        :param loss: of the step: one element of a type of :data:`SCALARS` on this device, and as it stands in memory
            (``is_neg()`` is false). None: there is none, and the number in its place says nothing.
        :param given: the loop's own norm, likewise. It is judged in place of ours, if it is finite.
        :param limits: what loss and norm must be at least and at most: loss, loss, norm, norm. Without them :attr:`flag`
            says nothing.
        """
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.measure(place, final, loss, given, limits)
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream != self._stream:
            self._change_stream(stream)
        if limits is not None and limits != self._known_limits:
            self._known_limits = limits
            self._limits.copy_(torch.tensor(limits, dtype=torch.float64, pin_memory=True), non_blocking=True)
        scalars = self._no_scalars
        if loss is not None:
            scalars = loss.data_ptr(), SCALARS[loss.dtype], *scalars[2:]
        if given is not None:
            scalars = *scalars[:2], given.data_ptr(), SCALARS[given.dtype]
        last, page, mark = self._last, None, 0
        if last is not None and last.own_page is not None:
            last.tensor = None  # whoever wanted it on the device has queued that by now
        # Memory of the last result is used again, once its copy to the host was queued behind it.
        if self._memory is None or (last is not None and last.tensor is not None):
            whole = torch.empty(SLOTS + self._size + 1, dtype=torch.float64, device=self.device)
            self._memory = whole[SLOTS:-1], Slots(whole[:-1], SLOTS)
            self._result = self._memory[0].data_ptr()
        if final and self.writes:
            pages, mark = self._pages, next(_MARKS)
            page = pages[0]
            holder = page.holder()  # as `OwnPage.free` does, at one call less in every step
            if page.mark.value == page.awaited and (holder is None or holder.own_page is not page):
                pages.rotate(-1)
            else:
                page = self._spare_page()
            vector = self._last = DeviceVector(self._memory[0], None, page, mark, self._wait)
            page.awaited, page.holder = mark, weakref.ref(vector)
        else:
            vector = self._last = DeviceVector(*self._memory)
        if self._direct:
            target = self._result if page is None else page.address
            for launch, handles, constants in self._direct:
                launch(stream, *handles, place[2], *self._fixed, self._result, target, *scalars, mark, 0, *constants)
        else:
            self._launch(place[1], vector.tensor, vector.tensor if page is None else page.tensor, scalars, mark, 0)
            if page is not None:
                event = torch.cuda.Event()
                event.record(self._left)
                self._trial = event, page, mark
        return vector

    def _spare_page(self) -> OwnPage:
        """Another page than the next one, of which somebody may still want the numbers."""
        pages = self._pages
        if self._trial is not None and self._trial[0].query():
            self._check_marks()
        page = next((page for page in pages if page.free), None)
        if page is None:
            page = OwnPage(self._size)
        else:
            pages.remove(page)
        pages.append(page)
        return page

    def _check_marks(self) -> None:
        """A launch is over: its mark must stand in the host's memory. Where it does not (a device that can write there, but not
        in this way), numbers are copied from now on."""
        assert self._trial is not None
        (_, page, mark), self._trial = self._trial, None
        if page.mark.value == mark or page.awaited != mark:
            return
        self.writes = False
        for page in self._pages:
            vector = page.holder()
            if vector is not None and vector.own_page is page:
                vector.numbers()

    def _wait(self) -> None:
        """Until the last launch is over. (Waiting for the stream would count as a wait of the script.)"""
        event = torch.cuda.Event()
        event.record(self._left)
        event.synchronize()

    def keep(self, place: tuple[list[int], Any, int], step: int) -> None:
        """Measure a step whose numbers nobody reads: what came of it goes into the running words.

        :param place: as for :meth:`measure`.
        """
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                self._keep(place, step)
        else:
            self._keep(place, step)

    def _keep(self, place: tuple[list[int], Any, int], step: int) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream != self._stream:
            self._change_stream(stream)
        if self._unread is None:  # the last result may not have left yet
            self._unread = torch.empty(self._size + 1, dtype=torch.float64, device=self.device)
        if self._direct:
            target = self._unread.data_ptr()
            for launch, handles, constants in self._direct:
                launch(stream, *handles, place[2], *self._fixed, target, target, *self._no_scalars, step, 1, *constants)
        else:
            self._launch(place[1], self._unread, self._unread, self._no_scalars, step, 1)

    def _change_stream(self, stream: int) -> None:
        """The scratch memory of the step before may still be in use on the stream that was left."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._left)
        self._stream, self._left = stream, current

    def _launch(self, addresses: Any, result: Any, page: Any, scalars: tuple[int, ...], step: int, unread: int) -> None:
        """Triton's own way; what it has compiled is launched directly from then on, where that is known to work."""
        for element, aligned, offset, chunks in self._launches:
            constants = (offset, self.count, self._chunks, element, aligned, CHUNK, TILE_ROWS, TILE_COLUMNS)
            compiled = statistics[(chunks,)](
                addresses,
                self._lengths,
                self._starts,
                self._owners,
                self._partial,
                self._arrived,
                self.words,
                self._limits,
                self.flag,
                result,
                page,
                *scalars,
                step,
                unread,
                *constants,
                num_warps=WARPS,
            )
            launch = direct_launch(compiled, chunks)
            if launch is not None:
                self._direct.append((*launch, constants))

    def fits(self, addresses: list[int]) -> bool:
        """Whether alignments are still those for which the table was made."""
        if self._all_aligned:
            return not functools.reduce(operator.or_, addresses, 0) & 15
        return [not address & 15 for address in addresses] == self._aligned

    def move(self, addresses: list[int]) -> tuple[list[int], Any, int]:
        """The tensors are at these addresses now: ``data_ptr()`` of each, in the order of the list given. Lengths, types and
        alignment must be those that the table was made for: see :meth:`fits`.
        """
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.move(addresses)
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream != self._stream:
            self._change_stream(stream)
        # The least recent place is overwritten behind the last launch that reads it.
        there = self.known.pop(0)[1] if len(self.known) >= PLACES else None
        if there is None:
            there = torch.empty(self.count, dtype=torch.int64, device=self.device)
        ordered = addresses if self.in_order else [addresses[i] for i in self._order]
        # Torch keeps the pinned block until the copy has read it, so it can be let go at once.
        staging = torch.empty(self.count, dtype=torch.int64, pin_memory=True)
        ctypes.memmove(staging.data_ptr(), array("q", ordered).tobytes(), 8 * self.count)
        there.copy_(staging, non_blocking=True)
        place = addresses, there, there.data_ptr()
        self.known.append(place)
        return place
