"""What a checkpoint holds, without its data.

::

    tensor (global, named by key)
      └── fragments: boxes that tile it ── at ──▶ stored array (a dense array that exists in a file)
                                                    └── extent: file, byte address, strides

Several fragments with one box are replicas. A fragment and its array are aligned at their *last*
axis; where one has more axes than the other, the extra leading ones have extent 1. So a layer of a
stacked ``(L, rows, cols)`` array is a fragment of a ``(rows, cols)`` tensor with ``at == (layer, 0,
0)``, and the other way round.

Late-bound extents: a DCP item is a whole torch zip, and where its data begins (and in which
strides) stands inside the item. ``Catalog.bind`` finds it with one small read, at copy time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
        flexible: a reader may ask for another shape (the documented ``allow_shape_mismatch``).
    """

    key: str
    dtype: str
    shape: Shape
    flexible: bool = False

    @property
    def n_elements(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the tensor as one dense array."""
        return prod(self.shape) * itemsize(self.dtype)


def swapped(extents: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape, an offset or strides with the last two axes in the other order."""
    return (*extents[:-2], extents[-1], extents[-2])


@value(frozen=True, slots=True)
class Fragment(Generic[ArrayT_co]):
    """A box of a global tensor and the array region that holds it.

    Args:
        key: key of the tensor.
        box: region of the tensor, in elements.
        array: the array that holds it; None on the source side means that the region is zero by
        rule (vocabulary padding), which no file stores.
        at: index of the region's first element in ``array``, one number per axis of the array.
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
    """Return the fragment of a tensor that is all of one array."""
    return Fragment(key, full_box(array.shape), array, (0,) * len(array.shape))


def metas_of(arrays: Mapping[str, AnyArray]) -> dict[str, TensorMeta]:
    """Return the metadata of tensors that are one array each, by key."""
    return {key: TensorMeta(key, array.dtype, array.shape) for key, array in arrays.items()}


def held_boxes(
    shape: Shape, fragments: Iterable[Fragment[ArrayT]]
) -> Iterator[tuple[ArrayT, Box | None]]:
    """Yield every array of a tensor once, with the box of the tensor that it holds as a whole.

    The box is None for an array that holds none.

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
    """Return the box of the tensor that corresponds to the whole array of a fragment, or None."""
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

    Its content is in either ``value`` or ``raw_key``. Tensors inside a value stand in it as
    ``TensorLeaf`` and are listed in ``Catalog.hidden``.

    Args:
        key: unique name, in the same space as the tensors' keys.
        value: the inert value (``core.pickle.inert``) where it was read with the metadata.
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

    This is the ``bind`` of formats whose metadata give all byte addresses.
    """
    return array


@dataclass(frozen=True, slots=True)
class Catalog(Generic[ArrayT_co]):
    """All metadata of a checkpoint, no data.

    Args:
        format: name of the format it was read from or is meant for (``torch``, ``megatron``,
            ``dcp`` …).
        version: the format's own version text, where it has one.
        tensors: every global tensor by key, in a stable order. In a *rank catalog*
            (``is_rank_local``) the keys are ``<rank directory>:<name>`` and the shapes those of one
            rank; ``core.megatron.reshard.reshard.unshard`` makes them global.
        fragments_of: the fragments of one key, made on demand so that 10⁵ chunks need no 10⁵
            objects.
        objects: non-tensor entries by key.
        hidden: tensors that belong to objects (``StoredObject``), by key; ``fragments_of`` answers
            for them too.
        skeleton: nested containers with ``TensorLeaf``/``ObjectLeaf`` in place of entries, where
            the format keeps nesting; None means flat.
        bind: finds the byte address and strides of a late-bound array.
        iteration: the training step at which it was saved, or None if nothing records it.
        args: the training arguments as an inert namespace (``core.pickle.inert``), or None.
        common: entries beside tensors and objects that all ranks share, by name, where the format
            keeps them apart (torch_dist's ``common.pt``; the global form of Megatron rank files);
            None where it does not.
        optimizer: Megatron's optimizer, apart from its tensors, in the global form.
        aliases: key → key whose bytes it shares (tied tensors).
        unsupported: key → kind of tensor, for tensors that are listed but cannot be copied.
        carried: path → key of the hidden uint8 tensor that is the file: configurations and
            tokenizers beside the weights.
        documents: path → bytes of small files that a layout made, to be written beside the weights.
        zeros: key → boxes of a target's tensor that no source holds and that are zero (vocabulary
            padding).
        notes: what the user should know, a sentence each.
        dropped: ``entry (reason)`` of what is left out.
        write: how the files of a target are to be written.
        facets: further facts of single formats and layouts (``core.catalog.facets``), by class.
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
    carried: Mapping[str, str] = field(default_factory=dict)
    documents: Mapping[str, bytes] = field(default_factory=dict)
    zeros: Mapping[str, Sequence[Box]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    write: WriteOptions = field(default_factory=WriteOptions)
    facets: Mapping[type, object] = field(default_factory=dict)

    def fragments(self, key: str) -> Sequence[Fragment[ArrayT_co]]:
        """Return the fragments of one tensor, replicas included, in a stable order."""
        return self.fragments_of(key)

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
        """Return the array that is all of a tensor, in a target catalog whose format needs one.

        Raises:
            UnsupportedError: the tensor is cut into several arrays.
        """
        array = self.fragments_of(key)[0].array
        if array is None or array.shape != self.meta(key).shape:
            raise UnsupportedError(
                f"{self.format} stores this tensor as one array, but it is cut into pieces", key=key
            )
        return array

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all tensors, each counted once."""
        return sum(meta.n_bytes for meta in self.tensors.values())

    @property
    def is_rank_local(self) -> bool:
        """Return whether keys and shapes are those of single ranks (a rank catalog)."""
        return RankFacts in self.facets

    def facet(self, kind: type[FacetT]) -> FacetT | None:
        """Return the facet of a class, or None where the catalog has none."""
        return cast("FacetT | None", self.facets.get(kind))

    def with_facet(self, facet: object) -> Catalog[ArrayT_co]:
        """Return the catalog with a facet set; it replaces another one of its class."""
        return replace(self, facets={**self.facets, type(facet): facet})

    def without_facets(self, *kinds: type) -> Catalog[ArrayT_co]:
        """Return the catalog without the facets of these classes."""
        return replace(
            self, facets={kind: facet for kind, facet in self.facets.items() if kind not in kinds}
        )

    def as_target(
        self, format: str, fragments_of: Callable[[str], Sequence[TargetFragment]]
    ) -> TargetCatalog:
        """Return the target catalog of a format for the same entries.

        Args:
            format: name of the target format.
            fragments_of: returns the fragments of a tensor or hidden tensor, in arrays that are to
            be placed.
        """
        entries: Any = self  # replace() cannot change the type parameter
        target: TargetCatalog = replace(
            entries, format=format, version=None, fragments_of=fragments_of, bind=bind_nothing
        )
        return target

    def noted(self, notes: Iterable[str]) -> Catalog[ArrayT_co]:
        """Return the catalog with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def with_hidden(self: Catalog, arrays: Mapping[str, StoredArray]) -> Catalog:
        """Return the catalog with more hidden tensors, each one array.

        Args:
            arrays: array by key; no other tensor has such a key.
        """
        if not arrays:
            return self
        old_fragments_of = self.fragments_of

        def fragments_of(key: str) -> Sequence[Fragment]:
            array = arrays.get(key)
            return old_fragments_of(key) if array is None else (whole_fragment(key, array),)

        return replace(self, hidden={**self.hidden, **metas_of(arrays)}, fragments_of=fragments_of)


TargetCatalog: TypeAlias = Catalog[PlannedArray]
"""A catalog of what is to be written: ``Format.lay_out`` places its arrays."""
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
    """Return the catalog of a checkpoint in which every tensor is one array.

    Args:
        arrays: tensor key → the array that holds all of it.
        hidden: the same for the tensors that belong to objects.
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
