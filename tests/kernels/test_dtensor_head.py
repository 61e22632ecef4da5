"""Heads whose weight is a DTensor. Run as a script this file is two ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from flowkernels import LossSpec, linear_logprobs, linear_policy_loss, logprobs, policy_loss
from kernel_truth import Batch
from ranks import fork, launch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.dist

NUM_TOKENS, DIM, VOCAB = 6, 4, 7
SPEC = LossSpec(dual_clip=3.0)


def tokens_of(seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, NUM_TOKENS, generator=rng)
    return {
        "hidden_TD": torch.randn(NUM_TOKENS, DIM, generator=rng),
        "target_ids_T": torch.randint(VOCAB, (NUM_TOKENS,), generator=rng),
        "advantage_T": noise[0],
        "weight_T": noise[1].abs(),
    }


def new_head() -> nn.Linear:
    head = nn.Linear(DIM, VOCAB)
    rng = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng))
    return head


def mean_gradients(seeds: tuple[int, int]) -> dict[str, Tensor]:
    """Those of a plain head, over the ranks."""
    head = new_head()
    for seed in seeds:
        loss = linear_policy_loss(
            **tokens_of(seed), weight_VD=head.weight, bias_V=head.bias, spec=SPEC
        ).loss
        (loss / len(seeds)).backward()
    return {name: x.grad for name, x in head.named_parameters() if x.grad is not None}


def check_gradients(head: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, parameter in head.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])


def take_loss(head: nn.Module, batch: Batch) -> None:
    linear_policy_loss(**batch, weight_VD=head.weight, bias_V=head.bias, spec=SPEC).loss.backward()


def check_placements(mesh: DeviceMesh, rank: int) -> None:
    """With tokens of its own on each rank, and with the same on both."""
    for placement in (Shard(0), Shard(1), Replicate()):
        for seeds in ((0, 1), (0, 0)):
            head = new_head()
            for name, parameter in [*head.named_parameters()]:
                on = Replicate() if name == "bias" and placement == Shard(1) else placement
                setattr(head, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [on])))
            take_loss(head, tokens_of(seeds[rank]))
            check_gradients(head, mean_gradients(seeds))
            batch = tokens_of(0)
            pair = batch["hidden_TD"], batch["target_ids_T"]
            plain = new_head()
            ours = linear_logprobs(pair[0], head.weight, pair[1], bias_V=head.bias)
            theirs = linear_logprobs(pair[0], plain.weight, pair[1], bias_V=plain.bias)
            assert torch.equal(ours.logprob_T, theirs.logprob_T)


def check_fsdp(mesh: DeviceMesh, rank: int) -> None:
    """FSDP2's own gradient, of log-probs in plain torch through the module, is the same."""
    ours, theirs = (fully_shard(new_head(), mesh=mesh) for _ in range(2))
    batch = tokens_of(rank)
    take_loss(ours, batch)
    logits = theirs(batch["hidden_TD"])
    policy_loss(
        logits, **{name: x for name, x in batch.items() if name != "hidden_TD"}, spec=SPEC
    ).loss.backward()
    expected = {
        name: x.grad.full_tensor()
        for name, x in theirs.named_parameters()
        if isinstance(x.grad, DTensor)
    }
    assert len(expected) == 2 and all(x.any() for x in expected.values())
    check_gradients(ours, expected)


def check_refusals(mesh: DeviceMesh) -> None:
    head, batch = new_head(), tokens_of(0)
    everywhere = {name: distribute_tensor(x, mesh, [Replicate()]) for name, x in batch.items()}
    plain = {**batch, "weight_VD": head.weight, "spec": SPEC}
    logits = distribute_tensor(torch.zeros(NUM_TOKENS, VOCAB), mesh, [Shard(1)])
    for name, value in everywhere.items():
        with pytest.raises(ValueError, match=f"{name} must be a plain tensor, got a DTensor"):
            linear_policy_loss(**{**plain, name: value})
    with pytest.raises(ValueError, match="logits_TV must be a plain tensor"):
        logprobs(logits, batch["target_ids_T"])
    with pytest.raises(ValueError, match="logits_TV must be a plain tensor"):
        rows = {name: x for name, x in batch.items() if name != "hidden_TD"}
        policy_loss(logits, **rows, spec=SPEC)


def run() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    check_placements(mesh, rank)
    check_fsdp(mesh, rank)
    check_refusals(mesh)
    dist.destroy_process_group()


def test_a_weight_that_is_a_dtensor_is_gathered_and_others_are_refused() -> None:
    launch(__file__, [(2, [])])


if __name__ == "__main__":
    fork(run)
