"""PyTorch Distributed Checkpoint (DCP), as ``torch.distributed.checkpoint.save`` writes it.

On disk::

    step-10/
    ├── .metadata          one pickle: names, shapes, chunks, and the position of every item
    ├── __0_0.distcp       items: complete torch zips, back to back (``core.formats.dcp.items``)
    └── __1_0.distcp …     one or more files per writer

Variants that are also read:

* items inside zstd frames (``core.formats.dcp.zstd_streams``);
* files that store their chunks as safetensors (``core.formats.dcp.safetensors_items``);
* one metadata file per rank, ``__0.metadata`` … (``core.formats.dcp.rank_metadata``);
* accelerate's separate directories for model and optimizer (``core.formats.dcp.folders``);
* Lightning's ``meta.pt`` next to the DCP files (``core.formats.dcp.lightning_meta``);
* items with tensors of torchao's classes, as their parts (``core.formats.torch.joined_parts``).

Versions: everything with this file layout (torch 2.1 to 2.13); older ones lack some attributes of
    ``.metadata``.

A catalog's extents are late-bound: the start of the data inside an item and its strides are known
only after reading the item. A tensor that was saved transposed or channels-last keeps its strides
there; ``.metadata`` does not record them. Objects are not read with the metadata: each is a hidden
stream ``raw:<key>``.

Written objects: torch imports the classes that a pickle names. An object that names Megatron's
classes, as the training arguments do, could not be loaded without Megatron, and
``dcp_to_torch_save`` would fail on it. Such an object is stored as plain containers
(``core.formats.torch.weights_only``) and restored when it is read here. What Megatron itself loads
(``FsdpDtensorFacts``) keeps its classes.

Several training systems save such directories, each with its own names:

* FSDP2 with an ``AppState``: ``app.model.<fqn>``, ``app.optim.state.<fqn>.exp_avg``,
  ``app.optim.param_groups.…``;
* torchtitan: bare ``<fqn>``, ``optimizer.state.<fqn>.exp_avg``, ``train_state.step``, in
  ``checkpoint/step-10``;
* Megatron's ``torch_dcp`` and ``fsdp_dtensor``: ``model.module.…``, ``optimizer.state.…``,
  ``args``, ``iteration``.

``Catalog.iteration`` and ``args`` are set from the entries of these systems. Facets: ``DcpFacts``,
and ``TorchDistFacts`` where Megatron added its ``mcore_data``.

Not supported, refused by name: stream transforms other than zstd, Hugging Face storage.

Source: torch 2.13 ``torch/distributed/checkpoint/{filesystem,metadata,default_planner}.py``;
checkpoints written by it, pinned in tests/golden (``torch_dcp``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from math import prod
from operator import add
from posixpath import join
from typing import TYPE_CHECKING

from core.arrays.dtypes import dtype_of, itemsize
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
from core.catalog.facets import DcpFacts, FsdpDtensorFacts, TorchDistFacts
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
from core.formats.dcp.columns import DcpTensor
from core.formats.dcp.facts import with_run_facts
from core.formats.dcp.folders import dcp_folders, joined
from core.formats.dcp.items import ItemLayout, lay_out_items
from core.formats.dcp.lightning_meta import meta_keys, split_meta, with_meta
from core.formats.dcp.metadata import DcpItem, DcpMetadata, read_metadata, salvaged_metadata
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.formats.dcp.plans import PlanRow
from core.formats.dcp.rank_metadata import RANK_METADATA, merge_rank_metadata, rank_files
from core.formats.dcp.safetensors_items import with_raw_files
from core.formats.dcp.zstd_streams import StreamItem, read_inflated_object
from core.formats.format import Format
from core.formats.mcore.metadata_json import CONFIG
from core.formats.mcore.objects import COMMON_OBJECT
from core.formats.torch.format import item_location
from core.formats.torch.joined_parts import JoinedParts, joined_parts
from core.formats.torch.refused import aside_notes, loadable
from core.formats.torch.tree import parse
from core.formats.trainer.state import with_training_state
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping
from core.pickle.key_text import text_of
from core.pickle.nesting import LeafEntry, ListIndex, Path, entries, map_leaves, nest_leaves

if TYPE_CHECKING:
    from core.catalog.file_image import FileImage
    from core.files.store import ReadStore

METADATA = ".metadata"


def sniff(store: ReadStore) -> bool:
    """Return whether the directory is a DCP checkpoint, including unfinished and split ones.

    Unfinished saves have data files but no ``.metadata``; ``read`` refuses them with an error that
    explains it. Split ones are accelerate's separate directories.
    """
    if store.entry is not None:
        return False
    return store.exists(METADATA) or _has_item_files(store) or bool(dcp_folders(store))


def _has_item_files(store: ReadStore) -> bool:
    """Return whether the directory has files of a DCP save other than ``.metadata``."""
    return any(
        name == METADATA + ".tmp" or RANK_METADATA.fullmatch(name) or name.endswith(".distcp")
        for name in store.files()
    )


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a plain DCP directory.

    Raises:
        MissingShardError: ``.metadata`` or a file that it lists is missing, or Megatron did not
            finish the save.
        TruncatedError: a file is shorter than ``.metadata`` requires.
        CorruptError: ``.metadata`` contradicts itself.
        UnsupportedError: items are stored in a way that is not supported.
        UnsafeError: ``.metadata`` is a hostile pickle, or names files outside the directory.
    """
    metadata = metadata_of(store)
    # With Megatron's metadata.json, the directory would have been recognized as torch_dist.
    if COMMON_OBJECT in metadata.objects:
        raise MissingShardError(
            f"the directory contains Megatron's {COMMON_OBJECT}, but {CONFIG} is missing; Megatron "
            "writes it last, so the save did not finish",
            file=CONFIG,
            hint="use an older checkpoint",
        )
    catalog = catalog_of(metadata, format="dcp", store=store)
    catalog = with_meta(_with_parts(catalog, metadata, store), store)
    catalog = with_run_facts(catalog, store)
    folders = _folders(store)
    if not folders:
        return catalog
    catalog = with_training_state(catalog, store, is_ordered=False)
    return catalog.noted([_JOINED.format(", ".join(folders))])


