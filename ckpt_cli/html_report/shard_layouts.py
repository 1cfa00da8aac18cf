"""Shard maps of many tensors, encoded so that equal parts are stored once.

The tensors of equal layers have equal boxes, and differ at most in who holds them. So boxes and
holders are numbered separately, and a tensor refers to both by number.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice
from typing import TYPE_CHECKING

from ckpt_cli.html_report.names import shown_name

if TYPE_CHECKING:
    from core.verbs.pictures.shards import BoxMove, ShardMap

MAX_BOXES = 1024
"""Most boxes of one map; the others are counted."""
MAX_NUMBERS = 120_000
"""Most numbers of all maps together (about four bytes each); tensors beyond have no map."""
MAX_MOVES = 4096
"""Most moves of one tensor that are drawn."""
MAX_HOLDERS = 8
"""Most copies of a box that are named; the others are counted."""


class ShardLayouts:
    """The shard maps of one checkpoint, as they are collected.

    Attributes:
        data: the JSON value: ``names``, ``boxes`` and ``holders``, which contain numbers only, and
            ``maps``: ``[boxes, holders, cut axes, number of boxes]``.
        is_full: there is no room for another map.
    """

    def __init__(self) -> None:
        self.data: dict[str, list[object]] = {"names": [], "boxes": [], "holders": [], "maps": []}
        self._number_of: dict[tuple[str, Hashable], int] = {}
        self._n_numbers = 0

    @property
    def is_full(self) -> bool:
        """True if the limit of all maps together is reached."""
        return self._n_numbers > MAX_NUMBERS

    def add(self, shard_map: ShardMap) -> int:
        """Add a map and return its number."""
        shards = shard_map.shards[:MAX_BOXES]
        boxes = tuple((*shard.box.offset, *shard.box.shape) for shard in shards)
        # Of each box: the ranks and the files of its copies, and the number of copies.
        holders = tuple(
            (
                tuple(self._name(rank) for rank in shard.ranks[:MAX_HOLDERS]),
                tuple(self._name(file) for file in dict.fromkeys(shard.files[:MAX_HOLDERS])),
                max(len(shard.ranks), len(shard.files)),
                shard.n_bytes,
            )
            for shard in shards
        )
        entry = (
            self._number("boxes", boxes),
            self._number("holders", holders),
            shard_map.cut_axes,
            len(shard_map.shards),
        )
        return self._number("maps", entry)

    def _name(self, text: str) -> int:
        """Return the number of the name of a rank or file."""
        return self._number("names", shown_name(text))

    def _number(self, kind: str, value: Hashable) -> int:
        """Return the number of a value among those of its kind."""
        values = self.data[kind]
        number = self._number_of.setdefault((kind, value), len(values))
        if number == len(values):
            values.append(value)
            self._n_numbers += _count_numbers(value)
        return number


def moves_json(moves: tuple[BoxMove, ...]) -> list[int]:
    """Return moves as a flat list of (source, target, bytes), those between shown boxes only."""
    shown = (move for move in moves if move.source < MAX_BOXES and move.target < MAX_BOXES)
    return [
        number
        for move in islice(shown, MAX_MOVES)
        for number in (move.source, move.target, move.n_bytes)
    ]


def _count_numbers(value: object) -> int:
    """Return the number of numbers in nested tuples, and of four characters in a text."""
    if isinstance(value, tuple):
        return sum(map(_count_numbers, value))
    return len(value) // 4 + 1 if isinstance(value, str) else 1
