"""PyTorch Distributed Checkpoint (DCP), as ``torch.distributed.checkpoint.save`` writes it.

On disk::

    step-10/
    ├── .metadata          one pickle: names, shapes, chunks, and where every item lies
    ├── __0_0.distcp       items: whole torch zips, back to back (``core.formats.dcp.items``)
    └── __1_0.distcp …     one or more files per writer

Other forms of it that are read: items inside zstd frames (``core.formats.dcp.zstd_streams``), files that hold their
chunks as safetensors (``core.formats.dcp.safetensors_items``), ``__0.metadata``, ``__1.metadata`` … of single ranks
(``core.formats.dcp.rank_metadata``), and directories in which accelerate keeps a model and its optimizer apart
(``core.formats.dcp.folders``). What Lightning keeps in ``meta.pt`` beside such a checkpoint belongs to it
(``core.formats.dcp.lightning_meta``).

Versions: everything with this file layout (torch 2.1 to 2.13); older ones lack some attributes of ``.metadata``.

A catalog's extents are late-bound: where in an item the data begins, and with which strides, stands in the item. A
tensor that was saved transposed or channels-last keeps its strides there while ``.metadata`` says nothing of them.
Objects are not read with the metadata: each is a hidden stream ``raw:<key>``.

Written objects: torch imports the classes that they name, so one that names Megatron's (the training arguments do)
could be loaded nowhere else, and would stop ``dcp_to_torch_save``. Such an object is stored as plain containers
(``core.formats.torch.weights_only``), and is itself again when it is read here.

Several training systems save such directories, and name things their own way:

* FSDP2 with an ``AppState``: ``app.model.<fqn>``, ``app.optim.state.<fqn>.exp_avg``, ``app.optim.param_groups.…``;
* torchtitan: bare ``<fqn>``, ``optimizer.state.<fqn>.exp_avg``, ``train_state.step``, in ``checkpoint/step-10``;
* Megatron's ``torch_dcp`` and ``fsdp_dtensor``: ``model.module.…``, ``optimizer.state.…``, ``args``, ``iteration``.

``Catalog.iteration`` and ``args`` are set where an entry of one of these systems says them. Facets: ``DcpFacts``, and
``TorchDistFacts`` where Megatron added its ``mcore_data``.

Not supported, refused by name: stream transforms other than zstd, Hugging Face storage.

Source: torch 2.13 ``torch/distributed/checkpoint/{filesystem,metadata,default_planner}.py``; checkpoints written by it,
pinned in tests/golden (``torch_dcp``).
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
from core.formats.dcp.lightning_meta import meta_keys, parted, with_meta
from core.formats.dcp.metadata import DcpItem, DcpMetadata, read_metadata, salvaged_metadata
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.formats.dcp.rank_metadata import RANK_METADATA, merged, rank_files
from core.formats.dcp.safetensors_items import with_raw_files
from core.formats.dcp.zstd_streams import StreamItem, inflated_object
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
    """Whether the directory holds ``.metadata``, what an unfinished save leaves of one, or accelerate's directories."""
    if store.entry is not None:
        return False
    return store.exists(METADATA) or _unfinished(store) is not None or bool(dcp_folders(store))


def _unfinished(store: ReadStore) -> str | None:
    """A file that tells that this was to become a DCP checkpoint, or None."""
    for name in store.files():
        if name == METADATA + ".tmp" or RANK_METADATA.fullmatch(name) or name.endswith(".distcp"):
            return name
    return None


