"""LoRA adapters that peft wrote, folded into their bases, against peft's merge_and_unload."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import CheckpointingException, CorruptError, UnsupportedError, UsageError
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from core.verbs.merge.request import Merge
from tests.support.archives import unpacked
from tests.support.rank_files import assert_same_bits
from tests.verbs.merge.test_merge import tensors_of


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked adapters, bases and results of peft."""
    folder = tmp_path_factory.mktemp("adapters")
    return unpacked("lora", folder) / "lora"


def fold(base: Path, adapter: Path, dst: Path, **options: Any) -> Path:
    """Folds the adapter in and returns the destination."""
    run(
        Job(
            src=base,
            dst=dst,
            merge=Merge(method="lora", others=(adapter,)),
            fsync=False,
            **options,
        )
    )
    return dst


@pytest.mark.parametrize("case", ["llama", "rslora", "gpt2"])
def test_16_bit_models_equal_merge_and_unload_bit_for_bit(
    case: str, adapters: Path, tmp_path: Path
) -> None:
    folder = adapters / case
    tensors = tensors_of(fold(folder / "base", folder / "adapter", tmp_path / "out", verify=True))
    wanted, base = tensors_of(folder / "merged"), tensors_of(folder / "base")
    # transformers saves GPT-2 with or without the name of its trunk.
    wanted = {name if name in tensors else f"transformer.{name}": t for name, t in wanted.items()}
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(tensors[name], tensor, name)
    assert any(not torch.equal(tensors[name], base[name]) for name in tensors)


