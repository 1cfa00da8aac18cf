"""PyTorch Distributed Checkpoint (DCP), as ``torch.distributed.checkpoint.save`` writes it.

On disk::

    step-10/
    ├── .metadata          one pickle: names, shapes, chunks, and where every item lies
    ├── __0_0.distcp       items: whole torch zips, back to back (``core.formats.dcp.items``)
    └── __1_0.distcp …     one or more files per writer

Other forms of it that are read: items inside zstd frames (``core.formats.dcp.zstd_streams``), files
that hold their chunks as safetensors (``core.formats.dcp.safetensors_items``), ``__0.metadata``,
``__1.metadata`` … of single ranks (``core.formats.dcp.rank_metadata``), and directories in which
accelerate keeps a model and its optimizer apart (``core.formats.dcp.folders``). What Lightning
keeps in ``meta.pt`` beside such a checkpoint belongs to it (``core.formats.dcp.lightning_meta``).

Versions: everything with this file layout (torch 2.1 to 2.13); older ones lack some attributes of
    ``.metadata``.

A catalog's extents are late-bound: where in an item the data begins, and with which strides, stands
in the item. A tensor that was saved transposed or channels-last keeps its strides there while
``.metadata`` says nothing of them. Objects are not read with the metadata: each is a hidden stream
``raw:<key>``.

Written objects: torch imports the classes that they name, so one that names Megatron's (the
training arguments do) could be loaded nowhere else, and would stop ``dcp_to_torch_save``. Such an
object is stored as plain containers (``core.formats.torch.weights_only``), and is itself again when
it is read here.

Several training systems save such directories, and name things their own way:

* FSDP2 with an ``AppState``: ``app.model.<fqn>``, ``app.optim.state.<fqn>.exp_avg``,
  ``app.optim.param_groups.…``;
* torchtitan: bare ``<fqn>``, ``optimizer.state.<fqn>.exp_avg``, ``train_state.step``, in
  ``checkpoint/step-10``;
* Megatron's ``torch_dcp`` and ``fsdp_dtensor``: ``model.module.…``, ``optimizer.state.…``,
  ``args``, ``iteration``.

``Catalog.iteration`` and ``args`` are set where an entry of one of these systems says them. Facets:
``DcpFacts``, and ``TorchDistFacts`` where Megatron added its ``mcore_data``.

Not supported, refused by name: stream transforms other than zstd, Hugging Face storage.

Source: torch 2.13 ``torch/distributed/checkpoint/{filesystem,metadata,default_planner}.py``;
checkpoints written by it, pinned in tests/golden (``torch_dcp``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from core.arrays.dtypes import itemsize
from core.catalog.catalog import (
    AnyCatalog,
    Catalog,
    Fragment,
    StoredObject,
    TargetCatalog,
    TensorMeta,
    metas_of,
    whole_fragment,
)
from core.catalog.facets import TorchDistFacts
from core.catalog.file_image import literal_file
from core.catalog.stored import Extent, StoredArray, array_name
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    TruncatedError,
    UnsupportedError,
    raising,
)
from core.formats.dcp.facets import DcpFacts
from core.formats.dcp.facts import with_stated_facts
from core.formats.dcp.folders import dcp_folders, joined
from core.formats.dcp.items import Item, ItemLayout, lay_out_items
from core.formats.dcp.lightning_meta import meta_keys, split_meta, with_meta
from core.formats.dcp.metadata import DcpItem, DcpMetadata, read_metadata, salvaged_metadata
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.formats.dcp.rank_metadata import RANK_METADATA, merge_rank_metadata, rank_files
from core.formats.dcp.safetensors_items import with_raw_files
from core.formats.dcp.zstd_streams import StreamItem, read_inflated_object
from core.formats.format import Format
from core.formats.mcore.metadata_json import CONFIG
from core.formats.mcore.objects import COMMON_OBJECT
from core.formats.torch.format import item_location
from core.formats.torch.refused import aside_notes, loadable
from core.pickle.inert import ObjectLeaf, TensorLeaf
from core.pickle.key_text import text_of
from core.pickle.nesting import ListIndex, Path, entries, nest_leaves

if TYPE_CHECKING:
    from core.catalog.file_image import FileImage
    from core.files.store import ReadStore

METADATA = ".metadata"


def sniff(store: ReadStore) -> bool:
    """Return whether the directory holds ``.metadata``, the rest of an unfinished save, or
    accelerate's directories.
    """
    if store.entry is not None:
        return False
    return store.exists(METADATA) or _unfinished(store) is not None or bool(dcp_folders(store))


def _unfinished(store: ReadStore) -> str | None:
    """Return a file that shows that this was to become a DCP checkpoint, or None."""
    for name in store.files():
        if name == METADATA + ".tmp" or RANK_METADATA.fullmatch(name) or name.endswith(".distcp"):
            return name
    return None


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a plain DCP directory.

    Raises:
        MissingShardError: ``.metadata`` or a file that it names is missing, or a save of Megatron's
            did not finish.
        TruncatedError: a file is shorter than ``.metadata`` states.
        CorruptError: ``.metadata`` contradicts itself.
        UnsupportedError: items are stored in a way that is not supported.
        UnsafeError: ``.metadata`` is a hostile pickle, or names files outside the directory.
    """
    metadata = metadata_of(store)
    if COMMON_OBJECT in metadata.objects:
        raise MissingShardError(
            f"the checkpoint is Megatron's (it holds {COMMON_OBJECT}), but no {CONFIG} names its backend; Megatron "
            "writes that file last, so the save did not finish",
            file=CONFIG,
            hint="use an older checkpoint",
        )
    catalog = with_meta(catalog_of(metadata, format="dcp", store=store), store)
    catalog = with_stated_facts(catalog, store)
    folders = _folders(store)
    return catalog.noted([_JOINED.format(", ".join(folders))] if folders else [])


