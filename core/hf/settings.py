"""Convert single values between ``config.json`` and Megatron's arguments.

``[settings]`` of a table lists those that are neither the same number on both sides nor a switch,
each with the way in which it is converted:

======================  ===========================  ===============================================
way                     config.json                  argument
======================  ===========================  ===============================================
``number``, ``text``    the same                     the same; None if it is null
``numbers``             a list of numbers            a tuple of them
``window``              W, the keys that a query     ``window_size`` (W - 1, 0), the keys before and
                        sees                         after its own
``window_layers``       ``layer_types``, one name    ``window_attn_skip_freq``, 1 for a layer with a
                        per layer                    window and 0 for one without
``positions``           ``layer_types``: only        ``no_rope_freq``, 1 for a layer without rotary
                        layers with a window rotate  embeddings and 0 for one with them
``rotated_layers``      ``no_rope_layers``, 1 for a  ``no_rope_freq``, the other way round
                        layer that rotates
``linear_layers``       ``layer_types``, one name    ``linear_attention_freq``, n if every n-th
                        per layer                    layer has full attention; else 1 for a layer
                                                     with linear attention and 0 for another one
``inverse_root``        x                            ``softmax_scale`` 1 / √x
``flag``                the same                     true or false
``gelu``                name of a GELU, tanh or      ``bias_gelu_fusion``: true for tanh, which
                        exact                        Megatron's fused bias-GELU uses
``one_group``           ``multi_query``              ``num_query_groups``: 1 if it is true, else the
                                                     number of query heads
``blocks``              ``block_configs``, one       ``heterogeneous_layers_config_encoded_json``,
                        description per layer        the text of a ``config.json`` with them
``indexers``            ``indexer_types``, one name  ``dsa_indexer_topk_freq``: every n-th layer has
                        per layer                    an indexer of its own
``first_indexers``      the same                     ``dsa_indexer_skip_topk_offset``, the number of
                                                     layers at the beginning that all have one
``pattern``             ``layers_block_type`` or     ``hybrid_override_pattern``, one symbol per
                        ``num_hidden_layers``        layer (``core.hf.config_json.hybrid``)
======================  ===========================  ===============================================

Source: transformers 5.23.0 ``masking_utils.py``, ``configuration_utils.py``; megatron-core 0.16.1
``transformer/utils.py`` ``is_layer_window_attention``, ``get_sliding_window_causal_mask``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from core.errors import CorruptError, UnsupportedError
from core.hf.values import CONFIG, IN_CONFIG, count_of
from core.pickle.fields import FieldReader, describe_value
from core.values import dataclass

WAYS = (
    "number",
    "text",
    "numbers",
    "window",
    "window_layers",
    "positions",
    "rotated_layers",
    "linear_layers",
    "inverse_root",
    "flag",
    "gelu",
    "blocks",
    "one_group",
    "pattern",
    "indexers",
    "first_indexers",
)
_TYPES = {"sliding_attention": 1, "full_attention": 0}
"""Entry of ``layer_types`` → whether the layer has a window."""
_EXACT_GELU = "gelu"
_GELUS = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu_fast": True, _EXACT_GELU: False}
"""Name of a GELU → whether it is the tanh approximation."""
_GELU_ARGUMENT = "bias_gelu_fusion"
_ATTENTION = {"linear_attention": 1, "full_attention": 0}
"""Entry of ``layer_types`` → whether the layer has linear attention."""
_INDEXERS = {"F": "full", "S": "shared"}
"""Letter of ``index_topk_pattern`` → entry of ``indexer_types``."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of ``config.json`` and the way in which it becomes an argument.

    Args:
        name: its name in ``config.json``.
        way: one of ``WAYS``.
        every: number of layers after which one without a window, or without linear attention,
            follows, where ``config.json`` does not list them.
        written: the name of the tanh GELU that is written; all of them are read.
    """

    name: str
    way: str
    every: int | None = None
    written: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless the way exists and has what it needs."""
        if self.way not in WAYS:
            raise ValueError(f"the setting {self.name!r} has the unknown way {self.way!r}")
        if self.way == "gelu" and not _GELUS.get(str(self.written)):
            raise ValueError(f"the setting {self.name!r} must name a tanh GELU in `written`")


