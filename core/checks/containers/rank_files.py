"""CK101, CK160, CK161: every rank's files are there, for the parallel sizes that the files themselves state.

Megatron: the training arguments of any rank file tell the rank directories of the run, also where others are missing or
damaged. DeepSpeed: the optimizer's files state how many ranks there are. A universal checkpoint has one directory a
parameter, each with its fp32 master.

Source: ``core.megatron.model.topology``, ``core.formats.deepspeed.files``, ``core.formats.deepspeed.universal.format``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from core.checks.check import Check
from core.checks.file_codes import MISSING, RANK_EXTRA, RANK_MISSING
from core.checks.finding import Finding
from core.checks.subject import Subject
from core.errors import CheckpointingException
from core.formats.deepspeed.optim_states import parse_optim_states
from core.formats.deepspeed.state_file import read_state_file
from core.formats.deepspeed.universal.parameter import lacking_files
from core.formats.megatron.format import MODEL_FILE, OPTIM_FILE
from core.formats.torch.tree import parse
from core.megatron.model.args import fields_of, topology_of
from core.megatron.model.topology import Topology, rank_dirs
from core.pickle.inert import as_mapping

CODES = ()

_RANK_DIR = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}$")
_OLD_FILES = ("model_rng.pt", "optim.pt", "model_weights.ckpt")
_OPTIM = re.compile(r"(.*zero_pp_rank_)(\d{1,7})(_mp_rank_\d{2,6}_?optim_states\.pt)$")
_ZERO_MODEL = re.compile(r"(zero_pp_rank_)(\d{1,7})(_mp_rank_\d{2,6}_model_states\.pt)$")
_MODEL = re.compile(r"mp_rank_\d{2,6}_model_states\.pt$")
_MOST_RANKS = 1 << 20


def megatron(subject: Subject) -> Iterator[Finding]:
    """Rank directories and their files."""
    folders = [name for name in subject.tree.folders if _RANK_DIR.match(name)]
    for folder in folders if subject.catalog is None else ():
        if f"{folder}/{MODEL_FILE}" not in subject.files and not any(
            f"{folder}/{n}" in subject.files for n in _OLD_FILES
        ):
            yield MISSING.finding(
                "the rank's file is not there",
                file=f"{folder}/{MODEL_FILE}",
                rank=folder,
                expected=MODEL_FILE,
                found="no such file",
            )
    if not folders:
        return
    args = _args(subject, folders)
    if args is None:
        return
    try:
        topology = topology_of(args, file=MODEL_FILE)
        allowed = rank_dirs(
            topology, world_size=_number(args, "world_size"), cp=_number(args, "context_parallel_size") or 1
        )
    except CheckpointingException:
        return  # sizes that no checkpoint can have: the layout's checks say so
    if subject.catalog is None:
        yield from _directories(set(folders), [set(names) for names in allowed], topology)
    if topology.ep == 1:
        yield from _optimizers(subject, folders)


def _number(args: object, name: str) -> int | None:
    value = fields_of(args).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _args(subject: Subject, folders: list[str]) -> object:
    """The training arguments of the first rank whose file can be read."""
    if subject.catalog is not None:
        return subject.catalog.args
    for folder in folders:
        name = f"{folder}/{MODEL_FILE}"
        if not subject.files.get(name):
            continue
        try:
            args = (as_mapping(parse(subject.store, name).value) or {}).get("args")
        except CheckpointingException:
            continue
        if args is not None:
            return args
    return None


def _directories(found: set[str], allowed: list[set[str]], topology: Topology) -> Iterator[Finding]:
    """CK160, CK161, against the set of directories that is nearest."""
    expected = max(allowed, key=lambda names: (len(names & found), -len(names)))
    for name in sorted(expected - found):
        yield RANK_MISSING.finding(
            f"the training arguments say {topology}, but the directory of this rank is not there",
            file=name,
            rank=name,
            expected=f"{len(expected)} rank directories",
            found=f"{len(expected & found)} of them",
        )
    for name in sorted(found - set().union(*allowed)):
        yield RANK_EXTRA.finding(
            f"the training arguments say {topology}, in which there is no such rank",
            file=name,
            rank=name,
            expected=f"{len(expected)} rank directories",
            found=f"{len(found)}",
        )


def _optimizers(subject: Subject, folders: list[str]) -> Iterator[Finding]:
    """All ranks have a distributed optimizer's file, or none."""
    lacking = [folder for folder in folders if f"{folder}/{OPTIM_FILE}" not in subject.files]
    if len(lacking) == len(folders):
        return
    for folder in lacking:
        yield MISSING.finding(
            "other ranks have a file of the distributed optimizer, this one has none",
            file=f"{folder}/{OPTIM_FILE}",
            rank=folder,
            expected=OPTIM_FILE,
            found="no such file",
        )


