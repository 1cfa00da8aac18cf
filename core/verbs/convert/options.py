"""Refuse options of a job that contradict one another, the source or the destination.

No option is ignored: one without an effect is a ``UsageError``, whose hint is what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import MASTER, split_state_key
from core.errors import UsageError
from core.formats.format import Format
from core.formats.huggingface.files import CONFIG
from core.verbs.convert.job import Job

HF_ALIASES = ("hf", "huggingface")
"""Names of the safetensors format that also ask for Hugging Face's tensor names."""

FSDP_DTENSOR = "fsdp_dtensor"
"""Name of the DCP format that also asks for the names of Megatron-FSDP."""
_FSDP_SIZES = frozenset({"tp", "ep", "etp"})


def check_merge(job: Job) -> None:
    """Raise if an option contradicts a merge.

    Raises:
        UsageError: the option asks for the optimizer, for unchanged data, or for a change that
            would have to come before the tensors are computed.
    """
    if job.optim == "carry":
        raise UsageError(
            "optimizer states are not merged", hint="merge without them; training starts afresh"
        )
    for option, is_given, hint in (
        ("--metadata-only", job.metadata_only, "omit it: the data are computed"),
        (
            "--dequantize",
            job.dequantize is not None,
            "apply the scales of each checkpoint first: ckpt convert SRC DST --dequantize bf16",
        ),
    ):
        if is_given:
            raise UsageError(f"{option} cannot be used when merging", hint=hint)


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


def check_format_options(job: Job, format: Format, *, is_named: bool) -> None:
    """Raise if the destination's format cannot honour an option.

    Args:
        job: the conversion.
        format: the format of the destination.
        is_named: the tensors' names are Megatron's or Hugging Face's.

    Raises:
        UsageError: an option has no effect on this format, or would unstack some layers only.
    """
    # Without --to, tensors with other names get a better message later: no rule knows them.
    if writes_fsdp_dtensor(job):
        _check_fsdp_dtensor(job)
    elif (
        changes_layout(job)
        and not format.has_layout
        and not cuts_experts(job, format)
        and (job.to is not None or is_named)
    ):
        _refuse_layout_change(job, format)
    is_one_file = (
        format.is_single_file and job.dst is not None and job.dst.suffix in format.suffixes
    )
    if job.max_shard_size is not None and (not format.splits_files or is_one_file):
        reason = (
            "DST is one file"
            if is_one_file
            else f"{format.name} has its own way to divide tensors into files"
        )
        raise UsageError(
            f"--max-shard-size has no effect: {reason}",
            hint="omit it, or write a directory: --to safetensors",
        )
    if job.weights_only and not format.keeps_nesting:
        raise UsageError(
            f"--weights-only has no effect on {format.name}: it applies to torch.save files",
            hint="omit it, or use --to torch",
        )
    _check_rank_options(job, format)


def _refuse_layout_change(job: Job, format: Format) -> NoReturn:
    """Raise because checkpoints of a format have no layout that the job's options could change."""
    sizes = {} if job.topology is None else job.topology.sizes
    options = ", ".join(f"--{name}-new" for name in sizes) or "pipeline options"
    ep = "; --ep-new is for experts of DeepSpeed" if format.cut_experts is not None else ""
    raise UsageError(
        f"{options} cannot be used: {format.name} checkpoints have no parallel layout{ep}",
        hint="omit the sizes, or use --to megatron or --to torch_dist",
    )


def _check_fsdp_dtensor(job: Job) -> None:
    """Raise if an option has no effect on Megatron-FSDP's checkpoints.

    Raises:
        UsageError: it changes the pipeline, or stacks layers.
    """
    change = job.topology
    if change is not None and (change.pipeline is not None or set(change.sizes) - _FSDP_SIZES):
        raise UsageError(
            f"pipeline options have no effect on {FSDP_DTENSOR}: Megatron-FSDP numbers layers over "
            "the whole model",
            hint="omit them; --tp-new sets the padding of the vocabulary, and --ep-new the size in "
            "the training arguments",
        )
    if job.stacking is not None:
        raise UsageError(
            f"--stack-layers and --unstack-layers have no effect on {FSDP_DTENSOR}, which has its "
            "own names for layers",
            hint="omit them",
        )


