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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from core.catalog.catalog import Catalog
from core.catalog.facets import HuggingFaceModel, MegatronModel
from core.catalog.files_beside import carried_of, with_documents
from core.catalog.optimizer_keys import NOT_IN_HF
from core.changes.lightning_file import as_trainer_file
from core.changes.select import is_optimizer_key, without_optimizer
from core.convert.apply_changes import ChangedCatalog, apply_changes
from core.convert.job import Job
from core.convert.options import (
    HF_ALIASES,
    changes_layout,
    check_names,
    check_target,
    check_vocabulary,
    has_model_form,
    is_cut,
    refuse_broken_optimizer,
    refuse_layout_options,
    refuse_quantizing,
    writes_fsdp_dtensor,
)
from core.convert.report.dropped import DroppedEntries, unread_entries
from core.convert.report.lightning import model_options
from core.convert.report.training_state import without_training_state
from core.convert.sizes import check_source_sizes, target_topology
from core.errors import CheckpointingException, MissingShardError, UnsupportedError, UsageError
from core.files.json_object import parse_json_object
from core.files.store import translate_os_errors
from core.formats.format import Format
from core.formats.huggingface.files import CONFIG, config_document_of
from core.formats.torch.format import load_object, refuse_unsupported
from core.formats.trainer.proven_names import MODEL, ParameterOrder, parse_order
from core.formats.trainer.proven_names import OPTION as PARAM_ORDER
from core.megatron.extras.random_states import with_rng
from core.megatron.model.args import facts_of, with_vocab_size
from core.megatron.model.checks import check_complete
from core.megatron.optimizer.named_groups import with_named_groups
from core.megatron.optimizer.sharded.write import sharding_of, wanted_sharding
from core.megatron.placement.expert_kind import with_expert_kind
from core.megatron.placement.implementation import with_implementation
from core.megatron.reshard.from_global import has_megatron_names
from core.megatron.reshard.reshard import Rules, is_megatron, load_rules, unshard
from core.megatron.rules.experts import OPTION as EXPERTS
from core.merge.forms import FormOptions
from core.merge.sources import merge_others
from core.opening.numbered_optimizers import with_parameter_names
from core.opening.objects import loaded
from core.opening.open import Checkpoint
from core.opening.source_files import config_of_source, documents_above, unread_files

if TYPE_CHECKING:
    from core.hf import Family


@dataclass(frozen=True, slots=True)
class GlobalForm:
    """Source of a job, ready to be cut and laid out.

    Args:
        catalog: global tensors under their final names, all objects loaded.
        renamed: (old key, new key) of each entry that the user's options renamed.
        notes: notes for the user.
        dropped: entries that are not carried over, with the reasons.
    """

    catalog: Catalog
    renamed: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    dropped: tuple[DroppedEntries, ...]


def is_model_form(catalog: Catalog) -> bool:
    """Return True if a table of rules built the catalog: Megatron's form or Hugging Face's."""
    return catalog.facet(MegatronModel) is not None or catalog.facet(HuggingFaceModel) is not None


def is_mcore(catalog: Catalog) -> bool:
    """Return True if a catalog has the common state of Megatron's distributed checkpoints."""
    return catalog.common is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _FormRequest:
    """A job and the facts about its source that decide how the global form is built.

    Args:
        job: the conversion.
        format: the format of the destination.
        rules: the layout rules.
        names: family of the tensor names to write, ``hf`` or ``megatron``; None keeps the names.
        model_type: the Hugging Face model type that ``--names`` gives, or None.
        config: the parsed ``config.json`` of the source, or None.
        config_document: content of the file of ``--config`` or of the source's ``config.json``.
        family: the model's family as ``--family`` describes it, or None.
        comes_from_hf: the source's tensors have Hugging Face's names.
        is_peft: the source is an adapter that peft wrote.
        is_restacked: ``core.megatron.reshard.to_torch_dist`` is to stack or unstack the layers.
        others: the other sources of a merge.
    """

    job: Job
    format: Format
    rules: Rules
    names: str | None
    model_type: str | None
    config: Mapping[str, object] | None
    config_document: bytes | None
    family: Family | None
    comes_from_hf: bool
    is_peft: bool
    is_restacked: bool
    others: tuple[Checkpoint, ...] = ()

    @property
    def writes_hf(self) -> bool:
        """True if a Hugging Face checkpoint is written: its names, and its configuration beside."""
        return self.names == "hf" and self.format.carries_files

    @property
    def becomes_hf(self) -> bool:
        """True if Megatron's names become Hugging Face's."""
        return self.names == "hf" and not self.comes_from_hf

    @property
    def becomes_megatron(self) -> bool:
        """True if Hugging Face's names become Megatron's."""
        needs_megatron = self.names == "megatron" or (is_cut(self.format) and self.names != "hf")
        return self.comes_from_hf and needs_megatron