_JOINED = "{} are read as one checkpoint (Accelerator.load_state loads only separate directories)"


def salvage(store: ReadStore, report: Report) -> Catalog:
    """Read the intact parts of the catalog; data files may be missing.

    Args:
        store: the checkpoint.
        report: receives the problems, see ``salvaged_metadata``.

    Raises:
        MissingShardError: ``.metadata`` is missing.
        CorruptError, UnsupportedError, UnsafeError: nothing of it can be read.
    """
    metadata = salvaged(store, report)
    # Compressed objects would have to be inflated now, which may fail.
    return catalog_of(metadata, format="dcp", without=tuple(metadata.object_descriptors))


def salvaged(store: ReadStore, report: Report) -> DcpMetadata:
    """Read the metadata without its damaged entries; data files may be missing.

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
    """Return the names of a checkpoint's ``.metadata`` files; accelerate writes several."""
    return [f"{folder}/{METADATA}" for folder in _folders(store)] or [METADATA]


def _folders(store: ReadStore) -> tuple[str, ...]:
    """Return accelerate's directories; () if the directory itself is a DCP checkpoint."""
    return () if store.exists(METADATA) or _has_item_files(store) else dcp_folders(store)


def metadata_of(store: ReadStore) -> DcpMetadata:
    """Read ``.metadata``, or merge the ranks' metadata, and check that the data files are complete.

    Raises the errors of ``read``.
    """
    metadata = stated_metadata(store)
    check_files(store, metadata)
    return with_raw_files(store, metadata)


def stated_metadata(store: ReadStore) -> DcpMetadata:
    """Read the metadata without checking the data files; raises the errors of ``read``."""
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
    """Read one metadata file, which must exist."""
    if not store.exists(name):
        raise _unwritten(name, file=name)
    return read_metadata(store.read(name, 0, store.size(name)), label=name)


def _unwritten(name: str, *, file: str) -> MissingShardError:
    """Build the error for a missing ``.metadata``."""
    return MissingShardError(
        f"{name} is missing; torch writes it last, so the save did not finish",
        file=file,
        hint="use an older checkpoint",
    )


