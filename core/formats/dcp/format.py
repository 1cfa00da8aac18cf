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

DCP itself stores neither iteration nor arguments. Training systems save them as entries, either as
a small object or as a tensor of one element; the known names are in ``_ITERATIONS``.

Source: torchtitan (``train_state.step``), Megatron-LM ``training/checkpointing.py`` (``iteration``,
``args``), and PyTorch's DCP recipe with an ``AppState``, whose entries are under ``app``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.dtypes import dtype_of
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.facets import FsdpDtensorFacts
from core.errors import CheckpointingException, MissingShardError, Report
from core.formats.dcp.folders import dcp_folders
from core.formats.dcp.lightning_meta import split_meta, with_meta
from core.formats.dcp.reading.data_files import METADATA
from core.formats.dcp.reading.stored_metadata import (
    has_item_files,
    list_accelerate_folders,
    list_data_files,
    metadata_of,
    salvaged,
)
from core.formats.format import MEGATRON_FOLDERS, Format, imported_on_call
from core.formats.torch.tree import load_object
from core.pickle.inert import attributes

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.engine.catalog.file_image import FileImage
    from core.files.store import ReadStore


def sniff(store: ReadStore) -> bool:
    """Return whether the directory is a DCP checkpoint, including unfinished and split ones.

    Unfinished saves have data files but no ``.metadata``; ``read`` refuses them with an error that
    explains it. Split ones are accelerate's separate directories.
    """
    if store.entry is not None:
        return False
    return store.exists(METADATA) or has_item_files(store) or bool(dcp_folders(store))


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
    from core.formats.dcp.reading.catalog import build_catalog, with_parts

    metadata = metadata_of(store)
    # With Megatron's metadata.json, the directory would have been recognized as torch_dist.
    if any("/shard_" in key for key in metadata.objects):
        from core.megatron.extras.sharded_objects import COMMON_OBJECT

        if COMMON_OBJECT in metadata.objects:
            from core.formats.mcore.metadata_json import CONFIG

            raise MissingShardError(
                f"the directory contains Megatron's {COMMON_OBJECT}, but {CONFIG} is missing; "
                "Megatron writes it last, so the save did not finish",
                file=CONFIG,
                hint="use an older checkpoint",
            )
    catalog = build_catalog(metadata, format="dcp", store=store)
    catalog = with_meta(with_parts(catalog, metadata, store), store)
    catalog = with_run_facts(catalog, store)
    folders = list_accelerate_folders(store)
    if not folders:
        return catalog
    from core.formats.trainer.state import with_training_state

    catalog = with_training_state(catalog, store, is_ordered=False)
    return catalog.noted([_JOINED.format(", ".join(folders))])


_JOINED = "{} were read as one checkpoint (Accelerator.load_state loads only separate directories)"


def salvage(store: ReadStore, report: Report) -> Catalog:
    """Read the intact parts of the catalog; data files may be missing.

    Args:
        store: the checkpoint.
        report: receives the problems, see ``salvaged_metadata``.

    Raises:
        MissingShardError: ``.metadata`` is missing.
        CorruptError, UnsupportedError, UnsafeError: nothing of it can be read.
    """
    from core.formats.dcp.reading.catalog import build_catalog

    metadata = salvaged(store, report)
    # Compressed objects would have to be inflated now, which may fail.
    return build_catalog(metadata, format="dcp", without=tuple(metadata.object_descriptors))


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
    from core.formats.dcp.items import lay_out_items
    from core.formats.dcp.metadata_image import metadata_image, paths_of
    from core.formats.torch.weights_only import loadable

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
    from core.formats.torch.weights_only import aside_notes

    return aside_notes(target, packages=_packages_of(target))


_ITERATIONS = ("iteration", "train_state.step", "train_state.iteration", "step", "global_step")
_PREFIXES = ("", "app.")
_ARGUMENTS = "args"
_MAX_ITERATION = 1 << 48


def with_run_facts(catalog: Catalog, store: ReadStore) -> Catalog:
    """Set ``iteration`` and ``args`` of a catalog from its entries.

    Entries that cannot be read get a note instead.
    """
    iteration: int | None = None
    args: object = None
    notes: list[str] = []

    # The first plausible number is the iteration; other programs may use these names differently.
    for key in (prefix + name for prefix in _PREFIXES for name in _ITERATIONS):
        try:
            number = _value_of(catalog, store, key)
        except CheckpointingException as err:
            notes.append(f"{key} could not be read: {err.sentence}")
            continue
        if type(number) is int and 0 <= number < _MAX_ITERATION:
            iteration = number
            break

    # Megatron's arguments are a Namespace; an entry "args" without attributes is something else.
    try:
        value = _value_of(catalog, store, _ARGUMENTS) if _ARGUMENTS in catalog.objects else None
    except CheckpointingException as err:
        notes.append(f"{_ARGUMENTS} could not be read: {err.sentence}")
    else:
        args = value if attributes(value) is not None else None
    return replace(catalog, iteration=iteration, args=args).noted(notes)


def _value_of(catalog: Catalog, store: ReadStore, key: str) -> object:
    """Return the value of an object or of an integer tensor with one element.

    Returns:
        None if the entry does not exist or is another kind of tensor.

    Raises:
        CheckpointingException: the entry cannot be read.
    """
    if key in catalog.tensors:
        # The element of a one-element integer tensor; None for other tensors.
        tensor = catalog.tensors[key]
        fragments = catalog.fragments(key)
        dtype = dtype_of(tensor.dtype)
        if tensor.n_elements != 1 or dtype.kind not in ("int", "uint") or len(fragments) < 1:
            return None
        array = fragments[0].array
        assert array is not None
        extent = array.locate(store).extent
        if extent.encoding is not None:
            data = bytes(extent.encoding.decode(store, array, 0))
        else:
            data = store.read(extent.file, extent.offset, dtype.itemsize)
        return int.from_bytes(data, "little", signed=dtype.kind == "int")
    item = catalog.objects.get(key)
    if item is None or item.raw_key is None:
        return None if item is None else item.value
    stream = catalog.fragments(item.raw_key)[0].array
    assert stream is not None
    return load_object(store, stream, key=key)[0]


FORMAT = Format(
    name="dcp",
    title="PyTorch Distributed Checkpoint",
    sniff=sniff,
    read=read,
    lay_out=lay_out,
    load_call=imported_on_call("load_calls", "dcp_load"),
    has_text_keys=True,
    side_folders=MEGATRON_FOLDERS,
    aliases=("torch_dcp", "fsdp_dtensor"),
    partition="as_stored",
    salvage=salvage,
    splits_files=True,
    has_live_objects=True,
    megatron_name="fsdp_dtensor",  # of Megatron's own kinds of DCP, only this one is written
    reading_once=imported_on_call("dcp.metadata", "read_once"),
    notes_of=_aside_notes,
    own_folders=list_accelerate_folders,
    list_indexed=list_data_files,
)
