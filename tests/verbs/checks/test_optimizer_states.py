"""Optimizers that do not belong to their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.verbs.checks.check import Level, Severity
from core.verbs.convert.run import Job, run
from tests.support.edited import Rows, chunks_of, copied, counted, edit_rank, edit_rows, found_in

NUMBERED = "mcore_legacy/dense_gqa/tp2_pp2_optim"
FLAT = "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt"
DIST = "mcore_torch_dist/dense_gqa/tp2_pp2_optim"
DCP = "torch_dcp/fsdp2_dp2"


def torch_optimizer(loaded: dict[str, Any]) -> dict[str, Any]:
    """The inner state dict of a Float16 optimizer."""
    optimizer = loaded["optimizer"]["optimizer"]
    assert isinstance(optimizer, dict)
    return optimizer


def test_numbers_states_and_shapes_are_compared_on_every_rank(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, NUMBERED, tmp_path)

    def no_parameter(loaded: dict[str, Any]) -> None:
        states = torch_optimizer(loaded)["state"]
        states[900] = states[901] = dict(states[0])

    def no_state(loaded: dict[str, Any]) -> None:
        states = torch_optimizer(loaded)["state"]
        del states[1]["exp_avg_sq"]
        del states[2]["exp_avg"]

    def other_shape(loaded: dict[str, Any]) -> None:
        states = torch_optimizer(loaded)["state"]
        states[0]["exp_avg_sq"] = states[0]["exp_avg_sq"][:-1]

    edit_rank(folder / "mp_rank_00_000", no_parameter)
    edit_rank(folder / "mp_rank_01_000", no_state)
    edit_rank(folder / "mp_rank_01_001", other_shape)
    findings = [(finding.code, finding.rank) for finding in found_in(folder)]
    assert findings.count(("CK401", "mp_rank_00_000")) == 2
    assert findings.count(("CK404", "mp_rank_01_000")) == 2
    assert ("CK403", "mp_rank_01_001") in findings


def test_groups_settings_and_steps_are_compared(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, NUMBERED, tmp_path)

    def fewer(loaded: dict[str, Any]) -> None:
        inner = torch_optimizer(loaded)
        gone = inner["param_groups"][0]["params"].pop()
        del inner["state"][gone]
        loaded["optimizer"]["fp32_from_fp16_params"][0].pop()

    def no_master(loaded: dict[str, Any]) -> None:
        loaded["optimizer"]["fp32_from_fp16_params"][0].pop()

    edit_rank(folder / "mp_rank_00_001", fewer)
    edit_rank(
        folder / "mp_rank_01_000",
        lambda loaded: torch_optimizer(loaded)["param_groups"][0].update(betas=(0.5, 0.5)),
    )
    findings = {(finding.code, finding.rank) for finding in found_in(folder, Level.HEADERS)}
    assert ("CK404", "mp_rank_00_001") in findings
    assert ("CK405", "mp_rank_01_000") in findings
    edit_rank(folder / "mp_rank_01_001", no_master)
    assert ("CK402", "mp_rank_01_001") in {
        (finding.code, finding.rank) for finding in found_in(folder, Level.HEADERS)
    }


def test_a_rank_without_the_optimizer_of_the_others_is_named(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, NUMBERED, tmp_path)
    for rank in ("mp_rank_00_001", "mp_rank_01_000"):
        edit_rank(folder / rank, lambda loaded: loaded.pop("optimizer"))
    findings = [finding for finding in found_in(folder) if finding.code == "CK408"]
    assert [finding.rank for finding in findings] == ["mp_rank_00_001", "mp_rank_01_000"]


@pytest.mark.parametrize("name", [NUMBERED, FLAT])
def test_every_weight_that_was_edited_is_found_by_its_master(
    golden: Path, tmp_path: Path, name: str
) -> None:
    folder = copied(golden, name, tmp_path)
    keys = [
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.layers.1.self_attention.linear_qkv.weight",
    ]

    def change(loaded: dict[str, Any]) -> None:
        for key in keys:
            loaded["model"][key] = loaded["model"][key] + 1

    rank = sorted(folder.glob("mp_rank_*"))[1]
    edit_rank(rank, change)
    assert found_in(folder) == []
    findings = found_in(folder, Level.HEADERS)
    assert {(finding.code, finding.key, finding.rank) for finding in findings} == {
        ("CK407", key, rank.name) for key in keys
    }


def test_flat_buffers_of_another_length_are_named(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, FLAT, tmp_path)
    for rank in ("mp_rank_00", "mp_rank_01"):

        def change(loaded: dict[Any, Any]) -> None:
            buffer = next(iter(loaded[0].values()))
            buffer["exp_avg"] = buffer["exp_avg"][:-8]

        edit_rank(folder / rank, change, file="distrib_optim.pt")
    findings = [finding for finding in found_in(folder, Level.HEADERS) if finding.code == "CK410"]
    assert [finding.rank for finding in findings] == ["mp_rank_00", "mp_rank_01"]


@pytest.mark.parametrize(
    ("name", "weight", "state"),
    [
        (DIST, "{}", "optimizer.state.exp_avg.{}"),
        (DCP, "app.model.{}", "app.optim.state.{}.exp_avg"),
    ],
)
def test_named_states_are_compared_with_their_parameters(
    golden: Path, tmp_path: Path, name: str, weight: str, state: str
) -> None:
    folder = copied(golden, name, tmp_path)
    first, second, third = (
        (
            "output_layer.weight",
            "decoder.final_layernorm.weight",
            "decoder.layers.mlp.linear_fc2.weight",
        )
        if name == DIST
        else ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight")
    )

    def change(rows: Rows) -> None:
        del rows[weight.format(first)]
        del rows[state.format(second)]
        row = rows[state.format(third)]
        chunks = [
            chunk._replace(shape=(1, *chunk.shape[1:]))
            for chunk in chunks_of(rows, state.format(third))[:1]
        ]
        rows[state.format(third)] = row._replace(shape=(1, *row.shape[1:]), chunks=chunks)  # type: ignore[union-attr, call-arg]

    edit_rows(folder, change)
    findings = {
        (finding.code, finding.key)
        for finding in found_in(folder)
        if finding.code.startswith("CK4")
    }
    codes = {code for code, _ in findings}
    assert codes == {"CK403", "CK404", "CK409"}
    assert ("CK404", weight.format(second)) in findings
    assert ("CK403", state.format(third)) in findings


def test_masters_of_global_checkpoints_are_compared_with_their_weights(
    golden: Path, tmp_path: Path
) -> None:
    folder = copied(golden, DIST, tmp_path)
    key = "decoder.layers.mlp.linear_fc2.weight"

    def change(rows: Rows) -> None:
        chunks = chunks_of(rows, key)
        places = [chunk[2:] for chunk in chunks]
        chunks[:] = [
            chunk._replace(**dict(zip(chunk._fields[2:], place, strict=True)))
            for chunk, place in zip(chunks, places[1:] + places[:1], strict=True)
        ]

    edit_rows(folder, change)
    assert found_in(folder) == []
    findings = found_in(folder, Level.HEADERS)
    assert {finding.code for finding in findings} == {"CK407"}
    assert {finding.severity for finding in findings} == {Severity.WARNING}
    assert {finding.key for finding in findings} == {
        f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in range(4)
    }
    assert counted(findings) == {"CK407": 4}


def test_states_that_older_megatron_cut_up_are_no_damage_without_its_metadata(
    golden: Path, tmp_path: Path
) -> None:
    name = "mcore0121_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space"
    run(Job(src=golden / name, dst=tmp_path / "out", to="dcp", fsync=False))
    assert found_in(tmp_path / "out", Level.HEADERS) == []


def test_states_of_a_parameter_that_is_saved_in_parts_have_its_shape(tmp_path: Path) -> None:
    """torchtitan 0.3.0 trains ``wqkv`` and saves ``wq``, ``wk`` and ``wv``."""
    attention = "layers.0.attention"
    state: dict[str, Any] = {
        f"{attention}.qkv_linear.{part}.weight": torch.zeros(rows, 8)
        for part, rows in (("wq", 8), ("wk", 4), ("wv", 4))
    }
    state |= {f"{attention}.wo.weight": torch.ones(8, 8), "norm.weight": torch.ones(8)}

    def save(name: str, n_rows: int) -> Path:
        shapes = {
            f"{attention}.qkv_linear.wqkv.weight": (n_rows, 8),
            f"{attention}.wo.weight": (8, 8),
            "norm.weight": (8,),
        }
        moments = {
            f"optimizer.state.{parameter}.{moment}": torch.full(shape, 2.0)
            for parameter, shape in shapes.items()
            for moment in ("exp_avg", "exp_avg_sq")
        }
        dcp.save({**state, **moments}, checkpoint_id=tmp_path / name, no_dist=True)
        return tmp_path / name

    assert found_in(save("good", 16)) == []
    codes = {finding.code for finding in found_in(save("bad", 15))}
    assert codes == {"CK403"}
    del state[f"{attention}.qkv_linear.wk.weight"]
    assert {finding.code for finding in found_in(save("lost", 16))} == {"CK409"}
