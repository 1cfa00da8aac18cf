"""What a checkpoint holds, without its data.

::

    tensor (global, named by key)
      └── fragments: boxes that tile it ── at ──▶ stored array (a dense array that exists in a file)
                                                    └── extent: file, byte address, strides

Several fragments with one box are replicas. A fragment and its array are aligned at their *last* axis; where one has
more axes than the other, the extra leading ones have extent 1. So a layer of a stacked ``(L, rows, cols)`` array is a
fragment of a ``(rows, cols)`` tensor with ``at == (layer, 0, 0)``, and the other way round.

Late-bound extents: a DCP item is a whole torch zip, and where its data begins (and in which strides) stands inside the
item. ``Catalog.bind`` finds it with one small read, at copy time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Box, Shape, full_box
from core.arrays.dtypes import itemsize
from core.arrays.fast_value import value
from core.catalog.stored import Coords, StoredArray
from core.errors import UnsupportedError

if TYPE_CHECKING:
    from core.files.store import ReadStore


@value(frozen=True, slots=True)
class TensorMeta:
    """A global tensor.

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
        """Number of elements."""
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor as one dense array."""
        return prod(self.shape) * itemsize(self.dtype)


def swapped(extents: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape, an offset or strides with the last two axes in the other order."""
    return (*extents[:-2], extents[-1], extents[-2])


@value(frozen=True, slots=True)
class Fragment:
    """A box of a global tensor and the array region that holds it.

    Args:
        key: the tensor.
        box: region of the tensor, in elements.
        array: the array that holds it; None on the source side means that the region is zero by rule (vocabulary
            padding), which no file stores.
        at: index of the region's first element in ``array``, one number per axis of the array.
    """

    key: str
    box: Box
    array: StoredArray | None
    at: Shape

    def __post_init__(self) -> None:
        if self.array is not None and len(self.at) != len(self.array.shape):
            raise ValueError(f"fragment of {self.key}: at {self.at} does not fit array shape {self.array.shape}")


def whole_fragment(key: str, array: StoredArray) -> Fragment:
    """The fragment of a tensor that is all of one array."""
    return Fragment(key, full_box(array.shape), array, (0,) * len(array.shape))


def metas_of(arrays: Mapping[str, StoredArray]) -> dict[str, TensorMeta]:
    """The tensors that are one array each, by key."""
    return {key: TensorMeta(key, array.dtype, array.shape) for key, array in arrays.items()}


def held_boxes(shape: Shape, fragments: Iterable[Fragment]) -> Iterator[tuple[StoredArray, Box | None]]:
    """Every array of a tensor once, with the box of the tensor that it holds as a whole; None for one that holds none.

    Args:
        shape: of the tensor.
        fragments: of the tensor; an array may be in several of them.
    """
    seen: dict[str, Box | None] = {}
    for fragment in fragments:
        array = fragment.array
        if array is None:
            continue
        box = fragment.box if array.shape == fragment.box.shape else _held_box(shape, fragment, array)
        if array.name not in seen:
            seen[array.name] = box
            yield array, box
        elif seen[array.name] != box:
            yield array, None


def _held_box(shape: Shape, fragment: Fragment, array: StoredArray) -> Box | None:
    """The box of the tensor that corresponds to an array of which the fragment is a part, or None if there is none."""
    extra = len(shape) - len(array.shape)
    extents = (1,) * extra + array.shape[max(-extra, 0) :]
    at = (0,) * extra + fragment.at[max(-extra, 0) :]
    offset = tuple(start - inside for start, inside in zip(fragment.box.offset, at, strict=True))
    fits = all(start >= 0 and start + n <= end for start, n, end in zip(offset, extents, shape, strict=True))
    return Box(offset, extents) if fits else None


@value(frozen=True, slots=True)
class StoredObject:
    """A non-tensor entry: optimizer settings, random states, arguments, extra states.

    Either ``value`` or ``raw_key`` tells its content. Tensors inside a value stand in it as ``TensorLeaf`` and are
    listed in ``Catalog.hidden``.

    Args:
        key: unique name, in the same space as the tensors' keys.
        value: the inert value (``core.pickle.inert``) where it was read with the metadata.
        raw_key: the entry of ``Catalog.hidden`` (uint8, one axis) that holds the object's own torch stream, for objects
            that are not read with the metadata; ``core.formats.torch.format.load_object`` parses it.
        coords: rank coordinates, as in StoredArray.
    """

    key: str
    value: object = None
    raw_key: str | None = None
    coords: Coords = ()


def bind_nothing(store: ReadStore, array: StoredArray) -> StoredArray:
    """The ``bind`` of formats whose byte addresses are known from metadata."""
    return array


