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

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from core.catalog import Catalog
from core.changes import Changed, changed
from core.errors import CheckpointingException, MissingShardError, UnsupportedError, UsageError
from core.formats import Format
from core.formats.hf_files import CONFIG, carried_of, config_of, documents_of, with_documents
from core.formats.torch_file import load_object, refuse_unsupported
from core.inert import as_mapping
from core.job import Job
from core.json_object import object_of
from core.layout import Rules, is_megatron, load_rules, unshard
from core.layout_args import facts_of, topology_of, with_vocab_size
from core.layout_checks import check_complete
from core.layout_rng import with_rng
from core.layout_spec import with_implementation
from core.objects import loaded
from core.open import Checkpoint
from core.optim_stack import sharding_of, wanted_sharding
from core.store import translated
from core.topology import Topology
from core.transform import is_optimizer_key, without_optimizer


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


def is_cut(format: Format) -> bool:
    """Whether a destination of this format is cut by a parallel layout."""
    return format.partition == "ranks" or format.is_mcore


def is_mcore(catalog: Catalog) -> bool:
    """Whether a catalog is in the schema of Megatron's distributed checkpoints, with their common state."""
    return "common" in catalog.attrs


def global_form(job: Job, source: Checkpoint, format: Format) -> GlobalForm:
    """See the module's docstring.

    Args:
        job: what is asked for.
        source: the opened source.
        format: of the destination.

    Raises:
        CheckpointingException: any kind.
    """
    from core.hf import is_hf

    catalog = loaded(source.catalog, source.store, load_object)
    rules = load_rules(job.rules, unknown=job.unknown)
    names, model_type = _names(job)
    _check_source_sizes(job, catalog)
    catalog, config = _with_config(job, catalog, source)
    comes_from_hf = is_hf(catalog, config)
    if job.config is not None and not comes_from_hf:
        raise UsageError("--config has no effect: the tensors have Megatron's names", hint="leave it out")
    _check_names(job, names, model_type, format, config if comes_from_hf else None)
    is_named = comes_from_hf or is_megatron(catalog, rules)
    _check_target(job, format, is_named=is_named)
    if names == "megatron" and not is_named and not _is_rank_local(catalog):
        raise UsageError(
            "--names megatron: the tensors have neither Megatron's names nor Hugging Face's with a config.json",
            hint="point at the model's config.json with --config FILE",
        )
    notes: list[str] = []
    dropped = _files_left(source)
    is_restacked = format.is_mcore and job.stacking is not None  # core.layout_stack does it
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
            _refuse_names(catalog, format, wants_hf=wants_hf)
        _refuse_quantizing(job, format)
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
        _refuse_layout_options(job)
        catalog = _without_optimizer(job, catalog, dropped)
        notes += _left_form(catalog, format)
    if wants_hf:
        return _as_hf(job, catalog, format, model_type, notes, dropped)
    made = _changed(catalog, job, notes, config)
    if format.carries_files:
        notes += made.config_notes
    if catalog.attrs.get("family") == "megatron" and is_cut(format) and (made.left_out or made.renamed):
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
    from core.hf import to_megatron

    _check_vocabulary(job, config)
    _refuse_quantizing(job, format)
    catalog = _without_optimizer(job, catalog, dropped)
    late = Job(src=job.src, stack_layers=job.stack_layers, unstack_layers=job.unstack_layers, quantize=job.quantize)
    early = replace(job, stack_layers=False, unstack_layers=None, quantize=())
    first = _changed(catalog, early, notes, config)
    document = documents_of(first.catalog).get(CONFIG)
    config = config if document is None else object_of(document, file=CONFIG)
    divisor = job.vocab_divisor or VOCAB_DIVISOR
    with _complete(first, "Hugging Face"):
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


def _check_target(job: Job, format: Format, *, is_named: bool) -> None:
    """Options that the destination's format cannot honour are refused.

    Args:
        is_named: whether the tensors' names are Megatron's or Hugging Face's.
    """
    if _changes_layout(job) and not is_cut(format) and (job.to is not None or is_named):
        raise UsageError(
            f"format {format.name} has no parallel layout that {_options(job)} could change",
            hint="leave the sizes out, or write --to megatron or --to torch_dist",
        )
    is_one_file = format.is_single_file and job.dst is not None and job.dst.suffix in format.suffixes
    if job.max_file_bytes is not None and (not format.splits_files or is_one_file):
        why = "DST is one file" if is_one_file else f"{format.name} decides itself what goes into a file"
        raise UsageError(
            f"--max-shard-size has no effect: {why}",
            hint="leave it out, or write a directory: --to safetensors",
        )
    if job.stacking is not None and format.partition == "ranks":
        raise UsageError(
            f"--stack-layers and --unstack-layers have no use for {format.name}, which names layers in its own way",
            hint="leave them out",
        )
    if job.unstack_layers and format.is_mcore:
        raise UsageError(
            f"--unstack-layers: {format.name} has either one key for all layers or one for each",
            hint="say --unstack-layers auto",
        )


