"""The catalog of a checkpoint: all metadata, no data.

Its tensors (``core.engine.catalog.tensor``) hang under keys; what they are made of is theirs.

Late-bound extents: a DCP item is a complete torch zip, which itself records where its data begin
and with which strides. ``StoredArray.locate`` reads that at copy time, with one small read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from core.engine.catalog.facets import RankFacts, WriteOptions
from core.engine.catalog.stored import AnyArray, ArrayT, ArrayT_co, Coords, PlannedArray
from core.engine.catalog.tensor import Fragment, TargetTensor, Tensor, find_ties, tensors_of
from core.errors import UnsupportedError
from core.values import dataclass, n_text

if TYPE_CHECKING:
    from core.engine.catalog.dropped import Dropped
    from core.engine.catalog.optimizer_keys import Optimizer


FacetT = TypeVar("FacetT")
_FILE = "file:"


@dataclass(frozen=True, slots=True)
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
        refused: kind of the tensor or container that stands here and cannot be copied; None for an
            object that can.
    """

    key: str
    value: object = None
    raw_key: str | None = None
    coords: Coords = ()
    refused: str | None = None


def file_key(path: str) -> str:
    """Return the key under which a catalog lists a file that is copied unchanged."""
    return _FILE + path


def _sort_by_entry(
    tensors: Mapping[str, Tensor[ArrayT_co]], key: str, axis: int
) -> dict[int, list[Fragment[ArrayT_co]]]:
    """Return the fragments of a tensor by the entries of an axis that they overlap."""
    entries: dict[int, list[Fragment[ArrayT_co]]] = {}
    for fragment in tensors[key].fragments():
        for number in range(fragment.box.offset[axis], fragment.box.end[axis]):
            entries.setdefault(number, []).append(fragment)
    return entries


