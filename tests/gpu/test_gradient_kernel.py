"""The kernel against float64 on the host: types, sizes, alignment, non-finite values, moved gradients."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from torch import nn

from healthcheck.device.between import WORDS, hand_out, take_up
from healthcheck.device.deferred import DeviceVector, value_of, values_of
from healthcheck.device.pages import OwnPage
from healthcheck.probes.gradient_statistics import GradientPass, GradientStats, gradient_stats

SIZES = (1, 5, 768, 1024, 8191, 8192, 32768, 32769, 100_000, 3_000_001)


def params_with(gradients: list[torch.Tensor | None]) -> list[nn.Parameter]:
    params = []
    for g in gradients:
        like = torch.zeros(1) if g is None else g
        p = nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device="cuda"))
        p.grad = g
        params.append(p)
    return params


def fields(stats: GradientStats, k: int | None) -> dict[str, float]:
    numbers = values_of(stats.numbers)
    return {name: numbers[stats.position(name, k)] for name in stats.fields}


def expected(gradient: torch.Tensor) -> dict[str, float]:
    g = gradient.detach().cpu().to(torch.float32).double().flatten()
    finite = g[g.isfinite()]
    return {
        "norm": float(g.norm()),
        "largest": float(finite.abs().max()) if len(finite) else 0.0,
        "nonfinite": float((~g.isfinite()).sum()),
        "zeros": float((g == 0).sum()),
        "all_zero": float(bool((g == 0).all())),
    }


def same(found: dict[str, float], wanted: dict[str, float]) -> None:
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=2e-6, nan_ok=True), (name, found, wanted)


def measured(params: list[nn.Parameter], again: int = 0) -> GradientStats:
    one_pass = GradientPass()
    for _ in range(again + 1):
        stats = one_pass.measure(params)
        assert stats is not None
    assert "largest" in stats.fields, "the kernel was not used"
    return stats


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_statistic_is_that_of_float64_on_the_host(dtype: torch.dtype) -> None:
    gradients = []
    for size in SIZES:
        g = torch.randn(size, device="cuda")
        g[torch.rand(size, device="cuda") < 0.1] = 0.0
        gradients.append(g.to(dtype))
    if dtype.itemsize == 1:  # no parameter of this type can be given a gradient by autograd; storage only
        params: list[Any] = [type("Holder", (), {"grad": g, "device": g.device})() for g in gradients]
    else:
        params = params_with(gradients)
    stats = measured(params, again=3)
    norms = list(map(value_of, stats.row("norm")))
    wanted = [expected(g) for g in gradients]
    for k in range(len(SIZES)):
        same(fields(stats, k), wanted[k])
    total = fields(stats, None)
    assert total["norm"] == pytest.approx(math.sqrt(sum(w["norm"] ** 2 for w in wanted)), rel=2e-6)
    assert total["largest"] == max(w["largest"] for w in wanted)
    assert total["zeros"] == sum(w["zeros"] for w in wanted)
    assert norms == [fields(stats, k)["norm"] for k in range(len(SIZES))]


def test_types_and_alignments_mix_and_results_stay_in_the_order_given() -> None:
    flat = torch.randn(200_001, device="cuda")
    gradients: list[torch.Tensor | None] = [
        torch.randn(70_000, device="cuda").bfloat16(),
        flat[1:100_001],  # four bytes past an aligned address
        None,
        torch.randn(70_000, device="cuda"),
        flat[3:4],
        torch.randn(300, device="cuda").bfloat16(),
        torch.randn(64, 33, device="cuda").t(),
    ]
    params = params_with(gradients)
    stats = measured(params)
    assert stats.indices == [0, 1, 3, 4, 5, 6]
    for k, index in enumerate(stats.indices):
        same(fields(stats, k), expected(params[index].grad))
    same(
        {"norm": fields(stats, None)["norm"]},
        {"norm": math.sqrt(sum(expected(params[i].grad)["norm"] ** 2 for i in stats.indices))},
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_elements_are_counted_and_make_the_norm_non_finite(bad: float) -> None:
    gradients = [torch.randn(n, device="cuda") for n in (40_000, 9_000, 70_000)]
    gradients[1][8999] = bad
    gradients[2][::1000] = bad
    stats = measured(params_with(list(gradients)))
    assert math.isfinite(fields(stats, 0)["norm"])
    for k in (1, 2, None):
        assert not math.isfinite(fields(stats, k)["norm"])
    assert [fields(stats, k)["nonfinite"] for k in (0, 1, 2, None)] == [0, 1, 70, 71]


def test_finite_gradients_whose_squares_overflow_or_vanish_keep_their_norm() -> None:
    gradients = [torch.full((50_000,), 1e25, device="cuda"), torch.full((50_000,), 3e38, device="cuda")]
    stats = measured(params_with(list(gradients)))
    assert fields(stats, 0)["norm"] == pytest.approx(1e25 * math.sqrt(50_000), rel=1e-5)
    assert fields(stats, 1)["norm"] == pytest.approx(3e38 * math.sqrt(50_000), rel=1e-5)
    assert fields(stats, None)["nonfinite"] == 0
    tiny = measured(params_with([torch.full((7,), 1e-30, device="cuda"), torch.zeros(7, device="cuda")]))
    assert fields(tiny, 0)["norm"] >= 1e-30
    assert [fields(tiny, k)["all_zero"] for k in (0, 1, None)] == [0, 1, 1]


def test_gradients_that_moved_or_came_or_went_are_noticed() -> None:
    params = params_with([torch.randn(50_000, device="cuda") for _ in range(5)])
    one_pass = GradientPass()
    for step in range(12):
        for p in params:
            p.grad = torch.randn(p.shape, device="cuda")
        params[2].grad = None if step % 3 == 1 else params[2].grad
        if step == 7:
            params[4].data = torch.randn(60_000, device="cuda")
            params[4].grad = torch.randn(60_000, device="cuda")
        stats = one_pass.measure(params)
        assert stats is not None
        for k, index in enumerate(stats.indices):
            same(fields(stats, k), expected(params[index].grad))


def test_equal_gradients_give_equal_bits_whatever_the_order_of_the_programs() -> None:
    params = params_with([torch.randn(n, device="cuda") for n in (3_000_000, 5, 700_000) * 5])
    one_pass = GradientPass()
    seen = {tuple(one_pass.measure(params).numbers.numbers()) for _ in range(200)}  # type: ignore[union-attr]
    assert len(seen) == 1


def test_another_stream_waits_for_the_scratch_memory_of_the_first() -> None:
    params = params_with([torch.randn(2_000_000, device="cuda") for _ in range(20)])
    one_pass = GradientPass()
    wanted = list(one_pass.measure(params).numbers.numbers())  # type: ignore[union-attr]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    tables = []
    for turn in range(40):
        with torch.cuda.stream(side if turn % 2 else torch.cuda.default_stream()):
            tables.append(one_pass.measure(params).numbers)  # type: ignore[union-attr]
    torch.cuda.synchronize()
    assert all(list(t.numbers()) == wanted for t in tables)  # type: ignore[union-attr]


def test_what_the_kernel_cannot_read_goes_through_foreach_with_the_same_norm() -> None:
    embedding = nn.Embedding(50, 8, sparse=True, device="cuda")
    embedding(torch.tensor([1, 1, 7], device="cuda")).sum().backward()
    complex_ = nn.Parameter(torch.randn(9, dtype=torch.complex64, device="cuda"))
    complex_.grad = torch.randn(9, dtype=torch.complex64, device="cuda")
    double = params_with([torch.randn(9, dtype=torch.float64, device="cuda")])
    for params in ([embedding.weight], [complex_], double, [embedding.weight, complex_, *double]):
        stats = GradientPass().measure(params)
        plain = gradient_stats(params)
        assert stats is not None
        assert plain is not None
        assert value_of(stats.total()) == pytest.approx(value_of(plain.total()))
        wanted = torch.cat([p.grad.to_dense().abs().double().flatten() for p in params]).norm()
        assert value_of(stats.total()) == pytest.approx(float(wanted), rel=1e-6)


def test_nothing_waits_for_the_device() -> None:
    params = params_with([torch.randn(n, device="cuda") for n in (1000, 50_000)])
    one_pass = GradientPass()
    one_pass.measure(params)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(5):
        for p in params:
            p.grad = torch.randn(p.shape, device="cuda")
        one_pass.measure(params)
    GradientPass().measure(params)


# --------------------------------------------------------------------------- steps that nobody reads


def word_values(stats: GradientStats) -> list[float]:
    return [value_of(stats.word(name)) for name in WORDS]


def test_what_nobody_reads_is_kept_until_somebody_does() -> None:
    """One step in ten is read: the largest norm between, and a NaN of a single step, come with their steps."""
    params = params_with([torch.randn(size, device="cuda") for size in (5, 768, 40_000)])
    one_pass = GradientPass()
    first = one_pass.measure(params)
    assert first is not None
    assert word_values(first) == [0.0, 0.0, 0.0, 0.0]
    wanted = [0.0] * len(WORDS)
    for step in range(2, 11):
        for p in params:
            assert p.grad is not None
            p.grad.normal_()
            if step == 5:
                p.grad.mul_(100.0)
        if step in (7, 8):
            assert params[1].grad is not None
            params[1].grad[3] = math.nan
        assert one_pass.keep(params, step)
        gradients = [p.grad.double() for p in params if p.grad is not None]
        bad = sum(float((~g.isfinite()).sum()) for g in gradients)
        take_up(wanted, step, math.hypot(*(float(g.norm()) for g in gradients)), bad)
    params[1].grad.normal_()
    read = one_pass.measure(params)
    assert read is not None
    assert word_values(read) == pytest.approx(hand_out(wanted), rel=2e-6)
    assert word_values(read)[:2] == [2.0, 7.0]
    assert word_values(read)[3] == 5.0
    again = one_pass.measure(params)
    assert again is not None
    assert word_values(again) == [0.0, 0.0, 0.0, 0.0]


def test_a_result_on_its_way_is_left_alone_by_steps_that_nobody_reads() -> None:
    params = params_with([torch.full((1000,), 2.0, device="cuda")])
    one_pass = GradientPass()
    stats = one_pass.measure(params)
    assert stats is not None
    assert params[0].grad is not None
    params[0].grad.fill_(5.0)
    assert one_pass.keep(params, 2)
    assert value_of(stats.total()) == pytest.approx(2.0 * math.sqrt(1000))


def test_words_outlive_another_set_of_gradients() -> None:
    """A parameter gets its first gradient: the table is made anew, what it kept is not lost."""
    params = params_with([torch.full((1000,), 2.0, device="cuda"), None])
    one_pass = GradientPass()
    assert one_pass.measure(params) is not None
    assert one_pass.keep(params, 2)
    params[1].grad = torch.zeros_like(params[1])
    stats = one_pass.measure(params)
    assert stats is not None
    assert word_values(stats)[2:] == [pytest.approx(2.0 * math.sqrt(1000)), 2.0]


def test_nobody_waits_for_a_step_that_nobody_reads() -> None:
    params = params_with([torch.randn(1000, device="cuda")])
    one_pass = GradientPass()
    one_pass.measure(params)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(2, 20):
            assert one_pass.keep(params, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def measured_filled(one_pass: GradientPass, param: torch.nn.Parameter, value: float) -> GradientStats:
    """Statistics of a gradient that is this value throughout."""
    assert param.grad is not None
    param.grad.fill_(value)
    stats = one_pass.measure([param])
    assert stats is not None
    return stats


def test_where_marks_do_not_come_numbers_are_copied_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that writes to the host, but whose marks are not seen there."""
    from healthcheck.device import gradient_kernel

    made = OwnPage.__init__

    def blind(page: OwnPage, count: int) -> None:
        made(page, count)
        page.mark = ctypes.c_longlong(0)

    monkeypatch.setattr(gradient_kernel, "_PAGES", {})
    monkeypatch.setattr(OwnPage, "__init__", blind)
    params = params_with([torch.ones(1000, device="cuda")])
    one_pass, found, copied = GradientPass(), list[GradientStats](), list[bool]()
    for step in range(1, 7):
        stats = measured_filled(one_pass, params[0], step)
        assert isinstance(stats.numbers, DeviceVector)
        copied.append(stats.numbers.own_page is None)
        found.append(stats)
        torch.cuda.synchronize()
    assert copied == [False, False, True, True, True, True]
    wanted = [step * math.sqrt(1000) for step in range(1, 7)]
    assert [value_of(stats.total()) for stats in found] == pytest.approx(wanted)


def test_numbers_are_copied_to_a_host_that_may_read_them_before_their_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ARM processor (Grace) may."""
    from healthcheck.device import gradient_kernel

    monkeypatch.setattr(gradient_kernel, "HOST_READS_IN_ORDER", False)
    params = params_with([torch.ones(1000, device="cuda")])
    one_pass = GradientPass()
    for step in range(1, 4):
        stats = measured_filled(one_pass, params[0], step)
        assert isinstance(stats.numbers, DeviceVector)
        assert stats.numbers.own_page is None
        assert value_of(stats.total()) == pytest.approx(step * math.sqrt(1000))


def test_gradients_of_another_type_where_others_have_lain_are_read_as_what_they_are() -> None:
    memory = torch.randn(4000, device="cuda")
    holder: Any = type("Holder", (), {"device": memory.device})()
    one_pass, names = GradientPass(), ["weight"]
    for kind in (torch.float32, torch.bfloat16, torch.float32):
        holder.grad = memory.view(kind)[:1000].copy_(torch.randn(1000))
        stats = one_pass.measure([holder], names)
        assert stats is not None
        same(fields(stats, 0), expected(holder.grad))
