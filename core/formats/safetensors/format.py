"""safetensors: single files, Hugging Face's sharded directories, and torch's tensor pieces.

On disk: see ``safetensors.header`` for a file, ``safetensors.files`` for a directory,
``safetensors.pieces`` for pieces and ``safetensors.pipelines`` for pipelines of diffusers. A
directory also contains the small files of ``huggingface.files``, and ``ckpt-objects.pt``
(``torch.side_file``) for entries that are not tensors.

Attributes (``core.engine.catalog.attributes``): those of the root are ``__metadata__``, those of an
index are its metadata. All others, and those of the root that are not text, are JSON in the member
``ckpt.attributes`` of ``__metadata__``.

Facet: ``WeightFileFacts``. Of tied tensors, the metadata record the other names with the name under
which they are stored, as safetensors' ``save_model`` does; all of them are names in the catalog.

Written: one file if the tensors fit in ``WriteOptions.max_file_bytes`` (default 5 GB), else
numbered ones, filled in the order of the catalog, and an index. A file equals what safetensors 0.8
writes for the same tensors and metadata, byte for byte, except that the metadata are sorted. With
``WriteOptions.is_file`` there is one file and nothing else. Ties, ``attributes``, ``files`` and
``WeightFileFacts`` are written again.

Versions: the format has none; dtypes as of safetensors 0.8.

Not supported, refused by name: six-bit dtypes, ``complex128`` and ``complex32`` (the format has no
name for them), several files with a tensor of the same name and no index.

Source: safetensors 0.8, huggingface_hub 2.4 and transformers 5.23, whose files are pinned in
tests/golden (``hf``, ``oracle``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.attributes import (
    BY_PATH,
    ROOT,
    AttributesByPath,
    parse_by_path,
    with_attributes,
)
from core.engine.catalog.catalog import Catalog, catalog_of_arrays
from core.engine.catalog.facets import WeightFileFacts
from core.engine.catalog.stored import StoredArray
from core.engine.catalog.tensor import tensors_of
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnsupportedError,
    list_some,
)
from core.files.json_object import parse_json_object
from core.formats.format import Format, imported_on_call
from core.formats.huggingface.files import list_module_folders, read_config_json, with_carried
from core.formats.huggingface.index import STALE_INDEX_HINT, WeightIndex, list_indexed, read_index
from core.formats.missing_entries import report_missing
from core.formats.safetensors.files import (
    DEFAULT_METADATA,
    INDEX_SUFFIX,
    PIECES_DIR,
    STEMS,
    SUFFIX,
    further_models,
    is_piece,
    is_safetensors,
    list_safetensors_files,
    shard_number,
)
from core.formats.safetensors.header import Header, looks_like_header, read_header
from core.formats.safetensors.pieces import (
    SHARDING_INFO,
    VERSION,
    check_sizes,
    has_pieces,
    join_pieces,
)
from core.formats.safetensors.pipelines import component_folders, is_pipeline, read_pipeline
from core.formats.torch.side_file import OBJECTS_FILE, read_objects, with_objects_beside
from core.formats.trainer.state import with_training_state
from core.values import n_text

if TYPE_CHECKING:
    from core.files.store import ReadStore


def sniff(store: ReadStore) -> bool:
    """Return whether a file or directory is a safetensors checkpoint, by names or first bytes."""
    if store.entry is None:
        return is_safetensors(store) or is_pipeline(store)
    if store.entry.endswith((SUFFIX, INDEX_SUFFIX)):
        return True
    return store.exists(store.entry) and looks_like_header(store, store.entry)


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a file or a directory.

    Raises:
        CorruptError: a header or the index is malformed, they disagree, or a tensor is in two
            files.
        TruncatedError: a file is truncated.
        MissingShardError: a file, a tensor or a piece of a tensor is missing.
        UnsupportedError: a dtype is not supported, or it is unclear which files belong together.
        UnsafeError: the index names a file outside the directory.
    """
    if store.entry is not None and not store.entry.endswith(INDEX_SUFFIX):
        return _read_file(store, store.entry)
    if is_pipeline(store):
        return read_pipeline(store, _read_component)

    # Read all headers. If one is damaged, the hint lists the files that can be read alone.
    files = list_safetensors_files(store)
    headers = []
    store.expect_headers(files.names)
    for name in files.names:
        try:
            headers.append(read_header(store, name))
        except CheckpointingException as err:
            others = [other for other in files.names if other != name]
            readable = [other for other in others if looks_like_header(store, other)]
            if readable:
                advice = f"the other files can be read one by one: {list_some(readable)}"
                err.hint = advice if err.hint is None else f"{err.hint}; {advice}"
            raise
    notes = list(files.notes)
    attributes = {} if files.index is None else files.index.attributes
    if files.index is not None and not files.is_pieces:
        notes += _check_index(headers, files.index)

    # Join pieces to global tensors.
    if any(map(has_pieces, headers)):
        catalog = _catalog_of_pieces(headers, stem=files.stem)
        notes += _check_pieces(store, catalog, files.index if files.is_pieces else None)
    else:
        catalog = _catalog_of_headers(headers, stem=files.stem)
    catalog = with_attributes(_with_further_models(catalog, store), attributes)
    catalog = with_objects_beside(catalog, read_objects(store))
    catalog = with_training_state(catalog, store, is_ordered=False)
    catalog = with_carried(catalog, store, without=(PIECES_DIR,)).noted(notes)
    return catalog if files.index is None else _with_deltas(catalog, files.index)


