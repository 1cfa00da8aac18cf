"""The files of a DeepSpeed checkpoint directory, identified by their names.

::

    mp_rank_00_model_states.pt                    ZeRO-0, 1, 2: one per model-parallel rank
    zero_pp_rank_R_mp_rank_00_model_states.pt     ZeRO-3: one per data-parallel rank R
    [bf16_|fp16_]zero_pp_rank_R_mp_rank_00_optim_states.pt
                                                  ZeRO-1, 2, 3: one per data-parallel rank R
    [layer_L_]expert_E_mp_rank_00_model_states.pt one per expert E of an MoE layer
    expp_rank_R_mp_rank_00_optim_states.pt        ZeRO-0 with experts: one per expert-parallel rank

``pp_rank`` is DeepSpeed's word for the data-parallel rank here. Versions before 0.3.8 omitted the
underscore before ``optim_states``.

Model-parallel ranks and the layers of a pipeline have files as well, see
``core.formats.deepspeed.model_parallel``.

Refused by name: AutoEP, states that were offloaded to NVMe, and a mixture of files with and without
``bf16_``, which comes from two runs.

Source: DeepSpeed 0.19.8 ``runtime/engine.py`` (``_get_ckpt_name``, ``_get_rank_zero_ckpt_name``,
``_get_expert_ckpt_name``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

MODEL = re.compile(r"mp_rank_(?P<mp_rank>\d{2,6})_model_states\.pt$")
ZERO_MODEL = re.compile(
    r"zero_pp_rank_(?P<rank>\d{1,7})_mp_rank_(?P<mp_rank>\d{2,6})_model_states\.pt$"
)
OPTIM = re.compile(
    r"(?P<prefix>(?:bf16_|fp16_)?zero_pp_rank_)(?P<rank>\d{1,7})"
    r"_mp_rank_(?P<mp_rank>\d{2,6})(?P<suffix>_?optim_states\.pt)$"
)
_EXPERT = re.compile(
    r"(?:layer_(?P<layer>\d{1,6})_)?expert_(?P<expert>\d{1,6})_mp_rank_(?P<mp_rank>\d{2,6})"
    r"_model_states\.pt$"
)
_EXPERT_OPTIM = re.compile(
    r"expp_rank_(?P<rank>\d{1,7})_mp_rank_(?P<mp_rank>\d{2,6})_optim_states\.pt$"
)
_LAYER = re.compile(r"layer_(?P<layer>\d{2,6})-(?:model_(?P<tp_rank>\d{2,6})-)?model_states\.pt$")
_OFFLOADED = "offloaded_tensors"
UNIVERSAL_HINT = (
    "convert the checkpoint with DeepSpeed's ds_to_universal.py, then use the universal "
    "checkpoint that the script writes"
)
"""The hint for what that tool converts and ckpt does not: AutoEP, values that are computed."""
SAVE_AGAIN = (
    "load the checkpoint with DeepSpeed in the topology that it was saved with, gather the "
    "weights, and save them with torch.save"
)
SAVE_AGAIN_HINT = (
    f"DeepSpeed's ds_to_universal.py cannot convert this checkpoint either; {SAVE_AGAIN}"
)
"""The hint for checkpoints without ZeRO's optimizer files or with states on NVMe.

Source: DeepSpeed 0.19.8 ``checkpoint/ds_to_universal.py``: ``main`` reads the stage from the
optimizer files and opens no ``offloaded_tensors``.
"""


@dataclass(frozen=True, slots=True)
class ZeroRankFiles:
    """The files of one checkpoint, by data-parallel rank.

    Args:
        model: the only model file of ZeRO-0, 1 and 2; None if there is none.
        zero_model: the model files of ZeRO-3; () if there are none.
        optim: the optimizer files; () if there are none.
        experts: the files of single experts; () if there are none.
        expert_optim: the optimizer files of ZeRO-0 by expert-parallel rank; () if there are none.
    """

    model: str | None
    zero_model: tuple[str, ...]
    optim: tuple[str, ...]
    experts: tuple[str, ...] = ()
    expert_optim: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All files."""
        model = () if self.model is None else (self.model,)
        return (*self.optim, *self.zero_model, *model, *self.experts, *self.expert_optim)


