"""Other software reads the optimizer that we wrote: megatron-core 0.16.1 torch_dist, tensorstore
zarr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.formats.megatron.test_loads import SCRIPT, catalog_of
from tests.support.asked import asked
from tests.support.real_readers import read_zarr

pytestmark = pytest.mark.slow

RESHARDABLE = "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fullyreshardable"
PLAIN = "mcore_torch_dist/dense_gqa/tp2_pp2_optim"
MODEL_SPACE = "mcore0121_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space"
ZARR = "mcore0121_zarr/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space"

OURS = {
    MODEL_SPACE: RESHARDABLE,
    ZARR: RESHARDABLE,
    "mcore0121_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dp_zero_gather_scatter": RESHARDABLE,
    "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable": RESHARDABLE,
    "mcore_legacy/dense_gqa/tp1_pp1_dp2_distopt": RESHARDABLE,
    "mcore_legacy/dense_gqa/tp4_pp1_optim": PLAIN,
    "mcore0121_zarr/dense_gqa/tp2_pp2_optim": PLAIN,
}
"""A source → what Megatron itself saved of the same optimizer."""


@pytest.fixture(scope="module")
def answers(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Case → what megatron-core saw."""
    root = tmp_path_factory.mktemp("optimizers")
    cases: dict[str, dict[str, object]] = {}
    for number, (source, theirs) in enumerate(OURS.items()):
        folder = golden / theirs / "iter_0000010"
        cases[theirs] = {"dir": str(folder), "objects": [], "has_common": False}
        dst = root / str(number)
        sizes = TopologyChange(tp=2, pp=2)
        run(Job(src=golden / source, dst=dst, to="torch_dist", topology=sizes, fsync=False))
        folder = dst / "iter_0000010"
        has_common = (
            "mcore0121" in source
        )  # the arguments of HEAD name enums that 0.16.1 does not have
        cases[source] = {
            "dir": str(folder),
            "objects": sorted(catalog_of(folder).objects),
            "has_common": has_common,
        }
    answered: dict[str, dict[str, Any]] = asked("-c", SCRIPT, question=cases)
    return answered


@pytest.mark.parametrize("source", OURS)
def test_megatron_core_loads_every_state_as_from_its_own(
    answers: dict[str, dict[str, Any]], source: str
) -> None:
    ours, theirs = answers[source], answers[OURS[source]]
    states = [key for key in theirs["tensors"] if key.startswith("optimizer.state.")]
    assert len(states) == 30
    for part in ("metadata", "tensors", "parts"):
        assert ours[part] == theirs[part], part


@pytest.mark.parametrize("source", [name for name in OURS if "mcore0121" in name])
def test_megatron_core_finds_the_form_and_the_settings(
    answers: dict[str, dict[str, Any]], source: str
) -> None:
    common = answers[source]["common"]
    content, entry = common["content_metadata"], common["optimizer"]
    assert content["chained_optim_avoid_prefix"] == "True"
    assert len(entry["optimizer"]["param_groups"]) == 3  # the name of the type, then two groups
    if "distopt" in source:
        assert content["distrib_optim_sharding_type"] == "'fully_reshardable'"
        assert entry["param_state_sharding_type"] == "'fully_reshardable'"
        assert all(group["step"] == "1.0" for group in entry["optimizer"]["param_groups"][1:])
    else:
        assert "distrib_optim_sharding_type" not in content
        assert entry["optimizer"]["state"]["common_step"][:3] == ["tensor", "torch.float32", []]


@pytest.mark.parametrize(
    "source",
    ["mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt", RESHARDABLE, MODEL_SPACE],
    ids=["ranks", "new", "old"],
)
def test_tensorstore_reads_zarr_as_it_reads_megatrons(
    golden: Path, tmp_path: Path, source: str
) -> None:
    run(Job(src=golden / source, dst=tmp_path / "out", to="zarr", fsync=False))
    ours, theirs = read_zarr(tmp_path / "out"), read_zarr(golden / ZARR)
    assert set(ours) == set(theirs)
    assert ours == theirs
