"""Copies of real checkpoints with something changed, and what ``validate`` finds in them."""

from __future__ import annotations

import argparse
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from core.formats.dcp.metadata import parse_metadata
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.verbs.checks.check import Finding, Level, Severity
from core.verbs.validate.run import validate
from tests.megatron.support.rewritten import is_plain
from tests.support.rank_files import MODEL_FILE, load_rank_file

Rows = dict[str, TensorRow | ObjectRow]


def copied(golden: Path, name: str, tmp_path: Path) -> Path:
    """A writable copy of a checkpoint; returns the directory of its iteration, or itself without
    one.
    """
    target = tmp_path / "checkpoint"
    shutil.copytree(golden / name, target, copy_function=shutil.copyfile)
    return next(iter(sorted(target.glob("iter_*"))), target)


def found_in(
    path: Path, level: Level = Level.METADATA, *, least: Severity = Severity.WARNING
) -> list[Finding]:
    """The findings that are at least as severe, each of which says where it is and what to do."""
    findings = [
        finding for finding in validate(path, level=level).findings if finding.severity >= least
    ]
    for finding in findings:
        assert finding.hint
        assert finding.file or finding.key or finding.rank
    return findings


def counted(findings: list[Finding]) -> dict[str, int]:
    """Code → number of findings."""
    return dict(Counter(finding.code for finding in findings))


def edit_rows(folder: Path, change: Callable[[Rows], None]) -> None:
    """Changes what ``.metadata`` says of tensors, chunks and objects."""
    path = folder / ".metadata"
    metadata = parse_metadata(path.read_bytes(), label=path.name)
    rows: Rows = {}
    for key, tensor in metadata.tensors.items():
        chunks = [ChunkRow(box.offset, box.shape, *item) for box, item in metadata.chunks(key)]
        rows[key] = TensorRow(key, tensor.dtype, tensor.shape, chunks)
    rows |= {key: ObjectRow(key, *item) for key, item in metadata.objects.items()}
    change(rows)
    path.write_bytes(write_metadata(rows.values(), planner_data=None))


def chunks_of(rows: Rows, key: str) -> list[ChunkRow]:
    """The chunks of a tensor; changing the list changes the row."""
    row = rows[key]
    assert isinstance(row, TensorRow)
    assert isinstance(row.chunks, list)
    return row.chunks


def edit_pickle(folder: Path, change: Callable[[Any], None]) -> None:
    """Changes ``.metadata`` of a checkpoint that only torch wrote, as torch's own objects."""
    path = folder / ".metadata"
    loaded = pickle.loads(path.read_bytes())
    change(loaded)
    path.write_bytes(pickle.dumps(loaded))


def lose_tensors(folder: Path, pattern: str) -> None:
    """Removes the tensors whose names match a glob from ``.metadata``; at least one must."""

    def change(rows: Rows) -> None:
        names = [name for name in rows if fnmatch(name, pattern)]
        assert names
        for name in names:
            del rows[name]

    edit_rows(folder, change)


def edit_rank(
    folder: Path, change: Callable[[dict[str, Any]], None], *, file: str = MODEL_FILE
) -> None:
    """Changes a rank's file. Its arguments become a namespace of plain values, which all ranks'
    must be.
    """
    loaded = load_rank_file(folder / file)
    if "args" in loaded:
        plain = {name: value for name, value in vars(loaded["args"]).items() if is_plain(value)}
        loaded["args"] = argparse.Namespace(**plain)
    loaded.pop("rerun_state_machine", None)
    change(loaded)
    torch.save(loaded, folder / file)


def nothing(loaded: dict[str, Any]) -> None:
    """No change."""
