"""The rows of ``ckpt diff``: keys that differ in numbers, and keys with brackets of their own."""

from __future__ import annotations

import pytest

from ckpt_cli.pages.diff_rows import Row, folded_rows, only_row
from core.engine.catalog.tensor import Tensor
from core.verbs.diff.result import TensorDiff


def only_in_a(*keys: str) -> list[TensorDiff]:
    return [TensorDiff(key=key, kind="only_a", a=Tensor("float32", (2,))) for key in keys]


def test_keys_that_differ_in_numbers_share_a_row() -> None:
    (row,) = folded_rows(only_in_a("layers.0.w", "layers.1.w", "layers.3.w"))
    assert (row.name, len(row.members)) == ("layers.[0-1,3].w", 3)


def test_what_the_first_name_does_not_cover_is_counted() -> None:
    (row,) = folded_rows(only_in_a("layers.0.e.0", "layers.0.e.1", "layers.1.e.5"))
    assert row.name.endswith(" and 1 more")


@pytest.mark.parametrize("own", ["[,]", "[1:0]", "[-]", "[1-2:0]", "[]", "[3"])
def test_brackets_of_a_key_are_not_ranges(own: str) -> None:
    (row,) = folded_rows(only_in_a(f"w.{own}.0.0", f"w.{own}.1.1"))
    assert len(row.members) == 2


def test_a_key_may_begin_like_the_name_of_a_group() -> None:
    (tensor,) = only_in_a("all weights")
    assert only_row(Row(tensor.key, tensor, (tensor,)))[1] != ""
