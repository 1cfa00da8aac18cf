"""What ``inspect`` says can be done is what the planner does: ✓ if and only if ``convert
--dry-run`` succeeds.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from core.errors import CheckpointingException
from core.formats.registry import formats
from core.opening.open import open_checkpoint
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, TopologyChange
from core.verbs.convert.run import run as run_job
from core.verbs.inspect import capabilities, capability
from core.verbs.inspect.capability import Capability
from core.verbs.inspect.summary import summarize
from tests.megatron.support.rewritten import rewritten
from tests.support.damages import tensors_changed
from tests.support.edited import edit_rank
from tests.support.rank_files import rank_dirs

OPTIONS: dict[str, dict[str, Any]] = {
    "--no-optim": {"optim": "drop"},
    "--dtype float32": {"dtype": ((None, "float32"),)},
    "--dequantize bf16": {"dequantize": "bf16"},
    "--names hf": {"names": "hf"},
    "--drop-unknown": {"drop_unknown": True},
}


def assert_capabilities_hold(source: Path, dst: Path) -> dict[str, Capability]:
    """Plan every conversion as ``inspect`` says that it can be done, and assert that the others
    cannot be planned.

    Returns:
        What was said of each format.
    """
    opened = open_checkpoint(source, samples=True)
    try:
        summary = summarize(opened)
    finally:
        opened.store.close()
    *conversions, reshard = summary.capabilities
    of_target = {target: entry for entry in conversions for target in entry.targets}
    written = [
        format.name
        for format in formats()
        if format.lay_out is not None and format.name != opened.format.name
    ]
    assert of_target.keys() | {"hf", "fsdp_dtensor"} == {*written, "hf", "fsdp_dtensor"}
    for target, entry in of_target.items():
        assert_holds(entry, Job(src=source, dst=dst, to=target), target)
    into = "megatron" if "--to megatron" in (reshard.why or "") else None
    assert_holds(
        reshard,
        Job(src=source, dst=dst, to=into, topology=TopologyChange(tp=1), is_reshard=True),
        "reshard",
    )
    return of_target


def assert_holds(entry: Capability, job: Job, target: str) -> None:
    """Assert that a job can be planned as an entry says it can, and with no fewer options."""
    words = (entry.why or "") if entry.is_possible else ""
    if "the optimizer is left out" in words:
        job = replace(job, optim="drop")
    chosen = [fields for option, fields in OPTIONS.items() if option in words]
    with_options = replace(
        job, **{name: value for fields in chosen for name, value in fields.items()}
    )
    assert can_be_planned(with_options) == entry.is_possible, f"{target}: {entry}"
    if chosen:
        assert not can_be_planned(job), f"{target}: {entry}"


def can_be_planned(job: Job) -> bool:
    try:
        with prepare(job):
            return True
    except CheckpointingException:
        return False


GOLDEN = [
    "mcore_legacy/dense_gqa/tp2_pp2",
    "mcore_legacy/dense_gqa/tp2_pp1_optim",
    "mcore_legacy/dense_gqa/tp1_pp1_dp2_distopt",
    "mcore_legacy/dense_gelu/tp2_pp2",
    "mcore_legacy/moe_seq/tp2_pp1_ep2",
    "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable",
    "mcore0161_torch_dist/dense_gelu/tp2_pp2",
    "mcore0121_torch_dist/dense_gqa/tp2_pp2_optim",
    "mcore0121_zarr/dense_gqa/tp2_pp2_optim",
    "mcore0121_zarr/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space",
    "torch_dcp/fsdp2_dp4",
    "torch_dcp/hf_storage_dp2",
    "hf/llama/safetensors_single",
    "hf/qwen2_tied/bin_sharded",
    "hf/llama/torch_single/model_zip.pt",
    "hf/llama/torch_single/nested_zip.pt",
    "deepspeed/zero1_dp2_bf16",
    "deepspeed_universal/zero1_dp2_bf16",
    "orbax/ocdbt_zarr3",
    "trainer/zero2_dp2",
    "accelerate/fsdp2_dp2",
    "lightning/model_parallel_dp2.ckpt",
    "mcore_legacy/dense_gqa/tp2_pp2/iter_0000010/mp_rank_00_000",
    "oracle/hf/llama.safetensors",
]


OF_A_FORM_ABOVE = {
    "mcore_legacy/dense_gqa/tp2_pp2",
    "mcore_legacy/dense_gelu/tp2_pp2",
    "mcore_legacy/moe_seq/tp2_pp1_ep2",
    "mcore0161_torch_dist/dense_gelu/tp2_pp2",
    "mcore0121_torch_dist/dense_gqa/tp2_pp2_optim",
    "torch_dcp/hf_storage_dp2",
    "mcore0121_zarr/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space",
    "mcore_legacy/dense_gqa/tp2_pp1_optim",  # another test plans such a one
    "mcore_legacy/dense_gqa/tp1_pp1_dp2_distopt",
    "accelerate/fsdp2_dp2",
    "trainer/zero2_dp2",
}
"""Other models and optimizers in the same kinds of files: planned with ``--long``."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in OF_A_FORM_ABOVE else ())
        for name in GOLDEN
    ],
    ids=lambda name: name.replace("/", "-"),
)
def test_capabilities_of_golden_checkpoints_are_the_planners(
    name: str, golden: Path, tmp_path: Path
) -> None:
    of_target = assert_capabilities_hold(golden / name, tmp_path / "out")
    assert any(entry.is_possible for entry in of_target.values()) == ("mp_rank" not in name)


