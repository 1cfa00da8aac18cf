"""Messages at the Python door name arguments and calls, at the command line flags and commands."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import core
import core.api.verbs
from ckpt_cli.app import main
from core.api.arguments import VERBS
from core.api.spelling import _PROSE, spell
from core.errors import CheckpointingException

RANKS = "mcore_legacy/dense_gqa/tp2_pp2_optim"
HF = "hf/qwen2_tied/safetensors_single"

ON_THE_COMMAND_LINE_ONLY = {
    "--all",
    "--all-iterations",
    "--baseline",
    "--device",
    "--explain",
    "--json",
    "--list-checks",
    "--map",
    "--nproc-per-node",
    "--output",
    "--rank",
    "--stats",
    "--storage-option",
    "--write-baseline",
}
"""Options of ``ckpt`` that no verb takes as an argument."""
OF_OTHER_PROGRAMS = {
    "--bucket",
    "--prefix",
    "--abbrev",
    "--always",
    "--bf16",
    "--ckpt-format",
    "--convert",
    "--dirty",
    "--dist-ckpt-optim-fully-reshardable",
    "--fp16",
    "--fp8-param-gather",
    "--load-format",
    "--local-dir",
    "--moe-grouped-gemm",
    "--moe-router-num-groups",
    "--moe-use-legacy-grouped-gemm",
    "--no-bias-gelu-fusion",
    "--no-load-optim",
    "--no-load-rng",
    "--no-use-layer-wise-param-layout",
    "--override-opt",
    "--recursive",
    "--schedules-method",
    "--use-distributed-optimizer",
    "--use-precision-aware-optimizer",
}
"""Options of Megatron's script and of tools that hints name."""
OF_ANOTHER_VERB = {"--dry-run", "--x"}
"""Options in messages about another verb than the package's, and what stands for a computed one."""
VALUES = set(
    "auto block cpu cuda dcp deepspeed_universal drop error first grouped hf local megatron model "
    "replicate safetensors sequential tensor torch torch_dist transformer_engine".split()
)
"""Words of lower-case letters that messages give as the value of an option."""
OF_MEGATRON = {"checkpoint_args.py", "load_line.py"}
"""Modules that write command lines of Megatron's script, which ``Report.next`` keeps."""


def messages() -> Iterator[tuple[str, str]]:
    """Yield (verb whose package it is in, text) of the texts with options or commands in core."""
    root = Path(core.__file__).parent
    for path in sorted(root.rglob("*.py")):
        package, *_ = path.relative_to(root).parts
        if package in ("api", "dist_checkpointing") or path.name in OF_MEGATRON:
            continue
        tree = ast.parse(path.read_text("utf-8"))
        inner = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr | ast.JoinedStr)
            for part in ast.walk(node)
            if part is not node
            and (isinstance(node, ast.JoinedStr) or isinstance(node.value, ast.Constant))
        }
        verb = next((name for name in path.parts if name in VERBS), "convert")
        verb = "validate" if "checks" in path.parts else verb
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.JoinedStr) and id(node) not in inner:
                text = "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "x.1"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and id(node) not in inner:
                text = node.value if isinstance(node.value, str) else ""
            if re.search(r"(?<![\w-])--[a-z]|\bckpt [a-z]", text):
                yield verb, text


def test_no_message_of_the_engine_names_a_flag_that_is_an_argument() -> None:
    flags = set()
    n_messages = 0
    for verb, text in messages():
        n_messages += 1
        spelled = spell(text, VERBS, verb=verb)
        spelled = re.sub(r"\bckpt (manifest|inspect|reshard) .*", "", spelled)  # left to the shell
        flags |= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", spelled))
    assert n_messages > 300
    assert flags == ON_THE_COMMAND_LINE_ONLY | OF_OTHER_PROGRAMS | OF_ANOTHER_VERB


def test_a_word_after_an_option_is_its_value_or_prose() -> None:
    arguments = {name: item for verb in VERBS.values() for name, item in verb.items()}
    words = {
        word
        for _, text in messages()
        for flag, word in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*) ([a-z]+)\b(?![/.=*_-])", text)
        if (argument := arguments.get(flag.replace("-", "_"))) is not None
        and "bool" not in str(argument.annotation)
    }
    assert words - VALUES <= _PROSE


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("pass --force", "pass force=True"),
        ("drop it with --no-optim, or not", "drop it with optim=False, or not"),
        ("set --memory to at least 8MiB", "set memory to at least 8MiB"),
        ("use --tp-new 4 or less", "use tp_new=4 or less"),
        ("drop it with --exclude 'a b*'", "drop it with exclude='a b*'"),
        ("drop it with --exclude", "drop it with exclude=…"),
        ("--include/--exclude drop it", "include/exclude drop it"),
        ("use --rng drop, and go on", "use rng='drop', and go on"),
        ("for example --plan-for tp=4,pp=2", "for example plan_for='tp=4,pp=2'"),
        ("start with --no-load-rng --bf16", "start with --no-load-rng --bf16"),
        ("ckpt convert SRC DST --to hf", "ckpt.convert(SRC, DST, to='hf')"),
        ("ckpt validate --headers says more", "ckpt.validate(PATH, headers=True) says more"),
        ("ckpt merge A B -o DST --average", "ckpt.merge([A, B], DST, average=True)"),
        ("ckpt diff runs/a 'b c'", "ckpt.diff('runs/a', 'b c')"),
        ("ckpt inspect SRC --flat", "list(ckpt.open(SRC))"),
        ("ckpt inspect shows all; --optim", "ckpt.inspect(PATH) shows all; optim=True"),
        ("ckpt reshard SRC --tp-new 4 --explain", "ckpt reshard SRC --tp-new 4 --explain"),
        ("a new one: ckpt manifest --force", "a new one: ckpt manifest --force"),
    ],
)
def test_options_and_commands_are_spelled_as_python_does(text: str, spelled: str) -> None:
    assert spell(text, VERBS, verb="validate") == spelled


