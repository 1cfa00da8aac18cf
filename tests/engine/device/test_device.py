"""Which device a worker gets, and its errors as the project's."""

from __future__ import annotations

import pytest
import torch

from core.engine.device.device import CAST, Device, cast_work, device_errors, device_named, does
from core.errors import CapacityError, UsageError, WorkerError

CPU = Device("cpu")
NO_CUDA = not torch.cuda.is_available()


def test_cpu_is_the_path_without_a_device() -> None:
    assert device_named("cpu") is None
    assert not does(None, CAST)


@pytest.mark.parametrize("name", ["gpu", "", "cpu:0", "cuda:", "cuda:x", "auto:1"])
def test_an_unknown_device_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="is not one of cpu, cuda, auto"):
        device_named(name)


@pytest.mark.skipif(not NO_CUDA, reason="there is a GPU")
def test_without_a_gpu_cuda_is_a_usage_error_and_auto_the_cpu_path() -> None:
    with pytest.raises(
        UsageError, match="torch finds no CUDA device on this host.*--device cpu or auto"
    ):
        device_named("cuda")
    assert device_named("auto", 3) is None


def test_a_worker_has_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_named("cuda", 1) == Device("cuda:1")
    assert device_named("cuda:0", 1) == Device("cuda:0")
    assert device_named("auto", 1) == Device("cuda:1", is_auto=True)
    assert device_named("auto", 2) is None
    with pytest.raises(
        UsageError,
        match="worker 2 on this host needs GPU 2, but the host has only 2 GPUs.*nproc-per-node",
    ):
        device_named("cuda", 2)


def test_work_is_done_on_a_device_once_that_is_settled() -> None:
    work = cast_work("float32", "bfloat16")
    assert not does(CPU, work)
    assert does(Device("cpu", work=frozenset({work})), work)
    assert not does(Device("cpu", work=frozenset({work})), cast_work("float32", "float16"))


def test_a_full_device_is_a_capacity_error_and_any_other_failure_one_of_the_worker() -> None:
    cuda = Device("cuda:0")
    with (
        pytest.raises(CapacityError, match="cuda:0 is out of memory.*--device cpu"),
        device_errors(cuda),
    ):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with (
        pytest.raises(WorkerError, match="cuda:0 failed: CUDA error: an illegal"),
        device_errors(cuda),
    ):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
    with pytest.raises(RuntimeError, match="plain"), device_errors(CPU):
        raise RuntimeError("plain")
