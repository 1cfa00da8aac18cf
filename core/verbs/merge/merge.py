"""Merge the tensors of several checkpoints into the catalog of the first one; no data moves here.

The result is the first checkpoint's catalog, in which every float tensor is computed while it is
copied (``core.verbs.merge.combined`` and others define how). Everything else is the first one's:
integer and boolean tensors, objects, training arguments, configuration, tokenizer. Those of the
others must be equal, except for facts about the run that saved them (Megatron's arguments and
random states, configurations, files next to the weights).

Not supported, refused by name: quantized weights, complex and packed types, different keys or
shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod

from core.arrays.box import boxes_of_flat_range
from core.arrays.dtypes import dtype_of, itemsize
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.facets import MegatronModel, TrainingState
from core.engine.catalog.key_patterns import some_of
from core.engine.catalog.stored import Encoding, Extent, StoredArray, files_read
from core.engine.catalog.tensor import Fragment, Tensor, whole_fragment
from core.engine.quantize.schemes import quantized_weights
from core.engine.quantize.source import SourceTensor, source_of
from core.errors import UnsupportedError, list_some
from core.files.store import ReadStore
from core.pickle.equality import are_same
from core.pickle.inert import TensorLeaf, walk
from core.values import dataclass, n_text
from core.verbs.merge.combined import MOVING, SUM, Combined
from core.verbs.merge.request import ADD_DELTA, AVERAGE, DELTA, EMA, SLERP, WEIGHTS, Merge
from core.verbs.merge.slerp import Slerp

_CACHED = 64
_COMPARED_BYTES = 1 << 20
_KEEP_FIRST = "add --keep-first to keep the first checkpoint's version of these entries"


@dataclass(frozen=True, slots=True)
class MergeSource:
    """A checkpoint to merge.

    Args:
        label: its path, for people.
        catalog: its tensors, under the names of the first one, without optimizer states; the
            files have the names of the joined store.
    """

    label: str
    catalog: Catalog


@dataclass(frozen=True, slots=True)
class MergedCatalog:
    """The catalog of the result, and notes for the user."""

    catalog: Catalog
    notes: tuple[str, ...]


def merge_catalogs(
    request: Merge,
    sources: Sequence[MergeSource],
    store: ReadStore,
    *,
    config: Mapping[str, object] | None = None,
) -> MergedCatalog:
    """Return the first source's catalog with computed tensors.

    Args:
        request: what to compute.
        sources: all checkpoints, the first one included.
        store: the files of all of them; integer tensors and the tensors of objects are compared.
        config: the ``config.json`` of the first one, or None.

    Raises:
        UnsupportedError: keys, shapes, or integers or objects of two sources differ, or a tensor
            cannot be computed.
        CheckpointingException: a tensor is damaged or incomplete.
    """
    first, *others = sources
    for source in sources:
        refuse_quantized(source, config if source is first else None)
    for other in others:
        _check_same_tensors(first, other)
    decoded = DecodedStore(store)
    floats: dict[str, str] = {}
    different: list[str] = []
    for key, tensor in first.catalog.tensors.items():
        kinds = {source.label: source.catalog.tensors[key].dtype for source in sources}
        if any(dtype_of(dtype).kind in ("float", "complex") for dtype in kinds.values()):
            dtype = _check_floats(key, kinds)
            # A tensor without elements is in no file.
            if tensor.n_elements:
                floats[key] = dtype
            continue
        different += [
            f"{key} of {other.label}"
            for other in others
            if not hold_same_bytes(
                source_of(first.catalog, key), source_of(other.catalog, key), decoded
            )
        ]
    different += [
        f"{key} of {other.label}"
        for other in others
        for key in _different_objects(first.catalog, other.catalog, decoded)
    ]
    if different and not request.keeps_first:
        raise UnsupportedError(
            f"entries other than float tensors differ from those of {first.label}: "
            f"{list_some(different)}",
            hint=_KEEP_FIRST,
        )
    catalog = _with_computed(request, sources, floats)

    # Tell what comes from where.
    labels = [source.label for source in sources]
    notes = [request.describe(labels), origin_note(first)]
    dtypes = [
        key for key in floats if len({source.catalog.tensors[key].dtype for source in sources}) > 1
    ]
    if dtypes:
        notes.append(
            f"{some_of(dtypes)}: the dtypes differ; the result uses those of {first.label}"
        )
    if different:
        notes.append(f"taken from {first.label} although they differ: {list_some(different)}")
    return MergedCatalog(catalog, tuple(notes))


def origin_note(first: MergeSource) -> str:
    """Return the note that everything but the float tensors is the first source's."""
    return f"the configuration, arguments and all other entries come from {first.label}"


