"""CK501–CK506: what stands beside the model: arguments, iteration, version, random states, and ``metadata.json``.

Rank files repeat it, so ranks can disagree. torch_dist and zarr have it once, and random states as a grid of objects
``rng_state/shard_{pp}.{tp}_{PP}.{TP}``, which Megatron asks for exactly if it runs with the sizes of the arguments.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` ``generate_state_dict``, ``load_checkpoint``; tests/golden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

from core.catalog.catalog import Catalog
from core.catalog.facets import RankFacts
from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.subject import Subject
from core.errors import CheckpointingException
from core.formats.mcore.metadata_json import BACKEND_KEY, BACKENDS, CONFIG, VERSION, config_of
from core.formats.mcore.objects import COMMON_OBJECT
from core.megatron.extras.common_state import OF_THE_RUN, RNG, iteration_of, same, sharded_object
from core.megatron.model.args import topology_of
from core.opening.open import ITERATION_DIR
from core.pickle.inert import as_mapping

_MIXED = "the rank directories are not of one step, or one is damaged: use an older checkpoint"
NO_ARGS = Code(
    "CK501", Severity.WARNING, "no training arguments", "its layout is not known: keep the arguments of the run at hand"
)
NUMBER = Code(
    "CK502",
    Severity.WARNING,
    "the directory's name says another iteration",
    "rename the directory, or find the right one",
)
RANKS = Code("CK503", Severity.ERROR, "ranks disagree about the state of the run", _MIXED)
VERSION_ODD = Code("CK504", Severity.WARNING, "an odd checkpoint_version", "use software that knows this version")
RANDOM = Code("CK505", Severity.WARNING, "random states are incomplete", "start Megatron with --no-load-rng")
BACKEND = Code(
    "CK506",
    Severity.ERROR,
    "metadata.json names an unknown backend, or not the one there",
    "write the right backend into it",
)

CODES = (NO_ARGS, NUMBER, RANKS, VERSION_ODD, RANDOM, BACKEND)

_NEWEST = 3.0
_MOST_RANKS = 1 << 16
_MARKS = {"torch_dist": ".metadata", "zarr": ".zarray"}
"""Backend → the name of a file that it always writes."""


def arguments(subject: Subject) -> Iterator[Finding]:
    """Megatron's names without Megatron's arguments."""
    catalog, format = subject.salvaged.catalog, subject.format
    if catalog is None or format is None or not (format.is_mcore or format.name == "megatron"):
        return
    names = (key.partition(":model.")[2] or key for key in catalog.tensors)
    beginnings = subject.rules.main_stacks
    has_model = any(name.startswith(beginnings) for name in names)
    if not has_model or any(err.rule == "dcp.common" for err in subject.salvaged.problems):
        return
    ranks = _roots(catalog)
    lacking = [folder for folder, root in ranks.items() if "args" not in root]
    if lacking or (not ranks and catalog.args is None):
        yield NO_ARGS.finding(
            "the checkpoint holds no training arguments",
            rank=lacking[0] if lacking else None,
            key="args",
            expected="args",
            found="no such entry",
        )


def numbered(subject: Subject) -> Iterator[Finding]:
    """The iteration inside against the directory's name."""
    named, catalog = ITERATION_DIR.search(subject.path.name), subject.salvaged.catalog
    if catalog is None:
        return
    stated = [iteration_of(root) for root in _roots(catalog).values()]
    found = _usual(list(stated)) if stated else catalog.iteration
    if named is not None and isinstance(found, int) and found != int(named[1]):
        yield NUMBER.finding(
            f"the checkpoint is of iteration {found}, by its content",
            key="iteration",
            expected=f"iteration {int(named[1])} ({subject.path.name})",
            found=f"iteration {found}",
        )


def agreeing(subject: Subject) -> Iterator[Finding]:
    """Iteration, version and scheduler of all ranks."""
    catalog = subject.salvaged.catalog
    ranks = {} if catalog is None else _roots(catalog)
    for name in OF_THE_RUN:
        values = [root.get(name) for root in ranks.values()]
        if all(value is values[0] or same(value, values[0]) for value in values[1:]):
            continue
        usual = _usual(values)
        for folder, root in ranks.items():
            if not same(root.get(name), usual):
                yield RANKS.finding(
                    f"{name} is not that of most other ranks",
                    key=name,
                    rank=folder,
                    expected=_text(usual),
                    found=_text(root.get(name)) if name in root else "no such entry",
                )


def _roots(catalog: Catalog) -> Mapping[str, Mapping[object, object]]:
    """Rank directory → the content of its file."""
    facts = catalog.facet(RankFacts)
    ranks = () if facts is None else facts.ranks.values()
    return {folder: as_mapping(root) or {} for folder, root in ranks}


def _usual(values: list[object]) -> object:
    """The value that most ranks have."""
    groups: list[list[object]] = []
    for value in values:
        group = next((group for group in groups if same(group[0], value)), None)
        if group is None:
            groups.append([value])
        else:
            group.append(value)
    return max(groups, key=len)[0]


