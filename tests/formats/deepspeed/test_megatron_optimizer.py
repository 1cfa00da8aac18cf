"""Megatron's optimizers in universal checkpoints under Hugging Face's names, and back.

The expected values are those of the golden checkpoints' oracle, split by hand here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.errors import CheckpointingException, MissingShardError, UnsupportedError
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.tables import load_rules
from core.opening.open import open_checkpoint
from core.verbs.convert.job import Job, Report, TopologyChange
from core.verbs.convert.run import run
from tests.megatron.support.megatron_gold import fused
from tests.support.materialize import tensor_bytes

STATES = {"fp32_param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""State in the oracle → file in a universal checkpoint."""
NAMES = {
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
SOURCES = {
    "float16": "mcore_legacy/dense_gqa/tp2_pp2_optim",
    "distrib_optim": "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt",
    "torch_dist": "mcore_torch_dist/dense_gqa/tp2_pp2_optim",
    "fully_reshardable": "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fullyreshardable",
    "dp_reshardable": "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable",
}
LONG = pytest.mark.long


def converted(src: Path, dst: Path, to: str, **options: object) -> Report:
    return run(Job(src=src, dst=dst, to=to, fsync=False, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def config(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of the model."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    converted(golden / SOURCES["float16"], folder, "hf")
    return folder / "config.json"


@pytest.fixture(scope="module")
def universal(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The universal checkpoint of a TP2 PP2 run. To be read only."""
    folder = tmp_path_factory.mktemp("universal") / "made"
    converted(golden / SOURCES["float16"], folder, "ucp", names="hf")
    return folder


def split_by_hand(golden: Path, config: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Hugging Face name → file → true tensor."""
    sizes = json.loads(config.read_text())
    n_heads, n_groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    result: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(golden / "oracle/dense_gqa/global_optim.safetensors").items():
        state, _, name = key.partition(".")
        head, _, sub = name.partition("layers.")
        number, _, sub = sub.partition(".")
        start = f"model.layers.{number}." if head == "decoder." and number.isdigit() else ""
        parts = {start + NAMES.get(sub or name, ""): tensor}
        if "linear_fc1.weight" in name:
            gate, up = tensor.chunk(2)
            parts = {f"{start}mlp.gate_proj.weight": gate, f"{start}mlp.up_proj.weight": up}
        elif "linear_qkv.layer" not in name and "linear_qkv" in name:
            kind = name.rpartition(".")[2]
            size = n_heads // n_groups + 2
            heads = tensor.reshape(n_groups, size, -1, *tensor.shape[1:])
            queries, keys, values = heads[:, :-2], heads[:, -2], heads[:, -1]
            parts = {
                f"{start}self_attn.{letter}_proj.{kind}": part.reshape(-1, *tensor.shape[1:])
                for letter, part in zip("qkv", (queries, keys, values), strict=True)
            }
        for hf, part in parts.items():
            result.setdefault(hf, {})[STATES[state]] = part
    return result


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ("float16", "fully_reshardable") else LONG)
        for case in SOURCES
    ],
)
def test_masters_and_moments_are_those_of_megatron_split_by_hand(
    golden: Path, config: Path, tmp_path: Path, case: str
) -> None:
    result = converted(golden / SOURCES[case], tmp_path / "made", "ucp", names="hf")
    (folder,) = (tmp_path / "made").glob("global_step10_universal/zero")
    expected = split_by_hand(golden, config)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(expected)
    for name, states in expected.items():
        files = {path.stem: torch.load(path) for path in (folder / name).glob("*.pt")}
        step = files.pop("step")
        assert step.dtype == torch.float32 and step.shape == () and step == 1
        assert set(files) == set(states)
        for state, tensor in states.items():
            assert files[state]["param"].dtype == torch.float32
            assert torch.equal(files[state]["param"], tensor), f"{name}: {state}"

    # ZeRO-3 reads the step and the settings of the first group here; the vectors' group is second.
    root = torch.load(folder / "optimizer_state.pt")
    assert root["optimizer_state_dict"]["state"][0]["step"] == 1
    assert [group.get("weight_decay") for group in root["param_groups"][:2]] == [0.1, 0.0]
    assert root["param_groups"][0]["betas"] == (0.9, 0.95)
    assert not any("wd_mult" in group for group in root["param_groups"])
    model = torch.load(folder.parent / "mp_rank_00_model_states.pt")
    assert all(len(shape) == 1 for shape in model["param_shapes"][1].values())
    assert (model["global_steps"], model["global_samples"]) == (10, 80)
    assert any(entry.startswith("6 entries") or "args" in entry for entry in result.dropped)


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_the_way_back_gives_the_states_of_the_source(
    golden: Path, config: Path, universal: Path, tmp_path: Path, to: str
) -> None:
    result = converted(
        universal,
        tmp_path / "back",
        to,
        config=config,
        dtype=((None, "bf16"),),
        topology=TopologyChange(tp=2, pp=2),
    )
    assert any("--override-opt_param-scheduler" in note for note in result.notes)
    assert any("80 samples" in note for note in result.notes)
    checkpoint = open_checkpoint(tmp_path / "back")
    form = unshard(checkpoint.catalog, rules=load_rules(), store=checkpoint.store)
    oracle = load_file(golden / "oracle/dense_gqa/global_optim.safetensors")
    weights = load_file(golden / "oracle/dense_gqa/global.safetensors")
    expected = weights | {f"optimizer.state.{key}": tensor for key, tensor in oracle.items()}
    names = {key: _named_like_the_oracle(key) for key in form.tensors}
    assert set(names.values()) == set(expected)
    for key, name in names.items():
        actual = tensor_bytes(form, checkpoint.store, key)
        assert actual.tobytes() == expected[name].view(torch.uint8).numpy().tobytes(), key

    # Two groups that Megatron finds by these settings, each with its own step.
    assert form.optimizer is not None and form.iteration == 10
    assert form.optimizer.kind == ("float16" if to == "megatron" else "distributed")
    settings = [group.settings for group in form.optimizer.groups]
    assert [(group["wd_mult"], group["weight_decay"]) for group in settings] == [
        (1.0, 0.1),
        (0.0, 0.0),
    ]
    assert all(group["step"] == 1 and group["lr_mult"] == 1.0 for group in settings)
    assert form.common is not None
    assert form.common["opt_param_scheduler"]["num_steps"] == 80  # type: ignore[index]


def _named_like_the_oracle(key: str) -> str:
    """Return a key of the global form with the names that the oracle has."""
    prefix, state = "optimizer.state.", ""
    if key.startswith(prefix):
        state, _, key = key.removeprefix(prefix).partition(".")
        return f"{prefix}{state}.{fused(key)}"
    return fused(key)


def test_float32_weights_need_no_masters_in_rank_files(
    config: Path, universal: Path, tmp_path: Path
) -> None:
    result = converted(universal, tmp_path / "back", "megatron", config=config)
    assert any("FP32Optimizer" in note for note in result.notes)
    state = torch.load(
        tmp_path / "back/iter_0000010/mp_rank_00/model_optim_rng.pt", weights_only=False
    )
    assert set(state["optimizer"]) == {"state", "param_groups"}
    assert set(state["optimizer"]["state"][0]) == {"exp_avg", "exp_avg_sq"}


def _another_step(zero: Path) -> None:
    torch.save(torch.tensor(2.0), zero / "model.norm.weight/step.pt")


def _no_state_of_a_part(zero: Path) -> None:
    for state in ("exp_avg", "exp_avg_sq", "step"):
        (zero / f"model.layers.1.self_attn.k_proj.weight/{state}.pt").unlink()


def _a_broken_step(zero: Path) -> None:
    torch.save(torch.tensor(0.5), zero / "lm_head.weight/step.pt")


def _no_groups(zero: Path) -> None:
    root = torch.load(zero / "optimizer_state.pt")
    empty = [{"params": []} for _ in root["param_groups"]]
    torch.save({**root, "param_groups": empty}, zero / "optimizer_state.pt")


@pytest.mark.parametrize(
    ("edit", "error", "text"),
    [
        (_another_step, UnsupportedError, "the step count is 2 for this parameter, but 1"),
        (_no_state_of_a_part, UnsupportedError, "but not model.layers.1.self_attn.k_proj.weight"),
        (_a_broken_step, CheckpointingException, "the number of steps is 0.5"),
        (_no_groups, UnsupportedError, "no parameter group records"),
    ],
)
def test_what_megatron_cannot_continue_is_refused(
    config: Path,
    universal: Path,
    tmp_path: Path,
    edit: Callable[[Path], None],
    error: type[CheckpointingException],
    text: str,
) -> None:
    shutil.copytree(universal, tmp_path / "edited")
    (tmp_path / "edited/ckpt-manifest.json").unlink()
    edit(tmp_path / "edited/global_step10_universal/zero")
    with pytest.raises(error, match=text) as caught:
        converted(tmp_path / "edited", tmp_path / "back", "torch_dist", config=config)
    assert ("--no-optim" in (caught.value.hint or "")) is (edit is not _a_broken_step)
    assert not (tmp_path / "back").exists()


def test_megatrons_names_are_refused_with_a_way_out(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="with Megatron's names") as caught:
        converted(golden / SOURCES["torch_dist"], tmp_path / "made", "ucp")
    assert "--names hf" in (caught.value.hint or "")


def test_a_state_that_some_parameters_lack_is_named(
    config: Path, universal: Path, tmp_path: Path
) -> None:
    shutil.copytree(universal, tmp_path / "edited")
    (tmp_path / "edited/ckpt-manifest.json").unlink()
    zero = tmp_path / "edited/global_step10_universal/zero"
    (zero / "model.norm.weight/exp_avg.pt").unlink()
    with pytest.raises(MissingShardError, match="most other parameters have"):
        converted(tmp_path / "edited", tmp_path / "back", "torch_dist", config=config)