def _check_floats(key: str, dtypes: Mapping[str, str]) -> str:
    """Return the type to compute a tensor in.

    Args:
        key: the tensor.
        dtypes: dtype of the tensor by source.

    Raises:
        UnsupportedError: a dtype cannot be computed with.
    """
    for label, dtype in dtypes.items():
        if dtype_of(dtype).kind != "float" or dtype == "float8_e8m0fnu":
            raise UnsupportedError(
                f"{dtype} tensors cannot be merged",
                key=key,
                file=label,
                hint="first remove the tensor from every source: "
                "ckpt convert SRC DST --exclude KEY",
            )
    return "float64" if "float64" in dtypes.values() else "float32"


def refuse_quantized(source: MergeSource, config: Mapping[str, object] | None) -> None:
    """Raise if a weight is stored as numbers and scales, which cannot be averaged separately.

    Raises:
        UnsupportedError: a weight is quantized.
    """
    for weight in quantized_weights(source.catalog.tensors, config):
        raise UnsupportedError(
            f"quantized weights ({weight.scheme.name}) cannot be merged",
            key=weight.key,
            file=source.label,
            hint="apply the scales first: ckpt convert SRC DST --dequantize bf16",
        )


def _check_same_tensors(first: MergeSource, other: MergeSource) -> None:
    """Raise unless another source has the same tensors in the same shapes.

    Raises:
        UnsupportedError: a tensor is missing on one side, or has another shape.
    """
    first_tensors, other_tensors = first.catalog.tensors, other.catalog.tensors
    for has, lacks, keys in (
        (first.label, other.label, [key for key in first_tensors if key not in other_tensors]),
        (other.label, first.label, [key for key in other_tensors if key not in first_tensors]),
    ):
        if keys:
            n_common = len(first_tensors.keys() & other_tensors.keys())
            raise UnsupportedError(
                f"{has} has {n_text(len(keys), 'tensor')} that {lacks} lacks "
                f"({n_common:,} in both): {list_some(keys)}",
                file=lacks,
                hint="merge checkpoints of the same model, or first rename or exclude tensors "
                "with ckpt convert",
            )
    shapes = [
        f"{key} is {tensor.shape} and {other_tensors[key].shape}"
        for key, tensor in first_tensors.items()
        if tensor.shape != other_tensors[key].shape
    ]
    if shapes:
        raise UnsupportedError(
            f"shapes differ between {first.label} and {other.label}: {list_some(shapes)}",
            file=other.label,
            hint="merge checkpoints of the same model; if only the vocabulary padding differs, "
            "pass the number of rows without padding with --vocab-size",
        )


