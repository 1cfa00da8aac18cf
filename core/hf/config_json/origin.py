"""Keep what Megatron's arguments cannot express: the ``config.json`` that a model came from.

A model that becomes a Megatron checkpoint takes its ``config.json`` along, as text in the argument
``huggingface_config``: tokens, initialisation, dropout, names that this program does not know. No
version of Megatron reads that argument, and all of them load checkpoints that have it, in rank
files and in torch_dist. On the way back, all that the arguments do express is taken from them::

    config.json ──▶ arguments ─┬─▶ args.huggingface_config ─▶ its values, where the arguments
                               │                              mean what they meant then
                               └─▶ other arguments ─────────▶ values whose arguments have changed

Megatron saves the arguments of its own run: a checkpoint that was trained further has lost the
text, and ``--config`` supplies it.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` ``load_args_from_checkpoint``,
``check_checkpoint_args`` (both read arguments by name).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from core.errors import UnsupportedError
from core.files.json_object import parse_json_object
from core.hf.config_json.config import build_arguments, build_config
from core.hf.family import Family
from core.hf.name_tables import pairs_of
from core.hf.traits import Model, model_of
from core.hf.values import ARGUMENT, CONFIG
from core.pickle.fields import FieldReader, text_or_none
from core.values import dataclass

PASS_THIS_MODEL = (
    "pass the config.json of this model (for a pruned model, with its present sizes), or omit "
    "--config to have one created from the training arguments"
)
"""Hint for a ``config.json`` of a different model."""
_SIZES = (
    "hidden_size", "num_layers", "num_attention_heads", "num_query_groups", "kv_channels",
    "ffn_hidden_size", "num_experts", "moe_ffn_hidden_size",
)  # fmt: skip
"""Megatron's arguments for sizes, which the error about a different model names."""
_OTHER_SIZES = {"num_key_value_heads", "head_dim"}
"""Names of sizes in ``config.json`` that the families' tables do not list."""
_RESIZED = ("vocab", "positions")
"""Sizes that training may change."""
_PER_FAMILY = ("architectures", "model_type", "auto_map", "transformers_version")


@dataclass(frozen=True, slots=True)
class ConfigOrigin:
    """The ``config.json`` that a model had: its text, and the values in it.

    Args:
        is_passed: it was passed with ``--config``, so it may be that of a different model.
    """

    text: bytes
    config: Mapping[str, object]
    is_passed: bool = False

    @property
    def model_type(self) -> str | None:
        """The model type that the configuration states."""
        return text_or_none(self.config.get("model_type"))


def origin_of(fields: Mapping[str, object]) -> ConfigOrigin | None:
    """Return the ``config.json`` that a Megatron checkpoint was converted from, if it has one.

    Args:
        fields: training arguments by name.

    Raises:
        CorruptError: the argument is not the text of a JSON object.
    """
    text = fields.get(ARGUMENT)
    if text is None:
        return None
    text = FieldReader().read_text(text, f"argument {ARGUMENT}")
    return parse_origin(text.encode(), file=f"the argument {ARGUMENT}")


def parse_origin(text: bytes, *, file: str, is_passed: bool = False) -> ConfigOrigin:
    """Parse the content of a ``config.json``.

    Raises:
        CorruptError: it is not a JSON object.
    """
    return ConfigOrigin(text, parse_json_object(text, file=file), is_passed)


def choose_config_text(config: Mapping[str, object], document: bytes | None) -> str:
    """Return the text to keep of a configuration.

    Args:
        document: content of ``config.json``, if it is known; used if it contains the same values.
    """
    if document is not None and parse_json_object(document, file=CONFIG) == config:
        return document.decode()
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def restore(
    origin: ConfigOrigin,
    now: Mapping[str, object],
    *,
    fields: Mapping[str, object],
    family: Family,
    model: Model,
) -> Mapping[str, object] | None:
    """Return the configuration of a model with the values that only its origin knows.

    Args:
        origin: the configuration that the model was converted from.
        now: the configuration that the arguments express (``build_config``).
        fields: training arguments by name.
        family: family of the model.
        model: the model that the arguments describe.

    Returns:
        None if nothing differs from the origin, whose text is then still right.

    Raises:
        UnsupportedError: the configuration was passed by the user, and its sizes are not those of
            the model.
        CheckpointingException: the origin is not a configuration of a model.
    """
    if origin.model_type not in (family.model_type, *family.aliases):
        # Another family may give the same names another meaning, except to those unknown to it.
        extra = {name: value for name, value in origin.config.items() if name not in now}
        return {**{name: extra[name] for name in extra if name not in _PER_FAMILY}, **now}
    # What the arguments expressed when the model was converted, by the same functions.
    dtype = str(fields.get("params_dtype") or now["dtype"]).removeprefix("torch.")
    args = build_arguments(
        origin.config,
        family,
        dtype=dtype,
        transformer_impl=None,
        divisible_by=1,
        iteration=1,
        n_mtp=model.n_mtp,
    )
    n_rows = args["vocab_size"]
    assert isinstance(n_rows, int)
    described = model_of(args, n_rows=n_rows, n_tensors=1 << 40)
    before = build_config(args, family, described, dtype=dtype)
    if origin.is_passed:
        _refuse_different_model(family, described, model, before, now)
    if before == now:
        return None
    return _updated(origin.config, before, now)


def _refuse_different_model(
    family: Family,
    described: Model,
    model: Model,
    before: Mapping[str, object],
    now: Mapping[str, object],
) -> None:
    """Raise unless the tensors of two models have the same shapes.

    Only tensors that both have are compared, and not their rows of vocabulary and positions: the
    training arguments decide on those.

    Args:
        described, before: the model of the ``config.json`` that was passed, and what its arguments
            express of it.
        model, now: the model in the checkpoint, likewise.
    """
    resized = {name: model.sizes[name] for name in _RESIZED if name in model.sizes}
    described = replace(described, sizes={**described.sizes, **resized})
    shape_of = {pair.names[0]: pair.shape for pair in pairs_of(family, model)}
    differing = [
        f"{pair.names[0]} has shape {pair.shape} there and {shape_of[pair.names[0]]} in the "
        "checkpoint"
        for pair in pairs_of(family, described)
        if pair.shape != shape_of.get(pair.names[0], pair.shape)
    ]
    if not differing and described.n_layers == model.n_layers:
        return
    sizes = {name for argument in _SIZES for name in family.config.get(argument, ())}
    named = [
        f"{name} is {before.get(name)!r} there and {now.get(name)!r} in the checkpoint"
        for name in sorted(sizes | _OTHER_SIZES)
        if before.get(name) != now.get(name)
    ]
    raise UnsupportedError(
        f"the {CONFIG} passed with --config describes a different model: "
        f"{', '.join(named or differing[:1])}",
        hint=PASS_THIS_MODEL,
    )


def _updated(
    origin: Mapping[str, object], before: Mapping[str, object], now: Mapping[str, object]
) -> dict[str, object]:
    """Return the values of the origin, except those that differ between two configurations."""
    result = dict(origin)
    for name in sorted(before.keys() | now.keys()):
        old, new, own = before.get(name), now.get(name), origin.get(name)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping) and isinstance(own, Mapping):
            result[name] = _updated(own, old, new)
        elif name in now:
            result[name] = new
        else:
            result.pop(name, None)
    return result
