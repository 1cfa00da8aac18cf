"""What ``config.json`` leaves out means what transformers takes for it, or is asked for by name.

Every name of a family's configuration is left out in turn, of the class's own defaults and of the
tiny models. transformers reads the rest; its complete configuration must give the same arguments.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from core.errors import CheckpointingException
from core.hf.config_json.config import build_arguments
from core.hf.config_json.yarn import latent_yarn_arguments
from core.hf.family import Family, families
from core.hf.values import count_of
from tests.hf.models import COMMON, MODELS, quietly
from tests.support.covering import every_third

_OF_NO_CLASS = {"bailing_moe_v2", "mimo", "nemotron-nas", "sarvam_mla", "sarvam_moe"}
"""Families that transformers 5.23.0 does not have: their code is published with the weights."""
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")


def test_every_family_that_transformers_has_is_tried() -> None:
    assert {name for name in families() if name not in CONFIG_MAPPING} == _OF_NO_CLASS


@pytest.mark.parametrize("name", every_third(sorted(set(families()) - _OF_NO_CLASS), start=1))
def test_a_name_that_is_left_out_means_transformers_default_or_is_required(
    name: str, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    quietly()
    caplog.set_level(logging.CRITICAL)
    family = families()[name]
    n_compared = 0
    n_tried = None if request.config.getoption("--long") else 2  # the class's, and a tiny model's
    for complete in islice(_configurations(name), n_tried):
        if _arguments(complete, family) is None:
            continue  # such as a GPT-NeoX with parallel residuals, which is the usual one
        for label, shorter in _without_each_name(complete):
            args = _arguments(shorter, family)
            if args is None:
                continue  # refused or required
            theirs = _complete(shorter)
            if theirs is None:
                continue  # transformers refuses it
            assert args == _arguments(theirs, family), f"{name} without {label}"
            n_compared += 1
    assert n_compared > 30


@pytest.mark.parametrize("name", sorted(set(families()) - _OF_NO_CLASS))
def test_the_epsilon_and_the_rotary_embeddings_may_be_left_out(name: str) -> None:
    quietly()
    family = families()[name]
    epsilons = family.config.get("layernorm_epsilon", ())
    for complete in _configurations(name):
        if _arguments(complete, family) is None:
            continue
        shorter = {key: value for key, value in complete.items() if key not in (*epsilons, *_ROPE)}
        assert _arguments(shorter, family) is not None


def test_a_scaling_that_was_added_to_a_file_of_transformers_5_counts() -> None:
    config = _complete({"model_type": "qwen3", **COMMON, "head_dim": 16})
    assert config is not None and config["rope_parameters"]["rope_type"] == "default"
    added = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config["rope_scaling"] = added
    args = _arguments(config, families()["qwen3"])
    assert args is not None and args["position_embedding_type"] == "yarn"
    assert args == _arguments(_complete(config) or {}, families()["qwen3"])


def test_a_stated_original_length_needs_no_number_of_positions() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32}
    stated = latent_yarn_arguments({}, scaling)
    assert stated == latent_yarn_arguments({"max_position_embeddings": 128}, scaling)
    assert stated["original_max_position_embeddings"] == 32


def _configurations(name: str) -> Iterator[dict[str, Any]]:
    """Yield the complete configuration of the class, and those of the tiny models of its type."""
    changes = [{**COMMON, **values} for kind, values in MODELS.values() if kind == name]
    for values in ({}, *changes):
        stated = {key: value for key, value in values.items() if value is not ...}
        complete = _complete({"model_type": name, **stated})
        assert complete is not None
        yield complete


def _without_each_name(complete: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what was left out and the rest, in the forms of transformers 4 and 5."""
    for key in complete:
        if key != "model_type":
            yield key, {other: complete[other] for other in complete if other != key}
    without = {key: value for key, value in complete.items() if key not in _ROPE}
    yield ", ".join(_ROPE), without
    rope = complete.get("rope_parameters")
    if isinstance(rope, dict):
        for key in rope:
            rest = {other: rope[other] for other in rope if other != key}
            yield f"{key} in rope_parameters", {**without, "rope_parameters": rest}
            if not any(isinstance(value, dict) for value in rope.values()):
                yield f"{key} in rope_scaling", {**without, "rope_scaling": rest}
    yield "rope_parameters, which are null", {**without, "rope_parameters": None}


def _complete(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what transformers makes of a configuration; None if it refuses it."""
    values = _with_infinities(copy.deepcopy(dict(config)))
    try:
        loaded = AutoConfig.for_model(**values)
    except Exception:  # whatever a class raises for what it requires
        return None
    result: dict[str, Any] = json.loads(loaded.to_json_string(use_diff=False))
    return result


def _with_infinities(value: Any) -> Any:
    """Return a value of a ``config.json`` as transformers loads it."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_infinities(item) for key, item in value.items()}
    return [_with_infinities(item) for item in value] if isinstance(value, list) else value


def _arguments(config: Mapping[str, Any], family: Family) -> dict[str, object] | None:
    """Return the arguments of a configuration; None if it is refused."""
    try:
        args = build_arguments(
            config,
            family,
            dtype="float32",
            transformer_impl=None,
            divisible_by=1,
            iteration=1,
            n_mtp=0,
        )
    except CheckpointingException:
        return None
    # Step-3.5's lists of what all layers have alike say the same as none.
    n_layers = count_of(args, "num_layers")
    same = {"rotary_base_per_layer": args.get("rotary_base"), "rotary_percents": 1.0}
    alike = {name for name, value in same.items() if args.get(name) == [value] * n_layers}
    return {
        name: None if name in alike else value
        for name, value in args.items()
        if name != "params_dtype"
    }
