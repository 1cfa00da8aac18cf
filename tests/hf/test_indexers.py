"""The layers of sparse attention that have an indexer: GLM-5.2's, in each of its three forms."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from core.hf.family import families
from core.hf.settings import setting_argument, setting_value

_FORMS: list[dict[str, Any]] = [
    *(
        {"index_topk_freq": interval, "index_skip_topk_offset": n_first}
        for interval, n_first in itertools.product((1, 2, 3, 4, 9), (1, 2, 3, 5))
    ),
    {"index_topk_freq": 3},
    {"index_topk_pattern": "FFSSFSSF"},
    {
        "index_topk_pattern": [
            "full",
            "shared",
            "full",
            "shared",
            "full",
            "shared",
            "full",
            "shared",
        ]
    },
    {},
]


@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_the_layers_with_an_indexer_are_those_of_transformers(form: dict[str, Any]) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model("glm_moe_dsa", num_hidden_layers=8, **form).indexer_types
    settings = families()["glm_moe_dsa"].settings
    names = ("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset")
    for config in (form, {"indexer_types": theirs}):
        fields = {name: setting_argument(settings[name], config, n_layers=8) for name in names}
        for name in names:
            back = setting_value(settings[name], fields[name], fields, n_layers=8)
            assert back == theirs, (config, fields)


def test_glm_5_2_has_the_frequency_and_the_offset_that_it_publishes() -> None:
    settings = families()["glm_moe_dsa"].settings
    published = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    for name, value in (("dsa_indexer_topk_freq", 4), ("dsa_indexer_skip_topk_offset", 3)):
        assert setting_argument(settings[name], published, n_layers=78) == value