def check_files(store: ReadStore, metadata: DcpMetadata, *, report: Report = raising) -> None:
    """Check that every file that the metadata lists exists and is long enough.

    Args:
        store: the checkpoint.
        metadata: its metadata.
        report: receives an error for each file that is missing or too short.

    Raises:
        MissingShardError, TruncatedError: a file is missing or too short (default ``report``).
    """
    # Each file must reach to the end of its last item.
    ends = [0] * len(metadata.files)
    for file, end in _item_ends(metadata):
        ends[file] = max(ends[file], end)

    sizes = _sizes_of(store, metadata.files)
    short_files = {
        file: size for file, size in enumerate(sizes) if size is None or size < ends[file]
    }
    if not short_files:
        return

    # Report each of them with an entry that is lost with it.
    lost_keys = _first_lost_keys(metadata, {file: size or 0 for file, size in short_files.items()})
    for file, size in short_files.items():
        if size is None:
            error: CheckpointingException = MissingShardError(
                f"a file listed in {METADATA} is missing",
                hint="copy the checkpoint again, with all its files",
            )
        else:
            error = TruncatedError(
                f"the file has {size} bytes, but {METADATA} places items up to byte {ends[file]}",
                span=(size, ends[file]),
                hint="copy the checkpoint again, or use an older one",
            )
        error.file, error.key = metadata.files[file], lost_keys.get(file)
        report(error)


def _sizes_of(store: ReadStore, names: Sequence[str]) -> list[int | None]:
    """Return the sizes of files in bytes, None for missing ones."""
    # Listing directories is faster than a look-up per file: 10⁵ of them may be missing.
    folders = {name.rpartition("/")[0] for name in names}
    existing = {join(folder, name) for folder in folders for name in store.files(folder)}
    # A web server lists nothing, and is asked for each file.
    return [store.size(name) if name in existing or store.exists(name) else None for name in names]


def _first_lost_keys(metadata: DcpMetadata, sizes: Mapping[int, int]) -> dict[int, str]:
    """Return the first entry, tensors before objects, that is lost with each truncated file.

    Args:
        sizes: number of a truncated file → its size in bytes, 0 if it is missing.

    Returns:
        File number → key.
    """
    chunk_keys = (repeat(tensor.key, tensor.n_chunks) for tensor in metadata.tensors.values())
    keys = chain(chain.from_iterable(chunk_keys), metadata.objects)
    lost_keys: dict[int, str] = {}
    for key, (file, end) in zip(keys, _item_ends(metadata), strict=True):
        if file in sizes and end > sizes[file]:
            lost_keys.setdefault(file, key)
    return lost_keys


def _item_ends(metadata: DcpMetadata) -> Iterator[tuple[int, int]]:
    """Yield file number and end, in bytes, of the items of all chunks and then of all objects."""
    yield from zip(
        metadata.file_index,
        map(add, metadata.item_offset, metadata.item_bytes),
        strict=True,
    )
    numbers = {name: file for file, name in enumerate(metadata.files)}
    for item in metadata.objects.values():
        yield numbers[item.file], item.offset + item.n_bytes


