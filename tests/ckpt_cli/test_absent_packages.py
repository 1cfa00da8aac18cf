"""ckpt where packages are not installed: what does not need them works, the rest names them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numcodecs
import numpy
import pytest
import zarr

CKPT = Path(sys.executable).with_name("ckpt")
ROOT = Path(__file__).resolve().parents[2]
RUN = "mcore_legacy/dense_gqa/tp2_pp2_optim"
_FINDER = """
import importlib.abc, os, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["ABSENT"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run(
    folder: Path, absent: str, *arguments: str | Path, program: Path = CKPT
) -> subprocess.CompletedProcess[str]:
    """Run ckpt in a folder, in an interpreter that finds none of the absent packages."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(_FINDER)
    path = f"{folder / 'site'}{os.pathsep}{ROOT}"
    environ = {**os.environ, "PYTHONPATH": path, "ABSENT": absent}
    command = [str(part) for part in (program, *arguments)]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


@pytest.mark.slow
def test_every_command_but_launch_works_without_the_large_packages(
    golden: Path, tmp_path: Path
) -> None:
    source, model = golden / RUN, golden / "mcore_legacy/dense_gqa/tp1_pp1"
    zarr = golden / "mcore0121_zarr/dense_gqa/tp4_pp1"
    commands = (
        ["inspect", source],
        ["inspect", source, "output_layer.weight", "--values", "3"],
        ["validate", source, "--deep"],
        ["validate", zarr, "--deep"],
        ["reshard", source, "tp1", "--tp-new", "1", "--pp-new", "1", "--fingerprint"],
        ["diff", source, "tp1"],
        ["manifest", "tp1"],
        *(["convert", model, to, "--to", to] for to in ("torch_dist", "dcp", "zarr", "zarr3")),
        ["convert", zarr, "from_zarr", "--to", "torch"],
        ["convert", model, "hf", "--to", "hf", "--no-optim", "--dtype", "float32"],
    )
    # One after the other in one interpreter, which never has the packages.
    program = (
        "import json, sys\n"
        "from ckpt_cli.app import main\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    code = main(command)\n"
        "    assert code == 0, (command, code)\n"
        "assert not {'torch', 'zarr', 'tensorstore'} & set(sys.modules)\n"
    )
    words = json.dumps([[str(word) for word in command] for command in commands])
    result = run(
        tmp_path, "torch zarr tensorstore", "-c", program, words, program=Path(sys.executable)
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("absent", "command", "message"),
    [
        (
            "torch",
            ["launch", "--", "validate"],
            "ckpt launch needs PyTorch, which is not installed",
        ),
        ("numpy", ["validate", "--deep"], "ckpt validate needs NumPy, which is not installed"),
        ("xxhash", ["convert", "--to", "dcp"], "ckpt convert needs xxhash, which is not installed"),
    ],
)
def test_what_needs_an_absent_package_names_it(
    absent: str, command: list[str], message: str, golden: Path, tmp_path: Path
) -> None:
    result = run(tmp_path, absent, *command, golden / RUN)
    assert result.returncode == 4
    assert message in result.stderr
    package = "'ckpt-toolkit[torch]'" if absent == "torch" else absent
    assert f"pip install {package}" in result.stderr
    assert "bug" not in result.stderr


def test_blosc_is_an_extra_that_is_named(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "group", mode="w", zarr_format=2)
    group.create_array(
        "weight", data=numpy.arange(300.0), compressors=numcodecs.Blosc(), chunks=(100,)
    )
    convert = ["convert", "group", "out.safetensors"]
    result = run(tmp_path, "tensorstore", *convert)
    assert result.returncode == 4
    assert "ckpt convert needs TensorStore, which is not installed" in result.stderr
    assert "hint: pip install 'ckpt-toolkit[blosc]'" in result.stderr
    assert not (tmp_path / "out.safetensors").exists()
    program = "import core; core.open('group')['weight'].numpy()"
    result = run(tmp_path, "tensorstore", "-c", program, program=Path(sys.executable))
    message = "blosc-compressed data needs TensorStore: pip install 'ckpt-toolkit[blosc]'"
    assert result.stderr.endswith(f"ModuleNotFoundError: {message}\n")
    assert run(tmp_path, "torch", *convert).returncode == 0


def test_explore_names_the_extra_that_it_needs(golden: Path, tmp_path: Path) -> None:
    # textual is looked for in a terminal only.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_FINDER)
    path = f"{tmp_path / 'site'}{os.pathsep}{ROOT}"
    environ = {"PYTHONPATH": path, "ABSENT": "textual", "TERM": "xterm"}
    main_end, end = os.openpty()
    process = subprocess.Popen(
        [str(CKPT), "explore", str(golden / RUN)],
        cwd=tmp_path,
        env={**os.environ, **environ},
        stdin=end,
        stdout=end,
        stderr=end,
    )
    os.close(end)
    assert process.wait() == 4
    text = " ".join(os.read(main_end, 10_000).decode().split())
    os.close(main_end)
    assert "ckpt explore needs textual, which is not installed" in text
    assert "hint: pip install 'ckpt-toolkit[explore]'" in text


def test_without_typer_there_is_no_traceback(tmp_path: Path) -> None:
    result = run(tmp_path, "typer", "--help")
    assert result.returncode == 4
    assert result.stderr == "error: ckpt needs typer: pip install typer\n"


def test_what_needs_pytorch_from_python_names_the_extra(golden: Path, tmp_path: Path) -> None:
    program = (
        "import sys, core\n"
        "tensor = core.open(sys.argv[1])['output_layer.weight']\n"
        "assert tensor.numpy().shape == tensor.shape\n"
        "for use in (tensor.torch, lambda: __import__('core.dist_checkpointing')):\n"
        "    try:\n"
        "        use()\n"
        "    except ModuleNotFoundError as err:\n"
        "        print(err)\n"
    )
    source = golden / "mcore_torch_dist/dense_gqa/tp2_pp2"
    result = run(tmp_path, "torch", "-c", program, source, program=Path(sys.executable))
    install = "needs PyTorch: pip install 'ckpt-toolkit[torch]'"
    assert result.stdout.splitlines() == [
        f"torch() {install}",
        f"core.dist_checkpointing {install}",
    ], result.stderr
