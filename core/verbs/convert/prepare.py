"""Prepare a conversion: decide what is written, and prove it, before any byte is copied."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.facets import HuggingFaceModel
from core.engine.catalog.key_patterns import folded
from core.engine.catalog.tensor import Tensor
from core.engine.plan.memory import estimate_object_bytes, limit_objects
from core.engine.plan.plan import make_plan
from core.errors import CorruptError, UnsupportedError, UsageError
from core.files.remote_path import location_of
from core.files.url import refuse_url
from core.formats.format import Format
from core.formats.huggingface.files import CONFIG, read_config_json
from core.formats.registry import format_called, formats
from core.opening.code_in_pickles import naming_code_first
from core.opening.objects import with_objects_loaded
from core.opening.open import Checkpoint, open_checkpoint
from core.opening.source_files import config_of_source, with_files_above
from core.opening.target import tensors_only
from core.pickle.noted import gc_paused
from core.progress import OnProgress, Phase, count_steps
from core.publish.stage.destination import choose_destination
from core.values import dataclass
from core.verbs.convert.account import check_account, check_not_empty, describe_lost_files
from core.verbs.convert.apply_changes import config_beside
from core.verbs.convert.copied_files import check_copied_files, raise_if_copied
from core.verbs.convert.destination import choose_dst, lay_out_files
from core.verbs.convert.global_form.form import GlobalForm
from core.verbs.convert.job import Job
from core.verbs.convert.nesting_notes import (
    describe_nesting,
    describe_not_stored,
    n_leaves,
    recorded_notes,
)
from core.verbs.convert.options import HF_ALIASES, check_merge
from core.verbs.convert.prepared import Prepared
from core.verbs.convert.report.load_line import WrittenResult, load_line
from core.verbs.convert.report.training_state import (
    record_unmerged_state,
    without_training_state,
)
from core.verbs.convert.sizes import written_topology
from core.verbs.convert.source_notes import check_empty_parameters, compare_copies
from core.verbs.convert.target_form import (
    cut_form,
    describe_loader_states,
    describe_unsafe_files,
    safe_form,
    settle_attributes,
    with_folders_beside,
    with_tokens_in_configuration,
)


def _is_to_hf(job: Job) -> bool:
    """Return whether the result has Hugging Face's names."""
    return (job.names or job.to or "").lower().startswith(HF_ALIASES)


def _leaves_optimizer_out(job: Job) -> bool:
    """Return whether the destination has no optimizer, by request or because it is Hugging Face's.

    Other formats keep it under Hugging Face's names.
    """
    if job.optim is not None:
        return job.optim == "drop"
    return _is_to_hf(job) and job.to is not None and format_called(job.to).carries_files


@contextmanager
def prepare(job: Job, *, progress: OnProgress | None = None) -> Iterator[Prepared]:
    """Open the source, prepare the job, and close the source after the block.

    Args:
        job: the conversion.
        progress: called with the number of files whose metadata has been read.

    Raises:
        CheckpointingException: the job cannot be done; nothing has been written.
    """
    for path in (job.config, job.family, job.rules, job.tokenizer):
        if path is not None:
            refuse_url(path)
    if job.dst is not None:
        dst = location_of(job.dst)
        choose_destination(dst).check_writable(needs_links=job.metadata_only)
        job = replace(job, dst=dst)
    merge = job.merge
    if merge is not None:
        check_merge(job)
        job = replace(job, optim="drop")
    with limit_objects(job.memory_bytes, beside_bytes=job.beside_bytes):
        source = open_checkpoint(
            job.src,
            iteration=job.iteration,
            missing_chunks=job.missing_chunks,
            drop_missing=job.drop_missing,
            needs_optimizer=not _leaves_optimizer_out(job),
            needs_masters=job.optim != "drop",
            on_open=count_steps(progress, Phase.PLANNING, unit="files"),
        )
    others: list[Checkpoint] = []
    try:
        source = compare_copies(source)
        # The other sources of a merge share a store with the first one.
        if merge is not None:
            from core.verbs.merge.sources import open_others, with_joined_store

            with limit_objects(job.memory_bytes, beside_bytes=job.beside_bytes):
                others += open_others(
                    merge,
                    missing_chunks=job.missing_chunks,
                    drop_missing=job.drop_missing,
                    on_open=source.store.on_open,
                )
            source = with_joined_store(source, others)
        else:
            source = with_files_above(source)
        with gc_paused():
            try:
                # An excluded entry may be the one that would run code.
                with (
                    nullcontext()
                    if job.exclude
                    else naming_code_first(source.store, catalog=source.catalog, uses=source.uses)
                ):
                    prepared = _prepare(job, source, others)
            except UnsupportedError as err:
                # Name the file in errors about an entry of a source that is one file.
                if err.key is not None and source.store.entry is not None:
                    err.file = err.file or source.store.label
                raise
            # Millions of metadata objects now stay until the end: keep the collector off them.
            gc.freeze()
        source.store.on_open = None
        yield prepared
    finally:
        gc.unfreeze()
        source.store.close()
        for other in others:
            other.store.close()


