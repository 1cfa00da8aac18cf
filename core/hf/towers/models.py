"""Read ``models.toml``: the composite models whose towers Megatron has, and their names."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from core.hf.values import count_of
from core.pickle.fields import mapping_or_empty
from core.values import dataclass

LAYER = "{layer}"
"""Stands for the number of the layer in a Hugging Face name."""


@dataclass(frozen=True, slots=True)
class TowerTensor:
    """A tensor of a tower in Megatron, and the tensors of transformers that it consists of.

    Args:
        megatron: Megatron's name.
        hf: name in transformers, with ``LAYER`` if Megatron has all layers in one tensor.
        n_layers: number of entries of its first axis, one per layer; None if it is a single tensor.
        is_transposed: rows and columns are exchanged between the two.
        n_heads: rows are those of queries, keys and values, which Megatron has head by head; None
            for all other tensors.
        is_optional: only some models have it.
        has_extra_state: it is a parameter of a module of Megatron, which may save extra states.
    """

    megatron: str
    hf: str
    n_layers: int | None = None
    is_transposed: bool = False
    n_heads: int | None = None
    is_optional: bool = False
    has_extra_state: bool = False

    def names(self) -> Iterator[str]:
        """Yield the names in transformers, one per layer."""
        if self.n_layers is None:
            yield self.hf
        else:
            yield from (self.hf.replace(LAYER, str(number)) for number in range(self.n_layers))


@dataclass(frozen=True, slots=True)
class TowerLayers:
    """Layers of a tower that are alike; ``models.toml`` explains the fields."""

    hf: str
    megatron: str
    depth: tuple[str, str, int]
    layer: Mapping[str, str]
    is_stacked: bool


@dataclass(frozen=True, slots=True)
class Tower:
    """A tower; ``models.toml`` explains the fields."""

    megatron: str
    hf: tuple[str, ...]
    beside: Mapping[str, str]
    layers: tuple[TowerLayers, ...]
    optional: Mapping[str, str]
    transposed: frozenset[str]
    heads: tuple[str, str, int] | None
    by_head: frozenset[str]
    has_extra_states: bool

    def tensors(self, config: Mapping[str, object], start: str) -> Iterator[TowerTensor]:
        """Yield the tensors of the tower of a model.

        Args:
            config: parsed ``config.json`` of the complete model.
            start: beginning of the names in transformers.

        Raises:
            CorruptError: a number of layers or heads is not a positive integer.
        """
        n_heads = None if self.heads is None else _count_in(config, self.heads)
        for hf, megatron in (*self.beside.items(), *self.optional.items()):
            yield TowerTensor(
                self.megatron + megatron,
                start + hf,
                is_transposed=hf in self.transposed,
                is_optional=hf in self.optional,
                has_extra_state=self.has_extra_states,
            )
        for layers in self.layers:
            n_layers = _count_in(config, layers.depth)
            numbers = (LAYER,) if layers.is_stacked else map(str, range(n_layers))
            for number in numbers:
                for hf, megatron in layers.layer.items():
                    place = "" if layers.is_stacked else f"{number}."
                    yield TowerTensor(
                        f"{self.megatron}{layers.megatron}{place}{megatron}",
                        f"{start}{layers.hf}{number}.{hf}",
                        n_layers=n_layers if layers.is_stacked else None,
                        n_heads=n_heads if hf in self.by_head else None,
                        has_extra_state=self.has_extra_states,
                    )


@dataclass(frozen=True, slots=True)
class CompositeModel:
    """A model of a text model and towers; ``models.toml`` explains the fields."""

    model_type: str
    name: str
    architecture: str
    builder: str
    wrapper: str
    text: Mapping[str, str]
    towers: tuple[Tower, ...]
    text_defaults: Mapping[str, object]
    has_expert_stacks: bool
    extra_states: tuple[str, ...]
    not_built: tuple[str, ...]
    checked: str


@cache
def composite_models() -> Mapping[str, CompositeModel]:
    """Return every composite model by its ``model_type``."""
    rows = {row["model_type"]: row for row in _table()["model"]}
    return {model_type: _parse_model(row, rows) for model_type, row in rows.items()}


@cache
def refused_composites() -> Mapping[str, str]:
    """Return the model types whose towers are not carried, each with the reason."""
    return {
        model_type: reason
        for reason, model_types in _table()["refused"].items()
        for model_type in model_types
    }


def _table() -> dict[str, Any]:
    """Return the content of ``models.toml``."""
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text("utf-8"))


def _parse_model(row: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> CompositeModel:
    """Build a model from its entry in the table, and from that of another which has its towers."""
    towers = row.get("tower", ())
    if "towers_of" in row:
        towers = rows[row["towers_of"]]["tower"]
    return CompositeModel(
        model_type=row["model_type"],
        name=row["name"],
        architecture=row["architecture"],
        builder=row["builder"],
        wrapper=row["wrapper"],
        text=row["text"],
        towers=tuple(
            _parse_tower(item) for item in towers if item["megatron"] not in row.get("without", ())
        ),
        text_defaults=row.get("text_defaults", {}),
        has_expert_stacks=row.get("expert_stacks", False),
        extra_states=tuple(row.get("extra_states", ())),
        not_built=tuple(row.get("not_built", ())),
        checked=row["checked"],
    )


def _parse_tower(item: Mapping[str, Any]) -> Tower:
    """Build a tower from its entry in the table."""
    return Tower(
        megatron=item["megatron"],
        hf=tuple(item["hf"]),
        beside=_parse_names(item["beside"]),
        layers=tuple(
            TowerLayers(
                hf=layers["hf"],
                megatron=layers.get("megatron", layers["hf"]),
                depth=tuple(layers["depth"]),
                layer=_parse_names(layers["layer"]),
                is_stacked=layers.get("stacked", False),
            )
            for layers in item.get("layers", ())
        ),
        optional=_parse_names(item.get("optional", ())),
        transposed=frozenset(item.get("transposed", ())),
        heads=tuple(item["heads"]) if "heads" in item else None,
        by_head=frozenset(item.get("by_head", ())),
        has_extra_states=item.get("extra_states", False),
    )


def _parse_names(names: Mapping[str, str] | Sequence[str]) -> Mapping[str, str]:
    """Return names in transformers → in Megatron; a list has names that are the same in both."""
    return dict(names) if isinstance(names, Mapping) else {name: name for name in names}


def _count_in(config: Mapping[str, object], place: tuple[str, str, int]) -> int:
    """Return a number of ``config.json``, or the length of a list there.

    Args:
        place: section, name, and the number that holds if there is none.

    Raises:
        CorruptError: the value is neither a positive integer nor a list.
    """
    section, name, default = place
    values = mapping_or_empty(config.get(section))
    value = values.get(name)
    if isinstance(value, list):
        return len(value)
    return count_of(values, name, default=default)
