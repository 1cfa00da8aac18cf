"""Read ``models.toml``: the composite models whose towers Megatron has, and their names."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from core.hf.values import count_of
from core.pickle.inert import as_mapping


@dataclass(frozen=True, slots=True)
class TowerTensor:
    """A tensor of a tower: its names in Megatron and in transformers.

    Args:
        is_transposed: rows and columns are exchanged between the two.
    """

    megatron: str
    hf: str
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Tower:
    """A tower; ``models.toml`` explains the fields."""

    megatron: str
    hf: tuple[str, ...]
    beside: tuple[str, ...]
    stack: str | None
    layer: tuple[str, ...]
    depth: tuple[str, str, int] | None
    optional: frozenset[str]

    def names(self, config: Mapping[str, object]) -> Iterator[str]:
        """Yield the names of the tensors that every such tower has, after its beginning.

        Args:
            config: parsed ``config.json`` of the complete model.

        Raises:
            CorruptError: the number of layers is not a positive integer.
        """
        yield from self.beside
        if self.depth is not None:
            part, name, default = self.depth
            n_layers = count_of(as_mapping_of_names(config.get(part)), name, default=default)
            for number in range(n_layers):
                yield from (f"{self.stack}{number}.{sub}" for sub in self.layer)


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
    tensors: tuple[TowerTensor, ...]
    extra_states: tuple[str, ...]
    checked: str


def as_mapping_of_names(value: object) -> Mapping[str, object]:
    """Return the entries of a section of ``config.json``; {} if it is none."""
    return {str(name): item for name, item in (as_mapping(value) or {}).items()}


@cache
def composite_models() -> Mapping[str, CompositeModel]:
    """Return every composite model by its ``model_type``."""
    return {row["model_type"]: _parse_model(row) for row in _table()["model"]}


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
    return tomllib.loads(files("core.hf.towers").joinpath("models.toml").read_text("utf-8"))


def _parse_model(row: Mapping[str, Any]) -> CompositeModel:
    """Build a model from its entry in the table."""
    return CompositeModel(
        model_type=row["model_type"],
        name=row["name"],
        architecture=row["architecture"],
        builder=row["builder"],
        wrapper=row["wrapper"],
        text=row["text"],
        towers=tuple(
            Tower(
                megatron=item["megatron"],
                hf=tuple(item["hf"]),
                beside=tuple(item["beside"]),
                stack=item.get("stack"),
                layer=tuple(item.get("layer", ())),
                depth=tuple(item["depth"]) if "depth" in item else None,
                optional=frozenset(item.get("optional", ())),
            )
            for item in row["tower"]
        ),
        text_defaults=row.get("text_defaults", {}),
        tensors=tuple(
            TowerTensor(item["megatron"], item["hf"], item.get("transposed", False))
            for item in row.get("tensor", ())
        ),
        extra_states=tuple(row.get("extra_states", ())),
        checked=row["checked"],
    )
