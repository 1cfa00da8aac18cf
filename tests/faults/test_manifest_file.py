"""``ckpt manifest``, killed or denied at the operations by which its file gets there: whole or not
at all.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from core.publish.manifest.of_copy import MANIFEST
from tests.faults import disturb as how
from tests.faults.operations import CHANGES, SYNCS, Operation
from tests.faults.process import command, run


@pytest.fixture
def checkpoint_dir(golden: Path, tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(golden / "hf" / "llama" / "safetensors_single", tmp_path / "watched" / "it")
    )


def test_a_manifest_is_there_as_a_whole_or_not_at_all(checkpoint_dir: Path, tmp_path: Path) -> None:
    before = set(os.listdir(checkpoint_dir))
    work = command(["manifest", str(checkpoint_dir), "--quiet", "-j", "1"])
    ended = run(work, root=checkpoint_dir, notes_dir=tmp_path)
    assert ended.code == 0, ended.output
    data = (checkpoint_dir / MANIFEST).read_bytes()

    def check(operation: Operation, disturb: how.Disturb) -> None:
        (checkpoint_dir / MANIFEST).unlink(missing_ok=True)
        ended = run(work, root=checkpoint_dir, notes_dir=tmp_path, disturb=disturb)
        manifest_path = checkpoint_dir / MANIFEST
        assert not manifest_path.exists() or manifest_path.read_bytes() == data
        if ended.code != -9:
            assert ended.code == 0 or ended.code in (6, 7), ended.output
            assert set(os.listdir(checkpoint_dir)) <= before | {MANIFEST}, operation
        manifest_path.unlink(missing_ok=True)
        assert run(work, root=checkpoint_dir, notes_dir=tmp_path).code == 0
        assert (
            set(os.listdir(checkpoint_dir)) == before | {MANIFEST}
            and manifest_path.read_bytes() == data
        )

    points = [operation for operation in ended.trace if operation.name in (*CHANGES, *SYNCS)]
    assert {"create", "fsync", "renameat2"} <= {operation.name for operation in points}
    for operation in points:
        check(operation, how.killed(operation.number, "before"))
        check(operation, how.killed(operation.number, "after"))
        check(operation, how.failed(operation.number, errno.EIO))
