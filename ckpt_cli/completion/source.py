"""What a checkpoint offers for completion: its iterations and its keys.

Only metadata are read, with the readers of every other command, which run no code of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MOST_KEYS = 200
"""Above this number of keys, those below one name are offered as that name."""


def iterations_in(path: Path) -> list[tuple[str, str]]:
    """Return (iteration, directory name) of a training root, the newest first."""
    from core.files.store import LocalStore
    from core.opening.iterations import iteration_dirs

    store = LocalStore(path)
    try:
        names = iteration_dirs(store)
    finally:
        store.close()
    return [(str(number), names[number]) for number in sorted(names, reverse=True)]


def keys_in(path: Path, *, iteration: int | None) -> list[str]:
    """Return the keys of a checkpoint as ``ckpt inspect`` writes them, tensors first.

    Keys that a line of a shell cannot hold (with spaces or control characters) are left out.

    Raises:
        CheckpointingException: the checkpoint cannot be read.
    """
    from core.errors import CheckpointingException
    from core.megatron.reshard.unshard import unshard
    from core.megatron.rules.tables import load_rules
    from core.opening.open import open_checkpoint

    checkpoint = open_checkpoint(path, iteration=iteration, samples=True)
    catalog = checkpoint.catalog
    names = dict.fromkeys(catalog.tensors)
    if catalog.is_rank_local:
        # Rank files have global names if their layout is understood, else those that are stored.
        with suppress(CheckpointingException):
            catalog = unshard(catalog, rules=load_rules(), optim="drop", keep_padded_vocab=True)
            names = dict.fromkeys(catalog.tensors)
    return [
        key
        for key in (*names, *catalog.objects)
        if key.isprintable() and not any(map(str.isspace, key))
    ]


def offered_keys(keys: Sequence[str], start: str) -> list[str]:
    """Return the keys that begin with ``start``, and the patterns that stand for several.

    Without a ``start`` only the patterns, each of which folds the numbers of layers and experts.
    """
    from core.engine.catalog.key_patterns import folded

    patterns = [line[:-1] for line in folded([f"{key} " for key in keys], end=" ")]
    matches = [item for item in patterns if item.startswith(start)]
    if start:
        matches += [key for key in keys if key.startswith(start)]
    matches = list(dict.fromkeys(matches))
    if len(matches) > MOST_KEYS:
        # A name selects everything below it, so its beginning up to the next dot is a key too.
        matches = list(
            dict.fromkeys(start + item[len(start) :].partition(".")[0] for item in matches)
        )
    return matches
