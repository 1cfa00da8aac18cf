"""``block_configs`` of ``config.json``, and the same in Megatron's arguments.

::

    DeciLM                              Megatron reads that, and has names of its own
    attention: {n_heads_in_group: 8}    attention: {num_query_groups: 4}, of 32 heads
    ffn: {ffn_mult: 2.625}              mlp: {ffn_hidden_size: 14336}, two thirds of 2.625 × 8192

Versions: files of DeciLM, whose layers are described one by one; Megatron-core 0.12 to HEAD.

Source: megatron-core 0.16.1 ``transformer/heterogeneous/heterogeneous_config.py``; configurations
that NVIDIA published (Llama-3_3-Nemotron-Super-49B-v1).

Not supported: MLPs whose inner channels are no multiple of 256, which no ``ffn_mult`` gives.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import UnsupportedError
from core.files.json_object import parse_json_object
from core.hf.values import CONFIG, IN_CONFIG, count_of
from core.megatron.model.blocks import INNER_MULTIPLE, TEXT, blocks_of
from core.pickle.fields import describe_value, mapping_or_empty

NAME = "block_configs"
_BLOCKS = {
    "attention": ("n_heads_in_group", "no_op", "replace_with_linear"),
    "ffn": ("ffn_mult", "no_op", "replace_with_linear"),
}
"""Part of a layer in ``block_configs`` → what may be said about it."""
_USUAL_ENTRIES = (("hidden_act", "silu"), ("gated", True))
"""What may be said besides, as all of Megatron's layers are so."""
_MEGATRONS = ("num_query_groups", "ffn_hidden_size")
"""Names that Megatron has for the sizes of attention and MLP."""


def block_configs(fields: Mapping[str, object]) -> list[object]:
    """Return the descriptions of all layers in the training arguments, under DeciLM's names.

    Args:
        fields: training arguments by name.

    Raises:
        CorruptError: a layer is malformed.
        UnsupportedError: no factor expresses the size of an MLP.
    """
    layers = parse_json_object(str(fields.get(TEXT)).encode(), file=f"the argument {TEXT}")[NAME]
    blocks = blocks_of(fields)
    assert isinstance(layers, list) and blocks is not None  # blocks_of has checked the text
    result: list[object] = []
    for number, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        attention, mlp = layer["attention"], layer.get("ffn") or layer["mlp"]
        if "num_query_groups" in attention:
            heads = count_of(fields, "num_attention_heads")
            size = None if block.n_groups is None else heads // block.n_groups
            attention = {**attention, "n_heads_in_group": size}
        if "ffn_hidden_size" in mlp:
            size, hidden = block.n_inner, count_of(fields, "hidden_size")
            if size is not None and size % INNER_MULTIPLE:
                raise UnsupportedError(
                    f"layer {number} has an MLP with {size} inner channels, but {NAME} in {CONFIG} "
                    f"stores the size as a factor, which allows only multiples of {INNER_MULTIPLE}"
                )
            factor = None if size is None else 3 * size / (2 * hidden)
            mlp = {**mlp, "ffn_mult": factor}
        others = {key: value for key, value in layer.items() if key != "mlp"}
        result.append({**others, "attention": _own(attention), "ffn": _own(mlp)})
    return result


def _own(block: Mapping[str, object]) -> dict[str, object]:
    """Return the description of attention or MLP without Megatron's own names."""
    return {name: value for name, value in block.items() if name not in _MEGATRONS}


def check_blocks(name: str, value: object) -> None:
    """Raise unless every layer is described by what Megatron builds.

    Args:
        name, value: an entry of ``config.json``.

    Raises:
        CorruptError: it is no list of descriptions.
        UnsupportedError: a layer has something that Megatron does not build.
    """
    if not isinstance(value, list) or not value:
        raise IN_CONFIG.build_error(value, name, "a list of layer descriptions")
    for number, layer in enumerate(value):
        for part, names in _BLOCKS.items():
            entries = mapping_or_empty(mapping_or_empty(layer).get(part))
            for entry_name, entry in entries.items():
                if entry_name not in names and entry and (entry_name, entry) not in _USUAL_ENTRIES:
                    raise UnsupportedError(
                        f"{entry_name} of layer {number} is {describe_value(entry)}, which "
                        "Megatron layers do not support",
                        file=CONFIG,
                    )