def catalog_of(
    metadata: DcpMetadata,
    *,
    format: str,
    without: Sequence[str] = (),
    store: ReadStore | None = None,
) -> Catalog:
    """Build the catalog of checked metadata.

    Args:
        metadata: metadata with tensors and objects.
        format: ``dcp`` or ``torch_dist``.
        without: keys of objects to skip.
        store: the checkpoint. Objects inside zstd frames are read at once, as their length is only
            known after inflating; without a store they are refused.

    Raises:
        UnsupportedError, CorruptError, UnsafeError: such an object cannot be read.
    """
    tensors = {
        key: TensorMeta(key, tensor.dtype, tensor.shape) for key, tensor in metadata.tensors.items()
    }
    # Read the objects inside zstd frames. The tensors inside them are hidden.
    objects, packed_arrays = _read_packed_objects(metadata, without, store)
    hidden: dict[str, TensorMeta] = {}

    # All other objects become hidden streams, to be read when they are needed.
    stream_items: dict[str, DcpItem] = {}
    for key, item in metadata.objects.items():
        if key in without or key in objects:
            continue
        raw_key = f"raw:{key}"
        while raw_key in tensors:
            raw_key = f"raw:{raw_key}"
        stream_items[raw_key] = item
        hidden[raw_key] = TensorMeta(raw_key, "uint8", (item.n_bytes,))
        objects[key] = StoredObject(key, raw_key=raw_key)
    hidden |= metas_of(packed_arrays)

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key in tensors:
            return _chunks(metadata, key)
        array = packed_arrays.get(key)
        if array is None:
            item = stream_items[key]
            array = StoredArray(key, "uint8", (item.n_bytes,), Extent(item.file, item.offset))
        return (whole_fragment(key, array),)

    # Entries keep the order of the file.
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
    metadata: DcpMetadata, without: Sequence[str], store: ReadStore | None
) -> tuple[dict[str, StoredObject], dict[str, StoredArray]]:
    """Read the values of compressed objects, and the tensors inside them.

    Args:
        without, store: the arguments of ``catalog_of``.
    """
    objects: dict[str, StoredObject] = {}
    arrays_inside: dict[str, StoredArray] = {}
    for key, transforms in metadata.object_descriptors.items():
        item = metadata.objects.get(key)
        if item is None or key in without:
            continue
        if store is None:
            raise UnsupportedError(
                "compressed objects are not supported in this format",
                file=item.file,
                key=key,
            )
        value, arrays = read_inflated_object(store, item, transforms, key=key)
        objects[key] = StoredObject(key, value=value)
        arrays_inside |= arrays
    return objects, arrays_inside


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
            # Elements in a safetensors file: their position is final.
            extent = Extent(item.file, item.offset)
        else:
            # A torch zip: `item_location` finds the elements in it later.
            extent = Extent(item.file, item.offset, item_bytes=item.n_bytes)
        array = StoredArray(array_name(key, box), tensor.dtype, box.shape, extent)
        fragments.append(Fragment(key, box, array, origin))
    return fragments


def _with_parts(catalog: Catalog, metadata: DcpMetadata, store: ReadStore) -> Catalog:
    """Replace tensors of torchao's classes by their parts.

    Raises:
        CorruptError, TruncatedError, UnsafeError: such an item is damaged or hostile.
    """
    parts_of: dict[str, JoinedParts] = {}
    unsupported: dict[str, str] = {}
    for key, tensor in _possible_wrappers(metadata).items():
        parts = _parts_of(metadata, key, tensor, store)
        if isinstance(parts, JoinedParts):
            parts_of[key] = parts
        elif parts is not None:
            unsupported[key] = parts
    if not parts_of and not unsupported:
        return catalog

    # The parts take the place of their tensors; a tensor that cannot be read is an object.
    fragments = {key: part for item in parts_of.values() for key, part in item.fragments.items()}
    tensors: dict[str, TensorMeta] = {}
    for key, meta in catalog.tensors.items():
        if key in parts_of:
            tensors |= parts_of[key].tensors
        elif key not in unsupported:
            tensors[key] = meta

    def fragments_of(key: str) -> Sequence[Fragment]:
        return fragments[key] if key in fragments else catalog.fragments(key)

    def leaf_of(entry: LeafEntry) -> object:
        if entry.key in parts_of and isinstance(entry.leaf, TensorLeaf):
            return parts_of[entry.key].skeleton
        return ObjectLeaf(entry.key) if entry.key in unsupported else entry.leaf

    objects = {key: StoredObject(key) for key in unsupported}
    objects |= {key: item for joined in parts_of.values() for key, item in joined.objects.items()}
    classes = Counter(str(item.objects[f"{key}.class"].value) for key, item in parts_of.items())
    listed = ", ".join(f"{n} × {name}" for name, n in classes.items())
    note = (
        f"tensors of torchao are taken apart ({listed}): numbers, scales and settings are entries"
    )
    result = replace(
        catalog,
        tensors=tensors,
        fragments_of=fragments_of,
        objects={**catalog.objects, **objects},
        unsupported={**catalog.unsupported, **unsupported},
        skeleton=None if catalog.skeleton is None else map_leaves(catalog.skeleton, leaf_of),
    )
    return result.noted([note]) if parts_of else result


