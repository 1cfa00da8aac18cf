"""The options of ``ckpt explain``."""

from __future__ import annotations

from typing import Any

from ckpt_cli.options.declaration import (
    OPTIONS,
    argument,
    debug_flag,
    no_pager_flag,
    storage_option,
)
from core.files.remote_path import is_remote, location_of
from core.values import dataclass


def parse_subject(text: str) -> object:
    """Return a URL as a path of its store, and any other word as it is."""
    location = None if any(map(str.isspace, text)) else location_of(text)
    return location if is_remote(location) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """Options of ``ckpt explain``."""

    subject: list[Any] = argument(
        "CODE… | 'TEXT' | PATH",
        "Codes from ckpt validate; the text of an error (- reads it from stdin); or a checkpoint.",
        parser=parse_subject,
    )
    no_pager: bool = no_pager_flag(OPTIONS)
    storage_option: list[str] | None = storage_option(OPTIONS)
    debug: bool = debug_flag(OPTIONS)
