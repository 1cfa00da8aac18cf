"""Objects count against the memory limit, before they are read and after."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.engine.plan.memory import RUNTIME_BYTES
from core.errors import CapacityError
from core.opening.objects import with_objects_loaded
from core.opening.open import open_checkpoint
from core.publish.manifest.inventory import read_inventory
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, run
from core.verbs.diff.run import DiffJob, diff
from core.verbs.validate.run import validate

MIB = 1 << 20
N_INDICES = 1_600_000


def make_small_source(path: Path) -> Path:
    torch.save({"w": torch.ones(4)}, path / "small.pt")
    return path / "small.pt"


@pytest.fixture(scope="module")
def torch_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source"), "torch")


def make_source(path: Path, form: str) -> Path:
    state = {"w": torch.ones(4), "sampler": {"indices": list(range(10**6, 10**6 + N_INDICES))}}
    if form == "dcp":
        dcp.save(state, checkpoint_id=path / "dcp", no_dist=True)
        return path / "dcp"
    is_zip = form == "torch"
    torch.save(state, path / "in.pt", _use_new_zipfile_serialization=is_zip)
    return path / "in.pt"


def least_memory_of(err: CapacityError) -> int:
    return int((err.hint or "").removeprefix("set --memory to at least ")[:-3])


@pytest.mark.parametrize(
    ("form", "to"), [("torch", "dcp"), ("torch of before 1.6", "torch"), ("dcp", "torch")]
)
def test_objects_that_take_too_much_memory_are_refused_before_they_are_read(
    form: str, to: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    src = make_source(tmp_path, form)
    dst = tmp_path / ("out.pt" if to == "torch" else "out")
    run(Job(src=make_small_source(tmp_path), dst=tmp_path / "warm.pt"))
    # To trace memory takes six times as long as the run itself.
    is_whole = form == "torch" or request.config.getoption("--long")
    if is_whole:
        tracemalloc.start()
    try:
        with pytest.raises(CapacityError, match="objects with 1,600,0.. values") as caught:
            run(Job(src=src, dst=dst, to=to, memory_bytes=96 * MIB))
        _, peak = tracemalloc.get_traced_memory()  # 0 unless it is traced
    finally:
        tracemalloc.stop()
    # A list of as many integers takes 58 MB; what was read of the file takes a part of that.
    assert peak < 36e6
    if is_whole:
        run(Job(src=src, dst=dst, to=to, memory_bytes=least_memory_of(caught.value) * MIB))
    assert dst.exists() == is_whole


@pytest.mark.parametrize(
    "verb",
    [
        lambda path, n_bytes: validate(path, memory_bytes=n_bytes),
        lambda path, n_bytes: diff(DiffJob(a=path, b=path, memory_bytes=n_bytes)),
        lambda path, n_bytes: read_inventory(path, memory_bytes=n_bytes),
    ],
    ids=["validate", "diff", "manifest"],
)
def test_verbs_that_write_nothing_refuse_them_too(
    verb: Callable[[Path, int], object], torch_source: Path
) -> None:
    with pytest.raises(CapacityError, match="objects with .* values") as caught:
        verb(torch_source, 96 * MIB)
    verb(torch_source, least_memory_of(caught.value) * MIB)


@pytest.mark.first(2)  # memory is traced, half a minute for each of the others
@pytest.mark.parametrize(
    ("value", "to"),
    [
        (b"\xff\x00" * (8 * MIB), "torch"),
        ("text" * (4 * MIB), "dcp"),
        (list(range(10**6, 1_500_000)), "torch"),
        (
            [{"step": step, "name": f"n{step}", "losses": [0.5, step]} for step in range(9000)],
            "dcp",
        ),
    ],
    ids=["bytes", "text", "list", "dicts"],
)
def test_the_forecast_covers_what_objects_take(value: object, to: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4), "v": value}, tmp_path / "in.pt")
    small = Job(src=make_small_source(tmp_path), dst=tmp_path / "small.out", to=to)
    run(small)
    job = Job(src=tmp_path / "in.pt", dst=tmp_path / "out", to=to)
    with prepare(replace(small, dst=tmp_path / "x")) as ordinary, prepare(job) as prepared:
        forecast = prepared.plan.memory_bytes - ordinary.plan.memory_bytes
    gc.collect()
    tracemalloc.start()
    try:
        run(job)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What the program may take anyway includes ordinary objects, and buffers.
    assert peak - 24 * MIB < forecast < 2 * peak


def test_a_small_object_leaves_no_garbage_for_a_paused_collector(tmp_path: Path) -> None:
    state = {"w": torch.ones(4), **{f"extra.{number}": {"a": number} for number in range(50)}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = open_checkpoint(tmp_path / "dcp")
    with_objects_loaded(source)
    gc.collect()
    gc.disable()
    try:
        loaded = with_objects_loaded(source)
        assert gc.collect() < 50
    finally:
        gc.enable()
        source.store.close()
    assert len(loaded.catalog.objects) >= 50


def test_many_tensors_are_not_taken_for_objects(tmp_path: Path) -> None:
    shared = torch.ones(1)
    torch.save({f"layers.{number}.w": shared[:] for number in range(2_000)}, tmp_path / "in.pt")
    assert (tmp_path / "in.pt").stat().st_size > (RUNTIME_BYTES + 32 * MIB) // 600
    run(Job(src=tmp_path / "in.pt", dst=tmp_path / "out.pt", memory_bytes=192 * MIB))
