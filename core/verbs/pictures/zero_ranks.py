"""Arrange the files of a DeepSpeed checkpoint by the ranks that wrote them.

ZeRO-1, 2 and 3 write an optimizer file per rank, ZeRO-3 a model file per rank as well; the model
file of ZeRO-1 and 2 is written by rank 0. The names are enough for the grid, so that a checkpoint
of which ranks are missing, and which therefore cannot be opened, has one.
Each model-parallel rank (``mp_rank_NN``: a pipeline stage, and a tensor-parallel rank in it) has
such files of its own, for the same data-parallel ranks.

Not supported: files of single experts and of the layers of a pipeline, which are not those of a
rank; universal checkpoints, which have no ranks. Model-parallel ranks behind the last one that has
a file are not known.

Source: ``core.formats.deepspeed.files``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path

from core.errors import CheckpointingException
from core.files.remote_path import location_of
from core.formats.deepspeed.files import name_of_mp_rank, name_of_rank, parse_zero_name
from core.formats.deepspeed.optim_states import recorded_ranks
from core.opening.locate import locate_checkpoint
from core.values import dataclass

_MOST_RANKS = 1 << 17
_MOST_MODEL_RANKS = 1 << 10


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
        kinds: ``model`` and ``optimizer``, with several model-parallel ranks ``model mp 0`` and so
            on → their files, by rank; without kinds that have none.
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
            # Sort the files by kind, model-parallel rank and data-parallel rank.
            sizes = store.sizes()
            names: dict[str, dict[int, dict[int, str]]] = {"model": {}, "optimizer": {}}
            for name in sorted(sizes):
                parts = parse_zero_name(name)
                if parts is not None:
                    by_rank = names[parts.kind].setdefault(parts.mp_rank, {})
                    by_rank[parts.rank] = name
            if not names["optimizer"]:
                return None
            every = [by_rank for of_kind in names.values() for by_rank in of_kind.values()]
            n_mp = max(mp_rank for of_kind in names.values() for mp_rank in of_kind) + 1
            # Names cannot show that the last ranks are missing; the files record their number.
            optimizer = chain.from_iterable(
                by_rank.values() for by_rank in names["optimizer"].values()
            )
            n_ranks = max(recorded_ranks(store, optimizer) or 0, 1 + max(map(max, every)))
            if n_ranks > _MOST_RANKS or n_mp > _MOST_MODEL_RANKS:
                return None
            like_of = {
                kind: name
                for kind, of_kind in names.items()
                for by_rank in of_kind.values()
                for name in by_rank.values()
            }
            return ZeroGrid(
                n_ranks,
                {
                    kind if n_mp == 1 else f"{kind} mp {mp_rank}": _files_of_ranks(
                        of_kind.get(mp_rank, {}),
                        sizes,
                        n_ranks,
                        like=name_of_mp_rank(like_of[kind], mp_rank),
                    )
                    for kind, of_kind in names.items()
                    if of_kind
                    for mp_rank in range(n_mp)
                },
            )
    return None


def _files_of_ranks(
    by_rank: dict[int, str], sizes: Mapping[str, int], n_ranks: int, *, like: str
) -> tuple[ZeroFile, ...]:
    """Return the files of one kind, and those that should exist.

    Args:
        by_rank: rank → name of its file.
        sizes: name → bytes.
        like: name of one of the files, which may be missing.
    """
    # The only model file of ZeRO-1 and 2 has no rank in its name.
    ranks = range(n_ranks) if name_of_rank(like, n_ranks) != like else range(1)
    return tuple(
        ZeroFile(rank, name, sizes[name])
        if (name := by_rank.get(rank)) is not None
        else ZeroFile(rank, name_of_rank(like, rank), None)
        for rank in ranks
    )
