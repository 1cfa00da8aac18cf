"""Apply the rows of a family (``core.hf.family``) to a model.

The rows, with the sizes and traits of a model (``core.hf.traits``), become ``Pair``s: one tensor of
the global Megatron form and the Hugging Face tensors that it consists of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.errors import UnsupportedError
from core.hf.family import EXPERT, Family, NameRow
from core.hf.traits import Model
from core.hf.values import LAYERS
from core.values import dataclass

if TYPE_CHECKING:
    from core.hf.tensors.fuse import Strip
    from core.hf.tensors.packed import PackedExpert

MTP = "mtp.layers."
BODY = "model."
"""Prefix of all names in a model of transformers except the head's, unless the family's table
states another (``body``)."""
_MTP_BODIES = ("transformer_layer.", "mtp_model_layer.")


@dataclass(frozen=True, slots=True)
class FamilyPart:
    """A Hugging Face tensor, or some rows of one.

    Args:
        names: name that is written, then others that are read.
        shape: extents in elements.
    """

    names: tuple[str, ...]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor of the global Megatron form, and its Hugging Face counterparts.

    Args:
        names: Megatron's name in this model's rank files, then others that are read.
        parts: tensors that it consists of; a single part is the tensor itself.
        n_groups: number of groups by which parts are interleaved
            (``core.hf.tensors.fuse.interleave_by_group``).
        n_alternations: number of groups by which parts with the same name are interleaved in their
            tensor.
        is_swapped: the halves of its columns follow each other the other way round in the Hugging
            Face tensor.
        is_flat: the Hugging Face tensor has one axis more, the first, with an extent of 1.
        is_transposed: the Hugging Face tensor is the transposed matrix.
        shift: what the Hugging Face tensor's numbers exceed Megatron's by
            (``core.hf.tensors.shifted``).
        stack: (key, index, number of entries) of a tensor that may contain it as an entry of its
            first axis; or None.
        entry: (index, number of entries) if every part is an entry of the first axis of its tensor;
            or None.
        packed: where it stands in a tensor that holds it in another order; or None.
        copies: tensors that may repeat its values; read, never written.
        twins: tensors that repeat its values; read and written.
    """

    names: tuple[str, ...]
    parts: tuple[FamilyPart, ...]
    n_groups: int = 1
    n_alternations: int = 1
    shift: int | None = None
    is_swapped: bool = False
    is_flat: bool = False
    is_transposed: bool = False
    stack: tuple[str, int, int] | None = None
    entry: tuple[int, int] | None = None
    packed: PackedExpert | None = None
    copies: tuple[str, ...] = ()
    twins: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        """The shape of Megatron's tensor, in elements."""
        first = self.parts[0].shape
        if self.is_flat:
            return first[1:]
        return (sum(part.shape[0] for part in self.parts), *first[1:])

    @property
    def tensors(self) -> tuple[FamilyPart, ...]:
        """The Hugging Face tensors in which the parts are stored, in the order of the parts."""
        rows: dict[tuple[str, ...], int] = {}
        for part in self.parts:
            rows[part.names] = rows.get(part.names, 0) + part.shape[0]
        tails = {part.names: part.shape[1:] for part in self.parts}
        shapes = {names: (rows[names], *tails[names]) for names in rows}
        return tuple(
            FamilyPart(names, shape[::-1] if self.is_transposed else shape)
            for names, shape in shapes.items()
        )

    @property
    def strips(self) -> tuple[Strip, ...]:
        """The strips that map rows of ``tensors`` to rows of Megatron's tensor."""
        numbers = {names: n for n, names in enumerate(dict.fromkeys(p.names for p in self.parts))}
        return _strips_of(
            tuple(part.shape[0] for part in self.parts),
            tuple(numbers[part.names] for part in self.parts),
            n_groups=self.n_groups,
            n_alternations=self.n_alternations,
        )


@lru_cache(maxsize=1024)
def _strips_of(
    extents: tuple[int, ...], tensor_of: tuple[int, ...], *, n_groups: int, n_alternations: int
) -> tuple[Strip, ...]:
    """Return ``Pair.strips``. They are kept, as every layer of a model has the same.

    Args:
        extents: number of rows of each part.
        tensor_of: for each part, the number of the tensor that stores it.
        n_groups, n_alternations: those of the pair.
    """
    from core.hf.tensors.fuse import chain_strips, interleave_by_group

    stored: list[list[Strip]] = [[] for _ in extents]
    for number in dict.fromkeys(tensor_of):
        members = [n for n, tensor in enumerate(tensor_of) if tensor == number]
        # A part that has its tensor to itself does not alternate with anything.
        groups = n_alternations if len(members) > 1 else 1
        for strip in interleave_by_group([extents[n] for n in members], groups):
            stored[members[strip.part]].append(strip)
    return tuple(chain_strips(interleave_by_group(extents, n_groups), stored, tensor_of))


