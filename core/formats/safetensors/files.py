"""Which files of a directory are the checkpoint: one file, shards with an index, loose files, or torch's pieces.

On disk, one of::

    model.safetensors
    model-00001-of-00002.safetensors …  model.safetensors.index.json     {"metadata": {"total_size": bytes},
                                                                          "weight_map": {tensor: file}}
    a.safetensors  b.safetensors …                                       no index; every tensor in one of them
    shard-00001-model-00001-of-00002.safetensors …                       pieces, see ``core.formats.safetensors.pieces``
    sharded/shard-00001-model-00001-of-00002.safetensors …               the same, beside consolidated files or alone

The stem need not be ``model`` (``adapter_model``, ``diffusion_pytorch_model``). An index decides which files count;
where there are whole files and pieces, the whole files do. Without an index, files of a usual name count alone.

Source: huggingface_hub 2.4 ``serialization``; torch 2.13 ``torch/distributed/checkpoint/hf_storage.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.errors import MissingShardError, UnsupportedError
from core.formats.huggingface.index import Index, read_index

if TYPE_CHECKING:
    from core.files.store import ReadStore

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
PIECES_DIR = "sharded"
STEMS = ("model", "adapter_model", "diffusion_pytorch_model")
"""Names that transformers, peft and diffusers look for; any other name becomes the first one when it is written."""
_OF_A_MODEL = ("config.json", "adapter_config.json", "params.json", "ckpt-manifest.json")
"""Files that lie beside a model's weights."""
_PIECE = re.compile(r"shard-\d+-model-(\d+)-of-(\d+)\.safetensors")
_SHARD = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.safetensors")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a checkpoint.

    Args:
        names: what holds tensors, sorted.
        index: the index that counts, if there is one.
        is_pieces: they are the pieces of single ranks.
        stem: one of ``STEMS``: how a file with all tensors would be called, without the suffix.
        notes: what the user should know about the choice.
    """

    names: tuple[str, ...]
    index: Index | None = None
    is_pieces: bool = False
    stem: str = "model"
    notes: tuple[str, ...] = field(default=())


def has_tensors(store: ReadStore) -> bool:
    """Return whether a directory holds a safetensors checkpoint: files, an index of them, or pieces in ``sharded``.

    One file alone counts if it has a usual name, or something beside it says that this is a model; any other may be a
    loose file of a directory that is about something else.
    """
    names = store.files()
    if any(name.endswith(INDEX_SUFFIX) for name in names):
        return True
    files = [name for name in names if name.endswith(SUFFIX)]
    if len(files) == 1 and _PIECE.fullmatch(files[0]) is None:
        is_usual = _series(files[0]).partition(".")[0] in STEMS  # model.fp16.safetensors is a variant
        return is_usual or _SHARD.fullmatch(files[0]) is not None or any(name in names for name in _OF_A_MODEL)
    return bool(files) or any(_PIECE.fullmatch(name) for name in store.files(PIECES_DIR))


def is_piece(name: str) -> bool:
    """Whether a file is called as one rank's pieces are."""
    return _PIECE.fullmatch(name) is not None


def shard_number(name: str) -> tuple[int, int] | None:
    """(number, how many) of a file of a numbered series, else None."""
    matched = _SHARD.fullmatch(name)
    return None if matched is None else (int(matched[2]), int(matched[3]))


def _stem(name: str) -> str:
    stem = _series(name.removesuffix(".index.json"))
    return stem if stem in STEMS else STEMS[0]


def files_of(store: ReadStore) -> Files:
    """The files of a directory, or of the index that the user pointed at, that are the checkpoint.

    Raises:
        MissingShardError: the index names a file that is not there, or a shard of a numbered series is not there.
        CorruptError: the index is malformed.
        UnsafeError: it names a file outside the directory.
        UnsupportedError: several indexes, and none is the usual one.
    """
    names = [name for name in store.files() if name.endswith(SUFFIX)]
    pieces = [name for name in names if _PIECE.fullmatch(name)]
    whole = [name for name in names if not _PIECE.fullmatch(name)]
    if not pieces:
        inside = store.files(PIECES_DIR)
        pieces = [f"{PIECES_DIR}/{name}" for name in inside if _PIECE.fullmatch(name)]
    whole, others = _of_usual_name(whole)
    index, notes = _chosen_index(store, whole)
    if index is not None:
        whole += others
        missing = [name for name in sorted(set(index.file_of.values())) if not store.exists(name)]
        if missing and pieces and not whole:
            return _of_pieces(pieces, index=index)
        if missing:
            key = next(key for key, name in index.file_of.items() if name == missing[0])
            raise MissingShardError(
                f"{index.file} names {len(missing)} files that are not there",
                file=missing[0],
                key=key,
                hint="copy the checkpoint again, with all its files"
                + (f", or point at the pieces in {PIECES_DIR}" if pieces else ""),
            )
        used = set(index.file_of.values())
        odd = [name for name in whole if name not in used]
        if odd:
            notes.append(f"not listed in {index.file}, so not read: {listed(odd)}")
        return Files(tuple(sorted(used)), index, stem=_stem(index.file), notes=(*notes, *_unread(pieces)))
    if whole:
        _refuse_gaps(whole)
        if others:
            notes.append(f"{whole[0]}{' …' * (len(whole) > 1)} is what loaders take, so not read: {listed(others)}")
        if len(whole) > 1:
            notes.append(f"{len(whole)} files without an index were read as one checkpoint: {listed(whole)}")
        return Files(tuple(whole), stem=_stem(whole[0]), notes=(*notes, *_unread(pieces)))
    if pieces:
        return _of_pieces(pieces)
    raise MissingShardError("the directory holds no safetensors file", file=store.label)


