"""The options of convert and reshard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any

from ckpt_cli.options.declaration import (
    CONTENT,
    ENGINE,
    LAYOUT,
    MESSAGES,
    OUTPUT,
    argument,
    debug_flag,
    iteration_option,
    json_flag,
    memory_option,
    missing_chunks_option,
    no_optim_flag,
    progress_option,
    report_option,
    rules_option,
    storage_option,
    threads_option,
)
from ckpt_cli.options.shared.values import (
    check_dtype,
    check_dtype_option,
    check_format,
    check_names,
    check_quantization,
    one_of,
    whole_number,
)
from core.formats.registry import TARGETS
from core.values import dataclass
from core.verbs.convert.job_options import AUTO, CHOICES, parse_size

CONTENT_OPTIONS = tuple(
    """
    max_shard_size metadata_only transformer_impl no_optim include exclude strip_prefix
    add_prefix rename untie tie param_order stack_layers unstack_layers layer_axis dtype
    quantize dequantize dequantize_optim
    """.split()
)
"""Fields of ``TransferOptions`` that change the content; each of them makes ``--to`` optional."""


def _target_size(short: str, long: str, text: str) -> Any:
    """Declare a parallel size to write, with the aliases of Megatron's tools."""
    names = f"--{short}-new, --target-{short}, --target-{long} N"
    return LAYOUT.option(names, text, parser=whole_number(1))


def _source_size(short: str, long: str) -> Any:
    """Declare a parallel size of the source, hidden as ckpt reads it from there."""
    return LAYOUT.option(f"--{short}, --{long} N", "", parser=whole_number(1), hidden=True)


def _pipeline_option(name: str, metavar: str, text: str, parser: Callable[[str], object]) -> Any:
    """Declare an option for the pipeline to write, under Megatron's name and with ``-new``."""
    names = f"--{name}, --{name}-new, --target-{name} {metavar}"
    return LAYOUT.option(names, text, parser=parser)


