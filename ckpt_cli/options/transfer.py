"""The options of convert and reshard, and those that several commands share.

A command takes one frozen dataclass; ``accepts`` turns it into the signature that typer wants.
Words of long options may be separated with ``-`` or ``_``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, field, fields
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

from typer import Argument, Option

from ckpt_cli.options.shared.progress import ProgressForm
from ckpt_cli.options.shared.storage import StorageOptions, parse_storage_options
from ckpt_cli.options.shared.values import (
    AUTO,
    check_cast,
    check_dtype,
    check_format,
    check_names,
    check_quantization,
    one_of,
    parse_size,
    whole_number,
)
from ckpt_cli.options.typer_command import HELP_ALL, PANELS, given_words
from core.files.remote_path import RemotePath, is_remote
from core.files.url import refuse_url
from core.values import dataclass

Result = TypeVar("Result")
MERGE, CHECKS, OUTPUT, LAYOUT, CONTENT, ENGINE, TALK = PANELS

_CHECKPOINTS = frozenset(
    {"src", "path", "paths", "a", "b", "against", "dst", "output", "add_delta", "lora", "root"}
)
"""Arguments that name checkpoints."""

TARGETS = (
    *("dcp", "torch_dist", "torch", "megatron", "zarr", "zarr3", "safetensors"),
    *("hf", "orbax", "deepspeed_universal", "fsdp_dtensor"),
)
"""Formats that can be written, listed here so that a help page need not import all formats."""
CONTENT_OPTIONS = (
    *("max_shard_size", "metadata_only", "transformer_impl", "no_optim"),
    *("include", "exclude", "strip_prefix", "add_prefix", "rename", "untie", "tie"),
    *("param_order", "stack_layers", "unstack_layers", "layer_axis"),
    *("dtype", "quantize", "dequantize", "dequantize_optim"),
)
"""Fields of ``TransferOptions`` that change the content; each of them makes ``--to`` optional."""
UNSHARED = frozenset({
    *("src", "dst", "iteration", "metadata_only", "no_optim"),
    *("dequantize", "dequantize_optim", "param_order"),
})  # fmt: skip
"""Fields of ``TransferOptions`` that merge does not take: they move data, or concern one source."""


WORDS = "words"
"""The field of a command's options that is not an option: the words of the command line."""


