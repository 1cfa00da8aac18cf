"""core.megatron.model.args: training arguments of ranks."""

from __future__ import annotations

from core.megatron.model.args import disagreements


def _share_lists(depth: int) -> object:
    """Return lists in lists, whose elements are shared: 2 ** depth to whoever walks them."""
    value: list[object] = []
    for _ in range(depth):
        value = [value, value]
    return value


def test_arguments_that_share_lists_in_lists_are_compared_and_told_in_little_time() -> None:
    ranks = [{"num_layers": _share_lists(200)} for _ in range(2)]
    first, second = ranks
    assert list(disagreements(first, second, rank="mp_rank_00", other_rank="mp_rank_01")) == []
    other = {"num_layers": [_share_lists(199), _share_lists(198)]}
    (error,) = disagreements(first, other, rank="mp_rank_00", other_rank="mp_rank_01")
    assert error.message.startswith("argument num_layers is [[")


def test_nested_arguments_that_contain_themselves_are_compared() -> None:
    first: list[object] = []
    second: list[object] = []
    first.append(first)
    second.append(second)
    args = ({"num_layers": first}, {"num_layers": second})
    assert list(disagreements(*args, rank="mp_rank_00", other_rank="mp_rank_01")) == []