def _of_usual_name(names: list[str]) -> tuple[list[str], list[str]]:
    """(files that are called as the first of ``STEMS`` that is there, all others); all and none without such a file.

    What else lies beside ``model.safetensors`` is another checkpoint (an adapter, the weights under other names).
    """
    for stem in STEMS:
        usual = [name for name in names if _series(name) == stem]
        if usual:
            return usual, [name for name in names if name not in usual]
    return names, []


def _series(name: str) -> str:
    matched = _SHARD.fullmatch(name)
    return matched[1] if matched is not None else name.removesuffix(SUFFIX)


def _of_pieces(pieces: list[str], *, index: Index | None = None) -> Files:
    """The pieces, once every number of a file that one of them states is there."""
    found: set[int] = set()
    n_files = 0
    for name in pieces:
        matched = _PIECE.fullmatch(name.rpartition("/")[2])
        assert matched is not None
        found.add(int(matched[1]))
        n_files = max(n_files, int(matched[2]))
    if len(found) != n_files or max(found) > n_files:
        lost = next((n for n in range(1, n_files + 1) if n not in found), n_files)
        raise MissingShardError(
            f"of the files 1 to {n_files}, no rank's piece of file {lost} is there",
            file=f"shard-*-model-{lost:05d}-of-{n_files:05d}{SUFFIX}",
            hint="copy the checkpoint again, with all its files",
        )
    return Files(tuple(sorted(pieces)), index, is_pieces=True)


def _unread(pieces: list[str]) -> tuple[str, ...]:
    if not pieces:
        return ()
    return (f"whole tensors were read; {len(pieces)} files with pieces of them ({pieces[0]} …) were not",)


def _refuse_gaps(names: list[str]) -> None:
    """Returns if every numbered series among the names is complete.

    Raises:
        MissingShardError: names the first file that is not there.
    """
    series: dict[tuple[str, str], set[int]] = {}
    for name in names:
        matched = _SHARD.fullmatch(name)
        if matched is not None:
            series.setdefault((matched[1], matched[3]), set()).add(int(matched[2]))
    for (stem, total), found in series.items():
        n_files, first = int(total), min(found)
        if first != 0 and len(found) < n_files:
            lost = next(n for n in range(1, n_files + 1) if n not in found)
            raise MissingShardError(
                f"of {n_files} shards, {len(found)} are there",
                file=f"{stem}-{lost:0{len(total)}d}-of-{total}{SUFFIX}",
                hint="copy the checkpoint again, with all its files",
            )


def _chosen_index(store: ReadStore, whole: list[str]) -> tuple[Index | None, list[str]]:
    """The index that counts, and notes on those that do not.

    Args:
        whole: the files with tensors, those with one of the usual names if there are any.
    """
    if store.entry is not None and store.entry.endswith(INDEX_SUFFIX):
        return read_index(store, store.entry, suffix=SUFFIX), []
    names = [name for name in store.files() if name.endswith(INDEX_SUFFIX)]
    if not names:
        return None, []
    usual = STEMS[0] + INDEX_SUFFIX
    if usual not in names and any(_series(name) == STEMS[0] for name in whole):
        return None, [f"not read: {listed(names)}"]
    if len(names) > 1 and usual not in names:
        raise UnsupportedError(
            f"there are {len(names)} indexes: {listed(names)}", file=store.label, hint="point at one of them"
        )
    chosen = usual if usual in names else names[0]
    others = [name for name in names if name != chosen]
    return read_index(store, chosen, suffix=SUFFIX), [f"{chosen} was read, not {listed(others)}"] if others else []


def listed(names: Sequence[str]) -> str:
    """Return the first names of files as text, and how many there are."""
    return ", ".join(names[:3]) + (f" … ({len(names)} in all)" if len(names) > 3 else "")
