"""Megatron-LM's checkpoint of one file per model parallel rank (``--ckpt-format torch``, "legacy").

On disk::

    root/
    ├── latest_checkpointed_iteration.txt  "10", without a newline; or "release"
    └── iter_0000010/                      or release/
        ├── mp_rank_00_000/                names: core.megatron.model.topology
        │   ├── model_optim_rng.pt         a torch zip: args, iteration, rng_state …,
        │   │                              model (or model0 … modelN)
        │   ├── distrib_optim.pt           with the distributed optimizer: its flat buffers
        │   └── layer_wise_optimizer_0.pt  layer-wise Muon: one of each DP rank
        └── mp_rank_01_000/ …

    With the distributed optimizer of 2022-03 to 2023-05 the model's file is model_rng.pt, without
    optimizer, and directories with a number of the data parallel rank more hold optim.pt alone.

Versions: checkpoint_version 0 to 3.0, names of ``megatron.core`` (core 0.4 to HEAD) and of
``megatron.legacy``, whose models are nested dicts.

A *rank catalog*: keys are ``<rank directory>:<path in the file>``, shapes those of one rank;
``core.megatron.reshard.unshard.unshard`` makes them global. Model and optimizer tensors are
tensors; those of other entries (random states) are hidden ones inside their object. ``args`` and
``iteration`` are the first rank's; tensors of one file are tied as in
``core.formats.torch.format``. Facets: ``RankFacts``, and ``Topology`` if it follows from the
arguments.

Not supported: the optimizer in ``optim.pt``, which can be left out; ``.nemo`` archives; expert
parallel checkpoints whose ranks overwrote each other's files (ETP does not divide TP), which are
refused by name.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py``, pinned in tests/golden
    (``mcore_legacy``).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog, catalog_of_arrays
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.file_image import FileImage, literal_file
from core.engine.catalog.stored import Coords, StoredArray
from core.errors import CheckpointingException, MissingShardError, Report, UnsupportedError, raising
from core.formats.format import MEGATRON_FOLDERS, Format
from core.formats.megatron.ranks import RankContent, RankFiles
from core.megatron.extras.common_state import OPTIMIZER, get_iteration
from core.megatron.model.args import disagreements, fields_of, topology_of
from core.megatron.model.topology import Topology, matched_dirs, rank_dirs
from core.pickle.fields import int_or_none
from core.pickle.inert import as_mapping

if TYPE_CHECKING:
    from core.files.store import ReadStore

MODEL_FILE = "model_optim_rng.pt"
MODEL_FILES = (MODEL_FILE, "model_rng.pt")
"""Names of a rank's model file: today's, and the one beside the old distributed optimizer."""
OLD_OPTIM_FILE = "optim.pt"
OPTIM_FILE = "distrib_optim.pt"
TRACKER = "latest_checkpointed_iteration.txt"
RANK_DIR = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}$")
_LAYER_WISE_FILE = re.compile(r"layer_wise_optimizer_(\d+)\.pt$")
NEMO_FILE = "model_weights.ckpt"


def choose_model_file(names: Container[str]) -> str | None:
    """Return the name of a rank's model file among those in its directory; None without one."""
    return next((name for name in MODEL_FILES if name in names), None)


def is_optimizer_dir(names: Container[str]) -> bool:
    """Return whether a rank directory holds the old distributed optimizer alone."""
    return OLD_OPTIM_FILE in names and choose_model_file(names) is None


def sniff(store: ReadStore) -> bool:
    """Return whether a store is a directory of rank directories, one of these, or a rank's file."""
    if store.entry is not None:
        return store.entry in MODEL_FILES
    return any(map(store.exists, MODEL_FILES)) or any(map(RANK_DIR.match, store.folders()))


def sample(store: ReadStore) -> Catalog:
    """Read the rank catalog, but open only one file of each pipeline stage and length.

    For inspecting a checkpoint. ``RankFacts.n_unopened`` is the number of files that were not
    opened. The errors are those of ``read``.
    """
    return read(store, samples=True)


