from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ckpt_cli.app import app, main
from ckpt_cli.commands.transfer import build_job
from ckpt_cli.options.inspect import InspectOptions
from ckpt_cli.options.shared.values import check_names
from ckpt_cli.options.transfer import TransferOptions
from ckpt_cli.options.typer_command import Group
from ckpt_cli.screen.other_tools import OPTION_HINTS, TORCHRUN_OPTION_HINTS
from core.errors import UsageError
from core.files.remote_path import location_of
from core.formats.registry import TARGETS, formats
from core.verbs.convert.job_options import (
    parse_key_pairs,
    parse_quantizations,
    parse_size,
    parse_unstack_globs,
)


def parsed(*arguments: str) -> Any:
    """The options that a command line gives, without running it."""
    work = app(list(arguments), prog_name="ckpt", standalone_mode=False)
    assert isinstance(work, partial)
    return work.args[0]


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("65536", 65536),
        ("512MiB", 512 * 2**20),
        ("512mib", 512 * 2**20),
        ("1GB", 10**9),
        ("1.5g", 1_500_000_000),
        ("2 Ti", 2 * 2**40),
        ("64k", 64_000),
        ("100B", 100),
    ],
)
def test_sizes_take_decimal_and_binary_units(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1XB", "1e9", "MiB", "1 2", "0.1B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a valid size"):
        parse_size(text)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("tp", "tensor-parallel-size"),
        ("pp", "pipeline-parallel-size"),
        ("vpp", "virtual-pipeline-parallel-size"),
        ("ep", "expert-parallel-size"),
        ("etp", "expert-tensor-parallel-size"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "reshard"])
def test_target_sizes_go_by_the_names_of_other_tools(command: str, short: str, long: str) -> None:
    for name in (f"--{short}-new", f"--target-{short}", f"--target-{long}"):
        for spelled in (name, "--" + name[2:].replace("-", "_")):
            for words in ((spelled, "4"), (f"{spelled}=4",)):
                assert getattr(parsed(command, "a", "b", *words), f"{short}_new") == 4


def test_source_sizes_go_by_megatrons_names() -> None:
    options = parsed(
        "reshard",
        "--tensor_model_parallel_size",
        "8",
        "--pp",
        "2",
        "--expert-model-parallel-size=4",
    )
    assert (options.tp, options.pp, options.ep) == (8, 2, 4)
    assert options.tp_new is None


def test_underscores_in_values_stay() -> None:
    options = parsed(
        "convert",
        "a_b",
        "--to",
        "torch_dist",
        "--rename",
        "x_y=--p_q",
        "--include=l_1.*",
        "-o",
        "--out_dir",
    )
    assert options.src == Path("a_b")
    assert options.to == "torch_dist"
    assert options.rename == ["x_y=--p_q"]
    assert options.include == ["l_1.*"]
    assert options.output == Path("--out_dir")


def test_arguments_after_two_dashes_are_no_options() -> None:
    assert parsed("inspect", "--", "--my_checkpoint").path == Path("--my_checkpoint")


def test_the_source_is_the_current_directory_unless_given() -> None:
    assert parsed("inspect") == InspectOptions()
    assert parsed("convert", "--to", "dcp") == TransferOptions(to="dcp")


def test_switches_with_two_sides_tell_both_from_neither() -> None:
    assert [parsed("inspect", *words).tree for words in ((), ("--tree",), ("--flat",))] == [
        None,
        True,
        False,
    ]


def test_the_help_names_every_format_that_can_be_written() -> None:
    by_name = {name: format for format in formats() for name in (format.name, *format.aliases)}
    writable = {format.name for format in by_name.values() if format.lay_out is not None}
    assert writable <= set(TARGETS)
    assert all(by_name[name].lay_out is not None for name in TARGETS if name != "hf")


def test_changes_of_content_reach_the_job() -> None:
    options = parsed(
        *"""
        convert a b --to hf --names hf:qwen3_moe --max-shard-size 5GB --stack_layers
        --dequantize-optim --dequantize fp32 --quantize block --quantize *.o_proj.weight=tensor
        --strip-prefix module. --strip-prefix=model. --add-prefix net.
        --tie lm_head.weight=embed.weight --untie a.b=c.d
        """.split()
    )
    job = build_job(options, is_reshard=False)
    assert (job.names, job.max_shard_size, job.dequantize) == ("hf:qwen3_moe", 5 * 10**9, "fp32")
    assert job.quantize == ((None, "block"), ("*.o_proj.weight", "tensor"))
    assert job.dequantize_optim
    assert (job.strip_prefix, job.add_prefix) == (("module.", "model."), "net.")
    assert (job.tie, job.untie) == ((("lm_head.weight", "embed.weight"),), (("a.b", "c.d"),))
    assert (job.stack_layers, job.unstack_layers) == (True, None)


