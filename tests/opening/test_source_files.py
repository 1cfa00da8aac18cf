"""Every file of a source directory is read, carried, or listed under "not carried"
(core.opening.source_files).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from core.convert.prepare import Prepared, prepare
from core.convert.run import Job
from core.files.store import list_files_below

FOLDERS = {
    "mcore_legacy/dense_gqa/*": "torch_dist",
    "mcore0121_legacy/*/*": "torch_dist",
    "mcore_torch_dist/dense_gqa/*": "torch_dist",
    "mcore0161_torch_dist/dense_gqa/tp2_pp2": "megatron",
    "mcore0121_torch_dist/*/*": "torch_dist",
    "mcore0121_zarr/dense_gqa/*": "zarr",
    "torch_dcp/*": "torch",
    "hf/*/safetensors_*": "safetensors",
    "hf/*/bin_sharded": "safetensors",
    "deepspeed/*": "torch",
    "deepspeed_universal/*": "torch",
    "orbax/*": "zarr",
    "accelerate/*/*": "torch",
    "trainer/*/*": "safetensors",
    "lightning/*": "dcp",
}
"""Directories of the archive → a format to convert them to."""
CARRYING = ("hf/llama/safetensors_sharded", "trainer/peft/checkpoint-2")
TRACKERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
NOT_LISTED = re.compile(r"(.*/)?\..*|.*\.index\.json|.*\.sync/.*|.*ocdbt\.process_\d+/.*")
"""Hidden files, indexes that are made anew, locks, and what was merged into another file."""


def sources(golden: Path) -> list[tuple[Path, str]]:
    found = [
        (path, to)
        for pattern, to in FOLDERS.items()
        for path in sorted(golden.glob(pattern))
        if path.is_dir()
    ]
    assert len(found) > 50
    return found


def listed(prepared: Prepared) -> set[str]:
    """The files that the summary names as not carried."""
    names: set[str] = set()
    for line in prepared.dropped:
        begin, _, files = line.rpartition(": ")
        if begin in ("other files of the directory", "files beside the weights") or (
            begin.startswith(("training state, which ", "a class that "))
        ):
            names |= set(files.split(", "))
    return names


def passed_over(prepared: Prepared) -> set[str]:
    """Files of the opened directory of which nothing is read, and nothing told."""
    source = prepared.source
    names = set(list_files_below(source.store))
    used = set(source.store.opened)
    for fragment in source.catalog.all_fragments():
        if fragment.array is not None:
            used.add(fragment.array.extent.file)
    return {name for name in names - used - listed(prepared) if NOT_LISTED.fullmatch(name) is None}


def test_no_file_of_any_directory_is_passed_over(golden: Path, tmp_path: Path) -> None:
    for path, to in sources(golden):
        with prepare(Job(src=path, dst=tmp_path / "out", to=to)) as prepared:
            assert passed_over(prepared) == set(), path
            written = {image.path for image in prepared.images}
            for folder in prepared.source.passed:
                beside = {name.name for name in folder.iterdir() if name.is_file()} - set(TRACKERS)
                told = {name.rpartition("/")[2] for name in listed(prepared)}
                # What is read of a directory above is joined under its absolute path.
                told |= {name.rpartition("/")[2] for name in prepared.source.store.opened}
                assert beside <= told | written, path


@pytest.mark.parametrize("name", [*FOLDERS, "trainer/zero3_dp2"])
def test_a_file_that_no_format_knows_is_listed_wherever_it_lies(
    golden: Path, tmp_path: Path, name: str
) -> None:
    source = next(path for path in sorted(golden.glob(name)) if path.is_dir())
    path = Path(shutil.copytree(source, tmp_path / "source", copy_function=shutil.copyfile))
    with prepare(
        Job(src=path, dst=tmp_path / "out", to="torch" if name.startswith("tr") else FOLDERS[name])
    ) as before:
        inner = before.source.path
        known = listed(before)
    (inner / "states").mkdir()
    for file in ("scaler.dat", "states/sampler.npy"):
        (inner / file).write_bytes(b"?")
    for folder in {path, inner}:
        (folder / "wandb.yaml").write_bytes(b"?")
    with prepare(
        Job(src=path, dst=tmp_path / "out", to="torch" if name.startswith("tr") else FOLDERS[name])
    ) as after:
        more = {name.removeprefix("source/") for name in listed(after) - known}
        assert more == {"scaler.dat", "states/sampler.npy", "wandb.yaml"}


def test_files_of_real_trainers_are_named(golden: Path, tmp_path: Path) -> None:
    expected = {
        "accelerate/plain/checkpoint_0": {
            *("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"),
        },
        "accelerate/fsdp2_dp2/checkpoint_0": {
            *(
                "scheduler.bin",
                "random_states_0.pkl",
                "random_states_1.pkl",
                "custom_checkpoint_0.pkl",
            ),
        },
        "trainer/peft/checkpoint-2": {
            "optimizer.pt",
            "scheduler.pt",
            "rng_state.pth",
            "training_args.bin",
        },
        "trainer/zero3_dp2": {
            *("checkpoint-2/rng_state.pth", "checkpoint-2/training_args.bin"),
            *("checkpoint-2/zero_to_fp32.py", "checkpoint-2/zero_to_torch.py"),
        },
    }
    for name, files in expected.items():
        with prepare(Job(src=golden / name, dst=tmp_path / "out", to="safetensors")) as prepared:
            assert listed(prepared) == files


@pytest.mark.parametrize("name", ["trainer/zero2_dp2", "trainer/zero3_dp2/checkpoint-2"])
def test_a_model_that_deepspeed_saved_for_the_trainer_keeps_its_configuration(
    golden: Path, tmp_path: Path, name: str
) -> None:
    with prepare(Job(src=golden / name, dst=tmp_path / "out", to="hf", optim="drop")) as prepared:
        assert {"config.json", "generation_config.json", "trainer_state.json"} <= {
            image.path for image in prepared.images
        }
    with prepare(
        Job(src=golden / name, dst=tmp_path / "out", to="megatron", optim="drop")
    ) as prepared:
        assert {"generation_config.json", "trainer_state.json"} <= listed(prepared)
    for to in ("torch", "dcp"):
        with prepare(Job(src=golden / name, dst=tmp_path / "out", to=to)) as prepared:
            assert {"config.json", "generation_config.json", "trainer_state.json"} <= listed(
                prepared
            )


def test_many_files_of_one_folder_are_counted(golden: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(golden / "hf/llama/safetensors_single", tmp_path / "source"))
    (path / "runs").mkdir()
    for number in range(21):
        (path / f"runs/events.{number}").write_bytes(b"?")
    with prepare(Job(src=path, dst=tmp_path / "out", to="torch")) as prepared:
        assert "runs/ (21 files)" in listed(prepared)


def test_what_links_do_not_hold_is_listed(golden: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(golden / "torch_dcp/fsdp2_dp2", tmp_path / "source"))
    (path / "states").mkdir()
    (path / "states/sampler.npy").write_bytes(b"?")
    with prepare(Job(src=path, dst=tmp_path / "out", metadata_only=True)) as prepared:
        assert listed(prepared) == {"states/sampler.npy"}
