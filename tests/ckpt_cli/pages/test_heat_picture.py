"""The map of differences fits, shows the greatest ones, and can be read without colours."""

from __future__ import annotations

import math

import pytest

from ckpt_cli.pages.pictures.heat import heat_lines, maps_json, mark_of
from ckpt_cli.screen.terminal import Screen, columns_of
from core.verbs.pictures.heat import HeatCell, HeatMap, HeatScale

EQUAL = HeatCell(("k",), "equal", None, 0)


def cell(relative: float | None, *, n_nan: int = 0) -> HeatCell:
    return HeatCell(("k",), "values", relative, 1, n_nan)


def heat(
    n_layers: int,
    n_modules: int,
    differing: dict[tuple[int, int], HeatCell | None] | None = None,
    *,
    outside: tuple[HeatCell, ...] = (),
    name: str = "module",
) -> HeatMap:
    """A map of equal cells, but for some of (layer, module)."""
    cells = tuple(
        tuple((differing or {}).get((layer, at), EQUAL) for at in range(n_modules))
        for layer in range(n_layers)
    )
    modules = tuple(f"{name}{at}" for at in range(n_modules))
    return HeatMap("model", "layers", tuple(range(n_layers)), modules, cells, outside)


@pytest.mark.parametrize(
    ("shown", "mark"),
    [
        (None, " "),
        (EQUAL, "."),
        (cell(1e-3), "6"),
        (cell(2e-3), "6"),
        (cell(0.9), "9"),
        (cell(math.inf), "9"),
        (cell(1e-30), "0"),
        (cell(0.0), "0"),
        (cell(None), "x"),
        (cell(1e-3, n_nan=1), "N"),
        (HeatCell(("k",), "dtype", 1e-3, 4), "D"),
        (HeatCell(("k",), "shape", None, 0), "S"),
        (HeatCell(("k",), "only_a", None, 0), "A"),
        (HeatCell(("k",), "only_b", None, 0), "B"),
        (HeatCell(("k",), "close", 1e-3, 1), "~"),
        (HeatCell(("k",), "unread", None, 0), "?"),
    ],
)
def test_every_result_has_a_character(shown: HeatCell | None, mark: str) -> None:
    assert mark_of(shown, HeatScale(1.0, 10)) == mark
    outside = () if shown is None else (shown,)
    legend = "\n".join(heat_lines(Screen(80), [heat(0, 0, outside=outside)])).split("\n\n")[-1]
    assert ("|A-B|/|A| is about" in legend) == mark.isdigit()
    assert mark in " 069" or f"{mark} " in legend


def test_layers_and_modules_are_rows_and_numbered_columns() -> None:
    differing = {(1, 0): cell(0.1), (2, 2): None}
    outside = (cell(1e-5), EQUAL)
    assert list(heat_lines(Screen(80), [heat(4, 3, differing, outside=outside)])) == [
        "model: 4 layers, 3 modules, 2 tensors outside layers",
        "",
        "layers      1  2  3",
        "0           .  .  .",
        "1           9  .  .",
        "2           .  .",
        "3           .  .  .",
        "",
        "  1  module0    2  module1    3  module2",
        "",
        "outside layers",
        "  2  k",
        "  .  k",
        "",
        "|A-B|/|A| is about   9 0.1   2 6.1e-06   . equal",
    ]


def test_equal_layers_are_folded_if_there_are_many() -> None:
    lines = list(heat_lines(Screen(80), [heat(300, 3, {(200, 1): cell(0.1)})]))
    rows = [line.split() for line in lines[3:6]]
    assert rows == [["0-199", *"..."], ["200", *".9."], ["201-299", *"..."]]
    unfolded = list(heat_lines(Screen(80), [heat(300, 3)], folds=False))
    assert len(unfolded) > 300


def test_of_too_many_layers_those_that_differ_most_are_shown() -> None:
    differing = {(n, n % 2): cell(1e-5) for n in range(1000)}
    differing[777, 1] = cell(0.1)
    lines = list(heat_lines(Screen(80), [heat(1000, 2, differing)]))
    assert len(lines) < 140
    assert any(line.split() == ["777", ".", "9"] for line in lines)
    assert "not shown: 872 layers that differ less; --limit 0 shows all" in lines


def test_modules_that_do_not_fit_are_narrow_and_equal_ones_left_out() -> None:
    differing = {(0, at): cell(0.1) for at in range(40)}
    lines = list(heat_lines(Screen(80), [heat(2, 60, differing)]))
    assert lines[2].split() == ["layers", *map(str, range(1, 41, 5))]
    assert lines[3].split() == ["0", *["9" * 5] * 8]
    assert "not shown: 20 modules that differ less or not at all; --limit 0 shows all" in lines
    # Wider still, there are several blocks of rows.
    differing = {(0, at): cell(0.1) for at in range(100)}
    lines = list(heat_lines(Screen(80), [heat(2, 100, differing)]))
    assert [line.split()[1] for line in lines if line.startswith("layers")] == ["1", "56"]


def test_equal_modules_that_do_not_fit_leave_nothing_to_draw() -> None:
    lines = list(heat_lines(Screen(80), [heat(50, 1000)]))
    assert lines[:2] == [
        "model: 50 layers, 1,000 modules",
        "all layers are equal; --limit 0 draws them",
    ]


@pytest.mark.each_value
@pytest.mark.parametrize("has_unicode", [True, False])
@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("size", [(0, 0), (4, 9), (61, 30), (126, 90), (400, 300)])
def test_every_map_fits(size: tuple[int, int], width: int, *, has_unicode: bool) -> None:
    n_layers, n_modules = size
    differing: dict[tuple[int, int], HeatCell | None] = {
        (n, (7 * n) % max(n_modules, 1)): cell(10.0 ** -(n % 11)) for n in range(n_layers)
    }
    hostile = tuple(
        HeatCell((key,), "only_a", None, 0)
        for key in ("x" * 10_000, "\x1b[31m\n", "\u202e", "界" * 99)
    )
    shown = heat(n_layers, n_modules, differing, outside=hostile, name="\x1b[31m\nmlp.experts.")
    lines = list(heat_lines(Screen(width, has_unicode=has_unicode), [shown, shown]))
    assert max(map(columns_of, lines)) <= width
    assert not any("\x1b" in line or "\n" in line or "\u202e" in line for line in lines)
    assert has_unicode or "".join(lines).replace("界", "").isascii()
    n_blocks = -(-128 // ((width - 10) // 6 * 5))
    assert len(lines) < 2 * (n_blocks * 131 + 128 + 30)


def test_colours_repeat_what_the_characters_tell() -> None:
    shown = heat(2, 3, {(0, 0): cell(0.1), (0, 1): HeatCell(("k",), "shape", None, 0)})
    colored = list(heat_lines(Screen(80, has_color=True), [shown]))
    for line in (colored[3], colored[-1]):
        assert "\x1b[31m9\x1b[0m" in line and "\x1b[31;1mS\x1b[0m" in line


def test_json_has_every_cell() -> None:
    shown = heat(1, 2, {(0, 0): None, (0, 1): cell(math.inf)}, outside=(EQUAL,))
    equal = {"kind": "equal", "tensors": 1, "relative": None, "differing": 0, "nan": 0}
    differing = {"kind": "values", "tensors": 1, "relative": "inf", "differing": 1, "nan": 0}
    assert maps_json([shown]) == {
        "model": {
            "stack": "layers",
            "layers": [0],
            "modules": ["module0", "module1"],
            "cells": [[None, differing]],
            "outside": [{"key": "k", **equal}],
        }
    }
