"""Every file of a source directory is read, carried, or listed under "not carried"
(core.opening.source_files).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import UsageError
from core.files.store import list_files_below
from core.opening.open import open_checkpoint
from core.verbs.convert.job import TopologyChange
from core.verbs.convert.prepare import prepare
from core.verbs.convert.prepared import Prepared
from core.verbs.convert.run import Job, run
from core.verbs.merge.request import Merge

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
    places = [
        (path, to)
        for pattern, to in FOLDERS.items()
        for path in sorted(golden.glob(pattern))
        if path.is_dir()
    ]
    assert len(places) > 50
    return places


def listed(prepared: Prepared) -> set[str]:
    """The files that the summary names as not carried."""
    names: set[str] = set()
    for line in prepared.dropped:
        begin, _, files = line.rpartition(": ")
        if begin == "other files in the directory" or begin.startswith(
            ("sidecar files, which ", "training state, which ", "an object of a class that ")
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


def test_no_file_of_any_directory_is_passed_over(
    golden: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    step = 1 if request.config.getoption("--long") else 2
    for path, to in sources(golden)[::step]:
        with prepare(Job(src=path, dst=tmp_path / "out", to=to)) as prepared:
            assert passed_over(prepared) == set(), path
            written = {image.path for image in prepared.images}
            for folder in prepared.source.passed:
                names = {name.name for name in folder.iterdir() if name.is_file()} - set(TRACKERS)
                names_told = {name.rpartition("/")[2] for name in listed(prepared)}
                # What is read of a directory above is joined under its absolute path.
                names_told |= {name.rpartition("/")[2] for name in prepared.source.store.opened}
                assert names <= names_told | written, path


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
        listed_before = listed(before)
    (inner / "states").mkdir()
    for file in ("scaler.dat", "states/sampler.npy"):
        (inner / file).write_bytes(b"?")
    for folder in {path, inner}:
        (folder / "wandb.yaml").write_bytes(b"?")
    with prepare(
        Job(src=path, dst=tmp_path / "out", to="torch" if name.startswith("tr") else FOLDERS[name])
    ) as after:
        more = {name.removeprefix("source/") for name in listed(after) - listed_before}
        assert more == {"scaler.dat", "states/sampler.npy", "wandb.yaml"}


FOLDERS_OF_MODELS = {
    "1_Pooling/config.json": b"{}",
    "2_Dense/config.json": b"{}",
    "2_Dense/model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "additional_chat_templates/tool_use.jinja": b"{{ messages }}",
    "package/inner/modeling_x.py": b"x = 1",
    "package/requirements.txt": b"torch",
}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
]


@pytest.mark.parametrize("form", ["safetensors_single", "safetensors_sharded", "bin_sharded"])
def test_folders_of_a_model_arrive_under_their_paths(
    golden: Path, tmp_path: Path, form: str
) -> None:
    path = Path(shutil.copytree(golden / "hf/llama" / form, tmp_path / "in"))
    (path / "modules.json").write_text(json.dumps(MODULES))
    more_files = {"onnx/config.json": b"{}", "onnx/model.onnx": b"?"}
    for name, data in (FOLDERS_OF_MODELS | more_files).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    report = run(Job(src=path, dst=tmp_path / "out", to="safetensors"))
    for name, data in FOLDERS_OF_MODELS.items():
        assert (tmp_path / "out" / name).read_bytes() == data, name
    assert not (tmp_path / "out" / "onnx").exists()
    assert any("onnx/config.json, onnx/model.onnx" in line for line in report.dropped)

    report = run(Job(src=path, dst=tmp_path / "cast", to="safetensors", dtype=((None, "float16"),)))
    assert any("copied unchanged: 2_Dense/model.safetensors" in note for note in report.notes)

    # A format without a place for them lists each, and so does a file.
    for to, dst in (("dcp", "out.dcp"), ("torch", "out.pt"), ("safetensors", "out.safetensors")):
        with prepare(Job(src=path, dst=tmp_path / dst, to=to)) as prepared:
            assert FOLDERS_OF_MODELS.keys() <= listed(prepared), to


def test_a_merge_keeps_the_folders_of_its_first_model(golden: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(golden / "hf/llama/safetensors_single", tmp_path / "in"))
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates/tool_use.jinja").write_bytes(b"{{ messages }}")
    merge = Merge(method="average", others=(golden / "hf/llama/safetensors_single",))
    run(Job(src=path, dst=tmp_path / "out", merge=merge))
    template = tmp_path / "out/additional_chat_templates/tool_use.jinja"
    assert template.read_bytes() == b"{{ messages }}"


TOKENIZER = {"tokenizer/tokenizer.json": b"{}", "tokenizer/tokenizer_config.json": b"{ }"}


def with_tokenizer(source: Path, folder: Path) -> Path:
    """Copy a training root, and add a tokenizer to its iteration, as Megatron-LM saves it."""
    path = Path(shutil.copytree(source, folder))
    iteration = next(path.glob("iter_*"))
    for name, data in TOKENIZER.items():
        (iteration / name).parent.mkdir(exist_ok=True)
        (iteration / name).write_bytes(data)
    return path


@pytest.mark.each_value
@pytest.mark.parametrize("to", ["megatron", "torch_dist", "zarr", "dcp"])
@pytest.mark.parametrize(
    "name",
    ["mcore_legacy/dense_gqa/tp4_pp1", "mcore_torch_dist/dense_gqa/tp2_pp2", "mcore0121_zarr/*/*"],
)
def test_the_tokenizer_of_an_iteration_stays_with_it(
    golden: Path, tmp_path: Path, name: str, to: str
) -> None:
    path = with_tokenizer(next(iter(sorted(golden.glob(name)))), tmp_path / "in")
    sizes = None if to == "dcp" else TopologyChange(tp=2, pp=1)
    report = run(Job(src=path, dst=tmp_path / "out", to=to, topology=sizes, optim="drop"))
    folder = next(iter((tmp_path / "out").glob("iter_*")), tmp_path / "out")
    for file, data in TOKENIZER.items():
        assert (folder / file).read_bytes() == data
    assert not any("tokenizer" in line for line in report.dropped)


LOADERS = [
    f"{folder}train_dataloader_dprank{rank:03d}.pt"
    for folder in ("dataloader_state/", "")
    for rank in range(2)
]


class RunsCode:
    """An object whose pickle calls ``os.system``."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def with_loader_states(source: Path, folder: Path) -> tuple[Path, dict[str, bytes]]:
    """Copy a checkpoint, and add states of data loaders as Megatron-Bridge saves them."""
    path = Path(shutil.copytree(source, folder))
    inner = next(path.glob("iter_*"), path)
    (inner / "dataloader_state").mkdir()
    for number, name in enumerate(LOADERS):
        state = {"position": number, "rng": torch.arange(number)}
        torch.save({"dataloader_state_dict": state}, inner / name)
    return inner, {name: (inner / name).read_bytes() for name in LOADERS}


