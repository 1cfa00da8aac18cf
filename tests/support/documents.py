"""The commands that README.md and docs/ show: read out of the pages, run, and compared with what
the pages show.

A page's ```console blocks are one session: their ``$`` lines run one after the other in a directory
that holds the checkpoints of ``CHECKPOINTS`` (those that the page names). What stands below a
command is its output; a line ``…`` stands for any lines. A command shown without output has only
its exit code compared, which is 0 unless the next command is ``$ echo $?``. Times and rates are not
compared.

``python -m tests.support.documents FOLDER`` makes the checkpoints in a new folder, to follow the
pages by hand. ``python -m tests.support.documents --write [PAGE …]`` runs the pages and writes the
real output into them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.support.archives import unpacked
from tests.support.starship import write_starship

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS: Mapping[str, str] = {
    "runs/llama": "mcore_legacy/dense_gqa/tp4_pp1_optim",
    "runs/llama-dist": "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable",
    "runs/llama-zarr": "mcore0121_zarr/dense_gqa/tp2_pp2_optim",
    "runs/moe": "mcore_legacy/moe_seq/tp2_pp1_ep2",
    "runs/titan": "torch_dcp/fsdp2_dp2",
    "runs/accelerate": "accelerate/fsdp2_dp2/checkpoint_1",
    "runs/accelerate-plain": "accelerate/plain/checkpoint_0",
    "runs/lora": "trainer/peft",
    "runs/lightning.ckpt": "lightning/model_parallel_dp2.ckpt",
    "runs/zero3": "deepspeed/zero3_dp2_bf16",
    "runs/trainer": "trainer/zero2_dp2",
    "runs/orbax": "orbax/ocdbt_zarr3",
    "models/llama": "hf/llama/safetensors_sharded",
    "models/llama-bin": "hf/llama/bin_sharded",
}
"""Name in the pages → directory of tests/golden."""
ARCHIVED: Mapping[str, tuple[str, str]] = {
    "runs/verl": ("dtensor", "fsdp2_dp4"),
    "runs/verl-megatron": ("megatron_frameworks", "verl"),
    "runs/adapter": ("lora", "lora/llama/adapter"),
    "models/base": ("lora", "lora/llama/base"),
}
"""Name in the pages → archive (``tests.support.archives``), and directory in it."""
NEWER_ITERATION = "runs/damaged"
"""A copy of runs/llama with a second iteration that lacks a file and has one byte changed."""
TITAN_CONFIG = """{
  "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 130,
  "hidden_size": 32,
  "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "max_position_embeddings": 64,
  "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false
}
"""
"""The config.json of the model in runs/titan, which its trainer does not save."""
HOME = "/home/me/playground"
"""Stands in the pages for the directory that their commands run in."""
TIMES = re.compile(
    r"(?:less than a second|about \d+ s \(.*\)|free space +\d[\d.,]* \w+"
    r"|\d[\d.,]* m?s\b(?:, \d[\d.,]* \w+/s| \(\d[\d.,]* \w+/s\))?)"
)
"""A time, with the rate that follows unless the time is short; the free space of a plan."""
GAP = "…"


@dataclass(frozen=True)
class Step:
    """A command of a page.

    Args:
        command: what stands behind ``$``.
        shown: the lines below it.
        line: index of the command's line in the page.
    """

    command: str
    shown: tuple[str, ...]
    line: int


def pages() -> list[Path]:
    """Return README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fences(text: str, language: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (index of the first line, lines) of the fenced blocks of a language."""
    lines = text.splitlines()
    begin: int | None = None
    for i, line in enumerate(lines):
        if begin is None and line.startswith("```"):
            begin, is_wanted = i + 1, line == f"```{language}"
        elif begin is not None and line == "```":
            if is_wanted:
                yield begin, lines[begin:i]
            begin = None


def steps_of(text: str) -> list[Step]:
    """Return the commands of a page: those of its console blocks, then those that are the last
    column of a table.
    """
    steps = []
    for begin, lines in fences(text, "console"):
        starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
        for i, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
            steps.append(Step(lines[i][2:], tuple(lines[i + 1 : stop]), begin + i))
    for i, line in enumerate(text.splitlines()):
        if match := re.fullmatch(r"\|.*\| `(ckpt [^`]+)` \|", line):
            steps.append(Step(match[1], (), i))
    return steps


def make_checkpoints(golden: Path, folder: Path, text: str | None = None) -> None:
    """Copy the checkpoints into a directory.

    Args:
        golden: the unpacked tests/golden.
        folder: the directory.
        text: a page whose commands name the ones that are needed; None for all.
    """
    named = None if text is None else " ".join(step.command for step in steps_of(text))

    def is_needed(name: str) -> bool:
        return named is None or bool(re.search(rf"(?<![\w/]){re.escape(name)}(?![\w-])", named))

    for name, source in CHECKPOINTS.items():
        if is_needed(name):
            shutil.copytree(golden / source, folder / name)
    for name, (archive, source) in ARCHIVED.items():
        if is_needed(name):
            with tempfile.TemporaryDirectory() as unpacked_dir:
                shutil.copytree(unpacked(archive, Path(unpacked_dir)) / source, folder / name)
    if named is None or "models/starship" in named:
        write_starship(golden / CHECKPOINTS["models/llama"], folder)
    if named is None or "config.json" in named:
        (folder / "config.json").write_text(TITAN_CONFIG)
    if named is None or NEWER_ITERATION in named:
        root = Path(shutil.copytree(golden / CHECKPOINTS["runs/llama"], folder / NEWER_ITERATION))
        newer = Path(shutil.copytree(root / "iter_0000010", root / "iter_0000020"))
        (newer / "mp_rank_03/model_optim_rng.pt").unlink()
        damaged = newer / "mp_rank_01/model_optim_rng.pt"
        content = bytearray(damaged.read_bytes())
        content[128_001] ^= 1
        damaged.write_bytes(content)
        (root / "latest_checkpointed_iteration.txt").write_text("20")


def run_steps(steps: Sequence[Step], folder: Path) -> Iterator[tuple[Step, int, list[str]]]:
    """Run commands in a directory; yield each with its exit code and its output, stderr included.

    Commands of ``ckpt`` run in this process; what a shell must understand, and ``ckpt launch``, in
    one of its own.
    """
    bin_dir = folder / ".bin"
    bin_dir.mkdir()
    (bin_dir / "ckpt").write_text(
        f'#!/bin/bash\nPYTHONPATH={ROOT} exec {sys.executable} -m ckpt_cli "$@"\n'
    )
    (bin_dir / "ckpt").chmod(0o755)
    code = 0
    for step in steps:
        if re.match(r"ckpt (?!launch)[^$|;&<>]*$", step.command):
            code, output = _run_here(shlex.split(step.command, comments=True)[1:], folder)
        else:
            done = subprocess.run(
                ["bash", "-c", f"(exit {code})\n{step.command}"],
                cwd=folder,
                env={**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            code, output = done.returncode, done.stdout
        yield step, code, output.replace(str(folder), HOME).splitlines()


def _run_here(arguments: list[str], folder: Path) -> tuple[int, str]:
    from ckpt_cli.app import main

    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        code = main(arguments)
    stream.flush()
    return code, stream.buffer.getvalue().decode()  # type: ignore[attr-defined]


def is_shown(shown: Sequence[str], output: Sequence[str]) -> bool:
    """Return whether what a page shows is the output, times and ``…`` apart."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == GAP else _line_pattern(line) for line in shown
    )
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in output)) is not None