def gelu_notes(settings: Mapping[str, Setting], fields: Mapping[str, object]) -> list[str]:
    """Return a note on the option of Megatron that a model's GELU needs.

    Args:
        settings: those of the model's family.
        fields: all training arguments by name.

    Returns:
        One note; none if the family has no such setting.
    """
    setting = settings.get(_GELU_ARGUMENT)
    if setting is None:
        return []
    name = setting_value(setting, fields.get(_GELU_ARGUMENT), fields, n_layers=1)
    if _GELUS[str(name)]:
        note = (
            "the model uses the tanh approximation of GELU, as Megatron's fused bias-GELU does, so "
            "run Megatron without --no-bias-gelu-fusion"
        )
    else:
        note = (
            "the model uses exact GELU, but Megatron's fused bias-GELU uses the tanh "
            "approximation, so run Megatron with --no-bias-gelu-fusion"
        )
    return [note]


def setting_argument(setting: Setting, config: Mapping[str, object], *, n_layers: int) -> object:
    """Return the argument for a setting; None if the configuration has none.

    Raises:
        CorruptError: the value is malformed.
        UnsupportedError: Megatron has no such layers.
    """
    value = config.get(setting.name)
    if setting.way in ("window_layers", "positions"):
        # Without a window, all layers are the same.
        if config.get("sliding_window") is None:
            return None
        windows = _windows(setting, config, n_layers)
        return windows if setting.way == "window_layers" else [1 - window for window in windows]
    if setting.way == "rotated_layers":
        rotated = _rotated_layers(setting, config, n_layers)
        return None if all(rotated) else [1 - rotates for rotates in rotated]
    if setting.way == "pattern":
        return config["hybrid_override_pattern"]
    if setting.way == "linear_layers":
        interval = count_of(config, "full_attention_interval", default=setting.every)
        if config.get(setting.name) is None:
            return interval
        linear = _listed_types(config, _ATTENTION, n_layers)
        # Megatron's own number if it describes the layers, of which one alone may be full.
        first = linear.index(0) + 1 if 0 in linear else max(interval, n_layers + 1)
        return first if linear == [int(bool((n + 1) % first)) for n in range(n_layers)] else linear
    if setting.way in ("indexers", "first_indexers"):
        every, n_first = _indexer_frequency(setting, config, n_layers)
        return every if setting.way == "indexers" else n_first
    if setting.way == "blocks":
        from core.hf.block_configs import check_blocks

        check_blocks(setting.name, value)
        # Megatron's training script compares other values of the text with its arguments.
        return json.dumps(dict(config), sort_keys=True)
    if setting.way == "gelu":
        if value not in _GELUS:
            raise UnsupportedError(
                f"{setting.name} is {describe_value(value)}, but only "
                f"{' and '.join(map(repr, _GELUS))} are supported",
                file=CONFIG,
            )
        return _GELUS[str(value)]
    if value is None:
        return None
    if setting.way == "flag":
        return bool(value)
    if setting.way == "one_group":
        return 1 if value else None
    if setting.way == "window":
        return (count_of(config, setting.name) - 1, 0)
    if setting.way == "text":
        return str(value)
    if setting.way == "numbers":
        return tuple(_numbers(setting.name, value))
    number = FieldReader().read_number(value, setting.name)
    if setting.way == "number":
        return value
    if number <= 0:
        raise CorruptError(f"{setting.name} is {value!r}, not a positive number", file=CONFIG)
    return 1 / math.sqrt(number)