def read(store: ReadStore, *, samples: bool = False, needs_optimizer: bool = True) -> Catalog:
    """Read the rank catalog of an iteration's directory, one rank directory, or one rank's file.

    Args:
        samples: open only one file of each pipeline stage and length.
        needs_optimizer: False to leave ``distrib_optim.pt`` unread.

    Raises:
        MissingShardError: a rank directory or its file is missing.
        CorruptError: a file is damaged, or the ranks belong to different checkpoints.
        UnsupportedError: the files are of an older kind, or have no training arguments.
        UnsafeError: a pickle is hostile.
    """
    if store.entry is not None or any(map(store.exists, MODEL_FILES)):
        return _read_single(store)
    # Every rank directory must contain its file, except those of the old distributed optimizer.
    files_in = {name: store.files(name) for name in store.folders() if RANK_DIR.match(name)}
    optimizer_dirs = {name for name, names in files_in.items() if is_optimizer_dir(names)}
    if len(optimizer_dirs) < len(files_in):
        files_in = {name: names for name, names in files_in.items() if name not in optimizer_dirs}
    if not needs_optimizer:
        files_in = {
            name: [file for file in names if file != OPTIM_FILE] for name, names in files_in.items()
        }
    folders = list(files_in)
    model_files = {folder: _find_model_file(folder, names) for folder, names in files_in.items()}
    # The topology, and hence the expected directories, follow from the first rank's arguments.
    files = RankFiles(store, samples=samples)
    files.expect(
        f"{folder}/{name}"
        for folder in sorted(folders, key=lambda folder: folder.split("_")[:1:-1])
        for name in files_in[folder]
        if name in (*MODEL_FILES, OPTIM_FILE) or _LAYER_WISE_FILE.match(name)
    )
    first_file = f"{folders[0]}/{model_files[folders[0]]}"
    args = files.read_root(first_file).get("args")
    topology = topology_of(args, file=first_file)
    coords_of = matched_dirs(folders, possible_dirs(args, topology), topology=topology)
    places = {folder: (folder + "/", coords) for folder, coords in coords_of.items()}
    return _catalog(
        files, places, files_in, topology=topology, has_old_optimizer=bool(optimizer_dirs)
    )


def salvage(store: ReadStore, report: Report) -> Catalog:
    """Read the rank catalog of the files that can be read, and report the others.

    The topology follows from the training arguments that most ranks have in common.

    Args:
        report: receives the problems: rules ``ranks.folders``, ``.files``, ``.arguments``.

    Raises:
        MissingShardError: no file can be read, or no rank directory matches the arguments.
        CheckpointingException: the checkpoint is a single rank's, and cannot be read.
    """
    if store.entry is not None or any(map(store.exists, MODEL_FILES)):
        return _read_single(store)
    # Skip the rank directories that cannot be read.
    files_in: dict[str, Sequence[str]] = {}
    roots: dict[str, object] = {}
    files = RankFiles(store)
    for folder in filter(RANK_DIR.match, store.folders()):
        names = store.files(folder)
        if is_optimizer_dir(names):
            continue
        try:
            file = f"{folder}/{_find_model_file(folder, names)}"
            roots[folder] = files.read_root(file).get("args")
            topology_of(roots[folder], file=file)
            files_in[folder] = names
        except CheckpointingException as err:
            report(err.breaking("ranks.files"))
    if not files_in:
        raise MissingShardError("none of the rank files can be read", file=store.label)
    # Use the topology of most ranks; a few may have other arguments.
    common_rank = _most_common_rank(files_in, roots)
    args = roots[common_rank]
    topology = topology_of(args)
    allowed_dirs = possible_dirs(args, topology)
    # If directories are missing or superfluous, use the expected set that most of them belong to.
    try:
        coords_of = matched_dirs(
            filter(RANK_DIR.match, store.folders()), allowed_dirs, topology=topology
        )
    except CheckpointingException as err:
        report(err.breaking("ranks.folders"))
        coords_of = max(allowed_dirs, key=lambda names: len(names.keys() & files_in.keys()))
    # Read a rank with the common arguments first, because the catalog gets those of the first rank.
    order = sorted(
        coords_of.keys() & files_in.keys(), key=lambda folder: (folder != common_rank, folder)
    )
    places = {folder: (folder + "/", coords_of[folder]) for folder in order}
    if not places:
        raise MissingShardError(
            "no rank directory matches the training arguments", file=store.label
        )
    return _catalog(files, places, files_in, topology=topology, report=report)


def _most_common_rank(folders: Iterable[str], args_of: Mapping[str, object]) -> str:
    """Return the first rank of the largest group with equal training arguments.

    Args:
        folders: the ranks' directories.
        args_of: directory → training arguments.
    """
    groups: list[list[str]] = []
    for folder in folders:
        # Compare with the first rank of each group; arguments that are a rank's own do not count.
        for group in groups:
            first = group[0]
            errors = disagreements(args_of[folder], args_of[first], rank=folder, other_rank=first)
            if next(errors, None) is None:
                group.append(folder)
                break
        else:
            groups.append([folder])
    return max(groups, key=len)[0]


def possible_dirs(args: object, topology: Topology) -> list[dict[str, Coords]]:
    """Return the sets of rank directories that training arguments allow, as ``rank_dirs`` does."""
    # Arguments of older versions may be missing or None.
    fields = fields_of(args)
    return rank_dirs(
        topology,
        world_size=int_or_none(fields.get("world_size")),
        cp=int_or_none(fields.get("context_parallel_size")) or 1,
    )