@pytest.mark.long
def test_capabilities_of_every_golden_checkpoint_are_the_planners(
    golden: Path, tmp_path: Path
) -> None:
    n_checkpoints = 0
    for folder in sorted({path.parent for path in golden.rglob("*") if path.is_file()}):
        try:
            open_checkpoint(folder).store.close()
        except CheckpointingException:
            continue
        n_checkpoints += 1
        assert_capabilities_hold(folder, tmp_path / "out")
    assert n_checkpoints > 60


class Wrapper(torch.Tensor):
    """A tensor subclass made of others, pickled as torchao's are: a rebuilt wrapper with its parts
    as state.
    """

    part: torch.Tensor

    @staticmethod
    def __new__(cls, part: torch.Tensor) -> Wrapper:
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls, part.shape, dtype=torch.bfloat16
        )  # type: ignore[attr-defined]
        wrapper.part = part
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class Recipe:
    """A class of a user's own."""


@pytest.fixture
def of_torchao(monkeypatch: pytest.MonkeyPatch) -> type[torch.Tensor]:
    """A class by the name of torchao's, which is not installed where the tests run."""
    module = ModuleType("torchao.dtypes.affine_quantized_tensor")
    for name in ("torchao", "torchao.dtypes", module.__name__):
        monkeypatch.setitem(
            sys.modules, name, ModuleType(name) if name != module.__name__ else module
        )
    kind = type("AffineQuantizedTensor", (Wrapper,), {"__module__": module.__name__})
    module.AffineQuantizedTensor = kind  # type: ignore[attr-defined]
    return kind


@pytest.fixture(scope="module")
def dtensor() -> Iterator[DTensor]:
    """A DTensor of a mesh with one rank."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield DTensor.from_local(torch.arange(6.0).reshape(2, 3), mesh, [Replicate()])
    finally:
        torch.distributed.destroy_process_group()


class Table(dict[str, object]):
    """A dict of the user's own."""


class MadeOf(dict[str, object]):
    """A dict that is made of a tensor."""

    def __init__(self, base: torch.Tensor) -> None:
        super().__init__(w=base + 1)
        self.base = base

    def __reduce__(self) -> Any:
        return MadeOf, (self.base,), None, None, iter(self.items())


def with_attributes(mapping: Any, **attributes: object) -> Any:
    for name, value in attributes.items():
        setattr(mapping, name, value)
    return mapping


