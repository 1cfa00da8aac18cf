"""A state dict goes to every format and back to torch: whatever differs then, a summary said."""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import enum
import fractions
import pathlib
import random
import shutil
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from core.errors import CheckpointingException, UnsupportedError
from core.formats.torch.weights_only import ASIDE_KEY
from core.opening.open import Checkpoint, open_checkpoint
from core.verbs.convert.job import Report
from core.verbs.convert.run import Job, run
from tests.support.trees import Difference, differences, is_told

TARGETS = ("torch", "dcp", "safetensors", "safetensors file", "zarr3", "torch_dist", "zarr")

Pair = collections.namedtuple("Pair", "first second")


class Mode(enum.Enum):
    FAST = "fast"


class Config:
    """A class of the training script."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


def numbers(*shape: int, start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = int(np.prod(shape, dtype=np.int64))
    return (torch.arange(size) + start).reshape(shape).to(dtype)


def plain_training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "best": float("nan"),
        "torch_rng": torch.get_rng_state(),
        "np_rng": np.random.RandomState(3).get_state(),
        "py_rng": random.Random(3).getstate(),
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
    }


def nesting() -> dict[str, Any]:
    return {
        "deep": {"a": {"b": {"c": [{"d": numbers(2)}, (numbers(3), 5), []]}}},
        "tuple": (numbers(2), {"x": numbers(1)}),
        "list": [numbers(2), 3, "text", None, [1, [2, 3]]],
        "empty": {},
        "empties": [[], (), {}, set(), "", b""],
        "ordered": collections.OrderedDict(b=numbers(2), a=numbers(3)),
        "ordered values": collections.OrderedDict(b=1, a=2),
        "empty ordered": collections.OrderedDict(),
        "default": collections.defaultdict(list, {"k": [1]}),
        "counter": collections.Counter("hello"),
    }


def keys() -> dict[Any, Any]:
    return {
        0: numbers(2),
        "state": {0: {"step": numbers(1)}, 1: {"step": 5}},
        (1, "a"): "tuple",
        1.5: 7,
        None: 8,
        "a": {"b": numbers(3), "c/d": numbers(1)},
        "ünï": numbers(1),
        "with space": {True: 1},
    }


def object_keys() -> dict[Any, Any]:
    return {
        "proto": {
            np.int64(3): numbers(2),
            np.int64(-7): numbers(3),
            np.float32(0.1): {"w": numbers(1)},
        },
        "counts": {np.int64(3): 5, np.str_("x"): 6, np.bool_(True): 7},
        np.float64(1.5): numbers(1),
    }


def attributes() -> dict[str, Any]:
    model = collections.OrderedDict(w=numbers(2), deep=collections.OrderedDict(v=numbers(3)))
    model.ema, model.kind, model["deep"]._metadata = numbers(4), "x", {"": {"version": 1}}  # type: ignore[attr-defined]
    settings = collections.OrderedDict(a=1)
    settings.source, settings.mean = "file", numbers(2)  # type: ignore[attr-defined]
    return {"model": model, "settings": settings}


def only_tensors_and_attributes() -> dict[str, Any]:
    root: Any = collections.OrderedDict(model=attributes()["model"])
    root.kind = "checkpoint"
    return root  # type: ignore[no-any-return]


def sharing() -> dict[str, Any]:
    base = numbers(4, 3)
    table = {"w": numbers(2), "n": 1}
    history = [1, 2, 3]
    return {
        "base": base,
        "same": base,
        "alias": base.view(4, 3),
        "row": base[1],
        "turned": base.t(),
        "reshaped": base.reshape(2, 6),
        "table": table,
        "again": table,
        "history": history,
        "nested": {"history": history},
    }


def tensors() -> dict[str, Any]:
    kinds = (
        "float64",
        "float16",
        "bfloat16",
        "int64",
        "int8",
        "uint8",
        "bool",
        "complex64",
        "float8_e4m3fn",
    )
    return {
        **{kind: numbers(3, dtype=getattr(torch, kind)) for kind in kinds},
        "parameter": torch.nn.Parameter(numbers(2)),
        "frozen": torch.nn.Parameter(numbers(2), requires_grad=False),
        "grad": numbers(2).requires_grad_(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0),
        "empty matrix": torch.empty(3, 0),
        "expanded": numbers(1).expand(4),
        "strided": numbers(10)[::3],
        "channels last": numbers(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    }


def values() -> dict[str, Any]:
    return {
        "w": numbers(2),
        "none": None,
        "flags": [True, False, 1, 0],
        "huge": 1 << 80,
        "floats": [float("inf"), -0.0, 1e-300],
        "complex": 1 + 2j,
        "bytes": b"\x00\xff",
        "array of bytes": bytearray(b"ab"),
        "set": {3, 1, 2},
        "frozen": frozenset({"x"}),
        "range": range(3),
        "slice": slice(1, None),
        "size": torch.Size((2, 3)),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "layout": torch.strided,
    }


def objects() -> dict[str, Any]:
    return {
        "w": numbers(2),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "strings": np.array(["a", "bc"]),
        "anything": np.array([1, "x", None], dtype=object),
        "scalars": {"f": np.float32(1.5), "i": np.int64(3), "b": np.bool_(True)},
        "dtype": np.dtype("float32"),
        "generator": np.random.RandomState(1).get_state()[1],
        "day": datetime.date(2026, 1, 2),
        "moment": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "span": datetime.timedelta(seconds=3),
        "path": pathlib.PurePosixPath("a/b"),
        "signal": signal.SIGTERM,
        "fraction": fractions.Fraction(1, 3),
        "uuid": uuid.UUID(int=5),
        "queue": collections.deque([1, 2], maxlen=5),
        "namespace": argparse.Namespace(inner=argparse.Namespace(x=[1]), t=numbers(2)),
    }


def own_classes() -> dict[str, Any]:
    cyclic = Config(name="cycle")
    cyclic.parts = [cyclic, {"up": cyclic}]
    return {
        "w": numbers(2),
        "mode": Mode.FAST,
        "config": Config(width=3, mode=Mode.FAST),
        "cyclic": cyclic,
        "pair": Pair(1, "two"),
        "pair of tensors": Pair(numbers(2), numbers(3)),
    }


CORPUS = (
    plain_training,
    nesting,
    keys,
    object_keys,
    attributes,
    only_tensors_and_attributes,
    sharing,
    tensors,
    values,
    objects,
)


def converted(src: Path, dst: Path, to: str) -> Report:
    return run(Job(src=src, dst=dst, to=to, fsync=False, digest=False))


def there_and_back(source: Path, to: str, folder: Path) -> tuple[Any, list[str]]:
    """What a file holds after a conversion to a format and back to torch, and what the two
    summaries say.
    """
    middle = folder / ("middle.safetensors" if to == "safetensors file" else "middle")
    reports = [
        converted(source, middle, to.split()[0]),
        converted(middle, folder / "back.pt", "torch"),
    ]
    result = torch.load(folder / "back.pt", weights_only=False)
    entries = (
        {key: result[key] for key in result if key != ASIDE_KEY}
        if isinstance(result, dict)
        else result
    )
    assert reports[1].n_tensors == n_leaves(entries) + n_set_aside(result)
    if to != "torch":
        assert reports[0].n_tensors == N_TENSORS[to](middle)
    return result, [text for report in reports for text in (*report.notes, *report.dropped)]


def n_leaves(node: Any) -> int:
    """Tensors in mappings, lists and tuples; a namedtuple is an object with tensors inside."""
    if isinstance(node, (dict, list)) or type(node) is tuple:
        return sum(map(n_leaves, node.values() if isinstance(node, dict) else node))
    return isinstance(node, torch.Tensor)


def n_set_aside(root: Any) -> int:
    """Tensors that are set aside because weights_only refuses their keys."""
    aside = root.get(ASIDE_KEY) if isinstance(root, dict) else None
    records = [] if aside is None else aside["entries"]
    return sum(
        n_leaves(record["value"])
        for record in records
        if record["path"] and type(record["path"][-1]) is dict
    )


def safetensors_keys(path: Path) -> int:
    (file,) = path.glob("*.safetensors") if path.is_dir() else [path]
    with safe_open(file, framework="pt") as opened:
        return len(list(opened.keys()))


def dcp_tensors(path: Path) -> int:
    metadata = FileSystemReader(next(path.glob("iter_*"), path)).read_metadata()
    meta_path = path / "meta.pt"  # Lightning's
    n_beside = n_leaves(torch.load(meta_path, weights_only=False)) if meta_path.exists() else 0
    return n_beside + sum(
        isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()
    )


def arrays_called(name: str) -> Callable[[Path], int]:
    return lambda path: sum(
        '"node_type": "group"' not in file.read_text() for file in path.rglob(name)
    )


N_TENSORS: dict[str, Callable[[Path], int]] = {
    "dcp": dcp_tensors,
    "torch_dist": dcp_tensors,
    "safetensors": safetensors_keys,
    "safetensors file": safetensors_keys,
    "zarr3": arrays_called("zarr.json"),
    "zarr": arrays_called(".zarray"),
}
"""How many tensors a destination has, as others read it."""


def saved(state: Any, folder: Path) -> Path:
    torch.save(state, folder / "source.pt")
    return folder / "source.pt"


def untold(state: Any, result: Any, texts: list[str], *, to: str = "torch") -> list[Difference]:
    """The differences that no text tells; the order of entries is a promise of torch and dcp
    only.
    """
    return [
        difference
        for difference in differences(state, result)
        if not is_told(difference, texts) and (difference.kind != "order" or to in ("torch", "dcp"))
    ]


@pytest.mark.each_value
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("make", CORPUS, ids=lambda make: make.__name__)
def test_every_difference_is_told(make: Any, to: str, tmp_path: Path) -> None:
    state = make()
    result, texts = there_and_back(saved(state, tmp_path), to, tmp_path)
    assert untold(state, result, texts, to=to) == [], "\n".join(texts)


def test_classes_of_a_script_stay_in_torch_files(tmp_path: Path) -> None:
    state = own_classes()
    result, texts = there_and_back(saved(state, tmp_path), "torch", tmp_path)
    assert (
        result["config"].width == 3
        and result["config"].mode is Mode.FAST
        and result["mode"] is Mode.FAST
    )
    assert result["cyclic"].parts[0] is result["cyclic"] is result["cyclic"].parts[1]["up"]
    del state["cyclic"], result["cyclic"]
    assert untold(state, result, texts) == [], "\n".join(texts)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "root",
    [
        numbers(3),
        [numbers(2), {"a": 1}],
        (numbers(2), 5),
        [],
        5,
        collections.OrderedDict(),
        [numbers(1)] * 2,
        np.arange(3),
        argparse.Namespace(t=numbers(2)),
    ],
    ids=[
        "tensor",
        "list",
        "tuple",
        "empty list",
        "int",
        "empty mapping",
        "twice",
        "array",
        "namespace",
    ],
)
@pytest.mark.parametrize("to", TARGETS)
def test_every_root_comes_back_or_a_summary_tells(to: str, root: Any, tmp_path: Path) -> None:
    source = saved(root, tmp_path)
    if isinstance(root, argparse.Namespace) and to in ("safetensors file", "torch_dist", "zarr"):
        with pytest.raises(UnsupportedError, match="would contain no tensors"):
            there_and_back(source, to, tmp_path)
        return
    result, texts = there_and_back(source, to, tmp_path)
    assert untold(root, result, texts, to=to) == [], "\n".join(texts)


HF_NAMES = (
    "hf/qwen2_tied/bin_sharded",
    "hf/qwen2_tied/safetensors_single",
    "hf/llama/safetensors_sharded",
)
"""Become Megatron's in its formats."""
GOLDEN = (
    *HF_NAMES,
    "hf/llama/torch_single/nested_zip.pt",
    "hf/llama/torch_single/nested_legacy.pt",
    "hf/llama/torch_single/model_zip.pt",
    "torch_dcp/fsdp2_dp4",
    "orbax/ocdbt_zarr2",
    "deepspeed/zero1_dp2_bf16",
    "deepspeed_universal/zero1_dp2_bf16",
    "mcore0161_torch_dist/dense_gqa/tp2_pp2_optim",
    "mcore0121_zarr/dense_gqa/tp2_pp2",
    "mcore0121_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space",
)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("source", "to"),
    [
        *(
            (source, to)
            for source in GOLDEN
            for to in TARGETS
            if not (source in HF_NAMES and to in ("torch_dist", "zarr"))
        ),
        ("mcore_legacy/dense_gqa/tp2_pp2", "torch"),
    ],
)
def test_checkpoints_of_other_software_differ_only_as_told(
    golden: Path, source: str, to: str, tmp_path: Path
) -> None:
    """The tree of a direct conversion to torch against that of a detour, where no layout gives
    tensors other names.
    """
    report = converted(golden / source, tmp_path / "direct.pt", "torch")
    state = torch.load(tmp_path / "direct.pt", weights_only=False)
    result, texts = there_and_back(golden / source, to, tmp_path)
    texts += [*report.notes, *report.dropped]
    assert untold(state, result, texts, to=to) == [], "\n".join(texts)


