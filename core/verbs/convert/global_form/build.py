"""Convert the source of a job into global tensors under their final names.

::

    rank files, stacked keys ── unshard ── changes ──┬──────────────▶ Megatron's global form
                                                     └── hf.to_hf ──▶ Hugging Face names
    torchtitan's names ── hf.torchtitan ──▶ Hugging Face names
    Hugging Face names ── changes ──┬── hf.to_megatron ──▶ Megatron's global form
                                    └────────────────────▶ Hugging Face names
    anything else ── changes ──▶ the names it had

The job and the kind of source determine the path. Options that would have no effect are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.engine.catalog.dropped import ADAPTER_CONFIG, UNREAD, dropped_together
from core.engine.catalog.facets import MegatronModel, WeightDeltas
from core.engine.catalog.tensor import without_ties
from core.errors import NoEffectError, UnsupportedError
from core.formats.format import Format
from core.formats.torch.object_tensors import with_array_tensors
from core.opening.config_beside import lacks_arguments
from core.opening.objects import loaded
from core.opening.open import Checkpoint
from core.opening.source_files import documents_above, unread_files
from core.verbs.convert.global_form.form import GlobalForm
from core.verbs.convert.global_form.own_names import form_with_own_names
from core.verbs.convert.global_form.refusals import refuse_contradictions
from core.verbs.convert.global_form.request import (
    FormRequest,
    config_document,
    load_job_rules,
    parse_names,
    read_config,
    read_param_order,
)
from core.verbs.convert.global_form.steps import GlobalStep
from core.verbs.convert.global_form.unsharded import unshard_if_needed
from core.verbs.convert.job import Job
from core.verbs.convert.report.training_state import without_training_state
from core.verbs.convert.sizes import check_source_sizes


def global_form(
    job: Job, source: Checkpoint, format: Format, others: Sequence[Checkpoint] = ()
) -> GlobalForm:
    """Convert a source into global tensors under their final names, and apply the user's changes.

    Args:
        job: the conversion.
        source: the opened source.
        format: the format of the destination.
        others: the other sources of a merge, which share the source's store.

    Raises:
        CheckpointingException: the source is damaged or incomplete, or an option contradicts the
            source or the destination.
    """
    for checkpoint in (source, *others):
        deltas = checkpoint.catalog.facet(WeightDeltas)
        if deltas is not None:
            raise UnsupportedError(
                f"the files contain {deltas.title}",
                file=str(checkpoint.path),
                hint=f"apply them to a checkpoint of version {deltas.base_version} first, as the "
                "rollout engine does (SGLang's /pull_weights), and convert the result",
            )
    # Read the source, and refuse options that do not fit it.
    request, step = _describe_source(job, source, format, others)
    refuse_contradictions(request, step.catalog)
    if request.is_restacked:  # to_torch_dist does it, after the user's other changes
        request = replace(
            request, job=replace(request.job, stack_layers=False, unstack_layers=None)
        )

    # Float8 weights of Transformer Engine are computed rank by rank: each has a scale of its own.
    if job.dequantize is not None:
        from core.engine.changes.quantize import parse_dequantized_type
        from core.megatron.extras.float8_weights import dequantize_rank_weights

        dtype = parse_dequantized_type(job.dequantize).name
        dequantized = dequantize_rank_weights(step.catalog, dtype)
        if dequantized.n:
            note = f"{dequantized.n} Transformer Engine float8 tensors are dequantized to {dtype}"
            step = replace(step, catalog=dequantized.catalog, notes=(note,))
            request = replace(request, job=replace(request.job, dequantize=None))

    # Take one of the paths of the picture above.
    if request.becomes_megatron:
        from core.verbs.convert.global_form.as_megatron import form_as_adapter, form_as_megatron

        build = form_as_adapter if request.is_peft else form_as_megatron
        form = build(request, step.catalog, source)
    elif request.becomes_hf:
        from core.verbs.convert.global_form.as_hf import form_as_hf

        form = form_as_hf(request, unshard_if_needed(request, step.catalog, source))
    else:
        form = form_with_own_names(request, unshard_if_needed(request, step.catalog, source))

    # One tensor may get several names of the other model (the adapter of a fused QKV): each of them
    # is then stored by itself.
    catalog = form.catalog
    if request.becomes_megatron or request.becomes_hf:
        catalog = replace(catalog, tensors=without_ties(catalog.tensors))
    model = catalog.facet(MegatronModel)
    if model is not None and model.wrapper is not None:
        from core.megatron.model.cut import without_unused_wrapper

        catalog = without_unused_wrapper(catalog, request.rules)
    return replace(
        form,
        catalog=catalog,
        notes=(*step.notes, *form.notes),
        dropped=(*step.dropped, *form.dropped),
    )


def _describe_source(
    job: Job, source: Checkpoint, format: Format, others: Sequence[Checkpoint]
) -> tuple[FormRequest, GlobalStep]:
    """Read what decides how the global form of a source is built.

    Returns:
        The facts, and the source with its objects loaded and the record of what is not read.

    Raises:
        CheckpointingException: as for ``global_form``.
    """
    # Read the objects.
    without_state = without_training_state(source.catalog, job, format)
    catalog = loaded(without_state.catalog, source.store)
    catalog = replace(catalog, files={**catalog.files, **documents_above(source)})
    if not (format.has_live_objects or format.keeps_unknown_classes):
        catalog = with_array_tensors(catalog, source.store)
    if job.param_order is not None:
        from core.opening.numbered_optimizers import with_parameter_names

        if job.optim == "drop":
            raise NoEffectError(("param_order",), "the optimizer is left out")
        catalog = with_parameter_names(catalog, source.store, read_param_order(job.param_order))

    # Check the options that do not depend on names, and find files that nobody reads.
    if job.rules is not None:
        load_job_rules(job)  # a file with an error is refused, whether or not its rules are needed
    names, model_type = parse_names(job)
    check_source_sizes(job, catalog)
    unread = dropped_together(unread_files(replace(source, catalog=catalog)), UNREAD)

    # Read the configuration that describes the model.
    is_described = job.config is not None and lacks_arguments(catalog)
    catalog, config = read_config(job, catalog, source)
    if job.text_model:
        from core.hf.text_model import text_model_of

        text = text_model_of(catalog, config)
        catalog, config = text.catalog, text.config
    if config is not None and (names is not None or format.has_layout):
        from core.hf.torchtitan import from_torchtitan, is_torchtitan

        if is_torchtitan(catalog):
            has_no_optimizer = job.optim == "drop" or (job.optim is None and format.carries_files)
            catalog = from_torchtitan(catalog, config, has_no_optimizer=has_no_optimizer)
    family = None
    if job.family is not None:
        from core.hf.family import read_family

        family = read_family(job.family)

    # Tell whose names the tensors have.
    comes_from_hf = is_adapter = False
    if config is not None:
        from core.hf.names import is_hf

        comes_from_hf = is_hf(catalog, config)
    if source.store.exists(ADAPTER_CONFIG):
        from core.hf.adapters.peft import is_peft

        is_adapter = is_peft(catalog, source.store)
    request = FormRequest(
        job=job,
        format=format,
        names=names,
        model_type=model_type,
        config=config,
        config_document=config_document(catalog, source),
        family=family,
        is_described=is_described,
        comes_from_hf=comes_from_hf,
        is_peft=is_adapter,
        is_restacked=format.has_common_state and job.stacking is not None,
        others=tuple(others),
    )
    if job.optim is None and request.writes_hf:  # nobody expects an optimizer there
        request = replace(request, job=replace(job, optim="drop"))
    return request, GlobalStep(catalog, dropped=(*without_state.dropped, *unread))