def circular_dict() -> dict[str, object]:
    state: dict[str, object] = {"w": torch.ones(2)}
    state["self"] = state
    return state


def circular_list() -> list[object]:
    items: list[object] = [1]
    items.append(items)
    return items


def circular_namespace() -> argparse.Namespace:
    args = argparse.Namespace(lr=1)
    args.self = args
    return args


def tied() -> dict[str, torch.Tensor]:
    weight = torch.arange(6.0)
    return {"a": weight, "b": weight, "c": weight[2:4]}


TREES: dict[str, Callable[[], object]] = {
    "flat": lambda: {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int64)},
    "nested": lambda: {
        "model": OrderedDict(w=torch.ones(2, 3)),
        "step": 3,
        "more": [torch.ones(1), {"x": None}],
    },
    "odd keys": lambda: {
        1: torch.ones(1),
        "a.b": torch.ones(1),
        "a": {"b": torch.ones(2)},
        "": torch.ones(1),
    },
    "names of files": lambda: {"a/b": torch.ones(1), "x" * 300: torch.ones(1), "..": torch.ones(1)},
    "tied": tied,
    "views": lambda: {"t": torch.arange(12.0).reshape(3, 4).T, "e": torch.ones(1).expand(4)},
    "every dtype": lambda: {
        "bool": torch.tensor([True]),
        "complex": torch.ones(2, dtype=torch.complex64),
        "uint16": torch.ones(2).to(torch.uint16),
        "float8": torch.ones(2).to(torch.float8_e5m2fnuz),
        "complex128": torch.ones(2, dtype=torch.complex128),
    },
    "empty and scalar": lambda: {"e": torch.ones(0, 3), "s": torch.tensor(1.0)},
    "no tensor": lambda: {"step": 3},
    "a list": lambda: [torch.ones(2), torch.ones(3)],
    "a tensor": lambda: torch.ones(2),
    "sparse": lambda: {"w": torch.ones(2), "s": torch.eye(3).to_sparse()},
    "csr": lambda: {"w": torch.ones(2), "s": torch.eye(3).to_sparse_csr()},
    "quantized": lambda: {
        "w": torch.ones(2),
        "q": torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8),
    },
    "nested tensor": lambda: {
        "w": torch.ones(2),
        "n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    },
    "meta": lambda: {"w": torch.ones(2), "m": torch.ones(2, device="meta")},
    "a bare storage": lambda: {"w": torch.ones(2), "s": torch.ones(2).untyped_storage()},
    "a module": lambda: torch.nn.Linear(2, 3),
    "a module beside weights": lambda: {"w": torch.ones(2), "model": torch.nn.Linear(2, 3)},
    "an optimizer": lambda: optimizer_of(torch.nn.Linear(2, 3)),
    "a namespace": lambda: {
        "w": torch.ones(2),
        "args": argparse.Namespace(lr=0.1, kind=torch.float16),
    },
    "numpy": lambda: {
        "w": torch.ones(2),
        "state": np.arange(3),
        "rng": np.random.RandomState(0).get_state(),
    },
    "a class of the user": lambda: {"w": torch.ones(2), "recipe": Recipe()},
    "a function": lambda: {"w": torch.ones(2), "f": print},
    "keys that are numpy scalars": lambda: {
        "proto": {np.int64(3): torch.ones(2), np.float32(0.1): 5}
    },
    "keys without a text": lambda: {
        "proto": {Recipe(): torch.ones(2), Recipe(): torch.ones(3)},
        "w": torch.ones(2),
    },
    "an object below such a key": lambda: {"table": {Recipe(): 5}, "w": torch.ones(2)},
    "tensors as keys": lambda: {
        "state": {torch.ones(1): {"exp_avg": torch.ones(2)}},
        "w": torch.ones(2),
    },
    "a tensor as an attribute": lambda: {
        "model": with_attributes(OrderedDict(w=torch.ones(2)), ema=torch.ones(3))
    },
    "a plain attribute": lambda: {
        "model": with_attributes(OrderedDict(w=torch.ones(2)), kind="x"),
        "step": 3,
    },
    "attributes of the root": lambda: with_attributes(
        OrderedDict(w=torch.ones(2)), ema=torch.ones(3), kind="x"
    ),
    "attributes without entries": lambda: {
        "w": torch.ones(1),
        "m": with_attributes(OrderedDict(), ema=torch.ones(3)),
    },
    "a dict of the user's class": lambda: {
        "m": with_attributes(Table(w=torch.ones(2), n=1), ema=torch.ones(3))
    },
    "arguments of a dict's class": lambda: {"m": MadeOf(torch.ones(3)), "w": torch.ones(2)},
    "a dict that contains itself": circular_dict,
    "a list that contains itself": lambda: {"w": torch.ones(2), "list": circular_list()},
    "a namespace that contains itself": lambda: {"w": torch.ones(2), "args": circular_namespace()},
    "scales": lambda: {
        "a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(1, 1),
    },
}


