"""Find the tensors that the towers of a composite model lack, by the names in ``models.toml``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from core.hf.text_model import thinking_part
from core.hf.towers.models import CompositeModel, composite_models


def find_missing_hf_tensors(names: Collection[str], config: Mapping[str, object]) -> Iterator[str]:
    """Yield the names of tensors that ``config.json`` requires of towers and a model lacks.

    Another class than the complete model may lack towers, and so may a model whose towers have
    other names than the table's: both are not checked.

    Args:
        names: names of all tensors.
        config: parsed ``config.json``.

    Raises:
        CorruptError: a number of layers in it is not a positive integer.
    """
    model = composite_models().get(str(config.get("model_type")))
    if model is None or config.get("architectures") != [model.architecture]:
        return
    starts: dict[str, str] = {}
    for tower in model.towers:
        for start in tower.hf:
            if tower.megatron not in starts and any(name.startswith(start) for name in names):
                starts[tower.megatron] = start
    if not starts:
        return
    part = thinking_part(config)
    for tower in model.towers:
        for tensor in tower.tensors(part, starts.get(tower.megatron, tower.hf[0])):
            if not tensor.is_optional:
                yield from (name for name in tensor.names() if name not in names)


def find_missing_megatron_tensors(
    names: Collection[str], config: Mapping[str, object] | None
) -> Iterator[str]:
    """Yield the names of tensors that the towers of a model of Megatron-Bridge lack.

    Args:
        names: names of the tensors of its towers.
        config: parsed ``config.json`` of the complete model. None finds the model by the names, as
            the one of the table that has them all and the fewest others; then only layers before
            the last one can be missing.

    Raises:
        CorruptError: a number of layers in ``config`` is not a positive integer.
    """
    model = None if config is None else composite_models().get(str(config.get("model_type")))
    if config is not None and model is not None:
        yield from _missing(model, names, thinking_part(config))
        return
    lacks: list[list[str]] = []
    for model in composite_models().values():
        sizes = _sizes_in(model, names)
        tensors = {tensor.megatron for tower in model.towers for tensor in tower.tensors(sizes, "")}
        if tensors.issuperset(names):
            lacks.append(list(_missing(model, names, sizes)))
    yield from min(lacks, key=len, default=[])


def _missing(
    model: CompositeModel, names: Collection[str], config: Mapping[str, object]
) -> Iterator[str]:
    """Yield Megatron's names of the tensors that towers require and a model lacks."""
    for tower in model.towers:
        for tensor in tower.tensors(config, ""):
            if tensor.megatron not in names and not tensor.is_optional:
                yield tensor.megatron


def _sizes_in(model: CompositeModel, names: Collection[str]) -> dict[str, dict[str, int]]:
    """Return the numbers of layers that Megatron's names show, where ``config.json`` has them."""
    sizes: dict[str, dict[str, int]] = {}
    for tower in model.towers:
        for layers in tower.layers:
            number = re.compile(re.escape(tower.megatron + layers.megatron) + r"(\d{1,3})\.")
            numbers = (int(match[1]) for match in map(number.match, names) if match is not None)
            section, name, _ = layers.depth
            sizes.setdefault(section, {})[name] = max(numbers, default=0) + 1
    return sizes
