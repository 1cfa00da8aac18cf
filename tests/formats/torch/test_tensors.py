"""Files with tensors of torchao 0.18.0, whose parts are what torchao itself has in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, run
from tests.support.archives import unpacked
from tests.support.real_readers import READERS, of_tensor

CASES = {
    "float8_row": "2 × Float8Tensor",
    "int8_row": "2 × Int8Tensor",
    "intx4_asym": "2 × IntxUnpackedToInt8Tensor",
    "opt4": "4 × OptimState4bit",
    "opt8": "4 × OptimState8bit",
    "optfp8": "4 × OptimStateFp8",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchao")
    return unpacked("torchao", folder)


@pytest.mark.parametrize("target", ["safetensors", "dcp"])
@pytest.mark.parametrize("case", list(CASES))
def test_the_parts_are_those_that_torchao_has_bit_for_bit(
    case: str, target: str, files: Path, tmp_path: Path
) -> None:
    run(Job(src=files / f"{case}.pt", dst=tmp_path / "out", to=target, fsync=False))
    parts = torch.load(files / f"{case}.parts.pt")
    expected = {key: of_tensor(tensor) for key, tensor in parts.items()}
    assert READERS[target](tmp_path / "out") == expected


def test_the_user_is_told_and_settings_are_kept(files: Path) -> None:
    for case, counts in CASES.items():
        opened = open_checkpoint(files / f"{case}.pt")
        assert any(counts in note for note in opened.catalog.notes)
    objects = open_checkpoint(files / "intx4_asym.pt").catalog.objects
    assert objects["0.weight.block_size"].value == (1, 16)
    assert objects["0.weight.target_dtype"].value == "int4"
    assert objects["0.weight.dtype"].value == "bfloat16"
    assert objects["0.weight.shape"].value == [48, 64]
