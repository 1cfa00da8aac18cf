"""The verbs as functions of core."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

import core
from ckpt_cli.app import _NOT_IN_MERGE
from ckpt_cli.options.diff import DiffOptions
from ckpt_cli.options.merge import MergeOptions
from ckpt_cli.options.prune import PruneOptions
from ckpt_cli.options.transfer import TransferOptions
from ckpt_cli.options.validate import ValidateOptions
from core.errors import UsageError
from core.verbs.convert.job_options import OPTIONS

RUN = "mcore_legacy/dense_gqa/tp2_pp2_optim"


def test_convert_reshard_diff_and_validate(golden: Path, tmp_path: Path) -> None:
    report = core.reshard(golden / RUN, tmp_path / "tp1", tp_new=1, pp_new=1)
    assert report.n_tensors > 0
    # What Megatron itself saved at TP1.
    truth = golden / "mcore_legacy/dense_gqa/tp1_pp1_optim"
    assert core.diff(tmp_path / "tp1", truth, tensors_only=True).same
    assert not core.diff(tmp_path / "tp1", golden / "mcore_legacy/dense_gelu/tp1_pp1").same
    assert core.validate(tmp_path / "tp1", deep=True).findings == ()
    core.convert(tmp_path / "tp1", tmp_path / "model.pt", optim=False, names="hf")


def test_the_suffix_and_the_names_imply_the_format(golden: Path, tmp_path: Path) -> None:
    report = core.convert(golden / "hf/qwen2_tied/safetensors_single", tmp_path / "model.pt")
    assert report.format == "torch"
    assert "model.norm.weight" in torch.load(tmp_path / "model.pt", weights_only=True)
    report = core.convert(golden / RUN, tmp_path / "hf", names="hf", optim=False)
    assert report.format == "safetensors"
    assert (tmp_path / "hf/config.json").exists()


def test_inspect_returns_the_summary(golden: Path) -> None:
    assert core.inspect(golden / RUN).parallel["tp"] == 2


def test_wrong_arguments(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no target size"):
        core.reshard(golden / RUN, tmp_path / "x")
    with pytest.raises(UsageError, match="Did you mean torch_dist"):
        core.convert(golden / RUN, to="torchdist")
    with pytest.raises(UsageError, match="Did you mean bf16"):
        core.convert(golden / RUN, dtype="b16")
    with pytest.raises(UsageError, match="rng='kep' is not one of: keep, drop. Did you mean keep"):
        core.convert(golden / RUN, rng="kep")
    with pytest.raises(UsageError, match="tp_new=0 is not a whole number ≥ 1"):
        core.reshard(golden / RUN, tp_new=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tensors'"):
        core.diff(golden / RUN, golden / RUN, tensors=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtpye'"):
        core.convert(golden / RUN, dtpye="bf16")


@pytest.mark.parametrize(
    ("refuse", "message"),
    [
        (lambda run: core.convert(run, to="dcp", tp_new=2), "tp_new has no effect: dcp"),
        (
            lambda run: core.convert(run, to="torch", optim=False, param_order="model"),
            "param_order has no effect: the optimizer is left out",
        ),
        (
            lambda run: core.convert(run, layer_axis=1, to="dcp"),
            "layer_axis has no effect: no layers are stacked or unstacked",
        ),
        (lambda run: core.diff(run, run, rtol=0.1, stat_only=True), "rtol has no effect"),
        (
            lambda run: core.validate(run, headers=True, deep=True),
            "headers=True has no effect",
        ),
        (
            lambda run: core.merge([run, run], run / "out", average=True, scale=2.0),
            "scale has no effect: it applies only to add_delta",
        ),
    ],
)
def test_an_option_without_effect_is_refused_under_its_name_in_python(
    golden: Path, refuse: Callable[[Path], object], message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        refuse(golden / RUN)


def test_a_switch_is_named_as_it_is_written_in_python(golden: Path, tmp_path: Path) -> None:
    source = golden / "mcore_torch_dist/dense_gqa/tp2_pp2"
    with pytest.raises(
        UsageError, match="^optim=False, verify=True have no effect: metadata_only=True"
    ):
        core.convert(source, tmp_path / "out", metadata_only=True, optim=False, verify=True)


def test_values_are_those_of_the_command_line_or_what_they_stand_for(
    golden: Path, tmp_path: Path
) -> None:
    state = {"net.a": torch.ones(2), "net.b": torch.ones(2, dtype=torch.float64)}
    torch.save(state, tmp_path / "in.pt")
    for name, options in {
        "texts.pt": {"rename": "^net=it", "dtype": ["bf16", "it.b=fp16"], "memory": "2GiB"},
        "values.pt": {"rename": {"^net": "it"}, "dtype": {None: "bf16", "it.b": "fp16"}},
    }.items():
        core.convert(tmp_path / "in.pt", tmp_path / name, **options)
        result = torch.load(tmp_path / name)
        assert {key: tensor.dtype for key, tensor in result.items()} == {
            "it.a": torch.bfloat16,
            "it.b": torch.float16,
        }


def test_former_names_of_arguments_are_deprecated(golden: Path, tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="use optim") as warnings:
        core.convert(golden / RUN, tmp_path / "out", to="dcp", optimizer=False)
    assert {warning.filename for warning in warnings} == {__file__}
    with pytest.warns(DeprecationWarning, match="use tp_new"):
        core.reshard(golden / RUN, tmp_path / "tp1", tp=1)


_ONLY_ON_THE_COMMAND_LINE = {
    "src",
    "dst",
    "path",
    "paths",
    "keys",
    "a",
    "b",
    "root",
    "output",
    "words",
    "dry_run",
    "explain",
    "map",
    "report",
    "rank",
    "storage_option",
    "progress",
    "json",
    "quiet",
    "debug",
    "pager",
    "limit",
    "flat",
    "format",
    "yes",
    # The sizes that the source is said to have, which are former names of those to write.
    "tp",
    "pp",
    "vpp",
    "ep",
    "etp",
    # What is done with the findings, or with several checkpoints.
    "strict",
    "ignore",
    "baseline",
    "write_baseline",
    "newest_valid",
    "all_iterations",
    "list_checks",
}


@pytest.mark.parametrize(
    ("verb", "classes", "missing"),
    [
        (core.convert, (TransferOptions,), set()),
        (core.reshard, (TransferOptions,), set()),
        (
            core.merge,
            (TransferOptions, MergeOptions),
            {name.removeprefix("no_") for name in _NOT_IN_MERGE},
        ),
        (core.validate, (ValidateOptions,), set()),
        (core.diff, (DiffOptions,), set()),
        (core.prune, (PruneOptions,), set()),
    ],
)
def test_every_option_of_a_command_is_an_argument(
    verb: Callable[..., object], classes: tuple[type, ...], missing: set[str]
) -> None:
    names = {field.name.removeprefix("no_") for kind in classes for field in fields(kind)}
    arguments = inspect.signature(verb).parameters.keys()
    own = {"sources", "dry_run", *_ONLY_ON_THE_COMMAND_LINE}
    assert names - _ONLY_ON_THE_COMMAND_LINE - missing == arguments - own
    assert all(name in (inspect.getdoc(verb) or "") for name in arguments)


def test_the_help_of_a_verb_describes_each_option_once() -> None:
    page = inspect.getdoc(core.convert) or ""
    described = [name for name in OPTIONS if re.search(rf"\b{name}(, \w+)*:(?!:)", page)]
    assert described == list(OPTIONS)
    assert page.count(" optim: ") == 1


def test_progress_is_told_in_bytes_up_to_all_of_them(golden: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    report = core.convert(
        golden / "torch_dcp/tp2_only",
        tmp_path / "out",
        to="torch_dist",
        progress=lambda done, total: reports.append((done, total)),
    )
    done, total = reports[-1]
    assert 0 < done == total <= report.bytes_written
    assert {of for _, of in reports} == {total}


def test_values_may_be_texts_pairs_or_what_they_stand_for(golden: Path, tmp_path: Path) -> None:
    source = golden / "hf/qwen2_tied/safetensors_single"
    forms: list[dict[str, object]] = [
        {"rename": "^model=m", "dtype": "fp16", "threads": "1"},
        {"rename": ["^model=m"], "dtype": [(None, "fp16")], "threads": 1},
        {"rename": [("^model", "m")], "dtype": {None: "fp16"}, "threads": np.int64(1)},
        {"rename": {"^model": "m"}, "dtype": [("*", "fp16")]},
    ]
    results = []
    for number, options in enumerate(forms):
        core.convert(source, tmp_path / f"{number}.pt", **options)
        results.append(torch.load(tmp_path / f"{number}.pt"))
    assert {tensor.dtype for tensor in results[0].values()} == {torch.float16}
    assert all(result.keys() == results[0].keys() for result in results)
    with pytest.raises(UsageError, match="threads='x' is not a whole number"):
        core.convert(source, tmp_path / "x.pt", threads="x")
    with pytest.raises(UsageError, match="requires at least two checkpoints"):
        core.merge(source, tmp_path / "x.pt", average=True)  # one path, not its letters
    with pytest.raises(UsageError, match="rules: file not found"):
        core.validate(source, rules=tmp_path / "none.toml")


def test_a_former_name_beside_the_new_one_is_an_error(golden: Path, tmp_path: Path) -> None:
    with (
        pytest.warns(DeprecationWarning, match="use optim"),
        pytest.raises(TypeError, match="both optim and its"),
    ):
        core.convert(golden / RUN, tmp_path / "out", to="dcp", optimizer=True, optim=False)
    with pytest.raises(TypeError, match="'tp'"):
        core.convert(golden / RUN, tmp_path / "out", to="dcp", tp=2)
    with pytest.warns(DeprecationWarning, match="use tp_new"):
        core.reshard(golden / RUN, tmp_path / "out", tp=1, pp_new=1)


def test_a_refusal_names_only_options_that_were_given(golden: Path, tmp_path: Path) -> None:
    source = golden / "hf/qwen2_tied/safetensors_single"
    with pytest.raises(UsageError, match="^account_for_loss_in_pipeline_split=False has no effect"):
        core.convert(source, tmp_path / "out", to="hf", account_for_loss_in_pipeline_split=False)