_JOINED = (
    "{} are read as one checkpoint (Accelerator.load_state takes them only as separate directories)"
)


def salvage(store: ReadStore, report: Report) -> Catalog:
    """Read those parts of the catalog that make sense; files may be missing.

    The rules are those of ``salvaged_metadata``.

    Raises:
        MissingShardError: ``.metadata`` is missing.
        CorruptError, UnsupportedError, UnsafeError: nothing of it can be read.
    """
    metadata = salvaged(store, report)
    return catalog_of(metadata, format="dcp", without=tuple(metadata.object_descriptors))


def salvaged(store: ReadStore, report: Report) -> DcpMetadata:
    """Read the metadata without entries that make no sense; files may be missing.

    Args:
        report: receives the problems, see ``salvaged_metadata``.

    Raises:
        MissingShardError: ``.metadata`` is missing.
        CorruptError, UnsupportedError, UnsafeError: nothing of it can be read.
    """

    def part(name: str) -> DcpMetadata:
        return salvaged_metadata(store.read(name, 0, store.size(name)), label=name, report=report)

    folders = _folders(store)
    if not folders:
        return part(METADATA)
    return joined([(folder, part(f"{folder}/{METADATA}")) for folder in folders], store)


def metadata_files(store: ReadStore) -> list[str]:
    """Return the names of ``.metadata`` in a checkpoint: one, or one in each of accelerate's
    directories.
    """
    return [f"{folder}/{METADATA}" for folder in _folders(store)] or [METADATA]


def _folders(store: ReadStore) -> tuple[str, ...]:
    """Return accelerate's directories, unless the checkpoint lies directly in their parent
    directory.
    """
    return () if store.exists(METADATA) or _unfinished(store) is not None else dcp_folders(store)


def metadata_of(store: ReadStore) -> DcpMetadata:
    """Read ``.metadata`` and check it against the files that it names.

    Raises the errors of ``read``.

    If there is no such file, the metadata of single ranks is merged.
    """
    metadata = stated_metadata(store)
    check_files(store, metadata)
    return with_raw_files(store, metadata)


def stated_metadata(store: ReadStore) -> DcpMetadata:
    """Read ``.metadata`` without looking at the files that it names; raises the errors of
    ``read``.
    """
    if store.exists(METADATA):
        return _metadata_in(store, METADATA)
    if ranks := rank_files(store):
        return merge_rank_metadata([_metadata_in(store, name) for name in ranks], store)
    folders = _folders(store)
    if not folders:
        raise _unwritten(METADATA, file=store.label)
    return joined(
        [(folder, _metadata_in(store, f"{folder}/{METADATA}")) for folder in folders], store
    )


def _metadata_in(store: ReadStore, name: str) -> DcpMetadata:
    if not store.exists(name):
        raise _unwritten(name, file=name)
    return read_metadata(store.read(name, 0, store.size(name)), label=name)


def _unwritten(name: str, *, file: str) -> MissingShardError:
    return MissingShardError(
        f"{name} is missing; torch writes it last, so the save did not finish",
        file=file,
        hint="use an older checkpoint",
    )


