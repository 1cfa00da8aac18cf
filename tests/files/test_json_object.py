"""core.files.json_object: what files hold is read within bounds; see also
tests/formats/huggingface/test_files.py.
"""

from __future__ import annotations

import pytest

from core.errors import CorruptError, MissingShardError
from core.files.json_object import parse_json_object, read_json_object, read_small_file
from core.files.store import MemoryStore


def test_a_large_file_is_refused_before_it_is_read() -> None:
    store = MemoryStore({"config.json": b" " * 100})
    with pytest.raises(CorruptError, match="is 100 bytes long; the limit is 99"):
        read_json_object(store, "config.json", max_bytes=99)
    with pytest.raises(CorruptError, match="is 100 bytes long; the limit is 99") as caught:
        read_small_file(store, "config.json", max_bytes=99, key="w")
    assert caught.value.key == "w"
    with pytest.raises(MissingShardError):
        read_json_object(store, "other.json")


def test_an_object_in_bytes_names_where_it_came_from() -> None:
    assert parse_json_object(b'{"a": [1, null]}', file="x") == {"a": [1, None]}
    with pytest.raises(CorruptError) as caught:
        parse_json_object(b"3", file="x")
    assert caught.value.file == "x"


def test_more_values_than_are_allowed_are_refused() -> None:
    data = b'{"a": [1, 2, 3]}'
    assert parse_json_object(data, file="x", max_values=5)
    with pytest.raises(CorruptError, match="up to 5 JSON values; the limit is 4"):
        parse_json_object(data, file="x", max_values=4)


def test_infinity_is_read_as_configurations_of_state_space_models_have_it() -> None:
    assert parse_json_object(b'{"time_step_limit": [0.0, Infinity]}', file="x") == {
        "time_step_limit": [0.0, float("inf")]
    }