def _find_model_file(folder: str, names: Sequence[str]) -> str:
    """Return the name of the model file in a rank directory.

    Args:
        names: the files in the directory.

    Raises:
        UnsupportedError: the directory contains files of NeMo, or an optimizer without its model.
        MissingShardError: the file is missing.
    """
    model_file = choose_model_file(names)
    if model_file is not None:
        return model_file
    other_file = next((name for name in (NEMO_FILE, OLD_OPTIM_FILE) if name in names), None)
    if other_file is not None:
        raise UnsupportedError(
            f"the rank directory has {other_file}, but no {' or '.join(MODEL_FILES)}",
            file=folder,
            hint="load the checkpoint with a newer Megatron-LM, and save it again",
        )
    raise MissingShardError(
        "the rank's file is missing",
        file=f"{folder}/{MODEL_FILE}",
        hint="copy the checkpoint again, with all its files",
    )


def _read_single(store: ReadStore) -> Catalog:
    """Read the catalog of one rank, given by its directory or file."""
    path = PurePath(store.label)
    name = path.parent.name if store.entry is not None else path.name
    folder = name if RANK_DIR.match(name) else "mp_rank"
    return _catalog(RankFiles(store), {folder: ("", ())}, {folder: store.files()}, topology=None)


def _catalog(
    files: RankFiles,
    places: Mapping[str, tuple[str, Coords]],
    files_in: Mapping[str, Sequence[str]],
    *,
    topology: Topology | None,
    has_old_optimizer: bool = False,
    report: Report = raising,
) -> Catalog:
    """Read the files of some ranks, and build their catalog.

    Args:
        places: rank directory → (path before its files, coordinates).
        files_in: rank directory → names of its files.
        topology: None for a single rank.
        has_old_optimizer: directories of their own hold an optimizer that is not read.
        report: receives the problems (rules ``ranks.files``, ``.arguments``); raises them by
            default.
    """
    # Read the model file of every rank, and compare its arguments with those of the first one.
    collected = _CollectedRanks()
    if has_old_optimizer:
        collected.optimizer_kinds.add(OLD_OPTIM_FILE)
    for folder, (start, coords) in places.items():
        try:
            model_file = _find_model_file(folder, files_in[folder])
            content = files.read_model(start + model_file, folder, coords)
        except CheckpointingException as err:
            report(err.breaking("ranks.files"))
            continue
        collected.add_model(folder, coords, content)
        if topology is not None:
            for error in collected.argument_errors(folder, content):
                report(error.breaking("ranks.arguments"))

        # The optimizer of a rank may be in a separate file.
        if OPTIM_FILE in files_in[folder]:
            collected.optimizer_kinds.add("distributed")
            try:
                optim = files.read_other(
                    start + OPTIM_FILE, folder, coords, name=PurePath(OPTIM_FILE).stem
                )
            except CheckpointingException as err:
                report(err.breaking("ranks.files"))
                continue
            collected.add_optimizer(coords, optim)
            continue
        for name in files_in[folder]:
            if (match := _LAYER_WISE_FILE.match(name)) is None:
                continue
            collected.optimizer_kinds.add("layer-wise")
            try:
                optim = files.read_other(start + name, folder, coords, name=PurePath(name).stem)
            except CheckpointingException as err:
                report(err.breaking("ranks.files"))
                continue
            collected.add_optimizer(coords, optim, number=int(match[1]))
    return collected.catalog(topology, n_unopened=files.n_unopened)


