"""A PyTorch Lightning checkpoint: the proposed options write the model under its own names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_cli.app import main
from core.engine.catalog.catalog import catalog_of_arrays
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.wrapped_model import model_options


def save_lightning(path: Path, parameters: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint with the entries that Lightning's Trainer writes."""
    weights = {key: torch.nn.Parameter(tensor.clone()) for key, tensor in parameters.items()}
    optimizer = torch.optim.AdamW(weights.values())
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.save(
        {
            "epoch": 3,
            "global_step": 120,
            "pytorch-lightning_version": "2.4.0",
            "state_dict": {f"model.{key}": tensor for key, tensor in parameters.items()},
            "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 4}}}},
            "callbacks": {},
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [],
            "hparams_name": "kwargs",
            "hyper_parameters": {"lr": 1e-3},
        },
        path,
    )


def proposed(text: str) -> list[str]:
    """The options that a note or a hint proposes, as a shell splits them."""
    match = re.search(r"add (--include .*)", " ".join(text.split()))
    assert match is not None, text
    return shlex.split(re.split(" next | more: ", match[1])[0])


def test_the_proposed_options_leave_the_model_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "last.ckpt"
    parameters = {"0.weight": torch.randn(8, 4), "0.bias": torch.randn(8)}
    save_lightning(source, parameters)
    assert main(["convert", str(source), str(tmp_path / "a.safetensors")]) == 0
    options = proposed(capsys.readouterr().out)
    assert options == ["--include", "state_dict.*", "--strip-prefix", "state_dict."]
    assert main(["convert", str(source), str(tmp_path / "b.safetensors"), *options]) == 0
    assert "Lightning" not in capsys.readouterr().out
    tensors = load_file(tmp_path / "b.safetensors")
    assert tensors.keys() == {f"model.{key}" for key in parameters}


def test_torch_files_keep_the_nesting_and_need_no_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "last.ckpt"
    save_lightning(source, {"w": torch.ones(2)})
    assert main(["convert", str(source), str(tmp_path / "a.pt")]) == 0
    assert "--include" not in capsys.readouterr().out


def test_the_proposed_options_write_a_hugging_face_model(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = golden / "hf/llama/safetensors_single"
    source = tmp_path / "last.ckpt"
    save_lightning(source, load_file(model / "model.safetensors"))
    command = ["convert", str(source), str(tmp_path / "out"), "--to", "hf"]
    assert main(command) == 4
    options = proposed(capsys.readouterr().err)
    assert options[-2:] == ["--config", "config.json"]
    assert main([*command, *options[:-1], str(model / "config.json")]) == 0
    written, expected = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out", model)
    )
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], expected[key]) for key in expected)


def test_the_names_of_the_optimizer_show_what_wraps_those_of_the_model(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = golden / "torch_dcp/fsdp2_dp2"
    assert main(["inspect", str(source)]) == 0
    expected = "--include 'app.model.*' --strip-prefix app.model."
    assert f"for the model alone: {expected} --config FILE" in capsys.readouterr().out
    command = ["convert", str(source), str(tmp_path / "a"), "--to", "hf"]
    assert main(command) == 4
    err = capsys.readouterr().err
    assert f"add {expected} --config config.json\n" in err
    assert main(["convert", str(source), str(tmp_path / "b.safetensors")]) == 0
    options = proposed(capsys.readouterr().out)
    assert shlex.join(options) == expected
    assert main(["convert", str(source), str(tmp_path / "c.safetensors"), *options]) == 0
    assert "--include" not in capsys.readouterr().out.replace("by --include", "")
    keys = load_file(tmp_path / "c.safetensors").keys()
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= keys
    assert not any(key.startswith("app.") for key in keys)


def test_a_glob_that_matches_nothing_is_answered_with_those_of_model_and_optimizer(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(golden / "torch_dcp/fsdp2_dp2"), str(tmp_path / "optim.pt")]
    assert main([*command, "--include", "optimizer.*"]) == 2
    err = capsys.readouterr().err
    assert "'app.model.*' matches the model; 'app.optim.state.*' matches the optimizer" in err
    assert main([*command, "--include", "app.optim.*"]) == 0


@pytest.mark.parametrize(
    ("source", "globs"),
    [
        (
            "mcore_legacy/dense_gqa/tp2_pp2",
            "'decoder.*' and 'embedding.*' and 'output_layer.*' match the model; list",
        ),
        (
            "mcore_torch_dist/dense_gqa/tp2_pp2_optim",
            "'optimizer.state.*' matches the optimizer; list",
        ),
    ],
)
def test_the_globs_of_a_megatron_model_are_named_too(
    source: str, globs: str, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(golden / source), str(tmp_path / "a"), "--include", "no*"]) == 2
    assert globs in capsys.readouterr().err


@pytest.mark.parametrize("others", [[], ["app.step"]])
def test_a_wrapper_that_holds_the_optimizer_as_well_is_not_proposed(others: list[str]) -> None:
    keys = ["app.model.w", "app.model.v", "app.optim.state.model.w.exp_avg", *others]
    catalog = catalog_of_arrays(
        format="torch",
        arrays={key: StoredArray(key, "float32", (2,), Extent("f", 0)) for key in keys},
    )
    assert model_options(catalog) is None
