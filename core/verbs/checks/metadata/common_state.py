"""CK501–CK506: check arguments, iteration, version, random states, and ``metadata.json``.

Every rank file repeats this state, so ranks can disagree. torch_dist and zarr store it once, and
random states as a grid of objects ``rng_state/shard_{pp}.{tp}_{PP}.{TP}``, which Megatron loads
only if it runs at the sizes in the arguments.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` ``generate_state_dict``,
``load_checkpoint``; tests/golden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from itertools import product
from math import prod

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.errors import CheckpointingException
from core.opening.iterations import ITERATION_DIR
from core.pickle.fields import text_or_none
from core.pickle.inert import as_mapping
from core.values import n_text
from core.verbs.checks.finding import Finding, Severity, get_code
from core.verbs.checks.subject import Check, Subject

NO_ARGS = get_code("CK501")
NUMBER = get_code("CK502")
RANKS = get_code("CK503")
VERSION_ODD = get_code("CK504")
RANDOM = get_code("CK505")
BACKEND = get_code("CK506")


_NEWEST_VERSION = 3.0
_MOST_RANKS = 1 << 16
_MARKS = {"torch_dist": ".metadata", "zarr": ".zarray"}
"""Backend → name of a file that it always writes."""


def check_arguments(subject: Subject) -> Iterator[Finding]:
    """Report a Megatron model without training arguments (CK501)."""
    catalog = subject.salvaged.catalog
    if catalog is None or not _holds_megatron_model(subject, catalog):
        return
    # If the common state is damaged, the arguments may be in it.
    if any(err.rule == "dcp.common" for err in subject.salvaged.problems):
        return
    ranks = _roots(catalog)
    incomplete = [folder for folder, root in ranks.items() if "args" not in root]
    if incomplete or (not ranks and catalog.args is None):
        yield NO_ARGS.finding(
            "the checkpoint has no training arguments",
            rank=incomplete[0] if incomplete else None,
            key="args",
            expected="args",
            found="no such entry",
        )


def _holds_megatron_model(subject: Subject, catalog: Catalog) -> bool:
    """Return whether the checkpoint has a format of Megatron's and tensors of a model."""
    format = subject.format
    if format is None or not format.has_layout:
        return False
    # Tensor names of rank files have a prefix that ends with ":model.".
    names = (key.partition(":model.")[2] or key for key in catalog.tensors)
    return any(name.startswith(subject.rules.main_stacks) for name in names)


def check_iteration(subject: Subject) -> Iterator[Finding]:
    """Compare the iteration stored in the checkpoint with the name of its directory (CK502)."""
    match, catalog = ITERATION_DIR.search(subject.path.name), subject.salvaged.catalog
    if match is None or catalog is None:
        return
    from core.megatron.extras.common_state import get_iteration

    # Ranks that disagree are reported by ``check_agreement``; here the majority counts.
    numbers: list[object] = [get_iteration(root) for root in _roots(catalog).values()]
    iteration = _most_frequent(numbers) if numbers else catalog.iteration
    if isinstance(iteration, int) and iteration != int(match[1]):
        yield NUMBER.finding(
            f"the checkpoint's iteration is {iteration}, but its directory is {subject.path.name}",
            key="iteration",
            expected=f"iteration {int(match[1])} ({subject.path.name})",
            found=f"iteration {iteration}",
        )


def check_agreement(subject: Subject) -> Iterator[Finding]:
    """Compare iteration, version and scheduler state of all ranks (CK503)."""
    catalog = subject.salvaged.catalog
    ranks = {} if catalog is None else _roots(catalog)
    if not ranks:
        return
    from core.megatron.extras.common_state import OF_THE_RUN
    from core.pickle.equality import are_same

    for name in OF_THE_RUN:
        values = [root.get(name) for root in ranks.values()]
        if all(value is values[0] or are_same(value, values[0]) for value in values[1:]):
            continue
        expected = _most_frequent(values)
        for folder, root in ranks.items():
            if not are_same(root.get(name), expected):
                yield RANKS.finding(
                    f"this rank's {name} differs from that of most other ranks",
                    key=name,
                    rank=folder,
                    expected=_value_text(expected),
                    found=_value_text(root.get(name)) if name in root else "no such entry",
                )


