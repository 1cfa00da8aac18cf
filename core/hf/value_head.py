"""Convert the value head of a critic or reward model: an output layer of one row.

::

    output_layer.weight (1, hidden)  ◀─▶  score.weight (1, hidden), num_labels 1
    output_layer.bias   (1)          ◀─▶  score.bias   (1)

In Megatron, frameworks for reinforcement learning replace the output layer by a plain linear layer;
whether the embeddings are shared does not matter then. transformers has such models as classifiers
with one label: ``ForSequenceClassification``, whose head never has a bias, and
``ForTokenClassification``, whose head has one unless ``token_classification_bias`` is false
(versions without that setting start it at zero). The names of the weights are the same, so either
class loads a head without a bias.

Source: transformers 5.23.0 ``modeling_layers.py``; ``LinearForLastLayer`` of verl (no bias) and of
slime (a bias); verl's ``model_merger`` writes the head as ``lm_head.weight``, and its loader also
takes ``reward_head.weight``: both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from core.engine.catalog.tensor import Tensor
from core.errors import UnsupportedError
from core.hf.family import Family
from core.hf.proof.expected import count_labels, find_model_class
from core.hf.values import read_architecture
from core.megatron.rules.rules import GPT, has_value_head
from core.values import dataclass

_BIAS = "output_layer.bias"
_HEADS = ("score.weight", "classifier.weight", "reward_head.weight")
NOTE = (
    "the output layer is a one-row value head, which reinforcement learning frameworks use in "
    "place of Megatron's output layer"
)
_WITHOUT_BIAS: Mapping[str, object] = {"token_classification_bias": False}


@dataclass(frozen=True, slots=True)
class ValueHead:
    """The Hugging Face names of a value head.

    Args:
        weight: name of its weight, of the shape (1, hidden).
        bias: name of its bias, of the shape (1,); or None.
        architecture: class of transformers that has it.
    """

    weight: str
    bias: str | None
    architecture: str

    def add_to(self, family: Family) -> Family:
        """Return the family with this head in place of the language model's."""
        rows = [row for row in family.last if row.megatron != GPT.output]
        plain = replace(rows[-1], also=(), hf_also=(), shift=None, when=frozenset())
        rows.append(replace(plain, megatron=GPT.output, hf=(self.weight,), shape=("one hidden",)))
        if self.bias is not None:
            rows.append(replace(plain, megatron=_BIAS, hf=(self.bias,), shape=("one",)))
        first = tuple(replace(row, tied=None) for row in family.first)
        return replace(family, rows={**family.rows, "first": first, "last": tuple(rows)})

    def edit_config(self, config: Mapping[str, object]) -> dict[str, object]:
        """Return the ``config.json`` of a language model as that of a model with this head."""
        result = {**config, "architectures": [self.architecture]}
        if count_labels(config) != 1:
            result.pop("num_labels", None)
            result |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        if self.bias is None and self.architecture.endswith("ForTokenClassification"):
            result |= _WITHOUT_BIAS
        return result


def choose_value_head(
    weights: Mapping[str, Tensor], family: Family, origin: Mapping[str, object] | None
) -> ValueHead | None:
    """Return the value head that a model with Megatron's names has.

    The class is the one that the model had before, if it can have the head.

    Args:
        weights: Megatron's name → the tensor.
        origin: parsed ``config.json`` of the model before it was converted to Megatron; or None.

    Returns:
        None if the output layer is a language model's.

    Raises:
        UnsupportedError: transformers has no class with such a head.
    """
    if not has_value_head(weights):
        return None
    has_bias = _BIAS in weights
    heads: dict[str, ValueHead] = {}
    for name in family.classifiers:
        config = {"model_type": family.model_type, "architectures": [name]}
        for extra in ({}, _WITHOUT_BIAS):
            described = find_model_class({**config, **extra})
            tensors = () if described is None else tuple(described.head)
            if len(tensors) == 1 + has_bias:
                heads.setdefault(name, ValueHead(tensors[0], (*tensors, None)[1], name))
    if not heads:
        bias = " with a bias" if has_bias else ""
        raise UnsupportedError(
            "the model is a critic or reward model: its one-row output layer is a value head"
            f"{bias}, and transformers has no {family.model_type} model with such a head",
            key=GPT.output,
            hint="keep Megatron's names with --to safetensors, --to dcp or --to torch",
        )
    stated = None if origin is None else read_architecture(origin)
    return heads.get(str(stated), next(iter(heads.values())))


def find_value_head(tensors: Mapping[str, Tensor], family: Family) -> ValueHead | None:
    """Return the value head that a model with Hugging Face's names has, or None.

    Args:
        tensors: Hugging Face name → the tensor.

    Raises:
        UnsupportedError: the head has several rows.
    """
    name = next((name for name in (*_HEADS, family.head) if name in tensors), None)
    shape = () if name is None else tensors[name].shape
    if name is None or (name == family.head and shape[:1] != (1,)):
        return None
    if shape[:1] != (1,):
        raise UnsupportedError(
            f"the head has {shape[0] if shape else 0} rows, but Megatron's output layer has either "
            "one row per vocabulary entry or a single row (a value head)",
            key=name,
            hint="keep Hugging Face's names with --to safetensors, --to dcp or --to torch",
        )
    bias = name.removesuffix("weight") + "bias"
    return ValueHead(name, bias if bias in tensors else None, family.architecture)