class _LazyCommand(Generic[Result]):
    """A typer command that calls a function with values of option classes.

    typer asks for the signature when it makes the command, which imports the classes; of all the
    commands only the one that runs is made.

    Args:
        body: the function, which takes a value of each class.
        classes: module below ``ckpt_cli.options`` and name of each class, with a dot between.
        without: names of fields that keep their defaults and are no options of this command.
    """

    def __init__(
        self, body: Callable[..., Result], classes: Sequence[str], *, without: Collection[str]
    ) -> None:
        self._body, self._classes, self._without = body, classes, without
        # typer reads a command's name and help text from the function itself, and its annotations
        # before those of the signature.
        self.__name__, self.__doc__ = body.__name__, body.__doc__
        self.__annotations__: dict[str, object] = {}

    @cached_property
    def _hints(self) -> dict[type, dict[str, object]]:
        """The annotations of the fields of each class."""
        hints = {}
        for name in self._classes:
            module_name, _, class_name = name.partition(".")
            kind = getattr(import_module(f"ckpt_cli.options.{module_name}"), class_name)
            hints[kind] = get_type_hints(kind, include_extras=True)
        return hints

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature that typer reads: a keyword for each option."""
        # Of two fields with one name, the first is the option; its value is that of both.
        parameters = {"help_all": _keyword("help_all", Annotated[bool, HELP_ALL], default=False)}
        for kind, hints in self._hints.items():
            for option in fields(kind):
                if option.name == WORDS or option.name in self._without:
                    continue
                default = inspect.Parameter.empty if option.default is MISSING else option.default
                parameter = _keyword(option.name, hints[option.name], default=default)
                parameters.setdefault(option.name, parameter)
        # --help-all is shown last.
        parameters["help_all"] = parameters.pop("help_all")
        return inspect.Signature([*parameters.values()])

    def __call__(self, *, help_all: bool = False, **values: Any) -> Result:
        """Call the function; ``help_all`` is False, as its callback prints the page and exits."""
        # Checkpoints to read may be URLs. Everything else is local, and is refused here: for
        # Python, Path("s3://bucket/x") is a local path.
        urls: list[RemotePath] = []
        for name, value in values.items():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if is_remote(item) and name in _CHECKPOINTS:
                    urls.append(item)
                elif isinstance(item, Path):
                    refuse_url(item)
        texts = values.get("storage_option") or ()
        if "storage_option" in values and (urls or texts):
            from core.files.object_client import limit_requests, set_storage_options

            set_storage_options(parse_storage_options(texts, schemes={u.scheme for u in urls}))
            limit_requests(values.get("threads"))
        values[WORDS] = given_words()
        return self._body(
            *(
                kind(**{name: values[name] for name in hints if name in values})
                for kind, hints in self._hints.items()
            )
        )


def _keyword(name: str, annotation: object, *, default: object) -> inspect.Parameter:
    """Return a keyword-only parameter of a signature."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def accepts(
    *classes: str, without: Collection[str] = ()
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator that turns a function of values of option classes into a typer command.

    Args:
        classes: dataclasses whose fields are annotated with typer's options and arguments, such as
            ``diff.DiffOptions`` of ``ckpt_cli.options.diff``, imported when the command is used;
            the function takes a value of each.
        without: names of fields that keep their defaults and are no options of this command.
    """
    return lambda body: _LazyCommand(body, classes, without=without)


Flag = partial(Option, show_default=False)
"""An option without a value, whose help text does not show ``[default: no-…]``."""


def iteration_option(panel: str) -> object:
    """Return the option ``--iteration`` for a section of the help page."""
    return Option(
        "--iteration",
        metavar="N",
        parser=whole_number(0),
        rich_help_panel=panel,
        help="Iteration to read, in a training root. [the tracker's, else the newest]",
    )


def threads_option(text: str, panel: str | None = ENGINE) -> object:
    """Return the option ``--threads``.

    Args:
        text: help text: what the threads do, and their default number.
        panel: as for ``report_option``.
    """
    return Option(
        "--threads",
        "-j",
        metavar="N",
        parser=whole_number(1, 64),
        rich_help_panel=panel,
        help=text,
    )


def memory_option(text: str, panel: str | None = ENGINE) -> object:
    """Return the option ``--memory``.

    Args:
        text: help text: what the limit is of; the default is added.
        panel: as for ``report_option``.
    """
    text += " [a quarter of the machine's, at least 512MiB]"
    return Option("--memory", metavar="SIZE", parser=parse_size, rich_help_panel=panel, help=text)


def report_option(text: str, panel: str | None = None) -> object:
    """Return the option ``--report`` of a command that writes a report in HTML only.

    Args:
        text: help text: the content of the report.
        panel: title of the panel of the help; None for that of the options without one.
    """
    return Option("--report", metavar="FILE", parser=Path, rich_help_panel=panel, help=text)


RulesFile = Annotated[
    Path | None,
    Option(
        "--rules",
        metavar="FILE.toml",
        rich_help_panel=LAYOUT,
        help="Extra layout rules, tried before the built-in ones.",
    ),
]
Iteration = Annotated[int | None, iteration_option(OUTPUT)]
CheckedIteration = Annotated[int | None, iteration_option(CHECKS)]
NoOptim = Annotated[
    bool, Flag("--no-optim", rich_help_panel=CONTENT, help="Drop the optimizer state.")
]


def missing_chunks_option(panel: str) -> object:
    """Return the option ``--missing-chunks`` for a section of the help page."""
    return Option(
        "--missing-chunks",
        metavar="fill|error",
        parser=one_of("fill", "error"),
        rich_help_panel=panel,
        help="Missing zarr chunks: use the fill value if their writer omits such chunks, or fail. "
        "[fill]",
    )


MissingChunks = Annotated[str | None, missing_chunks_option(CONTENT)]
CheckedMissingChunks = Annotated[str | None, missing_chunks_option(CHECKS)]
Memory = Annotated[int | None, memory_option("Memory limit.")]
ReadingThreads = Annotated[int | None, threads_option("Number of reading threads. [one per core]")]
Json = Annotated[bool, Flag("--json", rich_help_panel=TALK, help="Print one JSON object.")]
NoPager = Annotated[
    bool,
    Flag(
        "--no-pager",
        rich_help_panel=TALK,
        help="Print a long page at once, not through a pager.",
    ),
]
Debug = Annotated[bool, Flag("--debug", rich_help_panel=TALK, help="Print a traceback on errors.")]


def _target_size(short: str, long: str, text: str) -> object:
    """Return the option for a parallel size to write, with the aliases of Megatron's tools."""
    names = (f"--{short}-new", f"--target-{short}", f"--target-{long}")
    return Option(*names, metavar="N", parser=whole_number(1), rich_help_panel=LAYOUT, help=text)


