"""The source of a job as global tensors under their final names, whatever it was before.

::

    rank files, stacked keys ── unshard ── changes ──┬──────────────▶ Megatron's global form
                                                     └── hf.to_hf ──▶ Hugging Face names
    Hugging Face names ── changes ──┬── hf.to_megatron ──▶ Megatron's global form
                                    └────────────────────▶ Hugging Face names
    anything else ── changes ──▶ the names it had

Which way is taken follows from the job and from what the source is; options that would have no effect are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from core.catalog.catalog import Catalog
from core.catalog.facets import HuggingFaceModel, MegatronModel
from core.catalog.files_beside import carried_of, with_documents
from core.changes.select import is_optimizer_key, without_optimizer
from core.convert.apply_changes import Changed, changed
from core.convert.job import Job
from core.convert.options import (
    HF_ALIASES,
    changes_layout,
    check_names,
    check_target,
    check_vocabulary,
    is_cut,
    refuse_broken_optimizer,
    refuse_layout_options,
    refuse_quantizing,
)
from core.convert.sizes import check_source_sizes, target_topology
from core.errors import CheckpointingException, MissingShardError, UnsupportedError, UsageError
from core.files.json_object import parse_json_object
from core.files.store import translate_os_errors
from core.formats.format import Format
from core.formats.huggingface.files import CONFIG
from core.formats.torch.format import load_object, refuse_unsupported
from core.megatron.extras.random_states import with_rng
from core.megatron.model.args import facts_of, with_vocab_size
from core.megatron.model.checks import check_complete
from core.megatron.optimizer.sharded.write import sharding_of, wanted_sharding
from core.megatron.placement.implementation import with_implementation
from core.megatron.reshard.from_global import has_megatron_names
from core.megatron.reshard.reshard import Rules, is_megatron, load_rules, unshard
from core.opening.objects import loaded
from core.opening.open import Checkpoint
from core.opening.source_files import config_of_source, documents_above, listed_files, unread_files


@dataclass(frozen=True, slots=True)
class GlobalForm:
    """The source of a job, ready to be cut and laid out.

    Args:
        catalog: global tensors under their final names, all objects loaded.
        renamed: (old key, new key) of what the user's options renamed.
        notes: what the user should know.
        dropped: entries that were left out, with the reason.
    """

    catalog: Catalog
    renamed: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    dropped: tuple[str, ...]


def is_model_form(catalog: Catalog) -> bool:
    """Return whether a catalog is the form that a table of rules made: Megatron's, or Hugging Face's out of it."""
    return catalog.facet(MegatronModel) is not None or catalog.facet(HuggingFaceModel) is not None


def is_mcore(catalog: Catalog) -> bool:
    """Whether a catalog is in the schema of Megatron's distributed checkpoints, with their common state."""
    return catalog.common is not None


