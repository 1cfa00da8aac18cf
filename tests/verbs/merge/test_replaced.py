"""``ckpt merge --replace``: some tensors of another checkpoint, all others of the first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_cli.app import main
from core.errors import UnsupportedError, UsageError
from core.verbs.convert.run import Job, run
from core.verbs.merge.request import Merge

_TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(4.0),
    "n": torch.arange(5),
}


def _model(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_second_has_its_tensors_in_the_result_and_the_first_all_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = {"b": -torch.arange(4.0).bfloat16() - 1, "n": torch.arange(5) * 7}
    first, other = _model(tmp_path / "first", _TENSORS), _model(tmp_path / "other", new)
    dst = tmp_path / "dst"
    assert main(["merge", str(first), str(other), "--replace", "-o", str(dst)]) == 0
    result = load_file(dst / "model.safetensors")
    for key, value in {"a": _TENSORS["a"], **new}.items():
        assert result[key].dtype == value.dtype
        assert torch.equal(result[key], value)
    shown = capsys.readouterr().out
    assert f"2 of 3 tensors come from {other}" in shown
    assert f"b: the dtypes differ; the result uses those of {other}" in shown


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"c": torch.zeros(2)}, "1 of 1 tensors are not in .*: c"),
        ({"b": torch.zeros(5)}, r"shapes differ between .*: b is \(4,\) and \(5,\)"),
        ({"b": torch.zeros(4), "c": torch.zeros(2)}, "1 of 2 tensors are not in"),
    ],
)
def test_a_tensor_without_a_place_in_the_first_is_refused_before_anything_is_written(
    new: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    first, other = _model(tmp_path / "first", _TENSORS), _model(tmp_path / "other", new)
    job = Job(src=first, dst=tmp_path / "dst", merge=Merge(method="replace", others=(other,)))
    with pytest.raises(UnsupportedError, match=message):
        run(job)
    assert not (tmp_path / "dst").exists()


def test_replace_takes_two_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="--replace requires two checkpoints, but 3 were specified"
    ):
        Merge(method="replace", others=(tmp_path, tmp_path))