def _source_size(short: str, long: str) -> object:
    """Return the option for a parallel size of the source, hidden as ckpt reads it from there."""
    return Option(f"--{short}", f"--{long}", metavar="N", parser=whole_number(1), hidden=True)


def _pipeline_option(name: str, metavar: str, text: str, parser: Callable[[str], object]) -> object:
    """Return an option for the pipeline to write, under Megatron's name and with ``-new``."""
    names = (f"--{name}", f"--{name}-new", f"--target-{name}")
    return Option(*names, metavar=metavar, parser=parser, rich_help_panel=LAYOUT, help=text)


def _pipeline_flag(name: str, text: str) -> object:
    """Return a flag for the pipeline to write, under Megatron's name."""
    return Flag(f"--{name}/--no-{name}", rich_help_panel=LAYOUT, help=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Options of ``ckpt convert`` and ``ckpt reshard``, which only require different ones.

    Args:
        words: the words of the command line, ``ckpt`` first; () if they are not known.
    """

    src: Annotated[
        Path,
        Argument(metavar="SRC", help="Source checkpoint: a directory, a file or a training root."),
    ] = Path()
    dst: Annotated[Path | None, Argument(metavar="DST", help="Destination. [named after SRC]")] = (
        None
    )
    # Output: what to write where, and how.
    output: Annotated[
        Path | None,
        Option(
            "-o",
            "--output",
            metavar="DST",
            rich_help_panel=OUTPUT,
            help="Same as the DST argument.",
        ),
    ] = None
    to: Annotated[
        str | None,
        Option(
            "--to",
            metavar="FORMAT",
            parser=check_format,
            rich_help_panel=OUTPUT,
            help=f"Format to write: {', '.join(TARGETS)}. "
            "[by DST's suffix; SRC's format if only the content changes]",
        ),
    ] = None
    iteration: Iteration = None
    max_shard_size: Annotated[
        int | None,
        Option(
            "--max-shard-size",
            metavar="SIZE",
            parser=parse_size,
            rich_help_panel=OUTPUT,
            help="Maximum size of each output file: 5GB, 500MB.",
        ),
    ] = None
    force: Annotated[
        bool,
        Flag(
            "--force",
            "-f",
            rich_help_panel=OUTPUT,
            help="Replace DST after the new checkpoint is complete.",
        ),
    ] = False
    resume: Annotated[
        bool,
        Flag(
            "--resume",
            rich_help_panel=OUTPUT,
            help="Keep partial output if interrupted; rerun the same command to continue.",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        Flag(
            "--dry-run",
            "-n",
            rich_help_panel=OUTPUT,
            help="Print the plan: bytes, files, free space, expected time; write nothing.",
        ),
    ] = False
    metadata_only: Annotated[
        bool,
        Flag(
            "--metadata-only",
            rich_help_panel=OUTPUT,
            help="torch_dist, dcp: hard-link SRC's data files instead of copying them.",
        ),
    ] = False
    explain: Annotated[
        bool,
        Flag(
            "--explain",
            rich_help_panel=OUTPUT,
            help="Print each tensor's layout rule; read and write no tensor data.",
        ),
    ] = False
    map: Annotated[
        str | None,
        Option(
            "--map",
            metavar="KEY",
            rich_help_panel=OUTPUT,
            help="With --explain: draw the boxes of these tensors of DST before and after, "
            "and what moves where.",
        ),
    ] = None
    report: Annotated[
        Path | None,
        report_option(
            "With --dry-run: also write the plan, with pictures of what moves, to FILE (.html).",
            OUTPUT,
        ),
    ] = None
    rank: Annotated[
        int | None,
        Option(
            "--rank",
            metavar="R",
            parser=whole_number(0),
            rich_help_panel=OUTPUT,
            help="With --dry-run: list the files of SRC that rank R of DST needs, counted from 0.",
        ),
    ] = None

    # Layout: sizes to write (--tp-new), hidden ones that describe the source (--tp), the pipeline.
    tp_new: Annotated[
        int | None, _target_size("tp", "tensor-parallel-size", "Tensor parallel size to write.")
    ] = None
    pp_new: Annotated[
        int | None, _target_size("pp", "pipeline-parallel-size", "Pipeline parallel size to write.")
    ] = None
    vpp_new: Annotated[
        int | None,
        _target_size(
            "vpp",
            "virtual-pipeline-parallel-size",
            "Model chunks per pipeline stage (virtual pipeline).",
        ),
    ] = None
    ep_new: Annotated[
        int | None, _target_size("ep", "expert-parallel-size", "Expert parallel size to write.")
    ] = None
    etp_new: Annotated[
        int | None,
        _target_size("etp", "expert-tensor-parallel-size", "Tensor parallel size of the experts."),
    ] = None
    tp: Annotated[int | None, _source_size("tp", "tensor-model-parallel-size")] = None
    pp: Annotated[int | None, _source_size("pp", "pipeline-model-parallel-size")] = None
    vpp: Annotated[int | None, _source_size("vpp", "virtual-pipeline-model-parallel-size")] = None
    ep: Annotated[int | None, _source_size("ep", "expert-model-parallel-size")] = None
    etp: Annotated[int | None, _source_size("etp", "expert-tensor-parallel-size")] = None
    decoder_first: Annotated[
        int | None,
        _pipeline_option(
            "decoder-first-pipeline-num-layers",
            "N",
            "Layers in the first pipeline stage.",
            whole_number(1),
        ),
    ] = None
    decoder_last: Annotated[
        int | None,
        _pipeline_option(
            "decoder-last-pipeline-num-layers",
            "N",
            "Layers in the last pipeline stage.",
            whole_number(1),
        ),
    ] = None
    pipeline_layout: Annotated[
        str | None,
        _pipeline_option(
            "pipeline-model-parallel-layout",
            "TEXT",
            "Contents of each model chunk: 'E|(t|)*3,m|L'.",
            str,
        ),
    ] = None
    account_for_embedding: Annotated[
        bool | None,
        _pipeline_flag(
            "account-for-embedding-in-pipeline-split", "Count the embedding as a layer."
        ),
    ] = None
    account_for_loss: Annotated[
        bool | None,
        _pipeline_flag("account-for-loss-in-pipeline-split", "Count the loss as a layer."),
    ] = None
    # Layout: vocabulary, names and rules.
    vocab_size: Annotated[
        int | None,
        Option(
            "--vocab-size",
            metavar="N",
            parser=whole_number(1),
            rich_help_panel=LAYOUT,
            help="Vocabulary size without padding.",
        ),
    ] = None
    vocab_divisor: Annotated[
        int | None,
        Option(
            "--make-vocab-size-divisible-by",
            metavar="N",
            parser=whole_number(1),
            rich_help_panel=LAYOUT,
            help="Hugging Face to Megatron: pad the vocabulary to a multiple of N × TP. [128]",
        ),
    ] = None
    keep_padded_vocab: Annotated[
        bool,
        Flag(
            "--keep-padded-vocab",
            rich_help_panel=LAYOUT,
            help="Keep the vocabulary's padding rows as they are.",
        ),
    ] = False
    names: Annotated[
        str | None,
        Option(
            "--names",
            metavar="SCHEME",
            parser=check_names,
            rich_help_panel=LAYOUT,
            help="Tensor names to write: hf, hf:MODEL_TYPE or megatron.",
        ),
    ] = None
    config: Annotated[
        Path | None,
        Option(
            "--config",
            metavar="config.json",
            rich_help_panel=LAYOUT,
            help="The model's config.json, if SRC has none (from Megatron: the original one).",
        ),
    ] = None
    family: Annotated[
        Path | None,
        Option(
            "--family",
            metavar="FILE.toml",
            rich_help_panel=LAYOUT,
            help="Tensor names and configuration of an unsupported model family.",
        ),
    ] = None
    text_model: Annotated[
        bool,
        Option(
            "--text-model",
            rich_help_panel=CONTENT,
            help="Take only the text model of a vision-language model.",
        ),
    ] = False
    tokenizer: Annotated[
        Path | None,
        Option(
            "--tokenizer",
            metavar="DIR",
            rich_help_panel=CONTENT,
            help="Copy DIR's tokenizer files into a Hugging Face DST.",
        ),
    ] = None
    transformer_impl: Annotated[
        str | None,
        Option(
            "--transformer-impl",
            metavar="IMPL",
            parser=one_of("local", "transformer_engine"),
            rich_help_panel=LAYOUT,
            help="Megatron module names to write: local or transformer_engine. "
            "[those of SRC; from Hugging Face transformer_engine]",
        ),
    ] = None
    megatron_version: Annotated[
        str | None,
        Option(
            "--megatron-version",
            metavar="X.Y",
            rich_help_panel=LAYOUT,
            help="megatron-core version that will load the rank files. [the one that wrote SRC]",
        ),
    ] = None
    experts: Annotated[
        str | None,
        Option(
            "--experts",
            metavar="KIND",
            parser=one_of("sequential", "grouped", "te-grouped"),
            rich_help_panel=LAYOUT,
            help="Module of the experts: sequential, te-grouped (Transformer Engine), or grouped "
            "(the old GroupedMLP, removed in megatron-core 0.17). [that of SRC]",
        ),
    ] = None
    rules: RulesFile = None
    unknown: Annotated[
        str | None,
        Option(
            "--unknown",
            metavar="POLICY",
            parser=one_of("refuse", "replicate"),
            rich_help_panel=LAYOUT,
            help="Tensors without a layout rule: refuse, or replicate those identical on all "
            "ranks. [refuse]",
        ),
    ] = None

    # Content: which tensors, under which keys, in which dtype.
    dequantize: Annotated[
        str | None,
        Option(
            "--dequantize",
            metavar="DTYPE",
            parser=check_dtype,
            rich_help_panel=CONTENT,
            help="Dequantize float8, int8 and MXFP4 weights to bf16, fp16 or fp32 (applies their "
            "scales).",
        ),
    ] = None
    dequantize_optim: Annotated[
        bool,
        Option(
            "--dequantize-optim",
            rich_help_panel=CONTENT,
            help="Dequantize optimizer states of 8 and 4 bits (bitsandbytes, torchao) to fp32.",
        ),
    ] = False
    include: Annotated[
        list[str] | None,
        Option(
            "--include",
            metavar="GLOB",
            rich_help_panel=CONTENT,
            help="Keep only keys that match; repeatable.",
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        Option(
            "--exclude",
            metavar="GLOB",
            rich_help_panel=CONTENT,
            help="Drop keys that match; repeatable.",
        ),
    ] = None
    strip_prefix: Annotated[
        list[str] | None,
        Option(
            "--strip-prefix",
            metavar="TEXT",
            rich_help_panel=CONTENT,
            help="Remove this prefix from keys.",
        ),
    ] = None
    add_prefix: Annotated[
        str | None,
        Option(
            "--add-prefix",
            metavar="TEXT",
            rich_help_panel=CONTENT,
            help="Add this prefix to the model's keys.",
        ),
    ] = None
    rename: Annotated[
        list[str] | None,
        Option(
            "--rename",
            metavar="OLD=NEW",
            rich_help_panel=CONTENT,
            help="Rename keys by a regular expression; NEW may use \\1.",
        ),
    ] = None
    untie: Annotated[
        list[str] | None,
        Option(
            "--untie",
            metavar="NEW=KEY",
            rich_help_panel=CONTENT,
            help="Write KEY a second time as NEW (untied weights).",
        ),
    ] = None
    tie: Annotated[
        list[str] | None,
        Option(
            "--tie",
            metavar="OLD=KEY",
            rich_help_panel=CONTENT,
            help="Drop OLD after checking that it is identical to KEY (tied weights).",
        ),
    ] = None
    param_order: Annotated[
        str | None,
        Option(
            "--param-order",
            metavar="model|FILE",
            rich_help_panel=CONTENT,
            help="Name the parameters that an optimizer numbers: in the order of the checkpoint's "
            "model, or by a file with a name per line. Shapes must agree.",
        ),
    ] = None
    stack_layers: Annotated[
        bool,
        Flag(
            "--stack-layers",
            rich_help_panel=CONTENT,
            help="Stack layers.0, layers.1, … along a new axis.",
        ),
    ] = False
    unstack_layers: Annotated[
        list[str] | None,
        Option(
            "--unstack-layers",
            metavar="GLOB",
            rich_help_panel=CONTENT,
            help=f"Split these stacked tensors into one per layer; "
            f"{AUTO}: all with 'layers' in their key.",
        ),
    ] = None
    layer_axis: Annotated[
        int | None,
        Option(
            "--layer-axis",
            metavar="N",
            parser=whole_number(0),
            rich_help_panel=CONTENT,
            help="Axis along which layers are stacked: 0 (default), or 1 in MaxText.",
        ),
    ] = None
    dtype: Annotated[
        list[str] | None,
        Option(
            "--dtype",
            "--torch-dtype",
            metavar="[GLOB=]DTYPE",
            parser=check_cast,
            rich_help_panel=CONTENT,
            help="Cast the model's floating-point tensors, or those matching GLOB: "
            "bf16, fp16, fp32, …",
        ),
    ] = None
    quantize: Annotated[
        list[str] | None,
        Option(
            "--quantize",
            metavar="[GLOB=]KIND",
            parser=check_quantization,
            rich_help_panel=CONTENT,
            help="Quantize linear weights, or those matching GLOB, to scaled float8: "
            "block (128 × 128), tensor, none.",
        ),
    ] = None
    no_optim: NoOptim = False
    rng: Annotated[
        str | None,
        Option(
            "--rng",
            metavar="keep|drop",
            parser=one_of("keep", "drop"),
            rich_help_panel=CONTENT,
            help="Random states: keep them or fail; drop them. "
            "[kept if the ranks stay the same, else dropped]",
        ),
    ] = None
    missing_chunks: MissingChunks = None
    replicas: Annotated[
        str | None,
        Option(
            "--on-replica-mismatch",
            metavar="error|first",
            parser=one_of("error", "first"),
            rich_help_panel=CONTENT,
            help="If ranks hold different copies of one tensor: fail, or use the first. [error]",
        ),
    ] = None
    weights_only: Annotated[
        bool,
        Flag(
            "--weights-only",
            rich_help_panel=CONTENT,
            help="Write a .pt that torch.load(weights_only=True) accepts; "
            "objects it refuses get a separate key.",
        ),
    ] = False
    drop_unknown: Annotated[
        bool,
        Flag("--drop-unknown", rich_help_panel=CONTENT, help="Drop objects of unknown classes."),
    ] = False
    drop_missing: Annotated[
        bool,
        Flag(
            "--drop-missing",
            rich_help_panel=CONTENT,
            help="Leave out entries that an index lists without data.",
        ),
    ] = False

    # Engine: resources, checksums and durability.
    memory: Memory = None
    threads: Annotated[
        int | None,
        threads_option("Number of copying threads. [2]"),
    ] = None
    no_crc: Annotated[
        bool,
        Flag(
            "--no-crc",
            rich_help_panel=ENGINE,
            help="Skip CRC-32 checksums (zip tools then reject torch files).",
        ),
    ] = False
    no_digest: Annotated[
        bool,
        Flag("--no-digest", rich_help_panel=ENGINE, help="Skip content digests in the manifest."),
    ] = False
    fingerprint: Annotated[
        bool,
        Flag(
            "--fingerprint",
            rich_help_panel=ENGINE,
            help="Add fingerprints to the manifest; they are the same in every format and layout.",
        ),
    ] = False
    verify: Annotated[
        bool,
        Flag(
            "--verify",
            rich_help_panel=ENGINE,
            help="Read the result back and compare every byte with the source.",
        ),
    ] = False
    no_fsync: Annotated[
        bool,
        Flag(
            "--no-fsync", rich_help_panel=ENGINE, help="Skip fsync (faster; a crash may lose data)."
        ),
    ] = False

    json: Json = False
    quiet: Annotated[
        bool,
        Flag(
            "-q", "--quiet", rich_help_panel=TALK, help="Print only errors and what is not carried."
        ),
    ] = False
    storage_option: StorageOptions = None
    progress: ProgressForm = None
    debug: Debug = False
    words: tuple[str, ...] = field(default=(), compare=False)
