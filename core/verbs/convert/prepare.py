"""Prepare a conversion: decide what is written, and prove it, before any byte is copied."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.dropped import Dropped, dropped_together
from core.engine.catalog.facets import FsdpDtensorFacts, MegatronModel, WeightCopies
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.files_beside import FILES_BESIDE
from core.engine.catalog.key_patterns import folded, matcher
from core.engine.catalog.mapping_attributes import attributes_beside_tensors, attributes_of
from core.engine.catalog.tensor import Tensor
from core.engine.plan.memory import estimate_object_bytes, limit_objects
from core.engine.plan.plan import make_plan
from core.errors import (
    CheckpointingException,
    CorruptError,
    UnsupportedError,
    UsageError,
)
from core.files.remote_path import RemotePath, is_remote
from core.files.url import find_location, refuse_url
from core.formats.format import Format
from core.formats.huggingface.files import CONFIG, file_images, read_config_json
from core.formats.registry import format_called, formats
from core.opening.code_in_pickles import naming_code_first
from core.opening.objects import (
    KEEP_OBJECTS,
    has_tensors,
    state_dict,
    with_objects_loaded,
)
from core.opening.open import RELEASE, Checkpoint, open_checkpoint
from core.opening.source_files import config_of_source, with_files_above
from core.opening.target import keeps_containers, tensors_only
from core.pickle.noted import gc_paused
from core.progress import OnProgress, Phase, count_steps
from core.verbs.convert.account import check_account
from core.verbs.convert.apply_changes import config_beside
from core.verbs.convert.copied_files import check_copied_files, raise_if_copied
from core.verbs.convert.destination import choose_dst, in_training_root, iteration_path
from core.verbs.convert.global_form.form import GlobalForm, is_model_form
from core.verbs.convert.job import Job
from core.verbs.convert.nesting_notes import (
    flattening_notes,
    n_leaves,
    nesting_notes,
    record_lost_attributes,
    recorded_notes,
    root_notes,
    sharing_notes,
)
from core.verbs.convert.options import HF_ALIASES, check_merge
from core.verbs.convert.prepared import Prepared
from core.verbs.convert.report.load_line import load_line
from core.verbs.convert.report.training_state import without_training_state
from core.verbs.convert.sizes import written_topology
from core.verbs.convert.target_form import (
    cut_form,
    describe_loader_states,
    describe_unsafe_files,
    safe_form,
    settle_attributes,
    with_folders_beside,
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
        job = replace(job, dst=find_location(job.dst))
    if is_remote(job.dst):
        _check_bucket(job, job.dst)
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
        source = _compare_copies(source)
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


def _compare_copies(source: Checkpoint) -> Checkpoint:
    """Return a source with a note on copies of its weights: not carried, and equal or not."""
    copies = source.catalog.facet(WeightCopies)
    if copies is None:
        return source
    from core.megatron.optimizer.proof import find_different_copies

    copy_kind, verdict = "16-bit copies", ""
    try:
        pairs = copies.pairs()
        if pairs and all(copy.dtype == "float32" for _, _, copy in pairs):
            copy_kind = "copies"
        different = find_different_copies(source.store, pairs)
    except CheckpointingException as err:
        verdict = f"they could not be compared with the master weights ({err.message})"
    else:
        n = len({key for key, _, _ in pairs})
        if different:
            key, copy = different[0]
            verdict = (
                f"{len(different):,} of {n:,} are not the rounded master weights, which are "
                f"written: {key} in {copy.extent.file} differs (ckpt validate --headers lists all)"
            )
        elif n:
            verdict = "they are the rounded master weights, in a sample of each"
    if not verdict:
        return source
    note = f"the {copy_kind} of the weights in the model files are not carried; {verdict}"
    return replace(source, notes=(*source.notes, note))


def _check_emptied(job: Job, checkpoint: Checkpoint, format: Format) -> list[str]:
    """Return a note on parameters without elements, unless the result would be a broken model.

    Raises:
        CorruptError: the job merges, or writes a model of Hugging Face or Megatron's rank files.
    """
    from core.engine.catalog.emptied import EMPTIED_HINT, find_emptied_parameters

    include = [matcher(glob) for glob in job.include]
    exclude = [matcher(glob) for glob in job.exclude]
    emptied = [
        key
        for key in find_emptied_parameters(checkpoint.catalog)
        if (not include or any(matches(key) for matches in include))
        and not any(matches(key) for matches in exclude)
    ]
    if not emptied:
        return []
    message = (
        f"{len(emptied):,} parameters have no elements (shape [0]), such as {emptied[0]}: they "
        "were saved while ZeRO-3 had divided them among ranks"
    )
    is_hf = job.names is not None and job.names.startswith("hf")
    is_model = is_hf or (job.to or "").lower() in HF_ALIASES or format.is_rank_local
    if job.merge is None and not is_model:
        return [f"{message}; {EMPTIED_HINT}"]
    raise CorruptError(message, file=checkpoint.store.label, key=emptied[0], hint=EMPTIED_HINT)


def _check_bucket(job: Job, dst: RemotePath) -> None:
    """Raise if a job cannot write to a URL.

    Raises:
        UsageError: it is that of a web server, or the job needs a file system.
    """
    if dst.scheme in ("http", "https"):
        raise UsageError(
            "a web server cannot be written to",
            file=f"{dst.scheme}://{dst.bucket}",  # its path may end with a signature
            hint="write to a local directory, or to s3://, gs:// or az://",
        )
    if not dst.key:
        raise UsageError(
            "the destination is a whole bucket", file=str(dst), hint=f"name a prefix: {dst}/NAME"
        )
    if job.metadata_only:
        raise UsageError(
            "--metadata-only makes hard links, which an object store does not have",
            file=str(dst),
            hint="omit it, or write to the file system of the source",
        )


def _prepare(job: Job, source: Checkpoint, others: Sequence[Checkpoint] = ()) -> Prepared:
    """Decide what is written, lay out the files, and build the plan that proves it.

    Args:
        job: the conversion.
        source: the opened source.
        others: the other sources of a merge.

    Raises:
        CheckpointingException: the job cannot be done.
    """
    from core.verbs.convert.report.lightning import model_options
    from core.verbs.convert.report.load_line import WrittenResult

    format = _choose_format(job, source)
    emptied_notes = [
        note for checkpoint in (source, *others) for note in _check_emptied(job, checkpoint, format)
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
            "--tie compares all copies, which --on-replica-mismatch first skips",
            hint="use only one of them",
        )

    # Give the source its final names, and cut it for the destination. If that fails, a copied file
    # may be the reason.
    try:
        form = safe_form(job, source, format, others)
    except (CorruptError, UnsupportedError) as err:
        raise_if_copied(job, opened, err)
        raise
    dst = choose_dst(job, source, format)
    is_file, is_bare = format.writes_file(dst), format.writes_only_tensors(dst)
    if job.tokenizer is not None:
        from core.formats.huggingface.tokenizer import with_tokenizer

        carries_files = format.carries_files and not is_file
        files = with_tokenizer(form.catalog, job.tokenizer, carries_files=carries_files)
        form = replace(form, catalog=files)
    form = settle_attributes(form, job, opened.catalog, (source, *others), format)
    recordable = _keep_recordable_ties(form.catalog, source, format, is_file=is_file)
    catalog, target = cut_form(job, recordable, format)
    if not is_file:
        catalog, target = with_folders_beside(catalog, target, opened, format)
    copied = [path for path, item in target.files.items() if not isinstance(item, bytes)]
    unsafe = describe_unsafe_files(opened, [] if is_file else copied)
    refused = {name for entry in unsafe for name in entry.names}
    kept = {path: content for path, content in target.files.items() if path not in refused}
    target = replace(target, files=kept)
    copied_notes = check_copied_files(job, opened, catalog)

    # Collect what the user should know; steps may repeat a note of an earlier one.
    notes = [
        *source.notes,
        *emptied_notes,
        *copied_notes,
        *form.notes,
        *(
            f"{other.path}: {note}"
            for other in others
            for note in (*_compare_copies(other).notes, *other.catalog.notes)
        ),
        *_nesting_notes(form.catalog, format, is_bare=is_bare),
        *describe_loader_states(job, target),
    ]
    notes += [note for note in target.notes if note not in notes]
    notes += [] if format.notes_of is None else format.notes_of(target)
    written = {} if is_file else {path: catalog.files[path] for path in target.files}
    if isinstance(written.get(CONFIG), bytes) and job.merge is None:
        from core.formats.huggingface.tokenizer import has_tokenizer

        if not has_tokenizer(written):
            notes.append("the model has no tokenizer files: add them with --tokenizer DIR")
    modules = [path for path in target.files if path.endswith((".safetensors", ".bin"))]
    if modules and (job.dtype or job.quantize):
        notes.append(f"weights of other modules are carried unchanged: {', '.join(modules)}")
    options = None if format.keeps_nesting else model_options(form.catalog)
    if options is not None:
        notes.append(f"PyTorch Lightning checkpoint: to write only the model, add {options}")
    dropped = [
        *without_state.dropped,
        *form.dropped,
        *_describe_dropped(form.catalog, format, is_bare=is_bare),
        *unsafe,
        *(
            replace(
                entry,
                names=tuple(f"{name} of {other.path.name}" for name in entry.names),
                line=f"{other.path.name}: {entry}",
            )
            for other in others
            for entry in other.catalog.dropped
        ),
    ]
    dropped += [entry for entry in target.dropped if entry not in dropped]
    dropped += _describe_lost_files(opened, form.catalog, written, dropped)

    # Lay out the files.
    if is_bare:
        target = tensors_only(target)
    _raise_if_empty(source, target, format)
    check_account(opened.catalog, catalog, target, dropped)
    write = replace(
        target.write,
        max_file_bytes=job.max_shard_size,
        is_file=is_file,
        is_release=source.is_release,
        is_step=dst.name.isascii() and dst.name.isdigit(),
    )
    target = replace(target, write=write)
    images = _lay_out_files(target, source, format, dst)
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
        + _sending_bytes(job, dst, images)
        + estimate_object_bytes(source.catalog, 0 if format.keeps_nesting else len(target.objects)),
        compares=job.on_replica_mismatch == "error",
    )
    if plan.n_ignored:
        notes.append(
            f"{plan.n_ignored:,} copies of tensors on other ranks are not compared: "
            "the first copy is used"
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


def _raise_if_empty(source: Checkpoint, target: TargetCatalog, format: Format) -> None:
    """Raise if the destination would hold no tensor although the source does.

    Raises:
        UnsupportedError: it would; numbers of the source would be lost.
    """
    if target.tensors or has_tensors(target.objects.values()):
        return
    catalog = source.catalog
    if not (catalog.tensors or has_tensors(catalog.objects.values())):
        return
    raise UnsupportedError(
        f"no tensor would be written to {format.title}: all that the source has would be left out",
        file=source.store.label,
        hint="leave fewer entries out" if catalog.tensors else KEEP_OBJECTS,
    )


def _sending_bytes(job: Job, dst: Path, images: Sequence[FileImage]) -> int:
    """Return the memory that sending to an object store takes; 0 for a local destination."""
    if not is_remote(dst):
        return 0
    from core.publish.stage.bucket.stage import sending_bytes

    return sending_bytes(images, job.own_memory_bytes)


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
        names = ", ".join(writable.name for writable in formats() if writable.lay_out is not None)
        raise UnsupportedError(
            f"{format.name} is read-only", hint=f"choose a format to write with --to: {names}"
        )
    return format


def _keep_recordable_ties(
    catalog: Catalog, source: Checkpoint, format: Format, *, is_file: bool
) -> Catalog:
    """Forget the ties that the destination's format does not record."""
    if not format.records_ties or not catalog.ties:
        return catalog
    from core.engine.changes.tie import keep_recordable_ties

    # The configuration decides whether readers tie the output layer, if it is written at all.
    config = read_config_json(source.store) if CONFIG in catalog.files else None
    has_config = format.carries_files and not is_file
    return keep_recordable_ties(catalog, config_beside(catalog, config) if has_config else None)


