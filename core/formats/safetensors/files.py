"""The files of a directory that make up a safetensors checkpoint.

On disk, one of::

    model.safetensors
    model-00001-of-00002.safetensors …    with model.safetensors.index.json:
                                          {"metadata": {"total_size": bytes},
                                           "weight_map": {tensor: file}}
    part1.safetensors  part2.safetensors  no index; every tensor in one of them
    shard-00001-model-00001-of-00002.safetensors …
                                          pieces, see ``core.formats.safetensors.pieces``
    model.safetensors  model_1.safetensors …
                                          models of accelerate's save_state (further_models)
    sharded/shard-00001-model-00001-of-00002.safetensors …
                                          the same, with or without consolidated files

The stem need not be ``model`` (``adapter_model``, ``diffusion_pytorch_model``). An index decides
which files are read, unless it lists missing files and one file of its stem has all tensors. Files
with complete tensors take precedence over pieces. Without an index, files with a usual name take
precedence over others.

Source: huggingface_hub 2.4 ``serialization``; torch 2.13
    ``torch/distributed/checkpoint/hf_storage.py``.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import TYPE_CHECKING

from core.errors import MissingShardError, Report, UnsupportedError, list_some, raising
from core.formats.huggingface.index import WeightIndex, describe_unread_single, read_index
from core.values import dataclass, n_text

if TYPE_CHECKING:
    from core.files.store import ReadStore

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
DEFAULT_METADATA = {"format": "pt"}
"""Metadata that transformers and safetensors.torch write; transformers < 5 requires it."""
PIECES_DIR = "sharded"
STEMS = ("model", "adapter_model", "diffusion_pytorch_model")
"""Names that transformers, peft and diffusers look for; the first is written for any other name."""
_OF_A_MODEL = ("config.json", "adapter_config.json", "params.json", "ckpt-manifest.json")
"""Files that are usually next to a model's weights."""
_PIECE = re.compile(r"shard-\d+-model-(\d+)-of-(\d+)\.safetensors")
_FURTHER_MODEL = re.compile(r"(model_([1-9]\d{0,3}))\.safetensors")
_RANDOM_STATES = re.compile(r"random_states_\d+\.pkl")
_SHARD = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.safetensors")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a checkpoint.

    Args:
        names: the files with tensors, sorted.
        index: the index that lists them, if there is one.
        is_pieces: whether the files contain pieces of tensors, written by single ranks.
        stem: one of ``STEMS``: the name of a file with all tensors, without the suffix.
        notes: messages to the user about files that are not read.
    """

    names: tuple[str, ...]
    index: WeightIndex | None = None
    is_pieces: bool = False
    stem: str = "model"
    notes: tuple[str, ...] = field(default=())


def is_safetensors(store: ReadStore) -> bool:
    """Return whether a directory is a safetensors checkpoint: files, an index, or pieces.

    A single file with an unusual name, without any other file of a model, may belong to something
    else in the directory, so it does not suffice. Several such files are one checkpoint if their
    names differ in numbers only; otherwise they are models of their own.
    """
    names = store.files()
    if any(name.endswith(INDEX_SUFFIX) for name in names):
        return True
    files = [name for name in names if name.endswith(SUFFIX)]
    if not files:
        return any(map(is_piece, store.files(PIECES_DIR)))
    # The part before the dot decides: model.fp16.safetensors is a variant of model.safetensors.
    if any(
        is_piece(name) or _SHARD.fullmatch(name) or _series(name).partition(".")[0] in STEMS
        for name in files
    ):
        return True
    if len(files) == 1:
        return any(name in names for name in _OF_A_MODEL)
    return len({re.sub(r"\d+", "0", name) for name in files}) == 1


def is_piece(name: str) -> bool:
    """Return whether a file name is that of one rank's tensor pieces."""
    return _PIECE.fullmatch(name) is not None


def shard_number(name: str) -> tuple[int, int] | None:
    """Return number and total of a shard in a numbered series; None for other files."""
    match = _SHARD.fullmatch(name)
    return None if match is None else (int(match[2]), int(match[3]))


