"""Copies from page-locked RAM to a CUDA device, on a stream of their own while the model computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.offload.disk.buffers import MIN_MAPPED_BYTES, host_buffer


@dataclass(frozen=True, slots=True)
class CudaCopy:
    """One copy to a device that has been started."""

    event: torch.cuda.Event
    """Recorded behind it."""
    device: torch.device

    def before_use(self) -> bool:
        """Makes the stream that computes wait for the copy; returns whether the copy has ended."""
        if self.event.query():
            return True
        torch.cuda.current_stream(self.device).wait_event(self.event)
        return False

    def wait(self) -> None:
        """Waits until the source may be overwritten."""
        self.event.synchronize()


class CudaCopies:
    """Starts copies to a device on one stream, in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._staging: Tensor | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        """Returns ``[num_bytes]`` of uint8 in page-locked RAM.

        Raises:
            RuntimeError: If the driver refuses.
        """
        # torch's own pinned memory comes in powers of two, up to twice what the budget says.
        # A page can be locked once: no two buffers may share one.
        buffer = host_buffer(max(num_bytes, MIN_MAPPED_BYTES))[:num_bytes]
        # Including the room behind it, into which a read may reach.
        memory = buffer.untyped_storage()
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes(), 0))
        if code:
            raise RuntimeError(f"{num_bytes} bytes cannot be page-locked (CUDA error {code}); lower ram_bytes")
        weakref.finalize(buffer, _unlock, self._own_stream(), memory.data_ptr()).atexit = False
        return buffer

    def follow(self) -> None:
        """Keeps later copies from overwriting tensors that the current stream still reads."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._own_stream().wait_event(event)

    def start(self, source: Tensor, into: Tensor, convert: Callable[[Tensor, Tensor], None] | None) -> CudaCopy:
        """Starts a copy from page-locked RAM into a buffer on the device, and a conversion there if one is given."""
        stream = self._own_stream()
        # Allocates outside inference mode: later calls outside of it reuse the staging buffer.
        with torch.cuda.stream(stream), torch.inference_mode(False), torch.no_grad():
            into.record_stream(stream)
            if convert is None:
                into.copy_(source, non_blocking=True)
            else:
                # One buffer is enough: a stream runs in order.
                staging = self._staging_of(source.numel())
                staging.copy_(source, non_blocking=True)
                convert(staging, into)
            event = torch.cuda.Event()
            event.record(stream)
        return CudaCopy(event, self._device)

    def _own_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream

    def _staging_of(self, num_bytes: int) -> Tensor:
        if self._staging is None or self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._staging[:num_bytes]


def _unlock(stream: torch.cuda.Stream, address: int) -> None:
    # A copy out of it may still be under way.
    stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