def global_form(job: Job, source: Checkpoint, format: Format) -> GlobalForm:
    """See the module's docstring.

    Args:
        job: what is asked for.
        source: the opened source.
        format: of the destination.

    Raises:
        CheckpointingException: any kind.
    """
    from core.hf import check_model, is_hf

    catalog = with_documents(loaded(source.catalog, source.store, load_object), documents_above(source))
    rules = load_rules(job.rules, unknown=job.unknown)
    names, model_type = _names(job)
    check_source_sizes(job, catalog)
    unread = unread_files(replace(source, catalog=catalog))
    catalog, config = _with_config(job, catalog, source)
    comes_from_hf = is_hf(catalog, config)
    if job.config is not None and not comes_from_hf:
        _refuse_config(job.config, config, catalog, rules)
    check_names(job, names, model_type, format, config if comes_from_hf else None)
    is_named = comes_from_hf or is_megatron(catalog, rules)
    check_target(job, format, is_named=is_named)
    if names == "megatron" and not is_named and not _is_rank_local(catalog):
        _refuse_without_arguments(catalog, rules)
        raise UsageError(
            "--names megatron: the tensors have neither Megatron's names nor Hugging Face's with a config.json",
            hint="point at the model's config.json with --config FILE",
        )
    notes: list[str] = []
    dropped = [listed_files(unread)] if unread else []
    is_restacked = format.is_mcore and job.stacking is not None  # core.megatron.reshard.to_torch_dist does it
    if is_restacked:
        job = replace(job, stack_layers=False, unstack_layers=None)
    if comes_from_hf and job.rng is not None:
        raise UsageError("--rng has no effect: Hugging Face weights come without random states", hint="leave it out")
    if comes_from_hf and (names == "megatron" or (is_cut(format) and names != "hf")):
        assert config is not None
        return _as_megatron(job, catalog, format, config, notes, dropped)
    if job.vocab_divisor is not None:
        raise UsageError(
            "--make-vocab-size-divisible-by has no effect: no Hugging Face weights become Megatron's here",
            hint="leave it out; a Megatron checkpoint keeps its own",
        )
    wants_hf = names == "hf" and not comes_from_hf
    if wants_hf or is_restacked or _is_laid_out(job, catalog, format, rules, names):
        if not _is_rank_local(catalog) and not is_megatron(catalog, rules):
            _refuse_without_arguments(catalog, rules)
            _refuse_names(catalog, format, wants_hf=wants_hf)
        refuse_quantizing(job, format)
        catalog = unshard(
            catalog,
            rules=rules,
            vocab_size=job.vocab_size,
            optim="drop" if job.optim == "drop" else "refuse" if wants_hf else "carry",
            keep_padded_vocab=job.keep_padded_vocab,
            target_tp=target_topology(job, catalog, format).tp if is_cut(format) else None,
            store=source.store,
        )
        catalog = _completed(job, catalog, source, notes, wants_hf=wants_hf)
        catalog = with_rng(catalog, job.rng, has_place=is_cut(format), has_ranks=format.partition == "ranks")
        if job.transformer_impl is not None:
            if not is_cut(format):
                raise UsageError(
                    f"--transformer-impl has no effect on {format.name}",
                    hint="it is for --to megatron and --to torch_dist",
                )
            catalog = with_implementation(catalog, job.transformer_impl, rules=rules)
    else:
        refuse_layout_options(job)
        catalog = _without_optimizer(job, catalog, dropped)
        notes += _left_form(catalog, format)
    if wants_hf:
        return _as_hf(job, catalog, format, model_type, notes, dropped)
    made = _changed(catalog, job, notes, config)
    if comes_from_hf and (names == "hf" or job.config is not None):
        assert config is not None
        document = made.catalog.documents.get(CONFIG)
        stated = config if document is None else parse_json_object(document, file=CONFIG)
        with _complete(made, "Hugging Face"):
            notes += check_model(made.catalog, stated, files=carried_of(catalog), is_strict=job.config is not None)
    if format.carries_files:
        notes += made.config_notes
    is_global = catalog.facet(MegatronModel) is not None
    if is_cut(format) and (is_global or is_mcore(catalog)) and not made.renamed:
        refuse_broken_optimizer(catalog, made.catalog)
    if is_cut(format) and is_global and (made.left_out or made.renamed):
        _refuse_incomplete(made.catalog, rules)
    return GlobalForm(made.catalog, made.renamed, tuple(notes), tuple(dropped))


def _as_megatron(
    job: Job,
    catalog: Catalog,
    format: Format,
    config: Mapping[str, object],
    notes: list[str],
    dropped: list[str],
) -> GlobalForm:
    """Megatron's global form of tensors with Hugging Face's names; the user's changes go by the latter."""
    from core.hf import check_model, model_types, to_megatron

    check_vocabulary(job, config)
    refuse_quantizing(job, format)
    catalog = _without_optimizer(job, catalog, dropped)
    late = Job(src=job.src, stack_layers=job.stack_layers, unstack_layers=job.unstack_layers, quantize=job.quantize)
    early = replace(job, stack_layers=False, unstack_layers=None, quantize=())
    first = _changed(catalog, early, notes, config)
    document = first.catalog.documents.get(CONFIG)
    config = config if document is None else parse_json_object(document, file=CONFIG)
    divisor = job.vocab_divisor or VOCAB_DIVISOR
    with _complete(first, "Hugging Face"):
        if config.get("model_type") in model_types():
            check_model(first.catalog, config, files=carried_of(first.catalog), is_strict=True)
        catalog = to_megatron(
            first.catalog, config, make_vocab_size_divisible_by=divisor, transformer_impl=job.transformer_impl
        )
    notes.append(f"padded vocabularies are multiples of {divisor} × TP (--make-vocab-size-divisible-by)")
    second = _changed(catalog, late, notes)
    return GlobalForm(second.catalog, first.renamed + second.renamed, tuple(notes), tuple(dropped))


