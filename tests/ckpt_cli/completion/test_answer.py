"""Completion as the scripts of the shells ask for it: by variables, mostly in a process of its
own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.main import get_command

from ckpt_cli.app import app
from ckpt_cli.completion.answer import ITERATIONS, KEYS, PAIRS, WORDS, answer
from ckpt_cli.completion.source import MOST_KEYS, offered_keys
from core.arrays.dtypes import dtype_of
from core.engine.changes.quantize import KINDS
from tests.support import forked

ROOT = Path(__file__).resolve().parents[3]
MAIN = "import sys; from ckpt_cli.__main__ import main; sys.exit(main())"
KEYS_OF_MODEL = [
    "lm_head.weight",
    *(f"model.layers.{n}.{name}" for n in range(3) for name in ("mlp.weight", "norm.bias")),
]


def run(
    variables: Mapping[str, str], tmp_path: Path, *, program: str = MAIN, timeout_s: str = "60"
) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "COMP_WORDS"} | {
        "CKPT_COMPLETION_TIMEOUT": timeout_s,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        **variables,
    }
    if program == MAIN:
        return forked.run(["-c", program], env=environ, timeout=60)
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def bash(
    tmp_path: Path, *words: str, program: str = MAIN, timeout_s: str = "60"
) -> list[str] | None:
    """Candidates of bash for the last word; None if anything else than an answer was written."""
    done = run(
        {
            "_CKPT_COMPLETE": "complete_bash",
            "COMP_WORDS": "\n".join(["ckpt", *words]),
            "COMP_CWORD": str(len(words)),
        },
        tmp_path,
        program=program,
        timeout_s=timeout_s,
    )
    return done.stdout.split("\n") if (done.returncode, done.stderr) == (0, "") else None


def line(shell: str, text: str, tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    variables = {"_CKPT_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": text, **more}
    return run(variables, tmp_path)


def write_model(file: Path, keys: list[str]) -> str:
    header = {
        key: {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
        for n, key in enumerate(keys)
    }
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * len(keys)))
    return str(file)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path / "model.safetensors", KEYS_OF_MODEL)


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        (["ins"], ["inspect"]),
        (["validate", "--head"], ["--headers"]),
        (["convert", "--target-tensor"], ["--target-tensor-parallel-size"]),  # an alias
        (["convert", "--no-opt"], ["--no-optim"]),
        (["convert", "--to", "z"], ["zarr", "zarr3"]),
        (["convert", "--to", "=", "z"], ["zarr", "zarr3"]),
        (["convert", "--names", ""], ["hf", "megatron"]),
        (["convert", "--dtype", "*.bias", "=", "f"], ["fp16", "fp32", "fp64"]),
        (["validate", "--format", "s"], ["sarif"]),
        (["inspect", "--missing_chunks", ""], ["fill", "error"]),
        (["launch", "--device", "cp"], ["cpu"]),
        (["launch", "--", "convert", "--to", "de"], ["deepspeed_universal"]),
        (["inspect", "--limit", ""], [""]),
        (["no-such-command", ""], [""]),
    ],
)
def test_commands_options_and_fixed_values(words: list[str], candidates: list[str]) -> None:
    question = {
        "_CKPT_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(["ckpt", *words]),
        "COMP_CWORD": str(len(words)),
    }
    assert answer(get_command(app), question).text.split("\n") == candidates


def test_an_option_is_offered_once_unless_it_can_be_repeated(tmp_path: Path) -> None:
    names = bash(tmp_path, "convert", "--force", "--include", "x", "--")
    assert names is not None and "--include" in names and "--force" not in names


def test_iterations_of_a_training_root_newest_first(tmp_path: Path) -> None:
    for name in ("iter_0000005", "iter_0000010", "iter_0000020", "logs"):
        (tmp_path / "run" / name).mkdir(parents=True)
    root = str(tmp_path / "run")
    assert bash(tmp_path, "validate", root, "--iteration", "") == ["20", "10", "5"]
    assert bash(tmp_path, "diff", "other", root, "--iteration-b", "1") == ["10"]
    done = line("fish", f"ckpt convert {root} --iteration 2", tmp_path)
    assert done.stdout == "20\titer_0000020"


def test_keys_and_folded_patterns_of_the_source(model: str, tmp_path: Path) -> None:
    assert bash(tmp_path, "inspect", model, "") == [
        "lm_head.weight",
        r"model.layers.\[0-2\].mlp.weight",
        r"model.layers.\[0-2\].norm.bias",
    ]
    assert bash(tmp_path, "convert", model, "--include", "model.layers.1") == [
        "model.layers.1.mlp.weight",
        "model.layers.1.norm.bias",
    ]
    # In quotes, as they are; behind "=", the second key.
    assert bash(tmp_path, "inspect", model, "'model.layers.[0-2].m") == [
        "model.layers.[0-2].mlp.weight"
    ]
    assert bash(tmp_path, "convert", model, "--tie", "x", "=", "lm") == ["lm_head.weight"]


def test_many_keys_are_offered_by_their_next_name() -> None:
    keys = [f"block{n}.part{m}.weight" for n in range(40) for m in range(20)]
    assert len(keys) > MOST_KEYS
    offered = offered_keys(keys, "block")
    assert offered[:2] == ["block0", "block1"] and len(offered) == 40
    assert offered_keys(keys, "block7.part1") == [
        f"block7.part{m}.weight" for m in (1, *range(10, 20))
    ]


@pytest.mark.first(1)
@pytest.mark.parametrize("words", [["inspect"], ["convert", "a"], ["convert", "--rules"]])
def test_paths_are_left_to_the_shell(words: list[str], tmp_path: Path) -> None:
    text = f"ckpt {' '.join(words)} "
    assert bash(tmp_path, *words, "") == [""]
    assert line("zsh", text, tmp_path).stdout == "_files"
    is_args = line("fish", text, tmp_path, _TYPER_COMPLETE_FISH_ACTION="is-args")
    assert (is_args.returncode, is_args.stdout, is_args.stderr) == (1, "", "")


def test_fish_completes_no_files_where_there_are_words(tmp_path: Path) -> None:
    done = line("fish", "ckpt convert --to ", tmp_path, _TYPER_COMPLETE_FISH_ACTION="is-args")
    assert done.returncode == 0


def test_zsh_gets_descriptions(tmp_path: Path) -> None:
    done = line("zsh", "ckpt validate --head", tmp_path)
    assert "'--headers:Also read every container'\"'\"'s headers: offsets" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_a_hostile_key_is_not_run_by_zsh(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    keys = [f"a\\$(touch${{IFS}}{canary})", f"b'`touch${{IFS}}{canary}`", 'c"\\";']
    model = write_model(tmp_path / "m.safetensors", keys)
    reply = line("zsh", f"ckpt inspect {model} ", tmp_path).stdout
    script = "_describe() { print -rl -- ${(P)3} }; f() { eval $(printf %s $1) }; f $1"
    done = subprocess.run(
        ["zsh", "-f", "-c", script, "zsh", reply], capture_output=True, text=True, check=True
    )
    shown = [text.replace("\\\\", "\\") for text in done.stdout.splitlines()]
    assert shown == keys and not canary.exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_without_an_answer_nothing_is_offered_and_nothing_said(
    shell: str, model: str, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"\xff" * 64)
    nothing = ":" if shell == "zsh" else ""
    for path in (damaged, tmp_path / "missing"):
        words = ["inspect", str(path)]
        if shell == "bash":
            assert bash(tmp_path, *words, "") == [""]
        else:
            done = line(shell, f"ckpt {' '.join(words)} ", tmp_path)
            assert (done.stdout, done.stderr, done.returncode) == (nothing, "", 0)


SLOW = (
    "import time, core.opening.open as module\n"
    "module.open_checkpoint = lambda *args, **options: time.sleep(600)\n"
)


def test_a_checkpoint_that_takes_long_is_not_waited_for(model: str, tmp_path: Path) -> None:
    words = ("inspect", model, "")
    assert bash(tmp_path, *words, program=SLOW + MAIN, timeout_s="0.3") == [""]


def test_keys_are_remembered_until_the_checkpoint_changes(model: str, tmp_path: Path) -> None:
    words = ("inspect", model, "lm")
    assert bash(tmp_path, *words) == ["lm_head.weight"]
    assert bash(tmp_path, *words, program=SLOW + MAIN) == ["lm_head.weight"]
    write_model(Path(model), ["lm_tail.weight"])
    os.utime(model, (1, 1))
    assert bash(tmp_path, *words) == ["lm_tail.weight"]


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "variables",
    [
        {"_CKPT_COMPLETE": "complete_powershell"},
        {"_CKPT_COMPLETE": "complete_bash"},
        {"_CKPT_COMPLETE": "complete_bash", "COMP_WORDS": "ckpt", "COMP_CWORD": "9"},
        {"_CKPT_COMPLETE": ""},
    ],
)
def test_an_unknown_question_has_no_answer(variables: dict[str, str], tmp_path: Path) -> None:
    done = run(variables, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_tables_name_options_that_exist_and_words_that_are_accepted() -> None:
    commands = get_command(app).commands.values()  # type: ignore[attr-defined]
    fields = {param.name for command in commands for param in command.params}
    assert not {*WORDS, *KEYS, *PAIRS, *ITERATIONS} - fields
    assert all(dtype_of(word).kind == "float" for word in WORDS["dtype"] + WORDS["dequantize"])
    assert WORDS["quantize"] == KINDS
