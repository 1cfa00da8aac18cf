"""Start-up: what the commands import.

The commands run one after the other in one fresh interpreter, which tells after each what is
imported by then. That asks more than an interpreter for each of them, because what a command
imports counts for those that follow, too; so those that may import least come first. How many
modules of this project a command imports is counted in a fork that had imported none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.covering import covering_cases

HEAVY = {"ml_dtypes", "numpy", "safetensors", "tensorstore", "torch", "zarr"}

HELP = [
    ["--help"],
    ["--version"],
    ["inspect", "--help"],
    ["explore", "--help"],
    ["convert", "--help"],
    ["reshard", "--help"],
    ["validate", "--help"],
]
LIST_CHECKS = ["validate", "--list-checks"]
VALIDATED = [
    "torch_dcp/fsdp2_dp2",
    "mcore_legacy/dense_gqa/tp2_pp2",
    "mcore_legacy/dense_gqa/tp2_pp1_optim",
    "mcore_torch_dist/dense_gqa/tp2_pp2_optim",
    "mcore0121_zarr/dense_gqa/tp2_pp2",
    "hf/llama/safetensors_sharded",
    "hf/llama/torch_single/model_zip.pt",
    "deepspeed/zero1_dp2_bf16",
]
REPORTS = [
    ["validate", "torch_dcp/tp2_only", "--format", name]
    for name in ("text", "json", "junit", "sarif", "github")
]
NEWEST = ["validate", "--newest-valid", "mcore_torch_dist/dense_gqa/tp2_pp2"]
INSPECTED = [
    ["inspect", "torch_dcp/fsdp2_dp2", "--json"],
    ["inspect", "mcore_legacy/dense_gqa/tp1_pp1_optim", "--json"],
    ["inspect", "mcore_torch_dist/dense_gqa/tp2_pp2_optim"],
    ["inspect", "mcore0121_torch_dist/dense_gqa/tp2_pp2_optim"],
]
MOST_OF_OURS = {
    "--help": 27,
    "inspect torch_dcp/fsdp2_dp2": 137,
    "inspect hf/llama/torch_single/model_zip.pt": 123,
    "inspect oracle/hf/llama.safetensors": 114,
    "inspect orbax/ocdbt_zarr3": 129,
    "inspect mcore_legacy/dense_gqa/tp2_pp1": 306,
    "inspect mcore0121_zarr/dense_gqa/tp2_pp2_optim": 331,
    "inspect hf/llama/safetensors_single": 175,
    "inspect deepspeed/zero1_dp2_bf16": 265,
    "validate torch_dcp/fsdp2_dp2": 163,
    "validate hf/llama/torch_single/model_zip.pt": 153,
    "validate hf/llama/safetensors_sharded": 181,
    "validate mcore_legacy/dense_gqa/tp2_pp2": 191,
    "convert torch_dcp/fsdp2_dp2 OUT --to torch": 203,
    "convert hf/llama/safetensors_single OUT --to dcp": 215,
    "convert mcore_legacy/dense_gqa/tp2_pp1 OUT --to torch_dist": 254,
    "reshard mcore_legacy/dense_gqa/tp2_pp1 OUT --tp-new 1": 237,
}
"""Command → modules of this project that it may import. A number that has to rise is a sign that an
import belongs into the function, or behind the condition, that needs it. (The aims are 150 for
``inspect`` and ``validate`` of any format, and 220 for ``convert`` and ``reshard``.)
"""
NO_SUCH_OPTION = ["inspect", "--no-such-option"]

PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
def run(words):
    with redirect_stdout(io.TextIOWrapper(io.BytesIO())), redirect_stderr(sys.stdout):
        from ckpt_cli.app import main
        code = main(words)
        sys.stdout.seek(0)
        return code, sys.stdout.read()
for words in json.load(sys.stdin):
    code, output = run(words)
    names = sorted({name.partition(".")[0] for name in sys.modules})
    print(json.dumps([words, code, output, names]))
"""


