"""Optimizer states beside their parameters in trees of global tensors: what becomes of one becomes
of the other.

Two forms: FSDP2's (``app.optim.state.<parameter>.exp_avg``), written by torch, and Megatron's
(``optimizer.state.exp_avg.<parameter>``), as conversions of Megatron checkpoints to DCP have it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.errors import UsageError
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.tables import load_rules
from core.opening.objects import loaded
from core.opening.open import open_checkpoint
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.support.real_readers import Tensors, read_dcp

FSDP = "torch_dcp/fsdp2_dp2"
MEGATRON = "mcore_legacy/dense_gqa/tp2_pp1_optim"
NAMES = {
    FSDP: ("app.model.model.", "app.optim.state.model.{}.{}", "app.optim.param_groups.0.params"),
    MEGATRON: (
        "model.decoder.",
        "optimizer.state.{1}.decoder.{0}",
        "optimizer.param_groups.0.params",
    ),
}


def convert_to_dcp(
    golden: Path, tmp_path: Path, source: str, **options: Any
) -> tuple[Tensors, dict[str, Any], tuple[str, ...]]:
    """A conversion to DCP, as torch reads it: tensors, other entries, and the notes."""
    report = run(Job(src=golden / source, dst=tmp_path / "out", to="dcp", fsync=False, **options))
    checkpoint = open_checkpoint(tmp_path / "out")
    catalog = loaded(checkpoint.catalog, checkpoint.store)
    return (
        read_dcp(tmp_path / "out"),
        {key: item.value for key, item in catalog.objects.items()},
        report.notes,
    )


def states_of(source: str, param: str, keys: Tensors) -> list[str]:
    """The keys of a parameter's states."""
    states = ("exp_avg", "exp_avg_sq", "fp32_param", "step")
    wanted = {NAMES[source][1].format(param, state) for state in states}
    return [key for key in keys if key in wanted]


PARAM = {FSDP: "layers.1.mlp.up_proj.weight", MEGATRON: "layers.1.mlp.linear_fc1.weight"}
N_STATES = {FSDP: 3, MEGATRON: 3}


@pytest.mark.parametrize("source", [FSDP, MEGATRON])
def test_states_are_carried_bit_for_bit(golden: Path, tmp_path: Path, source: str) -> None:
    tensors, objects, _ = convert_to_dcp(golden, tmp_path, source)
    assert len(states_of(source, PARAM[source], tensors)) == N_STATES[source]
    if source == FSDP:
        assert tensors == read_dcp(golden / FSDP)
    params = objects[NAMES[source][2]]
    assert any(str(name).endswith(PARAM[source]) for name in params)


@pytest.mark.parametrize("source", [FSDP, MEGATRON])
def test_a_parameter_that_is_excluded_takes_its_states_along(
    golden: Path, tmp_path: Path, source: str
) -> None:
    before, objects_before, _ = convert_to_dcp(golden, tmp_path / "a", source)
    glob = NAMES[source][0] + "layers.1.*"
    if source == MEGATRON:
        glob = glob.removeprefix("model.")
    after, objects, _ = convert_to_dcp(golden, tmp_path / "b", source, exclude=(glob,))
    assert not any("layers.1." in key for key in after)
    assert set(before) - set(after) == {key for key in before if "layers.1." in key}
    group = NAMES[source][2]
    assert objects[group] == [name for name in objects_before[group] if "layers.1." not in name]


def test_states_can_be_left_out_alone(golden: Path, tmp_path: Path) -> None:
    before, objects_before, _ = convert_to_dcp(golden, tmp_path / "a", FSDP)
    after, objects, _ = convert_to_dcp(
        golden, tmp_path / "b", FSDP, exclude=("*.layers.1.*.exp_avg_sq",)
    )
    assert len(before) - len(after) == 9
    assert objects == objects_before


