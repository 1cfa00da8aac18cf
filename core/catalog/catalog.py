"""The catalog of a checkpoint: all metadata, no data.

::

    tensor (global, named by key)
      └── fragments: boxes that tile it ── at ──▶ stored array (a dense array that exists in a file)
                                                    └── extent: file, byte address, strides

Several fragments with the same box are replicas. A fragment and its array are aligned at their
*last* axis; where one has more axes than the other, the extra leading axes have extent 1. So a
layer of a stacked ``(L, rows, cols)`` array is a fragment of a ``(rows, cols)`` tensor with
``at == (layer, 0, 0)``, and vice versa.

Late-bound extents: a DCP item is a complete torch zip, which itself records where its data begin
and with which strides. ``Catalog.bind`` reads that at copy time, with one small read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from core.arrays.box import Box, Shape, full_box
from core.arrays.dtypes import itemsize
from core.arrays.fast_value import value
from core.catalog.facets import RankFacts, WriteOptions
from core.catalog.stored import AnyArray, ArrayT, ArrayT_co, Coords, PlannedArray, StoredArray
from core.errors import UnsupportedError

if TYPE_CHECKING:
    from core.catalog.optimizer_keys import Optimizer
    from core.files.store import ReadStore


FacetT = TypeVar("FacetT")


@value(frozen=True, slots=True)
class TensorMeta:
    """The metadata of a global tensor.

    Args:
        key: unique name.
        dtype: canonical dtype name (``core.arrays.dtypes``).
        shape: global shape, in elements.
        flexible: a reader may request another shape (the documented ``allow_shape_mismatch``).
        attributes: what the checkpoint says about the tensor besides (``core.catalog.attributes``);
            None if nothing. Tensors that differ only in it are equal.
    """

    key: str
    dtype: str
    shape: Shape
    flexible: bool = False
    attributes: Mapping[str, object] | None = field(default=None, compare=False)

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Size of the tensor as one dense array, in bytes."""
        return prod(self.shape) * itemsize(self.dtype)


def swapped(extents: tuple[int, ...]) -> tuple[int, ...]:
    """Swap the last two axes of a shape, an offset or strides."""
    return (*extents[:-2], extents[-1], extents[-2])


@value(frozen=True, slots=True)
class Fragment(Generic[ArrayT_co]):
    """A box of a global tensor and the array region that holds it.

    Args:
        key: key of the tensor.
        box: region of the tensor, in elements.
        array: the array that holds the region; None in a source if the region is zero by definition
            (vocabulary padding) and stored in no file.
        at: index of the region's first element in ``array``, one number per axis of the array.

    Raises:
        ValueError: ``at`` does not have one number per axis.
    """

    key: str
    box: Box
    array: ArrayT_co | None
    at: Shape

    def __post_init__(self) -> None:
        if self.array is not None and len(self.at) != len(self.array.shape):
            raise ValueError(
                f"fragment of {self.key}: at {self.at} does not fit array shape {self.array.shape}"
            )


TargetFragment: TypeAlias = Fragment[PlannedArray]
"""A fragment of a target catalog."""
AnyFragment: TypeAlias = Fragment[AnyArray]
"""A fragment of a source or of a target."""


def whole_fragment(key: str, array: ArrayT) -> Fragment[ArrayT]:
    """Build the fragment of a tensor that is exactly one array."""
    return Fragment(key, full_box(array.shape), array, (0,) * len(array.shape))


def clip_fragment(
    fragment: Fragment[ArrayT], key: str, *, start: int, extent: int, axis: int = 0, to: int = 0
) -> Fragment[ArrayT] | None:
    """Clip a fragment to a range of an axis, and move the range to another position.

    Args:
        fragment: a fragment of a tensor.
        key: key of the tensor that the range becomes a part of.
        start, extent: the range, in elements.
        axis: the axis of the tensor.
        to: where the range begins in the other tensor.

    Returns:
        The part of the fragment in the range; None if it has none of it.
    """
    box = fragment.box
    first = max(start, box.offset[axis])
    stop = min(start + extent, box.end[axis])
    if stop <= first:
        return None
    # An array may have more axes than its fragment, which are aligned at the last one: a matrix in
    # a stack has one less. If the array has fewer axes, it has no such axis to move along.
    at = fragment.at
    array_axis = axis + len(at) - box.rank
    if array_axis >= 0:
        n_skipped = first - box.offset[axis]
        at = (*at[:array_axis], at[array_axis] + n_skipped, *at[array_axis + 1 :])
    offset = (*box.offset[:axis], first - start + to, *box.offset[axis + 1 :])
    shape = (*box.shape[:axis], stop - first, *box.shape[axis + 1 :])
    return Fragment(key, Box(offset, shape), fragment.array, at)


