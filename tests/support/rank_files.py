"""Megatron rank files through torch's own loader, with stand-ins for the classes that only Megatron
has.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

MODEL_FILE = "model_optim_rng.pt"


class _StandIn:
    """Any class of a framework that is not installed."""

    def __new__(cls, *args: object, **kwargs: object) -> _StandIn:
        return object.__new__(cls)

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron"):
            return type(name, (_StandIn,), {"__module__": module})
        return super().find_class(module, name)


PICKLE = SimpleNamespace(
    Unpickler=_Unpickler, load=pickle.load, loads=pickle.loads, __name__="stand_in_pickle"
)


def load_rank_file(path: Path) -> dict[str, Any]:
    """What ``torch.load`` makes of a rank file."""
    loaded = torch.load(path, weights_only=False, pickle_module=PICKLE)
    assert isinstance(loaded, dict)
    return loaded


def rank_dirs(root: Path) -> dict[str, Path]:
    """Rank directory name → path, of the newest iteration below a root."""
    number = (root / "latest_checkpointed_iteration.txt").read_text()
    paths = sorted((root / f"iter_{int(number):07d}").iterdir())
    assert paths, f"no ranks below {root}"
    return {path.name: path for path in paths}


def assert_same_bits(actual: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    """Equal dtype, shape and bytes."""
    assert actual.dtype == wanted.dtype, name
    assert actual.shape == wanted.shape, name
    assert torch.equal(
        actual.detach().contiguous().reshape(-1).view(torch.uint8),
        wanted.detach().contiguous().reshape(-1).view(torch.uint8),
    ), name


def assert_same_weights(found_root: Path, wanted_root: Path) -> None:
    """Every rank file holds the same model entries, in the same order, with the same bits."""
    our_dirs, wanted = rank_dirs(found_root), rank_dirs(wanted_root)
    assert list(our_dirs) == list(wanted)
    for name in wanted:
        ours, theirs = (
            load_rank_file(our_dirs[name] / MODEL_FILE),
            load_rank_file(wanted[name] / MODEL_FILE),
        )
        chunks = [key for key in theirs if key.startswith("model")]
        assert [key for key in ours if key.startswith("model")] == chunks
        for chunk in chunks:
            assert list(ours[chunk]) == list(theirs[chunk]), name
            for key, tensor in theirs[chunk].items():
                if isinstance(tensor, torch.Tensor):
                    assert_same_bits(ours[chunk][key], tensor, f"{name} {key}")
                else:
                    assert ours[chunk][key] == tensor
