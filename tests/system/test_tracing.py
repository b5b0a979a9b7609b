"""Functions that torch.compile does not trace run as they are, between graphs."""

import pytest
import torch
from torch import Tensor, fx

from nmt.system.tracing import not_traced


@not_traced
def double(x: Tensor) -> Tensor:
    """Double the numbers, with a list that no graph can hold."""
    return torch.tensor([2 * number for number in x.tolist()])


def test_a_compiled_function_calls_it_between_two_graphs() -> None:
    graphs = []

    def keep(graph: fx.GraphModule, examples: list[Tensor]) -> fx.GraphModule:
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def work(x: Tensor) -> Tensor:
        return double(x + 1) - 3

    torch.compiler.reset()
    x = torch.tensor([1.0, 5.0])
    compiled = torch.compile(work, backend=keep)
    assert torch.equal(compiled(x), work(x))
    assert graphs == [["add"], ["sub"]]


def test_it_keeps_its_name_and_its_errors() -> None:
    assert double.__name__ == "double"
    with pytest.raises(AttributeError):
        double(None)
