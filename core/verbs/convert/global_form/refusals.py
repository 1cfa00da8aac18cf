"""Refusals of options that contradict the source or the destination, or would have no effect.

All are raised before anything is renamed or unsharded, except for names that no rule matches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.errors import NoEffect, NoEffectError, UnsupportedError, UsageError, refuse_without_effect
from core.formats.huggingface.files import CONFIG
from core.verbs.convert.global_form.request import FormRequest
from core.verbs.convert.options import (
    changes_layout,
    check_target_names,
    has_model_form,
    list_format_rows,
)

if TYPE_CHECKING:
    from core.megatron.rules.rules import Rules


def refuse_contradictions(request: FormRequest, catalog: Catalog) -> None:
    """Raise if options contradict the source's names or the destination, or would have no effect.

    Raises:
        UsageError: an option contradicts the source or the destination.
        UnsupportedError: the source has Megatron's names, but no training arguments.
    """
    job, format = request.job, request.format
    is_named = request.comes_from_hf or request.has_megatron_model(catalog)

    # --config describes a model with Hugging Face's names; other sources do not need it.
    takes_config = request.comes_from_hf or request.is_described or _is_origin(request, catalog)
    if job.config is not None and not takes_config:
        _refuse_config(request, catalog)

    # The names to write must suit the source's names and the destination.
    check_target_names(
        job,
        request.names,
        request.model_type,
        format,
        request.config if request.comes_from_hf else None,
    )
    if request.names == "megatron" and not is_named and not catalog.is_rank_local:
        refuse_without_arguments(catalog, request.rules)
        option = "--names megatron" if job.names is not None else f"--to {job.to}"
        raise UsageError(
            f"{option}: the tensors have neither Megatron's names "
            f"nor Hugging Face's names with a {CONFIG}",
            hint=f"pass the model's {CONFIG} with --config FILE",
        )

    becomes_megatron = request.becomes_megatron
    table = (
        NoEffect(
            ("family",),
            not (request.becomes_hf or becomes_megatron),
            "the tensors keep their names",
            "omit it, or rename the tensors with --names hf or --names megatron",
        ),
        *list_format_rows(job, format, is_named=is_named),
        NoEffect(("rng",), request.comes_from_hf, "Hugging Face checkpoints have no random states"),
        NoEffect(
            ("make_vocab_size_divisible_by",),
            not becomes_megatron,
            "the conversion is not from Hugging Face to Megatron",
            "omit it; a Megatron checkpoint keeps its own value",
        ),
        NoEffect(
            ("vocab_size", "keep_padded_vocab", "make_vocab_size_divisible_by", "experts"),
            becomes_megatron and request.is_peft,
            "the source is an adapter",
        ),
        NoEffect(
            ("keep_padded_vocab",), becomes_megatron, "Hugging Face weights have no padding rows"
        ),
        NoEffect(
            ("transformer_impl", "experts"),
            not (becomes_megatron or has_model_form(job, format)),
            f"{format.name} does not store Megatron modules",
            "use it with --to megatron or --to torch_dist",
        ),
    )
    refuse_without_effect(job.given_options, table)


def _is_origin(request: FormRequest, catalog: Catalog) -> bool:
    """Return whether ``--config`` is the configuration that a Megatron source came from.

    Formats that cannot store it need it for the names of towers only.
    """
    config = request.config
    return (
        request.becomes_hf
        and (request.writes_hf or _has_towers(catalog, request.rules))
        and config is not None
        and isinstance(config.get("model_type"), str)
        and (catalog.is_rank_local or request.has_megatron_model(catalog))
    )


def _has_towers(catalog: Catalog, rules: Rules) -> bool:
    """Return whether a catalog has tensors of towers, under any prefix."""
    starts = [f".{start}" for wrapper in rules.wrappers for start in wrapper.towers]
    return any(start in f".{key}" for key in catalog.tensors for start in starts)


def _refuse_config(request: FormRequest, catalog: Catalog) -> NoReturn:
    """Raise because ``--config`` was given for a source that is not a Hugging Face model.

    Raises:
        UsageError: the file is not a model's configuration, or the source does not need one.
        UnsupportedError: the source needs training arguments, which a configuration cannot replace.
    """
    config = request.config
    if config is None or not isinstance(config.get("model_type"), str):
        raise UsageError(
            "--config: the file has no model_type, so it does not describe a transformers model",
            file=str(request.job.config),
            hint="pass the model's config.json",
        )
    if not catalog.is_rank_local and not request.has_megatron_model(catalog):
        refuse_without_arguments(catalog, request.rules)
    raise NoEffectError(("config",), "a Megatron checkpoint has its own training arguments")


def refuse_names(request: FormRequest, catalog: Catalog) -> NoReturn:
    """Raise because tensors with unknown names can neither be renamed nor cut by a layout.

    Raises:
        UnsupportedError: always.
    """
    from core.engine.catalog.wrapped_model import model_options

    first = next((key for key in catalog.tensors if not is_optimizer_key(key)), "")
    goal, formats = (
        ("renamed to Hugging Face's names", "safetensors")
        if request.becomes_hf
        else (
            f"written as {request.format.name} with a parallel layout",
            "torch_dist, dcp or torch",
        )
    )
    if changes_layout(request.job):
        # Sizes need the names, so that leaving them is another command than that of ``reshard``.
        keeping = f"keep the names and the layout: ckpt convert SRC DST --to {formats}"
    else:
        keeping = f"keep the names: --to {formats}"
    options = model_options(catalog, takes_submodule=True)
    hint = f"pass the model's {CONFIG} with --config FILE, or {keeping}"
    if request.is_peft:
        hint = (
            f"for a peft adapter, pass its base model's {CONFIG} with --config FILE, or "
            "fold the adapter into the base: ckpt merge BASE -o DST --lora SRC"
        )
    if options is not None:
        hint = f"to write only the model with its {CONFIG}, add {options} --config {CONFIG}"
    raise UnsupportedError(
        f"the tensors ({first!r} …) cannot be {goal}: they have neither Megatron's names and "
        f"training arguments nor Hugging Face's names and a {CONFIG}",
        hint=hint,
    )


def refuse_without_arguments(catalog: Catalog, rules: Rules) -> None:
    """Raise if the tensors have Megatron's names, but no training arguments describe the model.

    Raises:
        UnsupportedError: the tensors have Megatron's names.
    """
    from core.megatron.rules.prefixes import has_megatron_names

    if has_megatron_names(catalog, rules):
        raise UnsupportedError(
            "the tensors have Megatron's names, but the checkpoint has no training arguments "
            "(args), which describe the model and its layout",
            hint=f"pass the matching Hugging Face model's {CONFIG} with --config FILE, or keep "
            "the names: --to safetensors, dcp or torch",
        )