def _roots(catalog: Catalog) -> Mapping[str, Mapping[object, object]]:
    """Return rank directory → content of its model file."""
    facts = catalog.facet(RankFacts)
    ranks = () if facts is None else facts.ranks.values()
    return {folder: as_mapping(root) or {} for folder, root in ranks}


def _most_frequent(values: list[object]) -> object:
    """Return the most frequent of some values, which need not be hashable."""
    from core.pickle.equality import are_same

    # Group them by comparison (``same``), because containers cannot be counted.
    groups: list[list[object]] = []
    for value in values:
        group = next((group for group in groups if are_same(group[0], value)), None)
        if group is None:
            groups.append([value])
        else:
            group.append(value)
    return max(groups, key=len)[0]


def _value_text(value: object) -> str:
    """Format a value as short text; of containers, only the type."""
    return (
        repr(value)
        if isinstance(value, (int, float, str, type(None)))
        else f"a {type(value).__name__}"
    )


def check_version(subject: Subject) -> Iterator[Finding]:
    """Check that ``checkpoint_version`` is one of Megatron's versions (CK504)."""
    catalog = subject.salvaged.catalog
    if catalog is None:
        return
    version = next(iter(_roots(catalog).values()), catalog.common or {}).get("checkpoint_version")
    if version is None:
        return
    is_number = isinstance(version, (int, float)) and not isinstance(version, bool)
    if not is_number or not 0 <= float(str(version)) <= _NEWEST_VERSION:
        yield VERSION_ODD.finding(
            "no version of Megatron writes this checkpoint_version",
            key="checkpoint_version",
            expected=f"a number up to {_NEWEST_VERSION}",
            found=_value_text(version),
            severity=None if is_number else Severity.ERROR,
        )


def check_random_states(subject: Subject) -> Iterator[Finding]:
    """Check that either all ranks or none have random states (CK505)."""
    catalog = subject.salvaged.catalog
    if catalog is None:
        return
    ranks = _roots(catalog)
    if not ranks:
        yield from _check_random_grid(catalog)
    else:
        from core.megatron.extras.common_state import RNG

        incomplete = [folder for folder, root in ranks.items() if RNG not in root]
        for folder in incomplete if len(incomplete) < len(ranks) else ():
            yield RANDOM.finding(
                "this rank has no random states, but other ranks do",
                key=RNG,
                rank=folder,
                expected=RNG,
                found="no such entry",
            )


def _check_random_grid(catalog: Catalog) -> Iterator[Finding]:
    """Check that the grid of random states is complete, and has the sizes of the arguments."""
    if not any("/shard_" in key for key in catalog.objects):
        return
    from core.megatron.extras.common_state import RNG
    from core.megatron.extras.sharded_objects import sharded_object
    from core.megatron.model.args import topology_of

    shards = [
        shard
        for key in catalog.objects
        if key.startswith(f"{RNG}/") and (shard := sharded_object(key))
    ]
    if not shards:
        return
    # Each shard records the shape of its grid. The majority decides; others belong to another run.
    shape, _ = Counter(shape for _, _, shape in shards).most_common(1)[0]
    present = {offset for _, offset, other in shards if other == shape}
    if len(present) < len(shards):
        other = next(other for _, _, other in shards if other != shape)
        yield RANDOM.finding(
            "the random states come from runs with different parallel sizes",
            key=RNG,
            expected=f"one grid, of shape {shape}",
            found=f"also a grid of shape {other}",
        )
    yield from _find_missing_states(shape, present)
    # Megatron loads a grid with the parallel sizes of the arguments.
    try:
        run = topology_of(catalog.args)
    except CheckpointingException:
        return
    if len(shape) >= 2 and shape[:2] != (run.pp, run.tp):
        yield RANDOM.finding(
            "the random states do not match the training arguments, so Megatron cannot load them",
            key=RNG,
            expected=f"PP {run.pp} and TP {run.tp}, from the arguments",
            found=f"PP {shape[0]} and TP {shape[1]}",
        )