@dataclass(frozen=True, slots=True)
class _GlobalStep:
    """A catalog on its way to the global form, with the notes and dropped entries of a step."""

    catalog: Catalog
    notes: tuple[str, ...] = ()
    dropped: tuple[DroppedEntries, ...] = ()


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
    from core.hf import is_hf, read_family, text_model_of
    from core.hf.adapters.peft import is_peft
    from core.hf.torchtitan import from_torchtitan, is_torchtitan

    # Read the objects, the layout rules and the configuration that describes the model.
    without_state = without_training_state(source.catalog, job, format)
    catalog = with_documents(
        loaded(without_state.catalog, source.store, load_object), documents_above(source)
    )
    if job.param_order is not None:
        if job.optim == "drop":
            raise UsageError(
                f"{PARAM_ORDER} has no effect: the optimizer is left out", hint="omit it"
            )
        catalog = with_parameter_names(catalog, source.store, _read_order(job.param_order))
    rules = load_rules(job.rules, unknown=job.unknown)
    names, model_type = _parse_names(job)
    check_source_sizes(job, catalog)
    unread = unread_files(replace(source, catalog=catalog))
    catalog, config = _read_config(job, catalog, source)
    if job.text_model:
        text = text_model_of(catalog, config)
        catalog, config = text.catalog, text.config
    if config is not None and (names is not None or is_cut(format)) and is_torchtitan(catalog):
        has_no_optimizer = job.optim == "drop" or (job.optim is None and format.carries_files)
        catalog = from_torchtitan(catalog, config, has_no_optimizer=has_no_optimizer)
    request = _FormRequest(
        job=job,
        format=format,
        rules=rules,
        names=names,
        model_type=model_type,
        config=config,
        config_document=_config_document(catalog, source),
        family=None if job.family is None else read_family(job.family),
        comes_from_hf=is_hf(catalog, config),
        is_peft=is_peft(catalog, source.store),
        is_restacked=format.is_mcore and job.stacking is not None,
        others=tuple(others),
    )
    if job.optim is None and request.writes_hf:  # nobody expects an optimizer there
        request = replace(request, job=replace(job, optim="drop"))
    _check_request(request, catalog)
    if request.is_restacked:  # to_torch_dist does it, after the user's other changes
        request = replace(
            request, job=replace(request.job, stack_layers=False, unstack_layers=None)
        )

    # Take one of the paths of the picture above.
    if request.becomes_megatron and request.is_peft:
        form = _form_as_adapter(request, catalog, source)
    elif request.becomes_megatron:
        form = _form_as_megatron(request, catalog, source)
    else:
        step = _unshard_if_needed(request, catalog, source)
        build = _form_as_hf if request.becomes_hf else _form_with_own_names
        form = build(request, step)
    files = (*without_state.dropped, *([unread_entries(unread)] if unread else []))
    return replace(form, dropped=(*files, *form.dropped))


def _read_order(option: str) -> ParameterOrder | None:
    """Read the file of ``--param-order``; None for the order of the model.

    Raises:
        UsageError: it is not a list of names.
        StorageError: the file cannot be read.
    """
    if option == MODEL:
        return None
    with translate_os_errors(option, doing="read"):
        data = Path(option).read_bytes()
    return parse_order(data, label=option)


