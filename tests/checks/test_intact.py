"""Checkpoints that other software wrote have no findings, of any family and at any level: no false alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.checks import Level
from core.finding import Severity
from core.validate import validate

TRACKERS = ("latest_checkpointed_iteration.txt", "latest", "latest_universal")
TRAINERS = ("trainer", "accelerate", "lightning")
FAMILIES = (
    *("mcore_legacy", "mcore0121_legacy", "mcore_torch_dist", "mcore0161_torch_dist", "mcore0121_torch_dist"),
    *("mcore0121_zarr", "deepspeed", "deepspeed_universal", "torch_dcp", "hf", *TRAINERS),
)


def checkpoints(family: Path) -> list[Path]:
    """What a user would point at: roots with a tracker, directories, and files that are a checkpoint alone."""
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


@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.name.lower())
@pytest.mark.parametrize("family", FAMILIES)
def test_intact_checkpoints_have_no_findings(golden: Path, family: str, level: Level) -> None:
    found = checkpoints(golden / family)
    assert found
    for path in found:
        alarms = [
            (finding.code, finding.file, finding.key, finding.message)
            for finding in validate(path, level=level).findings
            if finding.severity > Severity.NOTE
        ]
        assert alarms == [], path