def hold_same_bytes(first: SourceTensor, second: SourceTensor, store: ReadStore) -> bool:
    """Return whether two tensors hold the same bytes, read part by part."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    at_once = max(1, _COMPARED_BYTES // max(1, itemsize(first.dtype)))
    n_elements = prod(first.shape)
    return all(
        first.read(store, box) == second.read(store, box)
        for start in range(0, n_elements, at_once)
        for box in boxes_of_flat_range(first.shape, start, min(start + at_once, n_elements))
    )


def _different_objects(first: Catalog, other: Catalog, store: ReadStore) -> list[str]:
    """List the objects of which two sources hold different values.

    Those of a Megatron checkpoint are states of the run: random states, and extra states, which
    depend on the implementation. So are those in files of their own beside the weights: schedulers,
    random states, whatever accelerate was told to save.
    """
    if first.facet(MegatronModel) is not None:
        return []
    states = (first.facet(TrainingState), other.facet(TrainingState))
    of_run = {entry for state in states if state is not None for entry in state.files}
    different = []
    for key in dict.fromkeys((*first.objects, *other.objects)):
        if key.partition(".")[0] in of_run:
            continue
        item, other_item = first.objects.get(key), other.objects.get(key)
        is_equal = (
            item is not None and other_item is not None and are_same(item.value, other_item.value)
        )
        # Tensors inside the value have equal keys now; compare their bytes.
        if item is not None and is_equal:
            inside = [leaf.key for leaf in walk(item.value) if isinstance(leaf, TensorLeaf)]
            is_equal = all(
                leaf in other.hidden
                and hold_same_bytes(source_of(first, leaf), source_of(other, leaf), store)
                for leaf in inside
                if leaf in first.hidden
            )
        if not is_equal:
            different.append(key)
    return different


def _with_computed(
    request: Merge, sources: Sequence[MergeSource], floats: Mapping[str, str]
) -> Catalog:
    """Return the first source's catalog, in which some tensors are computed from all sources.

    Args:
        request: what to compute.
        sources: all sources.
        floats: type to compute in by key of the tensors to compute.
    """
    first = sources[0].catalog

    # Check the fragments of all tensors now, so that no error comes in the middle of copying.
    for source in sources:
        for key in floats:
            source_of(source.catalog, key)

    @lru_cache(maxsize=_CACHED)
    def computed(key: str) -> Sequence[Fragment]:
        tensors = tuple(source_of(source.catalog, key) for source in sources)
        # The array has the type that is computed in; the tensor keeps its dtype, to which the copy
        # rounds once.
        encoding = encoding_of(request, tensors, floats[key])
        return computed_array(key, first.tensors[key], floats[key], encoding)

    # Tensors stay tied where all sources tie them.
    merged_of: dict[tuple[int, ...], Tensor] = {}
    tensors = {}
    for key, tensor in first.tensors.items():
        parts = tuple(id(source.catalog.tensors[key]) for source in sources)
        if parts not in merged_of:
            is_computed = key in floats
            merged_of[parts] = (
                replace(tensor, tiling=partial(computed, key)) if is_computed else tensor
            )
        tensors[key] = merged_of[parts]
    return replace(first, tensors=tensors)


def computed_array(key: str, tensor: Tensor, dtype: str, encoding: Encoding) -> Sequence[Fragment]:
    """Return the single fragment of a tensor that is computed.

    Args:
        key, tensor: the tensor.
        dtype: type of the computed numbers.
        encoding: computes them.
    """
    file = next(iter(files_read(encoding)), "")
    extent = Extent(file, 0, encoding=encoding)
    return (whole_fragment(StoredArray(key, dtype, tensor.shape, extent)),)


def encoding_of(request: Merge, tensors: tuple[SourceTensor, ...], dtype: str) -> Encoding:
    """Return the encoding that computes a tensor from those of all sources."""
    n = len(tensors)
    if request.method == SLERP:
        assert request.amount is not None
        return Slerp((tensors[0], tensors[1]), request.amount, dtype)
    if request.method == EMA:
        assert request.amount is not None
        return Combined(tensors, MOVING, (request.amount,), 1.0, dtype)
    factors = {
        AVERAGE: (1.0,) * n,
        WEIGHTS: request.weights,
        DELTA: (1.0, -1.0),
        ADD_DELTA: (1.0, *(request.amount or 0.0,) * (n - 1)),
    }[request.method]
    return Combined(tensors, SUM, factors, float(n) if request.method == AVERAGE else 1.0, dtype)