def _as_hf(
    job: Job, catalog: Catalog, format: Format, model_type: str | None, notes: list[str], dropped: list[str]
) -> GlobalForm:
    """Megatron's global form under Hugging Face's names; changes go by Megatron's names, scales by the new ones."""
    from core.hf import to_hf

    first = _changed(catalog, replace(job, quantize=()), notes)
    with _complete(first, "Megatron"):
        catalog = to_hf(first.catalog, model_type=model_type, has_config=format.carries_files)
    second = _changed(catalog, Job(src=job.src, quantize=job.quantize), notes)
    return GlobalForm(second.catalog, first.renamed + second.renamed, tuple(notes), tuple(dropped))


def _without_optimizer(job: Job, catalog: Catalog, dropped: list[str]) -> Catalog:
    """The catalog without its optimizer, if the job asks for that."""
    if job.optim != "drop":
        return catalog
    without = without_optimizer(catalog)
    if without.left_out:
        dropped.append(f"optimizer ({len(without.left_out)} entries)")
    return without.catalog


@contextmanager
def _complete(made: Changed, whose: str) -> Iterator[None]:
    """Turns a tensor that is missed into a mistake of the user's, whose options left it out or renamed it."""
    try:
        yield
    except MissingShardError as err:
        if not (made.left_out or made.renamed):
            raise
        raise UsageError(
            f"--include, --exclude or the new names leave an incomplete {whose} model: {err.message}",
            key=err.key,
            hint="keep the names, without --config, to write a part of a model: --to safetensors, dcp or torch",
        ) from err


def _refuse_config(path: Path, config: Mapping[str, object] | None, catalog: Catalog, rules: Rules) -> NoReturn:
    """Raise for a configuration that ``--config`` gives, of a source that is not a Hugging Face model with it.

    Raises:
        UsageError: it is not a model's, or the source does not need it.
        UnsupportedError: the source needs training arguments, whose place it cannot take.
    """
    if config is None or not isinstance(config.get("model_type"), str):
        raise UsageError(
            "--config: the file names no model_type, so it does not describe a model of transformers",
            file=str(path),
            hint="give the config.json of the model",
        )
    if not _is_rank_local(catalog) and not is_megatron(catalog, rules):
        _refuse_without_arguments(catalog, rules)
    raise UsageError(
        "--config has no effect: the checkpoint is Megatron's, with training arguments", hint="leave it out"
    )


def _refuse_without_arguments(catalog: Catalog, rules: Rules) -> None:
    """Raise if the tensors have Megatron's names, but nothing describes their model.

    Raises:
        UnsupportedError: so it is.
    """
    if has_megatron_names(catalog, rules):
        raise UnsupportedError(
            "the tensors have Megatron's names, but the checkpoint holds no training arguments (args), which describe "
            f"the model and its layout; a {CONFIG} cannot take their place",
            hint="convert a checkpoint of the run that holds them, or keep the names: --to safetensors, dcp or torch",
        )


def _refuse_names(catalog: Catalog, format: Format, *, wants_hf: bool) -> None:
    """Tensors whose names nobody knows cannot be renamed, nor cut by a layout.

    Raises:
        UnsupportedError: the names are not Megatron's, or there are no arguments of Megatron's.
    """
    first = next((key for key in catalog.tensors if not is_optimizer_key(key)), "")
    wanted = "Hugging Face's names" if wants_hf else f"{format.name} with a parallel layout"
    keeps = "safetensors" if wants_hf else "torch_dist, dcp or torch"
    raise UnsupportedError(
        f"the tensors ({first!r} …) cannot become {wanted}: they have neither Megatron's names and arguments, nor "
        f"Hugging Face's with a {CONFIG} beside them",
        hint=f"give the {CONFIG} of the model with --config FILE, or keep the names: --to {keeps}",
    )


def _with_config(job: Job, catalog: Catalog, source: Checkpoint) -> tuple[Catalog, Mapping[str, object] | None]:
    """The catalog, and the parsed config.json beside its weights, above them or of ``--config``; None if there is none.

    Raises:
        UsageError: there are two.
        CorruptError: it is not JSON.
    """
    if job.config is None:
        return catalog, config_of_source(source)
    if CONFIG in carried_of(catalog):
        raise UsageError(
            "--config: SRC has a config.json of its own",
            file=str(job.config),
            hint="leave --config out, or edit that one",
        )
    with translate_os_errors(str(job.config), doing="read"):
        data = job.config.read_bytes()
    return with_documents(catalog, {CONFIG: data}), parse_json_object(data, file=str(job.config))


