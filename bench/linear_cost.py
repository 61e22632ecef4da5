"""What `linear_policy_loss` with its gradients should take on a GPU, part by part:

    python -m bench.linear_cost [--tokens T] [--size D] [--vocab V] [--chunk-rows C] ...

Three products of 2 T D V FLOPs, at the speed of a bare product; and the bytes that a bare product
does not move, at the speed of a copy. E: bytes of an element of hidden states and weight.

- The row kernel reads the logits and writes dlogits over them: 2 E T V.
- dW is fp32: the first chunk writes 4 V D, each later one reads and writes 8 V D.
- dX: E T D. Autograd hands dW over in the weight's own dtype: (4 + E) V D if that is not fp32, and
  nothing where `weight_grad_VD` takes it.

A product may hide its bytes behind its arithmetic (an H200 took 6.52 ms where this says 6.99: dW of
a later chunk, C = 4096, D = 3584, V = 152064), so a measurement may lie below the sum. One that is
far above it has something to explain.
"""

from __future__ import annotations

import argparse

from bench.measure import print_table

H200 = {"tflops": 747.0, "tb_s": 4.3}
"""A bare product in bf16 (5.98 ms for 2 x 4096 x 3584 x 152064), and a copy."""


def linear_cost(
    num_tokens: int,
    size: int,
    num_vocab: int,
    *,
    chunk_rows: int = 4096,
    element_bytes: int = 2,
    tflops: float = H200["tflops"],
    tb_s: float = H200["tb_s"],
    into_buffer: bool = False,
) -> dict[str, float]:
    """Milliseconds by part, for `num_tokens` (T) rows that all have a gradient; `into_buffer`: with
    `weight_grad_VD`. "sum" is that of the others.
    """
    num_chunks = -(-num_tokens // chunk_rows)
    weight, logits = num_vocab * size, num_tokens * num_vocab
    is_written = num_chunks > 0 and not into_buffer
    num_bytes = {
        "row kernel": 2 * element_bytes * logits,
        "dW in fp32": 8 * weight * num_chunks - (4 * weight if is_written else 0),
        "dX": element_bytes * num_tokens * size,
        "dW handed over": 0 if into_buffer or element_bytes >= 4 else (4 + element_bytes) * weight,
    }
    parts = {"products": 6 * logits * size / tflops / 1e9}
    parts |= {name: value / tb_s / 1e9 for name, value in num_bytes.items()}
    return {**parts, "sum": sum(parts.values())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192, help="T (default: %(default)s)")
    parser.add_argument("--size", type=int, default=4096, help="D (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=151936, help="V (default: %(default)s)")
    parser.add_argument("--chunk-rows", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--element-bytes", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--tflops", type=float, default=H200["tflops"], help="of a product (default: %(default)s)"
    )
    parser.add_argument(
        "--tb-s", type=float, default=H200["tb_s"], help="of a copy (default: %(default)s)"
    )
    args = parser.parse_args()
    cost = linear_cost(
        args.tokens,
        args.size,
        args.vocab,
        chunk_rows=args.chunk_rows,
        element_bytes=args.element_bytes,
        tflops=args.tflops,
        tb_s=args.tb_s,
    )
    share = {name: f"{100 * ms / cost['sum']:.1f} %" for name, ms in cost.items()}
    print_table([{"part": name, "ms": ms, "share": share[name]} for name, ms in cost.items()])


if __name__ == "__main__":
    main()
