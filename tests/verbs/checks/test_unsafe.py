"""CK601–CK605: what other software would run, programs, links and names among the files."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from core.errors import CorruptError, UnsafeError
from core.formats.torch.nested_names import uses_in
from core.pickle.inert import Global
from core.pickle.reader import load
from core.publish.manifest.inventory import read_inventory
from core.verbs.checks.finding import Finding, Level
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate

RANKS = "mcore_legacy/dense_gqa/tp2_pp2"


class Evil:
    """Pickles as a call."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("touch owned",))


class Own:
    """A class of a training script."""


def list_findings(path: Path, code: str, level: Level = Level.METADATA) -> list[Finding]:
    return [finding for finding in validate(path, level=level).findings if finding.code == code]


def saved(path: Path, value: object, **options: object) -> Path:
    torch.save(value, path, **options)
    return path


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_a_call_in_a_torch_file_is_found(tmp_path: Path, is_zip: bool) -> None:
    path = saved(
        tmp_path / "model.pt",
        {"w": torch.zeros(2), "x": Evil()},
        _use_new_zipfile_serialization=is_zip,
    )
    (finding,) = list_findings(path, "CK601")
    assert finding.file == "model.pt"
    assert finding.found == "posix.system"


def test_a_call_that_hides_in_bytes_is_found_and_not_converted(tmp_path: Path) -> None:
    inner = io.BytesIO()
    torch.save({"deeper": pickle.dumps(Evil())}, inner)
    path = saved(tmp_path / "model.pt", {"w": torch.zeros(2), "extra": inner.getvalue()})
    assert [finding.found for finding in list_findings(path, "CK601")] == ["posix.system"]
    with pytest.raises(UnsafeError, match="system"):
        run(Job(src=path, dst=tmp_path / "out", to="dcp", fsync=False))


def test_a_call_in_an_object_of_a_distributed_checkpoint_is_found(tmp_path: Path) -> None:
    checkpoint.save(
        {"w": torch.zeros(2), "evil": Evil()}, checkpoint_id=tmp_path / "src", no_dist=True
    )
    (finding,) = list_findings(tmp_path / "src", "CK601")
    assert (finding.file, finding.key) == ("__0_0.distcp", "evil")


def test_a_call_that_metadata_drops_again_is_found(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "src", no_dist=True)
    path = tmp_path / "src/.metadata"
    data = path.read_bytes()
    path.write_bytes(data[:2] + b"cposix\nsystem\nX\x02\x00\x00\x00id\x85R0" + data[2:])
    (finding,) = list_findings(tmp_path / "src", "CK601")
    assert finding.file == ".metadata"


def test_a_call_in_one_of_many_rank_files_is_found_where_all_are_opened(
    golden: Path, tmp_path: Path
) -> None:
    root = tmp_path / "src"
    shutil.copytree(golden / RANKS, root, copy_function=shutil.copyfile)
    name = "mp_rank_01_001/model_optim_rng.pt"
    saved(root / "iter_0000010" / name, {"evil": Evil()})
    assert [finding.file for finding in list_findings(root, "CK601", Level.HEADERS)] == [name]


def test_a_pickle_beside_the_weights_is_looked_into(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint.pt", {"w": torch.zeros(2)})
    (tmp_path / "scheduler.pkl").write_bytes(pickle.dumps(Evil()))
    assert [finding.file for finding in list_findings(tmp_path, "CK601")] == ["scheduler.pkl"]


def test_classes_of_unknown_modules_are_a_warning_each_once(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt", {"w": torch.zeros(2), "a": Own(), "b": Own()})
    (finding,) = list_findings(path, "CK602")
    assert finding.severity.label == "warning"
    assert finding.found is not None
    assert finding.found.endswith(".Own")


def test_programs_in_a_directory_that_is_no_checkpoint_are_not_reported(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("export A=1")
    assert list_findings(tmp_path, "CK603") == []


def test_programs_and_odd_names_are_warnings(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint.pt", {"w": torch.zeros(2)})
    (tmp_path / "libhelper.so").write_bytes(b"\x7fELF")
    (tmp_path / "a\x1b[2J.txt").write_bytes(b"x")
    assert [finding.file for finding in list_findings(tmp_path, "CK603")] == ["libhelper.so"]
    assert [finding.file for finding in list_findings(tmp_path, "CK605")] == ["a\x1b[2J.txt"]


def test_a_link_to_elsewhere_is_noted_save_for_a_hub_cache(tmp_path: Path) -> None:
    blobs, inside = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/main"
    blobs.mkdir(parents=True)
    inside.mkdir(parents=True)
    saved(blobs / ("0" * 64), {"w": torch.zeros(2)})
    (tmp_path / "elsewhere.txt").write_text("x")
    (inside / "pytorch_model.bin").symlink_to("../../blobs/" + "0" * 64)
    assert list_findings(inside, "CK604") == []
    (inside / "notes.txt").symlink_to(tmp_path / "elsewhere.txt")
    (finding,) = list_findings(inside, "CK604")
    assert finding.file == "notes.txt"


def test_nested_streams_are_bounded() -> None:
    data = pickle.dumps(Evil(), 2)
    for _ in range(3):
        data = pickle.dumps(data, 2)
    assert {use.name for use in uses_in(load(data, label="x"))} == {
        Global("_codecs", "encode"),
        Global("posix", "system"),
    }
    for _ in range(10):
        data = pickle.dumps(data, 4)
    assert Global("posix", "system") not in {use.name for use in uses_in(load(data, label="x"))}


def test_a_giant_of_holes_is_named_and_not_read(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint.pt", {"w": torch.zeros(2)})
    with (tmp_path / "notes.txt").open("wb") as file:
        file.truncate(1 << 40)
    (finding,) = list_findings(tmp_path, "CK606", Level.DEEP)
    assert finding.file == "notes.txt"
    assert not validate(tmp_path, level=Level.DEEP).is_proven
    with pytest.raises(CorruptError, match="almost none of the file"):
        read_inventory(tmp_path)