def _check_rank_options(job: Job, format: Format) -> None:
    """Raise if options apply only to rank files and the destination has none, or the reverse."""
    if format.is_rank_local:
        if job.stacking is not None:
            raise UsageError(
                "--stack-layers and --unstack-layers have no effect on "
                f"{format.name}, which has its own names for layers",
                hint="omit them",
            )
        return
    if job.megatron_version is not None:
        from core.megatron.model.version import OPTION

        raise UsageError(
            f"{OPTION} is for rank files; {format.name} does not depend on the version",
            hint=f"omit {OPTION}",
        )
    if job.layer_axis and format.has_layout:
        raise UsageError(
            f"--layer-axis: layers of {format.name} are always stacked along axis 0",
            hint="omit it",
        )
    if job.unstack_layers and format.has_layout:
        raise UsageError(
            f"--unstack-layers: {format.name} has either one key for all layers or one per layer",
            hint="use --unstack-layers auto",
        )


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
            f"--to {job.to} and --names megatron contradict each other",
            hint="use --to safetensors for Megatron's names, or omit --names",
        )
    if names == "hf" and writes_fsdp_dtensor(job):
        raise UsageError(
            f"--names {job.names} and --to {job.to} contradict each other: {FSDP_DTENSOR} has "
            "Megatron's names",
            hint="omit --names, or use --to dcp",
        )
    if names == "hf" and format.is_rank_local:
        raise UsageError(
            f"--names {job.names} and --to {format.name} contradict each other: "
            "rank files have Megatron's names",
            hint="omit --names, or use --to hf",
        )
    if config is None or model_type is None or model_type == config["model_type"]:
        return
    actual = str(config["model_type"])[:80]
    raise UsageError(
        f"--names {job.names}: the tensors already have the Hugging Face names of {actual!r}",
        hint="omit --names; names of one model type cannot be converted to those of another",
    )


def check_vocabulary_options(job: Job, config: Mapping[str, object]) -> None:
    """Raise if options about vocabulary padding do not suit weights with Hugging Face's names.

    Args:
        job: the conversion.
        config: the parsed ``config.json`` of the model.

    Raises:
        UsageError: padding rows are to be kept, which such weights do not have; or the vocabulary
            size differs from that of the configuration.
    """
    if job.keep_padded_vocab:
        raise UsageError(
            "--keep-padded-vocab: Hugging Face weights have no padding rows", hint="omit it"
        )
    n_rows = config.get("vocab_size")
    if job.vocab_size is not None and job.vocab_size != n_rows:
        raise UsageError(
            f"--vocab-size {job.vocab_size} does not match vocab_size {n_rows} in {CONFIG}",
            hint="omit it; use --make-vocab-size-divisible-by to set Megatron's padding",
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
            hint="omit it, or use --to hf",
        )


def changes_layout(job: Job) -> bool:
    """Return True if the job gives parallel sizes or a pipeline for the destination."""
    return job.topology is not None and job.topology.is_change


def refuse_layout_options(job: Job) -> None:
    """Raise if an option is given that has an effect only on a parallel layout.

    Raises:
        UsageError: such an option is given.
    """
    given = {
        "--vocab-size": job.vocab_size is not None,
        "--keep-padded-vocab": job.keep_padded_vocab,
        "--rules": job.rules is not None,
        "--unknown": job.unknown != "refuse",
        "--rng": job.rng is not None,
        "--transformer-impl": job.transformer_impl is not None,
    }
    if job.megatron_version is not None or job.experts is not None:
        from core.megatron.model.version import OPTION
        from core.megatron.rules.experts import OPTION as EXPERTS

        given |= {OPTION: job.megatron_version is not None, EXPERTS: job.experts is not None}
    for name, is_given in given.items():
        if is_given:
            raise UsageError(
                f"{name} has no effect: this conversion does not change the parallel layout",
                hint="omit it",
            )


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
                "--include and --exclude drop this optimizer state, but keep its parameter",
                key=key,
                hint="drop the complete optimizer with --no-optim, or drop the parameter as well",
            )
        # A master weight must round to its weight, so casting the weight alone breaks the pair.
        dtype = after.tensors[parameter].dtype
        if name == MASTER and dtype not in (before.tensors[parameter].dtype, tensor.dtype):
            raise UsageError(
                f"--dtype: the weight would become {dtype}, but the optimizer's {tensor.dtype} "
                "master weight belongs to the weight before the cast",
                key=parameter,
                hint="omit the cast, or drop the optimizer with --no-optim",
            )
