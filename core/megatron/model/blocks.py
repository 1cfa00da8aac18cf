"""Heterogeneous models: what each layer consists of, as a JSON text in the arguments states it.

::

    {"block_configs": [
        {"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 2.625}},
        {"attention": {"no_op": true}, "ffn": {"replace_with_linear": true}}, …]}

Attention and MLP of a layer are each the usual one (with a number of query groups and of inner
channels of the layer's own), one linear, or nothing. torch_dist has a key for every layer, and the
norm before a linear is a part of it there::

    input_layernorm.weight    self_attention.layer_norm_weight   one linear in place of attention
    pre_mlp_layernorm.weight  mlp.layer_norm_weight              one linear in place of the MLP

Layers of Step-3.5 with a window have another number of attention heads than the others
(``window_layers_of``).

Source: megatron-core 0.16.1 ``transformer/heterogeneous/``,
``models/gpt/heterogeneous/heterogeneous_layer_specs.py``; Megatron-LM d98e8a64
``training/arguments.py`` (the text is always among the arguments of a run); Megatron-Bridge
067f987d ``models/stepfun/step35_provider.py``.

Not supported: attention without a number of query groups of its own, and MLPs without a number of
inner channels: torch_dist has other names for their norms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from core.errors import CorruptError, UnsupportedError
from core.files.json_object import parse_json_object
from core.pickle.fields import FieldReader, describe_value
from core.values import dataclass

TEXT = "heterogeneous_layers_config_encoded_json"
"""Argument with the JSON text."""
INNER_MULTIPLE = 256
"""The inner channels that a factor (``ffn_mult``) gives are a multiple of it."""
WINDOWS = "sliding_attention_setting"
_PATH = "heterogeneous_layers_config_path"
_LAYER = re.compile(r"\.layers\.(\d+)\.")

Kind = Literal["usual", "linear", "none"]


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The attention and the MLP of one layer of a heterogeneous model.

    Args:
        attention, mlp: ``usual``, ``linear`` (one linear in its place) or ``none``.
        n_groups: number of query groups of usual attention; None for another one.
        n_inner: inner channels of a usual MLP; None for another one, and where they are unknown.
    """

    attention: Kind
    mlp: Kind
    n_groups: int | None
    n_inner: int | None = None

    @property
    def kind(self) -> tuple[Kind, Kind]:
        """The kinds of attention and MLP, which decide the parameters of the layer."""
        return self.attention, self.mlp

    def linear_norm_names(self) -> list[tuple[str, str]]:
        """Return (local, in torch_dist) beginnings of the names of norms before linears."""
        names = []
        if self.attention == "linear":
            names.append(("input_layernorm.", "self_attention.layer_norm_"))
        if self.mlp == "linear":
            names.append(("pre_mlp_layernorm.", "mlp.layer_norm_"))
        return names


def blocks_of(fields: Mapping[str, object]) -> tuple[LayerBlocks, ...] | None:
    """Return the blocks of each layer; None if the model is not heterogeneous.

    Raises:
        CorruptError: the JSON text is malformed, or describes another number of layers than
            ``num_layers``.
        UnsupportedError: only the path of the JSON file is known, or a layer lacks a size.
    """
    text = fields.get(TEXT)
    if text in (None, ""):
        if fields.get(_PATH) in (None, ""):
            return None
        raise UnsupportedError(
            "the layers are heterogeneous, but the arguments contain only the path of their "
            f"description ({_PATH}), not its content ({TEXT})",
            hint="use a checkpoint that Megatron's training script saved",
        )
    text = FieldReader().read_text(text, f"argument {TEXT}")
    items = parse_json_object(text.encode(), file=f"the argument {TEXT}").get("block_configs")
    if not isinstance(items, list):
        raise CorruptError(f"argument {TEXT} has no list named block_configs")
    n_heads, n_layers = fields.get("num_attention_heads"), fields.get("num_layers")
    if len(items) != n_layers:
        raise CorruptError(f"argument {TEXT} has {len(items)} layers, but num_layers is {n_layers}")
    hidden = fields.get("hidden_size")
    return tuple(_parse_layer(number, item, n_heads, hidden) for number, item in enumerate(items))