def _possible_wrappers(metadata: DcpMetadata) -> dict[str, DcpTensor]:
    """Return the tensors that may be of torchao's classes; {} if none of the checkpoint is.

    ``.metadata`` does not tell the class of a tensor. If an item is smaller than the elements of
    its chunk, its tensor is no plain one; then any tensor of floats may be of these classes.
    """
    raw_files = metadata.raw_files or ()
    tensors = {
        key: tensor
        for key, tensor in metadata.tensors.items()
        if dtype_of(tensor.dtype).kind == "float"
        and tensor.shape
        # Items without a zip hold plain tensors only.
        and not any(
            row in metadata.descriptors or metadata.file_index[row] in raw_files
            for row in range(tensor.first, tensor.first + tensor.n_chunks)
        )
    }
    # By the columns, as there may be millions of chunks.
    has_wrappers = any(
        metadata.item_bytes[tensor.first + number] < prod(metadata.sizes[at : at + rank]) * width
        for tensor in tensors.values()
        for rank, width in ((len(tensor.shape), itemsize(tensor.dtype)),)
        for number, at in enumerate(
            range(tensor.start, tensor.start + tensor.n_chunks * rank, rank)
        )
    )
    return tensors if has_wrappers else {}


def _parts_of(
    metadata: DcpMetadata, key: str, tensor: DcpTensor, store: ReadStore
) -> JoinedParts | str | None:
    """Read the parts of a tensor of torchao's classes.

    Returns:
        The parts, the reason if they cannot be joined, or None for a plain tensor.
    """
    chunks = []
    for box, item in metadata.chunks(key):
        tree = parse(store, item.file, start=item.offset, n_bytes=item.n_bytes, prefix=f"{key}.")
        if as_mapping(tree.value) is None:
            return None
        chunks.append((box, tree))
    return joined_parts(key, tensor.shape, chunks) if chunks else None


def _skeleton(metadata: DcpMetadata, objects: Mapping[str, StoredObject]) -> object:
    """Build the nesting that planner_data describes; None without planner_data.

    Raises:
        CorruptError: two entries have the same path, or a path is empty.
    """
    if metadata.planner_data is None:
        return None
    # The order of planner_data is that of the state dict. Entries without a path are at the root.
    keys = {**metadata.tensors, **objects}.keys()
    ordered_keys = dict.fromkeys((*(key for key in metadata.planner_data if key in keys), *keys))
    leaves: dict[Path, object] = {}
    for key in ordered_keys:
        path = metadata.planner_data.get(key, (key,))
        full_path: Path = tuple(ListIndex(part) if isinstance(part, int) else part for part in path)
        if full_path in leaves or not full_path:
            raise CorruptError(
                f"planner_data has the path {path} for two entries", file=METADATA, key=key
            )
        leaves[full_path] = ObjectLeaf(key) if key in objects else TensorLeaf(key)
    return nest_leaves(leaves)


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """Lay out a plain DCP directory: ``__<n>_0.distcp`` …, ``meta.pt`` if needed, ``.metadata``.

    Args:
        target: every array becomes a chunk, every object an item. The paths of its skeleton become
            ``planner_data``, so that ``dcp_to_torch_save`` rebuilds the nesting; without a skeleton
            every key is its own path. Of the options, ``WriteOptions.max_file_bytes`` is used, see
            ``core.formats.dcp.items.lay_out_items``.

    Returns:
        The layouts of the files, ``.metadata`` last.

    Raises:
        UnsupportedError: the arrays are not chunks of their tensors.
    """
    target, meta_image = split_meta(target)
    # torch could not load classes of Megatron without Megatron, see the module's docstring.
    packages = _packages_of(target)
    objects = [
        replace(item, value=loadable(item.value, key=item.key, packages=packages))
        for item in target.objects.values()
    ]
    layout = lay_out_items(target, objects, max_file_bytes=target.write.max_file_bytes)
    meta_files = () if meta_image is None else (meta_image,)
    return (
        *layout.files,
        *meta_files,
        metadata_image(target, layout, planner_data=paths_of(target)),
    )


def _packages_of(target: TargetCatalog) -> frozenset[str]:
    """Return the packages that the loader of a checkpoint has in addition to torch and numpy."""
    return frozenset() if target.facet(FsdpDtensorFacts) is None else frozenset({"megatron"})