def test_float32_models_equal_merge_and_unload_up_to_the_order_of_additions(
    adapters: Path, tmp_path: Path
) -> None:
    folder = adapters / "float32"
    tensors = tensors_of(fold(folder / "base", folder / "adapter", tmp_path / "out"))
    wanted = tensors_of(folder / "merged")
    for name, tensor in wanted.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=2.0**-21)

    # The documented arithmetic is exact: products in float64, rounded once.
    base, matrices = tensors_of(folder / "base"), tensors_of(folder / "adapter")
    name = "model.layers.1.mlp.down_proj"
    a, b = (matrices[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
    product = torch.zeros(b.shape[0], a.shape[1], dtype=torch.float64)
    for k in range(len(a)):
        product += b[:, k, None] * a[k]
    weight = base[f"{name}.weight"] + product.float() * 1.5
    assert_same_bits(tensors[f"{name}.weight"], weight, name)


def test_the_result_may_be_megatron_rank_files(adapters: Path, tmp_path: Path) -> None:
    folder = adapters / "llama"
    ranks = fold(
        folder / "base",
        folder / "adapter",
        tmp_path / "ranks",
        to="megatron",
        topology=TopologyChange(tp=1, pp=2),
    )
    run(Job(src=ranks, dst=tmp_path / "back", to="hf", fsync=False))
    tensors = tensors_of(tmp_path / "back")
    for name, tensor in tensors_of(folder / "merged").items():
        assert_same_bits(tensors[name], tensor, name)


@pytest.mark.parametrize(
    ("case", "message"), [("dora", "it uses use_dora"), ("pissa", "'pissa' changed the base")]
)
def test_variants_of_lora_are_refused_by_name(
    case: str, message: str, adapters: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message) as failure:
        fold(adapters / "llama/base", adapters / case / "adapter", tmp_path / "out")
    assert failure.value.file is not None
    assert failure.value.file.endswith("adapter_config.json")
    assert not (tmp_path / "out").exists()


def _edited(name: str, value: object) -> Callable[[Path], None]:
    def edit(adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    return edit


def _rewritten(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(adapter: Path) -> None:
        tensors = tensors_of(adapter)
        change(tensors)
        save_file(tensors, adapter / "adapter_model.safetensors")

    return edit


Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (_edited("peft_type", "IA3"), UnsupportedError, "'IA3', not LoRA"),
        (_edited("use_new_trick", True), UnsupportedError, "it uses use_new_trick"),
        (_edited("r", 5), CorruptError, "specifies rank 5"),
        (_edited("r", None), CorruptError, "r is None"),
        (_edited("lora_alpha", 0), CorruptError, "not a positive number"),
        (_edited("alpha_pattern", {"(a+)+": 3}), UnsupportedError, "the pattern"),
        (_edited("alpha_pattern", {"(": 3}), CorruptError, "alpha_pattern"),
        (lambda adapter: (adapter / "adapter_config.json").unlink(), UsageError, "not an adapter"),
        (_rewritten(lambda t: t.pop(f"{Q_PROJ}A.weight")), CorruptError, "one of the two LoRA"),
        (
            _rewritten(lambda t: t.update({f"{Q_PROJ}B.weight": torch.ones(7, 4)})),
            CorruptError,
            r"shape \(7, 16\), but the base's weight has shape \(16, 16\)",
        ),
        (
            _rewritten(lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(25, 16)})),
            UnsupportedError,
            "has 25 rows, but the base's has 24, and the adapter lacks model.embed_tokens",
        ),
        (
            _rewritten(lambda t: t.update({"base_model.model.x.weight": torch.ones(2)})),
            UnsupportedError,
            r"1 tensor that the base does not have \(and \d+ that it does have\): x.weight",
        ),
        (
            _rewritten(lambda t: t.update({f"{Q_PROJ}magnitude_vector": torch.ones(2)})),
            UnsupportedError,
            "a LoRA variant",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    edit: Callable[[Path], None],
    error: type[CheckpointingException],
    message: str,
    adapters: Path,
    tmp_path: Path,
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(adapters / "llama/adapter", adapter)
    edit(adapter)
    with pytest.raises(error, match=message):
        fold(adapters / "llama/base", adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _as_state_dict(tensors: dict[str, torch.Tensor]) -> None:
    """Give the matrices the names that they have in the modules of peft."""
    for name in list(tensors):
        middle = ".default" if ".lora_" in name else ".modules_to_save.default"
        tensors[name.replace(".weight", f"{middle}.weight")] = tensors.pop(name)


def _with_saved_twice(tensors: dict[str, torch.Tensor]) -> None:
    """Add the head as peft writes it for ``modules_to_save`` and a resized vocabulary."""
    head = torch.full((24, 16), 0.5, dtype=torch.bfloat16)
    for name in ("lm_head", "lm_head.modules_to_save"):
        tensors[f"base_model.model.{name}.weight"] = head.clone()
    tensors["base_model.model.lm_head.original_module.weight"] = head + 1


@pytest.mark.parametrize(
    ("change", "is_head"), [(_as_state_dict, False), (_with_saved_twice, True)]
)
def test_names_of_the_modules_of_peft_mean_the_same(
    change: Callable[[dict[str, torch.Tensor]], None],
    is_head: bool,
    adapters: Path,
    tmp_path: Path,
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(adapters / "llama/adapter", adapter)
    expected = tensors_of(fold(adapters / "llama/base", adapter, tmp_path / "expected"))
    if is_head:
        expected["lm_head.weight"] = torch.full((24, 16), 0.5, dtype=torch.bfloat16)
    _rewritten(change)(adapter)
    result = tensors_of(fold(adapters / "llama/base", adapter, tmp_path / "out"))
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(result[name], tensor, name)


def test_a_single_weight_is_noted_in_the_singular(adapters: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(adapters / "llama/adapter", adapter)

    def keep_one(tensors: dict[str, torch.Tensor]) -> None:
        (module, *_) = (name.partition(".lora_A")[0] for name in tensors if ".lora_A" in name)
        for name in [name for name in tensors if not name.startswith(f"{module}.")]:
            del tensors[name]

    _rewritten(keep_one)(adapter)
    merge = Merge(method="lora", others=(adapter,))
    job = Job(src=adapters / "llama/base", dst=tmp_path / "out", merge=merge, fsync=False)
    assert any(" folded into 1 weight of " in note for note in run(job).notes)


def test_two_adapters_in_one_file_are_refused_by_name(adapters: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(adapters / "llama/adapter", adapter)

    def add_second(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            for number in ("default", "second"):
                tensors[name.replace(".weight", f".{number}.weight")] = tensors[name].clone()
            del tensors[name]

    _rewritten(add_second)(adapter)
    with pytest.raises(
        UnsupportedError, match="only one adapter, but the checkpoint has 2: default, second"
    ):
        fold(adapters / "llama/base", adapter, tmp_path / "out")


@pytest.mark.parametrize("target", ["hf", "torch", "dcp", "zarr3"])
def test_the_optimizer_that_a_trainer_saved_beside_an_adapter_is_listed_for_every_target(
    target: str, adapters: Path, tmp_path: Path
) -> None:
    source = tmp_path / "checkpoint-2"
    shutil.copytree(adapters / "llama/adapter", source)
    weights = load_file(source / "adapter_model.safetensors")
    parameters = [torch.nn.Parameter(tensor.float()) for tensor in weights.values()]
    optimizer = torch.optim.AdamW(parameters)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    (source / "trainer_state.json").write_text('{"global_step": 2}')
    merge = Merge(method="lora", others=(source,))
    base = adapters / "llama/base"
    report = run(Job(src=base, dst=tmp_path / "with", merge=merge, to=target, fsync=False))
    lines = [line for line in report.dropped if "training state" in line]
    assert lines == ["checkpoint-2: training state is not merged: optimizer.pt"]
    if target != "hf":
        return
    folded = tensors_of(tmp_path / "with")
    wanted = tensors_of(fold(adapters / "llama/base", adapters / "llama/adapter", tmp_path / "w"))
    assert folded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(folded[name], tensor, name)
