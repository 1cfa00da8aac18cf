"""Ties between embedding and output layer: the result computes what the sources state.

The expected models are built by hand as peft's modules compute: what is trained replaces one
parameter, and a tied one that is not stays the base's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from core.errors import UnsupportedError
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from tests.hf.models import loaded_model, logits, quietly
from tests.support.rank_files import assert_same_bits
from tests.verbs.merge.test_adapter import fold
from tests.verbs.merge.test_merge import Tensors, merge, tensors_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS, WIDTH = 130, 16
_ANY_RANK = {"r": 2, "lora_alpha": 4, "peft_type": "LORA"}


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _save_model(folder: Path, *, is_tied: bool, stores_head: bool, seed: int = 0) -> Path:
    """Save a small Llama; a tied one may store its output layer too."""
    quietly()
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        vocab_size=ROWS,
        tie_word_embeddings=is_tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if is_tied and stores_head:
        save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, path, metadata={"format": "pt"})
    return folder


def _save_adapter(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """Save an adapter as peft does, with names that lack ``base_model.model.``."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**_ANY_RANK, **config}))
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def _assert_computes(result: Path, tensors: Tensors, *, is_tied: bool) -> None:
    """The stored tensors are these, and so is what transformers computes."""
    stored = tensors_of(result)
    names = {name for name in tensors if not (is_tied and name == HEAD and name not in stored)}
    assert stored.keys() == names
    for name in names:
        assert_same_bits(stored[name], tensors[name], name)
    config = json.loads((result / "config.json").read_text())
    assert config["tie_word_embeddings"] is is_tied
    model = LlamaForCausalLM(LlamaConfig(**{**config, "tie_word_embeddings": False}))
    model.load_state_dict(tensors)
    assert torch.equal(logits(model.eval()), logits(loaded_model(result)))


EMBEDDING_LORA = {
    "model.embed_tokens.lora_embedding_A": _random(2, ROWS, seed=1),
    "model.embed_tokens.lora_embedding_B": _random(WIDTH, 2, seed=2),
}
HEAD_LORA = {
    "lm_head.lora_A.weight": _random(2, WIDTH, seed=3),
    "lm_head.lora_B.weight": _random(ROWS, 2, seed=4),
}
NEW = {name: _random(ROWS, WIDTH, seed=seed) for seed, name in enumerate((EMBEDDING, HEAD), 5)}


def _product(matrices: Tensors) -> torch.Tensor:
    """The change of a weight of 2 × rank: twice the sum of the products of each rank."""
    a, b = (tensor.double() for tensor in matrices.values())
    product = b[:, 0, None] * a[0] + b[:, 1, None] * a[1]
    return product.float() * 2


@pytest.mark.parametrize("stores_head", [False, True])
@pytest.mark.parametrize(
    ("adapter", "is_tied"),
    [
        ({EMBEDDING: NEW[EMBEDDING]}, False),
        ({HEAD: NEW[HEAD]}, False),
        (NEW, False),
        ({EMBEDDING: NEW[HEAD], HEAD: NEW[HEAD].clone()}, True),
        (EMBEDDING_LORA, False),
        (HEAD_LORA, False),
        ({**EMBEDDING_LORA, **HEAD_LORA}, False),
    ],
    ids=["embedding", "head", "both", "equal", "lora-embedding", "lora-head", "lora-both"],
)
def test_an_adapter_that_changes_one_side_of_a_tie_unties_it(
    adapter: Tensors, is_tied: bool, stores_head: bool, tmp_path: Path
) -> None:
    base = _save_model(tmp_path / "base", is_tied=True, stores_head=stores_head)
    result = fold(base, _save_adapter(tmp_path / "adapter", adapter), tmp_path / "out", verify=True)
    expected = {**load_file(base / "model.safetensors")}
    expected[HEAD] = expected[EMBEDDING].clone()
    expected |= {name: tensor for name, tensor in adapter.items() if name in expected}
    if "lm_head.lora_A.weight" in adapter:
        expected[HEAD] = expected[HEAD] + _product(HEAD_LORA)
    if "model.embed_tokens.lora_embedding_A" in adapter:
        expected[EMBEDDING] = expected[EMBEDDING] + _product(EMBEDDING_LORA).T
    _assert_computes(result, expected, is_tied=is_tied)


