"""Bars are to scale, and many small or repeated modules take few lines."""

from __future__ import annotations

import pytest

from ckpt_cli.pages.pictures.bars import columns_text, draw_bar
from ckpt_cli.pages.pictures.sizes import size_lines, sizes_json
from ckpt_cli.screen.terminal import Screen, columns_of
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.tensor import Tensor
from core.verbs.pictures.sizes import SizeNode, sizes_of


def sizes(**shapes: int) -> tuple[SizeNode, SizeNode]:
    tensors = {key: Tensor("uint8", (n,)) for key, n in shapes.items()}
    return sizes_of(Catalog("torch", None, tensors))


@pytest.mark.parametrize(
    ("share", "bar"), [(0, ""), (1e-9, "▏"), (0.5, "████"), (0.25 + 1 / 64, "██▏"), (1, "█" * 8)]
)
def test_bars_are_to_scale(share: float, bar: str) -> None:
    assert draw_bar(share, 8) == bar


def test_columns_are_to_scale_and_never_vanish() -> None:
    assert columns_text([0, 1, 500, 1000, 0]) == " ▁▄█ "
    assert columns_text([0, 0]) == "  "


def test_every_module_has_a_bar_of_its_share() -> None:
    model, optimizer = sizes(**{"a.w": 1024, "b.w": 3072, "optimizer.state.exp_avg.a.w": 2048})
    lines = list(size_lines(Screen(80), model, optimizer, sort=None))
    names = [line.split()[0] for line in lines[:4]]
    assert names == ["model", "b.w", "a.w", "optimizer"]
    full = lines[0].count("█")
    assert [line.count("█") for line in lines[:4]] == [full, full * 3 // 4, full // 4, full // 2]
    assert [line.split()[-2] for line in lines[:4]] == ["66.7", "50.0", "16.7", "33.3"]


def test_modules_are_sorted_by_size_or_name() -> None:
    model, optimizer = sizes(a=1, b=3, c=2)
    for sort, order in ((None, "bca"), ("name", "abc")):
        lines = list(size_lines(Screen(80), model, optimizer, sort=sort))
        assert "".join(line.split()[0] for line in lines[1:4]) == order


def test_layers_fold_and_equal_states_are_not_repeated() -> None:
    params = [f"layers.{n}.{name}" for n in range(1000) for name in ("q.w", "k.w")]
    states = ("exp_avg", "exp_avg_sq")
    model, optimizer = sizes(
        **dict.fromkeys(params, 8),
        **{f"optimizer.state.{state}.{key}": 16 for state in states for key in params},
    )
    lines = list(size_lines(Screen(120), model, optimizer, sort=None))
    assert len(lines) < 14
    text = "\n".join(lines)
    assert "exp_avg_sq.layers.[0-999] (as exp_avg.layers.[0-999])" in text
    assert "layers.[0-999]" in text
    assert lines[-2] == "6,000 tensors, 78.1 KiB"


def test_many_small_modules_are_one_line() -> None:
    model, optimizer = sizes(**{f"m{chr(97 + n)}x": 1 for n in range(20)}, large=180)
    lines = list(size_lines(Screen(80), model, optimizer, sort=None))
    assert lines[2].split()[:4] == ["…", "20", "smaller", "tensors"]


@pytest.mark.parametrize("has_unicode", [True, False])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_picture_fits(width: int, *, has_unicode: bool) -> None:
    model, optimizer = sizes(**{"x" * 10_000: 5, "\x1b[31m\n": 5, "a.b.c": 2})
    lines = list(size_lines(Screen(width, has_unicode=has_unicode), model, optimizer, sort=None))
    assert max(map(columns_of, lines)) <= width
    assert not any("\x1b" in line or "\n" in line for line in lines)
    assert has_unicode or all(line.isascii() for line in lines)


def test_json_has_the_folded_trees() -> None:
    model, optimizer = sizes(**{"layers.0.w": 1, "layers.1.w": 1})
    assert sizes_json(model, optimizer) == {
        "model": {
            "name": "", "bytes": 2, "tensors": 2,
            "children": [{"name": "layers.[0-1].w", "bytes": 2, "tensors": 2, "children": []}],
        },
        "optimizer": {"name": "", "bytes": 0, "tensors": 0, "children": []},
    }  # fmt: skip