def _pipeline_flag(name: str, text: str) -> Any:
    """Declare a flag for the pipeline to write, under Megatron's name."""
    return LAYOUT.flag(f"--{name}/--no-{name}", text, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Options of ``ckpt convert`` and ``ckpt reshard``; merge has some of them.

    Args:
        words: the words of the command line, ``ckpt`` first; () if they are not known.
    """

    src: Path = argument(
        "SRC", "Source checkpoint: a directory, a file or a training root.", default=Path()
    )
    dst: Path | None = argument("DST", "Destination. [named after SRC]", default=None)
    # Output: what to write where, and how.
    output: Path | None = OUTPUT.option("-o, --output DST", "Same as the DST argument.")
    to: str | None = OUTPUT.option(
        "--to FORMAT",
        f"Format to write: {', '.join(TARGETS)}. "
        "[from DST's suffix, or SRC's format if only the content changes]",
        parser=check_format,
    )
    iteration: int | None = iteration_option(OUTPUT)
    max_shard_size: int | None = OUTPUT.option(
        "--max-shard-size SIZE",
        "Maximum size of each output file, such as 5GB or 500MB.",
        parser=parse_size,
    )
    force: bool = OUTPUT.flag("-f, --force", "Replace DST after the new checkpoint is complete.")
    resume: bool = OUTPUT.flag(
        "--resume", "Keep partial output after any failure, so that the same command can continue."
    )
    dry_run: bool = OUTPUT.flag(
        "-n, --dry-run",
        "Print the plan (bytes, files, free space, expected time) without writing anything.",
    )
    metadata_only: bool = OUTPUT.flag(
        "--metadata-only", "torch_dist, dcp: hard-link SRC's data files instead of copying them."
    )
    explain: bool = OUTPUT.flag(
        "--explain", "Print each tensor's layout rule without reading or writing tensor data."
    )
    map: str | None = OUTPUT.option(
        "--map KEY",
        "With --explain: draw the shards of the matching DST tensors before and after, "
        "and what moves where.",
    )
    report: Path | None = report_option(
        "With --dry-run: also write the plan, with pictures of what moves, to FILE (.html).",
        OUTPUT,
    )
    rank: int | None = OUTPUT.option(
        "--rank R",
        "With --dry-run: list the SRC files that rank R of DST needs; ranks start at 0.",
        parser=whole_number(0),
    )

    # Layout: sizes to write (--tp-new), hidden ones that describe the source (--tp), the pipeline.
    tp_new: int | None = _target_size("tp", "tensor-parallel-size", "Tensor parallel size of DST.")
    pp_new: int | None = _target_size(
        "pp", "pipeline-parallel-size", "Pipeline parallel size of DST."
    )
    vpp_new: int | None = _target_size(
        "vpp",
        "virtual-pipeline-parallel-size",
        "Model chunks per pipeline stage (virtual pipeline).",
    )
    ep_new: int | None = _target_size("ep", "expert-parallel-size", "Expert parallel size of DST.")
    etp_new: int | None = _target_size(
        "etp", "expert-tensor-parallel-size", "Tensor parallel size of the experts."
    )
    tp: int | None = _source_size("tp", "tensor-model-parallel-size")
    pp: int | None = _source_size("pp", "pipeline-model-parallel-size")
    vpp: int | None = _source_size("vpp", "virtual-pipeline-model-parallel-size")
    ep: int | None = _source_size("ep", "expert-model-parallel-size")
    etp: int | None = _source_size("etp", "expert-tensor-parallel-size")
    decoder_first_pipeline_num_layers: int | None = _pipeline_option(
        "decoder-first-pipeline-num-layers",
        "N",
        "Layers in the first pipeline stage.",
        whole_number(1),
    )
    decoder_last_pipeline_num_layers: int | None = _pipeline_option(
        "decoder-last-pipeline-num-layers",
        "N",
        "Layers in the last pipeline stage.",
        whole_number(1),
    )
    pipeline_model_parallel_layout: str | None = _pipeline_option(
        "pipeline-model-parallel-layout",
        "TEXT",
        "Layers in each model chunk, for example 'E|(t|)*3,m|L'.",
        str,
    )
    account_for_embedding_in_pipeline_split: bool | None = _pipeline_flag(
        "account-for-embedding-in-pipeline-split", "Count the embedding as a layer."
    )
    account_for_loss_in_pipeline_split: bool | None = _pipeline_flag(
        "account-for-loss-in-pipeline-split", "Count the loss as a layer."
    )
    # Layout: vocabulary, names and rules.
    vocab_size: int | None = LAYOUT.option(
        "--vocab-size N", "Vocabulary size without padding.", parser=whole_number(1)
    )
    make_vocab_size_divisible_by: int | None = LAYOUT.option(
        "--make-vocab-size-divisible-by N",
        "Hugging Face to Megatron: pad the vocabulary to a multiple of N × TP. [128]",
        parser=whole_number(1),
    )
    keep_padded_vocab: bool = LAYOUT.flag(
        "--keep-padded-vocab", "Keep the vocabulary's padding rows as they are."
    )
    names: str | None = LAYOUT.option(
        "--names SCHEME",
        "Tensor names to write: hf, hf:MODEL_TYPE or megatron.",
        parser=check_names,
    )
    config: Path | None = LAYOUT.option(
        "--config config.json",
        "The model's config.json, if SRC has none (from Megatron: the original model's).",
    )
    family: Path | None = LAYOUT.option(
        "--family FILE.toml", "TOML file that describes an unsupported model family."
    )
    text_model: bool = CONTENT.flag(
        "--text-model", "Convert only the text model of a vision-language model."
    )
    tokenizer: Path | None = CONTENT.option(
        "--tokenizer DIR", "Copy DIR's tokenizer files into a Hugging Face DST."
    )
    transformer_impl: str | None = LAYOUT.option(
        "--transformer-impl IMPL",
        "Megatron module names to write: local or transformer_engine. "
        "[those of SRC; transformer_engine for a Hugging Face SRC]",
        parser=one_of(*CHOICES["transformer_impl"]),
    )
    megatron_version: str | None = LAYOUT.option(
        "--megatron-version X.Y",
        "Megatron-Core version that will load the rank files. [the version that wrote SRC]",
    )
    experts: str | None = LAYOUT.option(
        "--experts KIND",
        "Expert module: sequential, te-grouped (Transformer Engine), or grouped "
        "(the old GroupedMLP, removed in Megatron-Core 0.17). [SRC's module]",
        parser=one_of(*CHOICES["experts"]),
    )
    rules: Path | None = rules_option()
    unknown: str | None = LAYOUT.option(
        "--unknown POLICY",
        "For tensors without a layout rule: refuse, or replicate those that are identical on all "
        "ranks. [refuse]",
        parser=one_of(*CHOICES["unknown"]),
    )

    # Content: which tensors, under which keys, in which dtype.
    dequantize: str | None = CONTENT.option(
        "--dequantize DTYPE",
        "Dequantize float8, int8 and MXFP4 weights to bf16, fp16 or fp32 (applies their scales).",
        parser=check_dtype,
    )
    dequantize_optim: bool = CONTENT.flag(
        "--dequantize-optim",
        "Dequantize 8-bit and 4-bit optimizer states (bitsandbytes, torchao) to fp32.",
    )
    include: list[str] | None = CONTENT.option(
        "--include GLOB", "Keep only keys that match; repeatable."
    )
    exclude: list[str] | None = CONTENT.option(
        "--exclude GLOB", "Drop keys that match; repeatable."
    )
    strip_prefix: list[str] | None = CONTENT.option(
        "--strip-prefix TEXT", "Remove this prefix from keys."
    )
    add_prefix: str | None = CONTENT.option(
        "--add-prefix TEXT", "Add this prefix to the model's keys."
    )
    rename: list[str] | None = CONTENT.option(
        "--rename OLD=NEW", "Rename keys with a regular expression; NEW may use \\1."
    )
    untie: list[str] | None = CONTENT.option(
        "--untie NEW=KEY", "Also write KEY under the name NEW (untied weights)."
    )
    tie: list[str] | None = CONTENT.option(
        "--tie OLD=KEY", "Drop OLD after checking that it is identical to KEY (tied weights)."
    )
    param_order: str | None = CONTENT.option(
        "--param-order model|FILE",
        "Replace the optimizer's parameter numbers with names: in the order of the checkpoint's "
        "model, or from a file with one name per line. Shapes must match.",
    )
    stack_layers: bool = CONTENT.flag(
        "--stack-layers", "Stack layers.0, layers.1, … along a new axis."
    )
    unstack_layers: list[str] | None = CONTENT.option(
        "--unstack-layers GLOB",
        "Split the matching stacked tensors into one tensor per layer; "
        f"{AUTO}: all tensors with 'layers' in their key.",
    )
    layer_axis: int | None = CONTENT.option(
        "--layer-axis N",
        "Axis along which layers are stacked: 0 (default), or 1 for MaxText.",
        parser=whole_number(0),
    )
    dtype: list[str] | None = CONTENT.option(
        "--dtype, --torch-dtype [GLOB=]DTYPE",
        "Cast the model's floating-point tensors, or those matching GLOB: bf16, fp16, fp32, …",
        parser=check_dtype_option,
    )
    quantize: list[str] | None = CONTENT.option(
        "--quantize [GLOB=]KIND",
        "Quantize linear weights, or those matching GLOB, to scaled float8: "
        "block (128 × 128), tensor or none.",
        parser=check_quantization,
    )
    no_optim: bool = no_optim_flag()
    rng: str | None = CONTENT.option(
        "--rng keep|drop",
        "Keep the RNG states (and fail if that is impossible), or drop them. "
        "[kept if the ranks stay the same, else dropped]",
        parser=one_of(*CHOICES["rng"]),
    )
    missing_chunks: str | None = missing_chunks_option(CONTENT)
    on_replica_mismatch: str | None = CONTENT.option(
        "--on-replica-mismatch error|first",
        "If ranks hold different copies of the same tensor: fail, or use the first copy. [error]",
        parser=one_of(*CHOICES["on_replica_mismatch"]),
    )
    weights_only: bool = CONTENT.flag(
        "--weights-only",
        "Write a .pt file that torch.load(weights_only=True) accepts; "
        "objects that it rejects go under a separate key.",
    )
    drop_unknown: bool = CONTENT.flag("--drop-unknown", "Drop objects of unknown classes.")
    drop_missing: bool = CONTENT.flag(
        "--drop-missing", "Omit entries that an index lists but that have no data."
    )

    # Engine: resources, checksums and durability.
    memory: int | None = memory_option()
    threads: int | None = threads_option("Number of copy threads. [2]")
    no_crc: bool = ENGINE.flag(
        "--no-crc", "Skip CRC-32 checksums (zip tools then reject torch files)."
    )
    no_digest: bool = ENGINE.flag("--no-digest", "Skip content digests in the manifest.")
    fingerprint: bool = ENGINE.flag(
        "--fingerprint",
        "Add fingerprints to the manifest; they are the same in every format and layout.",
    )
    verify: bool = ENGINE.flag(
        "--verify", "Read the result back and compare every byte with the source."
    )
    no_fsync: bool = ENGINE.flag("--no-fsync", "Skip fsync (faster; a crash may lose data).")

    json: bool = json_flag()
    quiet: bool = MESSAGES.flag("-q, --quiet", "Print only errors and what is not carried over.")
    storage_option: list[str] | None = storage_option()
    progress: str | None = progress_option()
    debug: bool = debug_flag()
    words: tuple[str, ...] = field(default=(), compare=False)
