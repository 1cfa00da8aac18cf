"""Read ``hf/tables``: the tensor names of Hugging Face and Megatron, by family.

A family's rules, with the sizes and traits of a model (``core.hf.traits``), become ``Pair``s: one
tensor of the global Megatron form and the Hugging Face tensors that it consists of.
``hf/tables/llama.toml`` explains the fields.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from core.arrays.box import Shape
from core.errors import UnsupportedError, UsageError, did_you_mean
from core.hf.traits import Model

LAYERS = "decoder.layers."
MTP = "mtp.layers."
_MTP_BODIES = ("transformer_layer.", "mtp_model_layer.")
_EXPERT = "{expert}"


@dataclass(frozen=True, slots=True)
class NameRow:
    """One rule of a table; ``hf/tables/llama.toml`` explains the fields."""

    megatron: str
    fused: str | None
    also: tuple[str, ...]
    hf: tuple[str, ...]
    hf_also: tuple[str, ...]
    stacked: str | None
    shape: tuple[str, ...]
    fuse: str | None
    when: frozenset[str]
    tied: str | None
    twin: str | None
    source: str

    @property
    def is_of_expert(self) -> bool:
        """True if every expert has a tensor of this row."""
        return _EXPERT in self.megatron


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What ``config.json`` calls the settings of experts; ``hf/tables/llama.toml`` explains them.

    Args:
        dense: names that say which layers have no experts.
        shared: names whose product is the size of the shared experts.
        normalized: name that says whether the weights of a token's experts sum up to 1.
        scaling: name of the factor of the experts' output.
        groups: names of the number of groups, and of the number that a token may use.
        method: name that says how experts are chosen, where a family has several ways.
        ranked_by: number of experts whose scores rank a group.
    """

    dense: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    normalized: str | None = None
    scaling: str | None = None
    groups: tuple[str, ...] = ()
    method: str | None = None
    ranked_by: int = 2


@dataclass(frozen=True, slots=True)
class Family:
    """The table of one family; ``hf/tables/llama.toml`` explains the fields."""

    model_type: str
    aliases: tuple[str, ...]
    architecture: str
    requires: frozenset[str]
    allows: frozenset[str]
    ignored: tuple[re.Pattern[str], ...]
    absent: tuple[str, ...]
    defaults: Mapping[str, object]
    config: Mapping[str, tuple[str, ...]]
    switches: Mapping[str, str]
    experts: ExpertNames
    fixed_args: Mapping[str, object]
    fixed_config: Mapping[str, object]
    first: tuple[NameRow, ...]
    layer: tuple[NameRow, ...]
    mtp: tuple[NameRow, ...]
    last: tuple[NameRow, ...]

    def misfits(self, features: frozenset[str]) -> list[str]:
        """Return the features that only the model or only the family has.

        Returns:
            [] if the model is of this family.
        """
        return sorted((features - self.requires - self.allows) | (self.requires - features))


@dataclass(frozen=True, slots=True)
class FamilyPart:
    """A Hugging Face tensor.

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
            (``core.hf.fuse.interleave_by_group``).
        stack: (key, index, number of entries) of a tensor that may contain it as an entry of its
            first axis; or None.
        copies: tensors that may repeat its values; read, never written.
        twins: tensors that repeat its values; read and written.
    """

    names: tuple[str, ...]
    parts: tuple[FamilyPart, ...]
    n_groups: int = 1
    stack: tuple[str, int, int] | None = None
    copies: tuple[str, ...] = ()
    twins: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        """The shape of Megatron's tensor, in elements."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


def pairs_of(family: Family, model: Model) -> Iterator[Pair]:
    """Yield every tensor of a model, in the order of Megatron's rank files."""
    sizes = model.sizes
    mtp_layers = [f"model.layers.{model.n_layers + number}." for number in range(model.n_mtp)]

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
            parts=tuple(
                FamilyPart(
                    (
                        hf + _numbered(name, expert),
                        *(hf + other for other in row.hf_also[number : number + 1]),
                    ),
                    tuple(sizes[size] for size in row.shape[number].split()),
                )
                for number, name in enumerate(row.hf)
            ),
            n_groups=model.n_groups if row.fuse == "qkv" else 1,
            stack=None
            if row.stacked is None or expert is None
            else (hf + row.stacked, expert, model.n_experts),
            copies=() if row.tied is None or "tied" not in model.traits else (row.tied,),
            twins=twins,
        )

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
        yield from layer_pairs(
            model.kind_of(number), (f"{LAYERS}{number}.",), f"model.layers.{number}."
        )
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


