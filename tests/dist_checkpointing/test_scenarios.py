"""Training scripts get from this project what they get from megatron-core, and each reads what the
other wrote.

Every scenario is saved and loaded by both packages, in all four combinations.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from _pytest.mark import ParameterSet

from core.opening.open import open_checkpoint
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.scenarios import SCENARIOS, Layout, api_of
from tests.support.covering import covering_cases

OURS, THEIRS = "core.dist_checkpointing", "megatron.core.dist_checkpointing"
PACKAGES = (OURS, THEIRS) if importlib.util.find_spec("megatron") else (OURS,)

pytestmark = [pytest.mark.dist, pytest.mark.slow]

Observed = Any
"""What the ranks of a run observed, by rank; a text where one raised."""


def _prepared(package: str) -> Any:
    warnings.simplefilter("ignore")
    if package == THEIRS:
        from tests.real_megatron import cpu

        cpu.install()
    return api_of(package)


THEIR_MOST_RANKS = 4
"""Of megatron-core's runs: to start it takes seconds of each rank."""


def writers(name: str) -> tuple[str, ...]:
    """The packages that save a scenario."""
    scenario = SCENARIOS[name]
    return (
        PACKAGES
        if scenario.is_saved_by_both and scenario.saved.world <= THEIR_MOST_RANKS
        else (OURS,)
    )


def readers(name: str, layout: Layout) -> tuple[str, ...]:
    """The packages that load it at a layout."""
    is_both = SCENARIOS[name].is_loaded_by_both and layout.world <= THEIR_MOST_RANKS
    return PACKAGES if is_both else (OURS,)


def _save(rank: int, world: int, package: str, root: str, names: list[str]) -> dict[str, Any]:
    """Runs the save of each scenario, into ``root/package/name``."""
    api = _prepared(package)
    results = {}
    for name in names:
        scenario = SCENARIOS[name]
        folder = Path(root, package, name)
        if rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        results[name] = scenario.save(api, scenario.saved.place(rank), str(folder))
        dist.barrier()
    return results


def _load(
    rank: int, world: int, package: str, root: str, cases: list[tuple[str, Layout, str]]
) -> dict[Any, Any]:
    """Runs the load of each (scenario, layout, writer), beside what it should give."""
    api = _prepared(package)
    results = {}
    for name, layout, writer in cases:
        scenario, place = SCENARIOS[name], layout.place(rank)
        results[name, layout, writer] = scenario.load(api, place, str(Path(root, writer, name)))
        dist.barrier()
        if scenario.expected is not None and (name, layout, "expected") not in results:
            results[name, layout, "expected"] = scenario.expected(api, place)
    return results


class Runs:
    """The runs of all scenarios, each made when it is first asked for.

    Args:
        root: where checkpoints go.
        loads: the (scenario, layout, reader, writer) of the tests that were collected.
    """

    def __init__(self, root: Path, loads: list[tuple[str, Layout, str, str]]) -> None:
        self.root = root
        self._loads = loads
        self._made: dict[Any, Any] = {}

    def saved(self, package: str, world: int) -> list[dict[str, Any]]:
        """Observations by rank, of all scenarios that are saved by so many ranks."""
        names = [
            name
            for name, s in SCENARIOS.items()
            if s.saved.world == world and package in writers(name)
        ]
        return self._once((_save, package, world), names)

    def loaded(self, package: str, world: int) -> list[dict[Any, Any]]:
        """Observations by rank, of the loads by so many ranks."""
        for name in dict.fromkeys(name for name, *_ in self._loads):
            for each in writers(name):
                self.saved(each, SCENARIOS[name].saved.world)
        cases: dict[tuple[str, Layout, str], None] = {}
        for name, layout, reader, writer in self._loads:
            if layout.world != world:
                continue
            if reader == package:
                cases[name, layout, writer] = None
            # What nobody has worked out beforehand is compared with the original.
            if SCENARIOS[name].expected is None and readers(name, layout)[-1] == package:
                cases[name, layout, writers(name)[-1]] = None
        return self._once((_load, package, world), list(cases))

    def _once(self, key: tuple[Any, str, int], cases: list[Any]) -> Any:
        """A run's result; a run that failed is not made again."""
        if key not in self._made:
            function, package, world = key
            try:
                self._made[key] = run_ranks(world, function, package, str(self.root), cases)
            except AssertionError as err:
                self._made[key] = err
        if isinstance(self._made[key], AssertionError):
            raise self._made[key]
        return self._made[key]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    names = ("name", "layout", "reader", "writer")
    collected = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == Path(__file__)
        and hasattr(item, "callspec")
    ]
    loads = [tuple(values[name] for name in names) for values in collected if "writer" in values]
    return Runs(tmp_path_factory.mktemp("scenarios"), loads)


MOST_RANKS = 4
"""Without ``--long``: layouts of two axes, but not of all three."""


def _marks(*layouts: Layout) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] if any(layout.world > MOST_RANKS for layout in layouts) else []


def _saves(names: Iterable[str]) -> list[ParameterSet]:
    """Return the scenarios for ``parametrize``."""
    return [pytest.param(name, marks=_marks(SCENARIOS[name].saved)) for name in names]


LOADS = covering_cases(
    (
        pytest.param(
            name,
            layout,
            reader,
            writer,
            id=f"{name}-tp{layout.tp}pp{layout.pp}dp{layout.dp}-{reader}-{writer}",
            marks=_marks(layout, scenario.saved),
        )
        for name, scenario in SCENARIOS.items()
        for layout in scenario.loads
        for reader in readers(name, layout)
        for writer in writers(name)
    ),
    lambda name, layout, reader, writer: {"name": name, "who": (reader, writer), "layout": layout},
)


@pytest.mark.parametrize("name", _saves(SCENARIOS))
def test_saving_is_observed_alike(runs: Runs, name: str) -> None:
    world = SCENARIOS[name].saved.world
    results = [[rank[name] for rank in runs.saved(package, world)] for package in writers(name)]
    assert results[0] == results[-1]


@pytest.mark.parametrize(
    "name", _saves(name for name, scenario in SCENARIOS.items() if scenario.is_checkpoint)
)
def test_both_write_the_same_tensors_and_objects(runs: Runs, name: str) -> None:
    contents = []
    for package in writers(name):
        runs.saved(package, SCENARIOS[name].saved.world)
        checkpoint = open_checkpoint(runs.root / package / name)
        catalog = checkpoint.catalog
        tensors = {key: (tensor.dtype, tensor.shape) for key, tensor in catalog.tensors.items()}
        contents.append((checkpoint.format.name, tensors, sorted(catalog.objects)))
        checkpoint.store.close()
    assert contents[0] == contents[-1]
    assert contents[0][1] or contents[0][2]


@pytest.mark.parametrize(("name", "layout", "reader", "writer"), LOADS)
def test_loading_gives_the_same_whoever_wrote_and_whoever_reads(
    runs: Runs, name: str, layout: Layout, reader: str, writer: str
) -> None:
    results = [rank[name, layout, writer] for rank in runs.loaded(reader, layout.world)]
    if SCENARIOS[name].expected is not None:
        assert results == [
            rank[name, layout, "expected"] for rank in runs.loaded(reader, layout.world)
        ]
    else:
        oracle = writers(name)[-1]
        assert results == [
            rank[name, layout, oracle]
            for rank in runs.loaded(readers(name, layout)[-1], layout.world)
        ]
