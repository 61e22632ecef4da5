"""The graphs that torch.compile makes of our operators."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func


class Graphs:
    """A backend of torch.compile that keeps which of our operators each graph holds."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.forward: list[list[str]] = []
        self.backward: list[list[str]] = []
        self.backend = aot_autograd(
            fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward)
        )

    @staticmethod
    def _keep(graphs: list[list[str]]) -> Callable[..., Any]:
        def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
            nodes = (
                str(node) + str(node.target) + str(node.args)
                for node in module.graph.nodes
                if node.op == "call_function"
            )
            graphs.append(
                [
                    name
                    for text in nodes
                    for name in re.findall(r"flowkernels\.(\w+)\.default", text)
                ]
            )
            return make_boxed_func(module.forward)

        return compiler

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, backend=self.backend, **options)
