"""Megatron-core's distributed checkpoint, backend ``torch_dist``: DCP with its own conventions.

On disk::

    iter_0000010/
    ├── metadata.json      {"sharded_backend": "torch_dist", "sharded_backend_version": 1, …}
    ├── common.pt          common state (arguments, iteration …); not in dialect ``common_object``
    ├── .metadata          as in DCP, ``planner_data`` None
    └── __0_0.distcp …     as in DCP

Dialects (``TorchDistFacts.dialect``), as written by

* ``0.12``: megatron-core ≤ 0.15 (seen: 0.12.1). ``.metadata`` has ``mcore_data``; optimizer tensors
  of the format ``fully_sharded_model_space`` are stored *reformulated*: their true shape is in
  ``mcore_data[key]["nd_reformulated_orig_global_shape"]``, and the catalog shows them as they are
  stored;
* ``common_pt``: 0.16.1;
* ``common_object``: HEAD (0.20 dev). No common.pt: the item ``common_state/shard_0_1`` contains
  ``[common]``.

A ShardedObject is an object with the key ``<key>/shard_<offset>_<shape>`` and a list of one value.

``Catalog.common`` is the common state, inert, and its tensors are hidden ones; ``args`` and
``iteration`` come from it, in Megatron-Bridge's checkpoints the arguments from ``run_config.yaml``.
Facets: ``TorchDistFacts``, and ``DcpFacts`` as in ``dcp``.

Written: the dialect of ``TorchDistFacts.dialect``, else ``common_pt``. ``.metadata`` has
``all_local_plans`` (``core.formats.dcp.plans``) only if ``WriteOptions.recorded_ranks`` asks for
them: Megatron uses them only to skip planning in the first save after a load, and plans again if
they are missing.

verl stores model, optimizer and random states in separate directories, which are read as one
checkpoint (``core.formats.dcp.folders``).

Not supported: ``sharded_backend: zarr`` (another format), versions of the backend other than 1.

Source: megatron-core 0.12.1, 0.16.1 and Megatron-LM d98e8a64, pinned in tests/golden
(``mcore*_torch_dist``);
``megatron/core/dist_checkpointing/{core,serialization,strategies/torch,strategies/common}.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog
from core.engine.catalog.facets import TorchDistFacts
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import StoredArray
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnsupportedError,
)
from core.formats.dcp.folders import join_folders, list_torch_dist_folders
from core.formats.dcp.metadata import DcpMetadata
from core.formats.dcp.reading.data_files import METADATA, check_file_lengths
from core.formats.dcp.reading.stored_metadata import (
    list_accelerate_folders,
    list_data_files,
    metadata_of,
    read_metadata_in,
)
from core.formats.format import MEGATRON_FOLDERS, Format, imported_on_call
from core.formats.mcore.common_state import (
    COMMON_FILE,
    common_image,
    common_state,
    read_common_file,
    with_common_state,
)
from core.formats.mcore.metadata_json import (
    BACKEND_KEY,
    config_image,
    names_backend,
    read_metadata_json,
    read_version,
)
from core.formats.torch.tree import load_object
from core.megatron.extras.sharded_objects import COMMON_OBJECT, is_sharded_object
from core.pickle.fields import FieldReader
from core.pickle.inert import as_mapping
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.dcp.items import ItemLayout
    from core.formats.dcp.plans import PlanRow

DIALECTS = ("0.12", "common_pt", "common_object")
_BACKEND = "torch_dist"


def sniff(store: ReadStore) -> bool:
    """Return whether the directory is a Megatron checkpoint with DCP files, intact or not.

    One of these suffices; ``read`` refuses all but the first with an error that explains why:

    * a ``metadata.json`` that names this backend;
    * DCP files next to a ``metadata.json`` that is damaged or names another backend;
    * ``.metadata`` next to a ``common.pt``;
    * verl's directories (``core.formats.dcp.folders``).
    """
    from core.formats.dcp import format as dcp

    if store.entry is not None:
        return False
    if list_torch_dist_folders(store) and list_accelerate_folders(store):
        return True
    # A damaged metadata.json still shows that Megatron wrote the directory.
    try:
        has_backend = names_backend(store)
        if has_backend and read_metadata_json(store)[BACKEND_KEY] == _BACKEND:
            return True
    except CorruptError:
        has_backend = True
    return (has_backend and dcp.sniff(store)) or (
        store.exists(COMMON_FILE) and store.exists(METADATA)
    )


def read(store: ReadStore) -> Catalog:
    """Read the catalog of one iteration's directory.

    Raises:
        CorruptError: ``metadata.json``, ``.metadata`` or the common state is malformed.
        MissingShardError: one of these, or a file that they name, is missing.
        TruncatedError: a file is shorter than ``.metadata`` requires.
        UnsupportedError: the backend or its version is not supported, or items are stored in a way
            that is not supported.
        UnsafeError: a pickle is hostile, or a name leads outside the directory.
    """
    from core.formats.dcp.reading.catalog import build_catalog
    from core.formats.mcore.run_config import with_run_config

    folders = list_accelerate_folders(store)
    if folders:
        return _read_folders(store, folders)
    read_version(store, backend=_BACKEND)
    store.expect_headers(name for name in (METADATA, COMMON_FILE) if store.exists(name))
    metadata = metadata_of(store)
    common = _read_common(store, metadata)
    catalog = build_catalog(metadata, format="torch_dist", without=common.objects)
    catalog = with_common_state(catalog.with_hidden(common.arrays), common.value, file=store.label)
    catalog = with_run_config(catalog, store)
    return catalog.with_facet(TorchDistFacts(common.dialect, metadata.mcore_data))


@dataclass(frozen=True, slots=True)
class _Common:
    """The common state of a directory: its value and the tensors inside, and where it is stored.

    Args:
        objects: key of the object that stores it; () for a file.
    """

    value: object
    arrays: Mapping[str, StoredArray]
    dialect: str
    objects: tuple[str, ...] = ()


def _read_common(store: ReadStore, metadata: DcpMetadata, *, folder: str = "") -> _Common:
    """Read the common state: a file or, in the newest dialect, an object, which is no entry then.

    Raises:
        CorruptError: there are both, or it is malformed.
        MissingShardError: there is neither.
    """
    from core.formats.dcp.reading.catalog import build_catalog

    has_object = COMMON_OBJECT in metadata.objects
    if store.exists(folder + COMMON_FILE):
        value, arrays = read_common_file(store, folder + COMMON_FILE)
        if has_object:
            raise CorruptError(
                f"both {COMMON_FILE} and {COMMON_OBJECT} exist, but only one of them can be the "
                "common state",
                file=store.label,
            )
        return _Common(value, arrays, "common_pt" if metadata.mcore_data is None else "0.12")
    if has_object:
        value, arrays = _common_of_object(store, build_catalog(metadata, format="torch_dist"))
        return _Common(value, arrays, "common_object", (COMMON_OBJECT,))
    raise MissingShardError(
        f"both {folder}{COMMON_FILE} and the object {COMMON_OBJECT} are missing",
        file=store.label,
        hint="copy the checkpoint again, with all its files",
    )


def _read_folders(store: ReadStore, folders: Sequence[str]) -> Catalog:
    """Read verl's separate directories of model, optimizer and random states as one checkpoint.

    Raises:
        UnsupportedError: two directories contain an entry with the same name.
    """
    from core.formats.dcp.reading.catalog import build_catalog
    from core.formats.dcp.safetensors_items import with_raw_files
    from core.megatron.extras.common_state import CONTENT

    parts: list[tuple[str, DcpMetadata]] = []
    entries: dict[object, object] = {}
    arrays: dict[str, StoredArray] = {}
    dialects = []
    for folder in folders:
        read_version(store, backend=_BACKEND, folder=f"{folder}/")
        metadata = read_metadata_in(store, folder)
        common = _read_common(store, join_folders([(folder, metadata)], store), folder=f"{folder}/")
        for name, value in (as_mapping(common.value) or {}).items():
            if entries.setdefault(name, value) != value and name != CONTENT:
                raise UnsupportedError(
                    f"the common states of {folders[0]} and {folder} differ in {name!r:.80}",
                    file=store.label,
                    hint="pass one of these directories as the source",
                )
        arrays |= common.arrays
        dialects.append(common.dialect)
        kept = {key: item for key, item in metadata.objects.items() if key != COMMON_OBJECT}
        parts.append((folder, replace(metadata, objects=kept)))
    metadata = join_folders(parts, store)
    check_file_lengths(store, metadata)
    catalog = build_catalog(with_raw_files(store, metadata), format="torch_dist")
    catalog = with_common_state(catalog.with_hidden(arrays), entries, file=store.label)
    notes = [
        f"{', '.join(folders)} were read as one checkpoint (verl loads only separate directories)"
    ]
    if not folders[0].startswith("model/"):
        notes.append(
            "the checkpoint does not contain the weights; to read them, pass model/huggingface"
        )
    return catalog.with_facet(TorchDistFacts(dialects[0], metadata.mcore_data)).noted(notes)


def salvage(store: ReadStore, report: Report) -> Catalog:
    """Read the intact parts of the catalog, and the common state if it is readable.

    Args:
        store: the checkpoint.
        report: receives the problems; that of the common state has the rule ``dcp.common``.

    Raises:
        MissingShardError: ``.metadata`` is missing.
        CorruptError, UnsupportedError, UnsafeError: nothing of ``.metadata`` can be read.
    """
    from core.formats.dcp import format as dcp
    from core.formats.mcore.run_config import with_run_config

    catalog = replace(dcp.salvage(store, report), format="torch_dist")
    common: dict[object, object] = {}
    try:
        for folder in list_torch_dist_folders(store) or ("",):
            file = f"{folder}/{COMMON_FILE}".lstrip("/")
            if store.exists(file):
                value, arrays = read_common_file(store, file)
            elif COMMON_OBJECT in catalog.objects:
                value, arrays = _common_of_object(store, catalog)
            else:
                continue
            common |= as_mapping(value) or {}
            catalog = catalog.with_hidden(arrays)
        if not common:
            return catalog
        return with_run_config(with_common_state(catalog, common, file=store.label), store)
    except CheckpointingException as err:
        report(err.breaking("dcp.common"))
        return catalog


def _common_of_object(
    store: ReadStore, catalog: Catalog
) -> tuple[object, Mapping[str, StoredArray]]:
    """Read the common state, and the tensors inside it, from the object that stores it.

    Raises:
        CorruptError, UnsafeError: the object cannot be read, or is not a list of one value.
    """
    raw_key = catalog.objects[COMMON_OBJECT].raw_key
    assert raw_key is not None
    stream = catalog.fragments(raw_key)[0].array
    assert stream is not None
    value, arrays = load_object(store, stream, key=COMMON_OBJECT)
    items = FieldReader(key=COMMON_OBJECT).read_list(
        value, "the common state", n=1, expected="a list with one element"
    )
    return items[0], arrays


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """Lay out one iteration's directory: data files, metadata.json, common.pt, ``.metadata``.

    Args:
        target: every array becomes a chunk. An object with the key of a ShardedObject becomes an
            item; all others go into the common state, nested as in the skeleton. Also used:
            ``common``, ``TorchDistFacts``, and of ``WriteOptions`` ``max_file_bytes`` and
            ``separation_hint`` (``separate_prefix`` of ``lay_out_items``), ``files_per_rank`` and
            ``recorded_ranks``.

    Returns:
        The layouts of the files, ``.metadata`` last.

    Raises:
        UnsupportedError: the arrays are not chunks of their tensors, the dialect is unknown, or an
            object for the common state has not been loaded.
    """
    from core.formats.dcp.items import lay_out_items
    from core.formats.dcp.metadata_image import metadata_image

    facts = target.facet(TorchDistFacts) or TorchDistFacts()
    dialect = facts.dialect or "common_pt"
    if dialect not in DIALECTS:
        raise UnsupportedError(
            f"unknown dialect {dialect!r}", hint=f"use one of {', '.join(DIALECTS)}"
        )
    # The common state is a file or, in the newest dialect, an object.
    common = common_state(target)
    objects = [item for item in target.objects.values() if is_sharded_object(item.key)]
    common_files = []
    if dialect == "common_object":
        objects.append(StoredObject(COMMON_OBJECT, value=[common]))
    else:
        common_files.append(common_image(target, common))
    layout = lay_out_items(
        target,
        objects,
        max_file_bytes=target.write.max_file_bytes,
        separate_prefix=target.write.separation_hint,
        files_per_number=target.write.files_per_rank,
    )
    # 0.12 always has mcore_data, newer dialects only if a written tensor has such facts.
    mcore_data = {
        key: fact for key, fact in (facts.mcore_data or {}).items() if key in target.tensors
    }
    has_mcore_data = dialect == "0.12" or any(mcore_data.values())
    return (
        *layout.files,
        config_image(backend=_BACKEND, has_common_file=bool(common_files)),
        *common_files,
        metadata_image(
            target,
            layout,
            planner_data=None,
            mcore_data=mcore_data if has_mcore_data else None,
            plans=_plans_of_ranks(target, layout) if target.write.recorded_ranks else None,
        ),
    )


def _plans_of_ranks(target: TargetCatalog, layout: ItemLayout) -> list[list[PlanRow]]:
    """Return the entries that each rank writes: those of its files."""
    from core.formats.dcp.plans import PlanRow, TensorData

    plans: list[list[PlanRow]] = [[] for _ in range(target.write.recorded_ranks)]
    for key, items in layout.chunks.items():
        tensor = target.tensors[key]
        for item in items:
            assert item.box is not None, "the items of tensors have boxes"
            data = TensorData(tensor.dtype, tensor.shape, item.box.offset, item.box.shape)
            plans[item.coords[0][1]].append(PlanRow(key, data))
    for key, item in layout.objects.items():
        plans[item.coords[0][1]].append(PlanRow(key))
    return plans


def _own_folders(store: ReadStore) -> Sequence[str]:
    """Return the subdirectories that belong to the checkpoint; none if ``.metadata`` exists."""
    # Without it another backend may have written the checkpoint, with a directory per tensor.
    if list_accelerate_folders(store):
        return [folder.partition("/")[0] for folder in list_accelerate_folders(store)]
    return () if store.exists(METADATA) else store.folders()


FORMAT = Format(
    name="torch_dist",
    title="Megatron distributed checkpoint (torch_dist)",
    sniff=sniff,
    read=read,
    lay_out=lay_out,
    load_call=imported_on_call("load_calls", "dcp_load"),
    side_folders=MEGATRON_FOLDERS,
    partition="as_stored",
    salvage=salvage,
    has_common_state=True,
    megatron_name="torch_dist",
    reading_once=imported_on_call("dcp.metadata", "read_once"),
    splits_files=True,
    own_folders=_own_folders,
    list_indexed=list_data_files,
)
