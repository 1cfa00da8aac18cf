"""Objects count against the memory limit, before they are read."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.convert.run import Job, run
from core.errors import CapacityError

MIB = 1 << 20


def make_small_source(path: Path) -> Path:
    torch.save({"w": torch.ones(4)}, path / "small.pt")
    return path / "small.pt"


def make_source(path: Path, form: str) -> Path:
    state = {"w": torch.ones(4), "sampler": {"indices": list(range(10**6, 1_400_000))}}
    if form == "dcp":
        dcp.save(state, checkpoint_id=path / "dcp", no_dist=True)
        return path / "dcp"
    is_zip = form == "torch"
    torch.save(state, path / "in.pt", _use_new_zipfile_serialization=is_zip)
    return path / "in.pt"


@pytest.mark.each_value
@pytest.mark.parametrize("form", ["torch", "torch of before 1.6", "dcp"])
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_objects_that_take_too_much_memory_are_refused_before_they_are_read(
    form: str, to: str, tmp_path: Path
) -> None:
    src = make_source(tmp_path, form)
    dst = tmp_path / ("out.pt" if to == "torch" else "out")
    run(Job(src=make_small_source(tmp_path), dst=tmp_path / "warm.pt"))
    tracemalloc.start()
    try:
        with pytest.raises(CapacityError, match="400,0.. values in objects") as caught:
            run(Job(src=src, dst=dst, to=to, memory_bytes=128 * MIB))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A list of as many integers takes 14 MB; what was read of the file takes a part of that.
    assert peak < 9e6
    least = int((caught.value.hint or "").removeprefix("set --memory to at least ")[:-3])
    run(Job(src=src, dst=dst, to=to, memory_bytes=least * MIB))
    assert dst.exists()


def test_many_tensors_are_not_taken_for_objects(tmp_path: Path) -> None:
    shared = torch.ones(1)
    torch.save({f"layers.{number}.w": shared[:] for number in range(20_000)}, tmp_path / "in.pt")
    assert (tmp_path / "in.pt").stat().st_size > 80 * MIB // 450
    run(Job(src=tmp_path / "in.pt", dst=tmp_path / "out.pt", memory_bytes=192 * MIB))