def pairs_of(family: Family, model: Model) -> Iterator[Pair]:
    """Yield every tensor of a model, in the order of Megatron's rank files.

    Raises:
        UnsupportedError: a row refers to a size that the model does not have, or several layers of
            multi-token prediction would share tensors.
    """
    from core.hf.tensors.packed import PackedExpert

    layers = family.body + family.layers
    n_inner = len(model.prediction or "1")
    mtp = [
        tuple(
            text.format(layer=model.n_layers + number, number=number)
            for text in (family.mtp_names.module, family.mtp_names.layer)
        )
        for number in range(model.n_mtp * n_inner)
    ]
    if len({module for module, _ in mtp}) < model.n_mtp:
        raise UnsupportedError(
            f"the model has {model.n_mtp} multi-token prediction layers, but "
            f"{family.model_type} models have only one"
        )

    def make_pair(
        row: NameRow,
        megatron: tuple[str, ...],
        hf: str,
        expert: int | None = None,
        *,
        layer: int | None = None,
    ) -> Pair:
        """Apply a rule with the prefixes of both sides and return its pair."""
        # Transformer Engine fuses a norm into the linear module behind it; that name goes first
        # where the model uses it, as the first name is the one that is written.
        names = [row.megatron, *row.also]
        if row.fused is not None:
            names.insert(0 if not model.is_local else 1, row.fused)
        twins = () if row.twin is None else tuple(module + row.twin for module, _ in mtp)
        return Pair(
            names=tuple(start + _numbered(name, expert) for name in names for start in megatron),
            parts=tuple(make_parts(row, hf, expert, model.sizes_of(layer))),
            n_groups=model.n_groups_of(layer) if row.fuse == "qkv" else 1,
            n_alternations=1
            if row.alternate is None
            else size_of_row(row.hf[0], row.alternate, model.sizes),
            shift=row.shift,
            is_swapped=row.swap,
            is_flat=row.flat,
            is_transposed=row.transposed,
            stack=None
            if row.stacked is None or expert is None
            else (BODY + (hf + row.stacked).removeprefix(family.body), expert, model.n_experts),
            entry=(expert, model.n_experts) if row.entries and expert is not None else None,
            packed=None
            if row.packed is None or expert is None
            else PackedExpert(hf + row.hf[0], expert, model.n_experts, row.packed),
            copies=() if row.tied is None or "tied" not in model.traits else (row.tied,),
            twins=twins,
        )

    def make_parts(
        row: NameRow, hf: str, expert: int | None, sizes: Mapping[str, int]
    ) -> Iterator[FamilyPart]:
        """Yield the parts of a rule's tensor."""
        for number, name in enumerate(row.hf):
            names = (name, *row.hf_also[number : number + 1])
            shape = tuple(size_of_row(name, size, sizes) for size in row.shape[number].split())
            full = tuple(hf + _numbered(each, expert) for each in names)
            yield FamilyPart((*full, *_with_other_bodies(full, family)), shape)

    def size_of_row(name: str, size: str, sizes: Mapping[str, int]) -> int:
        """Return a size of a rule's tensor, which only the table of a user may lack."""
        if size not in sizes:
            raise UnsupportedError(
                f"the {family.model_type} table uses the size {size!r} for {name}, but the model "
                "has no size with that name",
                hint=f"available sizes: {', '.join(sorted(sizes))}",
            )
        return sizes[size]

    def layer_pairs(
        kinds: frozenset[str], megatron: tuple[str, ...], hf: str, *, layer: int | None = None
    ) -> Iterator[Pair]:
        """Apply the rules of one layer and yield its pairs, for experts once per expert."""
        # Consecutive rules of experts are applied together, expert by expert: the order in which
        # torch saves the modules.
        rows_of_kind = [row for row in family.layer if row.when <= model.traits | kinds]
        for is_of_expert, rows in groupby(rows_of_kind, key=lambda row: row.is_of_expert):
            group = list(rows)
            for expert in range(model.n_experts) if is_of_expert else (None,):
                for row in group:
                    yield make_pair(row, megatron, hf, expert, layer=layer)

    # The embedding and the decoder layers.
    for row in family.first:
        if row.when <= model.traits:
            yield make_pair(row, ("",), "")
    for number in range(model.n_layers):
        yield from layer_pairs(
            model.kinds_of(number), (f"{LAYERS}{number}.",), f"{layers}{number}.", layer=number
        )
    # The final norm; the layers of multi-token prediction, whose last rule is their own norm; and
    # the output layer, which Megatron saves after them.
    yield from (make_pair(row, ("",), "") for row in family.last[:1] if row.when <= model.traits)
    for number in range(model.n_mtp):
        start = f"{MTP}{number}."
        inner = mtp[number * n_inner : (number + 1) * n_inner]
        first, last = inner[0][0], inner[-1][0]
        for row in family.mtp[:-1]:
            yield make_pair(row, (start,), first)
        for position, (_, hf) in enumerate(inner):
            bodies: tuple[str, ...] = _MTP_BODIES
            if model.prediction is None:
                kinds = model.prediction_kinds_of(number, is_dense=family.mtp_names.dense)
            else:
                bodies = (f"mtp_model_layer.layers.{position}.",)
                kinds = frozenset((model.prediction[position],))
            yield from layer_pairs(kinds, tuple(start + body for body in bodies), hf)
        for row in family.mtp[-1:]:
            yield make_pair(row, (start,), last)
    yield from (make_pair(row, ("",), "") for row in family.last[1:] if row.when <= model.traits)


def _with_other_bodies(names: tuple[str, ...], family: Family) -> tuple[str, ...]:
    """Return the names that transformers 5 reads for names that begin with the family's body."""
    return tuple(
        body + name.removeprefix(family.body)
        for body in dict.fromkeys((*family.bodies[1:], BODY))
        if body != family.body
        for name in names
        if name.startswith(family.body)
    )


def _numbered(name: str, expert: int | None) -> str:
    """Fill the number of the expert into a name of the tables."""
    return name if expert is None else name.replace(EXPERT, str(expert))
