"""Open what a trainer saves above DeepSpeed's directory together with that directory.

Of the directories that ``core.opening.open`` descends through, the last one may have the scheduler
and the random states. For a conversion it shares a store with DeepSpeed's directory, so that the
result contains both. Its small files are ``core.opening.source_files.documents_above``.
"""

from __future__ import annotations

from dataclasses import replace

from core.files.source_store import JoinedStore, join_stores, joined_prefix, open_store
from core.formats.deepspeed.files import FORMATS
from core.formats.trainer.above import with_state_above
from core.opening.open import Checkpoint


def with_files_above(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the training state above DeepSpeed's directory, if there is any.

    Raises:
        StorageError: the directory cannot be read.
    """
    if not source.passed or source.format.name not in FORMATS:
        return source
    assert not isinstance(source.store, JoinedStore)
    above = open_store(source.passed[-1])
    catalog = with_state_above(
        source.catalog,
        above,
        prefix=joined_prefix(above),
        folder=source.passed[-1].resolve().name,
    )
    if catalog is source.catalog:
        above.close()
        return source
    above.on_open = source.store.on_open
    return replace(source, store=join_stores(source.store, [above]), catalog=catalog)
