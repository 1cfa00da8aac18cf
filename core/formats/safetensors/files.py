"""The files of a directory that are the checkpoint: one file, shards with an index, loose files, or
torch's pieces.

On disk, one of::

    model.safetensors
    model-00001-of-00002.safetensors …  model.safetensors.index.json     {"metadata": {"total_size": bytes},
                                                                          "weight_map": {tensor:
                                                                          file}}
    a.safetensors  b.safetensors …                                       no index; every tensor in one of them
    shard-00001-model-00001-of-00002.safetensors …                       pieces, see ``core.formats.safetensors.pieces``
    sharded/shard-00001-model-00001-of-00002.safetensors …               the same, beside consolidated files or alone

The stem need not be ``model`` (``adapter_model``, ``diffusion_pytorch_model``). An index decides
which files count; if there are complete files and pieces, the complete files do. Without an index,
files with a usual name count alone.

Source: huggingface_hub 2.4 ``serialization``; torch 2.13
    ``torch/distributed/checkpoint/hf_storage.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.errors import MissingShardError, UnsupportedError
from core.formats.huggingface.index import WeightIndex, read_index

if TYPE_CHECKING:
    from core.files.store import ReadStore

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
PIECES_DIR = "sharded"
STEMS = ("model", "adapter_model", "diffusion_pytorch_model")
"""Names that transformers, peft and diffusers look for; any other name becomes the first one when
it is written.
"""
_OF_A_MODEL = ("config.json", "adapter_config.json", "params.json", "ckpt-manifest.json")
"""WeightFiles that lie beside a model's weights."""
_PIECE = re.compile(r"shard-\d+-model-(\d+)-of-(\d+)\.safetensors")
_SHARD = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.safetensors")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a checkpoint.

    Args:
        names: the files with tensors, sorted.
        index: the index that counts, if there is one.
        is_pieces: whether the files are the pieces of single ranks.
        stem: one of ``STEMS``: the name of a file with all tensors, without the suffix.
        notes: what the user should know about the choice.
    """

    names: tuple[str, ...]
    index: WeightIndex | None = None
    is_pieces: bool = False
    stem: str = "model"
    notes: tuple[str, ...] = field(default=())


def has_tensors(store: ReadStore) -> bool:
    """Return whether a directory holds a safetensors checkpoint: files, an index of them, or pieces
    in ``sharded``.

    One file alone counts if it has a usual name, or something beside it says that this is a model;
    any other may be a loose file of a directory that is about something else.
    """
    names = store.files()
    if any(name.endswith(INDEX_SUFFIX) for name in names):
        return True
    files = [name for name in names if name.endswith(SUFFIX)]
    if len(files) == 1 and _PIECE.fullmatch(files[0]) is None:
        is_usual = (
            _series(files[0]).partition(".")[0] in STEMS
        )  # model.fp16.safetensors is a variant
        return (
            is_usual
            or _SHARD.fullmatch(files[0]) is not None
            or any(name in names for name in _OF_A_MODEL)
        )
    return bool(files) or any(_PIECE.fullmatch(name) for name in store.files(PIECES_DIR))


def is_piece(name: str) -> bool:
    """Return whether a file has the name of one rank's pieces."""
    return _PIECE.fullmatch(name) is not None


def shard_number(name: str) -> tuple[int, int] | None:
    """Return number and total of a file of a numbered series; None for other files."""
    match = _SHARD.fullmatch(name)
    return None if match is None else (int(match[2]), int(match[3]))


def _stem(name: str) -> str:
    """Return the stem of a file or an index, if it is one of ``STEMS``; else the first of them."""
    stem = _series(name.removesuffix(".index.json"))
    return stem if stem in STEMS else STEMS[0]


def files_of(store: ReadStore) -> WeightFiles:
    """Return the files of a directory, or of the index that the user passed, that are the
    checkpoint.

    Raises:
        MissingShardError: a file that the index names, or a shard of a numbered series, is missing.
        CorruptError: the index is malformed.
        UnsafeError: the index names a file outside the directory.
        UnsupportedError: there are several indexes, and none has the usual name.
    """
    names = [name for name in store.files() if name.endswith(SUFFIX)]
    pieces = [name for name in names if _PIECE.fullmatch(name)]
    weights = [name for name in names if not _PIECE.fullmatch(name)]
    if not pieces:
        pieces = [
            f"{PIECES_DIR}/{name}" for name in store.files(PIECES_DIR) if _PIECE.fullmatch(name)
        ]
    weights, odd_names = _split_by_usual_name(weights)
    index, notes = _choose_index(store, weights)

    # An index decides which files count.
    if index is not None:
        return _files_of_index(store, index, weights + odd_names, pieces, notes)

    # Without one, complete files count before pieces.
    if weights:
        _refuse_gaps(weights)
        if odd_names:
            notes.append(
                f"{weights[0]}{' …' * (len(weights) > 1)} is what loaders take, so not read: {listed(odd_names)}"
            )
        if len(weights) > 1:
            notes.append(
                f"{len(weights)} files without an index were read as one checkpoint: {listed(weights)}"
            )
        return WeightFiles(tuple(weights), stem=_stem(weights[0]), notes=(*notes, *_unread(pieces)))
    if pieces:
        return _complete_pieces(pieces)
    raise MissingShardError("the directory holds no safetensors file", file=store.label)