def salvage(store: ReadStore, report: Report) -> Catalog:
    """Read the complete tensors of a file, or of the files of a directory.

    Args:
        store: the file or the directory.
        report: receives an error for every file that is damaged or missing.

    Raises:
        CheckpointingException: it is unclear which files to read, or a tensor is in two of them.
    """
    if is_pipeline(store):
        return read_pipeline(store, lambda view: _salvage_component(view, report), report=report)
    # A file that the user named is read alone, whatever lies next to it.
    is_file = store.entry is not None and not store.entry.endswith(INDEX_SUFFIX)
    names = (
        [store.entry] if is_file and store.entry else list_safetensors_files(store, report).names
    )
    headers: list[Header] = []
    for name in names:
        problems: list[CheckpointingException] = []
        try:
            header = read_header(store, name, report=problems.append)
        except CheckpointingException as err:
            report(err)
            continue
        # A cut file has hundreds of tensors beyond its end: one error stands for all of them.
        if problems:
            if len(problems) > 1:
                problems[0].message += f" (and {n_text(len(problems) - 1, 'more such error')})"
            report(problems[0])
            lost = {problem.key for problem in problems}
            arrays = {key: array for key, array in header.arrays.items() if key not in lost}
            header = replace(header, arrays=arrays)
        if not has_pieces(header):
            headers.append(header)
    return _catalog_of_headers(headers)


def _with_deltas(catalog: Catalog, index: WeightIndex) -> Catalog:
    """Return the catalog with what the index says about differences instead of weights."""
    if index.deltas is None:
        return catalog
    return catalog.with_facet(index.deltas).noted([f"these are {index.deltas.title}"])


def _read_component(store: ReadStore) -> Catalog | None:
    """Read the weights of a pipeline's component; None if it has none."""
    from core.formats.huggingface import bin_format

    if is_safetensors(store):
        return read(store)
    return bin_format.read(store) if bin_format.sniff(store) else None


def _salvage_component(store: ReadStore, report: Report) -> Catalog | None:
    """Read what can be read of a pipeline's component; None if it has no weights."""
    from core.formats.huggingface import bin_format

    if is_safetensors(store):
        return salvage(store, report)
    return bin_format.salvage(store, report) if bin_format.sniff(store) else None


def _own_folders(store: ReadStore) -> tuple[str, ...]:
    """Return the directories with pieces of tensors, components of a pipeline, or modules."""
    components = component_folders(store) if is_pipeline(store) else ()
    return (PIECES_DIR, *components, *list_module_folders(store))


