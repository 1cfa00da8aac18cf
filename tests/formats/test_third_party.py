"""A format of a third party: found by its entry point, held to the contract, used from the command
line.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from core.formats.format import Format
from core.verbs.convert.contract import CHECKS, Sample
from tests.support.fragments import replace_fragments

EXAMPLE = Path(__file__).resolve().parent.parent / "example_format" / "npy_folder.py"


def _format() -> Format:
    spec = importlib.util.spec_from_file_location("npy_folder", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plugin = module.FORMAT
    assert isinstance(plugin, Format)
    return plugin


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_example_format_keeps_the_contract(check: Callable[..., None], tmp_path: Path) -> None:
    check(_format(), tmp_path)


@pytest.mark.parametrize(
    ("change", "check", "message"),
    [
        ({"title": " "}, 0, "the title is empty"),
        ({"sniff": lambda store: True}, 0, "an empty directory is sniffed"),
        ({"sniff": lambda store: False}, 2, "is not recognized as this format"),
        ({"keeps_objects": True}, 2, "object step came back as None"),
    ],
)
def test_the_contract_finds_what_a_format_does_wrong(
    change: dict[str, object], check: int, message: str, tmp_path: Path
) -> None:
    from dataclasses import replace

    with pytest.raises(AssertionError, match=message):
        CHECKS[check](replace(_format(), **change), tmp_path)  # type: ignore[arg-type]


def test_the_contract_finds_lost_and_shifted_bytes(tmp_path: Path) -> None:
    from dataclasses import replace

    right = _format()

    def shifted(store: object) -> object:
        catalog = right.read(store)  # type: ignore[arg-type]

        def fragments_of(key: str) -> list[object]:
            fragments = []
            for fragment in catalog.fragments(key):
                assert fragment.array is not None
                extent = replace(fragment.array.extent, offset=fragment.array.extent.offset - 1)
                fragments.append(replace(fragment, array=replace(fragment.array, extent=extent)))
            return fragments  # type: ignore[return-value]

        return replace_fragments(catalog, fragments_of)

    with pytest.raises(AssertionError, match="the bytes of .* differ"):
        CHECKS[2](replace(right, read=shifted), tmp_path, Sample({"w": ("float32", (8,))}, {}))  # type: ignore[arg-type]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment in which the example is installed, as pip would: a module and its entry
    point.
    """
    site = tmp_path / "site"
    info = site / "npy_folder-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "npy_folder.py").write_text(EXAMPLE.read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: npy-folder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckpt.formats]\nnpy_folder = npy_folder:FORMAT\n")
    return {**os.environ, "PYTHONPATH": str(site)}


def _ckpt(*arguments: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_cli", *map(str, arguments)]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, cwd=EXAMPLE.parent.parent.parent
    )


def test_the_command_line_reads_and_writes_an_installed_format(
    installed: dict[str, str], golden: Path, tmp_path: Path
) -> None:
    src = golden / "torch_dcp/fsdp2_dp2"
    done = _ckpt("convert", src, tmp_path / "npy", "--to", "npy", "--no-optim", env=installed)
    assert done.returncode == 0, done.stderr
    assert "npy_folder" in _ckpt("inspect", tmp_path / "npy", env=installed).stdout
    done = _ckpt("convert", tmp_path / "npy", tmp_path / "st", "--to", "safetensors", env=installed)
    assert done.returncode == 0, done.stderr
    tensors = load_file(tmp_path / "st" / "model.safetensors")
    assert tensors
    import json

    files = json.loads((tmp_path / "npy" / "index.json").read_text())["tensors"]
    assert set(files) == set(tensors)
    for key, name in files.items():
        assert np.array_equal(np.load(tmp_path / "npy" / name), tensors[key])


def test_what_the_format_cannot_hold_is_refused_with_its_hint(
    installed: dict[str, str], golden: Path, tmp_path: Path
) -> None:
    src = golden / "hf/llama/safetensors_single"
    done = _ckpt("convert", src, tmp_path / "npy", "--to", "npy_folder", env=installed)
    assert done.returncode == 4
    assert "bfloat16" in done.stderr and "--dtype" in done.stderr
    assert not (tmp_path / "npy").exists()