def _aside_notes(target: TargetCatalog) -> list[str]:
    """Return a note that names the objects that ``lay_out`` sets aside."""
    return aside_notes(target, packages=_packages_of(target))


def paths_of(catalog: AnyCatalog) -> dict[str, tuple[str | int, ...]]:
    """Return the path of every tensor and object in the nested state dict, by key.

    torch flattens a state dict by joining paths with dots. An entry whose key is not its joined
    path is placed at the root, under its key.
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
    plans: Sequence[Sequence[PlanRow]] | None = None,
) -> FileImage:
    """Write ``.metadata`` and return it as a file layout.

    Args:
        target: the catalog that is written.
        layout: the positions of its items.
        planner_data: paths of the keys; None for Megatron.
        mcore_data: Megatron's facts about tensors; None to omit the attribute.
        plans: the entries that each rank writes; None to omit the attribute.
    """
    names = [image.path for image in layout.files]

    def rows() -> Iterator[TensorRow | ObjectRow]:
        for key in (*target.tensors, *layout.objects) if planner_data is None else planner_data:
            meta = target.tensors.get(key)
            if meta is None:
                item = layout.objects[key]
                yield ObjectRow(key, names[item.file], item.offset, item.size)
                continue
            chunks = []
            for item in layout.chunks[key]:
                assert item.box is not None, "the items of tensors have boxes"
                chunks.append(
                    ChunkRow(
                        item.box.offset, item.box.shape, names[item.file], item.offset, item.size
                    )
                )
            yield TensorRow(key, meta.dtype, meta.shape, chunks)

    attributes = {} if mcore_data is None else {"mcore_data": dict(mcore_data)}
    data = write_metadata(rows(), planner_data=planner_data, attributes=attributes, plans=plans)
    return literal_file(METADATA, data, is_metadata=True)


def linked_metadata(catalog: Catalog) -> FileImage:
    """Write a ``.metadata`` whose entries stay in the source's data files.

    Args:
        catalog: a result of ``catalog_of``, with some entries dropped or renamed; entries of
            ``meta.pt`` are ignored.

    Raises:
        UnsupportedError: an entry is compressed or not an item of its own, so ``.metadata`` cannot
            refer to it.
    """
    in_meta = meta_keys(catalog)
    planner_data = {key: path for key, path in paths_of(catalog).items() if key not in in_meta}
    data = write_metadata(
        (_linked_row(catalog, key) for key in planner_data), planner_data=planner_data
    )
    return literal_file(METADATA, data, is_metadata=True)


def _linked_row(catalog: Catalog, key: str) -> TensorRow | ObjectRow:
    """Return the row of ``.metadata`` for an entry in the source's data files."""
    refusal = UnsupportedError(
        "the entry is compressed or not an item of its own, so new metadata cannot refer to it",
        key=key,
        hint="run without --metadata-only",
    )
    meta = catalog.tensors.get(key)
    if meta is None:
        raw_key = catalog.objects[key].raw_key
        array = None if raw_key is None else catalog.fragments(raw_key)[0].array
        if array is None or array.extent.encoding is not None:
            raise refusal
        return ObjectRow(key, array.extent.file, array.extent.offset, array.n_bytes)
    rows = []
    for chunk in catalog.fragments(key):
        array = chunk.array
        item_bytes = None if array is None else array.extent.item_bytes
        if array is None or item_bytes is None or array.shape != chunk.box.shape:
            raise refusal
        rows.append(
            ChunkRow(
                chunk.box.offset,
                chunk.box.shape,
                array.extent.file,
                array.extent.offset,
                item_bytes,
            )
        )
    return TensorRow(key, meta.dtype, meta.shape, rows)


FORMAT = Format(
    name="dcp",
    title="PyTorch Distributed Checkpoint",
    sniff=sniff,
    read=read,
    lay_out=lay_out,
    aliases=("torch_dcp", "fsdp_dtensor"),
    partition="as_stored",
    salvage=salvage,
    splits_files=True,
    has_live_objects=True,
    notes_of=_aside_notes,
    own_folders=_folders,
)
