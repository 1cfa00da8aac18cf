"""Keys of checkpoints that were read a moment ago, so that the next TAB need not wait for them.

::

    ~/.cache/ckpt/completion/       or $XDG_CACHE_HOME/ckpt/completion
    └── 0f3a….json                  {"of": [path, iteration, mtime], "keys": ["lm_head.weight", …]}

A file is locked while it is written. A second TAB meanwhile gets nothing, and does not read the
checkpoint once more.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

_LIFETIME_S = 300
"""Seconds for which keys are remembered: files inside a directory can change without its mtime."""


def cache_dir(environ: Mapping[str, str]) -> Path | None:
    """Return the directory for remembered keys; None if the user has no home."""
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", ""), ".cache")
    return Path(base, "ckpt", "completion") if os.path.isabs(base) else None


def recalled(
    cache: Path | None, path: Path, iteration: int | None, read_keys: Callable[[], list[str]]
) -> list[str]:
    """Return the keys of a checkpoint that are remembered, else read and remember them.

    Args:
        cache: directory of the remembered keys; None remembers nothing.
        path, iteration: the checkpoint.
        read_keys: reads the keys.

    Returns:
        [] if another process is reading them.

    Raises:
        OSError: ``path`` does not exist, or cannot be accessed.
        CheckpointingException: as for ``read_keys``.
    """
    subject = [os.path.realpath(path), iteration, os.stat(path).st_mtime_ns]
    file = None
    if cache is not None:
        with suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            name = sha256(json.dumps(subject[:2]).encode()).hexdigest()[:16]
            file = open(cache / f"{name}.json", "a+", encoding="utf-8")
    if file is None:
        return read_keys()
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return []
        except OSError:  # a file system without locks
            return read_keys()
        # A process that was killed while writing has left half a text.
        with suppress(ValueError, KeyError, TypeError):
            file.seek(0)
            age_s = time.time() - os.fstat(file.fileno()).st_mtime
            stored = json.load(file)
            if stored["of"] == subject and 0 <= age_s < _LIFETIME_S:
                return [str(key) for key in stored["keys"]]
        keys = read_keys()
        with suppress(OSError):
            assert cache is not None
            _remove_old(cache)
            file.truncate(0)
            file.write(json.dumps({"of": subject, "keys": keys}))
            file.flush()
    return keys


def _remove_old(cache: Path) -> None:
    """Remove the files of other checkpoints that are too old to be used."""
    for other in cache.glob("*.json"):
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > _LIFETIME_S:
                other.unlink()