def _check_request(request: _FormRequest, catalog: Catalog) -> None:
    """Raise if options contradict the source's names or the destination, or would have no effect.

    Raises:
        UsageError: an option contradicts the source or the destination.
        UnsupportedError: the source has Megatron's names, but no training arguments.
    """
    job, format, rules = request.job, request.format, request.rules
    is_named = request.comes_from_hf or is_megatron(catalog, rules)

    # --config describes a model with Hugging Face's names; other sources do not need it.
    if job.config is not None and not request.comes_from_hf and not _is_origin(request, catalog):
        _refuse_config(request, catalog)
    if job.family is not None and not (request.becomes_hf or request.becomes_megatron):
        raise UsageError(
            "--family has no effect: the tensors keep their names",
            hint="omit it, or rename them with --names hf or --names megatron",
        )

    # The names to write must suit the source's names and the destination.
    check_names(
        job,
        request.names,
        request.model_type,
        format,
        request.config if request.comes_from_hf else None,
    )
    check_target(job, format, is_named=is_named)
    if request.names == "megatron" and not is_named and not catalog.is_rank_local:
        _refuse_without_arguments(catalog, rules)
        option = "--names megatron" if job.names is not None else f"--to {job.to}"
        raise UsageError(
            f"{option}: the tensors have neither Megatron's names "
            f"nor Hugging Face's names with a {CONFIG}",
            hint=f"give the model's {CONFIG} with --config FILE",
        )

    # Some options apply to one family of names only.
    if request.comes_from_hf and job.rng is not None:
        raise UsageError(
            "--rng has no effect: Hugging Face checkpoints have no random states", hint="omit it"
        )
    if job.vocab_divisor is not None and not request.becomes_megatron:
        raise UsageError(
            "--make-vocab-size-divisible-by applies only to converting Hugging Face weights "
            "to Megatron",
            hint="omit it; a Megatron checkpoint keeps its own",
        )


def _unshard_if_needed(request: _FormRequest, catalog: Catalog, source: Checkpoint) -> _GlobalStep:
    """Convert a Megatron source into its global form if the job changes its layout or names.

    Any other source keeps its form; only its optimizer is dropped if the job requests it.

    Raises:
        UsageError: an option has no effect on this source or destination.
        UnsupportedError: no rule matches the tensors' names.
    """
    job, format, rules = request.job, request.format, request.rules

    # Without a change of layout or names the tensors stay as they are.
    if not (request.becomes_hf or request.is_restacked or _needs_global_form(request, catalog)):
        refuse_layout_options(job)
        step = _merge(request, _drop_optimizer(request, catalog), source)
        form, other_form = sharding_of(step.catalog), wanted_sharding(format.name)
        if not format.is_mcore or form in (None, other_form):
            return step
        note = (
            f"the optimizer state stays {form}, which Megatron loads only at the same sizes, if at "
            "all; use --tp-new or --pp-new (even with the same sizes) to rewrite it as "
            f"{other_form}"
        )
        return replace(step, notes=(note,))

    # Unshard; names that no rule matches can neither be renamed nor cut.
    if not catalog.is_rank_local and not is_megatron(catalog, rules):
        _refuse_without_arguments(catalog, rules)
        _refuse_names(request, catalog)
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
    step = _merge(request, _record_run_facts(request, catalog, source), source)

    # Handle the random states, and rename the parameters to those of another implementation.
    catalog = with_rng(
        step.catalog, job.rng, has_place=is_cut(format), has_ranks=format.partition == "ranks"
    )
    for option, value in (("--transformer-impl", job.transformer_impl), (EXPERTS, job.experts)):
        if value is not None and not has_model_form(job, format):
            raise UsageError(
                f"{option} has no effect on {format.name}",
                hint="use it with --to megatron or --to torch_dist",
            )
    if has_model_form(job, format):
        catalog = with_expert_kind(
            catalog, job.experts, rules=rules, implementation=job.transformer_impl
        )
    if job.transformer_impl is not None:
        catalog = with_implementation(catalog, job.transformer_impl, rules=rules)
    return replace(step, catalog=catalog)