@dataclass(frozen=True, slots=True)
class Catalog(Generic[ArrayT_co]):
    """All metadata of a checkpoint, no data.

    Args:
        format: name of the source or target format (``torch``, ``megatron``, ``dcp`` …).
        version: the format's own version text, if it has one.
        tensors: every global tensor by key, in a stable order. Tensors that share their bytes (tied
            ones) are one object under several keys (``ties``). In a *rank catalog*
            (``is_rank_local``) the keys are ``<rank directory>:<name>`` and the shapes those of one
            rank; ``core.megatron.reshard.unshard.unshard`` converts them to global ones.
        objects: non-tensor entries by key.
        hidden: tensors that belong to objects (``StoredObject``), by key.
        skeleton: nested containers with ``TensorLeaf``/``ObjectLeaf`` in place of entries, if the
            format keeps nesting; None means flat.
        iteration: the training step at which the checkpoint was saved; None if it is not recorded.
        args: the training arguments as an inert namespace (``core.pickle.inert``), or None.
        common: entries other than tensors and objects that all ranks share, by name, if the format
            stores them separately (torch_dist's ``common.pt``; the global form of Megatron rank
            files); None if it does not.
        optimizer: Megatron's optimizer without its tensors, in the global form.
        attributes: path of a container, "" for the root → what the checkpoint says about it
            (``core.engine.catalog.attributes``).
        files: path → content of a file next to the weights (configurations, tokenizers …), in the
            order in which they are written: a uint8 tensor of one axis if it is copied unchanged,
            bytes if the program made it.
        notes: notes for the user, a sentence each.
        dropped: the record of entries that are not carried, with the reasons.
        write: options for writing the files of a target.
        facets: further facts about single formats and layouts (``core.engine.catalog.facets``), by
        class.
    """

    format: str
    version: str | None
    tensors: Mapping[str, Tensor[ArrayT_co]]
    objects: Mapping[str, StoredObject] = field(default_factory=dict)
    hidden: Mapping[str, Tensor[ArrayT_co]] = field(default_factory=dict)
    skeleton: object = None
    iteration: int | None = None
    args: object = None
    common: Mapping[object, object] | None = None
    optimizer: Optimizer | None = None
    attributes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    files: Mapping[str, Tensor[ArrayT_co] | bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    write: WriteOptions = field(default_factory=WriteOptions)
    facets: Mapping[type, object] = field(default_factory=dict)
    _by_entry: Callable[[str, int], dict[int, list[Fragment[ArrayT_co]]]] = field(
        init=False, repr=False, compare=False
    )
    _find_ties: Callable[[], dict[str, str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in map(file_key, self.files):
            if key in self.tensors or key in self.hidden:
                raise UnsupportedError(
                    "this tensor's key is reserved for a sidecar file",
                    key=key,
                    hint="move the sidecar file out of the directory, or rename the tensor",
                )
        # A layer has some stacks (weights, biases and their optimizer states), whose entries are
        # asked for in turn. The caches do not refer to the catalog: catalogs are freed while the
        # collector is paused.
        sort = partial(_sort_by_entry, self.tensors)
        object.__setattr__(self, "_by_entry", lru_cache(maxsize=64)(sort))
        object.__setattr__(self, "_find_ties", cache(partial(find_ties, self.tensors)))

    def __repr__(self) -> str:
        n_tensors = n_text(len(self.tensors), "tensor")
        return f"<{self.format} catalog: {n_tensors}, {n_text(len(self.objects), 'object')}>"

    def fragments(self, key: str) -> Sequence[Fragment[ArrayT_co]]:
        """Return the fragments of one tensor, replicas included, in a stable order."""
        return self.tensor(key).fragments()

    def entry_fragments(
        self, key: str, number: int, axis: int = 0
    ) -> Sequence[Fragment[ArrayT_co]]:
        """Return the fragments of a tensor that contain elements of one entry of an axis.

        For tensors that stack others, such as the experts of a layer, which are asked for entry by
        entry: the time is that of the entry's fragments, not of the tensor's.
        """
        return self._by_entry(key, axis).get(number, ())

    def entry(self, key: str, number: int, axis: int = 0) -> Tensor[ArrayT_co]:
        """Return one entry of an axis of a tensor, in the time of the entry's fragments."""
        stack = self.tensors[key]
        whole = Tensor(stack.dtype, stack.shape, lambda: self.entry_fragments(key, number, axis))
        return whole.select(axis, number)

    def all_tensors(self) -> Iterator[tuple[str, Tensor[ArrayT_co]]]:
        """Yield every tensor, hidden tensor and copied file (``file_key``), with its key."""
        yield from self.tensors.items()
        yield from self.hidden.items()
        for path, content in self.files.items():
            if isinstance(content, Tensor):
                yield file_key(path), content

    def all_fragments(self) -> Iterator[Fragment[ArrayT_co]]:
        """Yield every fragment of every tensor, hidden tensor and copied file."""
        for _, tensor in self.all_tensors():
            yield from tensor.fragments()

    def stored_arrays(self) -> dict[str, ArrayT_co]:
        """Return every stored array by its name, each once."""
        arrays = (fragment.array for fragment in self.all_fragments())
        return {array.name: array for array in arrays if array is not None}

    def find(self, key: str) -> Tensor[ArrayT_co] | None:
        """Return the tensor, hidden tensor or copied file of a key, or None if there is none."""
        tensor = self.tensors.get(key) or self.hidden.get(key)
        if tensor is None and key.startswith(_FILE):
            content = self.files.get(key.removeprefix(_FILE))
            return content if isinstance(content, Tensor) else None
        return tensor

    def tensor(self, key: str) -> Tensor[ArrayT_co]:
        """Return the tensor, hidden tensor or copied file of a key.

        Raises:
            KeyError: there is none.
        """
        tensor = self.find(key)
        if tensor is None:
            raise KeyError(key)
        return tensor

    def whole_array(self, key: str) -> ArrayT_co:
        """Return the only array of a tensor, in a target catalog whose format cannot cut tensors.

        Raises:
            UnsupportedError: the tensor is cut into several arrays.
        """
        array = self.fragments(key)[0].array
        if array is None or array.shape != self.tensor(key).shape:
            raise UnsupportedError(
                f"{self.format} stores each tensor as a single array, but this tensor is split "
                "into several arrays",
                key=key,
            )
        return array

    @property
    def ties(self) -> Mapping[str, str]:
        """Key → first key of the same tensor, for the tensors that have an earlier key."""
        return self._find_ties()

    @property
    def documents(self) -> dict[str, bytes]:
        """The files that the program made, by path."""
        return {path: data for path, data in self.files.items() if isinstance(data, bytes)}

    @property
    def n_bytes(self) -> int:
        """Size of all tensors, each counted once, in bytes."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    @property
    def refused(self) -> dict[str, str]:
        """The kinds of the objects that cannot be copied, by key."""
        items = self.objects.items()
        return {key: item.refused for key, item in items if item.refused is not None}

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
        self, format: str, place: Callable[[str, Tensor[ArrayT_co]], TargetTensor]
    ) -> TargetCatalog:
        """Build the target catalog of a format for the same entries.

        Args:
            format: name of the target format.
            place: returns a tensor, hidden tensor or copied file, given with its key, in arrays
                without a position yet.
        """
        return replace(self.map_tensors(place), format=format, version=None)

    def map_tensors(
        self, change: Callable[[str, Tensor[ArrayT_co]], Tensor[ArrayT]]
    ) -> Catalog[ArrayT]:
        """Return a copy with what ``change`` returns for each of ``all_tensors``.

        It is called once for tied tensors, with their first key, so they remain tied.
        """
        ties = self.ties
        own = {key: change(key, item) for key, item in self.tensors.items() if key not in ties}
        # For the type checker: replace() cannot change the type parameter.
        entries: Any = self
        changed: Catalog[ArrayT] = replace(
            entries,
            tensors={key: own[ties.get(key, key)] for key in self.tensors},
            hidden={key: change(key, tensor) for key, tensor in self.hidden.items()},
            files={
                path: content if isinstance(content, bytes) else change(file_key(path), content)
                for path, content in self.files.items()
            },
        )
        return changed

    def noted(self, notes: Iterable[str]) -> Catalog[ArrayT_co]:
        """Return a copy with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def with_hidden(self, arrays: Mapping[str, ArrayT_co]) -> Catalog[ArrayT_co]:
        """Return a copy with more hidden tensors, each of which is one array.

        Args:
            arrays: array by key; the keys are not in the catalog yet.
        """
        return replace(self, hidden={**self.hidden, **tensors_of(arrays)}) if arrays else self


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
    return Catalog(
        format=format,
        version=version,
        tensors=tensors_of(arrays),
        objects=objects or {},
        hidden=tensors_of(hidden or {}),
        skeleton=skeleton,
    )