def _files_of_index(
    store: ReadStore, index: WeightIndex, weights: list[str], pieces: list[str], notes: list[str]
) -> WeightFiles:
    """Return the files that an index names.

    Args:
        weights: the directory's files with complete tensors.
        pieces: its files with pieces of tensors; they count if the others are missing.
        notes: notes on the choice of the index.

    Raises:
        MissingShardError: a file is missing.
    """
    used = sorted(set(index.file_of.values()))
    missing = [name for name in used if not store.exists(name)]
    if missing and pieces and not weights:
        return _complete_pieces(pieces, index=index)
    if missing:
        key = next(key for key, name in index.file_of.items() if name == missing[0])
        raise MissingShardError(
            f"files named by {index.file} are missing ({len(missing)} in all)",
            file=missing[0],
            key=key,
            hint="copy the checkpoint again, with all its files"
            + (f", or pass the directory {PIECES_DIR} with the pieces" if pieces else ""),
        )
    unlisted = [name for name in weights if name not in used]
    if unlisted:
        notes = [*notes, f"not listed in {index.file}, so not read: {listed(unlisted)}"]
    return WeightFiles(tuple(used), index, stem=_stem(index.file), notes=(*notes, *_unread(pieces)))


def _split_by_usual_name(names: list[str]) -> tuple[list[str], list[str]]:
    """Return the files named after the first of ``STEMS`` that occurs, and all other files.

    If none of ``STEMS`` occurs, return all files and none.

    Other files beside ``model.safetensors`` are another checkpoint (an adapter, a variant).
    """
    for stem in STEMS:
        usual = [name for name in names if _series(name) == stem]
        if usual:
            return usual, [name for name in names if name not in usual]
    return names, []


def _series(name: str) -> str:
    """Return the name of a file without number and suffix."""
    match = _SHARD.fullmatch(name)
    return match[1] if match is not None else name.removesuffix(SUFFIX)


def _complete_pieces(pieces: list[str], *, index: WeightIndex | None = None) -> WeightFiles:
    """Return the pieces, after checking that every file number that one of them states exists."""
    numbers: set[int] = set()
    n_files = 0
    for name in pieces:
        match = _PIECE.fullmatch(name.rpartition("/")[2])
        assert match is not None
        numbers.add(int(match[1]))
        n_files = max(n_files, int(match[2]))
    if len(numbers) != n_files or max(numbers) > n_files:
        missing = next((n for n in range(1, n_files + 1) if n not in numbers), n_files)
        raise MissingShardError(
            f"no rank's piece of file {missing} of {n_files} exists",
            file=f"shard-*-model-{missing:05d}-of-{n_files:05d}{SUFFIX}",
            hint="copy the checkpoint again, with all its files",
        )
    return WeightFiles(tuple(sorted(pieces)), index, is_pieces=True)


def _unread(pieces: list[str]) -> tuple[str, ...]:
    """Return a note on the files with pieces that are not read."""
    if not pieces:
        return ()
    return (
        f"{len(pieces)} files with pieces of tensors ({pieces[0]} …) were not read, only those with complete tensors",
    )


def _refuse_gaps(names: list[str]) -> None:
    """Raise unless every numbered series among the names is complete.

    Raises:
        MissingShardError: names the first missing file.
    """
    series: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is not None:
            series.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, total), numbers in series.items():
        n_files, first = int(total), min(numbers)
        if first != 0 and len(numbers) < n_files:
            missing = next(n for n in range(1, n_files + 1) if n not in numbers)
            raise MissingShardError(
                f"only {len(numbers)} of {n_files} shards found",
                file=f"{stem}-{missing:0{len(total)}d}-of-{total}{SUFFIX}",
                hint="copy the checkpoint again, with all its files",
            )


def _choose_index(store: ReadStore, weights: list[str]) -> tuple[WeightIndex | None, list[str]]:
    """Return the index that counts, and notes on those that do not.

    Args:
        weights: the files with complete tensors, those with one of the usual names if there are
            any.
    """
    if store.entry is not None and store.entry.endswith(INDEX_SUFFIX):
        return read_index(store, store.entry, suffix=SUFFIX), []
    names = [name for name in store.files() if name.endswith(INDEX_SUFFIX)]
    if not names:
        return None, []
    usual_name = STEMS[0] + INDEX_SUFFIX
    if usual_name not in names and any(_series(name) == STEMS[0] for name in weights):
        return None, [f"not read: {listed(names)}"]
    if len(names) > 1 and usual_name not in names:
        raise UnsupportedError(
            f"there are {len(names)} indexes: {listed(names)}",
            file=store.label,
            hint="pass one of them as the source",
        )
    chosen = usual_name if usual_name in names else names[0]
    ignored = [name for name in names if name != chosen]
    return read_index(store, chosen, suffix=SUFFIX), [
        f"{chosen} was read, not {listed(ignored)}"
    ] if ignored else []


def listed(names: Sequence[str]) -> str:
    """Return the first names of files as text, and how many there are."""
    return ", ".join(names[:3]) + (f" … ({len(names)} in all)" if len(names) > 3 else "")
