"""megatron-core on a machine without a GPU, with gloo between its processes.

``install`` answers the calls that take a GPU for granted; nothing of what is computed, saved or
loaded changes. Written for megatron-core 0.12.1 and 0.16.1 with torch 2.13.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo.config
from torch.overrides import TorchFunctionMode

from tests.real_megatron.ours import is_in_place

_CUDA_TYPES = {
    name: name.replace("torch.", "torch.cuda.")
    for name in ("torch.FloatTensor", "torch.BFloat16Tensor")
}


class _CudaIsCpu(TorchFunctionMode):
    """Tensors asked for on a GPU are made on the CPU, and say that their type is a GPU's:
    optimizers check that.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            result = func(*args)
            return _CUDA_TYPES.get(result, result)
        return func(*args, **kwargs)


class _Stream:
    """A stream, or an event, on which nothing is ever left to do."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.args = args

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *args, **kwargs: self


def install() -> None:
    """Replaces the calls of ``torch.cuda`` that megatron-core makes, for the rest of the
    process.
    """
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.current_stream = lambda *args, **kwargs: _Stream()
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    # A first compilation takes a minute of processor time, each later one seconds of every rank.
    torch._dynamo.config.disable = True
    _CudaIsCpu().__enter__()
    _patch_megatron()


class _GroupedGemm:
    """The only function of the package grouped_gemm that megatron-core calls, with torch."""

    @staticmethod
    def gmm(
        tokens: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, *, trans_b: bool
    ) -> torch.Tensor:
        """Multiply the tokens of each expert, which follow each other, with its weight."""
        assert not trans_b
        parts = zip(tokens.split(counts.tolist()), weights, strict=True)
        return torch.cat([part @ weight for part, weight in parts])


def _patch_megatron() -> None:
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils, token_dispatcher

    # GroupedMLP needs the package grouped_gemm, whose kernels run on a GPU only.
    grouped_gemm_util.grouped_gemm = grouped_gemm_util.ops = _GroupedGemm
    token_dispatcher.maybe_move_tensor_to_cpu = (
        _counts  # otherwise what is on the CPU already stays a tensor
    )
    CudaRNGStatesTracker.fork = lambda self, *args: (
        contextlib.nullcontext()
    )  # no dropout: no random states are needed
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = (
            None  # 0.16.1 looks at it without Transformer Engine, and does not define it then
        )
    if hasattr(distrib_optimizer, "quantize_param_shard"):
        distrib_optimizer.quantize_param_shard = lambda *args, **kwargs: (
            None
        )  # 0.12.1 wants Transformer Engine for none
    _patch_writer()


def start_results() -> None:
    """megatron-core's own process for the results of a save by other processes, if megatron-core
    writes itself.
    """
    if not is_in_place():
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        filesystem_async._results_queue = None


def _counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _patch_writer() -> None:
    """Starts no process for the results; 0.12.1 calls ``_write_item`` without the last argument,
    new in torch 2.8.
    """
    if is_in_place():
        return
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from torch.distributed.checkpoint import filesystem

    if "serialization_format" in inspect.getsource(filesystem_async):
        filesystem_async._results_queue = (
            queue.Queue()
        )  # its own comes from a process that takes seconds to start
    else:
        default = filesystem.SerializationFormat.TORCH_SAVE
        filesystem_async._write_item = partial(filesystem._write_item, serialization_format=default)


def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls ``function`` with those of the keyword arguments that this version of it has."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(*args, **kwargs)
    return function(*args, **{name: value for name, value in kwargs.items() if name in parameters})


def sharded_state(model: Any, **metadata: Any) -> dict[str, Any]:
    """A model chunk's sharded state dict; ``metadata`` says how, where this megatron-core knows of
    it.
    """
    from megatron.core import parallel_state

    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return called(model.sharded_state_dict, metadata=metadata)