@dataclass(frozen=True, slots=True)
class Catalog:
    """All metadata of a checkpoint, no data.

    Args:
        format: name of the format it was read from or is meant for (``torch``, ``megatron``, ``dcp`` …).
        version: the format's own version text, where it has one.
        tensors: every global tensor by key, in a stable order. In a *rank catalog* (``attrs["is_rank_local"]``) the
            keys are ``<rank directory>:<name>`` and the shapes those of one rank;
            ``core.megatron.reshard.reshard.unshard`` makes them global.
        fragments_of: the fragments of one key, made on demand so that 10⁵ chunks need no 10⁵ objects.
        objects: non-tensor entries by key.
        hidden: tensors that belong to objects (``StoredObject``), by key; ``fragments_of`` answers for them too.
        skeleton: nested containers with ``TensorLeaf``/``ObjectLeaf`` in place of entries, where the format keeps
            nesting; None means flat.
        attrs: facts beside the entries; each format's docstring lists its own. Common ones: ``iteration`` (int),
            ``args`` (the training arguments as an inert namespace), ``aliases`` (key → key that shares its bytes),
            ``is_rank_local``, ``carried`` (path → key of the hidden uint8 tensor that is the file: configurations and
            tokenizers beside the weights), ``documents`` (path → bytes of small files that a layout made), ``notes``
            (texts: what the user should know).
        bind: finds the byte address and strides of a late-bound array.
    """

    format: str
    version: str | None
    tensors: Mapping[str, TensorMeta]
    fragments_of: Callable[[str], Sequence[Fragment]]
    objects: Mapping[str, StoredObject] = field(default_factory=dict)
    hidden: Mapping[str, TensorMeta] = field(default_factory=dict)
    skeleton: object = None
    attrs: Mapping[str, object] = field(default_factory=dict)
    bind: Callable[[ReadStore, StoredArray], StoredArray] = bind_nothing

    def fragments(self, key: str) -> Sequence[Fragment]:
        """The fragments of one tensor, replicas included, in a stable order."""
        return self.fragments_of(key)

    def all_fragments(self) -> Iterator[Fragment]:
        """Every fragment of every tensor and hidden tensor."""
        for key in self.tensors:
            yield from self.fragments_of(key)
        for key in self.hidden:
            yield from self.fragments_of(key)

    def stored_arrays(self) -> dict[str, StoredArray]:
        """Every stored array by its name, each once."""
        arrays = (fragment.array for fragment in self.all_fragments())
        return {array.name: array for array in arrays if array is not None}

    def meta(self, key: str) -> TensorMeta:
        """The tensor or hidden tensor of a key."""
        found = self.tensors.get(key)
        return found if found is not None else self.hidden[key]

    def whole_array(self, key: str) -> StoredArray:
        """The one array that is all of a tensor, in a target catalog whose format needs it so.

        Raises:
            UnsupportedError: the tensor is cut into several arrays.
        """
        array = self.fragments_of(key)[0].array
        if array is None or array.shape != self.meta(key).shape:
            raise UnsupportedError(f"{self.format} holds this tensor as one array, but it is cut into pieces", key=key)
        return array

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(meta.n_bytes for meta in self.tensors.values())

    def with_attrs(self, **changes: object) -> Catalog:
        """The same catalog with some attrs added or replaced."""
        return replace(self, attrs={**self.attrs, **changes})

    def noted(self, notes: Iterable[str]) -> Catalog:
        """The same catalog with more of what the user should know, in attrs["notes"]."""
        found = self.attrs.get("notes")
        return self.with_attrs(notes=(*(found if isinstance(found, (list, tuple)) else ()), *notes))

    def with_hidden(self, arrays: Mapping[str, StoredArray]) -> Catalog:
        """The catalog with more hidden tensors, each one array; by their keys, which no other has."""
        if not arrays:
            return self
        before = self.fragments_of

        def fragments_of(key: str) -> Sequence[Fragment]:
            array = arrays.get(key)
            return before(key) if array is None else (whole_fragment(key, array),)

        return replace(self, hidden={**self.hidden, **metas_of(arrays)}, fragments_of=fragments_of)


def catalog_of_arrays(
    *,
    format: str,
    arrays: Mapping[str, StoredArray],
    version: str | None = None,
    objects: Mapping[str, StoredObject] | None = None,
    hidden: Mapping[str, StoredArray] | None = None,
    skeleton: object = None,
    attrs: Mapping[str, object] | None = None,
) -> Catalog:
    """The catalog of a checkpoint in which every tensor is one array.

    Args:
        arrays: tensor key → the array that holds all of it.
        hidden: the same for the tensors that belong to objects.
    """
    every = {**arrays, **(hidden or {})}
    return Catalog(
        format=format,
        version=version,
        tensors=metas_of(arrays),
        fragments_of=lambda key: (whole_fragment(key, every[key]),),
        objects=objects or {},
        hidden=metas_of(hidden or {}),
        skeleton=skeleton,
        attrs=attrs or {},
    )
