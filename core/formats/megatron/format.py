"""Megatron-LM's checkpoint of one file per model parallel rank (``--ckpt-format torch``, "legacy").

On disk::

    root/
    ├── latest_checkpointed_iteration.txt      "10", without a newline; or "release"
    └── iter_0000010/                          or release/
        ├── mp_rank_00_000/                    names: core.megatron.model.topology
        │   ├── model_optim_rng.pt             a torch zip: args, iteration, model (or model0 … modelN), rng_state …
        │   └── distrib_optim.pt               with the distributed optimizer: its flat buffers
        └── mp_rank_01_000/ …

Versions: checkpoint_version 0 to 3.0, names of ``megatron.core`` (core 0.4 to HEAD) and of ``megatron.legacy``, whose
models are nested dicts.

A *rank catalog*: keys are ``<rank directory>:<path in the file>``, shapes those of one rank;
``core.megatron.reshard.reshard.unshard`` makes them global. Model and optimizer tensors are tensors; those of other
entries (random states) are hidden ones inside their object. ``args`` and ``iteration`` are the first rank's,
``aliases`` and ``unsupported`` as in ``core.formats.torch.format``. Facets: ``RankFacts``, and ``Topology`` where the
arguments tell it.

Not supported: files of before 2023-05 with the distributed optimizer (``model_rng.pt``, ``optim.pt``), ``.nemo``
archives; expert parallel checkpoints whose ranks wrote over each other (ETP does not divide TP), which are refused by
name.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py``, pinned in tests/golden (``mcore_legacy``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from core.catalog.catalog import Catalog, StoredObject, TargetCatalog, catalog_of_arrays
from core.catalog.facets import RankFacts
from core.catalog.file_image import FileImage, literal_file
from core.catalog.stored import Coords, StoredArray
from core.errors import CheckpointingException, MissingShardError, Report, UnsupportedError, raising
from core.formats.format import Format
from core.formats.megatron.ranks import RankFiles
from core.formats.torch.zip.tree_layouts import TreePlans
from core.megatron.extras.common_state import OPTIMIZER, iteration_of
from core.megatron.model.args import disagreements, fields_of, topology_of
from core.megatron.model.topology import Topology, matched_dirs, rank_dirs
from core.megatron.optimizer.flat.content import OptimFile
from core.pickle.inert import as_mapping

if TYPE_CHECKING:
    from core.files.store import ReadStore

MODEL_FILE = "model_optim_rng.pt"
OPTIM_FILE = "distrib_optim.pt"
TRACKER = "latest_checkpointed_iteration.txt"
_RANK_DIR = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}$")
_OTHER_FILES = ("model_rng.pt", "optim.pt", "model_weights.ckpt")


def sniff(store: ReadStore) -> bool:
    """Whether there are rank directories, or this is one, or its file."""
    if store.entry is not None:
        return store.entry == MODEL_FILE
    return store.exists(MODEL_FILE) or any(map(_RANK_DIR.match, store.folders()))


def sample(store: ReadStore) -> Catalog:
    """What ``read`` gives, but opening one file of each pipeline stage and length.

    ``RankFacts.n_unopened`` says how many were not. For looking at a checkpoint; the errors are
    those of ``read``.
    """
    return read(store, samples=True)


def read(store: ReadStore, *, samples: bool = False) -> Catalog:
    """The rank catalog of an iteration's directory, of one rank directory, or of one rank's file.

    Raises:
        MissingShardError: a rank directory or its file is absent.
        CorruptError: a file is damaged, or the ranks are not of one checkpoint.
        UnsupportedError: files of an older kind, or no training arguments.
        UnsafeError: a hostile pickle.
    """
    if store.entry is not None or store.exists(MODEL_FILE):
        return _read_single(store)
    folders = [name for name in store.folders() if _RANK_DIR.match(name)]
    files_in = {folder: store.files(folder) for folder in folders}
    for folder, names in files_in.items():
        _check_folder(folder, names)
    files = RankFiles(store, samples=samples)
    args = files.root(f"{folders[0]}/{MODEL_FILE}").get("args")
    topology = topology_of(args, file=f"{folders[0]}/{MODEL_FILE}")
    expected = rank_dirs(
        topology, world_size=_number(args, "world_size"), cp=_number(args, "context_parallel_size") or 1
    )
    coords_of = matched_dirs(folders, expected, topology=topology)
    places = {folder: (folder + "/", coords) for folder, coords in coords_of.items()}
    return _catalog(files, places, files_in, topology=topology)


def salvage(store: ReadStore, report: Report) -> Catalog:
    """The rank catalog of those files that can be read; arguments are those that most ranks have.

    Args:
        report: takes what is wrong: rules ``ranks.folders``, ``.files``, ``.arguments``.

    Raises:
        CheckpointingException: as ``read``, where no file can be read.
    """
    if store.entry is not None or store.exists(MODEL_FILE):
        return _read_single(store)
    files_in: dict[str, Sequence[str]] = {}
    roots: dict[str, object] = {}
    files = RankFiles(store)
    for folder in filter(_RANK_DIR.match, store.folders()):
        names = store.files(folder)
        try:
            _check_folder(folder, names)
            roots[folder] = files.root(f"{folder}/{MODEL_FILE}").get("args")
            topology_of(roots[folder], file=f"{folder}/{MODEL_FILE}")
            files_in[folder] = names
        except CheckpointingException as err:
            report(err.breaking("ranks.files"))
    if not files_in:
        raise MissingShardError("no rank's file can be read", file=store.label)
    usual = _usual(files_in, roots)
    args = roots[usual]
    topology = topology_of(args)
    sets = rank_dirs(topology, world_size=_number(args, "world_size"), cp=_number(args, "context_parallel_size") or 1)
    try:
        coords_of = matched_dirs(filter(_RANK_DIR.match, store.folders()), sets, topology=topology)
    except CheckpointingException as err:
        report(err.breaking("ranks.folders"))
        coords_of = max(sets, key=lambda names: len(names.keys() & files_in.keys()))
    order = sorted(coords_of.keys() & files_in.keys(), key=lambda folder: (folder != usual, folder))
    places = {folder: (folder + "/", coords_of[folder]) for folder in order}
    if not places:
        raise MissingShardError("no rank's directory is one that the arguments ask for", file=store.label)
    return _catalog(files, places, files_in, topology=topology, report=report)


def _usual(folders: Iterable[str], args_of: Mapping[str, object]) -> str:
    """The first of the ranks with whose training arguments most others agree."""
    groups: list[list[str]] = []
    for folder in folders:
        for group in groups:
            if next(disagreements(args_of[folder], args_of[group[0]], rank=folder, other_rank=group[0]), None) is None:
                group.append(folder)
                break
        else:
            groups.append([folder])
    return max(groups, key=len)[0]


def _number(args: object, name: str) -> int | None:
    value = fields_of(args).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _check_folder(folder: str, names: Sequence[str]) -> None:
    """The rank directory holds its model file."""
    if MODEL_FILE in names:
        return
    old = [name for name in _OTHER_FILES if name in names]
    if old:
        raise UnsupportedError(
            f"it holds {old[0]}, a kind of rank file that is not read",
            file=folder,
            hint="load and save the checkpoint with a newer Megatron-LM",
        )
    raise MissingShardError(
        "the rank's file is not there",
        file=f"{folder}/{MODEL_FILE}",
        hint="copy the checkpoint again, with all its files",
    )


def _read_single(store: ReadStore) -> Catalog:
    """The catalog of one rank."""
    path = PurePath(store.label)
    name = path.parent.name if store.entry is not None else path.name
    folder = name if _RANK_DIR.match(name) else "mp_rank"
    return _catalog(RankFiles(store), {folder: ("", ())}, {folder: store.files()}, topology=None)


def _catalog(
    files: RankFiles,
    places: Mapping[str, tuple[str, Coords]],
    files_in: Mapping[str, Sequence[str]],
    *,
    topology: Topology | None,
    report: Report = raising,
) -> Catalog:
    """The catalog of some ranks.

    Args:
        places: rank directory → (path before its files, coordinates).
        files_in: rank directory → names of its files.
        topology: None for one rank out of many.
        report: takes what is wrong (rules ``ranks.files``, ``.arguments``); raises it, if none is given.
    """
    arrays: dict[str, StoredArray] = {}
    hidden: dict[str, StoredArray] = {}
    objects: dict[str, StoredObject] = {}
    aliases: dict[str, str] = {}
    unsupported: dict[str, str] = {}
    ranks: dict[Coords, tuple[str, object]] = {}
    optim_files: dict[Coords, object] = {}
    kinds: set[str] = set()
    first: tuple[str, Mapping[object, object]] | None = None
    for folder, (start, coords) in places.items():
        try:
            content = files.model(start + MODEL_FILE, folder, coords)
        except CheckpointingException as err:
            report(err.breaking("ranks.files"))
            continue
        root = as_mapping(content.skeleton) or {}
        if first is None:
            first = (folder, root)
        elif topology is not None:
            for error in disagreements(root.get("args"), first[1].get("args"), rank=folder, other_rank=first[0]):
                report(error.breaking("ranks.arguments"))
        arrays |= content.arrays
        hidden |= content.hidden
        objects |= {item.key: item for item in content.objects}
        aliases |= content.aliases
        unsupported |= content.unsupported
        ranks[coords] = (folder, content.skeleton)
        if root.get(OPTIMIZER) is not None:
            kinds.add("float16")
        if OPTIM_FILE in files_in[folder]:
            kinds.add("distributed")
            try:
                optim = files.beside(start + OPTIM_FILE, folder, coords, name=PurePath(OPTIM_FILE).stem)
            except CheckpointingException as err:
                report(err.breaking("ranks.files"))
                continue
            arrays |= optim.arrays
            aliases |= optim.aliases
            optim_files[coords] = optim.skeleton
        elif any(name.startswith("layer_wise_optimizer_") for name in files_in[folder]):
            kinds.add("layer-wise")
    if first is None:
        raise MissingShardError("no rank's file can be read", hint="copy the checkpoint again, with all its files")
    head = first[1]
    catalog = catalog_of_arrays(
        format="megatron",
        version=None if "checkpoint_version" not in head else str(head["checkpoint_version"]),
        arrays=arrays,
        objects=objects,
        hidden=hidden,
    )
    catalog = replace(
        catalog, args=head.get("args"), iteration=iteration_of(head), aliases=aliases, unsupported=unsupported
    ).with_facet(
        RankFacts(
            ranks=ranks,
            arrays=arrays,
            optim_files=optim_files,
            optimizer_kind=next((kind for kind in ("distributed", "layer-wise", "float16") if kind in kinds), None),
            is_single_rank=topology is None,
            n_unopened=files.n_unopened,
        )
    )
    sizes = topology if topology is not None or "args" not in head else topology_of(head["args"])
    return catalog if sizes is None else catalog.with_facet(sizes)


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """The images of a root: rank files under ``iter_N``, and the tracker.

    Args:
        target: what ``core.megatron.reshard.reshard.shard`` makes: arrays without extent, and ``RankFacts``. Without an
            iteration, or with ``WriteOptions.is_release``, it becomes a release.

    Raises:
        UnsupportedError: the target has no rank files, because it was not sharded.
    """
    facts = target.facet(RankFacts)
    if facts is None:
        raise UnsupportedError("rank files need a parallel layout", hint="the checkpoint's names are not Megatron's")
    number = None if target.write.is_release else target.iteration
    folder = "release" if number is None else f"iter_{number:07d}"
    arrays = target.stored_arrays() if facts.planned is None else facts.planned
    images = []
    plans, optim_plans = TreePlans(PurePath(MODEL_FILE).stem), TreePlans(PurePath(OPTIM_FILE).stem)
    for coords, (name, skeleton) in facts.ranks.items():
        plan = plans.plan(skeleton, arrays.__getitem__)
        images.append(FileImage(f"{folder}/{name}/{MODEL_FILE}", plan.size, plan.arrays, plan.literals))
        optim = facts.optim_files.get(coords)
        if isinstance(optim, OptimFile):
            plan = optim_plans.plan(optim.content, optim.joined.__getitem__)
            images.append(FileImage(f"{folder}/{name}/{OPTIM_FILE}", plan.size, plan.arrays, plan.literals))
    text = "release" if number is None else str(number)
    return (*images, literal_file(TRACKER, text.encode("ascii"), is_metadata=True))


FORMAT = Format(
    name="megatron",
    title="Megatron-LM rank files (mp_rank_*/model_optim_rng.pt)",
    sniff=sniff,
    read=read,
    sample=sample,
    salvage=salvage,
    lay_out=lay_out,
    aliases=("torch_ranks",),
    partition="ranks",
)
