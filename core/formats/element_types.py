"""Refuse the tensors whose element type a format lacks, all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from shlex import quote

from core.arrays.dtypes import DTYPES, DType
from core.engine.catalog.key_patterns import MAX_LISTED, fold_keys
from core.errors import UnsupportedError

_CAST_TO = "float32"


def check_dtypes(dtypes: Mapping[str, str], holds: Callable[[DType], bool], *, owner: str) -> None:
    """Raise if the element type of a tensor cannot be stored.

    The hint names exactly the tensors that are refused, so that following it once is enough.

    Args:
        dtypes: key → canonical dtype of all tensors.
        holds: returns whether tensors of an element type can be stored.
        owner: what lacks the other types, for the message: ``zarr``.

    Raises:
        UnsupportedError: names the first tensor, and the number of the others.
    """
    lacking = {name for name in set(dtypes.values()) if not holds(DTYPES[name])}
    if not lacking:
        return
    from core.arrays.cast import is_supported

    refused = [key for key, dtype in dtypes.items() if dtype in lacking]
    castable = [key for key in refused if is_supported(dtypes[key], _CAST_TO)]
    fixed = [key for key in refused if not is_supported(dtypes[key], _CAST_TO)]
    first = refused[0]
    others = "" if len(refused) == 1 else f", nor those of {len(refused) - 1:,} other tensors"
    casts = _write_options("--dtype", castable, f"={_CAST_TO}")
    skips = _write_options("--exclude", fixed, "")
    hint = f"cast with {casts}" if castable else ""
    # Skipping everything would leave an empty result.
    if fixed and len(refused) < len(dtypes):
        hint += f"{' and ' if hint else ''}skip with {skips}"
    elif len(refused) < len(dtypes):
        hint += f", or skip with {_write_options('--exclude', refused, '')}"
    raise UnsupportedError(
        f"{owner} has no element type {dtypes[first]}{others}", key=first, hint=hint or None
    )


def _write_options(name: str, keys: Sequence[str], suffix: str) -> str:
    """Return options whose patterns select exactly these keys, the first of many patterns."""
    patterns = [label for label, _ in fold_keys(dict.fromkeys(keys))]
    options = [f"{name} {quote(pattern + suffix)}" for pattern in patterns[:MAX_LISTED]]
    more = f" and {len(patterns) - MAX_LISTED:,} more" if len(patterns) > MAX_LISTED else ""
    return " ".join(options) + more