def is_rank_file(name: str) -> bool:
    """Return whether a name is that of one of DeepSpeed's rank files."""
    patterns = (MODEL, ZERO_MODEL, OPTIM, _EXPERT, _EXPERT_OPTIM, _LAYER)
    return any(pattern.match(name) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class ZeroFileName:
    """The parts of a rank file's name.

    Args:
        kind: ``model`` or ``optimizer``.
        rank: data-parallel rank; 0 for the model file of ZeRO-0, 1 and 2, which rank 0 writes.
        mp_rank: model-parallel rank.
    """

    kind: str
    rank: int
    mp_rank: int


def parse_zero_name(name: str) -> ZeroFileName | None:
    """Parse the name of a rank's file; None for other files."""
    for kind, pattern in (("optimizer", OPTIM), ("model", ZERO_MODEL), ("model", MODEL)):
        match = pattern.match(name)
        if match is not None:
            return ZeroFileName(kind, int(match.groupdict().get("rank", 0)), int(match["mp_rank"]))
    return None


def model_parallel_ranks(store: ReadStore, *, needs_optimizer: bool = True) -> Sequence[int]:
    """Return the numbers of the model-parallel ranks that have files.

    Args:
        needs_optimizer: the states of the optimizer are to be read, too.

    Raises:
        UnsupportedError: an offload is not supported.
        MissingShardError: a rank has no files.
    """
    if needs_optimizer and _OFFLOADED in store.folders():
        raise UnsupportedError(
            "optimizer states offloaded to NVMe are not supported",
            file=_OFFLOADED,
            hint=SAVE_AGAIN_HINT,
        )
    ranks = {rank for name in store.files() if (rank := _mp_rank(name)) is not None}
    for rank in range(max(ranks, default=0)):
        if rank not in ranks:
            raise missing_model_parallel_rank(rank)
    return sorted(ranks) or [0]


def missing_model_parallel_rank(rank: int) -> MissingShardError:
    """Return the error about a model-parallel rank that has no files."""
    return MissingShardError(
        f"the files of model-parallel rank {rank} are missing",
        file=f"mp_rank_{rank:02d}_model_states.pt",
        hint="copy the checkpoint again, with all its files; if the rank did not "
        "finish saving, use an older one",
    )


def _mp_rank(name: str) -> int | None:
    """Return the model-parallel rank of a file; None for other files."""
    for pattern in (MODEL, ZERO_MODEL, OPTIM, _EXPERT, _EXPERT_OPTIM):
        match = pattern.match(name)
        if match is not None:
            return int(match["mp_rank"])
    return None


def layer_files(store: ReadStore) -> dict[int, dict[int, str]]:
    """Return a pipeline's files of layers: number of the layer → tensor-parallel rank → name."""
    layers: dict[int, dict[int, str]] = {}
    for name in store.files():
        match = _LAYER.match(name)
        if match is not None:
            layers.setdefault(int(match["layer"]), {})[int(match["tp_rank"] or 0)] = name
    return layers


def list_rank_files(store: ReadStore, mp_rank: int = 0) -> ZeroRankFiles:
    """List the files of a model-parallel rank, and check that none of them is missing.

    Missing files of the highest ranks cannot be recognized by names.

    Raises:
        MissingShardError: a rank's file is missing, or there are only optimizer files.
        CorruptError: the directory contains files of two runs.
    """
    names = [name for name in store.files() if _mp_rank(name) == mp_rank]
    model = next(filter(MODEL.match, names), None)
    zero_models = {int(match["rank"]): name for name in names if (match := ZERO_MODEL.match(name))}
    # Prefix and suffix of optimizer files depend on the settings and the version of the run.
    optim: dict[int, str] = {}
    name_of_kind: dict[tuple[str, str], str] = {}
    for name in names:
        match = OPTIM.match(name)
        if match is not None:
            optim[int(match["rank"])] = name
            name_of_kind.setdefault((match["prefix"], match["suffix"]), name)
    if len(name_of_kind) > 1:
        first, second = list(name_of_kind.values())[:2]
        raise CorruptError(
            f"{first} and {second} come from two runs with different settings",
            file=store.label,
            hint="compare the files' modification times, and remove the older files",
        )
    experts = list_expert_files(names)
    expert_optim = {
        int(match["rank"]): name for name in names if (match := _EXPERT_OPTIM.match(name))
    }
    # Without model files, the flat groups cannot be divided into parameters.
    if (optim or experts or expert_optim) and model is None and not zero_models:
        raise MissingShardError(
            "*_model_states.pt, which names the parameters, is missing; there are only "
            "optimizer or expert files",
            file=store.label,
            hint="copy the checkpoint again, with all its files",
        )
    return ZeroRankFiles(
        model,
        _complete(zero_models),
        _complete(optim),
        experts,
        _complete(expert_optim),
    )


def list_expert_files(names: Iterable[str]) -> tuple[str, ...]:
    """Return the files of single experts among some names, by layer and number."""
    matches = [match for name in names if (match := _EXPERT.match(name))]
    matches.sort(key=lambda match: (int(match["layer"] or -1), int(match["expert"])))
    return tuple(match[0] for match in matches)


def _complete(by_rank: dict[int, str]) -> tuple[str, ...]:
    """Return the files in the order of their ranks, which must be 0, 1, 2 …

    Raises:
        MissingShardError: a rank's file is missing.
    """
    for rank in range(len(by_rank)):
        if rank not in by_rank:
            raise missing_rank(next(iter(by_rank.values())), rank)
    return tuple(by_rank[rank] for rank in range(len(by_rank)))


def name_of_rank(like: str, rank: int) -> str:
    """Return the name of a rank's file, given that of another rank."""
    return re.sub(r"(zero_pp|expp)_rank_\d+", rf"\g<1>_rank_{rank}", like)


def name_of_mp_rank(like: str, rank: int) -> str:
    """Return the name of a model-parallel rank's file, given that of another one."""
    return re.sub(r"mp_rank_\d+", f"mp_rank_{rank:02d}", like)


def missing_rank(like: str, rank: int) -> MissingShardError:
    """Return the error about the missing file of a rank.

    Args:
        like: name of another rank's file.
    """
    return MissingShardError(
        f"the file of {'expert' if like.startswith('expp') else 'data'}-parallel rank {rank} is "
        "missing",
        file=name_of_rank(like, rank),
        hint="copy the checkpoint again, with all its files; if the rank did not "
        "finish saving, use an older one",
    )
