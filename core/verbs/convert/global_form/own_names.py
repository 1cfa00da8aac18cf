"""The path that keeps a source's family of names: the user's changes, and checks of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import MegatronModel
from core.errors import CheckpointingException, UsageError
from core.verbs.convert.global_form.form import GlobalForm
from core.verbs.convert.global_form.request import FormRequest
from core.verbs.convert.global_form.steps import (
    GlobalStep,
    apply_checked,
    blaming_options,
    config_after,
)
from core.verbs.convert.options import has_model_form, refuse_broken_optimizer

if TYPE_CHECKING:
    from core.megatron.rules.rules import Rules


def form_with_own_names(request: FormRequest, step: GlobalStep) -> GlobalForm:
    """Apply the user's changes to a source that keeps its family of names, and check the result.

    Raises:
        UsageError: the changes leave an incomplete model, or an optimizer that does not fit its
            parameters.
    """
    job, format, before = request.job, request.format, step.catalog
    result = apply_checked(before, job, request.config)
    notes = [*step.notes, *result.notes]

    # A Hugging Face model that is written as such must fit its configuration.
    if request.comes_from_hf and (request.names == "hf" or job.config is not None):
        from core.hf.proof.proof import prove_model

        assert request.config is not None
        config = config_after(result.catalog, request.config)
        with blaming_options(job, result, "Hugging Face"):
            notes += prove_model(
                result.catalog,
                config,
                files=before.files,
                is_strict=job.config is not None,
                takes_optimizer=not format.carries_files,
            )
    if format.carries_files:
        notes += result.config_notes

    # A Megatron model must be complete, and its optimizer must fit its parameters.
    if has_model_form(job, format):
        is_global = before.facet(MegatronModel) is not None
        if (is_global or before.common is not None) and not result.renamed:
            refuse_broken_optimizer(before, result.catalog)
        if is_global and (result.excluded or result.renamed):
            _refuse_incomplete(result.catalog, request.rules)
    catalog = result.catalog
    if format.keeps_nesting:
        from core.engine.changes.lightning_file import as_trainer_file

        catalog = as_trainer_file(catalog)
    return GlobalForm(catalog, result.renamed, tuple(notes), step.dropped)


def _refuse_incomplete(catalog: Catalog, rules: Rules) -> None:
    """Raise if the user's changes leave a Megatron model that could not be loaded.

    Raises:
        UsageError: the model is incomplete; the message names the missing tensors.
    """
    from core.megatron.model.args import parse_facts
    from core.megatron.model.checks import check_complete

    try:
        facts = parse_facts(catalog.args, names=rules.model_of(catalog.tensors))
        check_complete(catalog.tensors, facts, rules)
    except (CheckpointingException, ValueError) as err:
        message = err.message if isinstance(err, CheckpointingException) else str(err)
        raise UsageError(
            f"--include, --exclude or --rename leave an incomplete Megatron model: {message}",
            key=getattr(err, "key", None),
            hint="to write only part of the model, use --to dcp or --to torch",
        ) from err
