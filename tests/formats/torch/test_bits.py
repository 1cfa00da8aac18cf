"""torch's types of bare bits are moved as they are, where the other side has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.errors import UnsupportedError
from core.verbs.convert.run import Job, run

NAMES = ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")


def test_bits_go_through_torch_files_and_dcp_as_they_are(tmp_path: Path) -> None:
    raw = torch.arange(32, dtype=torch.uint8)
    state = {name: raw.view(getattr(torch, name)).reshape(4, -1) for name in NAMES}
    torch.save(state, tmp_path / "in.pt")
    run(Job(src=tmp_path / "in.pt", dst=tmp_path / "dcp", to="dcp", fsync=False, verify=True))
    run(Job(src=tmp_path / "dcp", dst=tmp_path / "out.pt", to="torch", fsync=False))

    loaded = {name: torch.zeros(32, dtype=torch.uint8) for name in NAMES}
    loaded = {name: item.view(state[name].dtype).view(4, -1) for name, item in loaded.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    again = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, tensor in state.items():
        for copy in (loaded[name], again[name]):
            assert copy.dtype == tensor.dtype
            assert torch.equal(copy.view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("to", ["safetensors", "zarr3", "orbax"])
def test_bits_are_refused_by_name_where_the_format_has_no_such_type(
    to: str, tmp_path: Path
) -> None:
    torch.save({"w": torch.zeros(4, dtype=torch.uint8).view(torch.bits8)}, tmp_path / "in.pt")
    with pytest.raises(UnsupportedError, match="bits8") as raised:
        run(Job(src=tmp_path / "in.pt", dst=tmp_path / "out", to=to, fsync=False))
    assert raised.value.key == "w"
    assert raised.value.hint == "write a different format with --to"
    assert not (tmp_path / "out").exists()
