"""safetensors: single files, sharded directories as Hugging Face has them, and torch's pieces of
tensors.

On disk: see ``safetensors.header`` for a file, ``safetensors.files`` for a directory,
``safetensors.pieces`` for pieces. Around the weights of a directory lie the small files of
``huggingface.files``, and ``ckpt-objects.pt`` (``torch.side_file``) if there were entries that are
no tensors.

Facet: ``WeightFileFacts``. ``Catalog.aliases`` maps a name to the tensor that it stands for, as
``save_model`` of safetensors records it (name and kept name among the metadata); both are tensors
of the catalog.

Written: one file while the tensors fit in ``WriteOptions.max_file_bytes`` (5 GB unless set), else
numbered ones, filled in the order of the catalog, and an index. A file equals what safetensors 0.8
writes for the same tensors and metadata, byte for byte, except that the metadata are sorted. With
``WriteOptions.is_file`` there is one file, with nothing beside it. ``aliases``, ``carried``,
``documents`` and ``WeightFileFacts`` are written again.

Versions: the format has none; dtypes as of safetensors 0.8.

Not supported, refused by name: six-bit dtypes, ``complex128`` and ``complex32`` (the format has no
name for them), several files with a tensor of one name and no index, pipelines of several models in
folders.

Source: safetensors 0.8, huggingface_hub 2.4 and transformers 5.23, whose files are pinned in
tests/golden (``hf``, ``oracle``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.catalog.catalog import Catalog, catalog_of_arrays
from core.catalog.facets import WeightFileFacts
from core.catalog.stored import StoredArray
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnsupportedError,
)
from core.formats.format import Format
from core.formats.huggingface.files import config_of, with_carried
from core.formats.huggingface.index import WeightIndex
from core.formats.safetensors.files import (
    INDEX_SUFFIX,
    PIECES_DIR,
    SUFFIX,
    files_of,
    has_tensors,
    is_piece,
    listed,
    shard_number,
)
from core.formats.safetensors.header import Header, looks_like_header, read_header
from core.formats.safetensors.layout import DEFAULT_METADATA, lay_out
from core.formats.safetensors.pieces import (
    SHARDING_INFO,
    VERSION,
    check_sizes,
    has_pieces,
    pieces_of,
)
from core.formats.torch.side_file import OBJECTS_FILE, read_objects, with_objects

if TYPE_CHECKING:
    from core.files.store import ReadStore


def sniff(store: ReadStore) -> bool:
    """Return whether the file is one, by its name or its first bytes, or the directory holds such
    files.
    """
    if store.entry is None:
        return has_tensors(store)
    if store.entry.endswith((SUFFIX, INDEX_SUFFIX)):
        return True
    return store.exists(store.entry) and looks_like_header(store, store.entry)


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a file or a directory.

    Raises:
        CorruptError: a header or the index is malformed, they disagree, or a tensor is in two
            files.
        TruncatedError: a file ends too early.
        MissingShardError: a file, a tensor or a piece of one is missing.
        UnsupportedError: a dtype is not supported, or it is unclear which files belong together.
        UnsafeError: the index names a file outside the directory.
    """
    if store.entry is not None and not store.entry.endswith(INDEX_SUFFIX):
        return _read_file(store, store.entry)
    # Read the headers of the files that count.
    files = files_of(store)
    headers = _read_headers(store, files.names)
    notes = list(files.notes)
    if files.index is not None and not files.is_pieces:
        notes += _check_index(headers, files.index)
    # Pieces are joined to global tensors; complete tensors are taken as they are.
    if any(map(has_pieces, headers)):
        catalog = _catalog_of_pieces(headers, stem=files.stem)
        notes += _check_pieces(store, catalog, files.index if files.is_pieces else None)
    else:
        catalog = _catalog_of_headers(headers, stem=files.stem)
    return with_carried(with_objects(catalog, read_objects(store)), store).noted(notes)


def salvage(store: ReadStore, report: Report) -> Catalog:
    """Return the complete tensors of those files of a directory that can be read.

    Args:
        report: receives the error of every file that is left out.

    Raises:
        CheckpointingException: it is unclear which files count, or a tensor is in two of them.
    """
    headers: list[Header] = []
    for name in files_of(store).names:
        try:
            header = read_header(store, name)
        except CheckpointingException as err:
            report(err)
            continue
        if not has_pieces(header):
            headers.append(header)
    return _catalog_of_headers(headers)


def _read_headers(store: ReadStore, names: Sequence[str]) -> list[Header]:
    """Read the headers of the files of a directory.

    Raises:
        CheckpointingException: the first that cannot be read; the hint lists those that can.
    """
    headers = []
    for name in names:
        try:
            headers.append(read_header(store, name))
        except CheckpointingException as err:
            readable = [
                other for other in names if other != name and looks_like_header(store, other)
            ]
            if readable:
                advice = f"the other files can be read one by one: {listed(readable)}"
                err.hint = advice if err.hint is None else f"{err.hint}; {advice}"
            raise
    return headers


def _read_file(store: ReadStore, name: str) -> Catalog:
    """Read the catalog of one file alone."""
    header = read_header(store, name)
    if has_pieces(header) and is_piece(name):
        raise UnsupportedError(
            "the file holds one rank's pieces of tensors",
            file=name,
            hint="pass the directory with all of them",
        )
    catalog = _catalog_of_pieces([header]) if has_pieces(header) else _catalog_of_headers([header])
    notes = []
    number = shard_number(name)
    if number is not None and number[1] > 1:
        notes.append(
            f"this is file {number[0]} of {number[1]}; pass the directory to read all of them"
        )
    if store.exists(OBJECTS_FILE):
        notes.append(
            f"non-tensor entries are in {OBJECTS_FILE}; pass the directory to read them too"
        )
    return catalog.noted(notes)


