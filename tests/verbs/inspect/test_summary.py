from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from core.engine.catalog.catalog import Catalog, StoredObject, catalog_of_arrays
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.stored import Extent, StoredArray
from core.files.store import LocalStore
from core.formats.format import Format
from core.opening.open import Checkpoint
from core.pickle.inert import Global, Inert, make_namespace
from core.verbs.inspect.summary import path_of, summarize, total_by_role

FORMAT = Format(
    "test", "a format of this test", lambda store: True, lambda store: catalog_of({}), None
)


def catalog_of(shapes: Mapping[str, tuple[int, ...]]) -> Catalog:
    arrays = {
        key: StoredArray(key, "bfloat16", shape, Extent("f", 0)) for key, shape in shapes.items()
    }
    return catalog_of_arrays(format="test", arrays=arrays)


def checkpoint_of(
    catalog: Catalog, tmp_path: Path, *, format: Format = FORMAT, notes: tuple[str, ...] = ()
) -> Checkpoint:
    return Checkpoint(tmp_path, LocalStore(tmp_path), format, catalog, 7, notes)


def test_groups_count_every_tensor_once_and_leave_out_empty_groups() -> None:
    catalog = catalog_of(
        {"w": (4, 2), "optimizer.state.exp_avg.w": (4, 2), "optimizer.state.exp_avg_sq.w": (4, 2)}
    )
    model, moments = total_by_role(catalog.tensors)
    assert (model.name, model.n_tensors, model.n_elements, model.n_bytes) == ("model", 1, 8, 16)
    assert (moments.name, moments.n_tensors, moments.n_elements, moments.n_bytes) == (
        "moments",
        2,
        16,
        32,
    )
    assert dict(moments.dtypes) == {"bfloat16": 32}


def test_sizes_and_model_come_from_the_training_arguments(tmp_path: Path) -> None:
    args = make_namespace(
        {
            "tensor_model_parallel_size": 4,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": None,
            "num_layers": 32,
            "swiglu": True,
            "params_dtype": Global("torch", "bfloat16"),
            "num_experts": None,
            "seq_length": [1, 2],
        }
    )
    summary = summarize(checkpoint_of(replace(catalog_of({"w": (2,)}), args=args), tmp_path))
    assert dict(summary.parallel) == {"tp": 4, "pp": 2}
    assert dict(summary.model) == {"num_layers": 32, "swiglu": True, "params_dtype": "bfloat16"}


def test_files_are_counted_one_folder_deep(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00/model_optim_rng.pt").write_bytes(bytes(10))
    for rank in range(3):
        (tmp_path / f"__{rank}_0.distcp").write_bytes(bytes(100))
    summary = summarize(checkpoint_of(catalog_of({"w": (2,)}), tmp_path))
    assert (summary.n_files, summary.file_bytes, summary.n_ranks) == (4, 310, 3)


def test_rank_files_that_are_not_understood_are_shown_by_rank_with_the_reason(
    tmp_path: Path,
) -> None:
    shapes = {f"mp_rank_{rank:02d}:model.odd.weight": (2,) for rank in range(2)}
    catalog = catalog_of(shapes).with_facet(RankFacts())
    summary = summarize(checkpoint_of(catalog, tmp_path, format=replace(FORMAT, partition="ranks")))
    assert list(summary.view.tensors) == list(shapes)
    assert not summary.is_unsharded
    assert any(note.startswith("shown rank by rank") for note in summary.notes)
    assert [capability.is_possible for capability in summary.capabilities] == [False, False]
    assert path_of("mp_rank_00:model.odd.weight", summary.view) == [
        "mp_rank_00",
        "model",
        "odd",
        "weight",
    ]


def test_a_plain_checkpoint_cannot_be_resharded_and_says_why(tmp_path: Path) -> None:
    summary = summarize(checkpoint_of(catalog_of({"a:b.c": (2,)}), tmp_path, notes=("a note",)))
    *converts, reshard = summary.capabilities
    assert {name for convert in converts if convert.is_possible for name in convert.targets} >= {
        "torch",
        "dcp",
    }
    assert {
        name for convert in converts if not convert.is_possible for name in convert.targets
    } == {"megatron", "hf"}
    assert not reshard.is_possible
    assert reshard.why is not None
    assert summary.notes == ("a note",)
    assert summary.optimizer is None
    assert path_of("a:b.c", summary.view) == ["a:b", "c"]


@pytest.mark.parametrize(
    ("module", "name", "warns"), [("os", "system", True), ("collections", "OrderedDict", False)]
)
def test_objects_that_would_run_code_are_named(
    module: str, name: str, warns: bool, tmp_path: Path
) -> None:
    value = {"x": Inert("reduce", Global(module, name), ("touch /tmp/owned",))}
    catalog = replace(catalog_of({"w": (2,)}), objects={"evil": StoredObject("evil", value=value)})
    notes = summarize(checkpoint_of(catalog, tmp_path)).notes
    assert any(f"{module}.{name}" in note for note in notes) == warns