def _text(value: object) -> str:
    return repr(value) if isinstance(value, (int, float, str, type(None))) else f"a {type(value).__name__}"


def versioned(subject: Subject) -> Iterator[Finding]:
    """``checkpoint_version`` is a number that is known."""
    catalog = subject.salvaged.catalog
    if catalog is None:
        return
    found = next(iter(_roots(catalog).values()), catalog.common or {}).get("checkpoint_version")
    if found is None:
        return
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if not is_number or not 0 <= float(str(found)) <= _NEWEST:
        yield VERSION_ODD.finding(
            "checkpoint_version is none that Megatron writes",
            key="checkpoint_version",
            expected=f"a number up to {_NEWEST}",
            found=_text(found),
            severity=None if is_number else Severity.ERROR,
        )


def random(subject: Subject) -> Iterator[Finding]:
    """Every rank has its random states, or none has."""
    catalog = subject.salvaged.catalog
    if catalog is None:
        return
    ranks = _roots(catalog)
    if ranks:
        lacking = [folder for folder, root in ranks.items() if RNG not in root]
        for folder in lacking if len(lacking) < len(ranks) else ():
            yield RANDOM.finding(
                "other ranks have random states, this one has none",
                key=RNG,
                rank=folder,
                expected=RNG,
                found="no such entry",
            )
        return
    yield from _grid(catalog)


def _grid(catalog: Catalog) -> Iterator[Finding]:
    """The grid of random states in torch_dist and zarr is complete, and that of the arguments."""
    shards = [found for key in catalog.objects if key.startswith(f"{RNG}/") and (found := sharded_object(key))]
    if not shards:
        return
    shape, _ = Counter(found[2] for found in shards).most_common(1)[0]
    held = {found[1] for found in shards if found[2] == shape}
    if len(held) < len(shards):
        other = next(found[2] for found in shards if found[2] != shape)
        yield RANDOM.finding(
            "random states of runs of two sizes", key=RNG, expected=f"a grid {shape}", found=f"also {other}"
        )
    lost = [at for at in product(*map(range, shape)) if at not in held] if prod(shape) <= _MOST_RANKS else []
    for at in lost:
        key = f"{RNG}/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, shape))}"
        yield RANDOM.finding(
            "the random states of a rank are not there",
            key=key,
            expected=f"a grid {shape}",
            found=f"{len(held)} of them",
        )
    try:
        run = topology_of(catalog.args)
    except CheckpointingException:
        return
    if len(shape) >= 2 and shape[:2] != (run.pp, run.tp):
        yield RANDOM.finding(
            "random states of another run: Megatron would ask for others",
            key=RNG,
            expected=f"a grid {(run.pp, run.tp)} (PP, TP of the arguments)",
            found=f"a grid {shape}",
        )


def backend(subject: Subject) -> Iterator[Finding]:
    """What ``metadata.json`` says lies in the directory, lies there."""
    if CONFIG not in subject.files or subject.store.entry is not None:
        return
    try:
        config = config_of(subject.store)
    except CheckpointingException:
        return  # found where trackers and such files are looked at
    catalog = subject.salvaged.catalog
    is_megatron = subject.format is not None and (
        subject.format.is_mcore or (catalog is not None and COMMON_OBJECT in catalog.objects)
    )
    found = config.get(BACKEND_KEY)
    stated = found if isinstance(found, str) else None
    if stated not in BACKENDS and (BACKEND_KEY in config or is_megatron):
        yield BACKEND.finding(
            "metadata.json names a backend that is not known"
            if BACKEND_KEY in config
            else "metadata.json names no backend",
            file=CONFIG,
            key=BACKEND_KEY,
            expected=" or ".join(BACKENDS),
            found=f"{found!r:.60}" if BACKEND_KEY in config else "no such entry",
            hint="write the name of the backend that saved the files into it, or use an older checkpoint",
        )
    there = {name for name, mark in _MARKS.items() if any(file.rpartition("/")[2] == mark for file in subject.files)}
    if stated in _MARKS and there and stated not in there:
        yield BACKEND.finding(
            "tensors of another backend lie there",
            file=CONFIG,
            key=BACKEND_KEY,
            expected=f"{stated} ({_MARKS[stated]})",
            found=", ".join(f"{name} ({_MARKS[name]})" for name in sorted(there)),
        )
    version = config.get("sharded_backend_version", VERSION)
    if stated in _MARKS and version != VERSION:
        yield BACKEND.finding(
            "a version of the backend that is not known",
            file=CONFIG,
            key="sharded_backend_version",
            expected=VERSION,
            found=_text(version),
            hint="use software that knows this version",
        )


CHECKS = (
    *(Check(arguments), Check(numbered), Check(agreeing, formats=("megatron",))),
    *(Check(versioned), Check(random), Check(backend)),
)
