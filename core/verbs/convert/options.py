"""Refuse options of a job that contradict one another, the source or the destination.

No option is ignored: one without an effect is a row of a table for ``refuse_without_effect``.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import MASTER, split_state_key
from core.errors import NoEffect, UsageError, refuse_without_effect
from core.formats.format import Format
from core.formats.huggingface.files import CONFIG
from core.verbs.convert.job import Job

HF_ALIASES = ("hf", "huggingface")
"""Names of the safetensors format that also ask for Hugging Face's tensor names."""

FSDP_DTENSOR = "fsdp_dtensor"
"""Name of the DCP format that also asks for the names of Megatron-FSDP."""
_FSDP_SIZES = frozenset({"tp_new", "ep_new", "etp_new"})


def check_merge(job: Job) -> None:
    """Raise if an option contradicts a merge.

    Raises:
        UsageError: the option asks for the optimizer, for unchanged data, or for a change that
            would have to come before the tensors are computed.
    """
    if job.optim == "carry":
        raise UsageError(
            "optimizer states cannot be merged",
            hint="merge only the weights; training then starts with a fresh optimizer",
        )
    refuse_without_effect(
        job.given_options,
        (
            NoEffect(("metadata_only",), True, "a merge computes new data"),
            NoEffect(
                ("dequantize",),
                True,
                "a merge reads its sources as they are stored",
                "first apply each checkpoint's scales: ckpt convert SRC DST --dequantize bf16",
            ),
        ),
    )


def check_reshard(job: Job, *, hint: str) -> None:
    """Raise unless a job that keeps the layout changes a part of it.

    Raises:
        UsageError: it changes nothing; with the hint.
    """
    # --to, --vocab-size or --experts may be the only change: the sizes then stay the source's.
    others = (job.to, job.vocab_size, job.experts)
    if not changes_layout(job) and all(option is None for option in others):
        raise UsageError("no target size was specified", hint=hint)


def writes_fsdp_dtensor(job: Job) -> bool:
    """Return True if a job writes Megatron-FSDP's ``fsdp_dtensor``."""
    return job.to is not None and job.to.lower().replace("-", "_") == FSDP_DTENSOR


def cuts_experts(job: Job, format: Format) -> bool:
    """Return True if a job gives an expert parallel size to a format that has no other layout."""
    change = job.topology
    return (
        format.cut_experts is not None
        and change is not None
        and set(change.sizes) == {"ep"}
        and change.pipeline is None
    )


def has_model_form(job: Job, format: Format) -> bool:
    """Return True if what a job writes is built from Megatron's global form by a layout."""
    return format.has_layout or writes_fsdp_dtensor(job)


def list_format_rows(job: Job, format: Format, *, is_named: bool) -> list[NoEffect]:
    """Return the options that have no effect on the destination's format.

    Args:
        job: the conversion.
        format: the format of the destination.
        is_named: the tensors' names are Megatron's or Hugging Face's.
    """
    layout_options = () if job.topology is None else job.topology.options
    is_fsdp = writes_fsdp_dtensor(job)
    is_cut = is_fsdp or format.has_layout or cuts_experts(job, format)
    # Without --to, tensors with other names get a better message later: no rule knows them.
    has_no_layout = not is_cut and (job.to is not None or is_named)
    is_one_file = (
        format.is_single_file and job.dst is not None and job.dst.suffix in format.suffixes
    )
    files = f"{format.name} splits tensors into files in its own way"
    return [
        NoEffect(
            [name for name in layout_options if name not in _FSDP_SIZES],
            is_fsdp,
            "Megatron-FSDP numbers layers across the entire model",
            "omit it; --tp-new sets the vocabulary padding, and --ep-new sets the expert-parallel "
            "size in the training arguments",
        ),
        NoEffect(
            layout_options,
            has_no_layout,
            f"{format.name} checkpoints have no parallel layout"
            + (
                "; --ep-new applies only to DeepSpeed experts"
                if format.cut_experts is not None
                else ""
            ),
            "omit the sizes, or use --to megatron or --to torch_dist",
        ),
        NoEffect(
            ("stack_layers", "unstack_layers"),
            is_fsdp or format.is_rank_local,
            f"{FSDP_DTENSOR if is_fsdp else format.name} has its own names for layers",
        ),
        NoEffect(
            ("max_shard_size",),
            is_one_file or not format.splits_files,
            "DST is a single file" if is_one_file else files,
            "omit it, or write a directory: --to safetensors",
        ),
        NoEffect(
            ("weights_only",),
            not format.keeps_nesting,
            f"{format.name} does not write torch.save files",
            "omit it, or use --to torch",
        ),
        NoEffect(
            ("megatron_version",),
            not format.is_rank_local,
            f"only rank files depend on the Megatron version, and {format.name} has no rank files",
        ),
        NoEffect(
            ("layer_axis",),
            format.has_layout and not format.is_rank_local,
            f"{format.name} always stacks layers along axis 0",
        ),
        NoEffect(
            ("unstack_layers",),
            bool(job.unstack_layers) and format.has_layout,
            f"{format.name} stacks either all layers or none",
            "use --unstack-layers auto",
        ),
    ]


