"""Pipeline stages and tensor-parallel ranks of DeepSpeed, against its own ds_to_universal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    ReplicaMismatchError,
    UnsupportedError,
)
from core.files.store import LocalStore
from core.formats.deepspeed import format as deepspeed
from core.formats.deepspeed.model_parallel.rules import TensorParallelRules
from core.formats.deepspeed.universal.format import for_universal
from core.verbs.checks.finding import Level
from core.verbs.convert.contract import check_reading
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from core.verbs.validate.run import validate
from tests.formats.deepspeed.deepspeed_samples import Zero, written
from tests.support.deepspeed_files import edited
from tests.support.materialize import tensor_bytes
from tests.support.rounds import rounds

CASES = ("pipeline_zero1", "pipeline_tp2_zero1", "autotp_zero1", "autotp_zero3")
HINT = "universal_checkpoint_info"


def plain_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def truth_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Parameter → file → what ds_to_universal wrote there."""
    truth: dict[str, dict[str, Any]] = torch.load(folder / "truth.pt", weights_only=True)
    return truth


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_ds_to_universal(deepspeed_parallel: Path, case: str) -> None:
    store = LocalStore(deepspeed_parallel / case / "global_step2")
    catalog = deepspeed.read(store)
    truth = truth_of(deepspeed_parallel / case)
    assert {key for key in catalog.tensors if not key.startswith("optimizer.")} == set(truth)
    for name, files in truth.items():
        for state, content in files.items():
            key = name if state == "fp32" else f"optimizer.state.{name}.{state}"
            wanted = content["param"] if isinstance(content, dict) else content
            assert catalog.tensors[key].shape == tuple(wanted.shape), key
            assert tensor_bytes(catalog, store, key).tobytes() == plain_bytes(wanted), key


@pytest.mark.parametrize("case", CASES)
def test_a_universal_checkpoint_records_the_cuts_of_ds_to_universal(
    deepspeed_parallel: Path, tmp_path: Path, case: str
) -> None:
    store = LocalStore(deepspeed_parallel / case / "global_step2")
    root = written(for_universal(deepspeed.read(store)), store, tmp_path / "ucp")
    folder = next(root.glob("*_universal")) / "zero"
    truth = truth_of(deepspeed_parallel / case)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(truth)
    for name, files in truth.items():
        for state, content in files.items():
            loaded = torch.load(folder / name / f"{state}.pt", weights_only=True)
            if not isinstance(content, dict):
                assert torch.equal(loaded, content)
                continue
            assert torch.equal(loaded.pop("param"), content["param"])
            assert loaded == {key: value for key, value in content.items() if key != "param"}


def test_the_settings_name_the_parameters_of_all_stages(deepspeed_parallel: Path) -> None:
    catalog = deepspeed.read(LocalStore(deepspeed_parallel / "pipeline_zero1" / "global_step2"))
    names = [catalog.objects[f"optimizer.param_groups.{n}.params"].value for n in (0, 1)]
    trained = {name for group in names for name in group}
    assert trained == {key for key in catalog.tensors if not key.startswith("optimizer.")}
    assert len(trained) == sum(map(len, names))
    assert catalog.objects["optimizer.param_groups.1.weight_decay"].value == 0.0


def of_info(name: str, value: object) -> Callable[[str, Any], None]:
    """Change an entry of universal_checkpoint_info; remove it if the value is None."""

    def change(file: str, content: Any) -> None:
        info = content.get(HINT)
        if info is not None:
            info[name] = value
            if value is None:
                del info[name]

    return change


def forget(file: str, content: Any) -> None:
    content.pop(HINT, None)


def test_without_patterns_tensor_parallel_ranks_are_refused(
    deepspeed_parallel: Path, tmp_path: Path
) -> None:
    source = deepspeed_parallel / "pipeline_tp2_zero1" / "global_step2"
    with pytest.raises(UnsupportedError, match=f"have no {HINT}"):
        deepspeed.read(edited(source, tmp_path / "x", forget))


