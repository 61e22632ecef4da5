"""A layer of experts, forward and backward, by our way and those of transformers, beside its bare
products:  python -m bench.experts [--tokens N] [--json F]

`products`: the six grouped products of the layer on tokens that are sorted already, which is the
least that any way must do; `permutation`: sorting the tokens, gathering them and adding them up
again. `of products`: the time of the products over a way's. `saved`: bytes per token that the
forward pass keeps beyond the weights. Routes are random and even. bf16 on a GPU, fp32 on a CPU.
`batched_mm` copies a weight per token and expert: it is left out. One that does not run is left out
with its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from bench.layers import saved_bytes
from bench.measure import median_ratio, new_parser, report, runs_here, seconds_in_turn
from flowtrain.trainer.model import grouped_experts

WAYS = (grouped_experts.NAME, "grouped_mm", "eager", "sonicmoe", "deepgemm")


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of experts."""

    hidden: int
    mlp: int
    num_experts: int
    num_chosen: int


SHAPES = {"30b-a3b": Shape(2048, 768, 128, 8), "gpt-oss-20b": Shape(2880, 2880, 32, 4)}
SMALL = {"small": Shape(256, 128, 32, 4)}


class Layer:
    """Experts with random weights and random routes of T tokens; S = T * chosen."""

    def __init__(self, shape: Shape, num_tokens: int, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.mlp,
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.num_chosen,
        )
        self.config, self.shape = config, shape
        with torch.device(device):
            self.experts: Any = Qwen3MoeExperts(config).to(dtype)
            for weight in self.experts.parameters():
                nn.init.normal_(weight, std=0.02)
            score_TE = torch.rand(num_tokens, shape.num_experts)
            self.chosen_TK = score_TE.topk(shape.num_chosen).indices
            self.weight_TK = torch.rand(num_tokens, shape.num_chosen).to(dtype).requires_grad_()
            self.hidden_TD = torch.randn(num_tokens, shape.hidden, dtype=dtype).requires_grad_()
        self.chosen_S, self.order_S = self.chosen_TK.flatten().sort(stable=True)
        counts_E = torch.bincount(self.chosen_S, minlength=shape.num_experts)
        self.ends_E = counts_E.cumsum(0).int()
        self.sorted_SD = self.hidden_TD.detach()[self.order_S // shape.num_chosen].requires_grad_()
        mlp = (len(self.order_S), shape.mlp)
        self.gated_SF = torch.randn(mlp, dtype=dtype, device=device).requires_grad_()

    def whole(self, way: str) -> Tensor:
        self.config._experts_implementation = way
        out: Tensor = self.experts(self.hidden_TD, self.chosen_TK, self.weight_TK)
        return out

    def products(self) -> tuple[Tensor, Tensor]:
        up, down = self.experts.gate_up_proj, self.experts.down_proj
        return (
            F.grouped_mm(self.sorted_SD, up.transpose(1, 2), offs=self.ends_E),
            F.grouped_mm(self.gated_SF, down.transpose(1, 2), offs=self.ends_E),
        )

    def permutation(self) -> Tensor:
        """To the experts and back, with nothing in between."""
        num = self.shape.num_chosen
        order_S = self.chosen_TK.flatten().sort()[1]
        sorted_SD = self.hidden_TD[order_S // num] * self.weight_TK.flatten()[order_S, None]
        back_S = torch.empty_like(order_S)
        back_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        return sorted_SD[back_S].view(-1, num, self.shape.hidden).sum(1)


def measure(
    shape: Shape, num_tokens: int, dtype: torch.dtype, device: str, repeats: int = 9
) -> list[dict[str, Any]]:
    """A row for each way that runs here, all timed in turn."""
    layer = Layer(shape, num_tokens, dtype, device)
    runs: dict[str, Callable[[], Any]] = {way: partial(layer.whole, way) for way in WAYS}
    runs |= {"permutation": layer.permutation, "products": layer.products}
    runs = {name: run for name, run in runs.items() if runs_here(name, partial(_both, run))}
    steps = {name: partial(_both, run) for name, run in runs.items()}
    seconds = seconds_in_turn(steps, repeats, warmup=0)
    flops = 3 * 2 * 3 * num_tokens * shape.num_chosen * shape.hidden * shape.mlp
    weights = tuple(layer.experts.parameters())
    return [
        {
            "way": name,
            "T": num_tokens,
            "D": shape.hidden,
            "experts": f"{shape.num_chosen} of {shape.num_experts}",
            "ms": 1e3 * statistics.median(seconds[name]),
            "tflops": flops / statistics.median(seconds[name]) / 1e12,
            "of products": median_ratio(seconds["products"], seconds[name]),
            "saved": saved_bytes(run, weights) / num_tokens,
        }
        for name, run in runs.items()
    ]


def _both(run: Callable[[], Any]) -> None:
    out = run()
    outs = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=16384 if on_gpu else 512, help="of a batch")
    args = parser.parse_args()
    shapes, how = (SHAPES, (torch.bfloat16, "cuda")) if on_gpu else (SMALL, (torch.float32, "cpu"))
    rows = (
        {"shape": name, **row}
        for name, shape in shapes.items()
        for row in measure(shape, args.tokens, *how)
    )
    report(args.json, rows)


if __name__ == "__main__":
    main()