def check_target_names(
    job: Job,
    names: str | None,
    model_type: str | None,
    format: Format,
    config: Mapping[str, object] | None,
) -> None:
    """Raise if the names to write contradict the destination, or the names that the source has.

    Args:
        names: ``hf``, ``megatron`` or None.
        model_type: the Hugging Face model type to write, or None.
        config: the configuration of a source with Hugging Face's names; None for other sources.

    Raises:
        UsageError: the names contradict the destination or the source.
    """
    if names == "megatron" and job.to is not None and job.to.lower() in HF_ALIASES:
        raise UsageError(
            f"--to {job.to} and --names megatron cannot be combined",
            hint="use --to safetensors for Megatron's names, or omit --names",
        )
    if names == "hf" and writes_fsdp_dtensor(job):
        raise UsageError(
            f"--names {job.names} and --to {job.to} cannot be combined, because {FSDP_DTENSOR} "
            "uses Megatron's names",
            hint="omit --names, or use --to dcp",
        )
    if names == "hf" and format.is_rank_local:
        raise UsageError(
            f"--names {job.names} and --to {format.name} cannot be combined, because rank files "
            "use Megatron's names",
            hint="omit --names, or use --to hf",
        )
    if config is None or model_type is None or model_type == config["model_type"]:
        return
    actual = str(config["model_type"])[:80]
    raise UsageError(
        f"--names {job.names}: the tensors already have the Hugging Face names of {actual!r}",
        hint="omit --names; ckpt cannot convert one model type's names to another's",
    )


def check_vocabulary_size(job: Job, config: Mapping[str, object]) -> None:
    """Raise if ``--vocab-size`` does not suit weights with Hugging Face's names.

    Args:
        job: the conversion.
        config: the parsed ``config.json`` of the model.

    Raises:
        UsageError: the vocabulary size differs from that of the configuration.
    """
    n_rows = config.get("vocab_size")
    if job.vocab_size is not None and job.vocab_size != n_rows:
        raise UsageError(
            f"--vocab-size {job.vocab_size} does not match vocab_size {n_rows} in {CONFIG}",
            hint="omit --vocab-size; to set Megatron's padding, use --make-vocab-size-divisible-by",
        )


def refuse_quantizing(job: Job, format: Format) -> None:
    """Raise if weights are to be quantized for Megatron, which loads no scales of weights.

    Raises:
        UsageError: ``--quantize`` is given for a format that a parallel layout cuts.
    """
    if job.quantize and has_model_form(job, format):
        raise UsageError(
            "--quantize: Megatron cannot load float8 weights with scales, "
            f"so {format.name} cannot store them",
            hint="omit --quantize, or use --to hf",
        )


def changes_layout(job: Job) -> bool:
    """Return True if the job gives parallel sizes or a pipeline for the destination."""
    return job.topology is not None and job.topology.is_change


def refuse_broken_optimizer(before: Catalog, after: Catalog) -> None:
    """Raise if the user's changes leave an optimizer that training could not continue with.

    Args:
        before, after: the global per-layer form without and with the user's changes.

    Raises:
        UsageError: a state of a parameter that stays was dropped, or a weight with a master copy
            was cast.
    """
    if after.tensors is before.tensors:
        return
    # An optimizer that is dropped completely leaves a checkpoint for a fresh one.
    if all(split_state_key(key) is None for key in after.tensors):
        return
    for key, tensor in before.tensors.items():
        state = split_state_key(key)
        if state is None or state[1] not in after.tensors:
            continue
        name, parameter = state
        if key not in after.tensors:
            raise UsageError(
                "--include and --exclude drop this optimizer state but keep its parameter",
                key=key,
                hint="drop the entire optimizer with --no-optim, or drop the parameter too",
            )
        # A master weight must round to its weight, so casting the weight alone breaks the pair.
        dtype = after.tensors[parameter].dtype
        if name == MASTER and dtype not in (before.tensors[parameter].dtype, tensor.dtype):
            raise UsageError(
                f"--dtype would cast the weight to {dtype}, but the optimizer's {tensor.dtype} "
                "master weight matches the weight before the cast",
                key=parameter,
                hint="omit the cast, or drop the optimizer with --no-optim",
            )