class _CollectedRanks:
    """The content of the rank files that have been read.

    Attributes:
        optimizer_kinds: the optimizers of the ranks, as in ``RankFacts.optimizer_kind``.
    """

    def __init__(self) -> None:
        self.optimizer_kinds: set[str] = set()
        self._arrays: dict[str, StoredArray] = {}
        self._hidden: dict[str, StoredArray] = {}
        self._objects: dict[str, StoredObject] = {}
        self._ranks: dict[Coords, tuple[str, object]] = {}
        self._optim_files: dict[Coords, object] = {}
        self._first: tuple[str, Mapping[object, object]] | None = None

    def add_model(self, folder: str, coords: Coords, content: RankContent) -> None:
        """Add the content of a rank's model file."""
        root = as_mapping(content.skeleton) or {}
        if self._first is None:
            self._first = (folder, root)
        self._arrays |= content.arrays
        self._hidden |= content.hidden
        self._objects |= {item.key: item for item in content.objects}
        self._ranks[coords] = (folder, content.skeleton)
        if root.get(OPTIMIZER) is not None:
            self.optimizer_kinds.add("float16")

    def argument_errors(
        self, folder: str, content: RankContent
    ) -> Iterable[CheckpointingException]:
        """Return an error for every training argument that differs from the first rank's."""
        assert self._first is not None
        first_folder, first_root = self._first
        if folder == first_folder:
            return ()
        args = (as_mapping(content.skeleton) or {}).get("args")
        return disagreements(args, first_root.get("args"), rank=folder, other_rank=first_folder)

    def add_optimizer(
        self, coords: Coords, content: RankContent, *, number: int | None = None
    ) -> None:
        """Add the content of a rank's optimizer file.

        Args:
            number: that of layer_wise_optimizer_N.pt, of which a rank directory has several; None
                for distrib_optim.pt.
        """
        self._arrays |= content.arrays
        if number is None:
            self._optim_files[coords] = content.skeleton
        else:
            by_number = self._optim_files.setdefault(coords, {})
            assert isinstance(by_number, dict)
            by_number[number] = content.skeleton

    def catalog(self, topology: Topology | None, *, n_unopened: int) -> Catalog:
        """Build the catalog of all ranks.

        Args:
            topology: None for a single rank.
            n_unopened: number of files that were not opened.

        Raises:
            MissingShardError: no rank's file was read.
        """
        if self._first is None:
            raise MissingShardError(
                "none of the rank files can be read",
                hint="copy the checkpoint again, with all its files",
            )
        # The first rank's entries are those of the catalog.
        head = self._first[1]
        catalog = catalog_of_arrays(
            format="megatron",
            version=None if "checkpoint_version" not in head else str(head["checkpoint_version"]),
            arrays=self._arrays,
            objects=self._objects,
            hidden=self._hidden,
        )
        catalog = replace(catalog, args=head.get("args"), iteration=get_iteration(head))
        # Ranks with a separate optimizer file may have an optimizer in the model file, too; the
        # separate one counts.
        kinds = (
            kind
            for kind in ("distributed", "layer-wise", OLD_OPTIM_FILE, "float16")
            if kind in self.optimizer_kinds
        )
        facts = RankFacts(
            ranks=self._ranks,
            arrays=self._arrays,
            optim_files=self._optim_files,
            optimizer_kind=next(kinds, None),
            is_single_rank=topology is None,
            n_unopened=n_unopened,
        )
        # A single rank's arguments contain the topology as well, if it has arguments.
        if topology is None and "args" in head:
            topology = topology_of(head["args"])
        catalog = catalog.with_facet(facts)
        return catalog if topology is None else catalog.with_facet(topology)


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """Lay out the files of a root: rank files under ``iter_N`` or ``release``, and the tracker.

    Args:
        target: a result of ``core.megatron.reshard.to_ranks.shard``, with ``RankFacts``. Without an
            iteration, or with ``WriteOptions.is_release``, it becomes a release.

    Raises:
        UnsupportedError: the target was not sharded, so it has no rank files; or a file would
            refer to a storage in another file.
    """
    from core.formats.torch.zip.tree_layouts import TreePlans

    facts = target.facet(RankFacts)
    if facts is None:
        raise UnsupportedError(
            "rank files need a parallel layout, which only tensors with Megatron's names have",
            hint="write a different format, such as --to dcp",
        )
    number = None if target.write.is_release else target.iteration
    folder = "release" if number is None else f"iter_{number:07d}"
    # Ranks of a pipeline stage have files with equal layouts, which are planned only once.
    arrays = target.stored_arrays() if facts.planned is None else facts.planned
    images = []
    plans, optim_plans = TreePlans(PurePath(MODEL_FILE).stem), TreePlans(PurePath(OPTIM_FILE).stem)
    for coords, (name, skeleton) in facts.ranks.items():
        plan = plans.plan(skeleton, arrays.__getitem__)
        images.append(plan.image(f"{folder}/{name}/{MODEL_FILE}"))
        optim = facts.optim_files.get(coords)
        if optim is None:
            continue
        from core.megatron.optimizer.flat.content import OptimFile

        if isinstance(optim, OptimFile):
            plan = optim_plans.plan(optim.content, optim.joined.__getitem__)
            images.append(plan.image(f"{folder}/{name}/{OPTIM_FILE}"))
    # The tracker is written last, as it makes the directory a checkpoint.
    text = "release" if number is None else str(number)
    return (*images, literal_file(TRACKER, text.encode("ascii"), is_metadata=True))


FORMAT = Format(
    name="megatron",
    title="Megatron-LM rank files (mp_rank_*/model_optim_rng.pt)",
    sniff=sniff,
    read=read,
    sample=sample,
    read_weights=lambda store: read(store, needs_optimizer=False),
    salvage=salvage,
    lay_out=lay_out,
    side_folders=MEGATRON_FOLDERS,
    aliases=("torch_ranks",),
    partition="ranks",
    has_files_of_ranks=True,
    megatron_name="torch",
)
