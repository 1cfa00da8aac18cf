"""Whichever file of a checkpoint is lost, emptied or cut, it is noticed at the lowest level
already.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from core.checks.finding import Severity
from core.validate.run import validate

CHECKPOINTS = (
    *("mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt", "mcore_torch_dist/dense_gqa/tp2_pp2"),
    *(
        "mcore0161_torch_dist/dense_gqa/tp2_pp2",
        "mcore0121_zarr/dense_gqa/tp2_pp2",
        "torch_dcp/fsdp2_dp2",
    ),
    *("torch_dcp/hf_storage_dp2", "hf/llama/safetensors_sharded", "hf/llama/bin_sharded"),
    *("deepspeed/zero1_dp2_bf16", "deepspeed/zero3_dp2_bf16", "deepspeed_universal/zero1_dp2_bf16"),
)
MOST = 12
"""Files of a checkpoint that are damaged in turn; of more, every so many."""
NO_PART = ("config.json", "generation_config.json")
"""Without them a model may be loaded by whoever knows its shape."""


def _removed(path: Path) -> None:
    path.unlink()


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _files(root: Path) -> list[Path]:
    found = [
        path for path in sorted(root.rglob("*")) if path.is_file() and path.name not in NO_PART
    ]
    shown = [path for path in found if not any(part.endswith(".sync") for part in path.parts)]
    return shown[:: max(1, len(shown) // MOST)]


@pytest.mark.parametrize(
    "damage", [_removed, _emptied, _halved], ids=["removed", "emptied", "halved"]
)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_damaged_file_is_noticed(
    name: str, damage: Callable[[Path], None], golden: Path, tmp_path: Path
) -> None:
    root = Path(
        shutil.copytree(golden / name, tmp_path / "checkpoint", copy_function=shutil.copyfile)
    )
    for path in _files(root):
        data = path.read_bytes()
        damage(path)
        found = [finding for finding in validate(root).findings if finding.severity > Severity.NOTE]
        assert found, path.relative_to(root)
        path.write_bytes(data)
    assert [
        finding for finding in validate(root).findings if finding.severity > Severity.NOTE
    ] == []