def _catalog_of_headers(headers: Sequence[Header], *, stem: str | None = None) -> Catalog:
    """Return the catalog of files with complete tensors, including those only recorded as
    aliases.
    """
    arrays: dict[str, StoredArray] = {}
    for header in headers:
        for key, array in header.arrays.items():
            if key in arrays:
                raise CorruptError(
                    f"the tensor is also in {arrays[key].extent.file}",
                    file=header.file,
                    key=key,
                    hint="pass one of the files, or an index that names the right one",
                )
            arrays[key] = array
    aliases = _recorded_aliases(headers, arrays)
    for key, first in aliases.items():
        arrays[key] = replace(arrays[first], name=key)
    metadata, notes = _merge_metadata(headers, aliases)
    catalog = catalog_of_arrays(format="safetensors", arrays=arrays)
    return replace(catalog, aliases=aliases, notes=notes).with_facet(
        WeightFileFacts(metadata, stem)
    )


def _catalog_of_pieces(headers: Sequence[Header], *, stem: str | None = None) -> Catalog:
    """Return the catalog of files with pieces of tensors."""
    pieces = pieces_of(headers)
    metadata, notes = _merge_metadata(headers, {})
    catalog = Catalog(
        "safetensors", None, pieces.tensors, pieces.fragments.__getitem__, notes=notes
    )
    return catalog.with_facet(WeightFileFacts(metadata, stem))


def _recorded_aliases(
    headers: Iterable[Header], arrays: Mapping[str, StoredArray]
) -> dict[str, str]:
    """Return name → tensor that it stands for, from the files' metadata.

    An alias is a name of no tensor whose value is the name of a tensor in the file.
    """
    return {
        name: first
        for header in headers
        for name, first in header.metadata.items()
        if first in header.arrays and name not in arrays and name not in DEFAULT_METADATA
    }


def _merge_metadata(
    headers: Iterable[Header], aliases: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the merged ``__metadata__`` of all files, and a note for every entry on which they
    differ.
    """
    merged: dict[str, str] = {}
    notes: dict[str, None] = {}
    for header in headers:
        for name, text in header.metadata.items():
            if name in (SHARDING_INFO, VERSION) or name in aliases:
                continue
            if merged.setdefault(name, text) != text:
                notes[
                    f"the files differ in the metadata {name[:60]!r}; that of the first one is kept"
                ] = None
    return merged, tuple(notes)


def _check_index(headers: Sequence[Header], index: WeightIndex) -> list[str]:
    """Check that every tensor is where the index says and nowhere else; return notes.

    Raises:
        MissingShardError: a file does not hold a tensor that the index places there.
        CorruptError: a file holds a tensor that the index does not place there.
    """
    arrays_of = {header.file: header.arrays for header in headers}
    for key, name in index.file_of.items():
        if key not in arrays_of[name]:
            raise MissingShardError(
                f"{index.file} places the tensor in this file, but it is not there",
                file=name,
                key=key,
                hint="files of two checkpoints may be mixed: copy it again",
            )
    for name, arrays in arrays_of.items():
        for key in arrays:
            if index.file_of.get(key) != name:
                stated_file = index.file_of.get(key)
                raise CorruptError(
                    f"{index.file} does not list the tensor"
                    if stated_file is None
                    else f"{index.file} places it in {stated_file}",
                    file=name,
                    key=key,
                    hint="files of two checkpoints may be mixed: copy it again",
                )
    return _size_notes(sum(header.n_bytes for header in headers), index)


def _size_notes(n_bytes: int, index: WeightIndex) -> list[str]:
    """Return a note if the index states another total size than the tensors have."""
    if index.total_bytes is None or index.total_bytes == n_bytes:
        return []
    return [
        f"{index.file} states a total_size of {index.total_bytes} bytes, but the tensors have {n_bytes}"
    ]


def _check_pieces(store: ReadStore, catalog: Catalog, index: WeightIndex | None) -> list[str]:
    """Compare the global tensors with an index and a configuration, if there are any; return notes.

    Raises:
        MissingShardError: a tensor, or a part of one, is in no piece.
    """
    config = config_of(store)
    if config is not None:
        check_sizes(catalog.tensors, config)
    if index is None:
        return []
    hint = "copy the checkpoint again, with the files of all ranks"
    for key in index.file_of:
        if key not in catalog.tensors:
            raise MissingShardError(
                f"{index.file} lists the tensor, but all its pieces are missing", key=key, hint=hint
            )
    n_bytes, total = catalog.n_bytes, index.total_bytes or 0
    if total > n_bytes and (
        n_bytes == 0 or total % n_bytes
    ):  # a multiple: the index is of a wider dtype
        raise MissingShardError(
            f"the pieces add up to {n_bytes:,} bytes, but the index states {total:,}",
            file=index.file,
            hint=hint,
        )
    return _size_notes(n_bytes, index)


FORMAT = Format(
    name="safetensors",
    title="Hugging Face safetensors",
    sniff=sniff,
    read=read,
    salvage=salvage,
    lay_out=lay_out,
    is_single_file=True,
    suffixes=(SUFFIX,),
    aliases=("hf", "huggingface"),
    carries_files=True,
    has_objects_beside=True,
    splits_files=True,
    records_ties=True,
    own_folders=lambda store: (PIECES_DIR,),
)