def _parse_layer(number: int, item: object, n_heads: object, hidden: object) -> LayerBlocks:
    """Return what a layer consists of, from its entry of ``block_configs``.

    Args:
        n_heads: number of attention heads of every layer.
        hidden: channels of the residual stream, or None.

    Raises:
        CorruptError: the entry is malformed.
        UnsupportedError: usual attention or a usual MLP lacks a size of its own.
    """
    parts = item if isinstance(item, Mapping) else {}
    attention, mlp = parts.get("attention"), parts.get("ffn") or parts.get("mlp")
    if not isinstance(attention, Mapping) or not isinstance(mlp, Mapping):
        raise CorruptError(f"layer {number} in argument {TEXT} has no attention or no ffn entry")
    kinds = (_kind_of(attention), _kind_of(mlp))
    n_groups = attention.get("num_query_groups")
    per_group = attention.get("n_heads_in_group")
    if n_groups is None and type(per_group) is int and per_group > 0 and type(n_heads) is int:
        n_groups = n_heads // per_group
    has_size = mlp.get("ffn_hidden_size", mlp.get("ffn_mult")) is not None
    if (kinds[0] == "usual" and n_groups is None) or (kinds[1] == "usual" and not has_size):
        raise UnsupportedError(
            f"layer {number} has no {'num_query_groups' if has_size else 'ffn_hidden_size'} in "
            f"argument {TEXT}, so the names of its norms are unknown"
        )
    n_inner = _n_inner(mlp, hidden) if kinds[1] == "usual" else None
    if kinds[0] != "usual":
        return LayerBlocks(*kinds, None, n_inner)
    if type(n_groups) is not int or n_groups < 1 or type(n_heads) is not int or n_heads % n_groups:
        raise CorruptError(
            f"layer {number} in argument {TEXT} has {n_groups!r} query groups, which do not evenly "
            f"divide its {n_heads} heads"
        )
    return LayerBlocks(*kinds, n_groups, n_inner)


def _n_inner(mlp: Mapping[object, object], hidden: object) -> int | None:
    """Return the inner channels of a usual MLP; None if they do not follow from its entry."""
    size, factor = mlp.get("ffn_hidden_size"), mlp.get("ffn_mult")
    if type(size) is int:
        return size
    if not isinstance(factor, (int, float)) or type(hidden) is not int:
        return None
    # heterogeneous_config.py: two thirds of it, for the gate, up to a multiple of 256.
    return -(-int(2 * factor * hidden / 3) // INNER_MULTIPLE) * INNER_MULTIPLE


def _kind_of(block: Mapping[object, object]) -> Kind:
    """Return the kind of attention or MLP."""
    if block.get("no_op"):
        return "none"
    return "linear" if block.get("replace_with_linear") else "usual"


@dataclass(frozen=True, slots=True)
class WindowLayers:
    """The layers with a window in a model where these have attention heads of their own.

    Args:
        layers: their numbers, those of multi-token prediction counted on from the decoder's.
        n_keys: number of keys that a query sees, its own among them.
        n_heads, n_groups, head_dim: number of their heads, of groups that share keys and values,
            and of channels of one head.
    """

    layers: frozenset[int]
    n_keys: int
    n_heads: int
    n_groups: int
    head_dim: int


def window_layers_of(fields: Mapping[str, object]) -> WindowLayers | None:
    """Return the layers with a window and their heads; None if no argument describes them.

    Raises:
        CorruptError: ``sliding_attention_setting`` or ``layer_types`` is malformed.
    """
    setting, types = fields.get(WINDOWS), fields.get("layer_types")
    if setting is None:
        return None
    n_layers = fields.get("num_layers")
    if not isinstance(types, list) or not isinstance(n_layers, int) or len(types) < n_layers:
        raise CorruptError(f"argument layer_types does not list {n_layers} layers")
    window = setting.get("window_size") if isinstance(setting, Mapping) else None
    if not isinstance(setting, Mapping) or not isinstance(window, (list, tuple)):
        raise CorruptError(f"argument {WINDOWS} has no window_size")
    keys_before, *keys_after = window
    sizes = [setting.get(n) for n in ("num_attention_heads", "num_query_groups", "kv_channels")]
    numbers = [size for size in (keys_before, *sizes) if type(size) is int]
    if len(numbers) < 4 or keys_after != [0] or keys_before < 0 or min(numbers[1:]) < 1:
        raise CorruptError(f"argument {WINDOWS} is {describe_value(setting)}, which is malformed")
    _, n_heads, n_groups, head_dim = numbers
    if n_heads % n_groups:
        raise CorruptError(
            f"argument {WINDOWS} has {n_groups} query groups, which do not evenly divide its "
            f"{n_heads} heads"
        )
    layers = frozenset(n for n, kind in enumerate(types) if kind == "sliding_attention")
    return WindowLayers(layers, keys_before + 1, n_heads, n_groups, head_dim)


def layer_number(name: str) -> int | None:
    """Return the number of the layer in a tensor's global name."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])
