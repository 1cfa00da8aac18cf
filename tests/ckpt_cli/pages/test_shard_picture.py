"""The boxes of a tensor are drawn to scale, and fit into a terminal whatever their number."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from ckpt_cli.pages.pictures.shards import map_json, move_json, move_lines, shard_lines
from ckpt_cli.screen.terminal import Screen, columns_of
from core.arrays.box import Box, Shape
from core.pictures.shards import BoxMove, Shard, ShardMap, ShardMove


def map_of(shape: Shape, parts: tuple[int, ...], *, n_copies: int = 1) -> ShardMap:
    """A tensor of bytes that is cut into equal parts along each axis, a rank for each box."""
    sizes = tuple(n // k for n, k in zip(shape, parts, strict=True))
    shards = [
        Shard(
            Box(tuple(i * n for i, n in zip(index, sizes, strict=True)), sizes),
            tuple(f"tp{number} dp{copy}" for copy in range(n_copies)),
            tuple(f"mp_rank_{number:02d}/model_{copy}.pt" for copy in range(n_copies)),
            prod(sizes),
        )
        for number, index in enumerate(product(*map(range, parts)))
    ]
    cut_axes = tuple(axis for axis, n in enumerate(parts) if n > 1)
    return ShardMap("weight", shape, "uint8", cut_axes, tuple(shards))


def drawing(shards: ShardMap, **screen: int | bool) -> list[str]:
    return list(shard_lines(Screen(**{"width": 80, **screen}), shards))  # type: ignore[arg-type]


def test_boxes_are_drawn_to_scale_with_rank_file_and_bytes() -> None:
    assert drawing(map_of((64, 256), (2, 2))) == [
        "axis 0 ↓ 64, cut into 2   axis 1 → 256, cut into 2",
        "┌───────────────────────────────┬───────────────────────────────┐",
        "│1 tp0 dp0                      │2 tp1 dp0                      │",
        "│mp_rank_00/model_0.pt          │mp_rank_01/model_0.pt          │",
        "│4.00 KiB                       │4.00 KiB                       │",
        "├───────────────────────────────┼───────────────────────────────┤",
        "│3 tp2 dp0                      │4 tp3 dp0                      │",
        "│mp_rank_02/model_0.pt          │mp_rank_03/model_0.pt          │",
        "│4.00 KiB                       │4.00 KiB                       │",
        "└───────────────────────────────┴───────────────────────────────┘",
        "   box                  bytes  ranks    files",
        "1  [0:32, 0:128]     4.00 KiB  tp0 dp0  mp_rank_00/model_0.pt",
        "2  [0:32, 128:256]   4.00 KiB  tp1 dp0  mp_rank_01/model_0.pt",
        "3  [32:64, 0:128]    4.00 KiB  tp2 dp0  mp_rank_02/model_0.pt",
        "4  [32:64, 128:256]  4.00 KiB  tp3 dp0  mp_rank_03/model_0.pt",
    ]


def test_uneven_boxes_have_their_share() -> None:
    boxes = [Box((0,), (30,)), Box((30,), (10,))]
    shards = tuple(Shard(box, (f"tp{n}",), (f"{n}.pt",), 4) for n, box in enumerate(boxes))
    frame = drawing(ShardMap("bias", (40,), "uint8", (0,), shards))[1]
    left, right = frame.split("┬")
    assert len(left) / len(right) == pytest.approx(3, abs=0.2)


def test_terminals_without_glyphs_get_ascii() -> None:
    lines = drawing(map_of((4, 4), (2, 1)), has_unicode=False)
    assert all(line.isascii() for line in lines)
    assert lines[1] == f"+{'-' * (len(lines[1]) - 2)}+"


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((), ()),
        ((0,), (1,)),
        ((4096,), (1,)),
        ((4096,), (1024,)),
        ((65536, 8), (64, 1)),
        ((8, 65536), (1, 64)),
        ((64, 64), (32, 32)),
        ((8, 64, 64), (4, 2, 2)),
        ((64, 8, 8), (64, 2, 2)),
    ],
)
def test_every_tensor_fits(shape: Shape, parts: tuple[int, ...], width: int) -> None:
    shards = map_of(shape, parts, n_copies=3)
    lines = drawing(shards, width=width)
    frames = [line for line in lines if line[:1] in "┌├│└"]
    assert max(map(columns_of, frames), default=0) <= min(width, 66)
    assert len(lines) < 170
    if len(shards.shards) > 64:
        assert any("more boxes; --json lists all" in line for line in lines)
    assert len(map_json(shards)["boxes"]) == len(shards.shards)  # type: ignore[arg-type]


def test_further_cut_axes_have_a_drawing_for_each_position() -> None:
    lines = drawing(map_of((8, 64, 64), (4, 2, 2)))
    assert "axis 2 from 0" in lines
    assert "axis 2 from 32" in lines


def test_copies_of_a_box_are_counted() -> None:
    lines = drawing(map_of((16,), (2,), n_copies=4))
    assert "│1 tp0 dp0 +3" in lines[2]
    assert lines[-1].endswith("tp1 dp0, tp1 dp1 +2  mp_rank_01/model_0.pt +3")


def test_control_characters_of_files_are_escaped() -> None:
    shard = Shard(Box((0,), (4,)), (), ("\x1b[2J.pt",), 4)
    text = "\n".join(drawing(ShardMap("a", (4,), "uint8", (), (shard,))))
    assert "\x1b" not in text
    assert "\\x1b[2J.pt" in text


def test_moves_name_both_ends() -> None:
    before, after = map_of((8,), (2,)), map_of((8,), (1,))
    move = ShardMove(before, after, (BoxMove(0, 0, 4), BoxMove(1, 0, 4)))
    lines = list(move_lines(Screen(80), move))
    assert lines[-3:] == [
        "target           from source           bytes",
        "     1  tp0 dp0            1  tp0 dp0    4 B",
        "     1  tp0 dp0            2  tp1 dp0    4 B",
    ]
    assert move_json(move)["moves"] == [
        {"source": 0, "target": 0, "bytes": 4},
        {"source": 1, "target": 0, "bytes": 4},
    ]