def check_files(store: ReadStore, metadata: DcpMetadata, *, report: Report = raising) -> None:
    """Check that every file that the metadata names exists and is long enough.

    Args:
        report: receives an error for each file that is missing or too short.
    """
    # Each file must reach to the end of its last item.
    ends = [0] * len(metadata.files)
    for file, offset, n_bytes in zip(
        metadata.file_index, metadata.item_offset, metadata.item_bytes, strict=True
    ):
        if offset + n_bytes > ends[file]:
            ends[file] = offset + n_bytes
    number = {name: n for n, name in enumerate(metadata.files)}
    for item in metadata.objects.values():
        ends[number[item.file]] = max(ends[number[item.file]], item.offset + item.n_bytes)

    # Directories are listed: 10⁵ missing files are not looked up one by one.
    folders = {name.rpartition("/")[0] for name in metadata.files}
    existing = {
        f"{folder}/{name}" if folder else name for folder in folders for name in store.files(folder)
    }
    sizes = [store.size(name) if name in existing else None for name in metadata.files]
    short = {
        n: size
        for n, (size, end) in enumerate(zip(sizes, ends, strict=True))
        if size is None or end > size
    }

    # Report each file with an entry that is lost with it.
    keys = _first_keys(metadata, {n: size or 0 for n, size in short.items()}) if short else {}
    for n, size in short.items():
        report(_short_file(metadata.files[n], size, ends[n], key=keys.get(n)))


def _short_file(
    name: str, size: int | None, end: int, *, key: str | None
) -> CheckpointingException:
    """Return the error about a file that ends before byte ``end``; its size is None if it is
    missing.
    """
    if size is None:
        return MissingShardError(
            f"a file named by {METADATA} is missing",
            file=name,
            key=key,
            hint="copy the checkpoint again, with all its files",
        )
    return TruncatedError(
        f"the file has {size} bytes, but {METADATA} places items up to byte {end}",
        file=name,
        key=key,
        span=(size, end),
        hint="copy the checkpoint again, or use an older one",
    )


def _first_keys(metadata: DcpMetadata, limits: Mapping[int, int]) -> dict[int, str]:
    """Return number of a file → first tensor, else object, with an item in it that ends after a
    byte.

    Args:
        limits: number of a file → the byte.
    """
    first_of: dict[int, str] = {}
    for tensor in metadata.tensors.values():
        for row in range(tensor.first, tensor.first + tensor.n_chunks):
            file = metadata.file_index[row]
            if (
                file in limits
                and metadata.item_offset[row] + metadata.item_bytes[row] > limits[file]
            ):
                first_of.setdefault(file, tensor.key)
    number = {name: n for n, name in enumerate(metadata.files)}
    for key, item in metadata.objects.items():
        file = number[item.file]
        if file in limits and item.offset + item.n_bytes > limits[file]:
            first_of.setdefault(file, key)
    return first_of


def catalog_of(
    metadata: DcpMetadata,
    *,
    format: str,
    without: Sequence[str] = (),
    store: ReadStore | None = None,
) -> Catalog:
    """Return the catalog of checked metadata.

    Args:
        format: ``dcp`` or ``torch_dist``.
        without: keys of objects to leave out.
        store: the checkpoint. Objects inside zstd frames are read at once, as their length is only
            known after inflating; without a store they are refused.

    Raises:
        UnsupportedError, CorruptError, UnsafeError: such an object cannot be read.
    """
    # Objects inside zstd frames are read now; all others become hidden streams.
    tensors = {
        key: TensorMeta(key, tensor.dtype, tensor.shape) for key, tensor in metadata.tensors.items()
    }
    packed_items = {
        key: metadata.objects[key] for key in metadata.object_descriptors if key in metadata.objects
    }
    objects, packed_arrays = _read_packed_objects(
        metadata, {key: item for key, item in packed_items.items() if key not in without}, store
    )
    raw_of = {
        key: _raw_key(key, tensors)
        for key in metadata.objects
        if key not in without and key not in packed_items
    }
    object_of = {raw: key for key, raw in raw_of.items()}

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key in tensors:
            return _chunks(metadata, key)
        array = packed_arrays.get(key)
        if array is not None:
            return (whole_fragment(key, array),)
        return (whole_fragment(key, _object_stream(key, metadata.objects[object_of[key]])),)

    # Streams and the tensors inside objects are hidden.
    hidden = {
        raw: TensorMeta(raw, "uint8", (metadata.objects[key].n_bytes,))
        for key, raw in raw_of.items()
    }
    hidden |= metas_of(packed_arrays)
    objects |= {key: StoredObject(key, raw_key=raw) for key, raw in raw_of.items()}
    catalog = Catalog(
        format=format,
        version=metadata.version,
        tensors=tensors,
        fragments_of=fragments_of,
        objects={key: objects[key] for key in metadata.objects if key in objects},
        hidden=hidden,
        skeleton=_skeleton(metadata, objects),
        bind=item_location,
    ).with_facet(DcpFacts(item_files=tuple(metadata.files), orphans=metadata.orphans))
    if metadata.mcore_data is None:
        return catalog
    return catalog.with_facet(TorchDistFacts(mcore_data=metadata.mcore_data))