@pytest.mark.each_value
@pytest.mark.parametrize("source", [FSDP, MEGATRON])
@pytest.mark.parametrize(
    "glob",
    [
        None,
        "*",
        *(pytest.param(glob, marks=pytest.mark.long) for glob in ("*.weight", "*layers.1.*")),
    ],
)
def test_a_cast_leaves_the_optimizer_as_it_is(
    golden: Path, tmp_path: Path, source: str, glob: str | None
) -> None:
    before, _, _ = convert_to_dcp(golden, tmp_path / "a", source)
    after, _, _ = convert_to_dcp(golden, tmp_path / "b", source, dtype=((glob, "float16"),))
    assert {key for key in before if before[key] != after[key]} <= {
        key for key in before if "optim" not in key
    }
    model = next(key for key in before if key.endswith(PARAM[source]) and "optim" not in key)
    assert after[model][0] == "float16"


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("source", "glob"),
    [(FSDP, "app.optim.*.exp_avg"), (FSDP, "*.exp_avg"), (MEGATRON, "optimizer.state.exp_avg.*")],
)
def test_a_glob_that_names_states_casts_them(
    golden: Path, tmp_path: Path, source: str, glob: str
) -> None:
    after, _, _ = convert_to_dcp(golden, tmp_path, source, dtype=((glob, "bfloat16"),))
    for state, dtype in (("exp_avg", "bfloat16"), ("exp_avg_sq", "float32")):
        assert after[NAMES[source][1].format(PARAM[source], state)][0] == dtype


@pytest.mark.parametrize("source", [FSDP, MEGATRON])
def test_states_follow_a_new_name(golden: Path, tmp_path: Path, source: str) -> None:
    old = NAMES[source][0].removeprefix("model.") + PARAM[source]
    after, objects, _ = convert_to_dcp(
        golden, tmp_path, source, rename=(("^" + old.replace(".", r"\."), old + "_new"),)
    )
    assert not states_of(source, PARAM[source], after)
    assert len(states_of(source, PARAM[source] + "_new", after)) == N_STATES[source]
    assert any(str(name).endswith(PARAM[source] + "_new") for name in objects[NAMES[source][2]])


def test_a_copy_of_a_parameter_gets_copies_of_its_states(golden: Path, tmp_path: Path) -> None:
    head, embedding = "app.model.head.weight", "app.model.model.embed_tokens.weight"
    after, objects, notes = convert_to_dcp(golden, tmp_path, FSDP, untie=((head, embedding),))
    for state in ("exp_avg", "exp_avg_sq", "step"):
        copy = after[f"app.optim.state.head.weight.{state}"]
        assert copy == after[f"app.optim.state.model.embed_tokens.weight.{state}"]
    assert {"head.weight", "model.embed_tokens.weight"} <= set(
        objects["app.optim.param_groups.0.params"]
    )
    assert "3 optimizer tensors of the tied weights are written as copies too" in notes
    nested: dict[str, Any] = {
        "app": {"optim": {"state": {"head.weight": {"exp_avg": torch.zeros(copy_shape(after))}}}}
    }
    dcp.load(nested, checkpoint_id=tmp_path / "out", no_dist=True)
    assert nested["app"]["optim"]["state"]["head.weight"]["exp_avg"].abs().sum() > 0


def copy_shape(tensors: Tensors) -> tuple[int, ...]:
    return tensors["app.optim.state.head.weight.exp_avg"][1]


def test_a_parameter_that_is_tied_loses_its_states(golden: Path, tmp_path: Path) -> None:
    head, embedding = "app.model.head.weight", "app.model.model.embed_tokens.weight"
    convert_to_dcp(golden, tmp_path / "a", FSDP, untie=((head, embedding),))
    report = run(
        Job(
            src=tmp_path / "a" / "out",
            dst=tmp_path / "b",
            to="dcp",
            tie=((head, embedding),),
            fsync=False,
        )
    )
    assert read_dcp(tmp_path / "b") == read_dcp(golden / FSDP)
    assert "3 optimizer tensors of the tied weights are dropped too" in report.notes


def test_an_entry_that_an_untied_parameter_has_already_is_refused(
    golden: Path, tmp_path: Path
) -> None:
    head, embedding = "app.model.head.weight", "app.model.model.embed_tokens.weight"
    convert_to_dcp(golden, tmp_path / "a", FSDP, untie=((head, embedding),))
    job = Job(
        src=tmp_path / "a" / "out",
        dst=tmp_path / "b",
        to="dcp",
        untie=((head, embedding),),
        fsync=False,
    )
    with pytest.raises(UsageError, match="already exists"):
        run(job)