def _prepare(job: Job, source: Checkpoint, others: Sequence[Checkpoint] = ()) -> Prepared:
    """Decide what is written, lay out the files, and build the plan that proves it.

    Args:
        job: the conversion.
        source: the opened source.
        others: the other sources of a merge.

    Raises:
        CheckpointingException: the job cannot be done.
    """
    format = _choose_format(job, source)
    emptied_notes = [
        note
        for checkpoint in (source, *others)
        for note in check_empty_parameters(job, checkpoint, format)
    ]
    opened = source
    # State without a place is left out before its files are read further: they may be damaged.
    without_state = without_training_state(source.catalog, job, format)
    with limit_objects(job.memory_bytes, beside_bytes=job.beside_bytes):
        source = with_objects_loaded(
            replace(source, catalog=without_state.catalog), exclude=job.exclude
        )
    if source.format.has_text_keys and not format.has_text_keys:
        from core.opening.numbered_optimizers import with_integer_keys

        source = replace(source, catalog=with_integer_keys(source.catalog))
    if job.metadata_only:
        from core.verbs.convert.hard_links import prepare_links

        return prepare_links(job, opened, format)
    if job.on_replica_mismatch != "error" and job.tie:
        raise UsageError(
            "--tie compares all replicas, but --on-replica-mismatch first skips that comparison",
            hint="use only one",
        )

    # Give the source its final names, and cut it for the destination.
    result = _cut_source(job, opened, source, format, others)
    form, catalog, target, dst = result.form, result.catalog, result.target, result.dst

    # Collect what the user should know, and what is not carried.
    copied_notes = check_copied_files(job, opened, catalog)
    notes = _collect_notes(job, source, others, result, (*emptied_notes, *copied_notes))
    dropped = _collect_dropped(others, result, without_state.dropped)
    dropped += describe_lost_files(opened, form.catalog, result.written_files, dropped)

    # Lay out the files.
    if result.is_bare:
        target = tensors_only(target)
    check_not_empty(source, target, format)
    check_account(opened.catalog, catalog, target, dropped)
    write = replace(
        target.write,
        max_file_bytes=job.max_shard_size,
        is_file=result.is_file,
        is_release=source.is_release,
        is_step=dst.name.isascii() and dst.name.isdigit(),
    )
    target = replace(target, write=write)
    images = lay_out_files(target, source, format, dst)
    if format.records_ties:
        notes += recorded_notes(target.ties)

    # Prove that every byte of the files has a source.
    plan = make_plan(
        catalog,
        target,
        images,
        threads=job.threads,
        memory_bytes=job.memory_bytes,
        beside_bytes=job.beside_bytes
        + source.store.limit_reading(job.own_memory_bytes, threads=job.threads)
        + choose_destination(dst).estimate_sending(images, job.own_memory_bytes)
        + estimate_object_bytes(source.catalog, 0 if format.keeps_nesting else len(target.objects)),
        compares=job.on_replica_mismatch == "error",
    )
    if plan.n_ignored:
        notes.append(
            f"{plan.n_ignored:,} replicas of tensors on other ranks are not compared, because the "
            "first replica is used"
        )
    if job.verify:
        from core.verbs.convert.verify import check_memory

        check_memory(plan, job.memory_bytes)
    return Prepared(
        job=job,
        source=source,
        target_format=format,
        dst=dst,
        images=images,
        plan=plan,
        renamed=form.renamed,
        notes=tuple(folded(notes, end=": ")),
        dropped_entries=tuple(entry for entry in dropped if entry.is_listed),
        form=form.catalog,
        load_line=load_line(
            WrittenResult(
                dst=dst,
                format=format,
                target=target,
                images=images,
                topology=written_topology(job, form.catalog, format),
                config=_written_model(job, form, source),
            )
        ),
        n_tensors=(n_leaves(target.skeleton) if format.keeps_nesting else len(target.tensors))
        - (len(target.ties) if format.records_ties else 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """The source and the target of a job, cut for the destination but not laid out.

    Args:
        format: the format of the destination.
        dst: its path.
        is_file, is_bare: it is one file; it has only tensors.
        form: the source's global tensors under their final names.
        catalog: the source under the keys of the target.
        target: what is written.
        unsafe: the files next to the weights that are not carried, because they may run code.
    """

    format: Format
    dst: Path
    is_file: bool
    is_bare: bool
    form: GlobalForm
    catalog: Catalog
    target: TargetCatalog
    unsafe: tuple[Dropped, ...]

    @property
    def written_files(self) -> dict[str, Tensor | bytes]:
        """Path → content of the files that are written beside the weights."""
        files = () if self.is_file else self.target.files
        return {path: self.catalog.files[path] for path in files}


def _cut_source(
    job: Job, opened: Checkpoint, source: Checkpoint, format: Format, others: Sequence[Checkpoint]
) -> _Result:
    """Give the source its final names, and cut it for the destination.

    Args:
        job: the conversion.
        opened: the source as it was opened.
        source: the source with its objects read.
        format: the format of the destination.
        others: the other sources of a merge.
    """
    # If the names cannot be given, a copied file may be the reason.
    try:
        form = safe_form(job, source, format, others)
    except (CorruptError, UnsupportedError) as err:
        raise_if_copied(job, opened, err)
        raise
    dst = choose_dst(job, source, format)
    is_file = format.writes_file(dst)
    has_config = format.carries_files and not is_file

    # Add the tokenizer, and settle which attributes and ties the destination keeps. The
    # configuration decides whether readers tie the output layer, if it is written at all.
    if job.tokenizer is not None:
        from core.formats.huggingface.tokenizer import with_tokenizer

        files = with_tokenizer(form.catalog, job.tokenizer, carries_files=has_config)
        form = replace(form, catalog=files)
    form = settle_attributes(form, job, opened.catalog, (source, *others), format)
    catalog = form.catalog
    if format.records_ties and catalog.ties:
        from core.engine.changes.tie import keep_recordable_ties

        stored = read_config_json(source.store) if CONFIG in catalog.files else None
        config = config_beside(catalog, stored) if has_config else None
        catalog = keep_recordable_ties(catalog, config)

    # Cut the tensors, and leave out files beside them that may run code.
    catalog, target = cut_form(job, catalog, format)
    if not is_file:
        catalog, target = with_folders_beside(catalog, target, opened, format)
    if has_config and (job.tokenizer is not None or catalog.facet(HuggingFaceModel) is not None):
        catalog, target, notes = with_tokens_in_configuration(catalog, target, opened)
        form = replace(form, notes=(*form.notes, *notes))
    copied = [path for path, item in target.files.items() if not isinstance(item, bytes)]
    unsafe = describe_unsafe_files(opened, [] if is_file else copied)
    refused = {name for entry in unsafe for name in entry.names}
    kept = {path: content for path, content in target.files.items() if path not in refused}
    return _Result(
        format=format,
        dst=dst,
        is_file=is_file,
        is_bare=format.writes_only_tensors(dst),
        form=form,
        catalog=catalog,
        target=replace(target, files=kept),
        unsafe=unsafe,
    )


def _collect_notes(
    job: Job,
    source: Checkpoint,
    others: Sequence[Checkpoint],
    result: _Result,
    source_notes: Sequence[str],
) -> list[str]:
    """Collect what the user should know; steps may repeat a note of an earlier one.

    Args:
        job: the conversion.
        source, others: the sources.
        result: what is written.
        source_notes: notes of checks of the sources.
    """
    format, target, catalog = result.format, result.target, result.form.catalog
    notes = [
        *source.notes,
        *source_notes,
        *result.form.notes,
        *(
            f"{other.path}: {note}"
            for other in others
            for note in (*compare_copies(other).notes, *other.catalog.notes)
        ),
        *describe_nesting(catalog, format, is_bare=result.is_bare),
        *describe_loader_states(job, target),
    ]
    notes += [note for note in target.notes if note not in notes]
    notes += [] if format.notes_of is None else format.notes_of(target)
    if isinstance(result.written_files.get(CONFIG), bytes) and job.merge is None:
        from core.formats.huggingface.tokenizer import has_tokenizer

        if not has_tokenizer(result.written_files):
            notes.append("the model has no tokenizer files; to add them, pass --tokenizer DIR")
    modules = [path for path in target.files if path.endswith((".safetensors", ".bin"))]
    if modules and (job.dtype or job.quantize):
        notes.append(f"the weights of other modules are copied unchanged: {', '.join(modules)}")
    if not format.keeps_nesting and catalog.args is None:
        from core.engine.catalog.wrapped_model import model_options

        options = model_options(catalog)
        if options is not None:
            notes.append(f"to write only the model under its own names, add {options}")
    return notes


def _collect_dropped(
    others: Sequence[Checkpoint], result: _Result, state: Sequence[Dropped]
) -> list[Dropped]:
    """Collect the record of what is not carried, without files next to the weights.

    Args:
        others: the other sources of a merge.
        result: what is written.
        state: the record of training state that the destination has no place for.
    """
    dropped = [
        *state,
        *result.form.dropped,
        *describe_not_stored(result.form.catalog, result.format, is_bare=result.is_bare),
        *result.unsafe,
        *(
            replace(
                entry,
                names=tuple(f"{name} of {other.path.name}" for name in entry.names),
                line=f"{other.path.name}: {entry}",
            )
            for other in others
            for entry in (*other.catalog.dropped, *record_unmerged_state(other.catalog))
        ),
    ]
    return [*dropped, *(entry for entry in result.target.dropped if entry not in dropped)]


def _written_model(job: Job, form: GlobalForm, source: Checkpoint) -> Mapping[str, object] | None:
    """Return the configuration of a model that is written under Hugging Face's names, or None.

    Also None if the user's options may have left only a part of the model.
    """
    config = config_beside(form.catalog, config_of_source(source))
    if config is None:
        return None
    from core.hf.names import is_hf

    # Hugging Face's names were checked against the configuration if the job requests them.
    is_checked = _is_to_hf(job)
    is_changed = bool(
        job.include or job.exclude or form.renamed or job.add_prefix or job.stacking is not None
    )
    return config if is_hf(form.catalog, config) and (is_checked or not is_changed) else None


def _choose_format(job: Job, source: Checkpoint) -> Format:
    """Return the format of the destination.

    Raises:
        UnsupportedError: the format is read-only.
    """
    format = source.format if job.to is None else format_called(job.to)
    if format.lay_out is None:
        names = [writable.name for writable in formats() if writable.lay_out is not None]
        hint = f"choose an output format with --to: {', '.join(names)}"
        if format.written_as is not None:
            hint = (
                f"--to {format.written_as}, without sizes, writes a checkpoint that loads on any "
                f"number of GPUs; {hint}"
            )
        raise UnsupportedError(f"ckpt can read {format.name} but not write it", hint=hint)
    return format
