"""Arrange the files of a DeepSpeed checkpoint by the data-parallel ranks that wrote them.

ZeRO-1, 2 and 3 write an optimizer file per rank, ZeRO-3 a model file per rank as well; the model
file of ZeRO-1 and 2 is written by rank 0. The names are enough for the grid, so that a checkpoint
of which ranks are missing, and which therefore cannot be opened, has one.

Not supported: model-parallel ranks and pipeline stages, which are not read; files of single
experts, which are not those of a rank; universal checkpoints, which have no ranks.

Source: ``core.formats.deepspeed.files``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from core.errors import CheckpointingException
from core.files.remote_path import location_of
from core.formats.deepspeed.files import kind_and_rank, name_of_rank
from core.formats.deepspeed.optim_states import recorded_ranks
from core.opening.open import locate_checkpoint

_MOST_RANKS = 1 << 17


@dataclass(frozen=True, slots=True)
class ZeroFile:
    """The file of a data-parallel rank.

    Args:
        rank: number of the rank.
        name: name of the file.
        n_bytes: size of the file; None if it is missing.
    """

    rank: int
    name: str
    n_bytes: int | None


@dataclass(frozen=True, slots=True)
class ZeroGrid:
    """The files of a DeepSpeed checkpoint.

    Args:
        n_ranks: number of data-parallel ranks.
        kinds: ``model`` and ``optimizer`` → their files, by rank; without kinds that have none.
    """

    n_ranks: int
    kinds: dict[str, tuple[ZeroFile, ...]]

    @property
    def missing(self) -> list[ZeroFile]:
        """The files that are missing."""
        return [file for files in self.kinds.values() for file in files if file.n_bytes is None]


def read_zero_grid(path: str | Path) -> ZeroGrid | None:
    """Arrange the files of a DeepSpeed checkpoint that may lack some of them.

    Args:
        path: path or URL of the checkpoint.

    Returns:
        None if it is not a checkpoint of ZeRO-1, 2 or 3, or cannot be read.
    """
    with suppress(CheckpointingException):
        store = locate_checkpoint(location_of(path)).store
        with closing(store):
            # Sort the files by kind and rank.
            sizes = store.sizes()
            names: dict[str, dict[int, str]] = {}
            for name in sorted(sizes):
                kind = kind_and_rank(name)
                if kind is not None:
                    names.setdefault(kind[0], {})[kind[1]] = name
            optimizer = names.get("optimizer")
            if not optimizer:
                return None
            # Names cannot show that the last ranks are missing; the files record their number.
            last = max(rank for by_rank in names.values() for rank in by_rank)
            n_ranks = max(recorded_ranks(store, optimizer.values()) or 0, last + 1)
            if n_ranks > _MOST_RANKS:
                return None
            return ZeroGrid(
                n_ranks,
                {
                    kind: _files_of_ranks(names[kind], sizes, n_ranks)
                    for kind in ("model", "optimizer")
                    if kind in names
                },
            )
    return None


def _files_of_ranks(
    by_rank: dict[int, str], sizes: Mapping[str, int], n_ranks: int
) -> tuple[ZeroFile, ...]:
    """Return the files of one kind, and those that should exist.

    Args:
        by_rank: rank → name of its file; at least one.
        sizes: name → bytes.
    """
    like = next(iter(by_rank.values()))
    # The only model file of ZeRO-1 and 2 has no rank in its name.
    ranks = range(n_ranks) if name_of_rank(like, n_ranks) != like else by_rank
    return tuple(
        ZeroFile(rank, name, sizes[name])
        if (name := by_rank.get(rank)) is not None
        else ZeroFile(rank, name_of_rank(like, rank), None)
        for rank in ranks
    )