@pytest.fixture(scope="module")
def imported(golden: Path, repo_dir: Path) -> Mapping[tuple[str, ...], set[str]]:
    """Top-level names of the modules that are imported once a command has run, by its words."""
    headers = [["validate", name, "--headers"] for name in VALIDATED]
    commands = [*HELP, LIST_CHECKS, *headers, *REPORTS, NEWEST, *INSPECTED, NO_SUCH_OPTION]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=golden,
        env={"PYTHONPATH": str(repo_dir), "CKPT_PROGRESS": "none"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = {}
    for line in done.stdout.splitlines():
        words, code, output, modules = json.loads(line)
        assert code == (2 if words == NO_SUCH_OPTION else 0), output
        names[tuple(words)] = set(modules)
    assert list(names) == [tuple(words) for words in commands]
    return names


@pytest.mark.parametrize("words", [*HELP, LIST_CHECKS], ids=" ".join)
def test_help_and_tables_import_nothing_heavy(
    words: list[str], imported: Mapping[tuple[str, ...], set[str]]
) -> None:
    assert imported[tuple(words)] & (HEAVY | {"rich", "textual"}) == set()


@pytest.mark.parametrize("name", VALIDATED)
def test_validate_imports_nothing_heavy_unless_it_is_deep(
    name: str, imported: Mapping[tuple[str, ...], set[str]]
) -> None:
    assert imported["validate", name, "--headers"] & (HEAVY | {"rich"}) == set()


@pytest.mark.parametrize("words", REPORTS, ids=lambda words: words[-1])
def test_no_report_imports_anything_heavy(
    words: list[str], imported: Mapping[tuple[str, ...], set[str]]
) -> None:
    assert imported[tuple(words)] & (HEAVY | {"rich"}) == set()


def test_a_newest_iteration_is_found_without_anything_heavy(
    imported: Mapping[tuple[str, ...], set[str]],
) -> None:
    assert imported[tuple(NEWEST)] & (HEAVY | {"rich"}) == set()


@pytest.mark.parametrize("words", INSPECTED, ids=lambda words: " ".join(words[1:]))
def test_inspect_imports_nothing_heavy(
    words: list[str], imported: Mapping[tuple[str, ...], set[str]]
) -> None:
    assert imported[tuple(words)] & HEAVY == set()


def test_a_usage_error_imports_nothing_heavy(
    imported: Mapping[tuple[str, ...], set[str]],
) -> None:
    assert imported[tuple(NO_SUCH_OPTION)] & HEAVY == set()


FORKS = """
import io, json, os, runpy, sys
from contextlib import redirect_stderr, redirect_stdout
for words in json.load(sys.stdin):
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        continue
    sys.argv[1:] = words
    talk, code = io.TextIOWrapper(io.BytesIO()), None
    try:
        with redirect_stdout(talk), redirect_stderr(talk):
            runpy.run_module("ckpt_cli", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    talk.seek(0)
    print(json.dumps([code, talk.read(), sorted(sys.modules)]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest,
    golden: Path,
    repo_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[str, tuple[int, str, set[str]]]:
    """Exit code, output and the modules that are imported of commands, each in a process of its
    own that had imported nothing.
    """
    out = tmp_path_factory.mktemp("out")
    collected = [
        item.callspec.params["command"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.function is test_a_command_imports_what_it_runs
    ]
    commands = [
        [str(out / str(number)) if word == "OUT" else word for word in command.split()]
        for number, command in enumerate(collected)
    ]
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=golden,
        env={"PYTHONPATH": str(repo_dir), "CKPT_PROGRESS": "none"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        command: (code, talk, set(names))
        for command, (code, talk, names) in zip(collected, ends, strict=True)
    }


@pytest.mark.parametrize(
    "command",
    covering_cases(
        MOST_OF_OURS,
        lambda command: dict(
            zip(("verb", "family"), command.partition("/")[0].split(), strict=False)
        ),
    ),
)
def test_a_command_imports_what_it_runs(
    command: str, started: Mapping[str, tuple[int, str, set[str]]]
) -> None:
    code, talk, names = started[command]
    assert code == 0, talk
    assert "ckpt_cli.app" in names
    ours = [name for name in names if name.partition(".")[0] in ("ckpt_cli", "core")]
    assert len(ours) <= MOST_OF_OURS[command]
    assert {name.partition(".")[0] for name in names} & HEAVY == set()
