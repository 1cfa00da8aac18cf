"""Open the other sources of a merge, and merge them into the first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from core.catalog.catalog import Catalog
from core.errors import in_checkpoint
from core.files.source_store import JoinedStore, join_stores, joined_prefix
from core.hf.text_model import is_composite, text_model_of
from core.merge.adapter_forms import adapter_form, fold
from core.merge.forms import FormOptions, form_like
from core.merge.merge import MergedCatalog, MergeSource, merge_catalogs
from core.merge.replaced import replace_tensors
from core.merge.request import LORA, REPLACE, Merge
from core.opening.open import Checkpoint, open_checkpoint


def open_others(
    request: Merge,
    *,
    missing_chunks: str,
    drop_missing: bool,
    on_open: Callable[[int], None] | None = None,
) -> list[Checkpoint]:
    """Open the other sources; the caller closes their stores.

    Args:
        request: the merge.
        missing_chunks, drop_missing, on_open: as for ``core.opening.open.open_checkpoint``.

    Raises:
        CheckpointingException: a path is not a checkpoint, or its metadata is damaged.
    """
    others: list[Checkpoint] = []
    try:
        for path in request.others:
            with in_checkpoint(str(path)):
                others.append(
                    open_checkpoint(
                        path,
                        missing_chunks=missing_chunks,
                        drop_missing=drop_missing,
                        on_open=on_open,
                    )
                )
    except BaseException:
        for other in others:
            other.store.close()
        raise
    return others


def with_joined_store(first: Checkpoint, others: Sequence[Checkpoint]) -> Checkpoint:
    """Return the first source with a store that has the files of all sources."""
    return replace(first, store=join_stores(first.store, [other.store for other in others]))


def merge_others(
    request: Merge,
    catalog: Catalog,
    first: Checkpoint,
    others: Sequence[Checkpoint],
    *,
    config: Mapping[str, object] | None,
    options: FormOptions,
) -> MergedCatalog:
    """Return the first source's catalog with tensors that are computed from all sources.

    Args:
        request: what to compute.
        catalog: the first source: global tensors, no optimizer states.
        first: the first source, from ``with_joined_store``.
        others: the other sources.
        config: the ``config.json`` of the first one, or None.
        options: how Megatron checkpoints become global tensors.

    Raises:
        UnsupportedError: the sources do not fit each other.
        CheckpointingException: a source is damaged or incomplete.
    """
    sources = [MergeSource(str(first.path), catalog)]
    if request.method == LORA:
        (other,) = others
        assert not isinstance(other.store, JoinedStore)
        with in_checkpoint(str(other.path)):
            adapter = adapter_form(other, options=options, prefix=joined_prefix(other.store))
            return fold(sources[0], adapter)
    # Only the text model of a vision-language model may be replaced by one of its family.
    text = None
    if request.method == REPLACE and is_composite(config):
        text = text_model_of(catalog, config)
        catalog, config = text.catalog, text.config
    for other in others:
        assert not isinstance(other.store, JoinedStore)
        prefix = joined_prefix(other.store)
        with in_checkpoint(str(other.path)):
            form = form_like(other, catalog, config=config, options=options, prefix=prefix)
        if request.method == REPLACE:
            replacing = MergeSource(str(other.path), form)
            if text is None:
                return replace_tensors(sources[0], replacing, name_of=None)
            return replace_tensors(
                sources[0], replacing, name_of=text.name_of, transposed=text.transposed
            )
        sources.append(MergeSource(str(other.path), form))
    return merge_catalogs(request, sources, first.store, config=config)