def test_without_them_the_job_changes_nothing() -> None:
    job = build_job(parsed("convert", "a", "--to", "dcp"), is_reshard=False)
    assert (job.names, job.max_shard_size, job.dequantize, job.add_prefix) == (
        None,
        None,
        None,
        None,
    )
    assert (job.quantize, job.strip_prefix, job.tie, job.untie) == ((), (), (), ())
    assert (job.stack_layers, job.unstack_layers) == (False, None)


@pytest.mark.parametrize(
    ("texts", "globs"),
    [([], None), (["auto"], ()), (["a.*"], ("a.*",)), (["a", "b"], ("a", "b"))],
)
def test_stacks_go_by_the_usual_names_or_by_globs(
    texts: list[str], globs: tuple[str, ...] | None
) -> None:
    assert parse_unstack_globs(texts) == globs


@pytest.mark.parametrize("text", ["hf", "hf:llama", "hf:deepseek_v3", "megatron"])
def test_names_are_those_of_a_family(text: str) -> None:
    assert check_names(text) == text


@pytest.mark.parametrize(
    ("words", "guess"),
    [
        (("convert", "a", "--to", "safetensor"), "safetensors"),
        (("convert", "a", "--to", "pt"), "torch"),
        (("reshard", "a", "--to", "torchdist"), "torch_dist"),
        (("convert", "a", "--names", "megatorn"), "megatron"),
        (("convert", "a", "--dtype", "*.bias=b16"), "bf16"),
        (("convert", "a", "--dequantize", "f32"), "fp32"),
        (("convert", "a", "--quantize", "blok"), "block"),
        (("convert", "a", "--transformer-impl", "trans"), "transformer_engine"),
        (("convert", "a", "--rng", "kep"), "keep"),
        (("inspect", "a", "--sort", "sise"), "size"),
        (("validate", "a", "--format", "Json"), "json"),
        (("validate", ".", "--plan-for", "tpp=2"), "tp"),
        (("validate", ".", "--plan-for", "format=zar"), "zarr"),
        (("launch", "--device", "cudaa", "--", "validate", "a"), "cuda"),
        (("launch", "--nproc-per-node", "gpus", "--", "validate", "a"), "gpu"),
        (("launch", "--", "valdate", "a"), "validate"),
        (("launch", "--", "validate", "a", "--format", "jsn"), "json"),
    ],
)
def test_a_misspelt_value_is_a_usage_error_with_the_nearest_one(
    words: tuple[str, ...], guess: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == 2
    assert f"hint: did you mean {guess}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("--to", "gguf"),
        ("--dtype", "int"),
        ("--dequantize", "?"),
        ("--quantize", "*.w=4"),
        ("--names", "nemo"),
        ("--memory", "1XB"),
        ("--max-shard-size", "five"),
        ("--threads", "0"),
        ("--unknown", "x"),
    ],
)
def test_a_wrong_value_is_refused_before_the_source_is_looked_at(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "no/such/source", *words]) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error: invalid value for '{words[0]}': ")
    assert hint.startswith("  hint: ")


def test_a_format_that_is_only_read_is_unsupported(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(golden / "torch_dcp/tp2_only")
    assert main(["convert", source, str(tmp_path / "out"), "--to", "nemo"]) == 4
    assert "ckpt can read nemo but not write it" in capsys.readouterr().err


def test_to_resize_a_run_of_deepspeed_the_universal_form_is_proposed(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, dst = str(golden / "deepspeed/zero2_dp2_bf16"), str(tmp_path / "out")
    assert main(["reshard", source, dst, "--tp-new", "2"]) == 4
    assert "hint: --to deepspeed_universal, without sizes" in capsys.readouterr().err
    assert main(["convert", source, dst, "--to", "deepspeed_universal", "--dry-run"]) == 0


@pytest.mark.parametrize(
    "parse",
    [
        lambda: check_names("nemo"),
        lambda: check_names("hf:"),
        lambda: check_names("hf:a/b"),
        lambda: parse_key_pairs(["a"], option="--tie"),
        lambda: parse_key_pairs(["a="], option="--tie"),
        lambda: parse_key_pairs(["=b"], option="--tie"),
        lambda: parse_key_pairs(["a=b=c"], option="--tie"),
        lambda: parse_quantizations([""]),
        lambda: parse_quantizations(["=block"]),
        lambda: parse_quantizations(["a="]),
        lambda: parse_unstack_globs(["auto", "a.*"]),
    ],
)
def test_what_cannot_be_parsed_is_a_usage_error(parse: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        parse()


def test_stacking_and_unstacking_cannot_be_combined() -> None:
    options = parsed("convert", "a", "--to", "dcp", "--stack-layers", "--unstack-layers", "auto")
    with pytest.raises(UsageError, match="cannot be combined"):
        build_job(options, is_reshard=False)


def test_every_path_of_a_command_line_is_a_path_or_a_url() -> None:
    words = ("merge", "a", "s3://bucket/b", "-o", "c", "--add-delta", "d", "--config", "e")
    work = app(list(words), prog_name="ckpt", standalone_mode=False)
    options, merge_options = work.args
    assert merge_options.paths == [Path("a"), location_of("s3://bucket/b")]
    assert merge_options.add_delta == [Path("d")]
    assert (merge_options.output, options.config) == (Path("c"), Path("e"))
    validated = parsed("validate", "s3://bucket/a", "b", "--report", "c.html", "--report", "d.xml")
    assert validated.paths == [location_of("s3://bucket/a"), Path("b")]
    assert validated.report == [Path("c.html"), Path("d.xml")]


def test_an_axis_of_layers_needs_layers_to_stack() -> None:
    options = parsed("convert", "a", "--unstack-layers", "auto", "--layer-axis", "1")
    assert build_job(options, is_reshard=False).layer_axis == 1
    with pytest.raises(UsageError, match="--layer-axis has no effect: no layers"):
        build_job(parsed("convert", "a", "--layer-axis", "0"), is_reshard=False)


def test_no_name_of_another_tool_hides_an_option_of_ours() -> None:
    command = get_command(app)
    assert isinstance(command, Group)
    ours = {
        name
        for subcommand in command.commands.values()
        if subcommand.name != "launch"  # torchrun's names are its own
        for param in subcommand.params
        for name in (*param.opts, *param.secondary_opts)
    }
    assert ours & set(OPTION_HINTS) == set()
    named = {
        word for hint in OPTION_HINTS.values() for word in re.findall(r"(?<=say )--[a-z-]+", hint)
    }
    assert named <= ours


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--target-tp-size", "2"), "use --tp-new N"),
        (("-tp", "2"), "use --tp-new N"),
        (("--no_load_optim", "--tp-new", "2"), "use --no-optim"),
        (("--ckpt-step", "10"), "use --iteration N"),
        (("--save-dir", "x"), "use ckpt reshard SRC DST"),
    ],
)
def test_options_of_other_tools_are_answered_with_ours(
    words: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reshard", "a", "b", *words]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--dp-new", "4"], ["--world_size=4"]])