@pytest.mark.long
@pytest.mark.parametrize("to", TARGETS)
def test_every_golden_checkpoint_differs_only_as_told(
    golden: Path, to: str, tmp_path: Path
) -> None:
    n_checkpoints = 0
    for folder in sorted({path.parent for path in golden.rglob("*") if path.is_file()}):
        try:
            checkpoint = open_checkpoint(folder)
            checkpoint.store.close()
            if checkpoint.path != folder or gains_names(checkpoint, to):
                continue
            report = converted(folder, tmp_path / "direct.pt", "torch")
        except CheckpointingException:
            continue  # other tests say which checkpoints convert
        n_checkpoints += 1
        state = torch.load(tmp_path / "direct.pt", weights_only=False)
        result, texts = there_and_back(folder, to, tmp_path)
        texts += [*report.notes, *report.dropped]
        assert untold(state, result, texts, to=to) == [], "\n".join([str(folder), *texts])
        for path in tmp_path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert n_checkpoints > 30


def gains_names(checkpoint: Checkpoint, to: str) -> bool:
    """Return whether a layout gives the tensors other names on the way, which is what the
    conversion is for.
    """
    has_config = (checkpoint.path / "config.json").exists() or (
        checkpoint.path.parent / "config.json"
    ).exists()
    return checkpoint.format.is_rank_local or (has_config and to in ("torch_dist", "zarr"))


