"""Every file of a checkpoint's directory is read, written, or listed as not carried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_cli.app import main
from core.errors import CheckpointingException
from core.verbs.convert.job import Job
from core.verbs.convert.prepare import prepare

N_OF_A_FORMAT = 8
LATE = ("zarr", "orbax")
"""Formats whose data files are opened by the copy only."""


@pytest.mark.first(1)
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_no_file_is_passed_over_in_silence(
    golden: Path,
    frameworks: Path,
    to: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    n_prepared = 0
    for root in (golden, frameworks):
        assert main(["inspect", str(root), "--json"]) == 0
        n_of_format: dict[str, int] = {}
        for row in json.loads(capsys.readouterr().out)["checkpoints"]:
            folder = Path(row["path"])
            n_of_format[row["format"]] = n_of_format.get(row["format"], 0) + 1
            if not folder.is_dir() or n_of_format[row["format"]] > N_OF_A_FORMAT:
                continue
            try:
                with prepare(Job(src=folder, dst=tmp_path / "result", to=to)) as prepared:
                    opened = set(prepared.source.store.opened)
                    written = {Path(path).name for path, _ in prepared.files}
                    listed = [name for entry in prepared.dropped_entries for name in entry.names]
                    place = prepared.source.path
            except CheckpointingException:
                continue  # this format cannot be written from it
            n_prepared += 1
            for path in place.rglob("*"):
                name = str(path.relative_to(place))
                is_data = row["format"] in LATE and not path.name.startswith((".", "_"))
                # Megatron locks an array of zarr by an empty file in ARRAY.sync.
                is_data |= path.parent.suffix == ".sync"
                is_listed = any(name == item or name.startswith(f"{item}/") for item in listed)
                if path.is_file() and not (is_data or name in opened or is_listed):
                    assert path.name in written, f"{path} is passed over"
    assert n_prepared > 30