def test_an_adapter_of_other_weights_leaves_the_tie(tmp_path: Path) -> None:
    base = _save_model(tmp_path / "base", is_tied=True, stores_head=False)
    norm = {"model.norm.weight": _random(WIDTH, seed=9)}
    result = fold(base, _save_adapter(tmp_path / "adapter", norm), tmp_path / "out")
    assert (result / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert tensors_of(result).keys() == tensors_of(base).keys()


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_vocabulary_that_was_resized_before_training_is_the_adapters(
    is_tied: bool, tmp_path: Path
) -> None:
    base = _save_model(tmp_path / "base", is_tied=is_tied, stores_head=not is_tied)
    new = _random(ROWS + 6, WIDTH, seed=7)
    changes = {EMBEDDING: new, HEAD: new.clone() if is_tied else -new}
    result = fold(base, _save_adapter(tmp_path / "adapter", changes), tmp_path / "out")
    assert json.loads((result / "config.json").read_text())["vocab_size"] == ROWS + 6
    expected = {**load_file(base / "model.safetensors"), **changes}
    _assert_computes(result, expected, is_tied=is_tied)


def test_a_composite_model_states_the_tie_and_the_vocabulary_in_its_text_model_too(
    tmp_path: Path,
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    name = "language_model.model.embed_tokens.weight"
    tensors = {name: _random(4, 3, seed=1), "vision_tower.w.weight": _random(2, 2, seed=2)}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    text = {"model_type": "x_text", "vocab_size": 4, "tie_word_embeddings": True}
    config = {"model_type": "some_vlm", "text_config": text, "vision_config": {}}
    (base / "config.json").write_text(json.dumps(config))
    new = {
        "model.language_model.embed_tokens.weight": _random(6, 3, seed=3),
        "lm_head.weight": _random(6, 3, seed=4),
    }
    result = fold(base, _save_adapter(tmp_path / "adapter", new), tmp_path / "out")
    stored = tensors_of(result)
    assert_same_bits(stored[name], new["model.language_model.embed_tokens.weight"], name)
    head = "language_model.lm_head.weight"
    assert_same_bits(stored[head], new["lm_head.weight"], head)
    edited = json.loads((result / "config.json").read_text())
    assert edited["tie_word_embeddings"] is False
    assert edited["text_config"] == {**text, "vocab_size": 6, "tie_word_embeddings": False}


def test_a_resized_embedding_without_its_output_layer_is_refused(tmp_path: Path) -> None:
    base = _save_model(tmp_path / "base", is_tied=False, stores_head=True)
    changes = {EMBEDDING: _random(ROWS + 6, WIDTH, seed=7)}
    adapter = _save_adapter(tmp_path / "adapter", changes)
    with pytest.raises(UnsupportedError, match="136 rows, but the base's has 130.*lacks lm_head"):
        fold(base, adapter, tmp_path / "out")


@pytest.mark.each_value
@pytest.mark.parametrize("method", ["average", "slerp", "ema"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((True, False), (False, True)),
        ((False, True), (True, False)),
        ((True, True), (False, True)),
        ((False, True), (True, True)),
        ((True, False), (True, True)),
        ((True, True), (True, False)),
        ((True, True), (True, True)),
        ((True, False), (True, False)),
    ],
)
def test_a_merge_is_tied_if_all_sources_are(
    first: tuple[bool, bool], second: tuple[bool, bool], method: str, tmp_path: Path
) -> None:
    paths = []
    explicit = []
    for seed, (is_tied, stores_head) in enumerate((first, second)):
        path = tmp_path / f"model{seed}"
        paths.append(_save_model(path, is_tied=is_tied, stores_head=stores_head, seed=seed))
        # The same model with both tensors and no tie is what the result must equal.
        tensors = load_file(path / "model.safetensors")
        tensors.setdefault(HEAD, tensors[EMBEDDING].clone())
        (tmp_path / f"explicit{seed}").mkdir()
        explicit.append(tmp_path / f"explicit{seed}")
        save_file(tensors, explicit[-1] / "model.safetensors")
    options = {} if method == "average" else {"amount": 0.25}
    result = merge(paths, tmp_path / "out", method, **options)
    expected = tensors_of(merge(explicit, tmp_path / "expected", method, **options))
    _assert_computes(result, expected, is_tied=first[0] and second[0])


@pytest.mark.parametrize("stores_head", [False, True])
@pytest.mark.parametrize(
    ("other", "is_tied"), [((EMBEDDING,), True), ((HEAD,), False), ((EMBEDDING, HEAD), False)]
)
def test_replaced_tensors_of_a_tie_replace_both_or_untie_them(
    other: tuple[str, ...], is_tied: bool, stores_head: bool, tmp_path: Path
) -> None:
    base = _save_model(tmp_path / "base", is_tied=True, stores_head=stores_head)
    (tmp_path / "other").mkdir()
    new = {name: NEW[name] for name in other}
    save_file(new, tmp_path / "other" / "model.safetensors")
    (tmp_path / "other" / "config.json").write_text((base / "config.json").read_text())
    if not is_tied:
        config = json.loads((base / "config.json").read_text())
        config["tie_word_embeddings"] = False
        (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    result = merge([base, tmp_path / "other"], tmp_path / "out", "replace")
    expected = load_file(base / "model.safetensors")
    expected[HEAD] = expected[EMBEDDING].clone()
    expected |= {HEAD: new[EMBEDDING].clone(), **new} if EMBEDDING in new else new
    _assert_computes(result, expected, is_tied=is_tied)


@pytest.mark.parametrize(
    ("options", "is_tied"),
    [
        ({"dtype": ((HEAD, "bf16"),)}, False),
        ({"dtype": ((None, "bf16"),)}, True),
        ({"exclude": (HEAD,)}, True),
        ({"exclude": (EMBEDDING,)}, True),
        ({"include": ("model.*",)}, True),
        ({"rename": (("^model.norm", "model.last_norm"),)}, True),
    ],
)
def test_changes_of_one_side_untie_the_configuration(
    options: dict[str, Any], is_tied: bool, tmp_path: Path
) -> None:
    base = _save_model(tmp_path / "base", is_tied=True, stores_head=True)
    run(Job(src=base, dst=tmp_path / "out", to="safetensors", fsync=False, **options))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is is_tied


def test_another_tensor_that_becomes_the_output_layer_unties_it(tmp_path: Path) -> None:
    base = _save_model(tmp_path / "base", is_tied=True, stores_head=False)
    tensors = load_file(base / "model.safetensors")
    path = base / "model.safetensors"
    save_file({**tensors, "output.weight": NEW[HEAD]}, path, metadata={"format": "pt"})
    rename = (("^output.weight$", HEAD),)
    run(Job(src=base, dst=tmp_path / "out", to="safetensors", fsync=False, rename=rename))
    _assert_computes(tmp_path / "out", {**tensors, HEAD: NEW[HEAD]}, is_tied=False)


def test_a_cast_of_one_of_two_shared_tensors_is_written(tmp_path: Path) -> None:
    base = _save_model(tmp_path / "base", is_tied=True, stores_head=True)
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    tensors[HEAD] = tensors[EMBEDDING]
    torch.save(tensors, base / "pytorch_model.bin")
    job = Job(src=base, dst=tmp_path / "out", to="safetensors", fsync=False)
    run(job)
    assert HEAD not in tensors_of(tmp_path / "out")
    for to, name in (("safetensors", "model.safetensors"), ("torch", "file.pt")):
        dst = tmp_path / to if to == "safetensors" else tmp_path / name
        run(Job(src=base, dst=dst, to=to, fsync=False, dtype=((HEAD, "bf16"),)))
        result = torch.load(dst) if to == "torch" else load_file(dst / name)
        assert_same_bits(result[HEAD], tensors[HEAD].bfloat16(), HEAD)
        assert_same_bits(result[EMBEDDING], tensors[EMBEDDING], EMBEDDING)
    config = json.loads((tmp_path / "safetensors" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