def read(store: ReadStore) -> Catalog:
    """The catalog of a plain DCP directory.

    Raises:
        MissingShardError: ``.metadata``, or a file that it names, is absent, or it is a save of Megatron's that did not
            finish.
        TruncatedError: a file is shorter than ``.metadata`` says.
        CorruptError: ``.metadata`` contradicts itself.
        UnsupportedError: items are stored in a way that is not handled.
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


_JOINED = "{} are read as one checkpoint (Accelerator.load_state takes them only as directories of their own)"


def salvage(store: ReadStore, report: Report) -> Catalog:
    """What of the catalog makes sense; files need not be there. The rules are those of ``salvaged_metadata``.

    Raises:
        MissingShardError: there is no ``.metadata``.
        CorruptError, UnsupportedError, UnsafeError: nothing of it can be read.
    """
    metadata = salvaged(store, report)
    return catalog_of(metadata, format="dcp", without=tuple(metadata.object_descriptors))


def salvaged(store: ReadStore, report: Report) -> DcpMetadata:
    """Return what the metadata say, without entries that make no sense; files need not be there.

    Args:
        report: told of what is left out, see ``salvaged_metadata``.

    Raises:
        MissingShardError: there is no ``.metadata``.
        CorruptError, UnsupportedError, UnsafeError: nothing of it can be read.
    """

    def part(name: str) -> DcpMetadata:
        return salvaged_metadata(store.read(name, 0, store.size(name)), label=name, report=report)

    folders = _folders(store)
    if not folders:
        return part(METADATA)
    return joined([(folder, part(f"{folder}/{METADATA}")) for folder in folders], store)


def metadata_files(store: ReadStore) -> list[str]:
    """Return the names that ``.metadata`` has in a checkpoint: one, or one in each of accelerate's directories."""
    return [f"{folder}/{METADATA}" for folder in _folders(store)] or [METADATA]


def _folders(store: ReadStore) -> tuple[str, ...]:
    """Return accelerate's directories, unless the checkpoint lies in the directory above them itself."""
    return () if store.exists(METADATA) or _unfinished(store) is not None else dcp_folders(store)


def metadata_of(store: ReadStore) -> DcpMetadata:
    """The content of ``.metadata``, checked against the files that it names; raises as ``read`` does.

    Without such a file, those of single ranks serve together.
    """
    metadata = stated_metadata(store)
    check_files(store, metadata)
    return with_raw_files(store, metadata)


def stated_metadata(store: ReadStore) -> DcpMetadata:
    """The same, whether or not the files that it names are there; raises as ``read`` does."""
    if store.exists(METADATA):
        return _metadata_in(store, METADATA)
    if ranks := rank_files(store):
        return merged([_metadata_in(store, name) for name in ranks], store)
    folders = _folders(store)
    if not folders:
        raise _unwritten(METADATA, file=store.label)
    return joined([(folder, _metadata_in(store, f"{folder}/{METADATA}")) for folder in folders], store)


def _metadata_in(store: ReadStore, name: str) -> DcpMetadata:
    if not store.exists(name):
        raise _unwritten(name, file=name)
    return read_metadata(store.read(name, 0, store.size(name)), label=name)


def _unwritten(name: str, *, file: str) -> MissingShardError:
    return MissingShardError(
        f"{name} is not there; torch writes it last, so the save did not finish",
        file=file,
        hint="use an older checkpoint",
    )


def check_files(store: ReadStore, metadata: DcpMetadata, *, report: Report = raising) -> None:
    """Returns if every file that the metadata name is there and long enough.

    Args:
        report: told of each file that is not.
    """
    ends = [0] * len(metadata.files)
    for file, offset, n_bytes in zip(metadata.file_index, metadata.item_offset, metadata.item_bytes, strict=True):
        if offset + n_bytes > ends[file]:
            ends[file] = offset + n_bytes
    number = {name: n for n, name in enumerate(metadata.files)}
    for item in metadata.objects.values():
        ends[number[item.file]] = max(ends[number[item.file]], item.offset + item.n_bytes)
    folders = {name.rpartition("/")[0] for name in metadata.files}
    files = {f"{folder}/{name}" if folder else name for folder in folders for name in store.files(folder)}
    is_there = [name in files for name in metadata.files]  # 10⁵ absent files are not looked up one by one
    sizes = [store.size(name) if found else 0 for name, found in zip(metadata.files, is_there, strict=True)]
    short = {n: size for n, (size, end) in enumerate(zip(sizes, ends, strict=True)) if end > size or not is_there[n]}
    keys = _first_keys(metadata, short) if short else {}
    for n, size in short.items():
        name = metadata.files[n]
        if not is_there[n]:
            problem: CheckpointingException = MissingShardError(
                f"{METADATA} names a file that is not there",
                file=name,
                key=keys.get(n),
                hint="copy the checkpoint again, with all its files",
            )
        else:
            problem = TruncatedError(
                f"the file has {size} bytes, but {METADATA} places items up to byte {ends[n]}",
                file=name,
                key=keys.get(n),
                span=(size, ends[n]),
                hint="copy the checkpoint again, or use an older one",
            )
        report(problem)