def further_models(store: ReadStore) -> tuple[str, ...]:
    """Return the stems of the files of accelerate's second and further models, in their order.

    ``Accelerator.save_state`` writes ``model.safetensors``, ``model_1.safetensors`` …, each a
    model of its own, and always the random states.
    """
    names = store.files()
    if f"{STEMS[0]}{SUFFIX}" not in names or not any(map(_RANDOM_STATES.fullmatch, names)):
        return ()
    matches = [match for match in map(_FURTHER_MODEL.fullmatch, names) if match is not None]
    return tuple(match[1] for match in sorted(matches, key=lambda match: int(match[2])))


def _stem(name: str) -> str:
    """Return the stem of a file or index if it is in ``STEMS``, else the first of ``STEMS``.

    A file of a variant has the variant after the stem, as in ``model.fp16.safetensors``.
    """
    stem = _series(name.removesuffix(".index.json")).partition(".")[0]
    return stem if stem in STEMS else STEMS[0]


def list_safetensors_files(store: ReadStore, report: Report = raising) -> WeightFiles:
    """Return the files of a directory that make up the checkpoint.

    If the user passed an index, its files do.

    Args:
        report: receives an error for each file that the index lists, or each series, if a file is
            missing; raises them by default.

    Raises:
        MissingShardError: there is no file at all, or one is missing (default ``report``).
        CorruptError: the index is malformed.
        UnsafeError: the index names a file outside the directory.
        UnsupportedError: there are several indexes, and none has the usual name.
    """
    # Separate pieces of tensors from complete ones. torch puts pieces into a subdirectory if it
    # consolidates them.
    names = [name for name in store.files() if name.endswith(SUFFIX)]
    pieces = [name for name in names if is_piece(name)]
    weights, others = _split_by_usual_name([name for name in names if not is_piece(name)])
    if not pieces:
        pieces = [f"{PIECES_DIR}/{name}" for name in filter(is_piece, store.files(PIECES_DIR))]

    # An index decides which files are read.
    further = [f"{stem}{SUFFIX}" for stem in further_models(store)]
    others = [name for name in others if name not in further]
    index, notes = _choose_index(store, weights)
    if index is not None:
        return _files_of_index(store, index, weights + others, pieces, notes, report)

    # Without an index, complete tensors take precedence over pieces.
    if not weights:
        if not pieces:
            raise MissingShardError("the directory has no safetensors files", file=store.label)
        return _complete_pieces(pieces)
    _report_gaps(weights, report)
    if others:
        usual_names = f"{weights[0]}{' …' * (len(weights) > 1)}"
        notes.append(
            f"these files were not read, because loaders read only {usual_names}: "
            f"{list_some(others)}"
        )
    if len(weights) > 1:
        notes.append(
            f"{len(weights)} files without an index were read as one checkpoint: "
            f"{list_some(weights)}"
        )
    return WeightFiles(tuple(weights), stem=_stem(weights[0]), notes=(*notes, *_unread(pieces)))


def _files_of_index(
    store: ReadStore,
    index: WeightIndex,
    weights: list[str],
    pieces: list[str],
    notes: list[str],
    report: Report,
) -> WeightFiles:
    """Return the files that an index lists.

    Args:
        store: the directory.
        index: the index.
        weights: the directory's files with complete tensors.
        pieces: its files with pieces of tensors; they are read if all files are missing.
        notes: notes on the choice of the index.
        report: receives an error for each missing file.

    Raises:
        MissingShardError: pieces are read, and one is missing.
    """
    used = sorted(set(index.file_of.values()))
    missing = [name for name in used if not store.exists(name)]
    # torch writes the index of the consolidated files together with the pieces.
    if missing and pieces and not weights:
        return _complete_pieces(pieces, index=index)
    # Loaders look for one file with all tensors first, and ignore an index that is left over.
    single = index.file.removesuffix(INDEX_SUFFIX) + SUFFIX
    if missing and single in weights and single not in used and store.entry is None:
        note = (
            f"{single} was read, as transformers does, because {index.file} lists files that are "
            f"missing: {list_some(missing)}"
        )
        return WeightFiles((single,), stem=_stem(single), notes=(*notes, note, *_unread(pieces)))
    alternative = f", or pass the directory {PIECES_DIR} with the pieces" if pieces else ""
    # The first tensor of each file; an index may list tens of thousands of files.
    first_key: dict[str, str] = {}
    for key, file in index.file_of.items():
        first_key.setdefault(file, key)
    for name in missing:
        report(
            MissingShardError(
                f"{index.file} lists this file, but it is missing "
                f"({n_text(len(missing), 'missing file')} in all)",
                file=name,
                key=first_key[name],
                hint="copy the checkpoint again, with all its files" + alternative,
            )
        )
    absent, listed_names = set(missing), set(used)
    used = [name for name in used if name not in absent]
    unlisted = [name for name in weights if name not in listed_names]
    if single == f"{STEMS[0]}{SUFFIX}" and single in unlisted:
        unlisted.remove(single)
        notes = [*notes, describe_unread_single(single, index.file)]
    if unlisted:
        note = f"these files were not read, because {index.file} does not list them"
        notes = [*notes, f"{note}: {list_some(unlisted)}"]
    return WeightFiles(tuple(used), index, stem=_stem(index.file), notes=(*notes, *_unread(pieces)))


