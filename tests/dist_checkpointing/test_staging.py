"""Host memory that is kept between saves."""

from __future__ import annotations

import os

import pytest
import torch

from core.dist_checkpointing._background.staging import ALIGNMENT, StagingPool
from tests.support.staging import free_bytes

MIB = 1 << 20


def _like(n_mib: int, n: int = 1) -> list[torch.Tensor]:
    return [torch.full((n_mib * MIB // n,), value, dtype=torch.uint8) for value in range(n)]


def test_copies_are_dense_and_equal_whatever_the_tensors_look_like():
    base = torch.arange(24, dtype=torch.float32)
    tensors = [
        base,
        base.view(4, 6).t(),
        base[::2],
        base[3:4].to(torch.bfloat16),
        torch.tensor(True),
        torch.empty(3, 0, 2, dtype=torch.int16),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j]).conj().imag,
        torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.nn.Parameter(torch.ones(2)),
        base.expand(2, 24),
    ]
    pool = StagingPool()
    copies = pool.copy_tensors(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert (
            copy.is_contiguous()
            and not copy.is_conj()
            and not copy.is_neg()
            and not copy.requires_grad
        )
        assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        assert torch.equal(copy.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8))
        assert copy.numel() == 0 or copy.data_ptr() % ALIGNMENT == 0
    base.zero_()
    assert copies[0][5] == 5
    assert pool.copy_tensors([]) == []


def test_memory_serves_the_next_save_as_soon_as_no_copy_is_left():
    pool = StagingPool()
    copies = pool.copy_tensors(_like(4, 2))
    address = copies[0].data_ptr()
    part = copies[1][5:]
    del copies
    assert free_bytes(pool) == 0, "a view of a copy is still there"
    del part
    assert free_bytes(pool) == 4 * MIB
    again = pool.copy_tensors(_like(4))
    assert again[0].data_ptr() == address and free_bytes(pool) == 0


def test_saves_in_flight_have_memory_of_their_own():
    pool = StagingPool(n_kept=2)
    in_flight = [pool.copy_tensors(_like(size)) for size in (1, 2, 3)]
    assert len({copies[0].data_ptr() for copies in in_flight}) == 3
    assert [int(copies[0][0]) for copies in in_flight] == [0, 0, 0]
    del in_flight[0], in_flight[0], in_flight[0]
    assert free_bytes(pool) == 5 * MIB, "of three free blocks, the two used last are kept"
    small = pool.copy_tensors(_like(1))
    assert free_bytes(pool) == 3 * MIB, "the smallest that is large enough"
    pool.clear()
    assert free_bytes(pool) == 0 and int(small[0][0]) == 0


def test_a_copy_is_found_in_its_block_and_nothing_else_is():
    pool = StagingPool()
    first, second = pool.copy_tensors(_like(2, 2))
    block, offset = pool.locate(second) or (None, 0)
    assert block is not None and offset == MIB and pool.locate(first) == (block, 0)
    assert pool.locate(second[10:]) == (block, MIB + 10)
    assert pool.locate(second[::2]) is None and pool.locate(torch.ones(1)) is None


def test_a_fork_sees_the_copies_without_copying_them_again():
    pool = StagingPool()
    (copy,) = pool.copy_tensors(_like(1))
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(
            1
        )  # as a writer does: more would wait for threads that were not forked
        copy.fill_(7)
        os._exit(0)
    os.waitpid(pid, 0)
    assert bool((copy == 7).all())


def test_descriptors_are_given_back():
    before = len(os.listdir("/proc/self/fd"))
    pool = StagingPool(n_kept=0)
    for _ in range(3):
        pool.copy_tensors(_like(1))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_tensors_of_an_accelerator_come_through_pinned_memory():
    pool = StagingPool()
    tensors = [torch.arange(1000, device="cuda"), torch.arange(12.0, device="cuda").view(3, 4).t()]
    for _ in range(2):
        copies = pool.copy_tensors(tensors)
        assert copies[0].is_pinned()
        assert all(
            torch.equal(copy, tensor.cpu()) for copy, tensor in zip(copies, tensors, strict=True)
        )
        del copies
