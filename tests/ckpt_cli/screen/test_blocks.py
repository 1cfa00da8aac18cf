from __future__ import annotations

import pytest

from ckpt_cli.screen.blocks import (
    Block,
    Cell,
    Facts,
    Table,
    box_text,
    bytes_text,
    count_text,
    dim_cell,
    draw_text,
    facts,
    first_lines,
    line_text,
    n_text,
    seconds_text,
    table,
    title_cell,
    tree_rows,
    wrapped,
)
from ckpt_cli.screen.terminal import Screen
from core.arrays.box import Box
from core.engine.catalog.tensor import Tensor
from core.verbs.inspect.tree import build_tree

PLAIN = Screen()


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10239, "10.0 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (1536 * 1024**2, "1.50 GiB"),
        (999 * 1024**2, "999 MiB"),
        (5 * 1024**5, "5.00 PiB"),
        (5000 * 1024**5, "5000 PiB"),
    ],
)
def test_bytes_have_three_digits_and_a_binary_unit(n_bytes: int, text: str) -> None:
    assert bytes_text(n_bytes) == text


def test_counts_seconds_boxes_and_plurals_read_well() -> None:
    assert [count_text(n) for n in (0, 9999, 10_000, 187_520, 1_240_000_000)] == [
        "0",
        "9999",
        "10.0 K",
        "188 K",
        "1.24 B",
    ]
    assert [seconds_text(s) for s in (0.42, 38.2, 250, 7500)] == [
        "0.42 s",
        "38 s",
        "4 min 10 s",
        "2 h 05 min",
    ]
    assert box_text(Box((0, 64), (192, 0))) == "[0:192, 64:64]"
    assert box_text(Box((), ())) == "[]"
    assert [n_text(n, "box", "boxes") for n in (1, 2)] == ["1 box", "2 boxes"]


def test_columns_are_aligned_without_the_escape_sequences() -> None:
    rows = [["a", Cell("1", ("dim",)), "x"], ["層層", Cell("100"), "y"]]
    assert list(table(PLAIN, rows, align="<><")) == ["a       1  x", "層層  100  y"]
    colored = list(table(Screen(has_color=True), rows, align="<><"))
    assert colored[0] == "a       \x1b[2m1\x1b[0m  x"


def test_long_values_wrap_beside_their_name_in_a_terminal_only() -> None:
    pairs = [("note", "word " * 20), ("", "second")]
    wide = list(facts(PLAIN, pairs))
    assert len(wide) == 2
    narrow = list(facts(Screen(width=40), pairs))
    assert len(narrow) > 3
    assert all(len(line) <= 40 for line in narrow)
    assert narrow[0].startswith("note  word")
    assert narrow[1].startswith("      word")


@pytest.mark.parametrize("room", range(12, 60))
def test_numbers_shapes_options_and_items_are_not_broken(room: int) -> None:
    text = "reads 3.05 GiB of [4096, 1024] in 4 × 60 parts (with --dtype float32, tmp)"
    lines = wrapped(text, room)
    assert " ".join(lines) == text
    for item in ("3.05 GiB", "[4096, 1024]", "4 × 60", "--dtype float32"):
        assert sum(item in line for line in lines) == 1


def test_items_of_a_list_stay_whole() -> None:
    assert wrapped("4 layers · hidden 64 · 8 heads · tied", 24) == [
        "4 layers · hidden 64 ·",
        "8 heads · tied",
    ]


def test_a_table_shortens_its_names_in_a_narrow_terminal_only() -> None:
    name = "model.decoder.some.very.long.name.of.a.layer.weight"
    rows = [[Cell(f"│  └─ {name}", lead=6), "float32", "[4096, 1024]", "1.00 KiB"]]
    rows.append(["short", "int8", "[1]", "1 B"])
    (wide, _) = table(PLAIN, rows, align="<<<>", fits=True)
    assert name in wide
    assert next(iter(table(Screen(width=200), rows, align="<<<>", fits=True))) == wide
    for width in range(54, len(wide)):
        lines = list(table(Screen(width=width), rows, align="<<<>", fits=True))
        assert {len(line) for line in lines} == {width}
        assert lines[0].startswith("│  └─ m")
        assert "…" in lines[0]
        assert lines[0].endswith("t  float32  [4096, 1024]  1.00 KiB")
    # Less than numbers need: the terminal breaks the line.
    assert len(next(table(Screen(width=40), rows, align="<<<>", fits=True))) > 40


def test_names_that_are_kept_have_a_line_of_their_own() -> None:
    rows = [["a.very.long.name.of.a.layer", "[4, 4]", "9 B"], ["short", "[4]", "1 B"]]
    assert list(table(Screen(width=30), rows, align="<<>", fits=True, keeps_names=True)) == [
        "a.very.long.name.of.a.layer",
        "                   [4, 4]  9 B",
        "short              [4]     1 B",
    ]


def test_a_table_continues_its_last_cell_below() -> None:
    rows = [["model", "9", "bfloat16, float32, int64"], ["total", "10"]]
    assert list(table(Screen(width=30), rows, align="<><", fits=True)) == [
        "model   9  bfloat16, float32,",
        "           int64",
        "total  10",
    ]


def test_a_tree_shows_one_layer_of_equal_ones_and_how_many_there_are() -> None:
    layers = {
        f"decoder.layers.{i}.{n}": Tensor("bfloat16", (8, 4))
        for i in range(3)
        for n in ("a.weight", "b.bias")
    }
    rows = tree_rows(build_tree({"embedding.weight": Tensor("float32", (16,)), **layers}))
    assert list(table(PLAIN, list(rows), align="<<<>")) == [
        "embedding.weight      float32   [16]                64 B",
        "decoder.layers.[0-2]            3 × 2 tensors  3 × 128 B",
        "├─ a.weight           bfloat16  [8, 4]              64 B",
        "└─ b.bias             bfloat16  [8, 4]              64 B",
    ]


def test_names_in_a_tree_cannot_reach_the_terminal() -> None:
    (row,) = tree_rows(build_tree({"\x1b[2Jx": Tensor("int8", ())}))
    assert row[0].text == "\\x1b[2Jx"


def test_shortened_lists_say_how_much_is_missing() -> None:
    assert list(first_lines(PLAIN, ["1", "2", "3"], 2)) == [
        "1",
        "2",
        "… 1 more line; --limit 0 shows all",
    ]
    assert list(first_lines(PLAIN, ["1", "2", "3"], 0)) == ["1", "2", "3"]


def test_a_page_is_drawn_block_by_block() -> None:
    page: list[Block] = [
        ("✓ ", title_cell("a\nb")),
        Facts([("format", "zarr"), ("", "more")], indent=2),
        Table([("w", "1 B")], align="<>", head=("name", "bytes")),
        lambda screen: [f"of {screen.width} columns"],
        dim_cell("… 3 more"),
    ]
    assert list(draw_text(Screen(40, has_unicode=False), page)) == [
        "+ a\\nb",
        "  format  zarr",
        "          more",
        "name  bytes",
        "w       1 B",
        "of 40 columns",
        "... 3 more",
    ]
    assert line_text(("✓ ", title_cell("a"))) == "✓ a"
