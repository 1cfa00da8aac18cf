"""Universal checkpoints: DeepSpeed's own and ours, which must agree, and broken files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.arrays.dtypes import DTYPES
from core.engine.catalog.catalog import Catalog, StoredObject, catalog_of_arrays
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.changes.select import without_optimizer
from core.errors import CorruptError, MissingShardError, UnsafeError, UnsupportedError
from core.files.store import LocalStore, MemoryStore, ReadStore
from core.formats.deepspeed import format as deepspeed
from core.formats.deepspeed.model_states import ZeroFacts
from core.formats.deepspeed.universal import format as deepspeed_universal
from core.formats.deepspeed.universal.format import NO_STATE, for_universal
from core.formats.torch.format import parse
from core.opening.target import source_and_target
from core.pickle.inert import Global, Inert, TensorLeaf, as_mapping, make_namespace
from core.verbs.convert.contract import CHECKS, SAMPLE, Sample, check_reading
from core.verbs.convert.run import Job, run
from tests.formats.deepspeed.deepspeed_samples import GROUPS, STATES, Zero, values, written
from tests.support.facets import facet_of
from tests.support.materialize import tensor_bytes
from tests.support.rounds import rounds

CASES = ("zero1_dp2_bf16", "zero3_dp2_bf16")
FOLDER = "global_step10_universal"


def opened(folder: Path) -> tuple[LocalStore, Catalog]:
    store = LocalStore(folder)
    assert deepspeed_universal.sniff(store)
    return store, deepspeed_universal.read(store)


def plain(value: object) -> object:
    """An inert value that compares by content."""
    if isinstance(value, Inert):
        return (str(value.fn), value.args, plain(value.state), plain(value.entries))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return "a tensor" if isinstance(value, TensorLeaf) else value


def assert_equal(
    first: tuple[ReadStore, Catalog],
    other: tuple[ReadStore, Catalog],
    *,
    without: tuple[str, ...] = (),
) -> None:
    """Two checkpoints hold the same tensors and objects."""
    tensors = [
        {key: (tensor.dtype, tensor.shape) for key, tensor in catalog.tensors.items()}
        for _, catalog in (first, other)
    ]
    assert tensors[0] == tensors[1]
    for key in tensors[0]:
        assert (
            tensor_bytes(first[1], first[0], key).tobytes()
            == tensor_bytes(other[1], other[0], key).tobytes()
        ), key
    objects = [
        {key: plain(item.value) for key, item in catalog.objects.items() if key not in without}
        for _, catalog in (first, other)
    ]
    assert objects[0] == objects[1]
    assert first[1].iteration == other[1].iteration


def in_memory(
    arrays: Mapping[str, torch.Tensor], objects: Mapping[str, object] | None = None
) -> tuple[MemoryStore, Catalog]:
    """A checkpoint of another format."""
    files = {
        f"t{n}": tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for n, tensor in enumerate(arrays.values())
    }
    stored = {
        key: StoredArray(
            key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), Extent(f"t{n}", 0)
        )
        for n, (key, tensor) in enumerate(arrays.items())
    }
    stored_objects = {key: StoredObject(key, value=value) for key, value in (objects or {}).items()}
    return MemoryStore(dict(files)), catalog_of_arrays(
        format="memory", arrays=stored, objects=stored_objects
    )


def test_copies_of_weights_in_the_model_file_are_listed(golden: Path) -> None:
    for case in CASES:
        _, catalog = opened(golden / "deepspeed_universal" / case)
        listed = {name: entry.reason for entry in catalog.dropped for name in entry.names}
        assert listed.pop("module._metadata").startswith("module versions")
        # Those of ZeRO-3 are empty. Buffers are read from the model file.
        weights = [key for key in catalog.tensors if not key.startswith("optimizer.")]
        weights.remove("inv_freq")
        wanted = [] if "zero3" in case else [f"module.{name}" for name in weights]
        assert sorted(listed) == sorted(wanted)
        assert all(reason.startswith("copies of weights") for reason in listed.values())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract_is_kept(check: Callable[..., None], tmp_path: Path) -> None:
    tensors = {
        key: spec
        for key, spec in SAMPLE.tensors.items()
        if spec[0] == "float32" or DTYPES[spec[0]].kind == "int"
    }
    check(deepspeed_universal.FORMAT, tmp_path, Sample(tensors, SAMPLE.objects))


@pytest.mark.long  # tests/formats/test_contract.py damages another one
def test_a_damaged_checkpoint_never_crashes(golden: Path, tmp_path: Path) -> None:
    check_reading(
        deepspeed_universal.FORMAT,
        golden / "deepspeed_universal" / "zero1_dp2_bf16",
        tmp_path / "damaged",
        n_flips=rounds(50),
    )


@pytest.mark.parametrize("case", CASES)
def test_a_universal_checkpoint_has_the_catalog_of_its_source(golden: Path, case: str) -> None:
    source = LocalStore(golden / "deepspeed" / case / "global_step10")
    for folder in (
        golden / "deepspeed_universal" / case,
        golden / "deepspeed_universal" / case / FOLDER,
    ):
        reopened = opened(folder)
        assert_equal((source, deepspeed.read(source)), reopened)
        assert facet_of(reopened[1], ZeroFacts).stage == int(case[4])


def content(path: Path) -> tuple[dict[str, object], torch.Tensor]:
    """(what stands beside the tensor, the tensor) of a parameter's file."""
    loaded = torch.load(path, weights_only=True)
    if isinstance(loaded, torch.Tensor):
        return {}, loaded
    return {key: value for key, value in loaded.items() if key != "param"}, loaded["param"]


