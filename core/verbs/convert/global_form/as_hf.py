"""The path from Megatron's global form to Hugging Face's names, for models and for adapters."""

from __future__ import annotations

from dataclasses import replace

from core.errors import UnsupportedError
from core.megatron.optimizer.target_groups import with_named_groups
from core.verbs.convert.global_form.form import GlobalForm
from core.verbs.convert.global_form.request import FormRequest
from core.verbs.convert.global_form.steps import GlobalStep, apply_checked, blaming_options
from core.verbs.convert.job import Job


def form_as_hf(request: FormRequest, step: GlobalStep) -> GlobalForm:
    """Convert Megatron's global form into tensors with Hugging Face's names.

    The user's changes match Megatron's names; only quantizing comes after the renaming, because
    scales are named after the new names.

    Raises:
        UsageError: the changes leave an incomplete model.
        UnsupportedError: a model of megatron.legacy.
    """
    from core.hf.to_hf import to_hf
    from core.megatron.placement.adapter_rows import is_adapter

    job = request.job
    first = apply_checked(step.catalog, replace(job, quantize=()))
    if is_adapter(first.catalog):
        from core.hf.adapters.to_peft import adapter_to_peft

        peft = adapter_to_peft(
            first.catalog,
            model_type=request.model_type,
            family=request.family,
            config=None if job.config is None else request.config_document,
        )
        return GlobalForm(peft, first.renamed, (*step.notes, *first.notes), step.dropped)
    if request.rules.model_of(first.catalog.tensors).kind.is_legacy:
        raise UnsupportedError(
            "the tensors have megatron.legacy names, which have no Hugging Face equivalents",
            hint="keep the names: --to safetensors",
        )
    with blaming_options(job, first, "Megatron"):
        catalog = to_hf(
            with_named_groups(first.catalog, request.rules),
            model_type=request.model_type,
            family=request.family,
            config=None if job.config is None else request.config_document,
            has_config=request.format.carries_files,
        )
    second = apply_checked(catalog, Job(src=job.src, quantize=job.quantize))
    notes = (*step.notes, *first.notes, *second.notes)
    return GlobalForm(second.catalog, first.renamed + second.renamed, notes, step.dropped)