def _read_file(store: ReadStore, name: str) -> Catalog:
    """Read the catalog of a single file.

    Raises:
        CorruptError, TruncatedError, UnsupportedError: see ``read_header``.
        UnsupportedError: the file is one of several with pieces of tensors.
    """
    header = read_header(store, name)
    if has_pieces(header) and is_piece(name):
        raise UnsupportedError(
            "the file contains only one rank's pieces of tensors",
            file=name,
            hint="pass the directory with the pieces of all ranks",
        )
    catalog = _catalog_of_pieces([header]) if has_pieces(header) else _catalog_of_headers([header])

    # Note what else the directory has to offer.
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
    catalog = catalog.noted(notes)
    # Files of differences record a checksum for each tensor; the index next to them says the rest.
    index = STEMS[0] + INDEX_SUFFIX
    if header.arrays.keys() & header.metadata.keys() and store.exists(index):
        return _with_deltas(catalog, read_index(store, index))
    return catalog


def _catalog_of_headers(headers: Sequence[Header], *, stem: str | None = None) -> Catalog:
    """Build the catalog of files with complete tensors and of the further names in their metadata.

    Raises:
        CorruptError: a tensor is in two files.
    """
    arrays: dict[str, StoredArray] = {}
    for header in headers:
        for key, array in header.arrays.items():
            if key in arrays:
                raise CorruptError(
                    f"the tensor is also in {arrays[key].extent.file}",
                    file=header.file,
                    key=key,
                    hint="pass one of the files, or an index that lists the right file",
                )
            arrays[key] = array
    # A further name of a tied tensor is recorded as metadata, with the name of the tensor as value.
    aliases = {
        name: original
        for header in headers
        for name, original in header.metadata.items()
        if original in header.arrays and name not in arrays and name not in DEFAULT_METADATA
    }
    arrays |= {key: arrays[original] for key, original in aliases.items()}
    by_path, notes = _merge_metadata(headers, aliases)
    catalog = catalog_of_arrays(format="safetensors", arrays=arrays)
    catalog = replace(catalog, notes=notes).with_facet(WeightFileFacts(stem))
    return with_attributes(catalog, by_path)


def _with_further_models(catalog: Catalog, store: ReadStore) -> Catalog:
    """Add the tensors of accelerate's further models, as ``model_1.…``, to those of the first one.

    Raises:
        CorruptError, TruncatedError: a file is damaged, or a tensor of the first model has the key
            of another model's.
    """
    stems = further_models(store)
    by_path: dict[str, Mapping[str, object]] = {}
    for stem in stems:
        header = read_header(store, f"{stem}{SUFFIX}")
        arrays = {
            (key := f"{stem}.{name}"): replace(array, name=key)
            for name, array in header.arrays.items()
        }
        taken = next((key for key in arrays if key in catalog.tensors), None)
        if taken is not None:
            raise CorruptError(
                "a tensor of the first model already has this key", file=stem, key=taken
            )
        catalog = replace(catalog, tensors={**catalog.tensors, **tensors_of(arrays)})
        own = {name: text for name, text in header.metadata.items() if name not in DEFAULT_METADATA}
        by_path |= {stem: own} if own else {}
    facts = catalog.facet(WeightFileFacts) or WeightFileFacts()
    catalog = with_attributes(catalog, by_path)
    return catalog.with_facet(replace(facts, further_models=stems)) if stems else catalog


def _catalog_of_pieces(headers: Sequence[Header], *, stem: str | None = None) -> Catalog:
    """Build the catalog of files with pieces of tensors; raises the errors of ``join_pieces``."""
    tensors = join_pieces(headers)
    by_path, notes = _merge_metadata(headers, {})
    catalog: Catalog = Catalog("safetensors", None, tensors, notes=notes)
    return with_attributes(catalog.with_facet(WeightFileFacts(stem)), by_path)