@pytest.mark.parametrize("origin", ["deepspeed", "deepspeed_universal"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_equals_ds_to_universal_file_by_file(
    golden: Path, tmp_path: Path, case: str, origin: str
) -> None:
    store = LocalStore(golden / "deepspeed" / case / "global_step10")
    catalog = deepspeed.read(store)
    if origin == "deepspeed_universal":
        store, catalog = opened(golden / "deepspeed_universal" / case)
    root = written(catalog, store, tmp_path / "made")
    assert (root / "latest_universal").read_text() == FOLDER
    gold = golden / "deepspeed_universal" / case
    names = {
        str(path.relative_to(gold))
        for path in gold.rglob("*.pt")
        if path.parent.name not in ("zero", FOLDER)
    }
    our_names = {
        str(path.relative_to(root))
        for path in root.rglob("*.pt")
        if path.parent.name not in ("zero", FOLDER)
    }
    if case.startswith(
        "zero3"
    ):  # DeepSpeed leaves out steps and buffers there, and cannot load the latter elsewhere
        our_names = {
            name for name in our_names if not name.endswith("step.pt") and "inv_freq" not in name
        }
    assert our_names == names
    for name in sorted(names):
        (their_facts, wanted), (my_beside, result) = content(gold / name), content(root / name)
        if case.startswith("zero3"):
            assert their_facts == {} and my_beside == {"cat_dim": 0}
            result = result.flatten()
        else:
            assert my_beside == their_facts
        assert result.dtype == wanted.dtype and result.shape == wanted.shape
        assert result.detach().numpy().tobytes() == wanted.detach().numpy().tobytes(), name


@pytest.mark.parametrize(
    "case", ["zero1_dp2_bf16", "zero2_dp2_bf16", "zero2_dp2_fp32", "zero3_dp2_bf16"]
)
def test_writing_and_reading_again_changes_nothing(golden: Path, tmp_path: Path, case: str) -> None:
    store = LocalStore(golden / "deepspeed" / case / "global_step10")
    catalog = deepspeed.read(store)
    once = opened(written(catalog, store, tmp_path / "once"))
    assert_equal((store, catalog), once)
    twice = written(once[1], once[0], tmp_path / "twice")
    for path in (tmp_path / "once").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (twice / path.relative_to(tmp_path / "once")).read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_the_loaders_of_all_stages_find_what_they_look_for(
    golden: Path, tmp_path: Path, case: str
) -> None:
    store = LocalStore(golden / "deepspeed" / case / "global_step10")
    folder = written(deepspeed.read(store), store, tmp_path / "made") / FOLDER
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        root = torch.load(folder / name, weights_only=True)
        assert root["module"] == {} and root["dp_world_size"] == 2 and root["mp_world_size"] == 1
        assert (root["global_steps"], root["skipped_steps"], root["lr_scheduler"]) == (2, 0, None)
        assert root["iteration"] == 10 and root["note"] == "gold"
        assert [list(group) for group in root["param_shapes"]][1][0] == "layers.0.0.bias"
        assert root["buffer_names"] == ["inv_freq"]
    tree = parse(LocalStore(folder), "zero/optimizer_state.pt")
    root = as_mapping(tree.value)
    assert root is not None and root["ds_version"] == "0.19.8"
    groups = root["param_groups"]
    assert isinstance(groups, list) and [group["params"] for group in groups] == [[0], [1]]
    assert groups[0]["weight_decay"] == 0.1 and groups[1]["weight_decay"] == 0.0
    assert isinstance(root["loss_scaler"], Inert)
    inner = as_mapping(root["optimizer_state_dict"])
    assert inner is not None and inner["param_groups"] == groups
    step = tree.arrays["optimizer_state_dict.state.0.step"]
    assert (
        LocalStore(folder).read("zero/optimizer_state.pt", step.extent.offset, 4)
        == torch.tensor(2.0).numpy().tobytes()
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_odd_shapes_client_tensors_and_shared_parameters_come_back(
    tmp_path: Path, stage: int
) -> None:
    run = Zero(
        stage,
        3,
        shared={"head": "embed"},
        buffers={"count": torch.tensor(5), "table": torch.ones(2).bfloat16()},
    )
    store = LocalStore(run.write(tmp_path / "x"))
    catalog = deepspeed.read(store)
    folder = written(catalog, store, tmp_path / "made")
    reopened = opened(folder)
    assert_equal((store, catalog), reopened)
    assert reopened[1].ties == {"head": "embed"}
    assert not (folder / "global_step4_universal" / "zero" / "head").exists()
    leaf = reopened[1].objects["rng"].value
    assert isinstance(leaf, TensorLeaf) and tensor_bytes(
        reopened[1], reopened[0], leaf.key
    ).tobytes() == bytes(range(6))
    _, table = content(folder / "global_step4_universal" / "zero" / "table" / "fp32.pt")
    assert table.dtype == torch.float32


def test_steps_that_are_numbers_stay_numbers(tmp_path: Path) -> None:
    store = LocalStore(Zero(2, 2, step=7).write(tmp_path / "x"))
    folder = written(deepspeed.read(store), store, tmp_path / "made") / "global_step4_universal"
    assert torch.load(folder / "zero" / "embed" / "step.pt", weights_only=True) == 7
    state = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)
    assert state["optimizer_state_dict"]["state"][0]["step"] == 7
    assert opened(folder)[1].objects["optimizer.state.norm.step"].value == 7


def test_weights_of_16_bits_are_refused_with_a_way_out(tmp_path: Path) -> None:
    store, catalog = in_memory({"w": torch.ones(3, dtype=torch.bfloat16)})
    with pytest.raises(
        UnsupportedError, match="weights are bfloat16 and have no master weights"
    ) as caught:
        written(catalog, store, tmp_path)
    assert caught.value.key == "w" and "--dtype float32" in (caught.value.hint or "")


def test_masters_take_the_place_of_rounded_weights(tmp_path: Path) -> None:
    master = values("w", (5, 3)) * 1.001
    arrays = {
        "w": master.bfloat16(),
        "optimizer.state.w.fp32_param": master,
        "optimizer.state.w.exp_avg": master + 1,
        "optimizer.state.w.exp_avg_sq": master + 2,
        "optimizer.state.w.step": torch.tensor(3.0),
    }
    store, catalog = in_memory(arrays)
    folder = written(catalog, store, tmp_path)
    assert torch.equal(content(folder / "universal" / "zero" / "w" / "fp32.pt")[1], master)
    assert set(opened(folder)[1].tensors) == set(arrays) - {"optimizer.state.w.fp32_param"}


def test_missing_state_is_said(tmp_path: Path) -> None:
    store = LocalStore(Zero(2, 2).write(tmp_path / "x"))
    bare = without_optimizer(deepspeed.read(store)).catalog
    assert for_universal(bare).notes[-1] == NO_STATE
    folder = written(bare, store, tmp_path / "made") / "global_step4_universal"
    assert sorted(path.name for path in (folder / "zero" / "embed").iterdir()) == ["fp32.pt"]
    state = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)
    assert (
        len(state["param_groups"]) == 7 and "optimizer_state_dict" not in state
    )  # no group of DeepSpeed is left over
    arrays = {"w": torch.ones(2), "optimizer.state.w.exp_avg": torch.ones(2)}
    notes = for_universal(in_memory(arrays)[1]).notes
    assert "no optimizer step" in notes[0] and "no param_groups" in notes[1]


def test_unknown_groups_are_as_many_as_there_could_be(tmp_path: Path) -> None:
    """DeepSpeed walks its own groups and these side by side, and does not load what has no
    partner.
    """
    names = ("a", "b", "c")
    arrays = {name: torch.ones(2) for name in names} | {
        f"optimizer.state.{n}.exp_avg": torch.ones(2) for n in names
    }
    objects = {f"optimizer.param_groups.{name}.lr": 0.5 if name == "b" else 0.25 for name in names}
    store, catalog = in_memory(arrays, objects)
    folder = written(catalog, store, tmp_path / "flat") / "universal"
    groups = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)["param_groups"]
    assert groups == [{"lr": 0.25, "params": [0]}, {"lr": 0.5, "params": [1]}, {"params": []}]
    objects_read = opened(folder)[1].objects
    assert objects_read["optimizer.param_groups.0.params"].value == ["a", "c"]
    assert "optimizer.param_groups.2.params" not in objects_read
    numbered = {"optimizer.param_groups.0.lr": 0.5, "optimizer.param_groups.0.params": ["c", "a"]}
    store, catalog = in_memory(arrays, numbered)
    folder = written(catalog, store, tmp_path / "numbered") / "universal"
    root = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    assert [list(group) for group in root["param_shapes"]] == [["c", "a"]]
    groups = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)["param_groups"]
    assert groups == [{"lr": 0.5, "params": [0]}, {"params": []}, {"params": []}]


