"""The paths from Hugging Face's names to Megatron's, for models and for peft adapters.

The user's changes come in two parts: those that match names before the renaming, and those that
are about Megatron's tensors (stacked layers, scales) after it.
"""

from __future__ import annotations

from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.formats.huggingface.files import CONFIG
from core.megatron.model.args import fields_of
from core.opening.open import Checkpoint
from core.verbs.convert.global_form.form import GlobalForm
from core.verbs.convert.global_form.request import FormRequest
from core.verbs.convert.global_form.steps import (
    apply_checked,
    blaming_options,
    config_after,
    drop_optimizer,
    merge_if_requested,
)
from core.verbs.convert.job import Job
from core.verbs.convert.options import check_vocabulary_size, refuse_quantizing

VOCAB_DIVISOR = 128
"""Megatron's default for ``--make-vocab-size-divisible-by``."""
_GROUPED_NOTE = (
    "the experts are grouped (start Megatron with --moe-grouped-gemm, or convert with "
    "--experts sequential)"
)


def form_as_megatron(request: FormRequest, catalog: Catalog, source: Checkpoint) -> GlobalForm:
    """Convert tensors with Hugging Face's names into Megatron's global form.

    The user's changes match Hugging Face's names; stacking and quantizing come after the renaming.

    Raises:
        UsageError: the changes leave an incomplete model, or an option has no effect on such
            weights.
    """
    from core.hf.names import composite_types, model_types
    from core.hf.optimizer.states import with_masters
    from core.hf.proof.proof import prove_model
    from core.hf.to_megatron import OptimizerTarget, to_megatron

    job = request.job
    assert request.config is not None
    check_vocabulary_size(job, request.config)
    refuse_quantizing(job, request.format)
    step = merge_if_requested(request, drop_optimizer(request, catalog), source)

    # Apply the changes that match Hugging Face's names. Master weights, which are found by these
    # names, stay as they are when the weights are cast.
    early = replace(job, stack_layers=False, unstack_layers=None, quantize=(), dtype=())
    first = apply_checked(step.catalog, early, request.config)
    casts = Job(src=job.src, dtype=job.dtype)
    cast = apply_checked(with_masters(first.catalog), casts, request.config)

    # Rename the tensors and merge them as Megatron does, by the configuration after the changes.
    config = config_after(cast.catalog, request.config)
    divisor = job.make_vocab_size_divisible_by or VOCAB_DIVISOR
    with blaming_options(job, first, "Hugging Face"):
        tabled = (*model_types(), *composite_types())
        if request.family is None and config.get("model_type") in tabled:
            prove_model(
                cast.catalog,
                config,
                files=cast.catalog.files,
                is_strict=True,
                takes_optimizer=True,
            )
        files = cast.catalog.files
        if request.config_document is not None and CONFIG not in cast.catalog.documents:
            files = {**files, CONFIG: request.config_document}
        catalog = to_megatron(
            replace(cast.catalog, files=files),
            config,
            family=request.family,
            make_vocab_size_divisible_by=divisor,
            transformer_impl=job.transformer_impl,
            optimizer=OptimizerTarget(request.format.has_common_state, source.store),
        )
    if job.experts is not None:
        from core.megatron.placement.expert_kind import with_expert_kind

        catalog = with_expert_kind(catalog, job.experts, rules=request.rules)
    elif request.format.is_rank_local and fields_of(catalog.args).get("moe_grouped_gemm"):
        # In rank files, unlike torch_dist, names depend on the module of the experts.
        catalog = catalog.noted([_GROUPED_NOTE])
    padding = (
        f"padded vocabularies are multiples of {divisor} × TP (--make-vocab-size-divisible-by)"
    )

    # Apply the changes that are about Megatron's tensors.
    late = Job(
        src=job.src,
        stack_layers=job.stack_layers,
        unstack_layers=job.unstack_layers,
        layer_axis=job.layer_axis,
        quantize=job.quantize,
    )
    second = apply_checked(catalog, late)
    notes = (*step.notes, *first.notes, *cast.notes, padding, *second.notes)
    return GlobalForm(second.catalog, first.renamed + second.renamed, notes, step.dropped)


def form_as_adapter(request: FormRequest, catalog: Catalog, source: Checkpoint) -> GlobalForm:
    """Convert an adapter of peft into the global form of Megatron's adapters.

    Raises:
        UsageError: an option has no effect on adapters.
    """
    from core.hf.adapters.to_megatron import adapter_to_megatron

    job, format = request.job, request.format
    assert request.config is not None
    refuse_quantizing(job, format)

    # Apply the changes that match peft's names, convert, and apply those about Megatron's.
    first = apply_checked(catalog, replace(job, stack_layers=False, unstack_layers=None))
    adapter = adapter_to_megatron(
        first.catalog,
        request.config,
        source.store,
        tp=1 if job.topology is None else job.topology.tp or 1,
        family=request.family,
        transformer_impl=job.transformer_impl,
    )
    late = Job(
        src=job.src,
        stack_layers=job.stack_layers,
        unstack_layers=job.unstack_layers,
        layer_axis=job.layer_axis,
    )
    second = apply_checked(adapter, late)
    return GlobalForm(
        second.catalog, first.renamed + second.renamed, (*first.notes, *second.notes), ()
    )
