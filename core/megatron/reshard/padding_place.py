"""Find the tensor parallel rank that has the padding of the vocabulary, which proves its place.

The padding is at the end of the last rank. Software that converts a model fills it with zeros or
with one repeated row, and training keeps such rows equal to each other; Megatron's own initial
values differ, and prove nothing::

    rank 0  rows    0 –  999
    rank 1  rows 1000 – 1899, then 100 equal rows: a vocabulary of 1900

A rank is known by equal rows in the number of the padding, at its end and not beyond, in every
tensor with a row per token that has such rows on any rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from core.engine.catalog.stored import StoredArray
from core.errors import CorruptError
from core.files.store import ReadStore
from core.megatron.model.facts import ModelFacts
from core.megatron.reshard.rank_model import RankTensor

_FEWEST_ROWS = 8
"""Fewer rows may be equal by chance: tokens that no text has."""
_N_SAMPLES = 16
"""Number of padding rows to compare, at equal distances."""


def find_misplaced_padding(
    tensors: Mapping[str, RankTensor], facts: ModelFacts, store: ReadStore
) -> CorruptError | None:
    """Return an error if another rank than the last has the padding of the vocabulary.

    Args:
        tensors: global name → the shards on all ranks.
        store: the checkpoint's files.
    """
    tp = facts.topology.tp
    holders: dict[int, tuple[str, str]] = {}
    for name, tensor in tensors.items() if tp > 1 else ():
        if tensor.rule.kind != "vocab" or facts.vocab_size is None:
            continue
        shards = {part.rank.tp: part for part in reversed(tensor.parts)}
        n_padding = sum(part.array.shape[0] for part in shards.values()) - facts.vocab_size
        if len(shards) < tp:
            continue
        ends = {
            rank: (name, part.folder)
            for rank, part in shards.items()
            if _ends_with_padding(part.array, n_padding, store)
        }
        if len(ends) > 1:
            return None  # equal rows that are no padding
        holders |= ends
    if len(holders) != 1 or tp - 1 in holders:
        return None
    ((rank, (name, folder)),) = holders.items()
    return CorruptError(
        f"the vocabulary padding is in tensor-parallel rank {rank}'s file, but belongs in the last "
        f"rank's file (rank {tp - 1})",
        key=name,
        rank=folder,
        hint="rename the rank directories so that the file with the padding belongs to the last "
        "tensor-parallel rank, or copy the checkpoint again",
    )


def _ends_with_padding(array: StoredArray, n_padding: int, store: ReadStore) -> bool:
    """Return whether as many equal rows as the padding has, and no more, end an array.

    The row before them may be equal as well: it is the one that was repeated.
    """
    extent = array.extent
    n_rows = array.shape[0]
    is_plain = not (extent.is_late or extent.encoding or extent.strides)
    if not _FEWEST_ROWS <= n_padding <= n_rows - 2 or not is_plain or len(array.shape) != 2:
        return False
    row_bytes = array.n_bytes // n_rows

    def row(number: int) -> bytes:
        return bytes(store.read(extent.file, extent.offset + number * row_bytes, row_bytes))

    last = row(n_rows - 1)
    step = -(-n_padding // _N_SAMPLES)
    padding: Iterator[int] = iter(range(n_rows - n_padding, n_rows, step))
    return all(row(number) == last for number in padding) and row(n_rows - n_padding - 2) != last
