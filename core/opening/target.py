"""Turn a global catalog into a target catalog, which lists the arrays of the destination.

The arrays of a target catalog have no file position yet: a format's ``lay_out`` places them.

Source of the partition names: ``core.formats.format.Format.partition``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from core.arrays.box import Box
from core.engine.catalog.catalog import AnyCatalog, Catalog, TargetCatalog, catalog_of_arrays
from core.engine.catalog.mapping_attributes import without_attributes
from core.engine.catalog.stored import Coords, PlannedArray, StoredArray, array_name
from core.engine.catalog.tensor import (
    AnyFragment,
    AnyTensor,
    Fragment,
    TargetFragment,
    TargetTensor,
    Tensor,
    bind_argument,
    without_ties,
)
from core.formats.format import Format
from core.opening.objects import (
    inlined,
    state_dict,
    with_common,
    with_common_as_objects,
    with_mapping_root,
)


def source_and_target(catalog: Catalog, format: Format) -> tuple[Catalog, TargetCatalog]:
    """Prepare a catalog for a format of global tensors.

    Args:
        catalog: global tensors; its objects have been loaded.
        format: a format without rank files.

    Returns:
        The source with the keys of the destination, and the target catalog to be laid out.

    Raises:
        CheckpointingException: the format cannot store the catalog (``Format.adapt``).
    """
    # Bring objects and containers into the form that the format stores.
    if not keeps_containers(catalog, format):
        catalog = without_attributes(catalog)
    if format.has_common_state:
        catalog = with_common(with_mapping_root(catalog))
    elif format.has_objects_beside:
        catalog = with_common_as_objects(catalog)
    else:
        catalog = state_dict(catalog, keeps_root=format.keeps_nesting)
    if format.keeps_nesting:
        catalog = inlined(catalog)
    # ``adapt`` gets the final form of the objects, and may change keys and files.
    if format.adapt is not None:
        catalog = format.adapt(catalog)
    if not format.carries_files:
        catalog = replace(catalog, files={})
    if not (format.keeps_nesting or format.records_ties):
        catalog = replace(catalog, tensors=without_ties(catalog.tensors))
    return catalog, partitioned(catalog, format=format.name, by=format.partition)


def keeps_containers(catalog: Catalog, format: Format) -> bool:
    """Return whether a format keeps, or records in its objects, the containers around tensors."""
    return format.keeps_nesting or (
        format.has_objects_beside and format.adapt is None and bool(catalog.objects)
    )


def tensors_only(target: TargetCatalog) -> TargetCatalog:
    """Return a target catalog without anything that is not a tensor, for one file of tensors."""
    return replace(target, objects={}, hidden={}, files={}, skeleton=None)


def dense_target(tensors: Mapping[str, AnyTensor]) -> TargetCatalog:
    """Return a target catalog with one dense array for each tensor, named by its key."""
    return catalog_of_arrays(
        format="memory",
        arrays={
            key: PlannedArray(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()
        },
    )


def retyped(catalog: Catalog, dtype_for: Callable[[str, Tensor], str]) -> Catalog:
    """Return a catalog whose tensors have the dtypes of ``dtype_for``.

    ``partitioned`` then gives the arrays of the target the same dtypes. Tied tensors that get
    different dtypes are no longer tied.
    """
    tensors: dict[str, Tensor] = {}
    changed: dict[tuple[int, str], Tensor] = {}
    for key, tensor in catalog.tensors.items():
        dtype = dtype_for(key, tensor)
        if dtype != tensor.dtype:
            tensor = changed.setdefault((id(tensor), dtype), replace(tensor, dtype=dtype))
        tensors[key] = tensor
    return replace(catalog, tensors=tensors)


def partitioned(catalog: AnyCatalog, *, format: str, by: str) -> TargetCatalog:
    """Return the target catalog for a format that stores global tensors.

    Hidden tensors and files always become one array each.

    Args:
        catalog: the catalog to be written; keys, shapes and dtypes are final.
        format: name of the target format.
        by: the partition. ``whole``: one array per tensor. ``as_stored``: one array per stored
            fragment, so that each is copied as one run; replicas are written once, and a tensor
            whose fragments overlap in part becomes one array. ``grid``: as ``as_stored`` where the
            fragments are equal boxes of a regular grid, else one array.
    """
    file_number = _file_numbers(catalog) if by == "as_stored" else {}

    @lru_cache(maxsize=64)
    def plan_fragments(key: str) -> Sequence[TargetFragment]:
        # Divide the tensor into the boxes of its stored fragments.
        tensor = catalog.tensors[key]
        origin = (0,) * len(tensor.shape)
        number_of = _stored_boxes(tensor, tensor.fragments(), file_number)
        if by == "grid" and not _is_grid(number_of):
            number_of = {}
        boxes = list(number_of) or [Box(origin, tensor.shape)]
        return tuple(
            Fragment(
                box,
                PlannedArray(
                    key if len(boxes) == 1 else array_name(key, box),
                    tensor.dtype,
                    box.shape,
                    coords=_file_coords(number_of.get(box)),
                ),
                origin,
            )
            for box in boxes
        )

    def place(key: str, tensor: AnyTensor) -> TargetTensor:
        array = tensor.tiling
        tiling: PlannedArray | Callable[[], Sequence[TargetFragment]]
        if by != "whole" and callable(array) and key in catalog.tensors:
            tiling = bind_argument(plan_fragments, key)
        else:
            file = array.extent.file if isinstance(array, StoredArray) else ""
            number = file_number.get(file) if key in catalog.tensors else None
            tiling = PlannedArray(key, tensor.dtype, tensor.shape, coords=_file_coords(number))
        return Tensor(
            tensor.dtype,
            tensor.shape,
            tiling,
            flexible=tensor.flexible,
            attributes=tensor.attributes,
        )

    return catalog.as_target(format, place)


def _file_coords(number: int | None) -> Coords:
    """Return the coordinate that makes a format keep the arrays of one source file in one file."""
    return () if number is None else (("file", number),)


def _is_grid(boxes: Collection[Box]) -> bool:
    """Return whether boxes that tile a tensor have one shape and begin at multiples of it."""
    shapes = {box.shape for box in boxes}
    return len(shapes) == 1 and all(
        n > 0 and offset % n == 0
        for box in boxes
        for offset, n in zip(box.offset, box.shape, strict=True)
    )


def _stored_boxes(
    tensor: AnyTensor, fragments: Iterable[AnyFragment], file_number: Mapping[str, int]
) -> dict[Box, int | None]:
    """Return the distinct boxes of a tensor's fragments, and the number of the file for each.

    Args:
        file_number: source file → number.

    Returns:
        Box → number, or None where the source file has none; {} if the boxes do not tile the
        tensor.
    """
    boxes: dict[Box, int | None] = {}
    for fragment in fragments:
        array = fragment.array
        if array is None:
            return {}
        # Replicas have the same box: the first one is kept.
        if not fragment.box.is_empty or tensor.n_elements == 0:
            number = file_number.get(array.extent.file) if isinstance(array, StoredArray) else None
            boxes.setdefault(fragment.box, number)
    # A catalog's fragments cover their tensor, so equal counts mean that no boxes overlap. Without
    # elements the counts say nothing: such a tensor needs exactly one box.
    tiles = sum(box.n_elements for box in boxes) == tensor.n_elements and (
        tensor.n_elements or len(boxes) == 1
    )
    return boxes if tiles else {}


def _file_numbers(catalog: AnyCatalog) -> dict[str, int]:
    """Return source file → number, in order of first use, or {} unless these are files of ranks.

    They are not if there is only one file, or if most fragments have a file of their own, as zarr's
    chunks do; the format then divides the tensors into files itself.
    """
    numbers: dict[str, int] = {}
    n_fragments = 0
    for key in catalog.tensors:
        for fragment in catalog.fragments(key):
            if isinstance(fragment.array, StoredArray):
                numbers.setdefault(fragment.array.extent.file, len(numbers))
                n_fragments += 1
    return numbers if 1 < len(numbers) <= n_fragments // 2 else {}
