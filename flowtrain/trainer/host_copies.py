"""Copies between the host and its GPU, through pinned memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device. A copy to a GPU waits behind the GPU's earlier work; from
    pinned memory the host does not wait with it.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopies:
    """Copies the same named tensors repeatedly, for threads that write beside training.

    A GPU copies to pinned memory, all tensors side by side and several times as fast. The pinned
    memory is reused, because pinning takes longer than copying. Its size is exact, while torch
    rounds pinned memory up to powers of two.
    """

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies. The next call overwrites copies from a GPU."""
        copies = {name: self._copied(name, x.detach()) for name, x in tensors.items()}
        if self._pinned:
            torch.cuda.synchronize()
        return copies

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.clone()
        if name not in self._pinned:
            host = self._pinned[name] = torch.empty_like(tensor, device="cpu")
            # What the system does not let it pin is copied all the same, only later.
            torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
        return self._pinned[name].copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """Free the memory."""
        for host in self._pinned.values():
            torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
        self._pinned.clear()
