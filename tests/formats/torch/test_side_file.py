"""The side file of objects: what is written comes back, torch opens it, broken ones are refused."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from core.arrays.box import full_box
from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor, whole_tensor
from core.errors import CheckpointingException, CorruptError, UnsafeError, UnsupportedError
from core.files.store import LocalStore, MemoryStore
from core.formats.torch.format import FORMAT as TORCH
from core.formats.torch.side_file import (
    OBJECTS_FILE,
    ObjectsBeside,
    objects_image,
    read_objects,
    with_objects_beside,
)
from core.opening.objects import inlined
from core.opening.target import partitioned
from core.pickle.inert import (
    NO_STATE,
    Global,
    Inert,
    ObjectLeaf,
    Persistent,
    TensorLeaf,
    make_namespace,
)
from tests.support.fragments import with_fragments
from tests.support.materialize import materialized, tensor_bytes


def written(source: Catalog, store: LocalStore | MemoryStore) -> MemoryStore:
    """A store with the objects file of a catalog."""
    target = partitioned(source, format="fake", by="whole")
    image = objects_image(target)
    assert image is not None
    return MemoryStore(dict(materialized([image], target=target, source=source, store=store)))


def torch_catalog(value: object, tmp_path: Path) -> tuple[Catalog, LocalStore]:
    torch.save(value, tmp_path / "checkpoint.pt")
    store = LocalStore(tmp_path)
    return inlined(TORCH.read(store)), store


def flat_catalog(tensors: tuple[str, ...] = (), **objects: object) -> Catalog:
    """A catalog without a skeleton; its tensors have two bytes each and lie in the file ``t``."""

    def fragments_of(key: str) -> list[Fragment]:
        number = tensors.index(key)
        return [
            Fragment(full_box((2,)), StoredArray(key, "uint8", (2,), Extent("t", 2 * number)), (0,))
        ]

    return Catalog(
        "fake",
        None,
        with_fragments({key: Tensor("uint8", (2,)) for key in tensors}, fragments_of),
        objects={key: StoredObject(key, value=value) for key, value in objects.items()},
    )


def read_back(store: MemoryStore) -> ObjectsBeside:
    objects = read_objects(store)
    assert objects is not None
    return objects


def opened(store: MemoryStore) -> Mapping[str, object]:
    return torch.load(io.BytesIO(bytes(store.contents[OBJECTS_FILE])), weights_only=True)


NESTED: dict[str, object] = {
    "model": OrderedDict(
        w=torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)),
        b=torch.arange(3, dtype=torch.bfloat16),
    ),
    "optimizer": {
        "state": {0: {"step": torch.tensor(7.0), "lr": 0.1}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}],
    },
    "list": [torch.zeros(2), torch.ones(2)],
    "names": {"a", "b"},
    "epoch": 3,
}


def test_objects_and_nesting_of_a_torch_file_come_back(tmp_path: Path) -> None:
    source, store = torch_catalog(NESTED, tmp_path)
    again = read_back(written(source, store))
    assert list(again.objects) == list(source.objects)
    assert again.objects["optimizer.param_groups.0.betas"].value == (0.9, 0.95)
    assert again.objects["names"].value == {"a", "b"}
    tensors = Catalog("fake", None, source.tensors)
    back = inlined(with_objects_beside(tensors, again))
    target = partitioned(back, format="torch", by="whole")
    assert TORCH.lay_out is not None
    files = materialized(TORCH.lay_out(target), target=target, source=source, store=store)
    value = torch.load(io.BytesIO(files["checkpoint.pt"]), weights_only=True)
    assert list(value) == list(NESTED) and type(value["model"]) is OrderedDict
    assert isinstance(value["model"]["w"], torch.nn.Parameter) and value["model"]["w"].requires_grad
    assert torch.equal(value["list"][1], torch.ones(2))
    assert value["optimizer"]["param_groups"] == NESTED["optimizer"]["param_groups"]  # type: ignore[index]
    assert value["optimizer"]["state"][0]["step"] == 7


def test_the_file_is_opened_by_torch_with_its_defaults(tmp_path: Path) -> None:
    source = flat_catalog(
        args=make_namespace({"lr": 0.1}), kind=Global("mine", "Kind.a"), plain={"a": [1, (2, None)]}
    )
    value = opened(written(source, MemoryStore()))
    assert value["ckpt_objects"] == 1 and value["skeleton"] is None
    assert value["objects"] == {"plain": {"a": [1, (2, None)]}}


def test_objects_that_torch_refuses_come_back_as_they_were() -> None:
    back = read_back(written(flat_catalog(args=make_namespace({"lr": 0.1}), n=1), MemoryStore()))
    args = back.objects["args"].value
    assert (
        isinstance(args, Inert)
        and str(args.fn) == "argparse.Namespace"
        and args.state == {"lr": 0.1}
    )
    assert list(back.objects) == ["args", "n"]


def test_tensors_inside_objects_are_hidden_and_keep_their_bytes(tmp_path: Path) -> None:
    state = torch.arange(40, dtype=torch.uint8)
    source, store = torch_catalog({"w": torch.ones(2), "rng": (state, 1.5)}, tmp_path)
    hidden = Inert("reduce", Global("mine", "Box"), (TensorLeaf("inside"),))
    array = source.fragments("rng.0")[0].array
    assert array is not None
    catalog = Catalog(
        "fake",
        None,
        {},
        objects={"rng": StoredObject("rng", value=hidden)},
        hidden={"inside": whole_tensor(array)},
    )
    folder = written(catalog, store)
    objects = read_back(folder)
    (leaf_key,) = objects.hidden
    box = objects.objects["rng"].value
    assert isinstance(box, Inert) and box.args == (TensorLeaf(leaf_key),) and box.state is NO_STATE
    back = with_objects_beside(Catalog("fake", None, {}), objects)
    assert tensor_bytes(back, folder, leaf_key).ravel().tolist() == list(range(40))


def test_a_catalog_without_objects_has_no_file() -> None:
    assert objects_image(flat_catalog(("w",))) is None
    assert read_objects(MemoryStore({"other": b""})) is None


def test_a_flat_state_dict_stays_flat() -> None:
    source = inlined(flat_catalog(("w",), step={"n": 1}))
    store = MemoryStore({"t": b"ab"})
    assert read_back(written(source, store)).skeleton is None


def test_files_are_equal_for_equal_input(tmp_path: Path) -> None:
    source, store = torch_catalog(NESTED, tmp_path)
    assert written(source, store).contents == written(source, store).contents


@pytest.mark.parametrize("tensors", [("w", "new"), ()])
def test_a_nesting_that_does_not_fit_the_tensors_is_left_out_with_a_note(
    tensors: tuple[str, ...],
) -> None:
    objects = ObjectsBeside(
        {"step": StoredObject("step", value=1)},
        {"model": {"w": TensorLeaf("w")}, "step": ObjectLeaf("step")},
        {},
    )
    result = with_objects_beside(flat_catalog(tensors), objects)
    assert result.skeleton is None and list(result.objects) == ["step"]
    (note,) = result.notes
    assert ("new" if tensors else "w") in note


def test_an_object_with_a_tensors_key_is_corrupt() -> None:
    objects = ObjectsBeside({"w": StoredObject("w", value=1)}, None, {})
    with pytest.raises(CorruptError, match="same key as a tensor") as caught:
        with_objects_beside(flat_catalog(("w",)), objects)
    assert caught.value.key == "w"


def test_an_object_that_was_not_read_is_refused() -> None:
    source = flat_catalog()
    raw = StoredObject("o", raw_key="raw:o")
    with pytest.raises(UnsupportedError, match="was not loaded"):
        objects_image(Catalog("fake", None, {}, objects={"o": raw}, hidden=source.hidden))
    with pytest.raises(UnsupportedError, match="bare torch storage"):
        objects_image(flat_catalog(o=[Persistent(("storage",))]))


def store_of(value: object) -> MemoryStore:
    stream = io.BytesIO()
    torch.save(value, stream)
    return MemoryStore({OBJECTS_FILE: stream.getvalue()})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "not an objects file"),
        ({"objects": [1]}, "not an objects file"),
        ({"ckpt_objects": 1, "objects": {3: 1}}, "key of an object is 3"),
        ({"ckpt_objects": 1, "objects": {}, "skeleton": {"$tuple": 1}}, "."),
        (
            {"ckpt_objects": 1, "objects": {}, "skeleton": {"$object": "strange:w"}},
            "unknown kind 'strange'",
        ),
    ],
)
def test_a_malformed_file_is_corrupt(value: object, message: str) -> None:
    with pytest.raises(CorruptError, match=message) as caught:
        read_objects(store_of(value))
    assert caught.value.file == OBJECTS_FILE


def test_a_newer_version_is_refused_by_number() -> None:
    with pytest.raises(UnsupportedError, match="version 2 of this file"):
        read_objects(store_of({"ckpt_objects": 2, "objects": {}}))


def test_a_truncated_or_hostile_file_is_refused() -> None:
    data = bytes(written(flat_catalog(a=1), MemoryStore()).contents[OBJECTS_FILE])
    with pytest.raises(CheckpointingException):
        read_objects(MemoryStore({OBJECTS_FILE: data[: len(data) // 2]}))
    with pytest.raises((UnsafeError, CorruptError, UnsupportedError)):
        read_objects(MemoryStore({OBJECTS_FILE: b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R."}))