def metas_of(arrays: Mapping[str, AnyArray]) -> dict[str, TensorMeta]:
    """Build the metadata of tensors that are one array each, by key."""
    return {key: TensorMeta(key, array.dtype, array.shape) for key, array in arrays.items()}


def held_boxes(
    shape: Shape, fragments: Iterable[Fragment[ArrayT]]
) -> Iterator[tuple[ArrayT, Box | None]]:
    """Yield every array of a tensor, with the box of the tensor that the array holds.

    The box is None for an array whose elements are not one box of the tensor. An array that two
    fragments place differently is yielded again, without a box.

    Args:
        shape: shape of the tensor, in elements.
        fragments: fragments of the tensor; an array may be in several of them.
    """
    box_of: dict[str, Box | None] = {}
    for fragment in fragments:
        array = fragment.array
        if array is None:
            continue
        box = (
            fragment.box if array.shape == fragment.box.shape else _held_box(shape, fragment, array)
        )
        if array.name not in box_of:
            box_of[array.name] = box
            yield array, box
        elif box_of[array.name] != box:
            yield array, None


def _held_box(shape: Shape, fragment: AnyFragment, array: AnyArray) -> Box | None:
    """Extend a fragment to its complete array, and return the box of the tensor that this is.

    Returns:
        None if the array reaches beyond the tensor.
    """
    # Bring the array to the axes of the tensor: add leading axes of extent 1, or drop some.
    extra = len(shape) - len(array.shape)
    extents = (1,) * extra + array.shape[max(-extra, 0) :]
    at = (0,) * extra + fragment.at[max(-extra, 0) :]
    offset = tuple(start - inside for start, inside in zip(fragment.box.offset, at, strict=True))
    fits = all(
        start >= 0 and start + n <= end
        for start, n, end in zip(offset, extents, shape, strict=True)
    )
    return Box(offset, extents) if fits else None


@value(frozen=True, slots=True)
class StoredObject:
    """An entry that is not a tensor: optimizer settings, random states, arguments, extra states.

    Its content is in either ``value`` or ``raw_key``. Tensors inside a value are represented by a
    ``TensorLeaf`` and listed in ``Catalog.hidden``.

    Args:
        key: unique name among the keys of objects and tensors.
        value: the inert value (``core.pickle.inert``), if it was read with the metadata.
        raw_key: the entry of ``Catalog.hidden`` (uint8, one axis) that holds the object's own torch
            stream, for objects that are not read with the metadata;
            ``core.formats.torch.format.load_object`` parses it.
        coords: rank coordinates, as in StoredArray.
    """

    key: str
    value: object = None
    raw_key: str | None = None
    coords: Coords = ()


def bind_nothing(store: ReadStore, array: StoredArray) -> StoredArray:
    """Return the array unchanged.

    This is the ``bind`` of formats whose metadata contain all byte addresses.
    """
    return array


def _sort_by_entry(
    fragments_of: Callable[[str], Sequence[Fragment[ArrayT_co]]], key: str
) -> dict[int, list[Fragment[ArrayT_co]]]:
    """Return the fragments of a tensor by the entries of its first axis that they overlap."""
    entries: dict[int, list[Fragment[ArrayT_co]]] = {}
    for fragment in fragments_of(key):
        for number in range(fragment.box.offset[0], fragment.box.end[0]):
            entries.setdefault(number, []).append(fragment)
    return entries


