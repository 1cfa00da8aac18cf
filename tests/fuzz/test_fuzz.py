"""Readers of untrusted bytes under hypothesis: mutated real files, and structures that are nearly
right.

The invariant is that of ``scripts/fuzz``: a value, or an error of the project's tree. What the
longer runs of that script find becomes a case here.
"""

from __future__ import annotations

import itertools
import json
import zipfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import CheckpointingException
from core.files.store import MemoryStore
from core.formats.dcp import metadata as dcp_metadata
from core.formats.dcp.metadata_writer import ChunkRow, TensorRow, write_metadata
from core.formats.dcp.reading.catalog import build_catalog
from core.formats.torch.zip.container import read_archive
from tests.fuzz.seeds import seeds_of
from tests.fuzz.targets import TARGETS, survives
from tests.support.rounds import rounds

_EXAMPLES = rounds(60)


@cache
def _seeds(name: str, golden: Path) -> list[bytes]:
    return seeds_of(name, golden)


@pytest.mark.parametrize("name", TARGETS)
def test_real_inputs_are_survived(name: str, golden: Path) -> None:
    seeds = _seeds(name, golden)
    assert seeds
    ends = [survives(TARGETS[name], seed) for seed in seeds]
    assert len(ends) == len(seeds)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=_EXAMPLES)
@given(data=st.data())
def test_mutated_real_inputs_give_a_value_or_the_projects_error(
    name: str, golden: Path, data: st.DataObject
) -> None:
    content = bytearray(data.draw(st.sampled_from(_seeds(name, golden))))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content)))
        new = data.draw(
            st.binary(max_size=8) | st.sampled_from([b"\0" * 8, b"\xff" * 8, b'"', b"[", b"9" * 30])
        )
        cut = data.draw(st.integers(0, 8))
        content[at : at + cut] = new
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    survives(TARGETS[name], bytes(content))


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.integers(1 << 60, 1 << 70),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
_FIELDS: dict[str, tuple[str, ...]] = {
    "zarr2": (
        "zarr_format",
        "shape",
        "chunks",
        "dtype",
        "compressor",
        "filters",
        "order",
        "dimension_separator",
    ),
    "zarr3": (
        "zarr_format",
        "node_type",
        "shape",
        "data_type",
        "chunk_grid",
        "chunk_key_encoding",
        "codecs",
    ),
    "index_json": ("metadata", "weight_map"),
    "mcore_config": ("sharded_backend", "sharded_backend_version", "common_backend"),
    "orbax_tree": ("tree_metadata", "use_zarr3"),
    "manifest": ("schema", "version", "tool", "digest", "files", "arrays", "fingerprints"),
}


@pytest.mark.parametrize("name", _FIELDS)
@settings(max_examples=_EXAMPLES)
@given(data=st.data())
def test_metadata_with_other_values_give_a_value_or_the_projects_error(
    name: str, golden: Path, data: st.DataObject
) -> None:
    objects = [tree for seed in _seeds(name, golden) if isinstance(tree := _parsed(seed), dict)]
    base = dict(data.draw(st.sampled_from(objects)))
    for field in data.draw(
        st.lists(st.sampled_from([*_FIELDS[name], *list(base)[:8]]), min_size=1, max_size=3)
    ):
        if data.draw(st.booleans()):
            base[field] = data.draw(_JSON)
        elif isinstance(inner := base.get(field), dict) and inner:
            changed = data.draw(st.sampled_from(sorted(inner)))
            base[field] = {**inner, changed: data.draw(_JSON)}
        else:
            base.pop(field, None)
    survives(TARGETS[name], json.dumps(base).encode())


def _parsed(seed: bytes) -> object:
    try:
        return json.loads(seed)
    except ValueError:
        return None


_EXTENT = st.integers(0, 5) | st.sampled_from([1 << 31, 1 << 59, (1 << 63) - 1])


@st.composite
def _rows(draw: st.DrawFn) -> list[TensorRow]:
    rank = draw(st.integers(0, 3))
    vector = st.tuples(*[_EXTENT] * rank)
    chunk = st.builds(
        ChunkRow,
        vector,
        vector,
        st.sampled_from(["__0_0.distcp", "a/b", "../x", "/x", ""]),
        st.integers(0, 64) | st.just((1 << 62) - 3),
        st.integers(0, 64),
    )
    dtype = st.sampled_from(["float32", "bfloat16", "bool", "float8_e4m3fn"])
    row = st.builds(TensorRow, st.text(max_size=4), dtype, vector, st.lists(chunk, max_size=5))
    return draw(st.lists(row, min_size=1, max_size=3))


@settings(max_examples=4 * _EXAMPLES)
@given(rows=_rows())
def test_any_geometry_of_dcp_gives_a_catalog_or_the_projects_error(rows: list[TensorRow]) -> None:
    """And a plan over it is proven or refused: nothing is read where a chunk does not lie in its
    tensor.
    """
    try:
        data = write_metadata(rows, planner_data=None)
    except OverflowError:
        return
    try:
        metadata = dcp_metadata._parse_by_machine(data, ".metadata").checked(".metadata")
    except CheckpointingException:
        return
    catalog = build_catalog(metadata, format="dcp")
    for key, tensor in catalog.tensors.items():
        for piece in catalog.fragments(key):
            assert all(
                at >= 0 and at + n <= size
                for at, n, size in zip(piece.box.offset, piece.box.shape, tensor.shape, strict=True)
            )
    assert all(".." not in name and not name.startswith("/") for name in metadata.files)


@settings(max_examples=_EXAMPLES)
@given(
    names=st.lists(st.text(max_size=6), max_size=6),
    change=st.tuples(st.integers(0, 400), st.integers(0, 255)),
    method=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_any_zip_directory_is_read_as_records_inside_the_file_or_refused(
    names: list[str], change: tuple[int, int], method: int
) -> None:
    import io

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for number, name in enumerate(names):
            archive.writestr(f"m/{name}".encode("utf-8", "replace").decode(), bytes(number))
    content = bytearray(file.getvalue())
    at = len(content) - 1 - change[0] % len(content)
    content[at] = change[1]
    try:
        parsed = read_archive(MemoryStore({"x": bytes(content)}), "x")
    except CheckpointingException:
        return
    spans = sorted(record.span for record in parsed.records.values())
    assert all(0 <= start <= stop <= len(content) for start, stop in spans)
    assert all(first[1] <= two[0] for first, two in itertools.pairwise(spans))