def setting_value(
    setting: Setting, argument: object, fields: Mapping[str, object], *, n_layers: int
) -> object:
    """Return the value of ``config.json`` for an argument, the inverse of ``setting_argument``.

    Args:
        argument: the argument's value; None if it is not set.
        fields: all training arguments by name.

    Raises:
        UnsupportedError: transformers has no such layers.
        CorruptError: the argument is malformed.
    """
    from core.megatron.model.args import find_layers_without_indexer, linear_layers

    window = fields.get("window_size")
    if setting.way in ("window_layers", "positions"):
        return _layer_types(setting, argument, has_window=window is not None, n_layers=n_layers)
    if setting.way == "rotated_layers":
        types = _layer_types(setting, argument, has_window=True, n_layers=n_layers)
        return [int(kind == "sliding_attention") for kind in types]
    if setting.way == "blocks":
        from core.hf.block_configs import block_configs

        return block_configs(fields)
    if setting.way == "flag":
        return bool(argument)
    if setting.way == "gelu":
        # Megatron's fused one is its default.
        return setting.written if argument is None or argument else _EXACT_GELU
    if setting.way == "one_group":
        heads = count_of(fields, "num_attention_heads")
        groups = count_of(fields, "num_query_groups", default=heads)
        if groups not in (1, heads) and fields.get("group_query_attention"):
            raise UnsupportedError(
                f"num_query_groups is {groups}, but transformers supports only 1 or {heads} (one "
                "for each query head)"
            )
        return bool(fields.get("group_query_attention")) and groups == 1
    if setting.way in ("indexers", "first_indexers"):
        unindexed = find_layers_without_indexer(fields, n_layers)
        return ["shared" if layer in unindexed else "full" for layer in range(n_layers)]
    if setting.way == "linear_layers":
        linear = linear_layers(fields, n_layers)
        return [
            "linear_attention" if layer in linear else "full_attention" for layer in range(n_layers)
        ]
    if argument is None:
        return None
    if setting.way == "window":
        before, after = argument if isinstance(argument, (tuple, list)) else (argument, None)
        if type(before) is not int or before < 0 or after != 0:
            raise UnsupportedError(
                f"window_size is {describe_value(argument)}, but transformers supports only "
                "windows that end at the query, (keys, 0)"
            )
        return before + 1
    if setting.way == "text":
        return str(argument)
    if setting.way == "numbers":
        return _numbers(setting.name, argument)
    number = FieldReader().read_number(argument, setting.name)
    if setting.way == "number":
        return argument
    # 1 / √x is rounded, so that its inverse is an integer only almost.
    inverse = 1 / number**2 if number > 0 else 0
    nearest = round(inverse)
    return nearest if math.isclose(inverse, nearest, rel_tol=1e-12) else inverse


def _windows(setting: Setting, config: Mapping[str, object], n_layers: int) -> list[int]:
    """Return a 1 for each layer with a window, and a 0 for each other layer.

    Raises:
        CorruptError: ``layer_types`` is not a list of the types of all layers.
        UnsupportedError: a layer has another type.
    """
    if config.get("layer_types") is None and config.get("max_window_layers") is not None:
        # So many layers at the beginning have no window.
        n_full = count_of(config, "max_window_layers", least=0)
        return [int(layer >= n_full) for layer in range(n_layers)]
    if config.get("layer_types") is None:
        # Older configurations state that every n-th layer has no window.
        every = config.get("sliding_window_pattern", setting.every)
        if isinstance(every, str):  # such as LLLG
            every = len(every)
        every = IN_CONFIG.read_int(every, "sliding_window_pattern", least=1)
        return [int(bool((layer + 1) % every)) for layer in range(n_layers)]
    return _listed_types(config, _TYPES, n_layers)


def _listed_types(
    config: Mapping[str, object], kinds: Mapping[str, int], n_layers: int
) -> list[int]:
    """Return the number of each layer's type in ``layer_types``.

    Args:
        kinds: number of every type that a layer may have.

    Raises:
        CorruptError: ``layer_types`` is not a list of the types of all layers.
        UnsupportedError: a layer has another type.
    """
    expected = f"a list of {n_layers} types"
    types = IN_CONFIG.read_list(
        config.get("layer_types"), "layer_types", n=n_layers, expected=expected
    )
    for kind in types:
        if kind not in kinds:
            raise UnsupportedError(
                f"layers of type {str(kind)[:80]!r} are not supported", file=CONFIG
            )
    return [kinds[str(kind)] for kind in types]