LOADER_JOBS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{
        f"legacy to {to}": ("mcore_legacy/dense_gqa/tp4_pp1", to, {})
        for to in ("megatron", "torch_dist", "zarr", "dcp")
    },
    "torch_dist": ("mcore_torch_dist/dense_gqa/tp2_pp2", "torch_dist", {}),
    "reshard": (
        "mcore_torch_dist/dense_gqa/tp2_pp2", "megatron", {"topology": TopologyChange(tp=1, pp=1)}
    ),
    "links": ("mcore_torch_dist/dense_gqa/tp2_pp2", "torch_dist", {"metadata_only": True}),
    "dcp": ("torch_dcp/*", "dcp", {}),
    "merge": (
        "mcore_torch_dist/dense_gqa/tp2_pp2",
        "torch_dist",
        {"merge": Merge(method="average", others=(Path("."),))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOADER_JOBS)
def test_states_of_data_loaders_are_carried(golden: Path, tmp_path: Path, case: str) -> None:
    name, to, options = LOADER_JOBS[case]
    source = next(path for path in sorted(golden.glob(name)) if path.is_dir())
    path, states = with_loader_states(source, tmp_path / "in")
    if "merge" in options:
        options = {"merge": Merge(method="average", others=(source,))}
    options = {"optim": "drop", **options} if case not in ("links", "merge", "dcp") else options
    report = run(Job(src=path, dst=tmp_path / "out", to=to, **options))
    folder = next(iter((tmp_path / "out").glob("iter_*")), tmp_path / "out")
    assert {name: (folder / name).read_bytes() for name in LOADERS} == states
    assert [line for line in report.dropped if "dataloader" in line] == []
    notes = [note for note in report.notes if "data loader" in note]
    assert len(notes) == (case == "reshard") and all("2 data-parallel" in note for note in notes)
    written = open_checkpoint(tmp_path / "out")
    written.store.close()
    assert written.catalog.files.keys() >= states.keys() and not written.below


@pytest.mark.parametrize("to", ["torch", "hf", "zarr3", "orbax"])
def test_states_of_data_loaders_are_listed_where_they_have_no_place(
    golden: Path, tmp_path: Path, to: str
) -> None:
    path, _ = with_loader_states(golden / "mcore_torch_dist/dense_gqa/tp2_pp2", tmp_path / "in")
    dst = tmp_path / ("out.pt" if to == "torch" else "out")
    with prepare(Job(src=path, dst=dst, to=to, optim="drop")) as prepared:
        assert set(LOADERS) <= listed(prepared)


@pytest.mark.parametrize("unsafe", [LOADERS[1], LOADERS[3], "other.pt"])
@pytest.mark.parametrize("options", [{}, {"metadata_only": True}])
def test_a_file_beside_the_data_that_would_run_code_is_not_carried(
    golden: Path, tmp_path: Path, options: dict[str, Any], unsafe: str
) -> None:
    path, _ = with_loader_states(golden / "mcore_torch_dist/dense_gqa/tp2_pp2", tmp_path / "in")
    torch.save({"dataloader_state_dict": RunsCode()}, path / unsafe)
    report = run(Job(src=path, dst=tmp_path / "out", to="torch_dist", **options))
    (folder,) = (tmp_path / "out").glob("iter_*")
    assert (folder / LOADERS[0]).exists() and not (folder / unsafe).exists()
    if unsafe in LOADERS or options:
        assert any(unsafe in line and "would run code" in line for line in report.dropped)


def test_the_tokenizer_of_an_iteration_becomes_that_of_the_model(
    golden: Path, tmp_path: Path
) -> None:
    path = with_tokenizer(golden / "mcore_torch_dist/dense_gqa/tp2_pp2", tmp_path / "in")
    report = run(Job(src=path, dst=tmp_path / "out", to="hf"))
    for file, data in TOKENIZER.items():
        assert (tmp_path / "out" / Path(file).name).read_bytes() == data
    assert not any("--tokenizer" in note for note in report.notes)
    with prepare(Job(src=path, dst=tmp_path / "out.pt", to="torch")) as prepared:
        assert TOKENIZER.keys() <= listed(prepared)


def test_two_tokenizers_are_refused(golden: Path, tmp_path: Path) -> None:
    path = with_tokenizer(golden / "mcore_torch_dist/dense_gqa/tp2_pp2", tmp_path / "in")
    other = next(path.glob("iter_*")) / "tokenizer"
    with pytest.raises(UsageError, match="already has a tokenizer"):
        run(Job(src=path, dst=tmp_path / "out", to="hf", tokenizer=other))
    assert not (tmp_path / "out").exists()


def test_links_hold_the_tokenizer_too(golden: Path, tmp_path: Path) -> None:
    path = with_tokenizer(golden / "mcore_torch_dist/dense_gqa/tp2_pp2", tmp_path / "in")
    run(Job(src=path, dst=tmp_path / "out", metadata_only=True))
    iteration = next((tmp_path / "out").glob("iter_*"))
    assert (iteration / "tokenizer/tokenizer.json").read_bytes() == b"{}"


def test_files_of_real_trainers_are_named(golden: Path, tmp_path: Path) -> None:
    expected = {
        "accelerate/plain/checkpoint_0": {
            "optimizer.bin",
            "scheduler.bin",
            "random_states_0.pkl",
            "custom_checkpoint_0.pkl",
        },
        "accelerate/fsdp2_dp2/checkpoint_0": {
            "scheduler.bin",
            "random_states_0.pkl",
            "random_states_1.pkl",
            "custom_checkpoint_0.pkl",
        },
        "trainer/peft/checkpoint-2": {
            "optimizer.pt",
            "scheduler.pt",
            "rng_state.pth",
            "training_args.bin",
        },
        "trainer/zero3_dp2": {
            "checkpoint-2/rng_state.pth",
            "checkpoint-2/training_args.bin",
            "checkpoint-2/zero_to_fp32.py",
            "checkpoint-2/zero_to_torch.py",
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
