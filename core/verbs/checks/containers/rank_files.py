"""CK101, CK160, CK161: check that the files of all ranks exist, according to the recorded sizes.

Megatron: the training arguments in any rank file determine the rank directories of the run, even if
others are missing or damaged. DeepSpeed: the optimizer files record the number of ranks. A
universal checkpoint has one directory per parameter, each with its fp32 master weight. Torch files
of each rank with DTensors or ShardedTensors: the tensors record the ranks of the job.

Source: ``core.megatron.model.topology``, ``core.formats.deepspeed.files``,
``core.formats.deepspeed.universal.format``, ``core.formats.torch_sharded.format``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from core.engine.catalog.facets import TorchShardedFacts
from core.errors import CheckpointingException
from core.formats.megatron.format import (
    MODEL_FILE,
    NEMO_FILE,
    OPTIM_FILE,
    RANK_DIR,
    choose_model_file,
    is_optimizer_dir,
    possible_dirs,
)
from core.formats.torch.tree import parse
from core.megatron.model.args import topology_of
from core.megatron.model.topology import Topology
from core.pickle.inert import as_mapping
from core.verbs.checks.file_codes import MISSING, RANK_MISSING
from core.verbs.checks.finding import Finding, get_code
from core.verbs.checks.subject import Check, Subject

RANK_EXTRA = get_code("CK161")

_MOST_RANKS = 1 << 20


def check_megatron_ranks(subject: Subject) -> Iterator[Finding]:
    """Check the rank directories of a Megatron checkpoint and their files."""
    files_in: dict[str, set[str]] = {
        name: set() for name in subject.tree.folders if RANK_DIR.match(name)
    }
    for path in subject.files:
        folder, _, name = path.rpartition("/")
        if folder in files_in:
            files_in[folder].add(name)
    folders = [folder for folder, names in files_in.items() if not is_optimizer_dir(names)]
    # If the catalog could be read, every rank has its model file.
    if subject.catalog is None:
        for folder in folders:
            if choose_model_file(files_in[folder]) is None and NEMO_FILE not in files_in[folder]:
                yield MISSING.missing_file(
                    "the rank's model file is missing",
                    f"{folder}/{MODEL_FILE}",
                    rank=folder,
                    expected=MODEL_FILE,
                )
    # Compare the directories with those that the training arguments imply. With expert parallelism
    # there are several possible sets, depending on the version of Megatron.
    args = _read_args(subject, files_in) if folders else None
    if args is None:
        return
    try:
        topology = topology_of(args, file=MODEL_FILE)
        allowed = possible_dirs(args, topology)
    except CheckpointingException:
        return  # impossible sizes: reported by the checks of the layout
    if subject.catalog is None:
        yield from _check_rank_dirs(set(folders), [set(names) for names in allowed], topology)
    # Either all ranks or none have a file of the distributed optimizer. With expert parallelism,
    # some ranks rightly have none.
    if topology.ep != 1:
        return
    incomplete = [folder for folder in folders if f"{folder}/{OPTIM_FILE}" not in subject.files]
    for folder in incomplete if len(incomplete) < len(folders) else ():
        yield MISSING.missing_file(
            "this rank's distributed optimizer file is missing, but other ranks have one",
            f"{folder}/{OPTIM_FILE}",
            rank=folder,
            expected=OPTIM_FILE,
        )


def _read_args(subject: Subject, files_in: Mapping[str, Collection[str]]) -> object:
    """Read the training arguments of the first rank whose file is intact; None if no file is."""
    if subject.catalog is not None:
        return subject.catalog.args
    for folder, names in files_in.items():
        name = f"{folder}/{choose_model_file(names)}"
        if not subject.files.get(name):
            continue
        try:
            args = (as_mapping(parse(subject.store, name).value) or {}).get("args")
        except CheckpointingException:
            continue
        if args is not None:
            return args
    return None


def _check_rank_dirs(
    folders: set[str], allowed: list[set[str]], topology: Topology
) -> Iterator[Finding]:
    """Compare the rank directories with the most similar of the sets that the sizes allow."""
    expected = max(allowed, key=lambda names: (len(names & folders), -len(names)))
    for name in sorted(expected - folders):
        yield RANK_MISSING.finding(
            f"this rank's directory is missing; the training arguments specify {topology}",
            file=name,
            rank=name,
            expected=f"{len(expected)} rank directories",
            found=f"{len(expected & folders)} of them",
        )
    for name in sorted(folders - set().union(*allowed)):
        yield RANK_EXTRA.finding(
            f"the training arguments specify {topology}, which has no such rank",
            file=name,
            rank=name,
            expected=f"{len(expected)} rank directories",
            found=f"{len(folders)}",
        )


def check_deepspeed_ranks(subject: Subject) -> Iterator[Finding]:
    """Check that the files of all data-parallel ranks exist."""
    from core.formats.deepspeed.files import MODEL, OPTIM, ZERO_MODEL, parse_zero_name
    from core.formats.deepspeed.optim_states import recorded_ranks

    if subject.catalog is not None:
        return
    # Each model-parallel rank has files of its own.
    files_of: dict[int, list[str]] = {}
    for name in subject.files:
        parts = parse_zero_name(name)
        if parts is not None:
            files_of.setdefault(parts.mp_rank, []).append(name)
    for mp_rank, files in sorted(files_of.items()):
        optim = _files_by_rank(files, OPTIM)
        models = _files_by_rank(files, ZERO_MODEL)
        n_ranks = recorded_ranks(subject.store, optim.values())
        if optim:
            yield from _missing_ranks(optim, "optimizer", n_ranks=n_ranks)
        if models:
            n_models = None if n_ranks is None else len(optim)
            yield from _missing_ranks(models, "model", n_ranks=n_models)
        # Without ZeRO-3, a single model file names the parameters.
        if optim and not models and not any(map(MODEL.match, files)):
            name = f"mp_rank_{mp_rank:02d}_model_states.pt"
            yield MISSING.missing_file(
                "the model file, which names the parameters, is missing", name
            )


def _files_by_rank(files: Iterable[str], pattern: re.Pattern[str]) -> dict[int, str]:
    """Return data-parallel rank → name of its file, for the files that match."""
    return {int(match["rank"]): name for name in files if (match := pattern.match(name))}


def _missing_ranks(
    files: Mapping[int, str], kind: str, *, n_ranks: int | None
) -> Iterator[Finding]:
    """Report the ranks without a file of one kind.

    Args:
        files: data-parallel rank → name of its file; at least one.
        kind: kind of the files, for the message.
        n_ranks: recorded number of ranks; None if unknown.
    """
    from core.formats.deepspeed.files import name_of_rank

    total = min(max(n_ranks or 0, max(files) + 1), _MOST_RANKS)
    sibling = next(iter(files.values()))
    for rank in range(total):
        if rank not in files:
            yield RANK_MISSING.finding(
                f"the {kind} file of data-parallel rank {rank} is missing",
                file=name_of_rank(sibling, rank),
                rank=str(rank),
                expected=f"files of {total} ranks",
                found=f"files of {len(files)}",
            )


def check_universal_files(subject: Subject) -> Iterator[Finding]:
    """Check the files of a universal checkpoint, including those in the parameters' directories."""
    from core.formats.deepspeed.files import MODEL, ZERO_MODEL
    from core.formats.deepspeed.universal.parameter import lacking_files

    # The files of the model's state and of the optimizer's groups.
    models = _files_by_rank(subject.files, ZERO_MODEL)
    if models:
        yield from _missing_ranks(models, "model", n_ranks=None)
    elif not any(map(MODEL.match, subject.files)):
        yield _missing_file(
            "mp_rank_00_model_states.pt",
            "the file with the model's state is missing",
            found="no model file",
        )
    if "zero/optimizer_state.pt" not in subject.files:
        yield _missing_file(
            "zero/optimizer_state.pt",
            "the file with the optimizer's groups is missing",
            found="no such file",
        )
    # Compare the files in each parameter's directory with those that it should have.
    contents: dict[str, set[str]] = {
        name: set()
        for name in subject.tree.folders
        if name.startswith("zero/") and name.count("/") == 1
    }
    for path in subject.files:
        folder, _, name = path.rpartition("/")
        if folder in contents and name.endswith(".pt"):
            contents[folder].add(name)
    for folder, name in lacking_files(contents):
        key = folder.removeprefix("zero/")
        present = ", ".join(sorted(contents[folder])) or "nothing"
        yield _missing_file(
            f"{folder}/{name}",
            "a file is missing from the parameter's directory",
            found=present,
            key=key,
        )


def _missing_file(file: str, message: str, *, found: str, key: str | None = None) -> Finding:
    """Build the finding for a missing file of a universal checkpoint."""
    return MISSING.finding(
        message, file=file, key=key, expected=file.rpartition("/")[2], found=found
    )


def check_torch_ranks(subject: Subject) -> Iterator[Finding]:
    """Check that every rank which the distributed tensors name has its files."""
    facts = subject.catalog and subject.catalog.facet(TorchShardedFacts)
    if not facts:
        return
    for file, rank in facts.missing.items():
        yield RANK_MISSING.missing_file(
            f"the file of rank {rank} is missing",
            file,
            rank=str(rank),
            expected=f"files of {len(facts.ranks)} ranks",
        )


CHECKS = (
    Check(check_megatron_ranks, formats=("megatron",)),
    Check(check_deepspeed_ranks, formats=("deepspeed",)),
    Check(check_universal_files, formats=("deepspeed_universal",)),
    Check(check_torch_ranks, formats=("torch_sharded",)),
)