def _read_packed_objects(
    metadata: DcpMetadata, items: Mapping[str, DcpItem], store: ReadStore | None
) -> tuple[dict[str, StoredObject], dict[str, StoredArray]]:
    """Read the values of transformed objects, and the tensors inside them."""
    objects: dict[str, StoredObject] = {}
    arrays_inside: dict[str, StoredArray] = {}
    for key, item in items.items():
        if store is None:
            raise UnsupportedError(
                "the object is compressed, which this format does not support",
                file=item.file,
                key=key,
            )
        value, arrays = read_inflated_object(store, item, metadata.object_descriptors[key], key=key)
        objects[key] = StoredObject(key, value=value)
        arrays_inside |= arrays
    return objects, arrays_inside


def _raw_key(key: str, tensors: Mapping[str, TensorMeta]) -> str:
    """Return a name for an object's stream that no tensor has."""
    name = f"raw:{key}"
    while name in tensors:
        name = f"raw:{name}"
    return name


def _chunks(metadata: DcpMetadata, key: str) -> list[Fragment]:
    """Return the chunks of a tensor as fragments."""
    tensor = metadata.tensors[key]
    origin = (0,) * len(tensor.shape)
    fragments = []
    for row, (box, item) in enumerate(metadata.chunks(key), tensor.first):
        transforms = metadata.descriptors.get(row)
        if transforms:
            n_bytes = prod(box.shape) * itemsize(tensor.dtype)
            extent = Extent(
                item.file, item.offset, encoding=StreamItem(transforms, item.n_bytes, n_bytes)
            )
        elif metadata.raw_files and metadata.file_index[row] in metadata.raw_files:
            extent = Extent(item.file, item.offset)
        else:
            extent = Extent(item.file, item.offset, item_bytes=item.n_bytes)
        array = StoredArray(array_name(key, box), tensor.dtype, box.shape, extent)
        fragments.append(Fragment(key, box, array, origin))
    return fragments


def _object_stream(raw: str, item: DcpItem) -> StoredArray:
    """Return the stream of an object as a stored array of bytes."""
    return StoredArray(raw, "uint8", (item.n_bytes,), Extent(item.file, item.offset))


def _skeleton(metadata: DcpMetadata, objects: Mapping[str, StoredObject]) -> object:
    """Return the nesting that planner_data describes, or None if there is no planner_data."""
    if metadata.planner_data is None:
        return None
    keys = [key for key in metadata.planner_data if key in metadata.tensors or key in objects]
    keys += [key for key in (*metadata.tensors, *objects) if key not in metadata.planner_data]
    leaves: dict[Path, object] = {}
    for key in keys:
        path = metadata.planner_data.get(key, (key,))
        full_path: Path = tuple(ListIndex(part) if isinstance(part, int) else part for part in path)
        if full_path in leaves or not full_path:
            raise CorruptError(
                f"planner_data has the path {path} for two entries", file=METADATA, key=key
            )
        leaves[full_path] = ObjectLeaf(key) if key in objects else TensorLeaf(key)
    return nest_leaves(leaves)


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """Return the images of a plain DCP directory: ``__<n>_0.distcp`` …, ``meta.pt`` if there was
    one, ``.metadata``.

    Args:
        target: every array becomes a chunk, every object an item. The paths of its skeleton become
            ``planner_data``, so that ``dcp_to_torch_save`` rebuilds the nesting; without one every
            key is its own path. Of the options, ``WriteOptions.max_file_bytes`` is used, see
            ``core.formats.dcp.items.lay_out_items``.

    Raises:
        UnsupportedError: the arrays are not chunks of their tensors.
    """
    target, meta_image = split_meta(target)
    objects = [
        replace(item, value=loadable(item.value, key=item.key)) for item in target.objects.values()
    ]
    layout = lay_out_items(target, objects, max_file_bytes=target.write.max_file_bytes)
    meta_files = () if meta_image is None else (meta_image,)
    return (
        *layout.files,
        *meta_files,
        metadata_image(target, layout, planner_data=paths_of(target)),
    )


