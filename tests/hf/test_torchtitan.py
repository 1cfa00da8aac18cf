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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from core.engine.catalog.catalog import Catalog
from core.errors import CheckpointingException, UnsupportedError
from core.files.store import LocalStore
from core.hf.torchtitan import from_torchtitan
from core.opening.open import open_checkpoint
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, run
from tests.support.materialize import tensor_bytes

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
        (
            {"model_type": "deepseek_v3"},
            "does not convert torchtitan models with model_type 'deepseek_v3'",
        ),
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


def catalog_of(case: Path, step: str = "step-2") -> tuple[Catalog, LocalStore]:
    """A checkpoint of torchtitan with the names of transformers, optimizer included."""
    source = open_checkpoint(case / step)
    assert isinstance(source.store, LocalStore)
    config = json.loads((case / "config.json").read_text())
    return from_torchtitan(source.catalog, config, has_no_optimizer=False), source.store


def test_every_state_is_split_and_ordered_as_torchtitan_does_with_weights(
    torchtitan_run: Path,
) -> None:
    catalog, store = catalog_of(torchtitan_run, "step-3")
    truth = torch.load(torchtitan_run / "truth.pt", weights_only=True)["states"]
    states = {key for key in catalog.tensors if key.startswith("optimizer.state.")}
    assert len(states) == 3 * len(truth)  # two moments, and the number of steps
    for name, tensors in truth.items():
        for state, tensor in tensors.items():
            key = name if state == "fp32" else f"optimizer.state.{name}.{state}"
            assert tensor_bytes(catalog, store, key).tobytes() == tensor.numpy().tobytes(), key
        assert catalog.tensors[f"optimizer.state.{name}.step"].shape == ()
        assert f"optimizer.param_groups.{name}.weight_decay" in catalog.objects
    assert not any("wqkv" in key for key in (*catalog.tensors, *catalog.objects))


def test_transformers_goes_on_where_torchtitan_stopped(
    torchtitan_run: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = torchtitan_run / "config.json"
    source, folder = torchtitan_run / "step-3", tmp_path / "dcp"
    run(Job(src=source, dst=folder, to="dcp", names="hf", config=config, fsync=False))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(torchtitan_run)
    )
    # As many groups as the run, whose vectors have no weight decay.
    groups = [[p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (1, 0)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    state = {**model.state_dict(), "optimizer": states}
    dist_cp.load(state, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state.pop("optimizer"), options=options)
    model.load_state_dict(state)
    # The batches of tests/golden/frameworks/torchtitan_run.py.
    losses = []
    for step in (3, 4):
        generators = [torch.Generator().manual_seed(1000 * step + sample) for sample in range(4)]
        rows = [torch.randint(0, 32, (1, 9), generator=generator) for generator in generators]
        tokens = torch.cat(rows)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    truth = torch.load(torchtitan_run / "truth.pt", weights_only=True)
    assert losses == pytest.approx(truth["losses"], rel=1e-5)


def test_states_of_stacked_experts_become_those_of_each(torchtitan: Path, tmp_path: Path) -> None:
    catalog, store = catalog_of(torchtitan / "qwen3_moe")
    dcp_to_torch_save(torchtitan / "qwen3_moe" / "step-2", tmp_path / "state.pt")
    stored = torch.load(tmp_path / "state.pt")["optimizer"]
    prefix, new_prefix = "state.layers.0.", "optimizer.state.model.layers.0."
    fused = stored[f"{prefix}attention.qkv_linear.wqkv.weight.exp_avg"].reshape(2, 4, 8, 32)
    expected = {
        f"{new_prefix}self_attn.q_proj.weight.exp_avg": fused[:, :2],
        f"{new_prefix}self_attn.k_proj.weight.exp_avg": fused[:, 2],
        f"{new_prefix}self_attn.v_proj.weight.exp_avg": fused[:, 3],
    }
    for matrix, name in (("w1_EFD", "gate"), ("w2_EDF", "down"), ("w3_EFD", "up")):
        stack = stored[f"{prefix}moe.routed_experts.inner_experts.{matrix}.exp_avg_sq"]
        for expert, tensor in enumerate(stack):
            expected[f"{new_prefix}mlp.experts.{expert}.{name}_proj.weight.exp_avg_sq"] = tensor
    for key, tensor in expected.items():
        wanted = tensor.contiguous().numpy().tobytes()
        assert tensor_bytes(catalog, store, key).tobytes() == wanted, key


def test_a_state_unlike_its_parameter_is_refused(torchtitan: Path, tmp_path: Path) -> None:
    case = Path(shutil.copytree(torchtitan / "llama", tmp_path / "case"))
    dcp_to_torch_save(case / "step-2", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    states = state["optimizer"]
    states["state.layers.0.attention.qkv_linear.wqkv.weight.exp_avg"] = torch.zeros(3)
    shutil.rmtree(case / "step-2")
    dist_cp.save(state, checkpoint_id=case / "step-2", no_dist=True)
    with pytest.raises(UnsupportedError, match=r"shape \(3,\), but its parameter has shape"):
        run(job(case, tmp_path / "out", to="torch_dist"))
    run(job(case, tmp_path / "hf"))  # which has no optimizer
    assert not (tmp_path / "out").exists()


def test_megatron_takes_the_weights_as_hugging_faces(torchtitan: Path, tmp_path: Path) -> None:
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
