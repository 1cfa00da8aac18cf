"""The grid of ranks fits into a terminal, whatever its sizes, and names what is missing."""

from __future__ import annotations

from collections.abc import Container

import pytest

from ckpt_cli.pages.pictures.ranks import rank_lines
from ckpt_cli.screen.terminal import Screen, columns_of
from core.verbs.pictures.ranks import RankCell, RankGrid

Position = tuple[int, int, int]


def grid_of(
    *, tp: int, pp: int, ep: int = 1, missing: Container[Position] = (), optimizer: int = 0
) -> RankGrid:
    """A grid of 4 layers per stage and 16 experts per expert rank; ``missing`` are (pp, ep, tp)."""

    def cell(p: int, e: int, t: int) -> RankCell:
        is_missing = (p, e, t) in missing
        n_bytes = 0 if is_missing else 1 << 30
        return RankCell(
            p, t, e, f"{4 * p}-{4 * p + 3}", f"{16 * e}-{16 * e + 15}" if ep > 1 else "",
            ("embedding",) if p == 0 and not is_missing else (),
            n_bytes, optimizer * n_bytes, () if is_missing else ("file",), is_missing,
        )  # fmt: skip

    cells = [cell(p, e, t) for p in range(pp) for e in range(ep) for t in range(tp)]
    return RankGrid(pp, tp, ep, 1, tuple(cells))


@pytest.mark.parametrize("has_unicode", [True, False])
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("sizes", [(2, 2, 1), (4, 4, 1), (8, 16, 1), (8, 16, 8), (8, 128, 1)])
def test_every_grid_fits(sizes: Position, width: int, *, has_unicode: bool) -> None:
    tp, pp, ep = sizes
    grid = grid_of(tp=tp, pp=pp, ep=ep, missing={(1, 0, 1)}, optimizer=3)
    lines = list(rank_lines(Screen(width, has_unicode=has_unicode), grid))
    assert max(map(columns_of, lines)) <= width
    assert len(lines) < 45
    assert has_unicode or all(line.isascii() for line in lines)


def test_cells_have_the_bytes_of_model_and_optimizer() -> None:
    lines = list(rank_lines(Screen(100), grid_of(tp=2, pp=2, optimizer=3)))
    assert lines[0] == "TP 2 · PP 2: 4 ranks, 16.0 GiB"
    assert lines[-2:] == [
        "pp 0  0-3     1.00 GiB + 3.00 GiB  1.00 GiB + 3.00 GiB  embedding",
        "pp 1  4-7     1.00 GiB + 3.00 GiB  1.00 GiB + 3.00 GiB",
    ]


def test_missing_ranks_are_named_without_colour_and_red_with_it() -> None:
    grid = grid_of(tp=2, pp=2, missing={(1, 0, 1)})
    plain = list(rank_lines(Screen(80), grid))
    assert plain[0].endswith("4 ranks, 3.00 GiB, 1 missing")
    assert plain[-1] == "missing: tp 1 pp 1, with layers 4-7"
    assert plain[-3].split() == ["pp", "1", "4-7", "1.00", "GiB", "missing"]
    colored = list(rank_lines(Screen(80, has_color=True), grid))
    assert "\x1b[31mmissing\x1b[0m" in colored[-3]


def test_missing_rank_of_a_wide_grid_is_one_red_mark() -> None:
    grid = grid_of(tp=8, pp=16, missing={(5, 0, 3)})
    (line,) = (line for line in rank_lines(Screen(80), grid) if line.startswith("pp 5 "))
    assert line.split()[2] == "■■■✗■■■■"
    (line,) = (line for line in rank_lines(Screen(80, True), grid) if "pp 5" in line[:9])
    assert "■■■\x1b[31m✗\x1b[0m■■■■" in line
    (line,) = (
        line for line in rank_lines(Screen(80, has_unicode=False), grid) if line.startswith("pp 5 ")
    )
    assert line.split()[2] == "###X####"


def test_rows_of_many_ranks_are_folded_but_for_the_missing_one() -> None:
    grid = grid_of(tp=8, pp=16, ep=8, missing={(5, 2, 3)})
    lines = list(rank_lines(Screen(80), grid))
    assert [line.split()[3:7] for line in lines if line.startswith("pp 5 ")] == [
        ["ep", "0-1", "20-23", "0-15"],
        ["ep", "2", "20-23", "32-47"],
        ["ep", "3-7", "20-23", "48-63"],
    ]
    assert lines[-1] == "missing: tp 3 pp 5 ep 2, with layers 20-23 and experts 32-47"
    # Stages fold where their expert ranks are not enough; --limit 0 folds nothing.
    grid = grid_of(tp=8, pp=128)
    assert "pp 1-127" in "".join(rank_lines(Screen(80), grid))
    assert len(list(rank_lines(Screen(80), grid, folds=False))) > 128


def test_many_missing_ranks_are_counted() -> None:
    grid = grid_of(tp=8, pp=4, missing={(p, 0, t) for p in range(3) for t in range(8)})
    lines = list(rank_lines(Screen(80), grid))
    assert lines[-1] == "… 12 more missing ranks"
    assert sum(line.startswith("missing:") for line in lines) == 12


def test_names_from_the_checkpoint_are_escaped() -> None:
    cell = RankCell(0, 0, 0, "0", "", ("\x1b[31mevil",), 1, 0, ("a\nb",), is_missing=True)
    lines = list(rank_lines(Screen(80), RankGrid(1, 1, 1, 1, (cell,))))
    assert not any("\x1b" in line or "\n" in line for line in lines)
    assert "unreadable (a\\nb): tp 0 pp 0, with layers 0" in lines