@dataclass(frozen=True, slots=True)
class Catalog(Generic[ArrayT_co]):
    """All metadata of a checkpoint, no data.

    Args:
        format: name of the source or target format (``torch``, ``megatron``, ``dcp`` …).
        version: the format's own version text, if it has one.
        tensors: every global tensor by key, in a stable order. In a *rank catalog*
            (``is_rank_local``) the keys are ``<rank directory>:<name>`` and the shapes those of one
            rank; ``core.megatron.reshard.reshard.unshard`` converts them to global ones.
        fragments_of: returns the fragments of one key, which are created on demand, so that a
            tensor of 10⁵ chunks does not need 10⁵ objects.
        objects: non-tensor entries by key.
        hidden: tensors that belong to objects (``StoredObject``), by key; ``fragments_of`` returns
            their fragments too.
        skeleton: nested containers with ``TensorLeaf``/``ObjectLeaf`` in place of entries, if the
            format keeps nesting; None means flat.
        bind: finds the byte address and strides of a late-bound array.
        iteration: the training step at which the checkpoint was saved; None if it is not recorded.
        args: the training arguments as an inert namespace (``core.pickle.inert``), or None.
        common: entries other than tensors and objects that all ranks share, by name, if the format
            stores them separately (torch_dist's ``common.pt``; the global form of Megatron rank
            files); None if it does not.
        optimizer: Megatron's optimizer without its tensors, in the global form.
        aliases: key → key whose bytes it shares (tied tensors).
        unsupported: key → kind of tensor, for tensors that are listed but cannot be copied.
        attributes: path of a container, "" for the root → what the checkpoint says about it
            (``core.catalog.attributes``).
        carried: path → key of the hidden uint8 tensor that is the file: configurations and
            tokenizers next to the weights.
        documents: path → bytes of small files that a layout created, to be written next to the
            weights.
        zeros: key → boxes of a target's tensor that are zero and in no source (vocabulary padding).
        notes: notes for the user, a sentence each.
        dropped: ``entry (reason)`` for each dropped entry.
        write: options for writing the files of a target.
        facets: further facts about single formats and layouts (``core.catalog.facets``), by class.
    """

    format: str
    version: str | None
    tensors: Mapping[str, TensorMeta]
    fragments_of: Callable[[str], Sequence[Fragment[ArrayT_co]]]
    objects: Mapping[str, StoredObject] = field(default_factory=dict)
    hidden: Mapping[str, TensorMeta] = field(default_factory=dict)
    skeleton: object = None
    bind: Callable[[ReadStore, StoredArray], StoredArray] = bind_nothing
    iteration: int | None = None
    args: object = None
    common: Mapping[object, object] | None = None
    optimizer: Optimizer | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    carried: Mapping[str, str] = field(default_factory=dict)
    documents: Mapping[str, bytes] = field(default_factory=dict)
    zeros: Mapping[str, Sequence[Box]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    write: WriteOptions = field(default_factory=WriteOptions)
    facets: Mapping[type, object] = field(default_factory=dict)
    _by_entry: Callable[[str], dict[int, list[Fragment[ArrayT_co]]]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        # A layer has a few stacks (weights and biases), whose entries are asked for in turn. The
        # cache does not refer to the catalog: catalogs are freed while the collector is paused.
        sort = partial(_sort_by_entry, self.fragments_of)
        object.__setattr__(self, "_by_entry", lru_cache(maxsize=8)(sort))

    def fragments(self, key: str) -> Sequence[Fragment[ArrayT_co]]:
        """Return the fragments of one tensor, replicas included, in a stable order."""
        return self.fragments_of(key)

    def entry_fragments(self, key: str, number: int) -> Sequence[Fragment[ArrayT_co]]:
        """Return the fragments of a tensor that contain elements of one entry of its first axis.

        For tensors that stack others, such as the experts of a layer, which are asked for entry by
        entry: the time is that of the entry's fragments, not of the tensor's.
        """
        return self._by_entry(key).get(number, ())

    def all_fragments(self) -> Iterator[Fragment[ArrayT_co]]:
        """Yield every fragment of every tensor and hidden tensor."""
        for key in self.tensors:
            yield from self.fragments_of(key)
        for key in self.hidden:
            yield from self.fragments_of(key)

    def stored_arrays(self) -> dict[str, ArrayT_co]:
        """Return every stored array by its name, each once."""
        arrays = (fragment.array for fragment in self.all_fragments())
        return {array.name: array for array in arrays if array is not None}

    def meta(self, key: str) -> TensorMeta:
        """Return the tensor or hidden tensor of a key."""
        meta = self.tensors.get(key)
        return meta if meta is not None else self.hidden[key]

    def whole_array(self, key: str) -> ArrayT_co:
        """Return the only array of a tensor, in a target catalog whose format cannot cut tensors.

        Raises:
            UnsupportedError: the tensor is cut into several arrays.
        """
        array = self.fragments_of(key)[0].array
        if array is None or array.shape != self.meta(key).shape:
            raise UnsupportedError(
                f"{self.format} stores this tensor as one array, but it is cut into several",
                key=key,
            )
        return array

    @property
    def n_bytes(self) -> int:
        """Size of all tensors, each counted once, in bytes."""
        return sum(meta.n_bytes for meta in self.tensors.values())

    @property
    def is_rank_local(self) -> bool:
        """True for a rank catalog, whose keys and shapes are those of single ranks."""
        return RankFacts in self.facets

    def facet(self, kind: type[FacetT]) -> FacetT | None:
        """Return the facet of a class, or None if the catalog has no such facet."""
        return cast("FacetT | None", self.facets.get(kind))

    def with_facet(self, facet: object) -> Catalog[ArrayT_co]:
        """Return a copy with a facet, which replaces an earlier facet of its class."""
        return replace(self, facets={**self.facets, type(facet): facet})

    def without_facets(self, *kinds: type) -> Catalog[ArrayT_co]:
        """Return a copy without the facets of these classes."""
        return replace(
            self, facets={kind: facet for kind, facet in self.facets.items() if kind not in kinds}
        )

    def as_target(
        self, format: str, fragments_of: Callable[[str], Sequence[TargetFragment]]
    ) -> TargetCatalog:
        """Build the target catalog of a format for the same entries.

        Args:
            format: name of the target format.
            fragments_of: returns the fragments of a tensor or hidden tensor, in arrays without a
                position yet.
        """
        # For the type checker: replace() cannot change the type parameter.
        entries: Any = self
        target: TargetCatalog = replace(
            entries, format=format, version=None, fragments_of=fragments_of, bind=bind_nothing
        )
        return target

    def noted(self, notes: Iterable[str]) -> Catalog[ArrayT_co]:
        """Return a copy with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def with_hidden(self, arrays: Mapping[str, ArrayT_co]) -> Catalog[ArrayT_co]:
        """Return a copy with more hidden tensors, each of which is one array.

        Args:
            arrays: array by key; the keys are not in the catalog yet.
        """
        if not arrays:
            return self
        old_fragments_of = self.fragments_of

        def fragments_of(key: str) -> Sequence[Fragment[ArrayT_co]]:
            array = arrays.get(key)
            return old_fragments_of(key) if array is None else (whole_fragment(key, array),)

        return replace(self, hidden={**self.hidden, **metas_of(arrays)}, fragments_of=fragments_of)


TargetCatalog: TypeAlias = Catalog[PlannedArray]
"""The catalog of a checkpoint to write, whose arrays ``Format.lay_out`` places."""
AnyCatalog: TypeAlias = Catalog[AnyArray]
"""A source or a target, for code that does not use positions in files."""


def catalog_of_arrays(
    *,
    format: str,
    arrays: Mapping[str, ArrayT],
    version: str | None = None,
    objects: Mapping[str, StoredObject] | None = None,
    hidden: Mapping[str, ArrayT] | None = None,
    skeleton: object = None,
) -> Catalog[ArrayT]:
    """Build the catalog of a checkpoint in which every tensor is one array.

    Args:
        arrays: tensor key → its array.
        hidden: key → array for the tensors that belong to objects.
    """
    all_arrays = {**arrays, **(hidden or {})}
    return Catalog(
        format=format,
        version=version,
        tensors=metas_of(arrays),
        fragments_of=lambda key: (whole_fragment(key, all_arrays[key]),),
        objects=objects or {},
        hidden=metas_of(hidden or {}),
        skeleton=skeleton,
    )
