"""Optimizers of models of other kinds, whose weights megatron-core itself has cut
(``kinds_oracle.py``).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.megatron.model.topology import Rank, Topology, rank_dir
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.megatron.support.kinds import KINDS, all_built, files
from tests.megatron.support.numbered_files import Style, assert_same_optimizer, save

if (
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.core") is None
):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

STYLES = {
    "prediction": Style(),
    "prediction, experts": Style(),
    "hybrid": Style(native=("A_log", "mixer.D")),
    "linear attention": Style(steps=True),
}


@dataclass(frozen=True)
class Built:
    """A model of megatron-core, for ``numbered_files``."""

    folder: Path
    name: str

    def held(self, rank: Rank, topology: Topology) -> dict[str, dict[str, np.ndarray]]:
        sizes = (topology.tp, topology.pp, topology.ep)
        arrays = files(self.folder, self.name, sizes)[rank_dir(topology, rank)]
        return {"model": {name: array for name, array in arrays.items() if array is not None}}

    def args(self, topology: Topology) -> dict[str, object]:
        return KINDS[self.name].arguments(topology)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return all_built(tmp_path_factory)


def reshard(source: Path, target: Path, topology: Topology, **options: Any) -> None:
    sizes = {"tp": topology.tp, "pp": topology.pp}
    if topology.ep > 1 or (source / "ep").exists():
        sizes["ep"] = topology.ep
    run(Job(src=source, dst=target, topology=TopologyChange(**sizes), fsync=False, **options))


@pytest.mark.parametrize("name", STYLES)
def test_the_optimizer_is_that_of_a_run_at_the_target(
    folder: Path, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    model: Any = Built(folder, name)
    layouts = [Topology(tp=tp, pp=pp, ep=ep) for tp, pp, ep in KINDS[name].layouts if ep == 1]
    is_long = request.config.getoption("--long")
    layouts = layouts if is_long else [layouts[0], layouts[-1]]
    roots = {
        layout: save(model, layout, tmp_path / f"saved {layout}", STYLES[name])
        for layout in layouts
    }
    pairs = set(zip(layouts, [*layouts[1:], layouts[0]], strict=True))
    if is_long:
        pairs |= {(layouts[0], layout) for layout in layouts} | {
            (layout, layouts[0]) for layout in layouts
        }
    for a, b in pairs:
        out = tmp_path / f"{a} to {b}"
        reshard(roots[a], out, b)
        assert_same_optimizer(out, roots[b])


@pytest.mark.first(2)
@pytest.mark.parametrize("name", STYLES)
def test_the_optimizer_comes_back_from_torch_dist(folder: Path, tmp_path: Path, name: str) -> None:
    model: Any = Built(folder, name)
    a, b = Topology(tp=2), Topology()
    source = save(model, a, tmp_path / "source", STYLES[name])
    reshard(source, tmp_path / "dist", a, to="torch_dist")
    reshard(tmp_path / "dist", tmp_path / "back", b, to="megatron")
    assert_same_optimizer(tmp_path / "back", save(model, b, tmp_path / "wanted", STYLES[name]))
