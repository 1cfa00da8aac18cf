"""What a job writes, before it has a place: the source's global form, vetted, and cut for the destination's format.

``core.convert.run`` makes a plan of it; ``core.inspect.capabilities`` asks only whether there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.catalog.catalog import Catalog, TargetCatalog
from core.catalog.facets import MegatronModel, RankFacts, TorchFileFacts
from core.catalog.key_patterns import listed_keys
from core.convert.global_form import GlobalForm, global_form, is_model_form
from core.convert.job import Job
from core.convert.sizes import target_topology
from core.errors import UnsupportedError
from core.formats.format import Format
from core.formats.torch.format import load_object
from core.formats.torch.refused import names_importable
from core.megatron.reshard.reshard import load_rules, shard, stack
from core.megatron.rules.experts import transposed
from core.opening.objects import loaded, refuse_hidden, vetted
from core.opening.open import Checkpoint
from core.opening.target import partitioned, source_and_target
from core.pickle.inert import TensorLeaf
from core.pickle.key_text import class_of_key, faithful_text
from core.pickle.nesting import entries, join_path
from core.pickle.reader import noting_uses


def with_objects_loaded(source: Checkpoint, *, exclude: Sequence[str] = ()) -> Checkpoint:
    """Return the checkpoint with the value of every object that has a stream of its own.

    Args:
        exclude: patterns of entries that are left out afterwards.

    Raises:
        CheckpointingException: a stream is damaged.
        UnsafeError: a pickle names something dangerous that none of the objects shows.
    """
    with noting_uses() as uses:
        source = replace(source, catalog=loaded(source.catalog, source.store, load_object))
    refuse_hidden(source.uses | uses, source.store, source.catalog, exclude=exclude)
    return source


def vetted_form(job: Job, source: Checkpoint, format: Format) -> GlobalForm:
    """Return the source's global form without the objects that must not be carried.

    Args:
        job: what is asked for.
        source: from ``with_objects_loaded``.
        format: of the destination.

    Raises:
        CheckpointingException: the job cannot be done.
    """
    return vetted_of(global_form(job, source, format), job, source, format)


def vetted_of(form: GlobalForm, job: Job, source: Checkpoint, format: Format) -> GlobalForm:
    """Return a source's global form without the objects that must not be carried; the arguments as ``vetted_form``'s.

    Raises:
        CheckpointingException: there are objects that must not be passed over.
    """
    _check_text(form.catalog)
    if not (format.nests or format.partition == "ranks" or is_model_form(form.catalog)):
        _check_keys(form.catalog, only_tensors=format.is_mcore, file=source.store.label)
    checked = vetted(form.catalog, keeps_unknown=keeps_unknown_classes(format), drop_unknown=job.drop_unknown)
    weights_only = job.weights_only or not _has_live_objects(source)
    catalog = replace(checked.catalog, write=replace(checked.catalog.write, weights_only=weights_only))
    return replace(form, catalog=catalog, dropped=(*form.dropped, *checked.dropped))


def keeps_unknown_classes(format: Format) -> bool:
    """Return whether a format holds objects of classes that nobody knows, as inert pickles or set aside."""
    return format.partition == "ranks" or format.nests or format.is_mcore


def cut_form(job: Job, catalog: Catalog, format: Format) -> tuple[Catalog, TargetCatalog]:
    """Return the source under the target's keys, and the target catalog whose arrays are to be placed.

    Args:
        catalog: from ``vetted_form``.

    Raises:
        CheckpointingException: the layout cannot cut it, or the format has no place for it.
    """
    is_global = catalog.facet(MegatronModel) is not None
    if format.partition == "ranks":
        topology = target_topology(job, catalog, format)
        rules = load_rules(job.rules, unknown=job.unknown)
        target = shard(
            catalog,
            topology,
            rules=rules,
            vocab_size=job.vocab_size,
            rng=job.rng,
            version=job.megatron_version,
            experts=job.moe_experts,
        )
        ranks = target.facet(RankFacts)
        assert ranks is not None, "shard makes rank files"
        return transposed(catalog, ranks.transposed), target
    if is_global and format.is_mcore:
        topology = target_topology(job, catalog, format)
        stacked = stack(
            catalog,
            topology,
            rules=load_rules(job.rules, unknown=job.unknown),
            vocab_size=job.vocab_size,
            format=format.name,
            is_stacked=job.stacking,
        )
        if format.partition == "grid":
            return stacked.source, partitioned(stacked.target, format=format.name, by="grid")
        return stacked.source, stacked.target
    return source_and_target(catalog, format)


def _has_live_objects(source: Checkpoint) -> bool:
    """Whether objects stay instances of their classes in a torch file, as torch's own loader of the source makes them.

    DCP's do unless they name classes of other packages than torch and numpy, which are set aside in every DCP that this
    project writes. Objects of other formats, and those that a torch file had set aside, stay loadable by default.
    """
    torch_file = source.catalog.facet(TorchFileFacts)
    if torch_file is not None and torch_file.is_set_aside:
        return False
    values = [item.value for item in source.catalog.objects.values()]
    return source.format.has_live_objects and (source.format.nests or names_importable(values))


def _check_keys(catalog: Catalog, *, only_tensors: bool, file: str) -> None:
    """Raise unless every key of a dict on the way to an entry has a text, of which the entry's name is made.

    Args:
        only_tensors: other entries stay in their dicts.

    Raises:
        UnsupportedError: a key is an object without one.
    """
    if catalog.skeleton is None:
        return
    nameless: dict[str, dict[str, None]] = {}
    for entry in entries(catalog.skeleton):
        if only_tensors and not isinstance(entry.leaf, TensorLeaf):
            continue
        for depth, part in enumerate(entry.path):
            if faithful_text(part) is None:
                nameless.setdefault(join_path(entry.path[:depth]), {})[class_of_key(part)] = None
                break
    if nameless:
        path, classes = next(iter(nameless.items()))
        others = f", and so have those of {listed_keys(list(nameless)[1:])}" if len(nameless) > 1 else ""
        raise UnsupportedError(
            f"the dict {path or 'at the root'} has keys that are objects ({listed_keys(classes)}) without a text that "
            f"could name its entries{others}",
            key=path or None,
            file=file,
            hint=f"write a torch file, which keeps them (--to torch), leave the entries out (--exclude '{path or '<*'}'"
            "), or save the dict under other keys",
        )


def _check_text(catalog: Catalog) -> None:
    """Raise unless every name can be written as text.

    Raises:
        UnsupportedError: one holds half a surrogate pair.
    """
    for key in (*catalog.tensors, *catalog.objects, *catalog.hidden):
        try:
            key.encode()
        except UnicodeEncodeError as err:
            raise UnsupportedError(
                f"a name is no text that can be written: {err.reason}",
                key=key,
                hint="leave it out with --exclude, or rename it with --rename",
            ) from err
