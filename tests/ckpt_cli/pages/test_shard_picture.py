"""The boxes of a tensor fit into a terminal, to scale and numbered, however many they are."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from ckpt_cli.pages.pictures.shard_moves import move_blocks
from ckpt_cli.pages.pictures.shards import map_lines
from ckpt_cli.screen.blocks import draw_text
from ckpt_cli.screen.terminal import Screen, columns_of
from core.arrays.box import Box, Shape
from core.opening.open import open_checkpoint
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, TopologyChange
from core.verbs.inspect.summary import summarize
from core.verbs.pictures.shards import Shard, ShardMap, shard_map, shard_move

RANKS = "mcore_legacy/dense_gqa/tp2_pp2_optim"
FSDP_TP = "torch_dcp/tp2_fsdp2_dp2"


def map_of(shape: Shape, boxes: list[Box], *, file: str = "model.pt", copies: int = 1) -> ShardMap:
    """A map in which rank ``n`` holds box ``n``."""
    shards = tuple(
        Shard(
            box,
            tuple(f"tp{number + copy}" for copy in range(copies)),
            tuple(f"{number + copy}/{file}" for copy in range(copies)),
            4 * box.n_elements,
        )
        for number, box in enumerate(boxes)
    )
    cut_axes = tuple(
        axis for axis in range(len(shape)) if len({box.offset[axis] for box in boxes}) > 1
    )
    return ShardMap("weight", shape, "float32", cut_axes, shards)


def grid_of(*cuts: int, extent: int = 1024) -> ShardMap:
    """A map of equal boxes, cut into so many along each axis."""
    sizes = tuple(extent // n for n in cuts)
    boxes = [
        Box(tuple(at * size for at, size in zip(index, sizes, strict=True)), sizes)
        for index in product(*(range(n) for n in cuts))
    ]
    return map_of((extent,) * len(cuts), boxes)


def drawn(shards: ShardMap, width: int = 80) -> list[str]:
    return list(map_lines(Screen(width), shards))


@pytest.mark.each_value
@pytest.mark.parametrize("has_unicode", [True, False])
@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize(
    "shards",
    [
        map_of((), [Box((), ())]),
        map_of((0, 4), [Box((0, 0), (0, 4))]),
        grid_of(1),
        grid_of(64),
        grid_of(1024),
        grid_of(1024, 1),
        grid_of(1, 64),
        grid_of(32, 32),
        grid_of(4, 4, 4),
        map_of((2_000_000_000, 1), [Box((0, 0), (2_000_000_000, 1))]),
        map_of((1, 2_000_000_000), [Box((0, 0), (1, 2_000_000_000))]),
        map_of((64,), [Box((0,), (64,))], file="層" * 90, copies=100),
    ],
    ids=lambda shards: f"{shards.shape}-{len(shards.shards)}",
)
def test_every_map_fits(shards: ShardMap, width: int, *, has_unicode: bool) -> None:
    lines = list(map_lines(Screen(width, has_unicode=has_unicode), shards))
    # The list of boxes may be wider than 40 columns; it is wrapped by the terminal.
    picture = lines[: -1 - lines[::-1].index("")] if width == 40 else lines
    assert max(map(columns_of, picture)) <= width
    assert len(lines) < 70
    assert has_unicode or "".join(lines).replace("層", "").isascii()


def test_boxes_are_to_scale() -> None:
    boxes = [Box((0, 0), (16, 4)), Box((16, 0), (48, 4))]
    lines = drawn(map_of((64, 4), boxes))
    rows = [
        at
        for at, line in enumerate(lines)
        if line.lstrip(" 0123456789").startswith(("┌", "├", "└"))
    ]
    top, middle, bottom = rows[:3]
    assert (bottom - middle) == 3 * (middle - top)
    assert lines[middle].startswith("16 ├")
    assert not any("thicker" in line for line in lines)


def test_a_thin_box_is_drawn_thicker_and_the_drawing_tells() -> None:
    boxes = [Box((0,), (1,)), Box((1,), (999,))]
    lines = drawn(map_of((1000,), boxes))
    assert any(line.startswith("│0 │") for line in lines)
    assert "thin boxes are drawn thicker" in lines


def test_boxes_that_have_no_room_are_counted() -> None:
    lines = drawn(grid_of(64))
    assert any(line.endswith("│16 │···│63 │") for line in lines)
    assert "… 46 more boxes not drawn" in lines
    assert lines[-1] == "… 48 more boxes"
    assert len(list(map_lines(Screen(80), grid_of(64), listed=0))) > 64


def test_other_axes_have_a_drawing_for_each_position() -> None:
    lines = drawn(grid_of(2, 2, 2))
    assert [line for line in lines if line.startswith("axis 2")] == [
        "axis 2 from 0",
        "axis 2 from 512",
    ]


def test_overlapping_boxes_and_padding_are_named() -> None:
    lines = drawn(map_of((10,), [Box((0,), (6,)), Box((4,), (6,))]))
    assert "some boxes overlap" in lines
    padding = ShardMap("w", (4,), "float32", (), (Shard(Box((0,), (4,)), (), (), 16),))
    assert drawn(padding)[-1] == "0  [0:4]   16 B  zeros (padding)"


def test_copies_are_counted() -> None:
    lines = drawn(map_of((8,), [Box((0,), (8,))], copies=5))
    assert lines[-1] == "0  [0:8]   32 B       5  tp0, tp1, tp2 + 2  0/model.pt + 4"
    # Names of files are more useful than those of all ranks.
    long = map_of((8,), [Box((0,), (8,))], file="mp_rank_00_000/model_optim_rng.pt", copies=5)
    assert drawn(long)[-1].startswith("0  [0:8]   32 B       5  tp0 + 4  0/mp_rank_00_000/model")


def test_names_are_escaped_and_colours_are_for_terminals_only() -> None:
    shards = map_of((8,), [Box((0,), (8,))], file="\x1b[31m.pt")
    assert not any("\x1b" in line for line in drawn(shards))
    assert any("\x1b[36m" in line for line in map_lines(Screen(80, has_color=True), grid_of(2)))


def test_boxes_of_ranks_are_numbered_and_named(golden: Path) -> None:
    checkpoint = open_checkpoint(golden / RANKS)
    shards = shard_map(summarize(checkpoint).view, "decoder.layers.0.mlp.linear_fc2.weight")
    lines = drawn(shards)
    checkpoint.store.close()
    assert lines[0] == "bfloat16 [64, 96], 12.0 KiB: cut along axis 1 into 2 boxes"
    assert lines[1] == "down: axis 0, 64 elements · across: axis 1, 96 elements, cut"
    assert "   │   0 tp0 pp0    │   1 tp1 pp0    │" in lines
    assert lines[-1].split() == [
        "1", "[0:64,", "48:96]", "6.00", "KiB", "tp1", "pp0", "mp_rank_01_000/model_optim_rng.pt",
    ]  # fmt: skip


def test_boxes_of_files_are_named_by_their_files(golden: Path) -> None:
    checkpoint = open_checkpoint(golden / FSDP_TP)
    key = "app.model.model.layers.0.self_attn.o_proj.weight"
    lines = drawn(shard_map(checkpoint.catalog, key))
    checkpoint.store.close()
    assert lines[0] == "float32 [32, 32], 4.00 KiB: cut along axes 0 and 1 into 4 boxes"
    assert "   │ 2 __2_0.distcp │ 3 __3_0.distcp │" in lines


def test_a_move_has_both_maps_and_the_bytes_between_boxes(golden: Path, tmp_path: Path) -> None:
    change = TopologyChange(tp=4, pp=1)
    job = Job(src=golden / RANKS, dst=tmp_path / "out", topology=change, is_reshard=True)
    with prepare(job) as prepared:
        move = shard_move(prepared.plan, "decoder.layers.0.mlp.linear_fc2.weight")
    lines = list(draw_text(Screen(80), move_blocks(move)))
    assert "  ▼  4 moves, 12.0 KiB" in lines
    assert lines.index("source") < lines.index("  ▼  4 moves, 12.0 KiB") < lines.index("target")
    assert lines[-1] == "1 tp1 pp0  →  3 tp3 pp0  3.00 KiB"
    assert max(map(columns_of, lines)) <= 80