def _check_names(
    job: Job, names: str | None, model_type: str | None, format: Format, config: Mapping[str, object] | None
) -> None:
    """Names that contradict the destination, or the names that are there already, are refused.

    Args:
        config: of a source with Hugging Face's names; None for others.
    """
    if names == "megatron" and job.to is not None and job.to.lower() in HF_ALIASES:
        raise UsageError(
            f"--to {job.to} and --names megatron contradict each other",
            hint="say --to safetensors for Megatron's names, or leave --names out",
        )
    if names == "hf" and format.partition == "ranks":
        raise UsageError(
            f"--names {job.names} and --to {format.name} contradict each other: rank files have Megatron's names",
            hint="leave --names out, or say --to hf",
        )
    if config is None or model_type is None or model_type == config["model_type"]:
        return
    raise UsageError(
        f"--names {job.names}: the tensors have Hugging Face's names already, as {str(config['model_type'])[:80]!r}",
        hint="leave --names out; the names of one model type do not become those of another",
    )


def _check_vocabulary(job: Job, config: Mapping[str, object]) -> None:
    """Options for padding that Hugging Face's weights do not have."""
    if job.keep_padded_vocab:
        raise UsageError("--keep-padded-vocab: Hugging Face's weights have no padding rows", hint="leave it out")
    if job.vocab_size is not None and job.vocab_size != config.get("vocab_size"):
        raise UsageError(
            f"--vocab-size {job.vocab_size}: {CONFIG} says that there are {config.get('vocab_size')} rows",
            hint="leave it out; --make-vocab-size-divisible-by says how Megatron is to pad them",
        )


def _refuse_quantizing(job: Job, format: Format) -> None:
    """A Megatron checkpoint that a parallel layout cuts has no scales of weights."""
    if job.quantize and is_cut(format):
        raise UsageError(
            f"--quantize: Megatron loads no float8 weights with scales, so {format.name} is not given any",
            hint="leave it out, or write --to hf",
        )


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
            hint="keep the names to write a part of a model: --to safetensors, dcp or torch",
        ) from err


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
        hint=f"say where {CONFIG} is with --config FILE, or keep the names: --to {keeps}",
    )


def _files_left(source: Checkpoint) -> list[str]:
    """Files of a Hugging Face directory that hold nothing of the checkpoint and are not carried, as a line.

    Such are what a trainer saves beside the weights, weights in a second format, and folders.
    """
    catalog, store = source.catalog, source.store
    if CONFIG not in carried_of(catalog) or store.entry is not None:
        return []
    used = set(carried_of(catalog))
    for key in catalog.tensors:
        used |= {
            fragment.array.extent.file
            for fragment in catalog.fragments(key)
            if fragment.array is not None and fragment.array.extent is not None
        }
    left = [name for name in store.files() if name not in used and _BOOKKEEPING.fullmatch(name) is None]
    left += [f"{name}/" for name in store.folders() if not name.startswith(".")]
    return [f"other files of the directory: {', '.join(left)}"] if left else []


_BOOKKEEPING = re.compile(r"\..*|.*\.index(\..+)?\.json|(.*\.)?ckpt-(manifest\.json|objects\.pt)")
"""Hidden files, indexes of shards, and what this project writes beside weights."""


def _with_config(job: Job, catalog: Catalog, source: Checkpoint) -> tuple[Catalog, Mapping[str, object] | None]:
    """The catalog, and the parsed config.json beside its weights or that of ``--config``; None if there is none.

    Raises:
        UsageError: there are two.
        CorruptError: it is not JSON.
    """
    is_beside = CONFIG in carried_of(catalog)
    if job.config is None:
        return catalog, config_of(source.store) if is_beside else None
    if is_beside:
        raise UsageError(
            "--config: SRC has a config.json of its own",
            file=str(job.config),
            hint="leave --config out, or edit that one",
        )
    with translated(str(job.config), doing="read"):
        data = job.config.read_bytes()
    return with_documents(catalog, {CONFIG: data}), object_of(data, file=str(job.config))


def _is_rank_local(catalog: Catalog) -> bool:
    return bool(catalog.attrs.get("is_rank_local"))


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
HF_ALIASES = ("hf", "huggingface")
"""Names of the format safetensors that ask for Hugging Face's tensor names as well."""


def _changed(catalog: Catalog, job: Job, notes: list[str], config: Mapping[str, object] | None = None) -> Changed:
    """The user's changes; what cannot be copied must be gone after them."""
    made = changed(catalog, job, config=config)
    refuse_unsupported(made.catalog)
    notes += made.notes
    return made


