"""Damaged optimizer files never block what needs the weights only: --no-optim, --to hf, merges."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from core.errors import CheckpointingException
from core.opening.damaged import open_readable_part
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from core.verbs.merge.request import Merge
from tests.support.rank_files import assert_same_bits

STEP = "global_step10_universal"
FILES = (
    "zero/head.weight/exp_avg.pt",
    "zero/layers.0.0.weight/exp_avg_sq.pt",
    "zero/embed.weight/step.pt",
    "zero/optimizer_state.pt",
)


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def _zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _replaced(path: Path) -> None:
    path.write_bytes(b"<!DOCTYPE html><html>404: Not Found</html>")


def _of_another(path: Path) -> None:
    other = "embed.weight" if "layers" in path.parent.name else "layers.1.2.weight"
    shutil.copyfile(path.parents[1] / other / "fp32.pt", path)


DAMAGES = (_emptied, _cut, _zeroed, _replaced, _of_another, Path.unlink)


@pytest.mark.each_value
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("case", ["zero1_dp2_bf16", "zero3_dp2_bf16"])
def test_no_damage_of_an_optimizer_file_blocks_the_weights(
    case: str, name: str, damage: Callable[[Path], None], golden: Path, tmp_path: Path
) -> None:
    intact = golden / "deepspeed_universal" / case
    root = Path(shutil.copytree(intact, tmp_path / "run"))
    if not (file := root / STEP / name).exists() or (damage is _of_another and "state" in name):
        pytest.skip("there is no such file")
    damage(file)
    options = {"to": "safetensors", "optim": "drop", "fsync": False}
    run(Job(src=intact, dst=tmp_path / "a.safetensors", **options))  # type: ignore[arg-type]
    run(Job(src=root, dst=tmp_path / "b.safetensors", **options))  # type: ignore[arg-type]
    expected, result = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert expected.keys() == result.keys()
    for key, tensor in expected.items():
        assert_same_bits(result[key], tensor, key)
    assert set(result) <= set(open_readable_part(root).catalog.tensors)
    # With the optimizer, the error names the way out; only the groups' file may be missing.
    if damage is Path.unlink and name == "zero/optimizer_state.pt":
        return
    with pytest.raises(CheckpointingException) as caught:
        run(Job(src=root, dst=tmp_path / "c", to="dcp", fsync=False))
    assert "--no-optim" in str(caught.value.hint)


def test_weights_for_hugging_face_need_no_optimizer(golden: Path, tmp_path: Path) -> None:
    model = golden / "hf/llama/safetensors_single"
    cast = ((None, "float32"),)
    run(Job(src=model, dst=tmp_path / "ucp", to="ucp", dtype=cast, fsync=False))
    for fp32 in list((tmp_path / "ucp").rglob("fp32.pt")):
        shutil.copyfile(fp32, fp32.with_name("exp_avg.pt"))
    _cut(sorted((tmp_path / "ucp").rglob("exp_avg.pt"))[0])
    job = Job(
        src=tmp_path / "ucp",
        dst=tmp_path / "out",
        to="hf",
        config=model / "config.json",
        fsync=False,
    )
    assert any("optimizer cannot be read" in note for note in run(job).notes)
    expected, result = (
        load_file(model / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    for key, tensor in result.items():
        assert_same_bits(tensor, expected[key].to(tensor.dtype), key)
    # Other formats keep the optimizer under Hugging Face's names.
    for to in ("dcp", "torch", "ucp"):
        with pytest.raises(CheckpointingException, match=r"zip|cut"):
            run(replace(job, dst=tmp_path / to, to=to, names="hf"))


DISTRIBUTED = "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt"


@pytest.mark.each_value
@pytest.mark.parametrize("damage", [_emptied, _cut, _zeroed, _replaced])
@pytest.mark.parametrize(
    ("source", "name"),
    [
        (DISTRIBUTED, "iter_0000010/mp_rank_01/distrib_optim.pt"),
        ("deepspeed_universal/zero1_dp2_bf16", f"{STEP}/{FILES[0]}"),
    ],
)
def test_merges_need_no_optimizer(
    source: str, name: str, damage: Callable[[Path], None], golden: Path, tmp_path: Path
) -> None:
    intact, damaged = golden / source, tmp_path / "damaged"
    damage(shutil.copytree(intact, damaged) / name)
    results = []
    for number, (first, second) in enumerate(
        [(intact, intact), (damaged, intact), (intact, damaged)]
    ):
        (folder := tmp_path / f"{number}").mkdir()
        merge = Merge(method="average", others=(second,))
        dst = folder / "out.safetensors"
        run(Job(src=first, dst=dst, to="safetensors", merge=merge, fsync=False))
        results.append(dst.read_bytes())
    assert results[0] == results[1] == results[2]
    assert open_readable_part(damaged).catalog.tensors


@pytest.mark.first(1)
@pytest.mark.parametrize("damage", [_cut, _emptied, _zeroed, _replaced])
def test_megatron_s_weights_for_hugging_face_need_no_optimizer(
    damage: Callable[[Path], None], golden: Path, tmp_path: Path
) -> None:
    damage(
        shutil.copytree(golden / DISTRIBUTED, tmp_path / "a")
        / "iter_0000010/mp_rank_00/distrib_optim.pt"
    )
    for name, source in (("a", tmp_path / "a"), ("b", golden / DISTRIBUTED)):
        run(Job(src=source, dst=tmp_path / f"hf_{name}", to="hf", fsync=False))
    first, other = (tmp_path / f"hf_{name}" / "model.safetensors" for name in "ab")
    assert first.read_bytes() == other.read_bytes()