def _lay_out_files(
    target: TargetCatalog, source: Checkpoint, format: Format, dst: Path
) -> tuple[FileImage, ...]:
    """Lay out the files of the destination under their final paths."""
    assert format.lay_out is not None, "the format is writable"
    images = tuple(format.lay_out(target))
    if not (format.carries_files or target.write.is_file):
        beside = file_images(target)
        if format.is_rank_local:  # the layout of rank files has the training root already
            is_release = target.write.is_release or target.iteration is None
            iteration = RELEASE if is_release else target.iteration
            beside = [
                replace(image, path=iteration_path(image.path, iteration)) for image in beside
            ]
        images = (*images, *beside)
    if format.has_common_state or target.facet(FsdpDtensorFacts) is not None:
        images = in_training_root(images, RELEASE if source.is_release else target.iteration)
    return (replace(images[0], path=dst.name),) if target.write.is_file else images


def _nesting_notes(catalog: Catalog, format: Format, *, is_bare: bool) -> list[str]:
    """Describe the containers around tensors that the destination does not keep.

    Args:
        is_bare: it has only tensors.
    """
    if is_model_form(catalog):
        return []
    sharing = sharing_notes(catalog, keeps_ties=format.keeps_nesting or format.records_ties)
    if keeps_containers(catalog, format) and not is_bare:
        return sharing
    if format.has_common_state or format.has_objects_beside:
        return [*flattening_notes(catalog, has_common=format.has_common_state), *sharing]
    return [*root_notes(catalog), *nesting_notes(state_dict(catalog)), *sharing]


