"""Checksums of tensors: equal for copies, different for anything else, and telling one changed value from many."""

from __future__ import annotations

import torch

from healthcheck.device.checksums import checksums, flipped_bit, folded, one_element, positional_sums, slot_of


def sums(tensor: torch.Tensor) -> tuple[int, int]:
    values = positional_sums([tensor]).values()
    assert values is not None
    return values[0], values[1]


def test_copies_have_equal_sums_in_every_precision_and_layout() -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(7, 5),
        torch.randn(7, 5).t(),
        torch.randn(4, 6, dtype=torch.float64),
        torch.randn(33).bfloat16(),
        torch.randn(3, 2, dtype=torch.complex64),
        torch.arange(5),
        torch.tensor([True, False, True]),
    ]
    assert checksums(tensors).values() == checksums([t.clone() for t in tensors]).values()


def test_a_single_flipped_bit_is_seen_and_all_parts_together_see_every_element() -> None:
    torch.manual_seed(0)
    tensor, parts = torch.randn(1000), 7
    healthy = [checksums([tensor], part, parts).values() for part in range(parts)]
    for position in range(0, 1000, 37):
        copy = tensor.clone()
        copy.view(torch.int32)[position] ^= 1
        different = [checksums([copy], part, parts).values() != healthy[part] for part in range(parts)]
        assert sum(different) == 1


def test_which_value_and_which_bit_follow_from_two_sums() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(40, 50)
    for position, bit in ((0, 0), (1234, 21), (1999, 31)):
        copy = tensor.clone()
        flat = copy.view(torch.int32).view(-1)
        flat[position] = flat[position] ^ (-(2**31) if bit == 31 else 1 << bit)
        assert one_element(sums(copy), sums(tensor), 2000) == position
        assert flipped_bit(sums(copy), sums(tensor)) == bit


def test_one_value_changed_by_arithmetic_is_one_element_and_no_flipped_bit() -> None:
    tensor = torch.linspace(-1, 1, 101)
    copy = tensor.clone()
    copy[17] += 0.123
    assert one_element(sums(copy), sums(tensor), 101) == 17
    assert flipped_bit(sums(copy), sums(tensor)) is None


def test_a_change_of_many_values_is_no_single_element() -> None:
    torch.manual_seed(0)
    for _ in range(50):
        tensor = torch.randn(64, 64)
        copy = tensor + torch.randn_like(tensor) * 1e-3
        assert one_element(sums(copy), sums(tensor), 4096) is None


def test_what_has_no_values_here_counts_as_nothing() -> None:
    sparse = torch.eye(3).to_sparse()
    assert checksums([None, torch.empty(3, device="meta"), sparse, torch.empty(0)]).values() == [0, 0, 0, 0]


def test_many_sums_fold_into_a_fixed_number_of_slots_and_each_change_shows_in_its_slot() -> None:
    values = [n * 12345678901234567 % 2**64 for n in range(150)]
    before = folded(values, 32)
    assert len(before) == 32
    for index in (0, 75, 149):
        changed = [*values]
        changed[index] ^= 1 << 40
        after = folded(changed, 32)
        assert [k for k in range(32) if before[k] != after[k]] == [slot_of(index, 150, 32)]
