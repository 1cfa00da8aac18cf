"""Checkpoints that other software wrote have no findings, of any family and at any level: no false
alarm.
"""

from __future__ import annotations

import shutil
import warnings
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.filesystem import SerializationFormat

from core.errors import raising
from core.files.store import LocalStore
from core.publish.manifest.stated_crcs import StatedCrcReader
from core.verbs.checks.check import Level, Severity
from core.verbs.validate.run import validate

TRACKERS = ("latest_checkpointed_iteration.txt", "latest", "latest_universal")
TRAINERS = ("trainer", "accelerate", "lightning")
FAMILIES = (
    "mcore_legacy",
    "mcore0121_legacy",
    "mcore_torch_dist",
    "mcore0161_torch_dist",
    "mcore0121_torch_dist",
    "mcore0121_zarr",
    "deepspeed",
    "deepspeed_universal",
    "torch_dcp",
    "hf",
    *TRAINERS,
)


def checkpoints(family: Path) -> list[Path]:
    """What a user would point at: roots with a tracker, directories, and files that are a
    checkpoint alone.
    """
    if family.name in TRAINERS:
        return [*sorted(family.glob("*")), *sorted(family.glob("*/checkpoint*"))]
    roots = sorted({path.parent for path in family.rglob("latest*") if path.name in TRACKERS})
    if roots:
        return roots
    folders = sorted(family.glob("*/*" if family.name == "hf" else "*"))
    single = [folder for folder in folders if folder.name == "torch_single"]
    return [folder for folder in folders if folder not in single] + [
        path for folder in single for path in sorted(folder.iterdir())
    ]


def alarms(path: Path, level: Level) -> list[tuple[str, str | None, str]]:
    """The findings above a note."""
    findings = validate(path, level=level).findings
    return [
        (finding.code, finding.file, finding.message)
        for finding in findings
        if finding.severity > Severity.NOTE
    ]


@pytest.mark.each_value
@pytest.mark.parametrize("level", Level, ids=lambda level: level.name.lower())
@pytest.mark.parametrize("family", FAMILIES)
def test_intact_checkpoints_have_no_findings(
    golden: Path, family: str, level: Level, request: pytest.FixtureRequest
) -> None:
    paths = checkpoints(golden / family)
    assert paths
    if not request.config.getoption("--long"):  # two at each level
        paths = paths[Level.DEEP - level :: len(Level)][:2]
    for path in paths:
        assert alarms(path, level) == [], path


@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.name.lower())
def test_safetensors_items_of_dcp_have_no_findings(level: Level, tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.arange(1.0, 20 + n) for n in range(5)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        for name, state in (
            ("tensors", tensors),
            ("objects", {**tensors, "step": 3, "groups": [{"lr": 0.5}]}),
        ):
            for n_files in (1, 3):
                folder = tmp_path / f"{name}-{n_files}"
                writer = FileSystemWriter(
                    folder,
                    thread_count=n_files,
                    serialization_format=SerializationFormat.SAFETENSORS,
                )
                save(state, storage_writer=writer)
                assert alarms(folder, level) == [], folder


@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.name.lower())
def test_a_dcp_in_a_folder_of_its_own_has_no_findings(
    golden: Path, level: Level, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(golden / "torch_dcp/fsdp2_dp2", folder / "checkpoint")
    torch.save({"w": torch.ones(3)}, folder / "checkpoint.pt")
    assert alarms(folder, level) == []
    (folder / "checkpoint.pt").unlink()  # no checkpoint itself, but nothing in it is damaged
    assert [code for code, _, _ in alarms(folder, level)] == ["CK100"]


def test_a_damaged_item_of_a_dcp_in_a_folder_of_its_own_is_found(
    golden: Path, tmp_path: Path
) -> None:
    shutil.copytree(golden / "torch_dcp/fsdp2_dp2", tmp_path / "checkpoint/part")
    torch.save({"w": torch.ones(3)}, tmp_path / "checkpoint/model.pt")
    path = tmp_path / "checkpoint/part/__0_0.distcp"
    stated_in = StatedCrcReader(LocalStore(path.parents[1]), None)
    (record,) = islice(stated_in("part/__0_0.distcp", path.stat().st_size, report=raising), 1)
    data = bytearray(path.read_bytes())
    data[record.start] ^= 1
    path.write_bytes(data)
    assert ("CK701", "part/__0_0.distcp") in [
        (code, file) for code, file, _ in alarms(tmp_path / "checkpoint", Level.DEEP)
    ]