def optimizer_of(module: torch.nn.Module) -> object:
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", ["zip", "legacy"])
@pytest.mark.parametrize("case", TREES)
def test_capabilities_of_plain_files_are_the_planners(
    case: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.pt"
    try:
        torch.save(TREES[case](), path, _use_new_zipfile_serialization=suffix == "zip")
    except (RuntimeError, AttributeError, NotImplementedError):
        assert suffix == "legacy"  # which cannot store it
        return
    assert_capabilities_hold(path, tmp_path / "out")


@pytest.mark.parametrize(
    "case", ["sparse", "csr", "quantized", "a bare storage", "meta", "nested tensor"]
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_copied_is_promised_to_no_format(case: str, tmp_path: Path) -> None:
    torch.save(TREES[case](), tmp_path / "x.pt")
    of_target = assert_capabilities_hold(tmp_path / "x.pt", tmp_path / "out")
    assert not any(entry.is_possible for entry in of_target.values())
    assert all(entry.why for entry in of_target.values())


def test_tensors_of_other_classes_are_promised_to_no_format(
    of_torchao: type[torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "torchao.pt"
    torch.save({"weight": of_torchao(torch.ones(2, 3)), "bias": torch.ones(3)}, path)
    of_target = assert_capabilities_hold(path, tmp_path / "out")
    assert not any(entry.is_possible for entry in of_target.values())


def test_a_dtensor_in_a_rank_file_is_promised_to_no_format(
    golden: Path, dtensor: DTensor, tmp_path: Path
) -> None:
    root = rewritten(
        golden / "mcore_legacy/dense_gqa/tp1_pp1",
        tmp_path / "root",
        lambda folder, name, value: value,
    )

    def change(loaded: dict[str, Any]) -> None:
        loaded["model"]["decoder.layers.0.mlp.linear_fc2.weight"] = dtensor

    edit_rank(rank_dirs(root)["mp_rank_00"], change)
    of_target = assert_capabilities_hold(root, tmp_path / "out")
    assert not any(entry.is_possible for entry in of_target.values())


def test_an_unknown_class_is_left_out_by_the_option_that_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "recipe": Recipe()}, tmp_path / "x.pt")
    of_target = assert_capabilities_hold(tmp_path / "x.pt", tmp_path / "out")
    assert "--drop-unknown" in str(of_target["dcp"].why)
    assert of_target["dcp"].is_possible


@pytest.mark.parametrize("case", ["named", "float8", "of another family"])
def test_capabilities_of_hugging_face_directories_are_the_planners(
    case: str, golden: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    narrow = ((None, "block"),) if case == "float8" else ()
    run_job(
        Job(
            src=golden / "hf/llama/safetensors_single",
            dst=source,
            to="hf",
            quantize=narrow,
            fsync=False,
        )
    )
    if case == "of another family":
        config = source / "config.json"
        config.write_text(config.read_text().replace('"llama"', '"gptj"'))
    of_target = assert_capabilities_hold(source, tmp_path / "out")
    assert of_target["megatron"].is_possible == (case != "of another family")
    assert ("--dequantize" in (of_target["megatron"].why or "")) == (case == "float8")


@pytest.mark.parametrize(
    "name", ["torch_dcp/fsdp2_dp4", "mcore_legacy/dense_gqa/tp2_pp1_optim", "orbax/ocdbt_zarr3"]
)
def test_many_tensors_get_the_answers_of_few(
    name: str, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entries() -> tuple[Capability, ...]:
        opened = open_checkpoint(golden / name, samples=True)
        try:
            return summarize(opened).capabilities
        finally:
            opened.store.close()

    answers = entries()
    monkeypatch.setattr(capabilities, "MANY", 4)
    assert entries() == answers


def test_what_is_not_tried_on_a_huge_checkpoint_is_said(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "HUGE", 4)
    opened = open_checkpoint(golden / "mcore_legacy/dense_gqa/tp2_pp2", samples=True)
    summary = summarize(opened)
    opened.store.close()
    assert summary.capabilities == ()
    assert any("too large to check" in note and "--dry-run" in note for note in summary.notes)


def test_many_names_without_numbers_are_not_tried_and_this_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [a + b for a in "abcdefgh" for b in "abcdefgh"]
    numbered = {f"part.{number}.weight": torch.ones(2) for number in range(64)}
    torch.save({word: torch.ones(2) for word in words}, tmp_path / "words.pt")
    torch.save(numbered, tmp_path / "numbered.pt")

    def tried(name: str) -> bool:
        opened = open_checkpoint(tmp_path / name)
        summary = summarize(opened)
        opened.store.close()
        is_noted = any("too large to check" in note for note in summary.notes)
        assert is_noted == (not summary.capabilities)
        return bool(summary.capabilities)

    assert tried("words.pt") and tried("numbered.pt")
    monkeypatch.setattr(capability, "_MOST_TENSORS", 0)
    monkeypatch.setattr(capabilities, "MANY_NAMES", len(words) - 1)
    assert not tried("words.pt")
    assert tried("numbered.pt")


def test_one_unsupported_tensor_among_many_is_seen(tmp_path: Path) -> None:
    state = {f"layers.{number}.weight": torch.ones(2) for number in range(capabilities.MANY + 400)}
    state["layers.7.weight"] = torch.eye(3).to_sparse()
    torch.save(state, tmp_path / "x.pt")
    of_target = assert_capabilities_hold(tmp_path / "x.pt", tmp_path / "out")
    assert not any(entry.is_possible for entry in of_target.values())


def test_one_unknown_class_among_many_objects_is_seen(tmp_path: Path) -> None:
    state: dict[str, object] = {f"layers.{number}.extra": {"step": number} for number in range(100)}
    state["layers.7.extra"] = Recipe()
    torch.save({"w": torch.ones(2), **state}, tmp_path / "x.pt")
    of_target = assert_capabilities_hold(tmp_path / "x.pt", tmp_path / "out")
    assert "--drop-unknown" in str(of_target["dcp"].why)


@pytest.mark.parametrize("key", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_model_without_a_tensor_names_it_as_the_refusal_of_convert_does(
    key: str, golden: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(golden / "hf/llama/safetensors_single", tmp_path / "model"))
    tensors_changed(source, lambda tensors: tensors.pop(key))
    of_target = assert_capabilities_hold(source, tmp_path / "out")
    with pytest.raises(CheckpointingException) as refusal:
        run_job(Job(src=source, dst=tmp_path / "out", to="megatron"))
    assert key in refusal.value.sentence
    assert of_target["megatron"].why == refusal.value.sentence


def test_a_hugging_face_directory_needs_no_option_to_leave_the_optimizer_out(
    golden: Path, tmp_path: Path
) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp2_optim"
    of_target = assert_capabilities_hold(source, tmp_path)
    assert of_target["hf"].why == "the optimizer is left out"

    # DeepSpeed takes the optimizer with the model's names of Hugging Face.
    words = "with Hugging Face's names: --names hf"
    assert of_target["deepspeed_universal"].why == words
