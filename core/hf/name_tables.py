"""Apply the rows of a family (``core.hf.family``) to a model.

The rows, with the sizes and traits of a model (``core.hf.traits``), become ``Pair``s: one tensor of
the global Megatron form and the Hugging Face tensors that it consists of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from core.arrays.box import Shape
from core.errors import UnsupportedError
from core.hf.family import EXPERT, Family, NameRow
from core.hf.fuse import Strip, interleave_by_group
from core.hf.packed import PackedExpert
from core.hf.traits import Model

LAYERS = "decoder.layers."
MTP = "mtp.layers."
BODY = "model."
"""Prefix of all names in a model of transformers except the head's, unless the family's table
states another (``body``)."""
_MTP_BODIES = ("transformer_layer.", "mtp_model_layer.")


@dataclass(frozen=True, slots=True)
class FamilyPart:
    """A Hugging Face tensor, or consecutive rows of one.

    Args:
        names: name that is written, then others that are read.
        shape: extents in elements.
        row: first row in the tensor.
    """

    names: tuple[str, ...]
    shape: Shape
    row: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor of the global Megatron form, and its Hugging Face counterparts.

    Args:
        names: Megatron's name in this model's rank files, then others that are read.
        parts: tensors that it consists of; a single part is the tensor itself.
        n_groups: number of groups by which parts are interleaved
            (``core.hf.fuse.interleave_by_group``).
        stack: (key, index, number of entries) of a tensor that may contain it as an entry of its
            first axis; or None.
        packed: where it stands in a tensor that holds it in another order; or None.
        copies: tensors that may repeat its values; read, never written.
        twins: tensors that repeat its values; read and written.
    """

    names: tuple[str, ...]
    parts: tuple[FamilyPart, ...]
    n_groups: int = 1
    stack: tuple[str, int, int] | None = None
    packed: PackedExpert | None = None
    copies: tuple[str, ...] = ()
    twins: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        """The shape of Megatron's tensor, in elements."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def tensors(self) -> tuple[FamilyPart, ...]:
        """The Hugging Face tensors in which the parts are stored, in the order of the parts."""
        rows: dict[tuple[str, ...], int] = {}
        for part in self.parts:
            rows[part.names] = part.row + part.shape[0]
        tails = {part.names: part.shape[1:] for part in self.parts}
        return tuple(FamilyPart(names, (rows[names], *tails[names])) for names in rows)

    @property
    def strips(self) -> list[Strip]:
        """The strips that map rows of ``tensors`` to rows of Megatron's tensor."""
        numbers = {tensor.names: number for number, tensor in enumerate(self.tensors)}
        strips = interleave_by_group([part.shape[0] for part in self.parts], self.n_groups)
        return [
            Strip(
                numbers[self.parts[strip.part].names],
                self.parts[strip.part].row + strip.part_row,
                strip.row,
                strip.n_rows,
            )
            for strip in strips
        ]


def pairs_of(family: Family, model: Model) -> Iterator[Pair]:
    """Yield every tensor of a model, in the order of Megatron's rank files."""
    sizes = model.sizes
    layers = f"{family.body}layers."
    mtp_layers = [f"{layers}{model.n_layers + number}." for number in range(model.n_mtp)]

    def make_pair(
        row: NameRow, megatron: tuple[str, ...], hf: str, expert: int | None = None
    ) -> Pair:
        """Apply a rule with the prefixes of both sides and return its pair."""
        # Transformer Engine fuses a norm into the linear module behind it; that name goes first
        # where the model uses it, as the first name is the one that is written.
        names = [row.megatron, *row.also]
        if row.fused is not None:
            names.insert(0 if not model.is_local else 1, row.fused)
        twins = () if row.twin is None else tuple(layer + row.twin for layer in mtp_layers)
        return Pair(
            names=tuple(start + _numbered(name, expert) for name in names for start in megatron),
            parts=tuple(make_parts(row, hf, expert)),
            n_groups=model.n_groups if row.fuse == "qkv" else 1,
            stack=None
            if row.stacked is None or expert is None
            else (BODY + (hf + row.stacked).removeprefix(family.body), expert, model.n_experts),
            packed=None
            if row.packed is None or expert is None
            else PackedExpert(hf + row.hf[0], expert, model.n_experts, row.packed),
            copies=() if row.tied is None or "tied" not in model.traits else (row.tied,),
            twins=twins,
        )

    def make_parts(row: NameRow, hf: str, expert: int | None) -> Iterator[FamilyPart]:
        """Yield the parts of a rule's tensor; those with one name follow each other in a tensor."""
        rows: dict[str, int] = {}
        for number, name in enumerate(row.hf):
            names = (name, *row.hf_also[number : number + 1])
            names_of_sizes = row.shape[number].split()
            for size in names_of_sizes:
                if size not in sizes:  # only the table of a user
                    raise UnsupportedError(
                        f"the {family.model_type} table has a tensor {name} of the size {size!r}, "
                        "which the model does not have",
                        hint=f"sizes: {', '.join(sorted(sizes))}",
                    )
            shape = tuple(sizes[size] for size in names_of_sizes)
            full = tuple(hf + _numbered(each, expert) for each in names)
            yield FamilyPart((*full, *_with_other_body(full, family)), shape, rows.get(name, 0))
            rows[name] = rows.get(name, 0) + shape[0]

    def layer_pairs(kind: str, megatron: tuple[str, ...], hf: str) -> Iterator[Pair]:
        """Apply the rules of one layer and yield its pairs, for experts once per expert."""
        # Consecutive rules of experts are applied together, expert by expert: the order in which
        # torch saves the modules.
        rows_of_kind = [row for row in family.layer if row.when <= model.traits | {kind}]
        for is_of_expert, rows in groupby(rows_of_kind, key=lambda row: row.is_of_expert):
            group = list(rows)
            for expert in range(model.n_experts) if is_of_expert else (None,):
                for row in group:
                    yield make_pair(row, megatron, hf, expert)

    # The embedding and the decoder layers.
    for row in family.first:
        if row.when <= model.traits:
            yield make_pair(row, ("",), "")
    for number in range(model.n_layers):
        yield from layer_pairs(model.kind_of(number), (f"{LAYERS}{number}.",), f"{layers}{number}.")
    # The final norm; the layers of multi-token prediction, whose last rule is their own norm; and
    # the output layer, which Megatron saves after them.
    yield from (make_pair(row, ("",), "") for row in family.last[:1] if row.when <= model.traits)
    for number, hf in enumerate(mtp_layers):
        start = f"{MTP}{number}."
        for row in family.mtp[:-1]:
            yield make_pair(row, (start,), hf)
        yield from layer_pairs(
            model.kind_of(model.n_layers - 1), tuple(start + body for body in _MTP_BODIES), hf
        )
        for row in family.mtp[-1:]:
            yield make_pair(row, (start,), hf)
    yield from (make_pair(row, ("",), "") for row in family.last[1:] if row.when <= model.traits)


def _with_other_body(names: tuple[str, ...], family: Family) -> tuple[str, ...]:
    """Return the names that transformers 5 reads for names that begin with the family's body."""
    if family.body == BODY:
        return ()
    return tuple(
        BODY + name.removeprefix(family.body) for name in names if name.startswith(family.body)
    )


def _numbered(name: str, expert: int | None) -> str:
    """Fill the number of the expert into a name of the tables."""
    return name if expert is None else name.replace(EXPERT, str(expert))
