"""The table of tensors: equal layers folded to one row, details of each on demand.

Numbers are counted against limits, so that a report stays small however large the checkpoint is;
what is left out is stated in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.html_report.names import fold_names
from ckpt_cli.html_report.shard_layouts import ShardLayouts, moves_json
from core.errors import CheckpointingException
from core.megatron.optimizer.form import role_of

if TYPE_CHECKING:
    from core.engine.catalog.tensor import AnyTensor
    from core.engine.numbers.statistics import ValueStatistics
    from core.verbs.pictures.shards import ShardMap, ShardMove

MAX_CHARACTERS = 1_000_000
"""Most characters of all names together."""
MAX_STATISTICS = 6_000
"""Most tensors whose statistics are in a report."""


def table_json(
    tensors: Mapping[str, AnyTensor],
    *,
    bare: Callable[[str], str] = str,
    map_of: Callable[[str], ShardMap] | None = None,
    move_of: Callable[[str], ShardMove] | None = None,
    statistics: Mapping[str, ValueStatistics | None] | None = None,
    layers: Mapping[str, tuple[ValueStatistics, ...] | None] | None = None,
    numbers_of: Callable[[ValueStatistics], dict[str, object]] | None = None,
) -> dict[str, object]:
    """Return the JSON value of the table, the largest rows first.

    A row is ``[parts of the names, dtype, shape, bytes of one, role, maps, maps after, moves,
    statistics, statistics of layers]``: maps are a number for each tensor, or one for all of them
    if they are equal; the last is for one tensor in which layers are stacked.

    Args:
        bare: returns a key without its rank directory.
        map_of: returns the shard map of a key; None if the report has no maps.
        move_of: returns the shard maps before and after; it replaces ``map_of``.
        statistics: descriptions of values by key, of those that were measured.
        layers: descriptions of the layers of each tensor by key.
        numbers_of: returns what the report shows of a description.
    """
    # Fold the names, and leave out the smallest tensors if there are too many names.
    names = fold_names(
        {key: (tensor.dtype, tensor.shape, role_of(bare(key))) for key, tensor in tensors.items()}
    )
    names.sort(key=lambda name: -tensors[name.keys[0]].n_bytes * len(name.keys))
    layouts = ShardLayouts()
    rows: list[list[object]] = []
    n_characters = n_left_out = n_described = n_without_map = 0
    for name in names:
        n_characters += 24 + sum(len(str(part)) for part in name.parts)
        if n_characters > MAX_CHARACTERS:
            n_left_out += len(name.keys)
            continue
        first_key = name.keys[0]
        first = tensors[first_key]
        row = [name.parts, first.dtype, first.shape, first.n_bytes, role_of(bare(first_key))]
        # Shard maps, as long as there is room for them.
        before, after, moves = _maps_of(name.keys, layouts, map_of=map_of, move_of=move_of)
        n_without_map += len(name.keys) - len(before)
        # Statistics of the single tensors.
        described: list[object] = []
        if statistics and numbers_of is not None and n_described < MAX_STATISTICS:
            described = [
                None if (values := statistics.get(key)) is None else numbers_of(values)
                for key in name.keys
            ]
            described = described if any(described) else []
            n_described += len(described)
        stacked: list[object] = []
        parts = (layers or {}).get(first_key) or ()
        if len(name.keys) == 1 and len(parts) > 1 and described and numbers_of is not None:
            stacked = [numbers_of(part) for part in parts]
            n_described += len(stacked)
        n = len(name.keys)
        rows.append([*row, _folded(before, n), _folded(after, n), moves, described, stacked])
    return {
        "rows": rows,
        "tensors": len(tensors),
        "leftOut": n_left_out,
        "withoutMap": n_without_map if map_of or move_of else 0,
        "layouts": layouts.data,
    }


def left_out_text(table: Mapping[str, object]) -> str:
    """Return sentences on what ``table_json`` left out, each after a space; "" if nothing."""
    text = ""
    if table["leftOut"]:
        text += f" The {table['leftOut']:,} smallest tensors are left out."
    if table["withoutMap"]:
        text += f" {table['withoutMap']:,} tensors have no shard map in this report."
    return text


def _maps_of(
    keys: Sequence[str],
    layouts: ShardLayouts,
    *,
    map_of: Callable[[str], ShardMap] | None,
    move_of: Callable[[str], ShardMove] | None,
) -> tuple[list[int], list[int], list[list[int]]]:
    """Return the numbers of the keys' maps before and after, and what moves between these.

    Tensors of equal layers usually have equal moves, which are then stored once.

    Returns:
        Lists that end where there is no room for another map, or a map cannot be derived.
    """
    before: list[int] = []
    after: list[int] = []
    moves: list[list[int]] = []
    for key in keys:
        if layouts.is_full:
            break
        try:
            if move_of is not None:
                move = move_of(key)
                before.append(layouts.add(move.before))
                after.append(layouts.add(move.after))
                moves.append(moves_json(move.moves))
            elif map_of is not None:
                before.append(layouts.add(map_of(key)))
        except CheckpointingException:
            break  # a damaged tensor has no map; its problem is listed elsewhere
    distinct = moves[:1] if all(move == moves[0] for move in moves) else moves
    return before, after, distinct


def _folded(numbers: list[int], n: int) -> list[int] | int:
    """Return one number in place of a list of ``n`` equal ones."""
    return numbers[0] if len(numbers) == n and len(set(numbers)) == 1 else numbers
