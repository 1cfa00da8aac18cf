"""What verbs find and write with a device is what they do without: whole runs on torch's CPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from core.engine.calibration.choice import decisions
from core.engine.device.device import COMPARE, FINGERPRINT, VALUES, Device
from core.engine.device.lane import LANE_BYTES, Lane
from core.errors import CapacityError
from core.publish.manifest.inventory import read_inventory
from core.verbs.checks.finding import Level
from core.verbs.convert.run import Job, run, within_memory
from core.verbs.convert.workers.run import run_shared
from core.verbs.validate.run import Validation, validate
from tests.support.teams import PipeTeam, run_team
from tests.verbs.checks.test_deep import put

DEVICE = Device("cpu")


def validated(path: Path, device: Device | None, *, against: Path | None = None) -> Validation:
    report = validate(path, level=Level.DEEP, threads=2, against=against, device=device)
    return replace(report, seconds=0)


def used() -> set[str]:
    return {decision.work for decision in decisions(DEVICE) if decision.is_on_device}


def damaged(folder: Path, *, flip: bool = False) -> Path:
    """Weights with everything that is said about numbers."""
    random = np.random.default_rng(7)
    usual = random.standard_normal((700, 600), dtype=np.float32)
    odd = usual.copy()
    odd[600, 5], odd[3, 4], odd[3, 5], odd[0, 1] = np.nan, np.inf, -np.inf, 1e31
    half = usual.astype(np.float16)
    half[10, 10] = -np.inf
    tensors = {
        "usual.weight": usual,
        "odd.weight": odd,
        "half.weight": half,
        "zero.weight": np.zeros((300, 1000), np.float32),
        "same.weight": np.full((64, 64), 3, np.float16),
        "ids": np.arange(5000),
    }
    if flip:
        tensors["usual.weight"] = usual[::-1].copy()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_values_and_fingerprints_are_found_on_a_device(tmp_path: Path) -> None:
    first, other = damaged(tmp_path / "a"), damaged(tmp_path / "b", flip=True)
    expected = validated(first, None, against=other)
    assert {"CK710", "CK711", "CK712", "CK713", "CK715", "CK824"} <= {
        finding.code for finding in expected.findings
    }
    assert validated(first, DEVICE, against=other) == expected
    assert {VALUES, FINGERPRINT} <= used()


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "name", ["mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt", "torch_dcp/tp2_fsdp2_dp2"]
)
def test_a_whole_checkpoint_is_whole_on_a_device(golden: Path, name: str) -> None:
    assert validated(golden / name, DEVICE) == validated(golden / name, None)


def test_copies_that_differ_are_found_on_a_device(golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(golden / "mcore_legacy/dense_gqa/tp4_pp1", path)
    put(path, "decoder.layers.1.input_layernorm.weight", (17,), b"\x34\x12", copy=0)
    expected = validated(path, None)
    assert "CK720" in {finding.code for finding in expected.findings}
    assert validated(path, DEVICE) == expected
    assert COMPARE in used()


@pytest.mark.parametrize(
    "change", [{"dtype": ((None, "bfloat16"),)}, {"quantize": ((None, "block"),)}, {}]
)
def test_a_conversion_with_a_device_writes_the_same_files(
    golden: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    src = golden / "hf/llama/safetensors_sharded"
    contents = []
    for name, device in (("a", None), ("b", DEVICE)):
        dst = tmp_path / name
        run(Job(src=src, dst=dst, fingerprint=True, verify=True, device=device, **change))  # type: ignore[arg-type]
        contents.append({path.name: path.read_bytes() for path in sorted(dst.iterdir())})
    assert contents[0] == contents[1]


def test_a_manifest_has_the_same_fingerprints_with_a_device(golden: Path) -> None:
    alone, other = (
        read_inventory(
            golden / "mcore_torch_dist/dense_gqa/tp2_pp2_optim", threads=2, device=device
        )
        for device in (None, DEVICE)
    )
    assert (
        alone.fingerprints
        and alone.fingerprints == other.fingerprints
        and alone.arrays == other.arrays
    )


def converted(team: PipeTeam, src: Path, dst: Path) -> None:
    run_shared(
        Job(
            src=src,
            dst=dst,
            to="safetensors",
            dtype=((None, "bfloat16"),),
            verify=True,
            device=DEVICE,
        ),
        team,
    )


def test_workers_with_devices_write_the_same_files(golden: Path, tmp_path: Path) -> None:
    src = golden / "hf/llama/torch_single/model_zip.pt"
    run(Job(src=src, dst=tmp_path / "a", to="safetensors", dtype=((None, "bfloat16"),)))
    run_team(2, converted, src, tmp_path / "b")
    first, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"
    )
    assert first == other


def test_a_device_counts_in_the_memory_promise(golden: Path, tmp_path: Path) -> None:
    job = Job(
        src=golden / "hf/llama/safetensors_sharded", dst=tmp_path / "a", memory_bytes=512 << 20
    )
    assert within_memory(replace(job, device=DEVICE)).memory_bytes == (512 << 20) - 2 * LANE_BYTES
    with pytest.raises(
        CapacityError, match=r"cuda:0 and its pinned buffers need .*--memory to at least \d+MiB"
    ):
        run(replace(job, device=Device("cuda:0")))
    assert within_memory(replace(job, device=Device("cuda:9", is_auto=True))) == job
    (decision,) = decisions(Device("cuda:9", is_auto=True))
    assert not decision.is_on_device and "host memory" in decision.reason


def test_a_window_is_sent_once_for_all_that_look_at_parts_of_it() -> None:
    lane = Lane(DEVICE)
    window = bytearray(range(64))
    view = memoryview(window)

    def first_bytes(start: int) -> list[int]:
        return [
            int(piece[0])
            for piece in lane.map_pieces((view[start : start + 8],), lambda data: data[:1], size=8)
        ]

    with lane.uploaded_once(view):
        assert first_bytes(8) == [8]
        window[16] = 99  # it must not change; so it shows what was sent
        window[17] = 98
        assert first_bytes(16) == [16]
        assert first_bytes(17) == [98]  # where elements would not begin at multiples of their size
    assert first_bytes(16) == [99]
