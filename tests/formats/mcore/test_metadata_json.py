"""``metadata.json`` of Megatron-core's distributed checkpoints, whatever the backend."""

from __future__ import annotations

import json

import pytest

from core.engine.catalog.catalog import catalog_of_arrays
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.store import MemoryStore
from core.formats.mcore.common_state import with_common_state
from core.formats.mcore.metadata_json import CONFIG, config_image, read_metadata_json, read_version
from core.megatron.extras.sharded_objects import is_sharded_object


def store_of(config: object) -> MemoryStore:
    return MemoryStore(
        {CONFIG: config if isinstance(config, bytes) else json.dumps(config).encode()}
    )


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
@pytest.mark.parametrize("has_common_file", [True, False])
def test_what_is_written_is_accepted(backend: str, has_common_file: bool) -> None:
    image = config_image(backend=backend, has_common_file=has_common_file)
    ((_, data),) = image.literals(lambda name: 0)
    store = store_of(data)
    assert read_version(store, backend=backend) == 1
    assert ("common_backend" in read_metadata_json(store)) == has_common_file


@pytest.mark.parametrize("name", ["evil", "../torch_dist", 7, None, ["torch_dist"]])
def test_an_unknown_backend_is_refused_by_its_name(name: object) -> None:
    with pytest.raises(UnsupportedError, match="specifies the unknown backend"):
        read_version(store_of({"sharded_backend": name}), backend="torch_dist")


def test_another_backend_is_named() -> None:
    with pytest.raises(CorruptError, match="'zarr'"):
        read_version(store_of({"sharded_backend": "zarr"}), backend="torch_dist")


@pytest.mark.parametrize("extra", [{"sharded_backend_version": 2}, {"common_backend": "x"}])
def test_another_version_or_common_backend_is_refused(extra: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError):
        read_version(store_of({"sharded_backend": "zarr", **extra}), backend="zarr")


def test_an_absent_config_is_an_unfinished_save() -> None:
    with pytest.raises(MissingShardError, match="did not finish"):
        read_version(MemoryStore({"common.pt": b""}), backend="zarr")


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"[" * 100_000, b" " * (1 << 20) + b"{}"])
def test_a_bad_config_is_corrupt_and_named(data: bytes) -> None:
    with pytest.raises(CorruptError) as caught:
        read_metadata_json(store_of(data))
    assert caught.value.file == CONFIG


def test_a_common_state_that_is_no_dict_is_corrupt() -> None:
    with pytest.raises(CorruptError, match="not a dict"):
        with_common_state(catalog_of_arrays(format="zarr", arrays={}), [1], file="x")


@pytest.mark.parametrize(
    ("key", "is_one"),
    [
        ("rng_state/shard_0.1_2.2", True),
        ("a._extra_state/shard_0_4", True),
        ("/shard_0_4", False),
        ("a/shard_0", False),
        ("a/shard_x_4", False),
    ],
)
def test_keys_of_sharded_objects_are_told_from_others(key: str, is_one: bool) -> None:
    assert is_sharded_object(key) == is_one
