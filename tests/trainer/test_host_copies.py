"""What threads write while training goes on is no longer what is trained."""

from __future__ import annotations

import pytest
import torch

from flowtrain.trainer.host_copies import HostCopies

DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


def tensors_of(device: str) -> dict[str, torch.Tensor]:
    tensors = {str(dtype): torch.arange(7, device=device).to(dtype) for dtype in DTYPES}
    return tensors | {"none": torch.empty(0, device=device), "step": torch.ones((), device=device)}


def test_copies_stay_as_they_were() -> None:
    tensors, copies = tensors_of("cpu"), HostCopies()
    taken = copies.take(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    for name, tensor in tensors_of("cpu").items():
        assert taken[name].dtype == tensor.dtype and torch.equal(taken[name], tensor)
    copies.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_copies_to_pinned_memory_which_is_kept() -> None:
    tensors, copies = tensors_of("cuda"), HostCopies()
    places = {name: copy.data_ptr() for name, copy in copies.take(tensors).items()}
    for tensor in tensors.values():
        tensor += 1
    taken = copies.take(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(taken[name], tensor.cpu()) and taken[name].data_ptr() == places[name]
        assert taken[name].is_pinned() or not tensor.numel()
    copies.close()
    assert not any(copy.is_pinned() for copy in taken.values())
