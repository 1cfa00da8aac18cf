"""The files of training state next to the weights, by their names.

::

    transformers' Trainer        accelerate's save_state       entry of the catalog
    optimizer.pt                 optimizer.bin                 optimizer
                                 optimizer_1.bin …             optimizer_1 …
    scheduler.pt                 scheduler.bin                 scheduler
                                 scheduler_1.bin …             scheduler_1 …
    scaler.pt                    scaler.pt                     scaler
    rng_state.pth, rng_state_0.pth …                           rng_state, rng_state_0 …
                                 random_states_0.pkl …         random_states_0 …
                                 sampler.bin  sampler_1.bin …  sampler …
                                 dl_state_dict.bin …           dl_state_dict …
                                 custom_checkpoint_0.pkl …     custom_checkpoint_0 …
    training_args.bin                                          training_args

Each is written by ``torch.save``. ``trainer_state.json`` is one of the small files that are carried
next to the weights (``core.formats.huggingface.files``).

Not supported, left alone: files of one rank of model parallelism on SageMaker
(``rank0-of-8-optimizer.pt``) and of FSDP without DCP (``optimizer_0_rank0.bin``).

Source: transformers 5.23 ``trainer.py``; accelerate 1.15.0 ``checkpointing.py``, ``utils/
constants.py``, ``utils/fsdp_utils.py``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from core.formats.torch.stream import stream_kind
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

_NUMBER = r"(_\d{1,6})?"
_FILES = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?P<entry>optimizer{_NUMBER})\.(pt|bin)",
        rf"(?P<entry>scheduler{_NUMBER})\.(pt|bin)",
        r"(?P<entry>scaler)\.pt",
        rf"(?P<entry>rng_state{_NUMBER})\.pth",
        r"(?P<entry>random_states_\d{1,6})\.pkl",
        rf"(?P<entry>(sampler|dl_state_dict){_NUMBER})\.bin",
        r"(?P<entry>custom_checkpoint_\d{1,6})\.pkl",
        r"(?P<entry>training_args)\.bin",
    )
)
"""Names of the files, in the order in which their entries are listed."""
_OPTIMIZER = re.compile(rf"optimizer{_NUMBER}")


def is_optimizer(entry: str) -> bool:
    """Return whether an entry is an optimizer's state dict."""
    return _OPTIMIZER.fullmatch(entry) is not None


@dataclass(frozen=True, slots=True)
class StateFiles:
    """The files of training state in a directory.

    Args:
        files: entry → file.
        others: files with such names that ``torch.save`` did not write, or of an entry that another
            file has.
    """

    files: dict[str, str]
    others: tuple[str, ...]


def state_files(store: ReadStore) -> StateFiles:
    """Find the files of training state in a directory.

    Raises:
        StorageError: the directory or a file cannot be read.
    """
    names = store.files()
    matches = [
        (match["entry"], name)
        for pattern in _FILES
        for name in sorted(names, key=_by_number)
        if (match := pattern.fullmatch(name)) is not None
    ]
    files: dict[str, str] = {}
    for entry, name in matches:
        if stream_kind(store, name, 0, store.size(name)) in ("zip", "legacy"):
            files.setdefault(entry, name)
    read = set(files.values())
    return StateFiles(files, tuple(name for _, name in matches if name not in read))


def _by_number(name: str) -> tuple[int, str]:
    """Sort ``rng_state_10.pth`` after ``rng_state_9.pth``."""
    return len(name), name