def test_without_patterns_a_pipeline_keeps_its_padding(
    deepspeed_parallel: Path, tmp_path: Path
) -> None:
    source = deepspeed_parallel / "pipeline_zero1" / "global_step2"
    store = edited(source, tmp_path / "x", forget)
    catalog = deepspeed.read(store)
    name = "tied_modules.embed.weight"
    assert catalog.tensors[name].shape == (12, 8)
    wanted = truth_of(deepspeed_parallel / "pipeline_zero1")[name]["fp32"]["param"]
    assert tensor_bytes(catalog, store, name).tobytes().startswith(plain_bytes(wanted))


def _older(file: str, content: Any) -> None:
    content.pop("checkpoint_parallel_dimensions", None)


def test_sizes_are_found_where_they_are_not_recorded(
    deepspeed_parallel: Path, tmp_path: Path
) -> None:
    for case in ("pipeline_tp2_zero1", "autotp_zero1"):
        store = edited(deepspeed_parallel / case / "global_step2", tmp_path / case, _older)
        assert set(truth_of(deepspeed_parallel / case)) <= set(deepspeed.read(store).tensors)


def _frozen(file: str, content: Any) -> None:
    if file.startswith("layer_04-"):
        content["frozen"] = torch.arange(3.0, dtype=torch.bfloat16)


def test_what_is_no_tensor_in_a_file_of_a_layer_is_listed(
    deepspeed_parallel: Path, tmp_path: Path
) -> None:
    def with_state(file: str, content: Any) -> None:
        if file.startswith("layer_01"):
            content["_extra_state"] = b"recipe"

    source = deepspeed_parallel / "pipeline_zero1" / "global_step2"
    catalog = deepspeed.read(edited(source, tmp_path / "x", with_state))
    assert list(map(str, catalog.dropped)) == ["1._extra_state (not a tensor)"]


def test_what_only_files_of_layers_contain_is_read_with_a_note(
    deepspeed_parallel: Path, tmp_path: Path
) -> None:
    store = edited(deepspeed_parallel / "pipeline_zero1" / "global_step2", tmp_path / "x", _frozen)
    catalog = deepspeed.read(store)
    data = tensor_bytes(catalog, store, "4.frozen").tobytes()
    assert data == plain_bytes(torch.arange(3.0, dtype=torch.bfloat16))
    assert any("4.frozen" in note for note in catalog.notes)