def _find_missing_states(
    shape: tuple[int, ...], present: Set[tuple[int, ...]]
) -> Iterator[Finding]:
    """Report the cells of a grid without random states; nothing for absurdly large grids.

    Args:
        shape: shape of the grid, in ranks.
        present: offsets of the cells that exist.
    """
    from core.megatron.extras.common_state import RNG

    if prod(shape) > _MOST_RANKS:
        return
    for offset in product(*map(range, shape)):
        if offset not in present:
            yield RANDOM.finding(
                "one rank's random states are missing",
                key=f"{RNG}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}",
                expected=f"{prod(shape)} states, a grid of shape {shape}",
                found=n_text(len(present), "state"),
            )


def check_backend(subject: Subject) -> Iterator[Finding]:
    """Compare the backend in ``metadata.json`` with the files in the directory (CK506)."""
    from core.formats.mcore.metadata_json import BACKEND_KEY, BACKENDS, CONFIG, read_metadata_json

    if CONFIG not in subject.files or subject.store.entry is not None:
        return
    try:
        config = read_metadata_json(subject.store)
    except CheckpointingException:
        return  # reported by the checks of trackers (CK516)
    # The backend must be a known one. Software other than Megatron-core may omit it.
    backend = text_or_none(config.get(BACKEND_KEY))
    if backend not in BACKENDS and (BACKEND_KEY in config or _is_megatron_core(subject)):
        has_key = BACKEND_KEY in config
        yield BACKEND.finding(
            "metadata.json names an unknown backend"
            if has_key
            else "metadata.json does not name a backend",
            file=CONFIG,
            key=BACKEND_KEY,
            expected=" or ".join(BACKENDS),
            found=f"{config[BACKEND_KEY]!r:.60}" if has_key else "no such entry",
            hint=f"set {BACKEND_KEY} to the backend that saved the files, or use an older "
            "checkpoint",
        )
    if backend in _MARKS:
        yield from _check_known_backend(subject, config, backend)


def _check_known_backend(
    subject: Subject, config: Mapping[str, object], backend: str
) -> Iterator[Finding]:
    """Check that a known backend wrote the files of the directory, at a known version."""
    from core.formats.mcore.metadata_json import BACKEND_KEY, CONFIG, VERSION

    # Each backend always writes one file by which it can be recognised.
    names = {file.rpartition("/")[2] for file in subject.files}
    present = {name for name, mark in _MARKS.items() if mark in names}
    if present and backend not in present:
        yield BACKEND.finding(
            "the tensors were not written by the backend that metadata.json names",
            file=CONFIG,
            key=BACKEND_KEY,
            expected=f"{backend} ({_MARKS[backend]})",
            found=", ".join(f"{name} ({_MARKS[name]})" for name in sorted(present)),
        )
    # All backends are at the same version.
    version = config.get("sharded_backend_version", VERSION)
    if version != VERSION:
        yield BACKEND.finding(
            "the backend version is not supported",
            file=CONFIG,
            key="sharded_backend_version",
            expected=VERSION,
            found=_value_text(version),
            hint="use software that supports this version",
        )


def _is_megatron_core(subject: Subject) -> bool:
    """Return whether the directory is a checkpoint of Megatron-core."""
    from core.megatron.extras.sharded_objects import COMMON_OBJECT

    catalog = subject.salvaged.catalog
    has_object = catalog is not None and COMMON_OBJECT in catalog.objects
    return subject.format is not None and (subject.format.has_common_state or has_object)


CHECKS = (
    Check(check_arguments),
    Check(check_iteration),
    Check(check_agreement, formats=("megatron",)),
    Check(check_version),
    Check(check_random_states),
    Check(check_backend),
)
