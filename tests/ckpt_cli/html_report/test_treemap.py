from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_cli.html_report.treemap import MAX_TILES, Rectangle, draw_treemap, squarify
from core.verbs.pictures.sizes import SizeNode


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=60))
def test_areas_are_in_proportion_and_inside(sizes: list[int]) -> None:
    room = Rectangle(3, 4, 320, 200)
    parts = squarify(sizes, room)
    per_byte = room.width * room.height / sum(sizes)
    for size, part in zip(sizes, parts, strict=True):
        assert part.width * part.height == pytest.approx(size * per_byte, rel=1e-4, abs=1e-4)
        assert part.x >= room.x - 1e-3 and part.y >= room.y - 1e-3
        assert part.x + part.width <= room.x + room.width + 1e-3
        assert part.y + part.height <= room.y + room.height + 1e-3


def test_equal_sizes_become_squares() -> None:
    parts = squarify([1] * 4, Rectangle(0, 0, 100, 100))
    assert {(part.width, part.height) for part in parts} == {(50.0, 50.0)}


def tree(n: int) -> SizeNode:
    leaves = tuple(SizeNode(f"t{i}", 1000 - i % 7, 1) for i in range(n))
    return SizeNode("", sum(leaf.n_bytes for leaf in leaves), n, leaves)


def test_the_number_of_rectangles_is_bounded() -> None:
    picture = draw_treemap([("model", tree(100_000))], width=1000, height=400)
    assert len(picture.tiles) <= MAX_TILES + 1


def test_model_and_optimizer_share_the_area_by_their_bytes() -> None:
    small, large = SizeNode("", 100, 1), SizeNode("", 300, 3)
    picture = draw_treemap([("model", small), ("optimizer", large)], width=400, height=100)
    areas = {tile.group: tile.area.width * tile.area.height for tile in picture.tiles}
    assert areas == pytest.approx({"model": 10_000, "optimizer": 30_000})


def test_only_children_are_joined_with_their_parent() -> None:
    leaf = SizeNode("fc", 50, 1, (SizeNode("weight", 50, 1),))
    other = SizeNode("norm", 50, 1)
    picture = draw_treemap([("model", SizeNode("", 100, 2, (leaf, other)))], width=400, height=200)
    assert {tile.label.split()[0] for tile in picture.tiles} == {"model", "fc.weight", "norm"}
