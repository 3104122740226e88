"""Streams where there is no other device, and memory that is pinned for one: its life, with CUDA's calls noted."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace

import pytest
import torch

from blend.recompute import streams
from blend.store.host import HostTier


class Pinning:
    """What CUDA has pinned, by address; ``answer`` is its error, 0 if there is none, ``pending`` one that it keeps."""

    def __init__(self) -> None:
        self.answer = self.pending = 0
        self.pinned: dict[int, int] = {}

    def register(self, address: int, nbytes: int, flags: int) -> int:
        if not self.answer:
            self.pinned[address] = nbytes
        self.pending = self.answer
        return self.answer

    def kernel(self, *arguments: object, **options: object) -> None:
        """A kernel after which the pending error is asked for, as torch does."""
        pending, self.pending = self.pending, 0
        if pending:
            raise RuntimeError(f"CUDA error {pending}")

    def unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Pinning:
    pinning = Pinning()
    runtime = SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=lambda error: f"error {error}",
        cudaHostRegister=pinning.register,
        cudaHostUnregister=pinning.unregister,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return pinning


def test_without_another_device_everything_is_done_at_once() -> None:
    made = streams.streams_for(torch.device("cpu"))
    target, source = torch.zeros(3), torch.ones(3)
    event = made.record()
    with made.copying():
        made.wait(event)
        made.copy(target, source)
    event.synchronize()
    assert torch.equal(target, source)
    assert event.query()
    assert made.reads(source)
    assert made.staging(5).nbytes == 5
    assert streams.pinned_for(torch.device("cpu")) is None


def test_a_tier_s_memory_is_pinned_as_a_whole_until_its_last_view_is_gone(cuda: Pinning) -> None:
    tier = HostTier(1 << 20, allocate=streams.pinned_for(torch.device("cuda")))
    ((address, nbytes),) = cuda.pinned.items()
    view = tier.memory[1000:2000]
    assert address <= torch.frombuffer(view, dtype=torch.uint8).data_ptr() < address + nbytes
    assert nbytes >= 1 << 20
    tier.close()
    del tier
    gc.collect()
    assert cuda.pinned, "something may still be copied from it"
    del view
    gc.collect()
    assert not cuda.pinned


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    cuda: Pinning, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.answer = 2
    monkeypatch.setattr(torch, "ones", cuda.kernel)
    with caplog.at_level(logging.WARNING):
        tier = HostTier(1 << 20, allocate=streams.pinned_for(torch.device("cuda", 0)))
    assert "could not be pinned (error 2)" in caplog.text
    cuda.kernel()  # no other one is blamed for it
    assert len(tier.memory) >= 1 << 20
    tier.close()