def test_names_and_paths_in_quotes_stay_as_they_are() -> None:
    for text in (
        "point at '/data/my --force run'",
        "such as '/data/ckpt merge/run'",
        "'w --dtype x' is missing",
        "the ranks' files are of ckpt's own",
    ):
        assert spell(text, VERBS) == text


def test_a_command_after_a_command_is_spelled_once() -> None:
    text = "run ckpt inspect A then ckpt diff B C"
    assert spell(text, VERBS).count("diff") == 1
    text = "ckpt convert " * 200
    assert len(spell(text, VERBS)) < 3 * len(text)


def test_a_command_that_names_more_than_the_call_takes_stays_one() -> None:
    text = "use ckpt inspect PATH KEY --values 3"
    assert "ckpt.inspect([" not in spell(text, VERBS)
    assert "names=…" in spell("convert it first: ckpt convert --names", VERBS)


CASES: list[tuple[str, Callable[[Path, Path], Any], str]] = [
    ("convert HF OUT --to torch", lambda hf, out: core.convert(hf, out, to="torch"), "force=True"),
    (
        "convert HF NEW --to megatron --names hf:qwen2 --tp-new 2",
        lambda hf, out: core.convert(hf, out / "x", to="megatron", names="hf:qwen2", tp_new=2),
        "names='hf:qwen2' and to='megatron'",
    ),
    (
        "convert HF NEW --to hf --rename 'a(=b'",
        lambda hf, out: core.convert(hf, out / "x", rename="a(=b"),
        "rename: 'a(' is not",
    ),
    (
        "convert HF NEW --to hf --exclude nokey",
        lambda hf, out: core.convert(hf, out / "x", exclude="nokey"),
        "list(ckpt.open(SRC))",
    ),
    (
        "convert HF NEW --to hf --vocab-size 5 --keep-padded-vocab",
        lambda hf, out: core.convert(hf, out / "x", vocab_size=5, keep_padded_vocab=True),
        "keep_padded_vocab=True and vocab_size cannot be combined",
    ),
    (
        "convert HF NEW --to hf --layer-axis 1",
        lambda hf, out: core.convert(hf, out / "x", layer_axis=1),
        "Add stack_layers=True or unstack_layers",
    ),
    (
        "convert HF NEW --to hf --dtype float8_e4m3fn",
        lambda hf, out: core.convert(hf, out / "x", dtype="float8_e4m3fn"),
        "Use quantize='block' or quantize='tensor'; to cast without scales, use dtype",
    ),
    (
        "convert HF NEW --to hf --memory 1MiB",
        lambda hf, out: core.convert(hf, out / "x", memory="1MiB"),
        "Set memory to at least",
    ),
    (
        "convert HF NEW --to hf --strip-prefix model",
        lambda hf, out: core.convert(hf, out / "x", strip_prefix="model"),
        "strip_prefix='model.'",
    ),
    (
        "convert HF NEW --to hf --metadata-only",
        lambda hf, out: core.convert(hf, out / "x", metadata_only=True),
        "Omit metadata_only=True",
    ),
    (
        "diff HF HF --nan-differs",
        lambda hf, out: core.diff(hf, hf, nan_differs=True),
        (
            "nan_differs=True has no effect: without a tolerance, bytes are compared instead of "
            "values. Add rtol=… or atol"
        ),
    ),
    (
        "merge HF HF -o NEW --to hf --weights 0.5,0.6",
        lambda hf, out: core.merge([hf, hf], out / "x", weights=[0.5, 0.6]),
        "weights sum to 1.1",
    ),
    (
        "merge HF -o NEW --to hf --average",
        lambda hf, out: core.merge(hf, out / "x", average=True),
        "ckpt.merge([A, B], DST, average=True)",
    ),
    (
        "validate HF --plan-for tp",
        lambda hf, out: core.validate(hf, plan_for="tp"),
        "plan_for='tp=4,pp=2,format=torch_dist'",
    ),
    ("prune HF", lambda hf, out: core.prune(hf), "Pass keep_last=N, keep_every=N, or both"),
]


@pytest.mark.parametrize(("command", "call", "part"), CASES, ids=[case[0] for case in CASES])
def test_a_refusal_names_flags_at_the_command_line_and_arguments_in_python(
    golden: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    call: Callable[[Path, Path], Any],
    part: str,
) -> None:
    words = {"HF": str(golden / HF), "OUT": str(tmp_path), "NEW": str(tmp_path / "x")}
    (tmp_path / "model.safetensors").touch()  # OUT is not empty
    assert main([words.get(word, word) for word in shlex.split(command)]) != 0
    shown = capsys.readouterr().err
    with pytest.raises(CheckpointingException) as raised:
        call(golden / HF, tmp_path)
    assert part in str(raised.value)
    assert "--" not in str(raised.value)
    assert re.search(r"--[a-z]|ckpt inspect SRC", shown)


def test_findings_notes_and_conditions_of_results_name_arguments(golden: Path) -> None:
    summary = core.inspect(golden / RANKS)
    conditions = [capability.why for capability in summary.capabilities if capability.why]
    assert any("optim=False" in why for why in conditions)
    assert not any("--" in why for why in conditions)


def test_reading_names_arguments_too(golden: Path, tmp_path: Path) -> None:
    with core.open(golden / HF) as checkpoint, pytest.raises(CheckpointingException) as raised:
        checkpoint.named("megatron", family=tmp_path / "none.toml")
    assert "--" not in str(raised.value)