def _line_pattern(line: str) -> str:
    parts = TIMES.split(line.rstrip())
    return TIMES.pattern.join(re.escape(part) for part in parts) + r"\n"


def problems_of(text: str, golden: Path, folder: Path) -> list[str]:
    """Run a page; return what is not as it says, as text."""
    problems = []
    make_checkpoints(golden, folder, text)
    steps = steps_of(text)
    shows_code = {step.line for step, after in pairwise(steps) if after.command == "echo $?"}
    for step, code, output in run_steps(steps, folder):
        if code != 0 and step.line not in shows_code:
            problems.append(
                f"line {step.line + 1}: $ {step.command}: exit code {code}\n" + "\n".join(output)
            )
        elif step.shown and not is_shown(step.shown, output):
            problems.append(
                f"line {step.line + 1}: $ {step.command}: other output:\n" + "\n".join(output)
            )
    return problems


def with_real_output(text: str, golden: Path, folder: Path) -> str:
    """Return a page with the real output below each command that shows some.

    An output that ends with ``…`` keeps its length; where that stands elsewhere, the page has to be
    put right by hand.
    """
    lines = text.splitlines()
    make_checkpoints(golden, folder, text)
    results = list(run_steps(steps_of(text), folder))
    for step, _, output in reversed(results):
        if step.shown and not is_shown(step.shown, output):
            gaps = [i for i, line in enumerate(step.shown) if line.strip() == GAP]
            if gaps and gaps != [len(step.shown) - 1]:
                sys.stderr.write(
                    "\n    ".join([f"line {step.line + 1}: other output:", *output, ""])
                )
            else:
                new = [*output[: gaps[0]], GAP] if gaps else output
                lines[step.line + 1 : step.line + 1 + len(step.shown)] = [
                    line.rstrip() for line in new
                ]
    return "\n".join(lines) + "\n"


def _main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        golden = Path(temporary, "golden")
        with tarfile.open(ROOT / "tests/golden/golden.tar.xz") as archive:
            archive.extractall(
                golden, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
            )
        if arguments[0] != "--write":
            target = Path(arguments[0])
            if target.exists():
                raise SystemExit(f"{target} exists already; name a new folder")
            make_checkpoints(golden, target)
            return
        for i, page in enumerate([Path(name) for name in arguments[1:]] or pages()):
            folder = Path(temporary, str(i))
            folder.mkdir()
            page.write_text(with_real_output(page.read_text("utf-8"), golden, folder), "utf-8")


if __name__ == "__main__":
    _main(sys.argv[1:])