REPLICATED = "tp_replicated_parameter_patterns"
BROKEN: dict[str, tuple[Callable[[str, Any], None], type[CheckpointingException], str]] = {
    "averages": (
        of_info("parameter_to_average_patterns", [r"4.weight"]),
        UnsupportedError,
        "must be averaged",
    ),
    "shards called replicas": (
        of_info(REPLICATED, [r"\d+.gate_up.weight"]),
        ReplicaMismatchError,
        "differs between tensor-parallel ranks",
    ),
    "a pattern that takes forever": (
        of_info(REPLICATED, [r"(a+)+$"]),
        UnsupportedError,
        "too complex",
    ),
    "no pattern": (of_info(REPLICATED, ["("]), CorruptError, "not a valid regular"),
    "a vocabulary of more rows": (
        of_info("original_vocab_size", 13),
        CorruptError,
        "but the parameter has 12 rows",
    ),
    "an axis that a vector lacks": (
        of_info("parameter_with_row_parallelism_patterns", [r"\d+.gate_up.bias"]),
        CorruptError,
        "the shard shapes",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_contradicts_itself_is_refused(
    deepspeed_parallel: Path, tmp_path: Path, case: str
) -> None:
    change, kind, message = BROKEN[case]

    def changes(file: str, content: Any) -> None:
        change(file, content)
        if case == "an axis that a vector lacks":
            of_info("parameter_with_2_sub_params_cat_dim_0", None)(file, content)

    source = deepspeed_parallel / "pipeline_tp2_zero1" / "global_step2"
    with pytest.raises(kind, match=message):
        deepspeed.read(edited(source, tmp_path / "x", changes))


@pytest.mark.parametrize(
    ("case", "pattern", "missing"),
    [
        ("pipeline_tp2_zero1", "*mp_rank_01*", "rank_01"),
        ("pipeline_tp2_zero1", "*mp_rank_03*", "rank_03"),
        (
            "pipeline_tp2_zero1",
            "layer_02-model_01*",
            "layer 2 has files for 1 tensor-parallel rank (0)",
        ),
        ("autotp_zero3", "*mp_rank_01*", "rank_01"),
        ("autotp_zero3", "zero_pp_rank_1_mp_rank_01_model_states.pt", "rank_01"),
        ("pipeline_zero1", "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt", "rank_01"),
    ],
)
def test_a_missing_rank_is_named(
    deepspeed_parallel: Path, tmp_path: Path, case: str, pattern: str, missing: str
) -> None:
    shutil.copytree(deepspeed_parallel / case / "global_step2", tmp_path / "x")
    for path in (tmp_path / "x").glob(pattern):
        path.unlink()
    with pytest.raises((MissingShardError, CorruptError)) as caught:
        deepspeed.read(LocalStore(tmp_path / "x"))
    assert missing in str(caught.value)


def test_model_parallel_ranks_of_zero_without_optimizer_files_are_refused(tmp_path: Path) -> None:
    folder = Zero(2, 2).write(tmp_path / "x")
    for path in folder.glob("*optim_states.pt"):
        path.unlink()
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    with pytest.raises(MissingShardError, match="optimizer files") as caught:
        deepspeed.read(LocalStore(folder))
    with pytest.raises(UnsupportedError):  # nothing says how the ranks' parameters are joined
        deepspeed.read_weights(LocalStore(folder))
    assert "--no-optim" not in (caught.value.hint or "")


@pytest.mark.parametrize("lost", ["*optim_states.pt", "*mp_rank_01_optim_states.pt"])
@pytest.mark.parametrize("case", ["pipeline_zero1", "pipeline_tp2_zero1"])
def test_the_weights_alone_are_offered_where_they_can_be_read(
    deepspeed_parallel: Path, tmp_path: Path, case: str, lost: str
) -> None:
    shutil.copytree(deepspeed_parallel / case / "global_step2", tmp_path / "x")
    for path in (tmp_path / "x").glob(lost):
        path.unlink()
    with pytest.raises(MissingShardError) as caught:
        deepspeed.read(LocalStore(tmp_path / "x"))
    assert "--no-optim" in (caught.value.hint or "")
    assert deepspeed.read_weights(LocalStore(tmp_path / "x")).tensors


def test_damage_is_an_error_of_ours(deepspeed_parallel: Path, tmp_path: Path) -> None:
    source = deepspeed_parallel / "pipeline_zero1" / "global_step2"
    check_reading(deepspeed.FORMAT, source, tmp_path / "damaged", n_flips=rounds(50))


def test_fused_sub_parameters_are_divided_by_their_widths() -> None:
    # Q of 6 and K, V of 3 rows, on two ranks that have 4, 2, 2 and 2, 1, 1 of them.
    sub = {"patterns": ["qkv"], "shape": ((6, 3, 3), -1), "partition_dim": 0}
    widths = [[4, 2], [2, 1], [2, 1]]
    info = {"parameter_with_sub_params": [sub], "sub_param_shard_widths": {"qkv": widths}}
    plan = TensorParallelRules("file", info).plan("qkv.weight", [(8, 5), (4, 5)])
    full = torch.arange(60).reshape(12, 5)
    parts = full.split([6, 3, 3])
    shards = [
        torch.cat([part.split(width)[rank] for part, width in zip(parts, widths, strict=True)])
        for rank in (0, 1)
    ]
    result = torch.full(plan.shape, -1)
    for piece in plan.pieces:
        (row, _), (n, _), to = piece.box.offset, piece.box.shape, piece.to[0]
        result[to : to + n] = shards[piece.tp_rank][row : row + n]
    assert torch.equal(result, full)
    assert plan.extras == {"sub_param_shape": sub}


def save_with_a_replica_that_differs(folder: Path, *states: str) -> Path:
    """Save two tensor-parallel ranks with equal parameters but for an element of some states."""
    # More than the first bytes of the parameter that opening compares.
    groups = ({"embed": (1 << 15,)}, {"bias": (5,)})
    info = {REPLICATED: [".*"], "universal_checkpoint_version": 0.2}
    sizes = {"tp_degree": 2, "pp_degree": 1}
    for rank in (1, 0):

        def change(name: str, content: dict[str, Any], rank: int = rank) -> None:
            if name == "mp_rank_00_model_states.pt":
                content |= {HINT: info, "checkpoint_parallel_dimensions": sizes, "mp_world_size": 2}
            elif rank:
                optimizer = content["optimizer_state_dict"]
                moments = optimizer["base_optimizer_state"]["state"][0]
                masters = optimizer["single_partition_of_fp32_groups"][0]
                for state in states:
                    (masters if state == "fp32" else moments[state])[-1] += 1

        Zero(1, 1, groups).write(folder, change)
        for path in list(folder.glob("*mp_rank_00*")) if rank else []:
            path.rename(path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))
    return folder


@pytest.mark.parametrize("states", [("exp_avg",), ("exp_avg", "exp_avg_sq"), ("exp_avg", "fp32")])
def test_moments_that_differ_alone_leave_the_weights(
    tmp_path: Path, states: tuple[str, ...]
) -> None:
    folder = save_with_a_replica_that_differs(tmp_path / "run", *states)
    hints = {
        item.hint or ""
        for item in validate(folder, level=Level.DEEP).findings
        if item.code == "CK720"
    }
    has_weights = "fp32" not in states
    assert [
        "the weights do not differ, so you can convert with --no-optim" in hint for hint in hints
    ] == [has_weights]
    with pytest.raises(ReplicaMismatchError) as caught:
        run(Job(src=folder, dst=tmp_path / "a", to="torch", fsync=False))
    hint = caught.value.hint or ""
    assert "config.json" not in hint and "--exclude" not in hint
    # What the hints say leads on, and is said only where it does.
    assert ("--no-optim" in hint) == (".exp_avg" in (caught.value.key or ""))
    if has_weights:
        run(Job(src=folder, dst=tmp_path / "b.pt", to="torch", optim="drop", fsync=False))
        assert torch.load(tmp_path / "b.pt")["embed"].numel() == 1 << 15


def test_replicas_are_compared_to_their_last_element(tmp_path: Path) -> None:
    folder = save_with_a_replica_that_differs(tmp_path / "run", "fp32")
    (finding,) = [
        item for item in validate(folder, level=Level.DEEP).findings if item.code == "CK720"
    ]
    assert finding.key == "embed" and "1 of 32768 elements differ" in finding.message
    with pytest.raises(ReplicaMismatchError, match="embed"):
        run(Job(src=folder, dst=tmp_path / "ucp", to="ucp", fsync=False))
    assert not (tmp_path / "ucp").exists()


REPLICATED = "tp_replicated_parameter_patterns"


@pytest.mark.parametrize("patterns", [None, []])
def test_what_is_the_same_on_all_ranks_is_taken_once_where_no_pattern_says_so(
    deepspeed_parallel: Path, tmp_path: Path, patterns: object
) -> None:
    source = deepspeed_parallel / "pipeline_tp2_zero1" / "global_step2"
    store = edited(source, tmp_path / "x", of_info(REPLICATED, patterns))
    catalog = deepspeed.read(store)
    for name, files in truth_of(source.parent).items():
        wanted = files["fp32"]["param"]
        assert catalog.tensors[name].shape == tuple(wanted.shape), name
        assert tensor_bytes(catalog, store, name).tobytes() == plain_bytes(wanted), name
    (note,) = [note for note in catalog.notes if "one copy is used" in note]
    assert "1.bias and 10 more" in note


def test_a_bias_of_a_row_parallel_layer_that_differs_between_ranks_is_refused(
    tmp_path: Path,
) -> None:
    store = two_tensor_ranks(tmp_path, {"row.weight": (4, 3), "row.bias": (4,)}, {"row.bias"})
    with pytest.raises(ReplicaMismatchError, match="differs between tensor-parallel ranks"):
        deepspeed.read(store)


SHARDS = {
    "column.weight": (6, 4),
    "column.bias": (6,),
    "row.weight": (4, 3),
    "row.bias": (4,),
    "norm.weight": (4,),
    "router": (5, 4),
    "heads": (2,),
}


@pytest.mark.parametrize("stated", [None, "arguments", "config.json", "../config.json", "text"])
def test_neighbours_and_the_hidden_size_decide_before_the_values(
    tmp_path: Path, stated: str | None
) -> None:
    """Biases start as zeros, so that those of a column-parallel layer are equal as well."""
    different = {"column.weight", "row.weight"}
    folder = tmp_path / "checkpoint-2/global_step2"
    folder.mkdir(parents=True)
    store = two_tensor_ranks(
        folder, SHARDS, different, hidden_size=4 if stated == "arguments" else None
    )
    if stated not in (None, "arguments"):
        config: dict[str, object] = {"hidden_size": 4}
        if stated == "text":  # of a composite model, which states that of a tower as well
            config = {"hidden_size": 6, "text_config": config}
        name = "config.json" if stated == "text" else stated
        (folder / str(name)).write_text(json.dumps(config))
    shapes = {key: tensor.shape for key, tensor in deepspeed.read(store).tensors.items()}
    assert {name: shapes[name] for name in SHARDS} == {
        "column.weight": (12, 4),
        "column.bias": (12,),
        "row.weight": (4, 6),
        "row.bias": (4,),
        "norm.weight": (4,),
        "router": (5, 4),
        "heads": (2,) if stated is None else (4,),
    }


def two_tensor_ranks(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    different: set[str],
    hidden_size: int | None = None,
) -> LocalStore:
    """Write two tensor-parallel ranks whose only pattern is that of row-parallel weights.

    Args:
        shapes: name → shape of the shard.
        different: parameters that are not the same on both ranks.
    """
    for tp_rank in range(2):
        # A group for each parameter, so that masters are edited by their number.
        zero = Zero(1, 1, groups=[{name: shape} for name, shape in shapes.items()])
        for file, content in zero.files().items():
            if file.endswith("model_states.pt"):
                content[HINT] = {"parameter_with_row_parallelism_patterns": ["row.weight"]}
                content["checkpoint_parallel_dimensions"] = {"tp_degree": 2, "pp_degree": 1}
                content["args"] = {} if hidden_size is None else {"hidden_size": hidden_size}
            else:
                masters = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
                for name, master in zip(shapes, masters, strict=True):
                    master += 1000 * tp_rank if name in different else 0
            torch.save(content, folder / file.replace("mp_rank_00", f"mp_rank_0{tp_rank}"))
    return LocalStore(folder)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("pipeline_zero1", "mp_rank_01_model_states.pt"),
        ("autotp_zero1", "mp_rank_01_model_states.pt"),
        ("autotp_zero3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ],
)
def test_what_only_another_rank_has_is_listed(
    deepspeed_parallel: Path, tmp_path: Path, case: str, name: str
) -> None:
    def change(file: str, state: dict[str, Any]) -> None:
        if file == name:
            state["global_samples"] += 1
            state["cuda_rng_state"] = torch.arange(4, dtype=torch.uint8)

    source = deepspeed_parallel / case / "global_step2"
    edited(source, tmp_path / "run", change)
    for path, expected in (
        (tmp_path / "run", {"global_samples of other ranks", "cuda_rng_state of other ranks"}),
        (source, set()),
    ):
        report = run(Job(src=path, dst=tmp_path / "out", to="torch", fsync=False, force=True))
        listed = {line.partition(" (")[0] for line in report.dropped if "other ranks" in line}
        assert listed == expected
