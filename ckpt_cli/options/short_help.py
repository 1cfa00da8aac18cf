"""What ``ckpt COMMAND --help`` shows: examples to paste and the options used most.

``--help-all`` shows every option. A page should fit one screen of 80 × 40, so an option is listed
here only if many users need it; tests/ckpt_cli/options/test_short_help.py checks the size, and
that each option and each command line exists.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from core.values import dataclass


@dataclass(frozen=True, slots=True)
class ShortHelp:
    """The help page of a command that fits one screen.

    Args:
        examples: (what it does, command line) pairs.
        options: long names of the options to show, in this order.
        guide: page about the command in ``docs``, without its suffix; "" for their list.
    """

    examples: tuple[tuple[str, str], ...]
    options: tuple[str, ...]
    guide: str


SHORT_HELP: Mapping[str, ShortHelp] = {
    "ckpt": ShortHelp(
        examples=(
            ("what a checkpoint holds", "ckpt inspect run"),
            ("Megatron to Hugging Face", "ckpt convert run model-hf --to hf"),
            ("other parallel sizes", "ckpt reshard run run-tp4 --tp-new 4 --pp-new 2"),
            ("is every byte intact?", "ckpt validate run-tp4 --deep"),
        ),
        options=("--version", "--install-completion"),
        guide="",
    ),
    "inspect": ShortHelp(
        examples=(
            ("the newest iteration of a run", "ckpt inspect run"),
            (
                "where the first layer is stored, and its first values",
                "ckpt inspect run 'decoder.layers.0.*' --values 4",
            ),
            ("one line per tensor, the largest first", "ckpt inspect run --flat --sort size"),
        ),
        options=(
            "--iteration",
            "--tree",
            "--sort",
            "--values",
            "--stats",
            "--sizes",
            "--ranks",
            "--map",
            "--limit",
            "--all",
            "--json",
        ),
        guide="guide/first-steps",
    ),
    "explore": ShortHelp(
        examples=(
            ("the newest iteration of a run", "ckpt explore run"),
            ("an older iteration, in a bucket", "ckpt explore s3://bucket/run --iteration 5000"),
        ),
        options=("--iteration", "--memory", "--threads", "--storage-option"),
        guide="guide/explore",
    ),
    "convert": ShortHelp(
        examples=(
            (
                "Megatron to Hugging Face",
                "ckpt convert run/iter_0010000 model-hf --to hf --dtype bf16",
            ),
            (
                "Hugging Face to Megatron rank files, TP 4 × PP 2",
                "ckpt convert model-hf run --to megatron --tp-new 4 --pp-new 2",
            ),
            (
                "FSDP2 or any other DCP checkpoint to one file; print the plan only",
                "ckpt convert dcp-dir model.safetensors --no-optim --dry-run",
            ),
        ),
        options=(
            "--to",
            "--iteration",
            "--tp-new",
            "--pp-new",
            "--no-optim",
            "--dtype",
            "--tokenizer",
            "--include",
            "--dry-run",
            "--verify",
            "--force",
        ),
        guide="guide/convert",
    ),
    "reshard": ShortHelp(
        examples=(
            ("to TP 4 × PP 2, optimizer included", "ckpt reshard run out --tp-new 4 --pp-new 2"),
            (
                "print what would be read and written",
                "ckpt reshard run out --tp-new 8 --pp-new 1 --dry-run",
            ),
            (
                "a mixture of experts, compared with the source afterwards",
                "ckpt reshard run out --tp-new 2 --ep-new 8 --verify",
            ),
        ),
        options=(
            "--tp-new",
            "--pp-new",
            "--vpp-new",
            "--ep-new",
            "--etp-new",
            "--pipeline-model-parallel-layout",
            "--vocab-size",
            "--to",
            "--iteration",
            "--no-optim",
            "--dry-run",
            "--verify",
            "--force",
        ),
        guide="guide/reshard",
    ),
    "merge": ShortHelp(
        examples=(
            (
                "the mean of two checkpoints of a run",
                "ckpt merge run/iter_0000900 run/iter_0001000 -o mean --average",
            ),
            ("what training changed", "ckpt merge tuned base -o delta --delta --dtype fp32"),
            ("added to another model", "ckpt merge other -o new --add-delta delta --scale 0.7"),
            ("a LoRA adapter folded into its base", "ckpt merge base -o tuned --lora adapter"),
        ),
        options=(
            "--average",
            "--weights",
            "--ema",
            "--slerp",
            "--delta",
            "--add-delta",
            "--scale",
            "--lora",
            "--output",
            "--dry-run",
            "--verify",
        ),
        guide="guide/merge",
    ),
    "manifest": ShortHelp(
        examples=(
            ("checksums and fingerprints, next to the data", "ckpt manifest run/iter_0010000"),
            ("the same, in a separate file", "ckpt manifest run -o run-manifest.json"),
            ("check the data against it later", "ckpt validate run/iter_0010000 --deep"),
        ),
        options=(
            "--output",
            "--fingerprints",
            "--force",
            "--iteration",
            "--threads",
            "--memory",
            "--json",
            "--quiet",
        ),
        guide="guide/manifest",
    ),
    "validate": ShortHelp(
        examples=(
            ("read every byte", "ckpt validate run/iter_0010000 --deep"),
            ("the newest iteration without damage", "ckpt validate --newest-valid run --deep"),
            ("can TP 8 × PP 2 load it?", "ckpt validate run --plan-for tp=8,pp=2"),
        ),
        options=(
            "--headers",
            "--deep",
            "--strict",
            "--ignore",
            "--plan-for",
            "--newest-valid",
            "--iteration",
            "--format",
            "--list-checks",
            "--quiet",
        ),
        guide="guide/validate",
    ),
    "diff": ShortHelp(
        examples=(
            ("bit for bit, across formats and layouts", "ckpt diff run-tp8 run-tp4"),
            ("by value, after a cast", "ckpt diff run model-hf --no-optim --rtol 1e-2"),
            ("names, shapes and dtypes only", "ckpt diff run-a run-b --stat-only"),
        ),
        options=(
            "--rtol",
            "--atol",
            "--stat-only",
            "--include",
            "--exclude",
            "--tensors-only",
            "--no-optim",
            "--iteration",
            "--iteration-b",
            "--map",
            "--report",
            "--limit",
            "--json",
            "--quiet",
        ),
        guide="guide/compare",
    ),
    "explain": ShortHelp(
        examples=(
            ("a code of ckpt validate", "ckpt explain CK508"),
            ("a line that a program printed", "ckpt explain 'Missing key(s) in state_dict'"),
            ("what is wrong with a checkpoint", "ckpt explain run/iter_0010000"),
        ),
        options=("--no-pager", "--storage-option"),
        guide="troubleshooting",
    ),
    "prune": ShortHelp(
        examples=(
            (
                "the newest three, and every ten-thousandth (dry run)",
                "ckpt prune run --keep-last 3 --keep-every 10000 --dry-run",
            ),
            ("in a batch job, without confirmation", "ckpt prune run --keep-last 3 --deep --yes"),
        ),
        options=(
            "--keep-last",
            "--keep-every",
            "--dry-run",
            "--yes",
            "--deep",
            "--trust-metadata",
            "--json",
            "--quiet",
        ),
        guide="guide/prune",
    ),
    "launch": ShortHelp(
        examples=(
            (
                "eight workers on this host",
                "ckpt launch --nproc-per-node 8 -- reshard run out --tp-new 4",
            ),
            (
                "two hosts: run this on both",
                "ckpt launch --nnodes 2 --rdzv-endpoint node1 -- validate run --deep",
            ),
            (
                "casts on the GPUs",
                "ckpt launch --device cuda -- convert run out --to dcp --dtype bf16",
            ),
        ),
        options=(
            "--nproc-per-node",
            "--nnodes",
            "--rdzv-endpoint",
            "--device",
            "--timeout",
            "--max-restarts",
            "--log-dir",
            "--tee",
        ),
        guide="guide/launch",
    ),
    "demo": ShortHelp(
        examples=(
            ("small checkpoints of many kinds", "ckpt demo"),
            ("in another directory", "ckpt demo /tmp/small"),
        ),
        options=(),
        guide="guide/first-steps",
    ),
}
"""Command, or ``ckpt`` for the program's own page → its short help."""


def documentation_of(command: str) -> str:
    """Return where the documentation of a command is: an address, or the command that shows it.

    The address is the ``Documentation`` of pyproject.toml's ``[project.urls]``: a site built with
    mkdocs.yml. Without one, ``ckpt help`` shows the page.
    """
    guide = SHORT_HELP[command].guide
    # importlib.metadata takes as long to import as the rest of a help page takes.
    name = "ckpt_toolkit-*.dist-info/METADATA"
    files = (file for folder in sys.path for file in Path(folder).glob(name))
    file = next(files, None)
    text = "" if file is None else file.read_text(encoding="utf-8")
    # The headers end at an empty line; the description follows.
    for line in text.partition("\n\n")[0].splitlines():
        label, _, address = line.removeprefix("Project-URL:").partition(",")
        if line.startswith("Project-URL:") and label.strip().lower() == "documentation":
            return f"{address.strip().rstrip('/')}/{guide}/"
    return f"ckpt help {guide}".rstrip()
