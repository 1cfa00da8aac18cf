"""The source with its names: unsharded if the job changes its layout or its names.

::

    rank files, stacked keys ── unshard ── merge ── random states ── experts, implementation
    anything else ── merge
"""

from __future__ import annotations

from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import MegatronModel
from core.errors import NoEffect, refuse_without_effect
from core.formats.format import Format
from core.opening.open import Checkpoint
from core.verbs.convert.global_form.refusals import refuse_names, refuse_without_arguments
from core.verbs.convert.global_form.request import FormRequest
from core.verbs.convert.global_form.steps import GlobalStep, drop_optimizer, merge_if_requested
from core.verbs.convert.options import (
    changes_layout,
    cuts_experts,
    has_model_form,
    refuse_quantizing,
)

_LAYOUT_OPTIONS = (
    "vocab_size",
    "keep_padded_vocab",
    "rules",
    "unknown",
    "rng",
    "transformer_impl",
    "megatron_version",
    "experts",
)
"""Options that concern a parallel layout."""


def unshard_if_needed(request: FormRequest, catalog: Catalog, source: Checkpoint) -> GlobalStep:
    """Convert a Megatron source into its global form if the job changes its layout or names.

    Any other source keeps its form; only its optimizer is dropped if the job requests it.

    Raises:
        UsageError: an option has no effect on this source or destination.
        UnsupportedError: no rule matches the tensors' names.
    """
    job, format = request.job, request.format

    # Without a change of layout or names the tensors stay as they are.
    is_renamed = request.becomes_hf or request.is_restacked
    if not (is_renamed or _needs_global_form(request, catalog, source.format)):
        unchanged = NoEffect(_LAYOUT_OPTIONS, True, "the parallel layout does not change")
        refuse_without_effect(job.given_options, [unchanged])
        step = merge_if_requested(request, drop_optimizer(request, catalog), source)
        if not format.has_common_state or step.catalog.common is None:
            return step
        from core.megatron.optimizer.sharded.write import sharding_of, wanted_sharding

        form, other_form = sharding_of(step.catalog), wanted_sharding(format.name)
        if form in (None, other_form):
            return step
        note = (
            f"the optimizer state stays {form}, which Megatron loads only at the same parallel "
            f"sizes, if at all; to rewrite it as {other_form}, add --tp-new or --pp-new (the "
            "current size is fine)"
        )
        return replace(step, notes=(note,))

    from core.megatron.extras.random_states import with_rng
    from core.megatron.reshard.unshard import unshard
    from core.verbs.convert.sizes import target_topology

    # Unshard; names that no rule matches can neither be renamed nor cut.
    rules = request.rules
    if not catalog.is_rank_local and not request.has_megatron_model(catalog):
        refuse_without_arguments(catalog, rules)
        refuse_names(request, catalog)
    refuse_quantizing(job, format)
    keeps_optimizer = format.has_named_optimizer or not request.becomes_hf
    catalog = unshard(
        catalog,
        rules=rules,
        vocab_size=job.vocab_size,
        optim="drop" if job.optim == "drop" else "refuse" if not keeps_optimizer else "carry",
        keep_padded_vocab=job.keep_padded_vocab,
        # The sources of a merge may be padded differently; without padding they have one shape.
        target_tp=target_topology(job, catalog, format).tp
        if has_model_form(job, format) and not request.others
        else None,
        store=source.store,
    )
    step = merge_if_requested(request, _record_run_facts(request, catalog, source), source)

    # Handle the random states, and rename the parameters to those of another implementation.
    catalog = with_rng(
        step.catalog, job.rng, has_place=format.has_layout, has_ranks=format.is_rank_local
    )
    if has_model_form(job, format):
        from core.megatron.placement.expert_kind import with_expert_kind

        catalog = with_expert_kind(
            catalog, job.experts, rules=rules, implementation=job.transformer_impl
        )
    if job.transformer_impl is not None:
        from core.megatron.placement.implementation import with_implementation

        catalog = with_implementation(catalog, job.transformer_impl, rules=rules)
    return replace(step, catalog=catalog)


def _needs_global_form(request: FormRequest, catalog: Catalog, own: Format) -> bool:
    """Return True if the destination needs a source of format ``own`` in the global form."""
    job, format = request.job, request.format
    if catalog.is_rank_local or format.is_rank_local:
        return True
    if changes_layout(job) and not cuts_experts(job, format):
        return True
    if not request.has_megatron_model(catalog):
        return False
    if request.others:  # whose layouts may be different
        return True
    if request.names == "megatron" or job.transformer_impl is not None or job.experts is not None:
        return True
    if not format.has_common_state:
        return False
    if catalog.common is None:
        return True
    from core.megatron.optimizer.sharded.write import sharding_of
    from core.megatron.rules.prefixes import OUTER_PREFIXES, prefix_of

    # Megatron's training script does not load NeMo's names, which begin with "module.".
    if prefix_of(catalog, request.rules).startswith(OUTER_PREFIXES):
        return True
    # Each of Megatron's formats has its own form of distributed optimizers.
    return job.optim != "drop" and format is not own and sharding_of(catalog) is not None


def _record_run_facts(request: FormRequest, catalog: Catalog, source: Checkpoint) -> GlobalStep:
    """Add the directory's iteration and the options' vocabulary size to the global form."""
    from core.megatron.model.args import with_vocab_size

    job = request.job
    notes = []
    # Some files have their iteration only in the name of their directory (iter_0000010).
    if catalog.iteration is None and source.iteration is not None:
        notes.append(
            "the files do not record the iteration, so ckpt uses "
            f"{source.iteration} from the directory name"
        )
        catalog = replace(catalog, iteration=source.iteration)
    # Record the true number of vocabulary rows, so that later conversions need no option for it.
    model = catalog.facet(MegatronModel)
    n_rows = None if model is None else model.vocab_size
    if (job.vocab_size is not None or job.keep_padded_vocab) and n_rows is not None:
        args = with_vocab_size(catalog.args, n_rows)
        catalog = replace(catalog, args=args, common={**(catalog.common or {}), "args": args})
        notes.append(f"args.vocab_size is now {n_rows}")
    # A cast changes the tensors only: Megatron decides by its own arguments what it trains in.
    if any(glob is None for glob, _ in job.dtype) and not request.becomes_hf:
        notes.append("params_dtype, bf16 and fp16 in the training arguments are unchanged")
    return GlobalStep(catalog, tuple(notes))