@pytest.mark.parametrize(
    ("source", "result", "kind"),
    [
        ({"a": 1}, {}, "missing"),
        ({}, {"a": 1}, "added"),
        ({"m": {"w": numbers(2)}}, {"m.w": numbers(2)}, "moved"),
        ([1], {"value": [1]}, "wrapped"),
        ({0: 1}, {"0": 1}, "key"),
        ({"a": (1,)}, {"a": [1]}, "type"),
        ({"a": torch.Size((1,))}, {"a": (1,)}, "type"),
        ({"a": True}, {"a": 1}, "type"),
        ({"a": np.float64(1)}, {"a": 1.0}, "type"),
        ({"a": numbers(2)}, {"a": numbers(2, start=1)}, "value"),
        ({"a": np.arange(2)}, {"a": np.arange(2) + 1}, "value"),
        ({"a": Config(x=1)}, {"a": Config(x=2)}, "value"),
        ({"a": numbers(2).requires_grad_()}, {"a": numbers(2)}, "grad"),
        (
            attributes(),
            {**attributes(), "model": collections.OrderedDict(attributes()["model"])},
            "attributes",
        ),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "order"),
        (sharing(), {**sharing(), "same": numbers(4, 3)}, "alias"),
        (sharing(), {**sharing(), "again": {"w": numbers(2), "n": 1}}, "shared"),
    ],
)
def test_the_comparison_sees_every_kind_of_difference(source: Any, result: Any, kind: str) -> None:
    listed = differences(source, result)
    assert kind in {difference.kind for difference in listed}
    assert not any(is_told(difference, ["nothing of it: other (entry)"]) for difference in listed)
    assert differences(source, source) == []


@pytest.mark.parametrize("to", ["torch", "dcp", "safetensors", "zarr3", "torch_dist"])
@pytest.mark.parametrize(
    "table", [{"n": 1}, {"w": numbers(2)}, [{"n": 1}]], ids=["plain", "tensors", "list"]
)
def test_what_an_object_shares_with_the_state_dict_is_told(
    table: Any, to: str, tmp_path: Path
) -> None:
    state = {"e": numbers(1), "table": table, "args": argparse.Namespace(table=table)}
    report = converted(saved(state, tmp_path), tmp_path / "out", to)
    assert "shared objects become separate copies: args (table)" in report.notes
    alone = {
        "e": numbers(1),
        "table": table,
        "args": argparse.Namespace(table=copy.deepcopy(table)),
    }
    report = converted(saved(alone, tmp_path), tmp_path / "alone", to)
    assert not any("separate copies" in note for note in report.notes)