def indexer_types(
    config: Mapping[str, object], n_layers: int, *, name: str = "indexer_types"
) -> list[str]:
    """Return ``full`` for each layer with an indexer, and ``shared`` for each other layer.

    Args:
        config: has a list, a text with a letter for each layer (``index_topk_pattern``), a number
            (``index_topk_freq``, ``index_skip_topk_offset``), or nothing: every layer has one.
        name: name of the list.

    Raises:
        CorruptError: the configuration is malformed.
    """
    types, pattern = config.get(name), config.get("index_topk_pattern")
    if types is None and pattern is None:
        every = max(count_of(config, "index_topk_freq", default=1, least=0), 1)
        offset = count_of(config, "index_skip_topk_offset", default=2, least=0)
        return [
            "shared" if max(layer + 1 - offset, 0) % every else "full" for layer in range(n_layers)
        ]
    if types is None and isinstance(pattern, str):
        types = [_INDEXERS.get(letter, letter) for letter in pattern]
    elif types is None:
        types = pattern
    return IN_CONFIG.read_choices(types, name, _INDEXERS.values(), least=n_layers)[:n_layers]


def _indexer_frequency(
    setting: Setting, config: Mapping[str, object], n_layers: int
) -> tuple[int, int]:
    """Return ``dsa_indexer_topk_freq`` and ``dsa_indexer_skip_topk_offset``.

    Raises:
        CorruptError: the configuration is malformed.
        UnsupportedError: the layers with an indexer follow no such rule.
    """
    from core.megatron.model.args import find_layers_without_indexer

    full = [kind == "full" for kind in indexer_types(config, n_layers, name=setting.name)]
    if all(full):
        return 1, 0
    n_first = full.index(False)
    next_full = full.index(True, n_first) if True in full[n_first:] else max(n_layers, n_first + 2)
    every = next_full - n_first + 1
    fields = {"dsa_indexer_topk_freq": every, "dsa_indexer_skip_topk_offset": n_first}
    unindexed = find_layers_without_indexer(fields, n_layers)
    if n_first == 0 or full != [layer not in unindexed for layer in range(n_layers)]:
        raise UnsupportedError(
            f"the layers with their own indexer ({setting.name}) must be the first layers and then "
            "layers at regular intervals, as in Megatron",
            file=CONFIG,
        )
    return every, n_first


def _rotated_layers(setting: Setting, config: Mapping[str, object], n_layers: int) -> list[int]:
    """Return a 1 for each layer with rotary embeddings, and a 0 for each other layer.

    Raises:
        CorruptError: the setting is not a list of zeros and ones.
    """
    rotated = config.get(setting.name)
    if rotated is None:
        every = count_of(config, "no_rope_layer_interval", default=setting.every)
        return [int(bool((layer + 1) % every)) for layer in range(n_layers)]
    return [*map(int, IN_CONFIG.read_choices(rotated, setting.name, (0, 1), n=n_layers))]


def _layer_types(
    setting: Setting, argument: object, *, has_window: bool, n_layers: int
) -> list[str]:
    """Return the types of the layers for ``window_attn_skip_freq`` or ``no_rope_freq``."""
    # A number n means that every n-th layer is the exception.
    is_exception: list[object]
    name = f"{setting.way} of the layers"
    if argument is None:
        is_exception = [False] * n_layers
    elif isinstance(argument, list):
        exception = int(setting.way != "window_layers")
        entries = FieldReader().read_choices(argument, name, (0, 1), n=n_layers)
        is_exception = [entry == exception for entry in entries]
    else:
        every = FieldReader().read_int(argument, name, least=1)
        is_exception = [not (layer + 1) % every for layer in range(n_layers)]
    return [
        "full_attention" if not has_window or exception else "sliding_attention"
        for exception in is_exception
    ]


def _numbers(name: str, value: object) -> list[float]:
    """Return a list of finite numbers.

    Raises:
        CorruptError: it is none.
    """
    fields = FieldReader()
    items = fields.read_list(value, name, expected="a list of numbers")
    return [float(fields.read_number(item, name)) for item in items]