def _merge_metadata(
    headers: Iterable[Header], aliases: Mapping[str, str]
) -> tuple[dict[str, Mapping[str, object]], tuple[str, ...]]:
    """Merge the ``__metadata__`` of all files, and note every entry in which they differ.

    Returns:
        The attributes of the root, and those that ``ckpt.attributes`` holds, by path; the notes.
    """
    merged: dict[str, object] = {}
    by_path: dict[str, Mapping[str, object]] = {}
    notes: dict[str, None] = {}
    for header in headers:
        for name, text in header.metadata.items():
            # What the format interprets, and what it says by default, is no news.
            if name in (SHARDING_INFO, VERSION) or name in aliases:
                continue
            if DEFAULT_METADATA.get(name) == text:
                continue
            recorded = _recorded_attributes(text, header.file) if name == BY_PATH else None
            if recorded is not None:
                by_path |= recorded
                continue
            if merged.setdefault(name, text) != text:
                notes[
                    f"the files have different metadata {name[:60]!r}; the first file's value "
                    "is kept"
                ] = None
    root = {**merged, **by_path.get(ROOT, {})}
    return by_path | ({ROOT: root} if root else {}), tuple(notes)


def _recorded_attributes(text: str, file: str) -> AttributesByPath | None:
    """Return the attributes in the text of ``ckpt.attributes``; None if they have another form."""
    try:
        return parse_by_path(parse_json_object(text.encode(), file=file))
    except CorruptError:
        return None


def _check_index(headers: Sequence[Header], index: WeightIndex) -> list[str]:
    """Check that the index lists exactly the tensors of each file; return notes.

    Raises:
        MissingShardError: a tensor is missing in the file that the index names.
        CorruptError: the index does not list a tensor, or lists it in another file.
    """
    arrays_of = {header.file: header.arrays for header in headers}
    for key, name in index.file_of.items():
        if key not in arrays_of[name]:
            report_missing(
                MissingShardError(
                    f"{index.file} lists the tensor in this file, but it is missing there",
                    file=name,
                    key=key,
                    hint=STALE_INDEX_HINT,
                )
            )
    for name, arrays in arrays_of.items():
        for key in arrays:
            listed_file = index.file_of.get(key)
            if listed_file != name:
                problem = (
                    f"{index.file} does not list the tensor"
                    if listed_file is None
                    else f"{index.file} lists the tensor in {listed_file}, not in this file"
                )
                raise CorruptError(problem, file=name, key=key, hint=STALE_INDEX_HINT)
    return _size_notes(sum(header.n_bytes for header in headers), index)


def _size_notes(n_bytes: int, index: WeightIndex) -> list[str]:
    """Return a note if the total size in the index differs from that of the tensors."""
    if index.total_bytes is None or index.total_bytes == n_bytes:
        return []
    recorded = f"total_size in {index.file} is {index.total_bytes}"
    return [f"the tensors add up to {n_bytes} bytes, but {recorded}"]


def _check_pieces(store: ReadStore, catalog: Catalog, index: WeightIndex | None) -> list[str]:
    """Compare the global tensors with the index and config.json, if they exist; return notes.

    The header of a piece does not contain the global shape, so nothing else shows that the files of
    the last ranks are missing.

    Raises:
        CorruptError: a size in config.json is invalid.
        MissingShardError: a tensor or part of a tensor is missing.
    """
    config = read_config_json(store)
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
    # A total that is a multiple was computed for a wider dtype than the one that was saved.
    n_bytes, total = catalog.n_bytes, index.total_bytes or 0
    if total > n_bytes and (n_bytes == 0 or total % n_bytes):
        raise MissingShardError(
            f"the pieces add up to {n_bytes:,} bytes, but total_size in the index is {total:,}",
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
    lay_out=imported_on_call("safetensors.layout", "lay_out"),
    load_call=imported_on_call("load_calls", "safetensors_load"),
    keeps_attributes=True,
    is_single_file=True,
    suffixes=(SUFFIX,),
    aliases=("hf", "huggingface"),
    carries_files=True,
    has_hf_config=True,
    has_objects_beside=True,
    splits_files=True,
    records_ties=True,
    own_folders=_own_folders,
    list_indexed=list_indexed,
)
