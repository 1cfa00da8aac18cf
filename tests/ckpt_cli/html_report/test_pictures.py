"""The tables and shard maps of reports, from pictures made by hand."""

from __future__ import annotations

import json

from ckpt_cli.html_report.grid import CellFindings, Grid, Legend
from ckpt_cli.html_report.heat_table import MAX_COLUMNS, MAX_ROWS, heat_blocks
from ckpt_cli.html_report.moves_table import MAX_SIDE, moves_table
from ckpt_cli.html_report.rank_table import MAX_CELLS, rank_table
from ckpt_cli.html_report.shard_layouts import MAX_BOXES, ShardLayouts
from ckpt_cli.html_report.tensor_table import table_json
from core.arrays.box import Box
from core.engine.catalog.tensor import Tensor
from core.verbs.pictures.heat import HeatCell, HeatMap
from core.verbs.pictures.ranks import RankCell, RankGrid
from core.verbs.pictures.shards import RankMoves, Shard, ShardMap


def grid(pp: int, tp: int, *, missing: int = -1) -> RankGrid:
    cells = tuple(
        RankCell(p, t, 0, "0-3", "", (), 100, 300, (f"r{p}_{t}",), p * tp + t == missing)
        for p in range(pp)
        for t in range(tp)
    )
    return RankGrid(pp, tp, 1, 1, cells)


def test_a_missing_rank_is_named_and_not_only_coloured() -> None:
    table = rank_table(grid(2, 2, missing=3))
    assert "1 missing" in table.title
    cell = table.rows[1][1][1]
    assert cell is not None and cell.text == "✗ missing" and "missing" in cell.tip


def test_findings_are_shown_in_the_cell_of_their_rank() -> None:
    table = rank_table(grid(2, 2), {"pp1 tp0": CellFindings("error", "2 findings")})
    findings = [[cell and cell.findings for cell in cells] for _, cells in table.rows]
    assert findings == [[None, None], [CellFindings("error", "2 findings"), None]]
    cell = table.rows[1][1][0]
    assert cell is not None and cell.style.endswith("has-error")


def test_a_grid_of_many_ranks_is_cut_and_says_so() -> None:
    table = rank_table(grid(1024, 4))
    assert sum(len(cells) for _, cells in table.rows) <= MAX_CELLS
    assert "768 more are not shown" in table.is_cut


def test_moves_keep_their_sums_when_ranks_are_put_together() -> None:
    n = 1024
    names = tuple(f"tp{i} pp0" for i in range(n))
    moves = RankMoves(names, names[:2], tuple((1024, 2048 if i == 0 else 0) for i in range(n)))
    table = moves_table(moves)
    assert table is not None
    assert len(table.rows) <= MAX_SIDE + 1
    name, totals = table.rows[-1]
    assert name == "sum" and [cell and cell.text for cell in totals] == ["1.00 MiB", "2.00 KiB", ""]
    assert table.rows[0][0] == "tp0 pp0 – tp42 pp0"


def test_a_cell_of_the_same_rank_on_both_sides_is_marked() -> None:
    table = moves_table(RankMoves(("tp0", "tp1"), ("tp0",), ((10,), (30,))))
    assert table is not None
    styles = [cells[0] and cells[0].style for _, cells in table.rows]
    assert styles == ["h3 stays", "h6", ""]
    assert "10 B stay" in table.title


def test_without_moves_there_is_no_matrix() -> None:
    assert moves_table(RankMoves((), (), ())) is None


def heat(n_layers: int, n_modules: int) -> HeatMap:
    cells = tuple(
        tuple(
            HeatCell(
                (f"{row}.{column}",), "values", 0.5 if row == column == n_layers - 1 else 1e-9, 1
            )
            for column in range(n_modules)
        )
        for row in range(n_layers)
    )
    modules = tuple(f"m{i}" for i in range(n_modules))
    return HeatMap("model", "layers", tuple(range(n_layers)), modules, cells, ())


def test_a_large_heat_map_keeps_the_worst() -> None:
    legend, table = heat_blocks([heat(300, 400)])
    assert isinstance(legend, Legend) and isinstance(table, Grid)
    assert legend.items == (("r0", "5e-10 or less"), ("r9", "0.5"))
    assert len(table.rows) == MAX_ROWS and len(table.columns) == MAX_COLUMNS
    assert "172 layers and 368 modules not shown" in table.is_cut
    assert any(cell and cell.style == "r9" for _, cells in table.rows for cell in cells)


def test_kinds_without_numbers_have_words() -> None:
    kinds = ("only_a", "shape", "equal", "unread")
    cells = tuple(HeatCell((kind,), kind, None, 0) for kind in kinds)
    maps = [HeatMap("model", "h", (7,), kinds, (cells,), cells)]
    legend, layers, outside = heat_blocks(maps)
    assert isinstance(legend, Legend) and isinstance(layers, Grid) and isinstance(outside, Grid)
    assert [style for style, _ in legend.items] == ["equal", "unread", "kind"]
    assert [cell and cell.text for cell in layers.rows[0][1]] == ["only A", "shape", "=", "–"]
    assert [cell and cell.text for _, (cell,) in outside.rows] == ["only A", "shape", "=", "–"]
    assert (layers.title, layers.rows[0][0]) == ("Model", "h 7")
    assert (outside.title, outside.rows[0][0]) == ("Model, outside layers", "only_a")


def sharded(key: str, n: int, *, file: str) -> ShardMap:
    shards = tuple(
        Shard(Box((2 * i,), (2,)), (f"tp{i} pp0",), (f"{file}{i}",), 8) for i in range(n)
    )
    return ShardMap(key, (2 * n,), "float32", (0,), shards)


def test_equal_shard_maps_are_stored_once() -> None:
    layouts = ShardLayouts()
    numbers = [layouts.add(sharded(f"l.{i}", 4, file="f")) for i in range(100)]
    assert numbers == [0] * 100
    assert len(layouts.data["boxes"]) == len(layouts.data["holders"]) == 1


def test_maps_that_differ_in_files_share_their_boxes() -> None:
    layouts = ShardLayouts()
    assert [layouts.add(sharded("a", 4, file=file)) for file in "fgf"] == [0, 1, 0]
    assert len(layouts.data["boxes"]) == 1


def test_a_tensor_of_many_boxes_keeps_their_number() -> None:
    layouts = ShardLayouts()
    layouts.add(sharded("a", 5000, file="f"))
    (boxes, *_), (map_entry, *_) = layouts.data["boxes"], layouts.data["maps"]
    assert isinstance(boxes, tuple) and len(boxes) == MAX_BOXES
    assert isinstance(map_entry, tuple) and map_entry[-1] == 5000


def test_a_report_of_many_tensors_is_bounded() -> None:
    vector = Tensor("float32", (4,))
    wild = {f"{i * 7919:x}." + "n" * 150: vector for i in range(40_000)}
    table = table_json(wild, map_of=lambda key: sharded(key, 2, file=key))
    assert len(json.dumps(table)) < 3_000_000
    assert isinstance(table["leftOut"], int) and table["leftOut"] > 0
    assert isinstance(table["withoutMap"], int) and table["withoutMap"] > 0


def test_equal_layers_are_one_row() -> None:
    vector = Tensor("float32", (4,))
    layers = {f"l.{i}.e.{j}.w": vector for i in range(100) for j in range(100)}
    table = table_json(layers, map_of=lambda key: sharded(key, 2, file="f"))
    assert len(json.dumps(table)) < 2_000
    assert table["withoutMap"] == 0
