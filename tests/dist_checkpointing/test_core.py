"""metadata.json: what is written and what is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)
from core.errors import CheckpointingException as Root
from core.errors import CorruptError, StorageError

CONFIG = CheckpointingConfig("zarr", 1)


def test_the_config_is_read_by_megatron_core_and_the_other_way_round(tmp_path: Path) -> None:
    theirs = pytest.importorskip("megatron.core.dist_checkpointing.core")
    for writer, reader, config in (
        (save_config, theirs.maybe_load_config, CONFIG),
        (theirs.save_config, maybe_load_config, theirs.CheckpointingConfig("zarr", 1)),
    ):
        writer(config, str(tmp_path))
        assert vars(reader(str(tmp_path))) == vars(CONFIG)
        assert json.loads((tmp_path / "metadata.json").read_text()) == vars(CONFIG)


def test_a_directory_without_config_is_no_distributed_checkpoint(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent", str(tmp_path), ""):
        assert maybe_load_config(place) is None
        assert not check_is_distributed_checkpoint(place)
    save_config(CONFIG, tmp_path)
    assert maybe_load_config(tmp_path) == CONFIG
    assert check_is_distributed_checkpoint(tmp_path)


def test_what_is_not_stated_has_its_default(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    assert maybe_load_config(tmp_path) == CheckpointingConfig("torch_dist", 1, "torch", 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"sharded_backend": 3}',
        '{"sharded_backend": "zarr", "x": 1}',
        '{"sharded_backend": "zarr", "common_backend_version": true}',
    ],
)
def test_a_config_that_is_none_is_corrupt(tmp_path: Path, text: str) -> None:
    (tmp_path / "metadata.json").write_text(text)
    with pytest.raises(CorruptError) as caught:
        maybe_load_config(tmp_path)
    assert caught.value.file == "metadata.json"
    assert not check_is_distributed_checkpoint(tmp_path)


def test_a_directory_that_is_not_there_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        save_config(CONFIG, tmp_path / "absent")


def test_the_documented_error_is_the_root_of_all() -> None:
    assert CheckpointingException is Root