def _first_keys(metadata: DcpMetadata, limits: Mapping[int, int]) -> dict[int, str]:
    """Number of a file → the first tensor, else object, of which an item in it ends behind a byte.

    Args:
        limits: number of a file → that byte.
    """
    found: dict[int, str] = {}
    for tensor in metadata.tensors.values():
        for row in range(tensor.first, tensor.first + tensor.n_chunks):
            file = metadata.file_index[row]
            if file in limits and metadata.item_offset[row] + metadata.item_bytes[row] > limits[file]:
                found.setdefault(file, tensor.key)
    number = {name: n for n, name in enumerate(metadata.files)}
    for key, item in metadata.objects.items():
        file = number[item.file]
        if file in limits and item.offset + item.n_bytes > limits[file]:
            found.setdefault(file, key)
    return found


def catalog_of(
    metadata: DcpMetadata, *, format: str, without: Sequence[str] = (), store: ReadStore | None = None
) -> Catalog:
    """The catalog of checked metadata.

    Args:
        format: ``dcp`` or ``torch_dist``.
        without: keys of objects that the caller shows elsewhere.
        store: the checkpoint. Objects inside zstd frames, whose length is known only when they are inflated, are read
            at once; without a store they are refused.

    Raises:
        UnsupportedError, CorruptError, UnsafeError: such an object cannot be read.
    """
    tensors = {key: TensorMeta(key, tensor.dtype, tensor.shape) for key, tensor in metadata.tensors.items()}
    packed = {key: metadata.objects[key] for key in metadata.object_descriptors if key in metadata.objects}
    objects, inside = _inflated(metadata, {key: item for key, item in packed.items() if key not in without}, store)
    raw_of = {key: _raw_key(key, tensors) for key in metadata.objects if key not in without and key not in packed}
    object_of = {raw: key for key, raw in raw_of.items()}

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key in tensors:
            return _chunks(metadata, key)
        found = inside.get(key)
        if found is not None:
            return (whole_fragment(key, found),)
        return (whole_fragment(key, _stream(key, metadata.objects[object_of[key]])),)

    hidden = {raw: TensorMeta(raw, "uint8", (metadata.objects[key].n_bytes,)) for key, raw in raw_of.items()}
    hidden |= metas_of(inside)
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


def _inflated(
    metadata: DcpMetadata, packed: Mapping[str, DcpItem], store: ReadStore | None
) -> tuple[dict[str, StoredObject], dict[str, StoredArray]]:
    """The values of transformed objects, and the tensors inside them."""
    objects: dict[str, StoredObject] = {}
    inside: dict[str, StoredArray] = {}
    for key, item in packed.items():
        if store is None:
            raise UnsupportedError("the object is compressed, which this format does not know", file=item.file, key=key)
        value, arrays = inflated_object(store, item, metadata.object_descriptors[key], key=key)
        objects[key] = StoredObject(key, value=value)
        inside |= arrays
    return objects, inside


def _raw_key(key: str, tensors: Mapping[str, TensorMeta]) -> str:
    """Name of an object's stream, which no tensor has."""
    name = f"raw:{key}"
    while name in tensors:
        name = f"raw:{name}"
    return name


def _chunks(metadata: DcpMetadata, key: str) -> list[Fragment]:
    tensor = metadata.tensors[key]
    origin = (0,) * len(tensor.shape)
    made = []
    for row, (box, item) in enumerate(metadata.chunks(key), tensor.first):
        transforms = metadata.descriptors.get(row)
        if transforms:
            n_bytes = prod(box.shape) * itemsize(tensor.dtype)
            place = Extent(item.file, item.offset, encoding=StreamItem(transforms, item.n_bytes, n_bytes))
        elif metadata.raw_files and metadata.file_index[row] in metadata.raw_files:
            place = Extent(item.file, item.offset)
        else:
            place = Extent(item.file, item.offset, item_bytes=item.n_bytes)
        array = StoredArray(array_name(key, box), tensor.dtype, box.shape, place)
        made.append(Fragment(key, box, array, origin))
    return made