def _is_rank_local(catalog: Catalog) -> bool:
    return catalog.is_rank_local


def _names(job: Job) -> tuple[str | None, str | None]:
    """(``hf``, ``megatron`` or None, the Hugging Face model type or None)."""
    if job.names is None:
        return ("hf", None) if job.to is not None and job.to.lower() in HF_ALIASES else (None, None)
    family, _, model_type = job.names.partition(":")
    if family not in ("hf", "megatron") or (model_type and family != "hf"):
        raise UsageError(
            f"--names {job.names!r} is not known", hint="say hf, hf:MODEL_TYPE (such as hf:qwen3_moe), or megatron"
        )
    return family, model_type or None


VOCAB_DIVISOR = 128
"""Megatron's default of ``--make-vocab-size-divisible-by``."""


def _changed(catalog: Catalog, job: Job, notes: list[str], config: Mapping[str, object] | None = None) -> Changed:
    """The user's changes; what cannot be copied must be gone after them."""
    made = changed(catalog, job, config=config)
    refuse_unsupported(made.catalog)
    notes += made.notes
    return made


def _is_laid_out(job: Job, catalog: Catalog, format: Format, rules: Rules, names: str | None) -> bool:
    """Whether the source must be brought into Megatron's global form."""
    if _is_rank_local(catalog) or format.partition == "ranks" or changes_layout(job):
        return True
    if (names == "megatron" or job.transformer_impl is not None) and is_megatron(catalog, rules):
        return True
    if not format.is_mcore or not is_megatron(catalog, rules):
        return False
    return not is_mcore(catalog) or (job.optim == "carry" and _has_other_optimizer(catalog, format))


def _has_other_optimizer(catalog: Catalog, format: Format) -> bool:
    """Whether there is a distributed optimizer, whose form is another in each of Megatron's formats."""
    return format.name != catalog.format and sharding_of(catalog) is not None


def _left_form(catalog: Catalog, format: Format) -> list[str]:
    """A note on a distributed optimizer that stays as it is, and so loads only where it was saved."""
    sharding = sharding_of(catalog)
    if not format.is_mcore or sharding in (None, wanted_sharding(format.name)):
        return []
    return [
        f"the optimizer's state stays {sharding}, which Megatron does not load at other sizes, if at all; with "
        "--tp-new or --pp-new, the same sizes or others, it becomes " + wanted_sharding(format.name)
    ]


def _completed(job: Job, catalog: Catalog, source: Checkpoint, notes: list[str], *, wants_hf: bool) -> Catalog:
    """The global form with what the user or the directory's name says beside the checkpoint."""
    if catalog.iteration is None and source.iteration is not None:
        notes.append(f"the files do not say their iteration; {source.iteration} is the directory's")
        catalog = replace(catalog, iteration=source.iteration)
    model = catalog.facet(MegatronModel)
    n_rows = None if model is None else model.vocab_size
    if (job.vocab_size is not None or job.keep_padded_vocab) and n_rows is not None:
        args = with_vocab_size(catalog.args, n_rows)
        catalog = replace(catalog, args=args, common={**(catalog.common or {}), "args": args})
        notes.append(f"args.vocab_size is now {n_rows}")
    if any(glob is None for glob, _ in job.dtype) and not wants_hf:
        notes.append("params_dtype, bf16 and fp16 in the arguments stay as they were")
    return catalog


def _refuse_incomplete(catalog: Catalog, rules: Rules) -> None:
    """A Megatron checkpoint without some of the model's tensors would load nowhere.

    Raises:
        UsageError: names what is missing.
    """
    try:
        facts = facts_of(catalog.args, names=rules.model_of(catalog.tensors))
        check_complete(catalog.tensors, facts, rules)
    except (CheckpointingException, ValueError) as err:
        what = err.message if isinstance(err, CheckpointingException) else str(err)
        raise UsageError(
            f"--include, --exclude or --rename leave an incomplete Megatron model: {what}",
            key=getattr(err, "key", None),
            hint="write --to dcp or --to torch to keep a part of a model",
        ) from err
