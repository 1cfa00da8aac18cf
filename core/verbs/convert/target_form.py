"""Check the source's global form and cut it for the destination's format.

``core.verbs.convert.prepare`` plans the copy from the result; ``core.verbs.inspect.capabilities``
only needs to know whether the steps succeed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from shlex import quote as quoted_word

from core.engine.catalog.attributes import (
    build_entry_values,
    drop_matching_attributes,
    find_lost_attributes,
    turn_into_attributes,
    turn_into_entries,
    without_any_attributes,
    without_stale_attributes,
)
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.dropped import Dropped, dropped_together
from core.engine.catalog.facets import (
    HuggingFaceModel,
    MegatronModel,
    RankFacts,
    TorchFileFacts,
    TrainingState,
)
from core.engine.catalog.key_patterns import matcher
from core.engine.catalog.optimizer_keys import param_of, split_state_key, state_key
from core.engine.catalog.tensor import Tensor
from core.engine.changes.rename import rename_entries
from core.errors import UnsupportedError, UsageError, list_some
from core.files.json_object import read_small_file
from core.formats.format import LOADER_STATE, Format
from core.formats.huggingface.files import is_tokenizer_file, read_config_json
from core.formats.torch.stream import has_pickled_name
from core.formats.torch.weights_only import names_importable
from core.opening.code_in_pickles import list_dangerous_names
from core.opening.objects import apply_object_policy, load_attributes, refuse_in_ranks
from core.opening.open import Checkpoint
from core.opening.target import partitioned, source_and_target
from core.pickle.inert import TensorLeaf
from core.pickle.key_text import class_of_key, faithful_text
from core.pickle.nesting import entries, join_path
from core.verbs.convert.apply_changes import config_beside
from core.verbs.convert.global_form.build import global_form
from core.verbs.convert.global_form.form import GlobalForm, is_model_form
from core.verbs.convert.global_form.request import load_job_rules
from core.verbs.convert.job import Job
from core.verbs.convert.options import cuts_experts, writes_fsdp_dtensor
from core.verbs.convert.report.training_state import without_unknown_classes
from core.verbs.convert.sizes import target_topology


def safe_form(
    job: Job, source: Checkpoint, format: Format, others: Sequence[Checkpoint] = ()
) -> GlobalForm:
    """Build the source's global form without the objects that must not be carried over.

    Args:
        job: the conversion.
        source: from ``core.opening.objects.with_objects_loaded``.
        format: the format of the destination.
        others: the other sources of a merge.

    Raises:
        CheckpointingException: the job cannot be done.
    """
    form = without_unsafe(global_form(job, source, format, others), job, source, format)
    refuse_in_ranks(source.catalog, exclude=job.exclude, carried=form.catalog.objects)
    return form


def without_unsafe(form: GlobalForm, job: Job, source: Checkpoint, format: Format) -> GlobalForm:
    """Remove the objects that must not be carried over from a source's global form.

    Args:
        form: from ``global_form``.
        job, source, format: as for ``safe_form``.

    Raises:
        UnsupportedError: a name cannot be written as text.
        CheckpointingException: an object can neither be stored nor dropped silently.
    """
    # Every name must be UTF-8, and a key on the way to an entry must give a part of its name.
    for key in (*form.catalog.tensors, *form.catalog.objects, *form.catalog.hidden):
        try:
            key.encode()
        except UnicodeEncodeError as err:  # half a surrogate pair, as a pickle may contain
            # No command line can hold the name, but a pattern stands for it; a tensor inside an
            # object leaves with the object.
            owner = next((name for name in form.catalog.objects if key.startswith(f"{name}:")), key)
            pattern = re.sub(r"[\ud800-\udfff*?\[\]]", "?", owner)
            raise UnsupportedError(
                f"the name cannot be encoded as UTF-8: {err.reason}",
                key=key,
                hint=f"drop the entry with --exclude {quoted_word(pattern)}",
            ) from err
    if not (format.keeps_nesting or is_model_form(form.catalog)):
        _check_keys(form.catalog, only_tensors=format.has_common_state, file=source.store.label)

    # Drop objects of dangerous and, where the format cannot hold them, of unknown classes. A
    # trainer's own are never needed to load a model.
    if not format.keeps_unknown_classes:
        without = without_unknown_classes(form.catalog, format)
        form = replace(form, catalog=without.catalog, dropped=(*without.dropped, *form.dropped))
    catalog = apply_object_policy(
        form.catalog, keeps_unknown=format.keeps_unknown_classes, drop_unknown=job.drop_unknown
    )
    weights_only = job.weights_only or not _has_live_objects(source)
    catalog = replace(catalog, write=replace(catalog.write, weights_only=weights_only))
    return replace(form, catalog=catalog)


def settle_attributes(
    form: GlobalForm, job: Job, opened: Catalog, sources: Sequence[Checkpoint], format: Format
) -> GlobalForm:
    """Give attributes the form that the destination stores, and list those that it cannot.

    Args:
        form: from ``safe_form``.
        job: the conversion.
        opened: the catalog of the source as it was opened.
        sources: the source from ``with_objects_loaded``, and the other sources of a merge.
        format: the format of the destination.
    """
    catalog = without_stale_attributes(form.catalog, sources[0].catalog)
    # Megatron's files, and the state dicts of its models, have the entries that Megatron knows.
    is_megatron = catalog.facet(MegatronModel) is not None
    if is_megatron or not (format.keeps_attributes or format.keeps_objects):
        catalog = without_any_attributes(catalog)
    settled = (
        turn_into_attributes(catalog) if format.keeps_attributes else turn_into_entries(catalog)
    )
    notes = form.notes
    new = [name for name in build_entry_values(opened) if name in settled.objects]
    if new:
        pops = "; ".join(f"state_dict.pop({name!r})" for name in new)
        note = f"metadata and attributes are stored as the {'entries' if new[1:] else 'entry'} "
        note += " and ".join(new)
        notes = (*notes, f"{note} (remove before a strict load_state_dict: {pops})")

    # What the user dropped is not listed: attributes, and tensors with theirs.
    exclude = [matcher(pattern) for pattern in job.exclude]
    include = [matcher(pattern) for pattern in job.include]
    dropped: list[Dropped] = []
    for source in sources:
        before = drop_matching_attributes(
            load_attributes(source.catalog, source.store), job.exclude
        )
        for path, values in find_lost_attributes(before, catalog).items():
            is_excluded = any(matches(path) for matches in exclude) or (
                include and path in before.tensors and not any(matches(path) for matches in include)
            )
            if not is_excluded:
                owner = "" if source is sources[0] else f" of {source.path.name}"
                names = tuple(f"{path}.{name}{owner}" if path else name + owner for name in values)
                reason = "metadata and attributes that the destination cannot store"
                dropped += dropped_together(names, reason)
    return replace(form, catalog=settled, notes=notes, dropped=(*form.dropped, *dropped))


def with_folders_beside(
    catalog: Catalog, target: TargetCatalog, source: Checkpoint, format: Format
) -> tuple[Catalog, TargetCatalog]:
    """Carry the directories beside Megatron's files into a format that has them, or to the model.

    The tokenizer's files of a Megatron checkpoint are those of the directory itself where the
    model gets Hugging Face's names. States of data loaders stay with the training run.

    Args:
        catalog, target: from ``cut_form``.
        source: the opened source.

    Raises:
        UsageError: ``--tokenizer`` names another tokenizer.
    """
    folders = tuple(f"{folder}/" for folder in source.format.side_folders)
    is_hf = format.carries_files and catalog.facet(HuggingFaceModel) is not None
    files: dict[str, Tensor | bytes] = {}
    for path, content in source.catalog.files.items():
        if not (path.startswith(folders) or (folders and LOADER_STATE.fullmatch(path))):
            continue
        name = path.partition("/")[2]
        if is_hf and is_tokenizer_file(name):
            if name in target.files:
                raise UsageError(
                    f"--tokenizer: the checkpoint already has a tokenizer ({path})",
                    file=name,
                    hint="omit --tokenizer",
                )
            files[name] = content
        elif not is_hf and (format.side_folders or format.carries_files):
            files[path] = content
    beside = Catalog(source.format.name, None, {}, files=files)
    planned = partitioned(beside, format=target.format, by="whole")
    return (
        replace(catalog, files={**catalog.files, **files}),
        replace(target, files={**target.files, **planned.files}),
    )


def with_tokens_in_configuration(
    catalog: Catalog, target: TargetCatalog, source: Checkpoint
) -> tuple[Catalog, TargetCatalog, tuple[str, ...]]:
    """Complete the configuration of a model by its tokenizer, so that a server can load both.

    Args:
        catalog, target: from ``with_folders_beside``.
        source: the opened source.

    Returns:
        Both with the files, and notes.

    Raises:
        UsageError: the tokenizer has tokens for which the model has no row.
    """
    from core.formats.huggingface.special_tokens import (
        MAX_BYTES,
        TOKENIZER_FILES,
        check_token_count,
        complete_configuration,
        read_special_tokens,
    )

    contents: dict[str, bytes] = {}
    for name in TOKENIZER_FILES:
        content = target.files.get(name)
        if isinstance(content, bytes):
            contents[name] = content
        elif content is not None:
            places = (name, *(f"{folder}/{name}" for folder in source.format.side_folders))
            path = next(path for path in places if path in source.catalog.files)
            if source.store.size(path) <= MAX_BYTES:
                contents[name] = read_small_file(source.store, path, max_bytes=MAX_BYTES)
    config = config_beside(catalog, read_config_json(source.store))
    if not contents or config is None:
        return catalog, target, ()
    tokens = read_special_tokens(contents)
    beyond = check_token_count(tokens, config)
    files, notes = complete_configuration(target.files, config, tokens)
    return (
        replace(catalog, files={**catalog.files, **files}),
        replace(target, files={**target.files, **files}),
        (*beyond, *notes),
    )


def describe_unsafe_files(source: Checkpoint, paths: Iterable[str]) -> tuple[Dropped, ...]:
    """Return the record of the files that are not carried, as their pickles would run code.

    Args:
        paths: the files that are copied, under the paths that they have in the source.
    """
    dropped: list[Dropped] = []
    for path in paths:
        if not (has_pickled_name(path) or path.endswith((".pt", ".pth", ".ckpt", ".bin"))):
            continue
        from core.formats.torch.other_pickles import look_into

        pickled = look_into(source.store, path, source.store.size(path))
        names = list_dangerous_names(pickled.uses)
        if names:
            reason = f"refers to {names[0]}, which would run code when loaded"
            dropped.append(Dropped((path,), reason))
        elif pickled.unread:
            dropped.append(Dropped((path,), f"not checked for code: {pickled.unread[0]}"))
    return tuple(dropped)


def describe_loader_states(job: Job, target: TargetCatalog) -> list[str]:
    """Write a note on carried states of data loaders if the parallel sizes change."""
    ranks = {match["rank"] for path in target.files if (match := LOADER_STATE.fullmatch(path))}
    if not ranks or job.topology is None or not job.topology.is_change:
        return []
    n = f"{len(ranks)} data-parallel ranks" if len(ranks) > 1 else "one data-parallel rank"
    note = f"data loader states are copied unchanged; they belong to {n}"
    return [f"{note}, so training with a different number cannot continue at the same samples"]


def cut_form(job: Job, catalog: Catalog, format: Format) -> tuple[Catalog, TargetCatalog]:
    """Cut the global form for the destination's format.

    Args:
        job: the conversion.
        catalog: the catalog of ``safe_form``.
        format: the format of the destination.

    Returns:
        The source under the target's keys, and the target catalog whose arrays are to be placed.

    Raises:
        CheckpointingException: the layout rules cannot cut a tensor, or the format cannot store it.
    """
    # Rank files: every tensor is cut for each rank.
    if format.is_rank_local:
        from core.megatron.placement.adapter_rows import to_stored_order
        from core.megatron.reshard.to_ranks import shard
        from core.megatron.rules.experts import transposed

        topology = target_topology(job, catalog, format)
        catalog = to_stored_order(catalog, topology.tp)
        target = shard(
            catalog,
            topology,
            rules=load_job_rules(job),
            vocab_size=job.vocab_size,
            rng=job.rng,
            version=job.megatron_version,
        )
        ranks = target.facet(RankFacts)
        assert ranks is not None, "shard builds rank files"
        return transposed(catalog, ranks.transposed), target

    # Megatron's distributed checkpoints: global tensors, with layers stacked as Megatron does.
    if catalog.facet(MegatronModel) is not None and format.has_layout:
        from core.megatron.reshard.to_torch_dist import to_torch_dist

        stacked = to_torch_dist(
            catalog,
            target_topology(job, catalog, format),
            rules=load_job_rules(job),
            vocab_size=job.vocab_size,
            format=format.name,
            is_stacked=job.stacking,
        )
        if format.has_grids:
            return stacked.source, partitioned(stacked.target, format=format.name, by="grid")
        return stacked.source, stacked.target

    # Megatron-FSDP's checkpoints: DCP with names of their own, and a padded vocabulary.
    if catalog.facet(MegatronModel) is not None and writes_fsdp_dtensor(job):
        from core.megatron.reshard.to_fsdp_dtensor import to_fsdp_dtensor, with_padding

        form = to_fsdp_dtensor(
            catalog,
            target_topology(job, catalog, format),
            rules=load_job_rules(job),
            vocab_size=job.vocab_size,
        )
        source, target = source_and_target(form, format)
        return source, with_padding(target)
    source, target = source_and_target(_with_complete_names(catalog), format)
    if format.cut_experts is not None and cuts_experts(job, format):
        assert job.topology is not None and job.topology.ep is not None, "it has an EP size"
        source, target = format.cut_experts(source, target, ep=job.topology.ep)
    return source, target


def _with_complete_names(catalog: Catalog) -> Catalog:
    """Return a catalog in which a text model beside towers has its names in the complete model."""
    model = catalog.facet(MegatronModel)
    if model is None or model.wrapper is None:
        return catalog
    from core.megatron.rules.tables import load_rules as load_tables

    wrapper = load_tables().wrapper_in(model.wrapper)
    if wrapper is None:
        return catalog
    new_of: dict[str, str] = {}
    for key in (*catalog.tensors, *catalog.objects):
        state, name = split_state_key(key), wrapper.wrapped(param_of(key))
        new_of[key] = name if state is None else state_key(state[0], name)
    return rename_entries(catalog, new_of)


def _has_live_objects(source: Checkpoint) -> bool:
    """Return True if objects may stay instances of their classes in a torch file.

    They may if torch's own loader of the source creates such instances. DCP's loader does, except
    for classes of packages other than torch and numpy, which this project sets aside in every DCP
    that it writes. Objects of other formats, and those that a torch file had set aside, are
    written so that ``torch.load(weights_only=True)`` accepts them.
    """
    torch_file = source.catalog.facet(TorchFileFacts)
    if torch_file is not None and torch_file.is_set_aside:
        return False
    # A trainer's files next to the weights must not keep torch.load from loading these.
    if source.catalog.facet(TrainingState) is not None:
        return False
    values = [item.value for item in source.catalog.objects.values()]
    own = source.format
    return own.has_live_objects and (own.keeps_nesting or names_importable(values))


def _check_keys(catalog: Catalog, *, only_tensors: bool, file: str) -> None:
    """Raise unless every dict key on the way to an entry has a text for the entry's name.

    Args:
        catalog: the global form.
        only_tensors: check tensors only; other entries stay in their dicts.
        file: label of the source, for the error.

    Raises:
        UnsupportedError: a key is an object without such a text.
    """
    if catalog.skeleton is None:
        return
    # Path of a dict → classes of those keys that have no text; a dict serves as an ordered set.
    nameless: dict[str, dict[str, None]] = {}
    for entry in entries(catalog.skeleton):
        if only_tensors and not isinstance(entry.leaf, TensorLeaf):
            continue
        for depth, part in enumerate(entry.path):
            if faithful_text(part) is None:
                nameless.setdefault(join_path(entry.path[:depth]), {})[class_of_key(part)] = None
                break
    if not nameless:
        return
    (path, classes), *further = nameless.items()
    more = f"; also {list_some(name for name, _ in further)}" if further else ""
    raise UnsupportedError(
        f"the dict {path or 'at the root'} has objects as keys ({list_some(classes)}), "
        f"which cannot be written as entry names{more}",
        key=path or None,
        file=file,
        hint="write a torch file, which keeps such keys (--to torch), drop the entries "
        f"(--exclude {quoted_word(path or '<*')}), or save the dict with different keys",
    )
