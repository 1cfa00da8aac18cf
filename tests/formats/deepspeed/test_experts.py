"""DeepSpeed's files of experts: what DeepSpeed wrote, against the live engine, and broken files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CheckpointingException, CorruptError, MissingShardError
from core.files.store import LocalStore
from core.formats.deepspeed import format as deepspeed
from core.formats.deepspeed.universal.format import for_universal
from core.verbs.convert.contract import check_reading
from tests.formats.deepspeed.deepspeed_samples import MODEL, Zero, written
from tests.support.deepspeed_files import edited
from tests.support.materialize import tensor_bytes
from tests.support.rounds import rounds

EXPERT_1 = "layer_0_expert_1_mp_rank_00_model_states.pt"
SHARDED = ("moe_zero1", "moe_zero2_two_sizes", "moe_zero1_data_first")


def plain_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("case", [*SHARDED, "moe_zero0"])
def test_every_expert_is_that_of_the_live_engine(deepspeed_parallel: Path, case: str) -> None:
    store = LocalStore(deepspeed_parallel / case / "global_step2")
    catalog = deepspeed.read(store)
    truth = torch.load(deepspeed_parallel / case / "truth.pt", weights_only=True)
    weights = {key for key in catalog.tensors if not key.startswith("optimizer.")}
    assert weights == {*truth, "scale"}
    for name, states in truth.items():
        for state, wanted in states.items():
            is_weight = state in ("fp32", "bf16")
            key = name if is_weight else f"optimizer.state.{name}.{state}"
            assert catalog.tensors[key].shape == tuple(wanted.shape), key
            assert tensor_bytes(catalog, store, key).tobytes() == plain_bytes(wanted), key


def test_settings_name_the_experts_of_all_ranks(deepspeed_parallel: Path) -> None:
    catalog = deepspeed.read(LocalStore(deepspeed_parallel / "moe_zero1" / "global_step2"))
    names = catalog.objects["optimizer.param_groups.3.params"].value
    assert sorted(names) == sorted(
        name for name in catalog.tensors if "deepspeed_experts" in name and name.endswith(".bias")
        and not name.startswith("optimizer.")
    )  # fmt: skip
    assert len(names) == 6 and catalog.objects["optimizer.param_groups.3.moe"].value is True


def test_zero_0_keeps_the_optimizer_of_every_expert_parallel_rank(deepspeed_parallel: Path) -> None:
    folder = deepspeed_parallel / "moe_zero0" / "global_step2"
    store = LocalStore(folder)
    catalog = deepspeed.read(store)
    for rank in (0, 1):
        path = folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
        root = torch.load(path, weights_only=False)["optimizer"]
        states = root["optimizer_state_dict"]["state"]
        assert len(states) == 10
        for number, state in states.items():
            prefix = f"optimizer.expert_parallel_rank_{rank}.optimizer_state_dict.state.{number}"
            for name, wanted in state.items():
                values = tensor_bytes(catalog, store, f"{prefix}.{name}")
                assert values.tobytes() == plain_bytes(wanted)


def test_the_order_of_ranks_is_found_without_the_configuration(
    deepspeed_parallel: Path, tmp_path: Path
) -> None:
    def forget(name: str, content: Any) -> None:
        if name == MODEL:
            content["ds_config"] = None

    for case in SHARDED:
        source = deepspeed_parallel / case / "global_step2"
        store = edited(source, tmp_path / case, forget)
        expected = deepspeed.read(LocalStore(source))
        catalog = deepspeed.read(store)
        for key in expected.tensors:
            assert (
                tensor_bytes(catalog, store, key).tobytes()
                == tensor_bytes(expected, LocalStore(source), key).tobytes()
            )


def _exchange(name: str, content: Any) -> None:
    if name == MODEL:
        content["ds_config"]["use_data_before_expert_parallelism"] = False


def _rename(name: str, content: Any) -> None:
    if name == EXPERT_1:
        key = next(iter(content))
        content[key.replace("experts.1.", "experts.2.")] = content.pop(key)


def _duplicate(name: str, content: Any) -> None:
    if name == MODEL:
        key = "body.0.deepspeed_moe.experts.deepspeed_experts.1.up.weight"
        content["module"][key] = torch.zeros(6, 8)


def _reshape(name: str, content: Any) -> None:
    if name == EXPERT_1:
        key = "body.0.deepspeed_moe.experts.deepspeed_experts.1.up.weight"
        content[key] = content[key].T.contiguous()


BROKEN = {
    "experts of another rank": (_exchange, "do not match its rounded master weights"),
    "an expert in another's file": (_rename, "does not belong to expert 1"),
    "an expert twice": (_duplicate, "another file also contains"),
    "another shape": (_reshape, "but the expert's file has"),
}


@pytest.mark.parametrize("contradiction", BROKEN)
def test_what_contradicts_itself_is_refused(
    deepspeed_parallel: Path, tmp_path: Path, contradiction: str
) -> None:
    change, message = BROKEN[contradiction]
    case = "moe_zero1_data_first" if change is _exchange else "moe_zero1"
    store = edited(deepspeed_parallel / case / "global_step2", tmp_path / "x", change)
    with pytest.raises(CorruptError, match=message):
        deepspeed.read(store)


@pytest.mark.parametrize(
    ("count", "message"),
    [(3, "among 3 of 4 ranks"), (2, "does not belong to any expert that has a file")],
)
def test_only_groups_of_experts_have_fewer_ranks(tmp_path: Path, count: int, message: str) -> None:
    def change(name: str, content: dict[str, Any]) -> None:
        if "optim_states" in name:
            content["optimizer_state_dict"]["partition_count"] = [4, count]

    with pytest.raises(CorruptError, match=message):
        deepspeed.read(LocalStore(Zero(2, 4).write(tmp_path / "x", change)))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("moe_zero1", EXPERT_1),
        ("moe_zero1", "layer_1_expert_1_mp_rank_00_model_states.pt"),
        ("moe_zero1", "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"),
        ("moe_zero0", "layer_0_expert_3_mp_rank_00_model_states.pt"),
        ("moe_zero0", "expp_rank_0_mp_rank_00_optim_states.pt"),
    ],
)
def test_a_missing_file_is_named(
    deepspeed_parallel: Path, tmp_path: Path, case: str, name: str
) -> None:
    shutil.copytree(deepspeed_parallel / case / "global_step2", tmp_path / "x")
    (tmp_path / "x" / name).unlink()
    with pytest.raises(MissingShardError) as caught:
        deepspeed.read(LocalStore(tmp_path / "x"))
    assert caught.value.file == name


@pytest.mark.parametrize("case", ["moe_zero1", pytest.param("moe_zero0", marks=pytest.mark.long)])
def test_damage_is_an_error_of_ours(deepspeed_parallel: Path, tmp_path: Path, case: str) -> None:
    check_reading(
        deepspeed.FORMAT,
        deepspeed_parallel / case / "global_step2",
        tmp_path / "damaged",
        n_flips=rounds(50),
    )


def test_a_universal_checkpoint_has_global_numbers(
    deepspeed_parallel: Path, tmp_path: Path
) -> None:
    store = LocalStore(deepspeed_parallel / "moe_zero1" / "global_step2")
    catalog = for_universal(deepspeed.read(store))
    folder = next(written(catalog, store, tmp_path / "ucp").glob("*_universal"))
    truth = torch.load(deepspeed_parallel / "moe_zero1" / "truth.pt", weights_only=True)
    for name, states in truth.items():
        for state, wanted in states.items():
            content = torch.load(folder / "zero" / name / f"{state}.pt", weights_only=True)
            assert torch.equal(content["param"], wanted)


def test_model_parallel_experts_are_refused(deepspeed_parallel: Path, tmp_path: Path) -> None:
    shutil.copytree(deepspeed_parallel / "moe_zero1" / "global_step2", tmp_path / "x")
    path = tmp_path / "x" / EXPERT_1
    path.rename(path.with_name(EXPERT_1.replace("mp_rank_00", "mp_rank_01")))
    with pytest.raises(CheckpointingException, match="files from several model-parallel ranks"):
        deepspeed.read(LocalStore(tmp_path / "x"))
