"""The index decides what belongs to a checkpoint, not the folder in which a file lies.

Writers spread data files over folders (prefixes of s3torchconnector, one folder per node), people
move them and leave links. Each format with an index is taken from a golden checkpoint, its data
files go elsewhere, and the index names the new places; every command must see the same checkpoint.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from core.errors import MissingShardError
from core.files.object_listing import forget_listings
from core.files.remote_path import location_of
from core.opening.locate import locate_checkpoint
from core.opening.open import open_checkpoint
from core.opening.source_files import unread_files
from core.publish.manifest.inventory import read_inventory
from core.verbs.checks.finding import Level, Severity
from core.verbs.convert.run import Job, run
from core.verbs.diff.run import DiffJob, diff
from core.verbs.inspect.summary import summarize
from core.verbs.prune.decision import KeepRules
from core.verbs.prune.run import PruneJob, examine
from core.verbs.validate.run import validate
from tests.support.object_stores import mounted_store

Renamed = Callable[[str], str]
"""The old path of a data file → the new one."""


def rename_in_dcp(folder: Path, renamed: Renamed) -> None:
    """Rewrite ``.metadata`` with torch's own classes."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = renamed(info.relative_path)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def rename_in_weight_map(folder: Path, renamed: Renamed) -> None:
    (path,) = folder.glob("*.index.json")
    index = json.loads(path.read_text())
    index["weight_map"] = {key: renamed(file) for key, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))


CASES: dict[str, tuple[str, str, Callable[[Path, Renamed], None]]] = {
    "dcp": ("torch_dcp/fsdp2_dp2", "*.distcp", rename_in_dcp),
    "torch_dist": (
        "mcore_torch_dist/dense_gqa/tp2_pp2/iter_0000010",
        "*.distcp",
        rename_in_dcp,
    ),
    "safetensors": ("hf/llama/safetensors_sharded", "*.safetensors", rename_in_weight_map),
    "torch_bin": ("hf/llama/bin_sharded", "*.bin", rename_in_weight_map),
}
"""Format → golden checkpoint, its data files, and how its index gets other names for them."""


def into_numbered_folders(number: int, name: str) -> str:
    return f"{number:04x}/epoch_5/{name}"


def into_one_folder(number: int, name: str) -> str:
    return f"shard a/{name}"


def into_folders_like_iterations(number: int, name: str) -> str:
    return f"step-{number}/{name}"


PLACES = (into_numbered_folders, into_one_folder, into_folders_like_iterations)


def move(folder: Path, format: str, place: Callable[[int, str], str]) -> list[str]:
    """Move the data files of a copy of a golden checkpoint, and return their new names."""
    _, pattern, rename = CASES[format]
    names = sorted(path.name for path in folder.glob(pattern))
    assert names
    moved = {name: place(number, name) for number, name in enumerate(names)}
    rename(folder, lambda name: moved.get(name, name))
    for name, target in moved.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(folder / target)
    return sorted(moved.values())


@pytest.fixture(params=list(CASES))
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def original(format: str, golden: Path) -> Path:
    return golden / CASES[format][0]


@pytest.fixture(params=PLACES, ids=lambda place: place.__name__)
def moved(
    request: pytest.FixtureRequest, format: str, original: Path, tmp_path: Path
) -> tuple[Path, list[str]]:
    """A checkpoint whose data files lie in folders, and the names of these files."""
    folder = tmp_path / "moved"
    shutil.copytree(original, folder)
    return folder, move(folder, format, request.param)


def check_seen_whole(path: Path, files: list[str], original: Path) -> None:
    """Check that every reading command sees the files of a checkpoint as its own."""
    location = locate_checkpoint(path)
    location.store.close()
    assert location.below == ()
    opened = open_checkpoint(path)
    before = open_checkpoint(original)
    assert opened.catalog.tensors == before.catalog.tensors
    assert unread_files(opened) == unread_files(before)
    assert summarize(opened).n_files == summarize(before).n_files
    for checkpoint in (opened, before):
        checkpoint.store.close()
    result = validate(path, level=Level.DEEP)
    assert [f for f in result.findings if f.severity >= Severity.WARNING] == []
    assert result.n_files == validate(original).n_files
    recorded = {file.path for file in read_inventory(path, fingerprints=False).files}
    assert recorded >= set(files)


@pytest.mark.each_value
def test_files_in_folders_are_seen_by_every_command(
    moved: tuple[Path, list[str]], original: Path, tmp_path: Path
) -> None:
    folder, files = moved
    check_seen_whole(folder, files, original)
    for source, name in ((folder, "moved.pt"), (original, "original.pt")):
        run(Job(src=source, dst=tmp_path / name, to="torch"))
    assert diff(DiffJob(a=tmp_path / "moved.pt", b=tmp_path / "original.pt")).same


def test_links_are_followed(format: str, original: Path, golden: Path, tmp_path: Path) -> None:
    folder = tmp_path / "linked"
    shutil.copytree(original, folder)
    files = move(folder, format, into_numbered_folders)
    # The first file becomes a relative link to a file elsewhere, the folder of the others a link.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    first = folder / files[0]
    first.rename(elsewhere / "data")
    first.symlink_to(os.path.relpath(elsewhere / "data", first.parent))
    for name in {file.partition("/")[0] for file in files[1:]}:
        (folder / name).rename(elsewhere / name)
        (folder / name).symlink_to(elsewhere / name)
    check_seen_whole(folder, files, original)