@pytest.mark.first(1)
@pytest.mark.parametrize("source", [FSDP, MEGATRON])
def test_states_are_stacked_and_taken_apart_with_their_parameters(
    golden: Path, tmp_path: Path, source: str
) -> None:
    before, _, _ = convert_to_dcp(golden, tmp_path / "a", source)
    stacked, objects, _ = convert_to_dcp(golden, tmp_path / "b", source, stack_layers=True)
    assert not any("layers.1." in key for key in stacked)
    assert not any("layers.1." in str(name) for name in objects[NAMES[source][2]])
    param = PARAM[source].replace(".1.", ".")
    for state in ("exp_avg", "exp_avg_sq"):
        dtype, shape, data = stacked[NAMES[source][1].format(param, state)]
        n_layers = shape[0]
        layers = [
            before[NAMES[source][1].format(PARAM[source].replace(".1.", f".{n}."), state)]
            for n in range(n_layers)
        ]
        assert data == b"".join(layer[2] for layer in layers)
        assert {layer[:2] for layer in layers} == {(dtype, shape[1:])}
    run(
        Job(
            src=tmp_path / "b" / "out", dst=tmp_path / "c", to="dcp", unstack_layers=(), fsync=False
        )
    )
    assert read_dcp(tmp_path / "c") == before


def test_a_megatron_tree_without_a_parameter_is_told_so_when_it_goes_back(
    golden: Path, tmp_path: Path
) -> None:
    convert_to_dcp(golden, tmp_path, MEGATRON, exclude=("decoder.layers.1.*",))
    job = Job(
        src=tmp_path / "out",
        dst=tmp_path / "b",
        to="torch_dist",
        topology=TopologyChange(tp=1),
        fsync=False,
    )
    with pytest.raises(Exception, match=r"layers 1 of 4 are not in the checkpoint"):
        run(job)


def test_without_any_state_there_are_no_groups(golden: Path, tmp_path: Path) -> None:
    tensors, objects, _ = convert_to_dcp(golden, tmp_path, MEGATRON, include=("decoder.*",))
    assert tensors and not any("optim" in key for key in (*tensors, *objects))


def test_group_names_come_back_into_the_global_form(golden: Path, tmp_path: Path) -> None:
    old = r"^decoder\.layers\.1\.mlp\.linear_fc1\.weight$"
    convert_to_dcp(
        golden, tmp_path, MEGATRON, rename=((old, "decoder.layers.1.mlp.linear_fc1.weight_"),)
    )
    back = Job(
        src=tmp_path / "out",
        dst=tmp_path / "b",
        to="dcp",
        rename=((r"^model\.(decoder\.layers\.1\.mlp\.linear_fc1\.weight)_$", r"model.\1"),),
        fsync=False,
    )
    run(back)
    checkpoint = open_checkpoint(tmp_path / "b")
    optimizer = unshard(loaded(checkpoint.catalog, checkpoint.store), rules=load_rules()).optimizer
    assert optimizer is not None
    assert "decoder.layers.1.mlp.linear_fc1.weight" in (optimizer.groups[0].params or ())


@pytest.mark.parametrize(
    "options",
    [{"to": "megatron", "topology": TopologyChange(tp=1)}, {"topology": TopologyChange(tp=1)}, {}],
    ids=["ranks", "cut", "as it is"],
)
def test_an_optimizer_that_could_not_go_on_is_not_written(
    golden: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    src = golden / "mcore_torch_dist/dense_gqa/tp2_pp2_optim"
    job = Job(src=src, dst=tmp_path / "out", is_reshard=True, fsync=False, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"drop this optimizer state but .*--no-optim"):
        run(replace(job, exclude=("optimizer.state.exp_avg.*",)))
    with pytest.raises(
        UsageError, match=r"--dtype would cast the weight to float16, but the optimizer's"
    ):
        run(replace(job, dtype=((None, "float16"),)))
    run(replace(job, dtype=((None, "float16"),), optim="drop"))