def _numbered(name: str, expert: int | None) -> str:
    """Fill the number of the expert into a name of the tables."""
    return name if expert is None else name.replace(_EXPERT, str(expert))


@cache
def families() -> Mapping[str, Family]:
    """Return every supported family by its ``model_type``."""
    items = sorted(files("core.hf").joinpath("tables").iterdir(), key=lambda item: item.name)
    texts = (item.read_text(encoding="utf-8") for item in items if item.name.endswith(".toml"))
    parsed = (_parse_family(tomllib.loads(text)) for text in texts)
    return {family.model_type: family for family in parsed}


def family_of(model_type: object) -> Family:
    """Return the family of a model type.

    Raises:
        UnsupportedError: the model type is not supported.
    """
    for name, family in families().items():
        if model_type == name or model_type in family.aliases:
            return family
    raise UnsupportedError(
        f"models of type {str(model_type)[:80]!r} are not supported",
        hint=f"supported: {', '.join(families())}",
    )


def family_called(model_type: str) -> Family:
    """Return the family of a model type that a user named.

    Raises:
        UsageError: the model type is not supported.
    """
    try:
        return family_of(model_type)
    except UnsupportedError as err:
        names = [
            name for family in families().values() for name in (family.model_type, *family.aliases)
        ]
        raise UsageError(err.message, hint=did_you_mean(model_type, names) or err.hint) from None


def _parse_family(table: Mapping[str, Any]) -> Family:
    """Build the family from a table."""

    def rows(name: str) -> tuple[NameRow, ...]:
        return tuple(map(_parse_row, table.get(name, ())))

    return Family(
        model_type=table["model_type"],
        aliases=tuple(table["aliases"]),
        architecture=table["architecture"],
        requires=frozenset(table["requires"]),
        allows=frozenset(table["allows"]),
        ignored=tuple(map(re.compile, table["ignored"])),
        absent=tuple(table["absent"]),
        defaults=table.get("defaults", {}),
        config={name: _texts(value) for name, value in table["config"].items()},
        switches=table.get("switches", {}),
        experts=_parse_experts(table.get("experts", {})),
        fixed_args=table["fixed"]["args"],
        fixed_config=table["fixed"]["config"],
        first=rows("first"),
        layer=rows("layer"),
        mtp=rows("mtp"),
        last=rows("last"),
    )


def _parse_experts(table: Mapping[str, Any]) -> ExpertNames:
    """Build the names for experts from a table's section."""
    lists = {name: _texts(table[name]) for name in ("dense", "shared", "groups") if name in table}
    return ExpertNames(**{**table, **lists})


def _parse_row(row: Mapping[str, Any]) -> NameRow:
    """Build a rule from an entry of a table.

    Raises:
        ValueError: the entry is malformed, which only an edited package can cause.
    """
    unknown = set(row) - set(NameRow.__slots__)
    if unknown:
        raise ValueError(f"a row of hf/tables has unknown fields: {sorted(unknown)}")
    result = NameRow(
        megatron=row["megatron"],
        fused=row.get("fused"),
        also=_texts(row.get("also", ())),
        hf=_texts(row["hf"]),
        hf_also=_texts(row.get("hf_also", ())),
        stacked=row.get("stacked"),
        shape=_texts(row["shape"]),
        fuse=row.get("fuse"),
        when=frozenset(row.get("when", ())),
        tied=row.get("tied"),
        twin=row.get("twin"),
        source=row["source"],
    )
    if len(result.hf) != len(result.shape) or (result.fuse is None) != (len(result.hf) == 1):
        raise ValueError(f"the row of {result.megatron} does not match its parts")
    return result


def _texts(value: object) -> tuple[str, ...]:
    """Return a string or a list of strings as a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(str(item) for item in value)  # type: ignore[attr-defined]
