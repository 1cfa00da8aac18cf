"""The rows of the registry agree with the formats that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.files.source_store import open_store
from core.formats.registry import BUILT_IN, BuiltIn, list_names


@pytest.mark.parametrize("row", BUILT_IN, ids=lambda row: row.names[0])
def test_row_has_the_names_of_its_format(row: BuiltIn) -> None:
    format = row.load()

    assert row.names == (format.name, *format.aliases)


def test_no_checkpoint_is_recognised_that_its_row_does_not_allow(golden: Path) -> None:
    paths = [path for path in golden.rglob("*") if not path.name.startswith("__")]
    recognised: dict[str, int] = {}
    for path in paths:
        store = open_store(path) if path.is_dir() else open_store(path.parent, entry=path.name)
        names = list_names(store)
        for row in BUILT_IN:
            if row.load().sniff(store):
                assert row.allows(store, names), f"{path} is {row.names[0]}"
                recognised[row.names[0]] = recognised.get(row.names[0], 0) + 1
        store.close()

    assert {"megatron", "torch_dist", "dcp", "orbax", "zarr", "safetensors"} <= recognised.keys()


@pytest.mark.parametrize("row", BUILT_IN, ids=lambda row: row.names[0])
def test_row_says_whether_its_format_is_written(row: BuiltIn) -> None:
    assert (row.stores is not None) == (row.load().lay_out is not None)