def _merge(request: _FormRequest, step: _GlobalStep, source: Checkpoint) -> _GlobalStep:
    """Compute the tensors from those of all sources, if the job is a merge.

    Args:
        request: the job.
        step: the first source, in the form in which it is merged.
        source: the first source, whose store has the files of all.

    Raises:
        CheckpointingException: another source is damaged, or does not fit the first one.
    """
    job = request.job
    if job.merge is None:
        return step
    options = FormOptions(
        rules=request.rules, vocab_size=job.vocab_size, keep_padded_vocab=job.keep_padded_vocab
    )
    result = merge_others(
        job.merge, step.catalog, source, request.others, config=request.config, options=options
    )
    return replace(step, catalog=result.catalog, notes=(*step.notes, *result.notes))


def _form_with_own_names(request: _FormRequest, step: _GlobalStep) -> GlobalForm:
    """Apply the user's changes to a source that keeps its family of names, and check the result.

    Raises:
        UsageError: the changes leave an incomplete model, or an optimizer that does not fit its
            parameters.
    """
    from core.hf import check_model

    job, format, before = request.job, request.format, step.catalog
    result = _apply_checked(before, job, request.config)
    notes = [*step.notes, *result.notes]

    # A Hugging Face model that is written as such must fit its configuration.
    if request.comes_from_hf and (request.names == "hf" or job.config is not None):
        assert request.config is not None
        config = _config_after(result.catalog, request.config)
        with _blaming_options(result, "Hugging Face"):
            notes += check_model(
                result.catalog, config, files=carried_of(before), is_strict=job.config is not None
            )
    if format.carries_files:
        notes += result.config_notes

    # A Megatron model must be complete, and its optimizer must fit its parameters.
    if has_model_form(job, format):
        is_global = before.facet(MegatronModel) is not None
        if (is_global or is_mcore(before)) and not result.renamed:
            refuse_broken_optimizer(before, result.catalog)
        if is_global and (result.left_out or result.renamed):
            _refuse_incomplete(result.catalog, request.rules)
    catalog = as_trainer_file(result.catalog) if format.nests else result.catalog
    return GlobalForm(catalog, result.renamed, tuple(notes), step.dropped)


def _form_as_megatron(request: _FormRequest, catalog: Catalog, source: Checkpoint) -> GlobalForm:
    """Convert tensors with Hugging Face's names into Megatron's global form.

    The user's changes match Hugging Face's names; stacking and quantizing come after the renaming.

    Raises:
        UsageError: the changes leave an incomplete model, or an option has no effect on such
            weights.
    """
    from core.hf import (
        OptimizerTarget,
        check_model,
        composite_types,
        model_types,
        to_megatron,
        with_masters,
    )

    job = request.job
    assert request.config is not None
    check_vocabulary(job, request.config)
    refuse_quantizing(job, request.format)
    step = _merge(request, _drop_optimizer(request, catalog), source)

    # Apply the changes that match Hugging Face's names. Master weights, which are found by these
    # names, stay as they are when the weights are cast.
    early = replace(job, stack_layers=False, unstack_layers=None, quantize=(), dtype=())
    first = _apply_checked(step.catalog, early, request.config)
    casts = Job(src=job.src, dtype=job.dtype)
    cast = _apply_checked(with_masters(first.catalog), casts, request.config)

    # Rename the tensors and merge them as Megatron does, by the configuration after the changes.
    config = _config_after(cast.catalog, request.config)
    divisor = job.vocab_divisor or VOCAB_DIVISOR
    with _blaming_options(first, "Hugging Face"):
        tabled = (*model_types(), *composite_types())
        if request.family is None and config.get("model_type") in tabled:
            check_model(
                cast.catalog,
                config,
                files=carried_of(cast.catalog),
                is_strict=True,
                takes_optimizer=True,
            )
        documents = cast.catalog.documents
        if request.config_document is not None:
            documents = {CONFIG: request.config_document, **documents}
        catalog = to_megatron(
            replace(cast.catalog, documents=documents),
            config,
            family=request.family,
            make_vocab_size_divisible_by=divisor,
            transformer_impl=job.transformer_impl,
            optimizer=OptimizerTarget(request.format.is_mcore, source.store),
        )
    if job.experts is not None:
        catalog = with_expert_kind(catalog, job.experts, rules=request.rules)
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
    second = _apply_checked(catalog, late)
    notes = (*step.notes, *first.notes, *cast.notes, padding, *second.notes)
    return GlobalForm(second.catalog, first.renamed + second.renamed, notes, step.dropped)


