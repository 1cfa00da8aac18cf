"""ZeRO checkpoints: what DeepSpeed wrote, what is cut the slow way here, and broken files."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from core.engine.catalog.catalog import Catalog
from core.errors import (
    CorruptError,
    MissingShardError,
    ReplicaMismatchError,
    TruncatedError,
    UnsupportedError,
)
from core.files.store import LocalStore, MemoryStore
from core.formats.deepspeed import format as deepspeed
from core.formats.deepspeed.model_states import ZeroFacts
from core.formats.deepspeed.partition import cut_groups, cut_parameters, plain_groups
from core.pickle.inert import TensorLeaf, attributes
from core.pickle.nesting import entries
from tests.formats.deepspeed.deepspeed_samples import GROUPS, MODEL, STATES, Zero, values
from tests.support.facets import facet_of
from tests.support.materialize import tensor_bytes
from tests.support.rounds import rounds

GOLD = ("zero1_dp2_bf16", "zero2_dp2_bf16", "zero2_dp2_fp32", "zero3_dp2_bf16")
RANK_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def opened(folder: Path) -> tuple[LocalStore, Catalog]:
    store = LocalStore(folder)
    assert deepspeed.sniff(store)
    return store, deepspeed.read(store)


def plain_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_holds(store: LocalStore, catalog: Catalog, key: str, wanted: torch.Tensor) -> None:
    tensor = catalog.tensors[key]
    assert (f"torch.{tensor.dtype}", tensor.shape) == (str(wanted.dtype), tuple(wanted.shape)), key
    assert tensor_bytes(catalog, store, key).tobytes() == plain_bytes(wanted), key


def weights_of(catalog: Catalog) -> list[str]:
    return [key for key in catalog.tensors if not key.startswith("optimizer.")]


@pytest.mark.parametrize("case", GOLD)
def test_weights_are_those_of_zero_to_fp32(golden: Path, case: str) -> None:
    store, catalog = opened(golden / "deepspeed" / case / "global_step10")
    oracle = load_file(golden / "oracle" / "deepspeed" / case / "model.safetensors")
    assert set(weights_of(catalog)) == set(oracle)
    for key, wanted in oracle.items():
        assert_holds(store, catalog, key, wanted)


@pytest.mark.parametrize("case", ["zero1_dp2_bf16", "zero3_dp2_bf16"])
def test_moments_are_those_of_ds_to_universal(golden: Path, case: str) -> None:
    store, catalog = opened(golden / "deepspeed" / case / "global_step10")
    zero = golden / "deepspeed_universal" / case / "global_step10_universal" / "zero"
    n_seen = 0
    for folder in (path for path in zero.iterdir() if (path / "exp_avg.pt").exists()):
        for state in ("exp_avg", "exp_avg_sq", "step"):
            key = f"optimizer.state.{folder.name}.{state}"
            if not (folder / f"{state}.pt").exists():
                continue  # ZeRO-3 has no step.pt
            loaded = torch.load(folder / f"{state}.pt", weights_only=True)
            wanted = loaded["param"] if isinstance(loaded, dict) else loaded
            assert_holds(store, catalog, key, wanted.reshape(catalog.tensors[key].shape))
            n_seen += 1
    assert n_seen == (36 if case.startswith("zero1") else 24)


def test_zero_0_keeps_weights_as_stored_and_its_optimizer_by_numbers(golden: Path) -> None:
    folder = golden / "deepspeed" / "zero0_dp2_bf16" / "global_step10"
    store, catalog = opened(folder)
    root = torch.load(folder / MODEL, weights_only=False)
    assert set(weights_of(catalog)) == set(root["module"])
    for key, wanted in root["module"].items():
        assert_holds(store, catalog, key, wanted)
    for number, states in root["optimizer"]["optimizer_state_dict"]["state"].items():
        for state, wanted in states.items():
            assert_holds(
                store, catalog, f"optimizer.optimizer_state_dict.state.{number}.{state}", wanted
            )
    for group, tensors in enumerate(root["optimizer"]["fp32_groups"]):
        for number, wanted in enumerate(tensors):
            assert_holds(store, catalog, f"optimizer.fp32_groups.{group}.{number}", wanted)
    assert catalog.objects["optimizer.optimizer_state_dict.param_groups.1.params"].value == [
        6,
        7,
        8,
        9,
        10,
        11,
    ]
    assert "numbers" in str(catalog.notes)


@pytest.mark.parametrize("case", GOLD)
def test_everything_else_is_an_object(golden: Path, case: str) -> None:
    _, catalog = opened(golden / "deepspeed" / case / "global_step10")
    stored = {key: item.value for key, item in catalog.objects.items()}
    assert stored["iteration"] == 10 and stored["note"] == "gold" and stored["global_steps"] == 2
    assert stored["ds_version"] == catalog.version == "0.19.8"
    assert stored["optimizer.param_groups.0.betas"] == (0.9, 0.999)
    assert stored["optimizer.param_groups.1.weight_decay"] == 0.0
    assert stored["optimizer.param_groups.1.params"] == [
        "layers.0.0.bias",
        "layers.0.2.bias",
        "layers.1.0.bias",
        "layers.1.2.bias",
        "norm.weight",
        "norm.bias",
    ]
    assert attributes(stored["optimizer.loss_scaler"]) == {"cur_scale": 1.0, "dynamic": False}
    assert isinstance(stored["ds_config"], dict)
    assert catalog.iteration == 10
    assert catalog.facet(ZeroFacts) == ZeroFacts(stage=int(case[4]), dp=2)


def test_the_skeleton_has_every_entry_under_its_path(golden: Path) -> None:
    _, catalog = opened(golden / "deepspeed" / "zero2_dp2_bf16" / "global_step10")
    assert [entry.key for entry in entries(catalog.skeleton)] == [
        ".".join(map(str, entry.path)) for entry in entries(catalog.skeleton)
    ]
    assert {entry.key for entry in entries(catalog.skeleton)} == {
        *catalog.tensors,
        *catalog.objects,
    }


def test_reading_needs_no_framework(golden: Path, repo_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        " from core.formats.deepspeed import format as deepspeed; from core.files.store import "
        "LocalStore\n"
        "catalog = deepspeed.read(LocalStore(Path(sys.argv[1])))\n"
        "[catalog.fragments(key) for key in catalog.tensors]\n"
        "sys.exit(' '.join({'torch', 'numpy', 'deepspeed'} & set(sys.modules)) or 0)"
    )
    folder = golden / "deepspeed" / "zero3_dp2_bf16" / "global_step10"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=repo_dir, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_only_directories_of_ranks_are_sniffed(golden: Path) -> None:
    assert not deepspeed.sniff(
        LocalStore(golden / "deepspeed" / "zero1_dp2_bf16")
    )  # the root has a tracker only
    universal = golden / "deepspeed_universal" / "zero1_dp2_bf16" / "global_step10_universal"
    assert not deepspeed.sniff(LocalStore(universal))
    assert not deepspeed.sniff(MemoryStore({"pytorch_model.bin": b""}))
    assert not deepspeed.sniff(
        LocalStore(golden / "deepspeed" / "zero1_dp2_bf16" / "global_step10", entry=MODEL)
    )


RUNS = {
    **{f"zero{stage}_dp{n}": Zero(stage, n) for stage in (1, 2, 3) for n in (1, 2, 3, 4, 7)},
    "one rank holds all of a group": Zero(2, 16),
    "gaps behind parameters": Zero(2, 4, gap=3),
    "gaps, without slices": Zero(1, 3, gap=1, has_slices=False),
    "without slices": Zero(1, 4, has_slices=False),
    "padding stored": Zero(2, 4, pads=True),
    "sub-groups cut parameters": Zero(3, 2, sub_groups=(20, 31, 5, 1, 1)),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_parameter_is_put_together(tmp_path: Path, name: str) -> None:
    run = RUNS[name]
    if run.sub_groups is not None:
        n = sum(
            -(-torch.Size(shape).numel() // run.n_ranks)
            for group in GROUPS
            for shape in group.values()
        )
        run.sub_groups = (*run.sub_groups, n - sum(run.sub_groups))
    store, catalog = opened(run.write(tmp_path / "x"))
    for group in GROUPS:
        for parameter, shape in group.items():
            assert_holds(store, catalog, parameter, values(parameter, shape))
            for state in STATES:
                assert_holds(
                    store,
                    catalog,
                    f"optimizer.state.{parameter}.{state}",
                    values(parameter, shape, state),
                )
            assert_holds(store, catalog, f"optimizer.state.{parameter}.step", torch.tensor(4.0))
    assert len(catalog.tensors) == 7 * 4
    assert all(
        fragment.array is not None and fragment.array.extent.encoding is None
        for fragment in catalog.all_fragments()
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_keep_their_precision(tmp_path: Path, stage: int) -> None:
    frozen = {"lora": (5, 3), "base": (4,), "tiny": ()}
    store, catalog = opened(Zero(stage, 4, frozen=frozen).write(tmp_path / "x"))
    assert any("stay bfloat16" in note and "lora" in note for note in catalog.notes)
    for name, shape in frozen.items():
        assert_holds(store, catalog, name, values(name, shape).bfloat16())
    assert "optimizer.state.lora.exp_avg" not in catalog.tensors


def test_parameters_that_only_the_module_has_come_with_a_note(tmp_path: Path) -> None:
    def without_frozen(name: str, content: dict[str, Any]) -> None:
        if name == MODEL:
            content["frozen_param_shapes"] = content["frozen_param_fragments"] = None

    store, catalog = opened(
        Zero(1, 2, frozen={"base": (4, 2)}).write(tmp_path / "x", without_frozen)
    )
    assert_holds(store, catalog, "base", values("base", (4, 2)).bfloat16())
    assert (
        "parameters in no optimizer group were read from the model file in their own precision: "
        "base" in str(catalog.notes)
    )


OF_OTHER_RANKS = [
    f"{name} of other ranks (the first rank's value is kept)" for name in ("rng", "nested")
]
"""What ZeRO-3 stores on every rank and holds tensors."""


def test_parameters_that_zero_3_holds_nowhere_are_reported(tmp_path: Path) -> None:
    def without_frozen(name: str, content: dict[str, Any]) -> None:
        if "module" in content:
            content["frozen_param_shapes"] = content["frozen_param_fragments"] = None

    _, catalog = opened(Zero(3, 2, frozen={"base": (4, 2)}).write(tmp_path / "x", without_frozen))
    assert "base" not in catalog.tensors
    first, *rest = map(str, catalog.dropped)
    assert first == "base (ZeRO-3 does not store the parameter's parts)" and rest == OF_OTHER_RANKS


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_attributes_of_the_module_and_what_is_no_tensor_are_listed(
    tmp_path: Path, stage: int
) -> None:
    def with_more(name: str, content: dict[str, Any]) -> None:
        if "module" in content:
            content["module"] = OrderedDict(content["module"], state=b"recipe")
            content["module"].ema = torch.ones(2)
            content["module"]._metadata = {"": {"version": 1}}
            if stage == 0:
                content.pop("param_shapes", None)

    path = Zero(stage or 1, 2).write(tmp_path / "x", with_more)
    for file in path.glob("*optim_states.pt") if stage == 0 else ():
        file.unlink()
    _, catalog = opened(path)
    assert list(map(str, catalog.dropped)) == [
        "module._metadata (module versions, which torch recreates)",
        "attributes of mappings: module.ema",
        "module.state (not a tensor)",
        *(OF_OTHER_RANKS if stage == 3 else ()),
    ]


@pytest.mark.parametrize("stage", [1, 3])
def test_shared_parameters_are_aliases(tmp_path: Path, stage: int) -> None:
    store, catalog = opened(Zero(stage, 2, shared={"head": "embed"}).write(tmp_path / "x"))
    assert catalog.ties == {"head": "embed"}
    assert_holds(store, catalog, "head", values("embed", GROUPS[0]["embed"]))
    assert list(catalog.tensors).index("embed") < list(catalog.tensors).index("head")


@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_of_16_bits_become_float32(tmp_path: Path, stage: int) -> None:
    every_16_bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    buffers = {
        "all.bf16": every_16_bits.clone().view(torch.bfloat16),
        "all.fp16": every_16_bits.clone().view(torch.float16),
        "single": torch.tensor(1.5, dtype=torch.bfloat16),
        "many": torch.arange((1 << 20) + 7).bfloat16(),
        "full": torch.tensor([0.1, 0.2]),
        "count": torch.tensor(5),
        "mask": torch.tensor([True, False]),
    }
    store, catalog = opened(Zero(stage, 2, buffers=buffers).write(tmp_path / "x"))
    for key, tensor in buffers.items():
        is_nan = tensor != tensor  # how NaNs are widened is not DeepSpeed's to say
        wanted = tensor.float() if tensor.is_floating_point() else tensor
        meta = catalog.tensors[key]
        data = bytearray(tensor_bytes(catalog, store, key).tobytes())
        restored = torch.frombuffer(data, dtype=wanted.dtype).reshape(wanted.shape)
        assert (f"torch.{meta.dtype}", meta.shape) == (str(wanted.dtype), tuple(wanted.shape))
        assert torch.equal(restored[~is_nan], wanted[~is_nan]) and bool(
            (restored[is_nan] != restored[is_nan]).all()
        )


def test_client_state_with_tensors_is_carried(tmp_path: Path) -> None:
    store, catalog = opened(Zero(2, 2).write(tmp_path / "x"))
    leaf = catalog.objects["rng"].value
    assert isinstance(leaf, TensorLeaf)
    assert tensor_bytes(catalog, store, leaf.key).tobytes() == bytes(range(6))
    nested = catalog.objects["nested"].value
    assert isinstance(nested, dict) and nested["seeds"] == [1, 2]
    assert len(catalog.hidden) == 2
    assert catalog.iteration == 4  # global_steps, where the script says nothing


def test_an_elastic_checkpoint_has_its_states_in_a_list(tmp_path: Path) -> None:
    def elastic(name: str, content: dict[str, Any]) -> None:
        if name != MODEL:
            root = content["optimizer_state_dict"]
            root["base_optimizer_state"] = list(root["base_optimizer_state"]["state"].values())

    store, catalog = opened(Zero(1, 2).write(tmp_path / "x", elastic))
    assert_holds(store, catalog, "optimizer.state.norm.exp_avg", values("norm", (13,), "exp_avg"))
    assert not any("param_groups" in key for key in catalog.objects)


def test_a_checkpoint_of_bf16_optimizer_states_no_stage(tmp_path: Path) -> None:
    def bf16(name: str, content: dict[str, Any]) -> None:
        if name != MODEL:
            del content["optimizer_state_dict"]["zero_stage"]

    store, catalog = opened(Zero(1, 3, pads=True).write(tmp_path / "x", bf16))
    assert facet_of(catalog, ZeroFacts).stage == 1
    assert_holds(store, catalog, "wide", values("wide", (3, 11)))


def test_steps_may_be_numbers_or_one_element(tmp_path: Path) -> None:
    _, catalog = opened(Zero(2, 2, step=7).write(tmp_path / "number"))
    assert catalog.objects["optimizer.state.embed.step"].value == 7
    store, catalog = opened(Zero(3, 2, step=torch.tensor([7.0])).write(tmp_path / "vector"))
    assert_holds(store, catalog, "optimizer.state.embed.step", torch.tensor([7.0]))


def test_states_of_another_length_are_reported(tmp_path: Path) -> None:
    def factored(name: str, content: dict[str, Any]) -> None:
        if name != MODEL:
            for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                state["row"] = torch.ones(2, 3)

    _, catalog = opened(Zero(2, 2).write(tmp_path / "x", factored))
    assert len(catalog.dropped) == 2 and "'row' of flat group 0" in str(catalog.dropped[0])


def test_files_without_optimizer_state_still_give_weights(tmp_path: Path) -> None:
    def shrunk(name: str, content: dict[str, Any]) -> None:
        content.get("optimizer_state_dict", {}).pop("optimizer_state_dict", None)

    store, catalog = opened(Zero(3, 2).write(tmp_path / "x", shrunk))
    assert_holds(store, catalog, "deep", values("deep", (2, 3, 4)))
    assert len(catalog.tensors) == 7


def test_an_old_file_name_is_known(tmp_path: Path) -> None:
    folder = Zero(1, 2).write(tmp_path / "x")
    for path in folder.glob("*_optim_states.pt"):
        path.rename(path.with_name(path.name.replace("_optim_states", "optim_states")))
    assert len(opened(folder)[1].tensors) == 28


shapes = st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(max_examples=rounds(150), deadline=None)
@given(
    groups=st.lists(shapes, min_size=1, max_size=3),
    n_ranks=st.integers(1, 9),
    is_stage_3=st.booleans(),
)
def test_runs_cover_every_element_once_in_order(
    groups: list[list[tuple[int, ...]]], n_ranks: int, is_stage_3: bool
) -> None:
    named = [
        {f"{number}.{i}": shape for i, shape in enumerate(group)}
        for number, group in enumerate(groups)
    ]
    run = Zero(3 if is_stage_3 else 2, n_ranks, groups=named)
    flats = [
        (run._cut_3 if is_stage_3 else run._cut_12)(rank, "fp32")[0] for rank in range(n_ranks)
    ]
    sizes = [[len(flat) for flat in rank] for rank in flats]
    cut = (
        cut_parameters(named, sizes)
        if is_stage_3
        else cut_groups(plain_groups(named, n_ranks), sizes, alignment=None)
    )
    for group in named:
        for name, shape in group.items():
            runs = list(cut.runs(name))
            parts = [flats[run.rank][run.group][run.at : run.at + run.n] for run in runs]
            assert [run.start for run in runs] == [
                sum(run.n for run in runs[:i]) for i in range(len(runs))
            ]
            assert torch.equal(torch.cat(parts), values(name, shape).flatten())


def edit_optim(
    rank: int, change: Callable[[dict[str, Any]], None]
) -> Callable[[str, dict[str, Any]], None]:
    def edit(name: str, content: dict[str, Any]) -> None:
        if name == f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt":
            change(content["optimizer_state_dict"])

    return edit


def edit_model(change: Callable[[dict[str, Any]], None]) -> Callable[[str, dict[str, Any]], None]:
    def edit(name: str, content: dict[str, Any]) -> None:
        if name.endswith("model_states.pt"):
            change(content)

    return edit


def setting(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(entries)


def removing(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for name in names:
            del content[name]

    return change


def _slice(content: dict[str, Any]) -> None:
    content["param_slice_mappings"][0]["deep"]["start"] += 1


def _no_slice(content: dict[str, Any]) -> None:
    del content["param_slice_mappings"][0]["wide"]


def _short_state(content: dict[str, Any]) -> None:
    content["base_optimizer_state"]["state"][0]["exp_avg"] = torch.ones(3)


def _other_state(content: dict[str, Any]) -> None:
    content["base_optimizer_state"]["state"][0]["max_exp_avg_sq"] = torch.ones(3)


def _other_step(content: dict[str, Any]) -> None:
    content["base_optimizer_state"]["state"][1]["step"] = torch.tensor(5.0)


def _state_nowhere(content: dict[str, Any]) -> None:
    content["base_optimizer_state"]["state"][9] = {}


def _twice(content: dict[str, Any]) -> None:
    content["param_shapes"][1]["embed"] = content["param_shapes"][0]["embed"]


def _longer(content: dict[str, Any]) -> None:
    content["param_shapes"][0]["embed"] = torch.Size((70, 5))


def _negative(content: dict[str, Any]) -> None:
    content["param_shapes"][0]["embed"] = (-7, 5)


def _one_group(content: dict[str, Any]) -> None:
    content["param_shapes"] = content["param_shapes"][:1]


BROKEN: dict[str, tuple[int, Callable[[str, dict[str, Any]], None], type[Exception], str]] = {
    "no module": (2, edit_model(removing("module")), CorruptError, "'module' is missing"),
    "no shapes": (
        3,
        edit_model(setting(param_shapes=None)),
        CorruptError,
        "param_shapes, which ZeRO-3 needs, is missing",
    ),
    "shapes are text": (
        2,
        edit_model(setting(param_shapes="all")),
        CorruptError,
        "param_shapes is 'all', not a list",
    ),
    "shape is negative": (2, edit_model(_negative), CorruptError, "embed is .*-7.*, not a list"),
    "shape is longer": (
        2,
        edit_model(_longer),
        CorruptError,
        "need 408 elements, but the group's parts on 2 ranks have",
    ),
    "shape is longer, 3": (
        3,
        edit_model(_longer),
        CorruptError,
        "need .* elements per rank, but the flat groups have",
    ),
    "a group too few": (
        2,
        edit_model(_one_group),
        CorruptError,
        "param_shapes has 1 groups.*files have 2",
    ),
    "a group too few, 3": (3, edit_model(_one_group), CorruptError, "the flat groups have"),
    "a parameter twice": (1, edit_model(_twice), CorruptError, "is in two groups, 0 and 1"),
    "a parameter twice, 3": (3, edit_model(_twice), CorruptError, "in two groups"),
    "buffers are numbers": (
        2,
        edit_model(setting(buffer_names=[5])),
        CorruptError,
        "buffer_names contains an invalid name: 5",
    ),
    "shared is a list": (
        2,
        edit_model(setting(shared_params=["a"])),
        CorruptError,
        "shared_params is .*, not a dict",
    ),
    "frozen without fragments": (
        2,
        edit_model(setting(frozen_param_shapes={"base": (4,)})),
        MissingShardError,
        "but frozen_param_fragments does not contain it",
    ),
    "frozen of another size": (
        2,
        edit_model(
            setting(frozen_param_shapes={"b": (4,)}, frozen_param_fragments={"b": torch.ones(3)})
        ),
        CorruptError,
        r"has shape \(3,\), not \(4,\)",
    ),
    "frozen part of another size": (
        3,
        edit_model(
            setting(frozen_param_shapes={"b": (4,)}, frozen_param_fragments={"b": torch.ones(3)})
        ),
        CorruptError,
        r"part of the frozen parameter has shape \(3,\), not 2 elements",
    ),
    "tensor parallel": (
        2,
        edit_model(setting(mp_world_size=2)),
        MissingShardError,
        "model-parallel rank 1 are missing",
    ),
    "pipeline": (
        2,
        edit_model(setting(checkpoint_parallel_dimensions={"tp_degree": 1, "pp_degree": 2})),
        MissingShardError,
        "model-parallel rank 1 are missing",
    ),
    "AutoEP": (
        2,
        edit_model(setting(ds_autoep_layers=[{"num_experts": 4}])),
        UnsupportedError,
        "AutoEP",
    ),
    "two stages": (
        2,
        edit_optim(1, setting(zero_stage=1)),
        CorruptError,
        "from ZeRO-1, but rank 0's file",
    ),
    "stage 9": (2, edit_optim(1, setting(zero_stage=9)), CorruptError, "zero_stage is 9"),
    "stage is text": (
        2,
        edit_optim(1, setting(zero_stage="two")),
        CorruptError,
        "zero_stage is 'two', not a number",
    ),
    "no count": (
        2,
        edit_optim(1, removing("partition_count")),
        CorruptError,
        "partition_count is missing",
    ),
    "counts are empty": (
        2,
        edit_optim(1, setting(partition_count=[])),
        CorruptError,
        "partition_count is an empty",
    ),
    "another count": (
        2,
        edit_optim(0, setting(partition_count=[1, 1])),
        CorruptError,
        "records 1 ranks.*files from 2",
    ),
    "a count too high": (
        2,
        edit_optim(0, setting(partition_count=[3, 3])),
        MissingShardError,
        "rank 2 is missing",
    ),
    "counts differ": (
        2,
        edit_optim(0, setting(partition_count=[2, 1])),
        CorruptError,
        "does not belong to any expert that has a file",
    ),
    "no flat groups": (
        2,
        edit_optim(1, removing("single_partition_of_fp32_groups")),
        CorruptError,
        "single_partition_of_fp32_groups, which ZeRO-2 needs, is missing",
    ),
    "no flat groups, 3": (
        3,
        edit_optim(0, removing("fp32_flat_groups")),
        CorruptError,
        "fp32_flat_groups, which ZeRO-3 needs, is missing",
    ),
    "a group is not flat": (
        2,
        edit_optim(1, setting(single_partition_of_fp32_groups=[torch.ones(2, 2), torch.ones(2)])),
        CorruptError,
        "not a flat tensor",
    ),
    "a group is text": (
        2,
        edit_optim(1, setting(single_partition_of_fp32_groups=["x", torch.ones(2)])),
        CorruptError,
        "is 'x', not a plain tensor",
    ),
    "a group is shorter": (
        2,
        edit_optim(1, setting(single_partition_of_fp32_groups=[torch.ones(9), torch.ones(10)])),
        CorruptError,
        "need 93 elements, but the group's parts on 2 ranks have",
    ),
    "ranks differ in groups": (
        2,
        edit_optim(
            1, setting(single_partition_of_fp32_groups=[torch.ones(9)], param_slice_mappings=None)
        ),
        CorruptError,
        "flat group",
    ),
    "ranks differ in size, 3": (
        3,
        edit_optim(1, setting(fp32_flat_groups=[torch.ones(9), torch.ones(9)])),
        CorruptError,
        "rank 1's flat groups have",
    ),
    "a slice is elsewhere": (
        2,
        edit_optim(0, _slice),
        CorruptError,
        "to the shapes of the preceding parameters, this rank has",
    ),
    "a slice is missing": (
        2,
        edit_optim(1, _no_slice),
        CorruptError,
        "does not list the parameter",
    ),
    "a state is short": (
        2,
        edit_optim(1, _short_state),
        CorruptError,
        "has 3 elements, but its weights have",
    ),
    "a state of one rank": (2, edit_optim(1, _other_state), CorruptError, "rank 1 has the states"),
    "a state of no group": (
        2,
        edit_optim(1, _state_nowhere),
        CorruptError,
        "has an entry 9, but there are 2",
    ),
    "steps differ": (
        2,
        edit_optim(1, _other_step),
        ReplicaMismatchError,
        "'step' differs from rank 0's",
    ),
    "gaps for another group": (
        2,
        edit_optim(0, setting(param_alignment_paddings=[[0], [0, 0, 0]])),
        CorruptError,
        "group 0 has 4 parameters, but 1 alignment paddings",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named(tmp_path: Path, case: str) -> None:
    stage, edit, kind, message = BROKEN[case]
    folder = Zero(stage, 2).write(tmp_path / "x", edit)
    with pytest.raises(kind, match=message) as caught:
        deepspeed.read(LocalStore(folder))
    assert caught.value.file is not None  # type: ignore[attr-defined]
    assert caught.value.exit_code in (3, 4)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_rank_is_named(tmp_path: Path, stage: int, rank: int) -> None:
    folder = Zero(stage, 3).write(tmp_path / "x")
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    (folder / name).unlink()
    with pytest.raises(MissingShardError, match=f"rank {rank} is missing") as caught:
        deepspeed.read(LocalStore(folder))
    assert caught.value.file == name


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_model_file_of_zero_3_is_named(tmp_path: Path, rank: int) -> None:
    folder = Zero(3, 3).write(tmp_path / "x")
    name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    (folder / name).unlink()
    with pytest.raises(MissingShardError, match=f"rank {rank} is missing") as caught:
        deepspeed.read(LocalStore(folder))
    assert caught.value.file == name


def test_a_missing_model_file_is_named(tmp_path: Path) -> None:
    folder = Zero(2, 2).write(tmp_path / "x")
    (folder / MODEL).unlink()
    with pytest.raises(
        MissingShardError, match=r"\*_model_states\.pt, which names the parameters, is missing"
    ):
        deepspeed.read(LocalStore(folder))
    Zero(3, 2).write(tmp_path / "y")
    for path in folder.iterdir():
        (tmp_path / "y" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(MissingShardError, match="the ZeRO-2 model file is missing"):
        deepspeed.read(LocalStore(tmp_path / "y"))


def test_missing_optimizer_files_are_named(tmp_path: Path) -> None:
    folder = Zero(2, 2).write(tmp_path / "x")
    for path in folder.glob("*_optim_states.pt"):
        path.unlink()
    with pytest.raises(MissingShardError, match="which contain the fp32 weights"):
        deepspeed.read(LocalStore(folder))


def test_files_of_an_older_run_are_not_taken_for_ranks(tmp_path: Path) -> None:
    folder = Zero(2, 3).write(tmp_path / "x")
    Zero(2, 2).write(folder)
    with pytest.raises(
        CorruptError, match="an older run|there are 2 ranks, but there are files of 3"
    ):
        deepspeed.read(LocalStore(folder))
    (folder / RANK_1).rename(folder / f"bf16_{RANK_1}")
    with pytest.raises(CorruptError, match="from two runs"):
        deepspeed.read(LocalStore(folder))


def test_states_on_nvme_are_refused_by_name(tmp_path: Path) -> None:
    folder = Zero(2, 2).write(tmp_path / "x")
    (folder / "offloaded_tensors").mkdir()
    (folder / "offloaded_tensors" / "rank00").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="offloaded to NVMe") as caught:
        deepspeed.read(LocalStore(folder))
    assert "cannot convert this checkpoint" in (caught.value.hint or "")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = Zero(2, 2).write(tmp_path / "x")
    data = (folder / RANK_1).read_bytes()
    (folder / RANK_1).write_bytes(data[: len(data) // 2])
    with pytest.raises((TruncatedError, CorruptError)) as caught:
        deepspeed.read(LocalStore(folder))
    assert caught.value.file == RANK_1


def test_a_parameter_called_like_another_entry_is_refused(tmp_path: Path) -> None:
    folder = Zero(1, 2, groups=({"lr_scheduler": (4,)},)).write(tmp_path / "x")
    with pytest.raises(CorruptError, match="have the same name") as caught:
        deepspeed.read(LocalStore(folder))
    assert caught.value.key == "lr_scheduler"