def _changes_layout(job: Job) -> bool:
    """Whether the job names sizes for the destination."""
    return job.topology is not None and job.topology.is_change


def _options(job: Job) -> str:
    if job.topology is None or not job.topology.sizes:
        return "pipeline options"
    return ", ".join(f"--{name}-new" for name in job.topology.sizes)


def _is_laid_out(job: Job, catalog: Catalog, format: Format, rules: Rules, names: str | None) -> bool:
    """Whether the source must be brought into Megatron's global form."""
    if _is_rank_local(catalog) or format.partition == "ranks" or _changes_layout(job):
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


def _refuse_layout_options(job: Job) -> None:
    """Options that only a layout could honour are not ignored."""
    given = {
        "--vocab-size": job.vocab_size is not None,
        "--keep-padded-vocab": job.keep_padded_vocab,
        "--rules": job.rules is not None,
        "--unknown": job.unknown != "refuse",
        "--rng": job.rng is not None,
        "--transformer-impl": job.transformer_impl is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"{name} has no effect: this conversion changes no parallel layout", hint="leave it out")


def _completed(job: Job, catalog: Catalog, source: Checkpoint, notes: list[str], *, wants_hf: bool) -> Catalog:
    """The global form with what the user or the directory's name says beside the checkpoint."""
    if catalog.attrs.get("iteration") is None and source.iteration is not None:
        notes.append(f"the files do not say their iteration; {source.iteration} is the directory's")
        catalog = catalog.with_attrs(iteration=source.iteration)
    n_rows = catalog.attrs.get("vocab_size")
    if (job.vocab_size is not None or job.keep_padded_vocab) and isinstance(n_rows, int):
        args = with_vocab_size(catalog.attrs["args"], n_rows)
        common = as_mapping(catalog.attrs.get("common")) or {}
        catalog = catalog.with_attrs(args=args, common={**common, "args": args})
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
        facts = facts_of(catalog.attrs.get("args"), names=rules.model_of(catalog.tensors))
        check_complete(catalog.tensors, facts, rules)
    except (CheckpointingException, ValueError) as err:
        what = err.message if isinstance(err, CheckpointingException) else str(err)
        raise UsageError(
            f"--include, --exclude or --rename leave an incomplete Megatron model: {what}",
            key=getattr(err, "key", None),
            hint="write --to dcp or --to torch to keep a part of a model",
        ) from err


def _source_topology(catalog: Catalog) -> Topology | None:
    """Sizes of the run that saved, or None where nothing says."""
    found = catalog.attrs.get("topology")
    if isinstance(found, Topology):
        return found
    args = catalog.attrs.get("args")
    if args is None and "args" in catalog.objects:
        args = catalog.objects["args"].value
    return topology_of(args) if args is not None else None


def _check_source_sizes(job: Job, catalog: Catalog) -> None:
    asserted = job.topology.source if job.topology is not None else {}
    if not asserted:
        return
    found = _source_topology(catalog)
    if found is None:
        raise UsageError(
            "the checkpoint does not say which parallel sizes it was saved with",
            hint=f"leave out {', '.join('--' + name for name in asserted)}",
        )
    for name, size in asserted.items():
        actual = found.expert_tp if name == "etp" else getattr(found, name)
        if actual != size:
            raise UsageError(
                f"--{name} {size} was said, but the checkpoint has {name.upper()} {actual} ({found})",
                hint=f"say --{name} {actual}, or leave it out",
            )


def target_topology(job: Job, catalog: Catalog, format: Format) -> Topology:
    """Sizes of the destination.

    Sizes that are not given stay the source's where global tensors are only cut into pieces by them, or where the job
    keeps the layout; rank files get 1. A pipeline layout has the number of model chunks in it.

    Raises:
        UsageError: it has another than was asked for, or its parts do not divide over the pipeline stages.
    """
    keeps = job.keeps_layout or format.partition != "ranks"
    base = (_source_topology(catalog) if keeps else None) or Topology()
    sizes = {} if job.topology is None else job.topology.sizes
    pipeline = None if job.topology is None else job.topology.pipeline
    if format.partition != "ranks" and sizes.get("pp", base.pp) != base.pp:
        base = replace(base, vpp=1)  # global tensors know no model chunks, only which stage's rank writes what
    made = replace(base, **sizes, pipeline=pipeline)
    if pipeline is None or pipeline.layout is None:
        return made
    vpp, rest = divmod(len(pipeline.layout), made.pp)
    if rest or sizes.get("vpp", vpp) != vpp:
        raise UsageError(
            f"--pipeline-model-parallel-layout has {len(pipeline.layout)} parts, which are not those of PP {made.pp}"
            + (f" and VPP {sizes['vpp']}" if "vpp" in sizes else ""),
            hint="it has one part for every model chunk, PP × VPP in all; say --pp-new",
        )
    return replace(made, vpp=vpp)