def _form_as_adapter(request: _FormRequest, catalog: Catalog, source: Checkpoint) -> GlobalForm:
    """Convert an adapter of peft into the global form of Megatron's adapters.

    Raises:
        UsageError: an option has no effect on adapters.
    """
    from core.hf.adapters.to_megatron import adapter_to_megatron

    job, format = request.job, request.format
    assert request.config is not None
    for option, is_given in (
        ("--vocab-size", job.vocab_size is not None),
        ("--keep-padded-vocab", job.keep_padded_vocab),
        ("--make-vocab-size-divisible-by", job.vocab_divisor is not None),
        ("--experts", job.experts is not None),
    ):
        if is_given:
            raise UsageError(f"{option} has no effect on adapters", hint="omit it")
    refuse_quantizing(job, format)

    # Apply the changes that match peft's names, convert, and apply those about Megatron's.
    first = _apply_checked(catalog, replace(job, stack_layers=False, unstack_layers=None))
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
    second = _apply_checked(adapter, late)
    return GlobalForm(
        second.catalog, first.renamed + second.renamed, (*first.notes, *second.notes), ()
    )


def _form_as_hf(request: _FormRequest, step: _GlobalStep) -> GlobalForm:
    """Convert Megatron's global form into tensors with Hugging Face's names.

    The user's changes match Megatron's names; only quantizing comes after the renaming, because
    scales are named after the new names.

    Raises:
        UsageError: the changes leave an incomplete model.
    """
    from core.hf import to_hf
    from core.hf.adapters.to_peft import adapter_to_peft, is_adapter

    job = request.job
    first = _apply_checked(step.catalog, replace(job, quantize=()))
    if is_adapter(first.catalog):
        peft = adapter_to_peft(
            first.catalog,
            model_type=request.model_type,
            family=request.family,
            config=None if job.config is None else request.config_document,
        )
        return GlobalForm(peft, first.renamed, (*step.notes, *first.notes), step.dropped)
    with _blaming_options(first, "Megatron"):
        catalog = to_hf(
            with_named_groups(first.catalog, request.rules),
            model_type=request.model_type,
            family=request.family,
            config=None if job.config is None else request.config_document,
            has_config=request.format.carries_files,
        )
    second = _apply_checked(catalog, Job(src=job.src, quantize=job.quantize))
    notes = (*step.notes, *first.notes, *second.notes)
    return GlobalForm(second.catalog, first.renamed + second.renamed, notes, step.dropped)