def _split_by_usual_name(names: list[str]) -> tuple[list[str], list[str]]:
    """Return the files named after the first of ``STEMS`` that occurs, and all other files.

    Files next to ``model.safetensors`` are another checkpoint, such as an adapter or a variant. If
    none of ``STEMS`` occurs, all files belong together.
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
    """Return the pieces as the files of a checkpoint, after checking that none is missing.

    Names contain file number and total, ``-0000i-of-0000n``. A file of any rank suffices for a
    number; missing files of other ranks leave holes in tensors, which are detected later.

    Raises:
        MissingShardError: no rank has a file with one of the numbers.
    """
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
            f"file {missing} of {n_files} is missing for all ranks",
            file=f"shard-*-model-{missing:05d}-of-{n_files:05d}{SUFFIX}",
            hint="copy the checkpoint again, with all its files",
        )
    return WeightFiles(tuple(sorted(pieces)), index, is_pieces=True)


def _unread(pieces: list[str]) -> tuple[str, ...]:
    """Return a note on the files with pieces that are not read, if there are any."""
    if not pieces:
        return ()
    note = f"{len(pieces)} files with pieces of tensors ({pieces[0]} …) were not read"
    return (f"{note}, because other files contain the complete tensors",)


def _report_gaps(names: list[str], report: Report) -> None:
    """Report a MissingShardError for every numbered series of files that is not complete."""
    series: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is not None:
            series.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, total), numbers in series.items():
        # Numbers begin at 1, with some writers at 0; these end at the total or one before it, so
        # only the count is certain.
        n_files, first = int(total), min(*numbers, 1)
        if len(numbers) < n_files:
            missing = next(n for n in range(first, n_files + 1) if n not in numbers)
            report(
                MissingShardError(
                    f"only {len(numbers)} of {n_files} shards are present",
                    file=f"{stem}-{missing:0{len(total)}d}-of-{total}{SUFFIX}",
                    hint="copy the checkpoint again, with all its files",
                )
            )


def _choose_index(store: ReadStore, weights: list[str]) -> tuple[WeightIndex | None, list[str]]:
    """Read the index to use, if there is one; also return notes on the others.

    Args:
        store: the directory, or the index that the user passed.
        weights: the files with complete tensors; only those with a usual name if there are any.

    Raises:
        UnsupportedError: there are several indexes, and none has the usual name.
        CorruptError, UnsafeError: see ``read_index``.
    """
    if store.entry is not None and store.entry.endswith(INDEX_SUFFIX):
        return read_index(store, store.entry, suffix=SUFFIX), []
    names = [name for name in store.files() if name.endswith(INDEX_SUFFIX)]
    usual_name = STEMS[0] + INDEX_SUFFIX
    if usual_name not in names:
        if not names:
            return None, []
        # An index with another stem lists other files than model.safetensors.
        if any(_series(name) == STEMS[0] for name in weights):
            return None, [f"these files were not read: {list_some(names)}"]
        if len(names) > 1:
            raise UnsupportedError(
                f"the directory has {len(names)} index files: {list_some(names)}",
                file=store.label,
                hint="pass one of them as the source",
            )
    chosen = usual_name if usual_name in names else names[0]
    ignored = [name for name in names if name != chosen]
    notes = [f"{chosen} was read, not {list_some(ignored)}"] if ignored else []
    return read_index(store, chosen, suffix=SUFFIX), notes
