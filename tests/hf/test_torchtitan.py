"""torchtitan's names become Hugging Face's, as torchtitan's own adapter makes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dist_cp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from core.convert.prepare import prepare
from core.convert.run import Job, run
from core.errors import CheckpointingException

CASES = ("llama", "llama_tied", "qwen3_moe")


def job(case: Path, dst: Path, to: str = "hf") -> Job:
    return Job(src=case / "step-2", dst=dst, to=to, config=case / "config.json", fsync=False)


@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_that_of_torchtitans_adapter(
    torchtitan: Path, tmp_path: Path, name: str
) -> None:
    run(job(torchtitan / name, tmp_path / "out"))
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = load_file(torchtitan / name / "to_hf.safetensors")
    # The head of a tied model is saved as well as its embedding; the adapter leaves it out.
    assert ours.keys() - theirs.keys() == ({"lm_head.weight"} if name == "llama_tied" else set())
    assert theirs.keys() <= ours.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_transformers_computes_the_logits_of_torchtitan(torchtitan: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run(job(torchtitan / "llama", tmp_path / "out"))
    truth = torch.load(torchtitan / "llama" / "logits.pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        logits = model(truth["tokens"]).logits
    assert torch.allclose(logits, truth["logits"], rtol=0, atol=1e-5)


def test_names_of_torchtitan_0_2_give_the_same_model(torchtitan: Path, tmp_path: Path) -> None:
    case = Path(shutil.copytree(torchtitan / "qwen3_moe", tmp_path / "case"))
    dcp_to_torch_save(case / "step-2", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    older = {
        key.replace("qkv_linear.", "")
        .replace("routed_experts.inner_experts", "experts")
        .replace("_EFD", "")
        .replace("_EDF", "")
        .replace("expert_bias_E", "expert_bias")
        .replace("lm_head", "output"): tensor
        for key, tensor in state.items()
        if key not in ("optimizer", "train_state")
    }
    shutil.rmtree(case / "step-2")
    dist_cp.save(older, checkpoint_id=case / "step-2", no_dist=True)
    run(job(case, tmp_path / "out"))
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = load_file(case / "to_hf.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_what_transformers_has_no_place_for_is_listed(torchtitan: Path, tmp_path: Path) -> None:
    with prepare(job(torchtitan / "qwen3_moe", tmp_path / "out")) as prepared:
        listed = " ".join(prepared.dropped)
        assert any("converted to those of qwen3_moe" in note for note in prepared.notes)
    assert "layers.0.moe.expert_bias_E" in listed
    assert "train_state.step" in listed
    assert "optimizer" in listed


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"model_type": "deepseek_v3"}, "'deepseek_v3' are not converted"),
        ({"num_key_value_heads": 5}, "implies 5 heads"),
        ({"hidden_size": 64}, "config.json"),
    ],
)
def test_another_models_configuration_is_refused(
    torchtitan: Path, tmp_path: Path, setting: dict[str, object], message: str
) -> None:
    case = Path(shutil.copytree(torchtitan / "llama", tmp_path / "case"))
    config = json.loads((case / "config.json").read_text())
    (case / "config.json").write_text(json.dumps(config | setting))
    with pytest.raises(CheckpointingException, match=message):
        run(job(case, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_megatron_takes_the_weights_but_not_the_optimizer(torchtitan: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match="query, key and value are one parameter"):
        run(job(torchtitan / "llama", tmp_path / "out", to="torch_dist"))
    through_hf = tmp_path / "hf"
    run(job(torchtitan / "llama", through_hf))
    run(Job(src=through_hf, dst=tmp_path / "b", to="torch_dist", fsync=False))
    source = torchtitan / "llama"
    run(
        Job(
            src=source / "step-2",
            dst=tmp_path / "a",
            to="torch_dist",
            config=source / "config.json",
            optim="drop",
            fsync=False,
        )
    )
    for name in ("a", "b"):
        run(Job(src=tmp_path / name, dst=tmp_path / f"{name}.safetensors", to="safetensors"))
    ours, theirs = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
