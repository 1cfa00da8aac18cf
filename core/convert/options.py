"""Options of a job that contradict one another, or that its source or destination could not honour.

Nothing is ignored: an option without an effect is a ``UsageError`` that says what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.catalog.catalog import Catalog
from core.catalog.optimizer_keys import MASTER, state_of
from core.convert.job import Job
from core.errors import UsageError
from core.formats.format import Format
from core.formats.huggingface.files import CONFIG
from core.megatron.model.version import OPTION
from core.megatron.rules.experts import OPTION as EXPERTS

HF_ALIASES = ("hf", "huggingface")
"""Names of the format safetensors that ask for Hugging Face's tensor names as well."""


def is_cut(format: Format) -> bool:
    """Whether a destination of this format is cut by a parallel layout."""
    return format.partition == "ranks" or format.is_mcore


def check_target(job: Job, format: Format, *, is_named: bool) -> None:
    """Options that the destination's format cannot honour are refused.

    Args:
        is_named: whether the tensors' names are Megatron's or Hugging Face's.
    """
    if changes_layout(job) and not is_cut(format) and (job.to is not None or is_named):
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
    if job.weights_only and not format.nests:
        raise UsageError(
            f"--weights-only has no effect: it is for torch.save files, and {format.name} is written",
            hint="leave it out, or write --to torch",
        )
    if job.megatron_version is not None and format.partition != "ranks":
        raise UsageError(
            f"{OPTION} is for rank files; {format.name} is written in one way only", hint=f"leave {OPTION} out"
        )
    if job.moe_experts is not None and format.partition != "ranks":
        raise UsageError(
            f"{EXPERTS} is for rank files; {format.name} has the same keys for experts of every kind",
            hint=f"leave {EXPERTS} out",
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


def check_names(
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


def check_vocabulary(job: Job, config: Mapping[str, object]) -> None:
    """Options for padding that Hugging Face's weights do not have."""
    if job.keep_padded_vocab:
        raise UsageError("--keep-padded-vocab: Hugging Face's weights have no padding rows", hint="leave it out")
    if job.vocab_size is not None and job.vocab_size != config.get("vocab_size"):
        raise UsageError(
            f"--vocab-size {job.vocab_size}: {CONFIG} says that there are {config.get('vocab_size')} rows",
            hint="leave it out; --make-vocab-size-divisible-by says how Megatron is to pad them",
        )


def refuse_quantizing(job: Job, format: Format) -> None:
    """A Megatron checkpoint that a parallel layout cuts has no scales of weights."""
    if job.quantize and is_cut(format):
        raise UsageError(
            f"--quantize: Megatron loads no float8 weights with scales, so {format.name} is not given any",
            hint="leave it out, or write --to hf",
        )


def changes_layout(job: Job) -> bool:
    """Whether the job names sizes for the destination."""
    return job.topology is not None and job.topology.is_change


def _options(job: Job) -> str:
    if job.topology is None or not job.topology.sizes:
        return "pipeline options"
    return ", ".join(f"--{name}-new" for name in job.topology.sizes)


def refuse_layout_options(job: Job) -> None:
    """Options that only a layout could honour are not ignored."""
    given = {
        "--vocab-size": job.vocab_size is not None,
        "--keep-padded-vocab": job.keep_padded_vocab,
        "--rules": job.rules is not None,
        "--unknown": job.unknown != "refuse",
        "--rng": job.rng is not None,
        "--transformer-impl": job.transformer_impl is not None,
        OPTION: job.megatron_version is not None,
        EXPERTS: job.moe_experts is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"{name} has no effect: this conversion changes no parallel layout", hint="leave it out")


def refuse_broken_optimizer(before: Catalog, after: Catalog) -> None:
    """An optimizer that could not go on: states that are gone, or weights that its masters no longer round to.

    Args:
        before, after: the global per-layer form without and with the user's changes.

    Raises:
        UsageError: some states of parameters that stay were left out, or weights with masters are cast.
    """
    if after.tensors is before.tensors:
        return
    has_states = any(state_of(key) is not None for key in after.tensors)
    for key, meta in before.tensors.items() if has_states else ():
        found = state_of(key)
        if found is None or found[1] not in after.tensors:
            continue
        if key not in after.tensors:
            raise UsageError(
                "--include and --exclude leave an optimizer without this state of a parameter that stays",
                key=key,
                hint="leave the whole optimizer out with --no-optim, or the parameter as well",
            )
        weight = after.tensors[found[1]].dtype
        if found[0] == MASTER and key in after.tensors and weight not in (before.tensors[found[1]].dtype, meta.dtype):
            raise UsageError(
                f"--dtype makes it {weight}, but the optimizer's master in {meta.dtype} rounds to what it was before",
                key=found[1],
                hint="leave the cast out, or the optimizer with --no-optim",
            )
