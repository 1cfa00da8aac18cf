"""The common state of Megatron-core's distributed checkpoints: values that all ranks share.

On disk: ``common.pt``, a torch file with a dict of the training arguments, the iteration, the
optimizer's settings and so on; its tensors are hidden ones of the catalog. (At HEAD, torch_dist
stores the common state as one of the objects instead.)

The fields ``common`` (inert), ``args`` and ``iteration`` of a catalog come from the common state.

Source: megatron-core 0.12.1 and 0.16.1, pinned in tests/golden (``mcore*_torch_dist``,
``mcore0121_zarr``); ``megatron/core/dist_checkpointing/strategies/common.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import Extent, StoredArray
from core.errors import UNLIKE_ANY_WRITER, UnsupportedError, suggesting
from core.formats.torch.tree import load_object
from core.megatron.extras.sharded_objects import is_sharded_object
from core.pickle.fields import FieldReader, int_or_none
from core.pickle.inert import as_mapping
from core.pickle.nesting import REMOVED, LeafEntry, map_leaves

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog, TargetCatalog
    from core.files.store import ReadStore

COMMON_FILE = "common.pt"


def read_common_file(
    store: ReadStore, file: str = COMMON_FILE
) -> tuple[object, Mapping[str, StoredArray]]:
    """Read a ``common.pt``; return its inert content and the arrays of the tensors in it.

    Raises:
        MissingShardError: the file is missing.
        CorruptError, UnsupportedError, UnsafeError: as for
            ``core.formats.torch.format.load_object``.
    """
    stream = StoredArray(file, "uint8", (store.size(file),), Extent(file, 0))
    return load_object(store, stream, key=file)


@suggesting(UNLIKE_ANY_WRITER)
def with_common_state(catalog: Catalog, value: object, *, file: str) -> Catalog:
    """Set the fields of a catalog that come from its common state.

    These are ``common``, ``args`` and ``iteration``.

    Args:
        value: the common state, inert.
        file: the file with the common state, for the error.

    Raises:
        CorruptError: the common state is not a dict.
    """
    common = FieldReader(file).read_mapping(value, "the common state")
    return replace(
        catalog,
        common=common,
        args=common.get("args"),
        iteration=int_or_none(common.get("iteration")),
    )


def common_state(target: TargetCatalog) -> dict[object, object]:
    """Build the common state of a target: its ``common`` and objects, nested as in the skeleton.

    ShardedObjects do not belong to it. ``common`` takes precedence over objects.

    Raises:
        UnsupportedError: an object of the common state has not been loaded.
    """
    # In this format, an object that is not a ShardedObject has no other place.
    objects = {key: item for key, item in target.objects.items() if not is_sharded_object(key)}
    for key, item in objects.items():
        if item.raw_key is not None:
            raise UnsupportedError(
                "the object's value must be loaded before it can join the common state", key=key
            )

    # Keep the containers of the skeleton that lead to an object, without the tensors.
    placed: set[str] = set()

    def value_of(entry: LeafEntry) -> object:
        if entry.key not in objects:
            return REMOVED
        placed.add(entry.key)
        return objects[entry.key].value

    common: dict[object, object] = {}
    if objects and target.skeleton is not None:
        common |= as_mapping(map_leaves(target.skeleton, value_of)) or {}
    # Objects that the skeleton does not contain are stored flat, under their keys.
    common |= {key: item.value for key, item in objects.items() if key not in placed}
    return {**common, **(target.common or {})}


def common_image(target: TargetCatalog, common: Mapping[object, object]) -> FileImage:
    """Lay out ``common.pt``.

    Raises:
        UnsupportedError: a tensor in the common state is split into several arrays.
    """
    from core.formats.torch.zip.tree_layout import plan_tree

    plan = plan_tree(dict(common), array_of=target.whole_array, prefix="common")
    return plan.image(COMMON_FILE)
