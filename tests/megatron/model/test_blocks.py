"""What each layer of a heterogeneous model consists of, from the text in the arguments."""

from __future__ import annotations

import json

import pytest

from core.errors import CheckpointingException
from core.megatron.model.blocks import TEXT, LayerBlocks, blocks_of

# Two layers as nvidia/Llama-3_1-Nemotron-51B-Instruct describes them.
PUBLISHED = [
    {
        "attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False},
        "ffn": {"ffn_mult": 1.3125, "no_op": False, "replace_with_linear": False},
    },
    {
        "attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False},
        "ffn": {"ffn_mult": None, "no_op": False, "replace_with_linear": True},
    },
]


def fields(blocks: object, **changes: object) -> dict[str, object]:
    text = json.dumps({"block_configs": blocks, "hidden_size": 64})
    return {"num_layers": 2, "num_attention_heads": 64, TEXT: text, **changes}


def test_published_descriptions_are_read() -> None:
    assert blocks_of(fields(PUBLISHED)) == (
        LayerBlocks("usual", "usual", 8),
        LayerBlocks("none", "linear", None),
    )


def test_other_models_have_no_blocks() -> None:
    assert (
        blocks_of({"num_layers": 2, TEXT: None, "heterogeneous_layers_config_path": None}) is None
    )


def with_first(**changes: object) -> list[object]:
    return [{**PUBLISHED[0], **changes}, PUBLISHED[1]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (fields(PUBLISHED, num_layers=3), "has 2 layers, but num_layers is 3"),
        (fields({}), "no list named block_configs"),
        (fields(PUBLISHED) | {TEXT: "{"}, "JSON"),
        (fields(PUBLISHED) | {TEXT: 7}, "is 7, not a string"),
        (fields([PUBLISHED[0], 3]), "layer 1 in argument .* has no attention or no ffn"),
        (
            fields(with_first(attention={"n_heads_in_group": 5})),
            "layer 0 in argument .* has 12 query groups",
        ),
        (fields(with_first(attention={"no_op": False})), "layer 0 has no num_query_groups"),
        (fields(with_first(ffn={"ffn_mult": None})), "layer 0 has no ffn_hidden_size"),
        ({"heterogeneous_layers_config_path": "layers.json"}, "only the path"),
    ],
)
def test_a_description_that_is_unclear_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointingException, match=message):
        blocks_of(given)
