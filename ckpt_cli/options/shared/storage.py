"""The option ``--storage-option``, which the commands that read URLs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from typer import Option

from ckpt_cli.options.typer_command import PANELS
from core.errors import UsageError

_HELP = "Setting of the object store of a URL, such as endpoint=URL or region=NAME; repeatable."


def storage_option(panel: str) -> object:
    """Return the option for a section of the help page."""
    return Option("--storage-option", metavar="KEY=VALUE", rich_help_panel=panel, help=_HELP)


StorageOptions = Annotated[list[str] | None, storage_option(PANELS[-1])]


def parse_storage_options(texts: Sequence[str]) -> dict[str, str]:
    """Return option → value; the values, which may be secrets, are in no message.

    Raises:
        UsageError: a text is not of the form KEY=VALUE.
    """
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError("--storage-option takes KEY=VALUE", hint="such as endpoint=URL")
        options[name.strip().lower()] = value
    return options
