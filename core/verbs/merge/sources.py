"""Open the other sources of a merge, and merge them into the first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import HuggingFaceModel
from core.errors import UnsupportedError, in_checkpoint
from core.files.source_store import JoinedStore, join_stores, joined_prefix
from core.hf.names import is_hf
from core.hf.tensors.spelling import name_like
from core.hf.text_model import is_composite, text_model_of
from core.hf.ties import TIE, TiePair, edit_tie, find_tie_pair, is_tied, with_config, with_own_head
from core.opening.code_in_pickles import naming_code_first
from core.opening.objects import apply_object_policy, refuse_in_ranks, with_objects_loaded
from core.opening.open import Checkpoint, open_checkpoint
from core.opening.source_files import config_of_source
from core.values import dataclass
from core.verbs.merge.adapter_forms import adapter_form, fold
from core.verbs.merge.forms import FormOptions, form_like
from core.verbs.merge.merge import MergedCatalog, MergeSource, merge_catalogs
from core.verbs.merge.replaced import replace_tensors
from core.verbs.merge.request import LORA, REPLACE, Merge


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
        UnsafeError: a pickle would run code, even if nothing of it would be written.
        CheckpointingException: a path is not a checkpoint, or its metadata is damaged.
    """
    others: list[Checkpoint] = []
    try:
        for path in request.others:
            with in_checkpoint(str(path)):
                others.append(
                    open_checkpoint(
                        path,
                        needs_optimizer=False,
                        needs_masters=False,
                        missing_chunks=missing_chunks,
                        drop_missing=drop_missing,
                        on_open=on_open,
                    )
                )
                others[-1] = _with_safe_objects(others[-1])
    except BaseException:
        for other in others:
            other.store.close()
        raise
    return others


def _with_safe_objects(other: Checkpoint) -> Checkpoint:
    """Load the objects of another source, and raise if one of its pickles would run code.

    ``--exclude`` is for the result, so the entry has to be dropped before the merge.
    """
    remedy = "merge a copy without it: ckpt convert SRC DST"
    with naming_code_first(other.store, catalog=other.catalog, uses=other.uses):
        other = with_objects_loaded(other, remedy=remedy)
    refuse_in_ranks(other.catalog, carried=(), remedy=remedy)
    apply_object_policy(other.catalog, keeps_unknown=True, drop_unknown=False, remedy=remedy)
    return other


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
            return fold(sources[0], adapter, store=first.store, config=config)
    # Only the text model of a vision-language model may be replaced by one of its family.
    text, first_config = None, config
    if request.method == REPLACE and is_composite(config):
        text = text_model_of(catalog, config)
        catalog, config = text.catalog, text.config
    forms: list[Catalog] = []
    configs: list[Mapping[str, object] | None] = []
    for other in others:
        assert not isinstance(other.store, JoinedStore)
        prefix = joined_prefix(other.store)
        with in_checkpoint(str(other.path)):
            form = form_like(other, catalog, config=config, options=options, prefix=prefix)
        forms.append(name_like(form, catalog)[0] if is_hf(catalog, config) else form)
        configs.append(config_of_source(other))

    # What changes one tensor of a tie, or both differently, makes two of it.
    names = {} if text is None else dict(text.name_of)
    ties = align_ties([catalog, *forms], [config, *configs], is_part=request.method == REPLACE)
    if ties.pair is not None and ties.catalogs[0] is not catalog:
        name = names.get(ties.pair.embedding, ties.pair.embedding)
        own = find_tie_pair(sources[0].catalog.tensors, first_config)
        if own is None or own.embedding != name:
            raise UnsupportedError(
                f"only one of {name} and its tied output layer is replaced, but ckpt cannot tell "
                "which tensor of the composite model is the output layer",
                file=str(first.path),
                hint="first write the output layer separately: "
                f"ckpt convert SRC DST --untie NEW={name}",
            )
        names |= {ties.pair.head: own.head} if text is not None else {}
        sources = [MergeSource(sources[0].label, with_own_head(sources[0].catalog, own))]
    for other, form in zip(others, ties.catalogs[1:], strict=True):
        sources.append(MergeSource(str(other.path), form))
    if request.method == REPLACE:
        transposed = frozenset() if text is None else text.transposed
        result = replace_tensors(
            *sources, name_of=None if text is None else names, transposed=transposed
        )
    else:
        result = merge_catalogs(request, sources, first.store, config=config)
    if not ties.is_untied or first_config is None or ties.pair is None:
        return result
    note = (
        f"not all checkpoints tie {ties.pair.head} to {ties.pair.embedding}, so both are written "
        f"and {TIE} becomes false"
    )
    edited = with_config(result.catalog, {**first_config, **edit_tie(first_config, is_tied=False)})
    return MergedCatalog(edited, (*result.notes, note))


@dataclass(frozen=True, slots=True)
class _AlignedTies:
    """The catalogs of all sources, which store the same of embedding and output layer.

    Args:
        catalogs: the catalogs, in the order of the sources.
        pair: the names of both, in all of them; None if they are unknown.
        is_untied: the first source ties them, and the result does not.
    """

    catalogs: list[Catalog]
    pair: TiePair | None
    is_untied: bool


def align_ties(
    catalogs: Sequence[Catalog],
    configs: Sequence[Mapping[str, object] | None],
    *,
    is_part: bool,
) -> _AlignedTies:
    """Give tied models an output layer of their own if another source of a merge has one.

    The result is tied if all sources are.

    Args:
        catalogs: the sources under the names of the first one.
        configs: the ``config.json`` of each, or None.
        is_part: the second one may have only some of the first one's tensors, which replace those.
    """
    unchanged = _AlignedTies(list(catalogs), None, is_untied=False)
    first_config = configs[0]
    pair = find_tie_pair(catalogs[0].tensors, first_config)
    if pair is None or first_config is None:
        return unchanged

    def ties(catalog: Catalog, config: Mapping[str, object] | None) -> bool:
        has_head = pair.head in catalog.tensors
        if config is not None:
            return is_tied(config, has_head=has_head)
        # Megatron's own arguments decided whether there is an output layer.
        return not has_head and catalog.facet(HuggingFaceModel) is not None

    tied = [ties(catalog, config) for catalog, config in zip(catalogs, configs, strict=True)]
    if is_part:
        return _align_part(unchanged, pair, tied)
    if not any(pair.head in catalog.tensors for catalog in catalogs):
        return unchanged
    result = [
        with_own_head(catalog, pair) if each and pair.embedding in catalog.tensors else catalog
        for catalog, each in zip(catalogs, tied, strict=True)
    ]
    # A tensor that is stored twice for all of them stays what the sources make of it.
    if all(tied) and all(pair.head in catalog.tensors for catalog in catalogs):
        result = list(catalogs)
    return _AlignedTies(result, pair, is_untied=tied[0] and not all(tied))


def _align_part(unchanged: _AlignedTies, pair: TiePair, tied: Sequence[bool]) -> _AlignedTies:
    """Align two sources, of which the second replaces tensors of the first.

    What is tied in the second one replaces both tensors of the first.
    """
    first, other = unchanged.catalogs
    has_embedding, has_head = (name in other.tensors for name in (pair.embedding, pair.head))
    if not tied[0] or not (has_embedding or has_head):
        return unchanged
    if has_head:
        is_untied = not (has_embedding and tied[1])
        return _AlignedTies([with_own_head(first, pair), other], pair, is_untied)
    # The embedding alone stands for both.
    if pair.head in first.tensors:
        return _AlignedTies([first, with_own_head(other, pair)], pair, is_untied=False)
    return unchanged