def test_how_tensor_parallelism_cuts_a_parameter_is_kept(tmp_path: Path) -> None:
    store = LocalStore(Zero(1, 2).write(tmp_path / "x"))
    first = written(deepspeed.read(store), store, tmp_path / "first") / "global_step4_universal"
    shape = {"patterns": ["wide"], "shape": (3, (5, 6)), "partition_dim": 1}
    cuts: dict[str, dict[str, object]] = {
        "embed": {"cat_dim": 0, "vocab_tensor": True},
        "wide": {"sub_param_shape": shape},
    }
    for name, extras in cuts.items():
        for path in (first / "zero" / name).glob("[ef]*.pt"):
            torch.save({**extras, "param": content(path)[1]}, path)
    source = opened(first)
    assert source[1].objects["universal.embed"].value == {"cat_dim": 0, "vocab_tensor": True}
    assert source[1].objects["universal.wide"].value == {"sub_param_shape": shape}
    second = written(source[1], source[0], tmp_path / "second")
    assert_equal(source, opened(second))
    tree = parse(LocalStore(second), "global_step4_universal/zero/wide/fp32.pt")
    root = as_mapping(tree.value)
    assert root is not None
    stored = root["sub_param_shape"]
    assert isinstance(stored, Inert) and stored.state == shape
    assert stored.fn == Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")