def _describe_dropped(catalog: Catalog, format: Format, *, is_bare: bool) -> list[Dropped]:
    """Describe each entry that the destination cannot store, with the reason."""
    # Attributes of mappings. A mapping without tensors may be stored whole.
    dropped: list[Dropped] = []
    if not is_model_form(catalog) and (is_bare or not keeps_containers(catalog, format)):
        attributes = (
            attributes_beside_tensors(catalog.skeleton)
            if format.has_common_state or format.has_objects_beside
            else attributes_of(state_dict(catalog).skeleton)
        )
        dropped += record_lost_attributes(attributes)
    if format.keeps_objects and not is_bare:
        return dropped

    # Objects; those with the same first part of their names share a line.
    from core.megatron.extras.common_state import OPTIMIZER

    optimizer = [OPTIMIZER] if catalog.optimizer is not None else []
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys((*catalog.objects, *map(str, catalog.common or {}), *optimizer)):
        groups.setdefault(key.partition(".")[0], []).append(key)
    for name, keys in groups.items():
        label = keys[0] if len(keys) == 1 else f"{name}.… ({len(keys)} entries)"
        line = f"{label}: not a tensor, so {format.title} cannot store it"
        dropped.append(Dropped(tuple(keys), f"{format.title} stores only tensors", line))
    return dropped


def _describe_lost_files(
    source: Checkpoint,
    form: Catalog,
    written: Mapping[str, Tensor | bytes],
    dropped: Sequence[Dropped],
) -> list[Dropped]:
    """Describe the files beside the weights, of the source or made, that are not written.

    Args:
        form: the source's global form.
        written: path → content of the files that are written beside the weights.
        dropped: what is listed already.
    """
    files = {**source.catalog.files, **form.documents}
    # A tokenizer of Megatron is written under other paths.
    copied = set(map(id, written.values()))
    described = {name for entries in dropped for name in entries.names}
    # Of a model that becomes Megatron's, the arguments say what the configuration says.
    described |= {CONFIG} if form.facet(MegatronModel) is not None else set()
    lost = [
        path
        for path, content in files.items()
        if path not in written and id(content) not in copied and path not in described
    ]
    return [*dropped_together(lost, FILES_BESIDE)]
