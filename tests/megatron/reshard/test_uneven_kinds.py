"""Models at uneven pipeline layouts as megatron-core 0.16.1 builds them: from even ones, to them,
to each other.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from core.engine.catalog.catalog import Catalog
from core.errors import CorruptError, MissingShardError
from core.files.store import MemoryStore
from core.megatron.model.args import fields_of
from core.megatron.model.pipeline import Pipeline, parse_layout
from core.megatron.model.topology import Topology
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.unshard import unshard
from tests.megatron.rules.test_kinds import check_files
from tests.megatron.support.kinds import Kind, built, catalog_of, files
from tests.megatron.support.megatron_gold import RULES

if (
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.core") is None
):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

Sizes = tuple[int, int, int]
_MTP = {"mtp_num_layers": 2}
_EXPERTS = {"num_moe_experts": 4, "moe_layer_freq": [0, 1, 1, 1], "moe_ffn_hidden_size": 8}
LAYOUT = "pipeline_model_parallel_layout"
EVEN: dict[str, Kind] = {
    "plain": Kind(layouts=((1, 1, 1), (2, 2, 1))),
    "tied": Kind(is_tied=True, layouts=((1, 1, 1), (2, 2, 1))),
    "prediction": Kind(_MTP, layouts=((1, 1, 1), (2, 2, 1))),
    "experts": Kind(_EXPERTS, layouts=((1, 1, 1), (1, 2, 2))),
}
UNEVEN: dict[str, tuple[str, Kind, Pipeline]] = {
    "first": (
        "plain",
        Kind({"num_layers_in_first_pipeline_stage": 1}, layouts=((1, 2, 1), (2, 2, 1))),
        Pipeline(first=1),
    ),
    "first and last": (
        "plain",
        Kind(
            {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1},
            layouts=((1, 3, 1),),
        ),
        Pipeline(first=1, last=1),
    ),
    "both count": (
        "tied",
        Kind(
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            is_tied=True,
            layouts=((1, 3, 1), (2, 2, 1)),
        ),
        Pipeline(counts_embedding=True, counts_loss=True),
    ),
    "alone": (
        "tied",
        Kind({LAYOUT: "E||t*4|L"}, is_tied=True, layouts=((1, 4, 1), (2, 4, 1))),
        Pipeline(layout=parse_layout("E||t*4|L")),
    ),
    "prediction beside layers": (
        "prediction",
        Kind({**_MTP, LAYOUT: "E|ttt|tmm|L"}, layouts=((1, 4, 1), (2, 4, 1))),
        Pipeline(layout=parse_layout("E|ttt|tmm|L")),
    ),
    "prediction alone": (
        "prediction",
        Kind({**_MTP, LAYOUT: "Et|ttt|mm|L"}, layouts=((1, 4, 1),)),
        Pipeline(layout=parse_layout("Et|ttt|mm|L")),
    ),
    "prediction at the end": (
        "prediction",
        Kind({**_MTP, "num_layers_in_last_pipeline_stage": 1}, layouts=((1, 2, 1),)),
        Pipeline(last=1),
    ),
    "experts": (
        "experts",
        Kind({**_EXPERTS, "num_layers_in_first_pipeline_stage": 3}, layouts=((1, 2, 2), (2, 2, 1))),
        Pipeline(first=3),
    ),
}
CASES = [(name, sizes) for name, (_, kind, _) in UNEVEN.items() for sizes in kind.layouts]
NAMES = {
    **{f"even {name}": kind for name, kind in EVEN.items()},
    **{name: kind for name, (_, kind, _) in UNEVEN.items()},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("uneven")
    built(root, NAMES, kinds=NAMES)
    return root


def at(sizes: Sizes, pipeline: Pipeline | None = None) -> Topology:
    return Topology(tp=sizes[0], pp=sizes[1], ep=sizes[2], pipeline=pipeline)


def source_of(folder: Path, name: str, sizes: Sizes) -> tuple[MemoryStore, Catalog]:
    topology = at(sizes)
    store, catalog = catalog_of(
        NAMES[name].arguments(topology), topology, files(folder, name, sizes)
    )
    return store, unshard(catalog, rules=RULES)


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_an_even_layout_becomes_what_megatron_builds(folder: Path, name: str, sizes: Sizes) -> None:
    model, _, pipeline = UNEVEN[name]
    for before in EVEN[model].layouts:
        store, source = source_of(folder, f"even {model}", before)
        check_files(source, store, at(sizes, pipeline), files(folder, name, sizes))


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_what_megatron_builds_becomes_an_even_layout(folder: Path, name: str, sizes: Sizes) -> None:
    model = UNEVEN[name][0]
    store, source = source_of(folder, name, sizes)
    for after in EVEN[model].layouts:
        check_files(source, store, at(after, Pipeline()), files(folder, f"even {model}", after))
    for other, (same, kind, pipeline) in UNEVEN.items():
        if same == model:
            for after in kind.layouts:
                check_files(source, store, at(after, pipeline), files(folder, other, after))


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_what_is_written_is_read_by_its_own_arguments(
    folder: Path, name: str, sizes: Sizes
) -> None:
    model, _, pipeline = UNEVEN[name]
    _, source = source_of(folder, f"even {model}", (1, 1, 1))
    args = shard(source, at(sizes, pipeline), rules=RULES).args
    _, catalog = catalog_of(fields_of(args), at(sizes), files(folder, name, sizes))
    assert set(unshard(catalog, rules=RULES).tensors) == set(source.tensors)


def test_layers_that_stand_elsewhere_than_the_arguments_say_are_reported(folder: Path) -> None:
    contents = files(folder, "first", (1, 2, 1))
    for options, error in (
        ({"num_layers_in_first_pipeline_stage": 3}, MissingShardError),
        ({}, MissingShardError),
        ({LAYOUT: "E|ttttL"}, CorruptError),
        ({LAYOUT: "Et|ttL"}, CorruptError),
        ({"num_layers_in_first_pipeline_stage": 4}, CorruptError),
        ({"num_layers_in_first_pipeline_stage": 1, LAYOUT: "Et|tttL"}, CorruptError),
        ({LAYOUT: "Et|ttt|L"}, CorruptError),
    ):
        args = Kind(options).arguments(at((1, 2, 1)))
        with pytest.raises(error):
            unshard(catalog_of(args, at((1, 2, 1)), contents)[1], rules=RULES)