def _stream(raw: str, item: DcpItem) -> StoredArray:
    return StoredArray(raw, "uint8", (item.n_bytes,), Extent(item.file, item.offset))


def _skeleton(metadata: DcpMetadata, objects: Mapping[str, StoredObject]) -> object:
    """The nesting that planner_data tells, or None where there is none."""
    if metadata.planner_data is None:
        return None
    keys = [key for key in metadata.planner_data if key in metadata.tensors or key in objects]
    keys += [key for key in (*metadata.tensors, *objects) if key not in metadata.planner_data]
    leaves: dict[Path, object] = {}
    for key in keys:
        path = metadata.planner_data.get(key, (key,))
        place: Path = tuple(ListIndex(part) if isinstance(part, int) else part for part in path)
        if place in leaves or not place:
            raise CorruptError(f"planner_data gives the path {path} to two entries", file=METADATA, key=key)
        leaves[place] = ObjectLeaf(key) if key in objects else TensorLeaf(key)
    return nest_leaves(leaves)


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """The images of a plain DCP directory: ``__<n>_0.distcp`` …, ``meta.pt`` if there was one, then ``.metadata``.

    Args:
        target: every array becomes a chunk, every object an item. The paths of its skeleton become ``planner_data``, so
            that ``dcp_to_torch_save`` rebuilds the nesting; without one every key is its own path. Honoured:
            ``WriteOptions.max_file_bytes``, see ``core.formats.dcp.items.lay_out_items``.

    Raises:
        UnsupportedError: the arrays are no chunks of their tensors.
    """
    target, meta = parted(target)
    objects = [replace(item, value=loadable(item.value, key=item.key)) for item in target.objects.values()]
    layout = lay_out_items(target, objects, max_file_bytes=target.write.max_file_bytes)
    beside = () if meta is None else (meta,)
    return (*layout.files, *beside, metadata_image(target, layout, planner_data=paths_of(target)))


def paths_of(catalog: AnyCatalog) -> dict[str, tuple[str | int, ...]]:
    """Key → path, for every tensor and object; a key that is not its path, dot-joined, stands at the root."""
    paths: dict[str, tuple[str | int, ...]] = {}
    if catalog.skeleton is not None:
        for entry in entries(catalog.skeleton):
            path = tuple(int(part) if isinstance(part, ListIndex) else text_of(part) for part in entry.path)
            if ".".join(map(str, path)) == entry.key and (entry.key in catalog.tensors or entry.key in catalog.objects):
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
    """The image of ``.metadata``.

    Args:
        target: what is written.
        layout: where its items lie.
        planner_data: paths of the keys; None for Megatron.
        mcore_data: Megatron's facts about tensors; None to leave the attribute out.
    """
    attributes = {} if mcore_data is None else {"mcore_data": dict(mcore_data)}
    keys = (*target.tensors, *layout.objects) if planner_data is None else tuple(planner_data)
    data = write_metadata(_rows(target, layout, keys), planner_data=planner_data, attributes=attributes)
    return literal_file(METADATA, data, is_metadata=True)


def linked_metadata(catalog: Catalog) -> FileImage:
    """The image of ``.metadata`` for entries that stay where they are in the source's data files.

    Args:
        catalog: what ``catalog_of`` gives, with some entries left out or renamed; those of ``meta.pt`` do not count.

    Raises:
        UnsupportedError: an entry is no item of its own, so that ``.metadata`` cannot point at it.
    """
    beside = meta_keys(catalog)
    planner_data = {key: path for key, path in paths_of(catalog).items() if key not in beside}
    data = write_metadata((_linked_row(catalog, key) for key in planner_data), planner_data=planner_data)
    return literal_file(METADATA, data, is_metadata=True)


def _linked_row(catalog: Catalog, key: str) -> TensorRow | ObjectRow:
    def refused() -> UnsupportedError:
        return UnsupportedError(
            "its bytes are compressed or no item of their own, so new metadata cannot point at them",
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
        rows.append(ChunkRow(piece.box.offset, piece.box.shape, array.extent.file, array.extent.offset, item_bytes))
    return TensorRow(key, meta.dtype, meta.shape, rows)


def _rows(target: TargetCatalog, layout: ItemLayout, keys: Iterable[str]) -> Iterator[TensorRow | ObjectRow]:
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