def deepspeed(subject: Subject) -> Iterator[Finding]:
    """Files of data-parallel ranks."""
    if subject.catalog is not None:
        return
    optim = _series(subject, _OPTIM)
    models = _series(subject, _ZERO_MODEL)
    n_ranks = _stated_ranks(subject, list(optim.values()))
    for files, what in ((optim, "optimizer"), (models, "model")):
        if files:
            yield from _gaps(files, what, n_ranks=n_ranks if what == "optimizer" or n_ranks is None else len(optim))
    if optim and not models and not any(map(_MODEL.match, subject.files)):
        name = "mp_rank_00_model_states.pt"
        yield MISSING.finding(
            "the model file is not there, which names the parameters", file=name, expected=name, found="no such file"
        )


def _series(subject: Subject, pattern: re.Pattern[str]) -> dict[int, str]:
    return {int(found[2]): name for name in subject.files if (found := pattern.match(name))}


def _stated_ranks(subject: Subject, files: list[str]) -> int | None:
    """How many data-parallel ranks there are by most of the optimizer's files."""
    votes: Counter[int] = Counter()
    for name in files[:3]:
        try:
            votes[parse_optim_states(read_state_file(subject.store, name)).n_ranks] += 1
        except CheckpointingException:
            continue
    return votes.most_common(1)[0][0] if votes else None


def _gaps(files: Mapping[int, str], what: str, *, n_ranks: int | None) -> Iterator[Finding]:
    total = min(max(n_ranks or 0, max(files) + 1), _MOST_RANKS)
    like = next(iter(files.values()))
    for rank in range(total):
        if rank not in files:
            yield RANK_MISSING.finding(
                f"the {what} file of data-parallel rank {rank} is not there",
                file=re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", like),
                rank=str(rank),
                expected=f"files of {total} ranks",
                found=f"files of {len(files)}",
            )


def universal(subject: Subject) -> Iterator[Finding]:
    """A universal checkpoint: its model and optimizer files, and what every parameter's directory has."""
    models = _series(subject, _ZERO_MODEL)
    if models:
        yield from _gaps(models, "model", n_ranks=None)
    elif not any(map(_MODEL.match, subject.files)):
        yield _lacks("mp_rank_00_model_states.pt", "no file says what the model's state is", found="no model file")
    if "zero/optimizer_state.pt" not in subject.files:
        yield _lacks("zero/optimizer_state.pt", "the optimizer's groups are not there", found="no such file")
    held: dict[str, set[str]] = {
        name: set() for name in subject.tree.folders if name.startswith("zero/") and name.count("/") == 1
    }
    for path in subject.files:
        folder, _, name = path.rpartition("/")
        if folder in held and name.endswith(".pt"):
            held[folder].add(name)
    for folder, name in lacking_files(held):
        key = folder.removeprefix("zero/")
        found = ", ".join(sorted(held[folder])) or "nothing"
        yield _lacks(f"{folder}/{name}", "the parameter's directory lacks the file", found=found, key=key)


def _lacks(file: str, message: str, *, found: str, key: str | None = None) -> Finding:
    return MISSING.finding(message, file=file, key=key, expected=file.rpartition("/")[2], found=found)


CHECKS = (
    Check(megatron, formats=("megatron",)),
    Check(deepspeed, formats=("deepspeed",)),
    Check(universal, formats=("deepspeed_universal",)),
)
