"""A finding about bytes names the tensors that lie there: weights and optimizer states, not records
and buffers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_cli.findings.text import LIMIT, text_lines
from ckpt_cli.screen.terminal import Screen
from core.verbs.checks.check import Finding, Level
from core.verbs.validate.run import validate
from tests.support.broken import archive_of
from tests.support.verdicts import finding, verdict
from tests.verbs.checks.test_damages import copied

OPTIM = "mcore_legacy/dense_gqa/tp2_pp2_optim"
DISTOPT = "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt"
STATE = "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc2.weight"
NAN = struct.pack("<f", float("nan"))


def damaged(path: Path, record: str, write: Callable[[bytes], bytes]) -> None:
    """Change the first bytes of a record of a torch zip, and no checksum."""
    start = archive_of(path).records[record].offset
    data = path.read_bytes()
    path.write_bytes(data[:start] + write(data[start : start + 4]) + data[start + 4 :])


def only_finding(path: Path, code: str) -> Finding:
    (finding,) = [
        finding for finding in validate(path, level=Level.DEEP).findings if finding.code == code
    ]
    return finding


@pytest.mark.parametrize("code", ["CK701", "CK710"])
def test_the_weight_of_a_numbered_optimizer_state_is_named(
    golden: Path, tmp_path: Path, code: str
) -> None:
    path = copied(golden / OPTIM, tmp_path)
    damaged(path / "iter_0000010/mp_rank_00_000/model_optim_rng.pt", "data/28", lambda old: NAN)
    assert only_finding(path, code).key == STATE


@pytest.mark.parametrize("code", ["CK701", "CK710"])
def test_the_weight_at_a_place_of_a_flat_buffer_is_named(
    golden: Path, tmp_path: Path, code: str
) -> None:
    """Although the masters no longer fit the weights, for which the layout of the buffer is doubted
    elsewhere.
    """
    path = copied(golden / DISTOPT, tmp_path)
    damaged(path / "iter_0000010/mp_rank_01/distrib_optim.pt", "data/0", lambda old: NAN)
    damage = only_finding(path, code)
    assert damage.key == "optimizer.state.fp32_param.output_layer.weight"
    if code == "CK701":
        assert len(damage.keys) == 31 and damage.keys[0] == damage.key
        assert damage.as_dict()["keys"] == list(damage.keys)


def test_a_tensor_is_named_where_another_damage_keeps_the_metadata_from_being_read(
    golden: Path, tmp_path: Path
) -> None:
    path = copied(golden / "deepspeed/zero1_dp2_bf16", tmp_path)
    name = "global_step10/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    damaged(path / name, "data/3", lambda old: NAN)
    assert (
        only_finding(path, "CK701").key == "optimizer_state_dict.base_optimizer_state.state.1.step"
    )


def test_the_tensor_of_a_descriptor_is_named(golden: Path, tmp_path: Path) -> None:
    path = copied(golden / "hf/llama/torch_single/model_zip.pt", tmp_path)
    at = archive_of(path).records["data/3"].span[1] + 5
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)
    assert only_finding(path, "CK126").key == "model.layers.0.mlp.down_proj.weight"


def test_every_name_can_be_reached(tmp_path: Path) -> None:
    keys = tuple(f"layer_{letter}.weight" for letter in "abcdefghijklmnop")
    page = verdict([finding(code="CK701", key=keys[0], keys=keys)])
    few, many = (
        "\n".join(text_lines(Screen(), [page], limit=n, is_quiet=False)) for n in (None, 0)
    )
    assert all(key in many for key in keys)
    assert [key in few for key in keys] == [number <= LIMIT for number in range(len(keys))]
    assert f"and {len(keys) - 1 - LIMIT} more (--limit 0 shows all)" in few
    assert json.loads(json.dumps(finding(key="a", keys=("a", "b")).as_dict()))["keys"] == ["a", "b"]
