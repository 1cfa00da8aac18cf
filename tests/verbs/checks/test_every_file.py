"""Whichever file of a checkpoint is lost, emptied or cut, it is noticed at the lowest level
already.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import zarr

from core.verbs.checks.finding import Level, Severity
from core.verbs.checks.subject import DATA
from core.verbs.validate.run import validate
from tests.support.rounds import rounds

CHECKPOINTS = (
    "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt",
    "mcore_torch_dist/dense_gqa/tp2_pp2",
    pytest.param("mcore0161_torch_dist/dense_gqa/tp2_pp2", marks=pytest.mark.long),
    "mcore0121_zarr/dense_gqa/tp2_pp2",
    "torch_dcp/fsdp2_dp2",
    "torch_dcp/hf_storage_dp2",
    "hf/llama/safetensors_sharded",
    "hf/llama/bin_sharded",
    "deepspeed/zero1_dp2_bf16",
    "deepspeed/zero3_dp2_bf16",
    "deepspeed_universal/zero1_dp2_bf16",
)
MOST = rounds(30)
"""Files of a checkpoint that are damaged in turn; of more, every so many."""
NO_PART = ("config.json", "generation_config.json")
"""Without them a model may be loaded by whoever knows its shape."""


def _removed(path: Path) -> None:
    path.unlink()


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _zeroed_behind(path: Path) -> None:
    """Zeros from the middle on, as an interrupted copy into a file of the final length leaves."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def _files(root: Path) -> list[Path]:
    paths = [
        path for path in sorted(root.rglob("*")) if path.is_file() and path.name not in NO_PART
    ]
    shown = [path for path in paths if not any(part.endswith(".sync") for part in path.parts)]
    assert shown
    return shown[:: max(1, len(shown) // MOST)]


@pytest.mark.each_value
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
        findings = [
            finding for finding in validate(root).findings if finding.severity > Severity.NOTE
        ]
        assert findings, path.relative_to(root)
        path.write_bytes(data)
    assert [
        finding for finding in validate(root).findings if finding.severity > Severity.NOTE
    ] == []


@pytest.mark.parametrize("name", [*CHECKPOINTS, "orbax/ocdbt_zarr3", "orbax/plain_zarr2"])
def test_zeros_instead_of_a_header_or_an_end_record_are_noticed(
    name: str, golden: Path, tmp_path: Path
) -> None:
    """At the lowest level, in every format; raw data without a header may be zeros."""
    root = Path(
        shutil.copytree(golden / name, tmp_path / "checkpoint", copy_function=shutil.copyfile)
    )
    for path in _files(root):
        data = path.read_bytes()
        is_zip = data.startswith(b"PK")
        # Chunks of OCDBT lie in files without a header; chunks that are not compressed have none.
        if not is_zip and not (DATA.search(path.name) and path.suffix != ".json"):
            continue
        for damage in (_zeroed, _zeroed_behind) if is_zip else (_zeroed,):
            damage(path)
            codes = {finding.code for finding in validate(root).findings if finding.file}
            assert codes - {"CK106"}, (damage.__name__, path.relative_to(root))
        path.write_bytes(data)


def test_zeros_instead_of_a_compressed_chunk_are_noticed(tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "run", name="w", shape=(64,), chunks=(32,), dtype="float32", zarr_format=3
    )
    array[:] = 1.0
    chunk = tmp_path / "run/w/c/1"
    chunk.write_bytes(bytes(chunk.stat().st_size))
    assert [(finding.code, finding.file) for finding in validate(tmp_path / "run").findings] == [
        ("CK108", "w/c/1")
    ]


def test_the_report_says_how_many_files_were_opened(golden: Path) -> None:
    validation = validate(golden / "mcore_legacy/dense_gqa/tp2_pp2")
    assert validation.n_ends == validation.n_files == 4
    assert validation.unchecked[0] == (
        "contents of 2 rank files that match a checked file in stage and size (--headers)"
    )
    assert validate(golden / "mcore_legacy/dense_gqa/tp2_pp2", level=Level.HEADERS).unchecked == ()


def test_a_file_that_cannot_be_opened_is_an_error(golden: Path, tmp_path: Path) -> None:
    """Also if it is not among those whose content is read at the lowest level."""
    root = Path(shutil.copytree(golden / "mcore_legacy/dense_gqa/tp2_pp2", tmp_path / "run"))
    name = "mp_rank_01_001/model_optim_rng.pt"
    unreadable = root / "iter_0000010" / name
    unreadable.chmod(0)
    if os.access(unreadable, os.R_OK):
        pytest.skip("this user may read every file")
    assert [(finding.code, finding.file) for finding in validate(root).findings] == [
        ("CK105", name)
    ]