def paths_of(catalog: AnyCatalog) -> dict[str, tuple[str | int, ...]]:
    """Return key → path for every tensor and object.

    A key that is not its dot-joined path is at the root.
    """
    paths: dict[str, tuple[str | int, ...]] = {}
    if catalog.skeleton is not None:
        for entry in entries(catalog.skeleton):
            path = tuple(
                int(part) if isinstance(part, ListIndex) else text_of(part) for part in entry.path
            )
            if ".".join(map(str, path)) == entry.key and (
                entry.key in catalog.tensors or entry.key in catalog.objects
            ):
                paths[entry.key] = path
    for key in (*catalog.tensors, *catalog.objects):
        paths.setdefault(key, (key,))
    return paths


def metadata_image(
    target: TargetCatalog,
    layout: ItemLayout,
    *,
    planner_data: Mapping[str, tuple[str | int, ...]] | None,
    mcore_data: Mapping[str, object] | None = None,
) -> FileImage:
    """Return the image of ``.metadata``.

    Args:
        target: the catalog that is written.
        layout: the positions of its items.
        planner_data: paths of the keys; None for Megatron.
        mcore_data: Megatron's facts about tensors; None to leave the attribute out.
    """
    attributes = {} if mcore_data is None else {"mcore_data": dict(mcore_data)}
    keys = (*target.tensors, *layout.objects) if planner_data is None else tuple(planner_data)
    data = write_metadata(
        _rows(target, layout, keys), planner_data=planner_data, attributes=attributes
    )
    return literal_file(METADATA, data, is_metadata=True)


def linked_metadata(catalog: Catalog) -> FileImage:
    """Return the image of ``.metadata`` for entries that stay in the source's data files.

    Args:
        catalog: a result of ``catalog_of``, with some entries left out or renamed; entries of
            ``meta.pt`` are ignored.

    Raises:
        UnsupportedError: an entry is not an item of its own, so ``.metadata`` cannot refer to it.
    """
    in_meta = meta_keys(catalog)
    planner_data = {key: path for key, path in paths_of(catalog).items() if key not in in_meta}
    data = write_metadata(
        (_linked_row(catalog, key) for key in planner_data), planner_data=planner_data
    )
    return literal_file(METADATA, data, is_metadata=True)


def _linked_row(catalog: Catalog, key: str) -> TensorRow | ObjectRow:
    """Return the row of ``.metadata`` for an entry in the source's data files."""

    def refused() -> UnsupportedError:
        return UnsupportedError(
            "the entry is compressed or not an item of its own, so new metadata cannot refer to it",
            key=key,
            hint="leave --metadata-only out",
        )

    meta = catalog.tensors.get(key)
    if meta is None:
        raw_key = catalog.objects[key].raw_key
        array = None if raw_key is None else catalog.fragments(raw_key)[0].array
        if array is None or array.extent.encoding is not None:
            raise refused()
        return ObjectRow(key, array.extent.file, array.extent.offset, array.n_bytes)
    rows = []
    for piece in catalog.fragments(key):
        array = piece.array
        item_bytes = None if array is None else array.extent.item_bytes
        if array is None or item_bytes is None or array.shape != piece.box.shape:
            raise refused()
        rows.append(
            ChunkRow(
                piece.box.offset,
                piece.box.shape,
                array.extent.file,
                array.extent.offset,
                item_bytes,
            )
        )
    return TensorRow(key, meta.dtype, meta.shape, rows)


def _rows(
    target: TargetCatalog, layout: ItemLayout, keys: Iterable[str]
) -> Iterator[TensorRow | ObjectRow]:
    """Yield the rows of ``.metadata`` for keys, in order."""
    names = [image.path for image in layout.files]
    for key in keys:
        meta = target.tensors.get(key)
        if meta is not None:
            yield TensorRow(key, meta.dtype, meta.shape, _chunk_rows(layout.chunks[key], names))
        else:
            item = layout.objects[key]
            yield ObjectRow(key, names[item.file], item.offset, item.size)


def _chunk_rows(chunks: Iterable[Item], names: Sequence[str]) -> Iterator[ChunkRow]:
    for item in chunks:
        assert item.box is not None
        yield ChunkRow(item.box.offset, item.box.shape, names[item.file], item.offset, item.size)


FORMAT = Format(
    name="dcp",
    title="PyTorch Distributed Checkpoint",
    sniff=sniff,
    read=read,
    lay_out=lay_out,
    aliases=("torch_dcp",),
    partition="as_stored",
    salvage=salvage,
    splits_files=True,
    has_live_objects=True,
    notes_of=aside_notes,
    own_folders=_folders,
)