@pytest.mark.parametrize("format", ["dcp", "torch_dist"], indirect=True)
def test_file_under_the_name_of_a_second_link_is_neither_missing_nor_left_over(
    format: str, original: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "linked"
    shutil.copytree(original, folder)
    files = move(folder, format, into_one_folder)
    (folder / "rank1").symlink_to("shard a")
    rename_in_dcp(
        folder, lambda name: name.replace("shard a", "rank1") if name == files[-1] else name
    )
    result = validate(folder, level=Level.DEEP)
    assert [f for f in result.findings if f.severity >= Severity.WARNING] == []
    recorded = {file.path for file in read_inventory(folder, fingerprints=False).files}
    assert {*files[:-1], files[-1].replace("shard a", "rank1")} <= recorded


def test_objects_below_prefixes_are_seen(
    format: str, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bucket" / "ck"
    shutil.copytree(original, folder)
    files = move(folder, format, into_numbered_folders)
    with mounted_store(tmp_path / "bucket", monkeypatch):
        check_seen_whole(location_of(Path("s3://runs/ck")), files, original)
    forget_listings()


def test_a_lost_file_is_named(moved: tuple[Path, list[str]]) -> None:
    folder, files = moved
    (folder / files[-1]).unlink()
    with pytest.raises(MissingShardError) as error:
        open_checkpoint(folder)
    assert error.value.file == files[-1]
    errors = [f for f in validate(folder).findings if f.severity == Severity.ERROR]
    assert [(finding.code, finding.file) for finding in errors] == [("CK101", files[-1])]


def test_prune_removes_an_iteration_with_its_folders(
    format: str, original: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    for name in ("checkpoint-1", "checkpoint-2"):
        shutil.copytree(original, root / name)
        files = move(root / name, format, into_numbered_folders)
    pruning = examine(PruneJob(root=root, rules=KeepRules(keep_last=1)))
    assert [iteration.number for iteration in pruning.removed] == [1]
    assert set(files) < set(pruning.contents["checkpoint-1"].files)


@pytest.mark.each_value
@pytest.mark.parametrize("format", ["dcp", "torch_dist"], indirect=True)
def test_metadata_only_links_every_file_that_the_index_names(
    moved: tuple[Path, list[str]], original: Path, tmp_path: Path
) -> None:
    folder, files = moved
    first = folder / files[0]
    first.rename(tmp_path / "data")
    first.symlink_to(os.path.relpath(tmp_path / "data", first.parent))
    run(Job(src=folder, dst=tmp_path / "out", metadata_only=True))
    shutil.rmtree(folder)
    (tmp_path / "data").unlink()
    assert diff(DiffJob(a=tmp_path / "out", b=original)).same
    (written,) = (path.parent for path in tmp_path.glob("out/**/.metadata"))
    assert all((written / file).is_file() and not (written / file).is_symlink() for file in files)


@pytest.mark.parametrize("format", ["dcp", "torch_dist"], indirect=True)
def test_folder_of_data_files_leads_to_its_index(moved: tuple[Path, list[str]]) -> None:
    folder, files = moved
    for place in (folder / files[0], (folder / files[0]).parent):
        with pytest.raises(MissingShardError, match="is not in this directory; it is in") as error:
            open_checkpoint(place)
        assert error.value.hint == f"pass {folder}"


def test_another_checkpoint_below_is_still_separate(
    format: str, original: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(original, folder)
    move(folder, format, into_one_folder)
    shutil.copytree(original, folder / "other")
    location = locate_checkpoint(folder)
    location.store.close()
    assert location.below == ("other",)


@pytest.fixture(params=[2, 3])
def hierarchy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A zarr hierarchy with consolidated metadata, as zarr-python writes it."""
    zarr = pytest.importorskip("zarr")
    path = tmp_path / "group.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=request.param)
    for name in ("a", "sub/b", "sub/c"):
        group.create_array(name, shape=(4, 4), chunks=(2, 4), dtype="float32")[:] = 1
    with pytest.warns(match="Consolidated metadata") if request.param == 3 else nullcontext():
        zarr.consolidate_metadata(path)
    return path


def test_array_in_consolidated_metadata_without_its_directory_is_missing(hierarchy: Path) -> None:
    assert validate(hierarchy).worst is None
    shutil.rmtree(hierarchy / "sub" / "b")
    with pytest.raises(MissingShardError, match="lists the array") as error:
        open_checkpoint(hierarchy)
    assert error.value.key == "sub/b"
    assert [finding.code for finding in validate(hierarchy).findings] == ["CK101"]


def test_array_that_consolidated_metadata_lacks_is_read_with_a_note(hierarchy: Path) -> None:
    shutil.copytree(hierarchy / "a", hierarchy / "d")
    opened = open_checkpoint(hierarchy)
    opened.store.close()
    assert sorted(opened.catalog.tensors) == ["a", "d", "sub/b", "sub/c"]
    assert any("does not list d," in note for note in opened.catalog.notes)