def test_another_number_of_zero_ranks_is_answered_with_a_command_that_works(
    options: list[str], golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, dst = str(golden / "deepspeed/zero1_dp2_bf16"), str(tmp_path / "universal")
    assert main(["reshard", src, dst, *options]) == 2
    hint = capsys.readouterr().err
    match = re.search(r"DeepSpeed ZeRO checkpoint: ckpt (convert SRC DST --to \w+)", hint)
    assert match is not None
    words = {"SRC": src, "DST": dst}
    assert main([words.get(word, word) for word in match[1].split()]) == 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["x", "--to", "vLLM"], "use --to hf, as vLLM loads Hugging Face models"),
        (["x", "--to", "tensorrt-llm"], "use --to hf, as tensorrt-llm loads"),
        (["x", "--to", "transformers"], "did you mean hf?"),
        (["x", "--to", "gguf"], "GGUF cannot be written: use --to hf, then run llama.cpp's"),
        (["x.gguf"], "GGUF cannot be written: use --to hf, then run llama.cpp's"),
    ],
)
def test_software_that_is_named_as_a_format_is_answered_with_the_format_it_reads(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "a", *words]) == 2
    assert f"  hint: {hint}" in capsys.readouterr().err


def test_the_optimizer_alone_is_written_as_the_hint_says(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["convert", str(golden / "mcore_legacy/dense_gqa/tp2_pp2_optim"), str(tmp_path / "o")]
    assert main([*line, "--optim-only"]) == 2
    match = re.search(r"use (--include .+) for the optimizer alone", capsys.readouterr().err)
    assert match is not None
    assert main([*line, *shlex.split(match[1])]) == 0


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("-m", "ckpt launch -- convert SRC DST"),
        ("--run_path", "ckpt launch -- convert SRC DST"),
        ("--numa-binding=node", "use --bind numa"),
        ("--num-nodes", "use --nnodes N"),
    ],
)
def test_options_of_torchrun_that_launch_has_not_are_answered(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", word, "--", "validate", "a"]) == 2
    assert hint in capsys.readouterr().err


def test_no_answer_about_torchrun_hides_an_option_of_launch() -> None:
    command = get_command(app)
    assert isinstance(command, Group)
    ours = {
        name
        for param in command.commands["launch"].params
        for name in (*param.opts, *param.secondary_opts)
    }
    assert ours & set(TORCHRUN_OPTION_HINTS) == set()
    named = {
        word
        for hint in TORCHRUN_OPTION_HINTS.values()
        for word in re.findall(r"(?<=say )--[a-z-]+", hint)
    }
    assert named <= ours


def test_a_size_without_new_says_what_the_source_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reshard", "a", "b", "--tensor_model_parallel_size", "4", "--pp", "2"]) == 2
    assert "--tp, --pp describe SRC; to write TP 4, PP 2 use --tp-new 4 --pp-new 2" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("other", ["--dry-run", "--quiet"])
def test_an_explanation_goes_with_nothing_that_contradicts_it(other: str) -> None:
    with pytest.raises(UsageError, match=f"--explain and {other} cannot be combined"):
        build_job(parsed("reshard", "a", "b", "--tp-new", "2", "--explain", other), is_reshard=True)
