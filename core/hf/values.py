"""Read the numbers of a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import CorruptError
from core.pickle.fields import FieldReader, list_or_empty, text_or_none

CONFIG = "config.json"
IN_CONFIG = FieldReader(CONFIG)
LAYERS = "decoder.layers."
"""Beginning of the names of a layer of Megatron's text model."""
ARGUMENT = "huggingface_config"
"""Name of the training argument that contains the text of the ``config.json`` that a model had."""
UNUSED_WEIGHT_HINT = (
    "describe a family whose models have this weight with --family FILE.toml, or drop the weight "
    "with --exclude, which changes the model unless the weight is a buffer that is never read"
)
"""The next step where a family's table lacks a weight."""


def number_of(
    config: Mapping[str, object], names: tuple[str, ...], *, default: int | None = None
) -> int:
    """Return the positive integer recorded under the first of the names that has a value.

    Raises:
        CorruptError: no name has a value and there is no ``default``, or the value is not a
            positive integer.
    """
    name = next((name for name in names if config.get(name) is not None), names[0])
    return count_of(config, name, default=default)


def count_of(
    config: Mapping[str, object], name: str, *, default: int | None = None, least: int = 1
) -> int:
    """Return an integer of the configuration.

    Raises:
        CorruptError: the number is missing without a default, or is not an integer >= ``least``.
    """
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise CorruptError(f"{name} is missing from the configuration", file=CONFIG)
    return IN_CONFIG.read_int(value, name, least=least, most=1 << 40)


def read_architecture(config: Mapping[str, object]) -> str | None:
    """Return the first class that the configuration names, or None."""
    names = list_or_empty(config.get("architectures"))
    return text_or_none(names[0]) if names else None
