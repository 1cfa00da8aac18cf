"""The other sources of a merge are refused before anything of them is used."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from ckpt_cli.app import main


@pytest.mark.parametrize("place", ["an object", "an attribute of a tensor"])
def test_a_source_that_would_run_code_is_merged_as_the_copy_that_the_hint_makes(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    calling = map(len, [[1]])
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.calls = calling  # type: ignore[attr-defined]
    entry = parameter if "tensor" in place else calling
    torch.save({"w": torch.zeros(2), "s": entry}, tmp_path / "b.pt")

    line = ["merge", str(tmp_path / "a.pt"), "OTHER", "--average", "-o", str(tmp_path / "out.pt")]
    other, copy = str(tmp_path / "b.pt"), str(tmp_path / "copy.pt")
    assert main([other if word == "OTHER" else word for word in line]) == 5
    hint = re.search(
        r"hint: merge a copy without it: ckpt (convert SRC DST --exclude \w+), and find out",
        capsys.readouterr().err,
    )
    assert hint is not None
    paths = {"SRC": other, "DST": copy}
    assert main([paths.get(word, word) for word in shlex.split(hint[1])]) == 0
    assert main([copy if word == "OTHER" else word for word in line]) == 0
    assert torch.equal(torch.load(tmp_path / "out.pt")["w"], torch.full((2,), 0.5))
