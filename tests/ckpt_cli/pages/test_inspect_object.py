from __future__ import annotations

import json
from pathlib import Path

from ckpt_cli.pages.inspect_object import MAX_NODES, object_json
from core.engine.catalog.catalog import Catalog, StoredObject
from core.files.store import LocalStore
from core.formats.format import Format
from core.opening.open import Checkpoint
from core.pickle.inert import (
    Global,
    Inert,
    ObjectLeaf,
    TensorLeaf,
    make_namespace,
    make_ordered_dict,
)

CATALOG = Catalog("test", None, {})
CHECKPOINT = Checkpoint(
    Path(),
    LocalStore(Path()),
    Format("test", "", lambda store: True, lambda store: CATALOG, None),
    CATALOG,
    None,
)


def shown(value: object) -> object:
    """The value as it comes out of JSON again."""
    return json.loads(json.dumps(object_json(StoredObject("x", value=value), CHECKPOINT)))


def test_plain_values_stay_and_others_are_described() -> None:
    assert shown({"a": [1, 2.5, None, True, "x"], 3: (b"abc", {4})}) == {
        "a": [1, 2.5, None, True, "x"],
        "3": ["<3 bytes>", [4]],
    }
    assert shown([float("nan"), float("-inf"), 1 + 2j]) == ["nan", "-inf", "(1+2j)"]
    assert shown([TensorLeaf("w"), ObjectLeaf("o"), Global("torch", "bfloat16")]) == [
        {"<tensor>": "w"},
        {"<object>": "o"},
        "torch.bfloat16",
    ]


def test_instances_show_their_class_and_attributes() -> None:
    assert shown(make_namespace({"lr": 0.1})) == {"<class>": "argparse.Namespace", "lr": 0.1}
    assert shown(make_ordered_dict({"a": 1})) == {"a": 1}
    assert shown(Inert("reduce", Global("numpy", "array"), ([1],), state=(2,))) == {
        "<class>": "numpy.array",
        "<arguments>": [[1]],
        "<state>": [2],
    }


def test_hostile_values_end() -> None:
    cyclic: list[object] = []
    cyclic.append(cyclic)
    assert "…" in json.dumps(shown(cyclic), ensure_ascii=False)
    bomb: object = "x"
    for _ in range(60):
        bomb = [bomb, bomb]
    assert len(json.dumps(shown(bomb))) < 40 * MAX_NODES
    assert isinstance(shown(1 << 100_000), str)
    assert isinstance(shown("\udc80\x1b"), str)