def _config_after(catalog: Catalog, config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the ``config.json`` after the user's changes, ``config`` if it is unchanged."""
    document = catalog.documents.get(CONFIG)
    return config if document is None else parse_json_object(document, file=CONFIG)


def _drop_optimizer(request: _FormRequest, catalog: Catalog) -> _GlobalStep:
    """Drop the optimizer of a source that keeps its layout, if the job requests it."""
    if request.job.optim != "drop":
        return _GlobalStep(catalog)
    weights = without_optimizer(catalog)
    if not weights.left_out:
        return _GlobalStep(weights.catalog)
    # In a Hugging Face directory nobody misses the optimizer, so its entries are not counted.
    if request.writes_hf:
        entries = DroppedEntries(("optimizer",), NOT_IN_HF, f"optimizer ({NOT_IN_HF})")
    else:
        line = f"optimizer ({len(weights.left_out)} entries)"
        entries = DroppedEntries(weights.left_out, "optimizer left out as requested", line)
    return _GlobalStep(weights.catalog, dropped=(entries,))


@contextmanager
def _blaming_options(result: ChangedCatalog, family: str) -> Iterator[None]:
    """Turn a missing tensor into a usage error if the user's options dropped or renamed any.

    Args:
        result: the catalog after the user's changes.
        family: family of the model, ``Megatron`` or ``Hugging Face``.
    """
    try:
        yield
    except MissingShardError as err:
        if not (result.left_out or result.renamed):
            raise
        raise UsageError(
            "--include, --exclude or the new names leave "
            f"an incomplete {family} model: {err.message}",
            key=err.key,
            hint="to write part of a model, keep its names and omit --config: "
            "--to safetensors, dcp or torch",
        ) from err


def _refuse_config(request: _FormRequest, catalog: Catalog) -> NoReturn:
    """Raise because ``--config`` was given for a source that is not a Hugging Face model.

    Raises:
        UsageError: the file is not a model's configuration, or the source does not need one.
        UnsupportedError: the source needs training arguments, which a configuration cannot replace.
    """
    config, rules = request.config, request.rules
    if config is None or not isinstance(config.get("model_type"), str):
        raise UsageError(
            "--config: without model_type, the file does not describe a transformers model",
            file=str(request.job.config),
            hint="give the model's config.json",
        )
    if not catalog.is_rank_local and not is_megatron(catalog, rules):
        _refuse_without_arguments(catalog, rules)
    raise UsageError(
        "--config has no effect: a Megatron checkpoint has its own training arguments",
        hint="omit it",
    )


def _refuse_names(request: _FormRequest, catalog: Catalog) -> NoReturn:
    """Raise because tensors with unknown names can neither be renamed nor cut by a layout.

    Raises:
        UnsupportedError: always.
    """
    first = next((key for key in catalog.tensors if not is_optimizer_key(key)), "")
    goal, formats = (
        ("renamed to Hugging Face's names", "safetensors")
        if request.becomes_hf
        else (
            f"written as {request.format.name} with a parallel layout",
            "torch_dist, dcp or torch",
        )
    )
    options = model_options(catalog, takes_submodule=True)
    hint = f"give the model's {CONFIG} with --config FILE, or keep the names: --to {formats}"
    if request.is_peft:
        hint = f"for an adapter of peft, give the {CONFIG} of its base model with --config FILE"
    if options is not None:
        hint = f"for the model of a PyTorch Lightning checkpoint, add {options} --config {CONFIG}"
    raise UnsupportedError(
        f"the tensors ({first!r} …) cannot be {goal}: they have neither Megatron's names and "
        f"training arguments nor Hugging Face's names and a {CONFIG}",
        hint=hint,
    )


def _refuse_without_arguments(catalog: Catalog, rules: Rules) -> None:
    """Raise if the tensors have Megatron's names, but no training arguments describe the model.

    Raises:
        UnsupportedError: the tensors have Megatron's names.
    """
    if has_megatron_names(catalog, rules):
        raise UnsupportedError(
            "the tensors have Megatron's names, but the checkpoint has no training arguments "
            f"(args), which describe the model and its layout; a {CONFIG} cannot replace them",
            hint="use a checkpoint of the run that has them, or keep the names: "
            "--to safetensors, dcp or torch",
        )


def _read_config(
    job: Job, catalog: Catalog, source: Checkpoint
) -> tuple[Catalog, Mapping[str, object] | None]:
    """Find and parse the model's ``config.json``, and add one of ``--config`` to the catalog.

    Without ``--config`` the file is stored with the weights or in a directory above them.

    Returns:
        The catalog, and the parsed configuration or None.

    Raises:
        UsageError: both ``--config`` and the source have one.
        CorruptError: the file is not valid JSON.
    """
    if job.config is None:
        return catalog, config_of_source(source)
    if CONFIG in carried_of(catalog):
        raise UsageError(
            f"--config: SRC already has a {CONFIG}",
            file=str(job.config),
            hint="omit --config, or edit the one in SRC",
        )
    with translate_os_errors(str(job.config), doing="read"):
        data = job.config.read_bytes()
    return with_documents(catalog, {CONFIG: data}), parse_json_object(data, file=str(job.config))


def _config_document(catalog: Catalog, source: Checkpoint) -> bytes | None:
    """Return the content of the model's ``config.json``, from ``--config`` or from the source."""
    if CONFIG in catalog.documents:
        return catalog.documents[CONFIG]
    return config_document_of(source.store) if CONFIG in carried_of(source.catalog) else None


def _is_origin(request: _FormRequest, catalog: Catalog) -> bool:
    """Return whether ``--config`` is the configuration that a Megatron source came from."""
    config = request.config
    return (
        request.becomes_hf
        and request.writes_hf
        and config is not None
        and isinstance(config.get("model_type"), str)
        and (catalog.is_rank_local or is_megatron(catalog, request.rules))
    )


def _parse_names(job: Job) -> tuple[str | None, str | None]:
    """Parse ``--names``, and ``--to hf`` and ``--to fsdp_dtensor``, which imply it.

    Returns:
        ``hf``, ``megatron`` or None to keep the names; and the Hugging Face model type or None.

    Raises:
        UsageError: ``--names`` has another value.
    """
    if job.names is None:
        if writes_fsdp_dtensor(job):
            return "megatron", None
        return ("hf", None) if job.to is not None and job.to.lower() in HF_ALIASES else (None, None)
    family, _, model_type = job.names.partition(":")
    if family not in ("hf", "megatron") or (model_type and family != "hf"):
        raise UsageError(
            f"unknown value {job.names!r} for --names",
            hint="use hf, hf:MODEL_TYPE (such as hf:qwen3_moe), or megatron",
        )
    return family, model_type or None


VOCAB_DIVISOR = 128
"""Megatron's default for ``--make-vocab-size-divisible-by``."""


def _apply_checked(
    catalog: Catalog, job: Job, config: Mapping[str, object] | None = None
) -> ChangedCatalog:
    """Apply the user's changes, and raise if they leave an entry that cannot be copied."""
    result = apply_changes(catalog, job, config=config)
    refuse_unsupported(result.catalog)
    return result


def _needs_global_form(request: _FormRequest, catalog: Catalog) -> bool:
    """Return True if the destination needs the source in Megatron's global form."""
    job, format = request.job, request.format
    if catalog.is_rank_local or format.partition == "ranks" or changes_layout(job):
        return True
    if not is_megatron(catalog, request.rules):
        return False
    if request.others:  # whose layouts may be different
        return True
    if request.names == "megatron" or job.transformer_impl is not None or job.experts is not None:
        return True
    if not format.is_mcore:
        return False
    if not is_mcore(catalog):
        return True
    # Each of Megatron's formats has its own form of distributed optimizers.
    return (
        job.optim != "drop" and format.name != catalog.format and sharding_of(catalog) is not None
    )


def _record_run_facts(request: _FormRequest, catalog: Catalog, source: Checkpoint) -> _GlobalStep:
    """Add the directory's iteration and the options' vocabulary size to the global form."""
    job = request.job
    notes = []
    # Some files have their iteration only in the name of their directory (iter_0000010).
    if catalog.iteration is None and source.iteration is not None:
        notes.append(
            "the files do not record their iteration; "
            f"using {source.iteration} from the directory name"
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
    return _GlobalStep(catalog, tuple(notes))


def _refuse_incomplete(catalog: Catalog, rules: Rules) -> None:
    """Raise if the user's changes leave a Megatron model that could not be loaded.

    Raises:
        UsageError: the model is incomplete; the message names the missing tensors.
    """
    try:
        facts = facts_of(catalog.args, names=rules.model_of(catalog.tensors))
        check_complete(catalog.tensors, facts, rules)
    except (CheckpointingException, ValueError) as err:
        message = err.message if isinstance(err, CheckpointingException) else str(err)
        raise UsageError(
            f"--include, --exclude or --rename leave an incomplete Megatron model: {message}",
            key=getattr(err, "key", None),
            hint="to keep part of a model, write --to dcp or --to torch",
        ) from err