def test_classes_that_the_loader_cannot_import_are_put_aside(tmp_path: Path) -> None:
    strange = Inert("newobj", Global("megatron.core.enums", "ModelType"), (1,))
    store, catalog = in_memory(
        {"w": torch.ones(2)}, {"args": make_namespace({"lr": 0.5, "type": strange}), "step": 5}
    )
    folder = written(catalog, store, tmp_path)
    root = torch.load(folder / "universal" / "mp_rank_00_model_states.pt", weights_only=True)
    assert root["step"] == 5 and "args" not in root
    assert plain(opened(folder)[1].objects["args"].value) == plain(catalog.objects["args"].value)


REFUSED: dict[str, tuple[dict[str, torch.Tensor], dict[str, object], str, str]] = {
    "numbered states": (
        {"w": torch.ones(2), "optimizer.state.0.m": torch.ones(2)},
        {},
        "optimizer.state.0.m",
        "does not belong to any parameter",
    ),
    "states under a prefix": (
        {"w": torch.ones(2), "app.optim.state.w.m": torch.ones(2)},
        {},
        "app.optim.state.w.m",
        "does not belong to any parameter",
    ),
    "a state of another shape": (
        {"w": torch.ones(4), "optimizer.state.w.row": torch.ones(2)},
        {},
        "optimizer.state.w.row",
        r"has shape \(2,\)",
    ),
    "a long step": (
        {"w": torch.ones(4), "optimizer.state.w.step": torch.ones(2)},
        {},
        "optimizer.state.w.step",
        "not one value",
    ),
    "a state called fp32": (
        {"w": torch.ones(4), "optimizer.state.w.fp32": torch.ones(4)},
        {},
        "optimizer.state.w.fp32",
        "cannot be named",
    ),
    "a name with a slash": ({"a/b": torch.ones(4)}, {}, "a/b", "key cannot be a directory name"),
    "a name that climbs": ({"..": torch.ones(4)}, {}, "..", "key cannot be a directory name"),
    "a name that is too long": ({"w" * 256: torch.ones(4)}, {}, "w" * 256, "key cannot be"),
    "a reserved entry": (
        {"w": torch.ones(4)},
        {"module": {"x": 1}},
        "module",
        "for a different purpose",
    ),
    "a setting of nothing": (
        {"w": torch.ones(4)},
        {"optimizer.param_groups.v.lr": 1},
        "optimizer.param_groups.v.lr",
        "not belong to",
    ),
    "half precision": ({"w": torch.ones(4, dtype=torch.float16)}, {}, "w", "float16"),
    "double precision": ({"w": torch.ones(4, dtype=torch.float64)}, {}, "w", "float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, case: str) -> None:
    arrays, objects, key, message = REFUSED[case]
    store, catalog = in_memory(arrays, objects)
    with pytest.raises(UnsupportedError, match=message) as caught:
        written(catalog, store, tmp_path)
    assert (caught.value.key == key and caught.value.hint) or case == "a long step"


@pytest.mark.parametrize("case", REFUSED)
def test_the_check_refuses_what_laying_out_refuses(case: str) -> None:
    _, target = source_and_target(
        in_memory(REFUSED[case][0], REFUSED[case][1])[1], deepspeed_universal.FORMAT
    )
    with pytest.raises(UnsupportedError) as refused:
        deepspeed_universal.lay_out(target)
    with pytest.raises(UnsupportedError) as checked:
        deepspeed_universal.check(target)
    assert str(checked.value) == str(refused.value)


def _made(tmp_path: Path) -> Path:
    store = LocalStore(Zero(2, 2).write(tmp_path / "x"))
    return written(deepspeed.read(store), store, tmp_path / "made") / "global_step4_universal"


def test_a_parameter_without_weights_is_named(tmp_path: Path) -> None:
    folder = _made(tmp_path)
    (folder / "zero" / "deep" / "fp32.pt").unlink()
    with pytest.raises(MissingShardError, match="fp32 weights are missing") as caught:
        deepspeed_universal.read(LocalStore(folder))
    assert (caught.value.key, caught.value.file) == ("deep", "zero/deep/fp32.pt")


def test_a_missing_parameter_is_named(tmp_path: Path) -> None:
    folder = _made(tmp_path)
    (folder / "zero" / "deep").rename(folder / "elsewhere")
    with pytest.raises(MissingShardError, match="its directory is missing") as caught:
        deepspeed_universal.read(LocalStore(folder))
    assert caught.value.key == "deep"


BROKEN: dict[str, tuple[str, Any, str]] = {
    "weights are a number": ("fp32", 5, "is 5, not a tensor"),
    "weights are text in a dict": ("fp32", {"param": "x"}, "entry 'param' is 'x', not a tensor"),
    "no param": ("exp_avg", {"cat_dim": 0}, "entry 'param' is None, not a tensor"),
    "a state of another shape": (
        "exp_avg",
        {"cat_dim": 0, "param": torch.ones(5)},
        r"state 'exp_avg' has shape \(5,\)",
    ),
    "a state that is cut otherwise": (
        "exp_avg",
        {"cat_dim": 1, "param": values("deep", (2, 3, 4))},
        "is sharded as",
    ),
    "a bare tensor of another length": (
        "exp_avg",
        torch.ones(25),
        r"25 elements, but the model states record",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named(tmp_path: Path, case: str) -> None:
    stem, value, message = BROKEN[case]
    folder = _made(tmp_path)
    torch.save(value, folder / "zero" / "deep" / f"{stem}.pt")
    with pytest.raises(CorruptError, match=message) as caught:
        deepspeed_universal.read(LocalStore(folder))
    assert caught.value.key == "deep"
    assert caught.value.file == f"zero/deep/{stem}.pt"


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("../x", UnsafeError, "not a path inside"),
        ("gone", MissingShardError, "names 'gone'"),
        ("", UnsafeError, "file name ''"),
    ],
)
def test_a_tracker_that_names_something_else_is_refused(
    tmp_path: Path, text: str, kind: type[Exception], message: str
) -> None:
    folder = _made(tmp_path).parent
    (folder / "latest_universal").write_text(text)
    assert deepspeed_universal.sniff(LocalStore(folder))
    with pytest.raises(kind, match=message):
        deepspeed_universal.read(LocalStore(folder))


def test_files_that_deepspeed_needs_are_missed_in_a_note(tmp_path: Path) -> None:
    folder = _made(tmp_path)
    (folder / "zero" / "optimizer_state.pt").unlink()
    for path in folder.glob("*_model_states.pt"):
        path.unlink()
    _, catalog = opened(folder)
    assert set(catalog.tensors) == {
        *(name for group in GROUPS for name in group),
        *(
            f"optimizer.state.{name}.{state}"
            for group in GROUPS
            for name in group
            for state in (*STATES, "step")
        ),
    }
    notes = catalog.notes
    assert (
        "the model states file is missing" in notes[0]
        and "zero/optimizer_state.pt is missing" in notes[1]
    )


def test_groups_of_deepspeed_are_written_as_they_are(tmp_path: Path) -> None:
    store = LocalStore(Zero(2, 2).write(tmp_path / "x"))
    catalog = deepspeed.read(store)
    foreign = catalog.without_facets(ZeroFacts)
    for source, n in ((catalog, 2), (foreign, 7)):
        folder = written(source, store, tmp_path / f"made{n}") / "global_step4_universal"
        groups = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)[
            "param_groups"
        ]
        assert len(groups) == n
        assert len([key for key in opened(folder)[1].objects if key.endswith(".lr")]) == 2


def test_directories_that_were_exchanged_are_told_by_their_shapes(
    golden: Path, tmp_path: Path
) -> None:
    target, a, b = tmp_path / "universal", "layers.1.0.weight", "layers.1.2.weight"
    shutil.copytree(
        golden / "deepspeed_universal" / "zero1_dp2_bf16", target, copy_function=shutil.copyfile
    )
    (zero,) = target.glob("*/zero")
    (zero / a).rename(zero / "aside")
    (zero / b).rename(zero / a)
    (zero / "aside").rename(zero / b)
    with pytest.raises(CorruptError, match="the model states record"):
        deepspeed_universal.read(LocalStore(zero.parent))


def test_a_step_is_one_number(golden: Path, tmp_path: Path) -> None:
    target = tmp_path / "universal"
    shutil.copytree(
        golden / "deepspeed_universal" / "zero1_dp2_bf16", target, copy_function=shutil.copyfile
    )
    (zero,) = target.glob("*/zero")
    shutil.copyfile(zero / "norm.bias" / "exp_avg.pt", zero / "norm.weight" / "step.pt")
    with pytest.raises(CorruptError, match="the step has shape"):
        deepspeed_universal.read(LocalStore(zero.parent))


def test_an_optimizer_beside_its_model_is_written_once_its_prefix_is_gone(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(3, 3)])})
    optimizer = torch.optim.AdamW(model.parameters())
    model["layers"][0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    src = tmp_path / "state.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, src)
    job = Job(src=src, dst=tmp_path / "out", to="deepspeed_universal", param_order="model")
    with pytest.raises(UnsupportedError) as caught:
        run(job)
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("--strip-prefix 'model.'")
    # The steps of one layer, stacked, are a tensor of one element.
    for stack_layers in (False, True):
        run(replace(job, strip_prefix=("model.",), stack_layers=stack_layers, force=True))
        store, catalog = opened(tmp_path / "out")
        key = "layers.weight" if stack_layers else "layers.0.weight"
        step = tensor_bytes(catalog, store, f"optimizer.state.{key}.step")
        assert step.view("float32").item() == 1.0
