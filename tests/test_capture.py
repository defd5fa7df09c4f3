"""`CapturedStep` without a GPU: when it runs plainly, when it replays, and that both are the same updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_training.algorithms.capture import PLAIN_CALLS, CapturedStep, Inputs


class Recorded(CapturedStep):
    """Records without a GPU: replaying calls the function on the recorded inputs, in place, as a graph would."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self.log: list[str] = []

    def _run_plainly(self, inputs: Inputs) -> Tensor:
        self.log.append("plain")
        return self.function(inputs)

    def _capture(self, inputs: Inputs) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._output = torch.empty(0)
        step = self

        class Graph:
            def replay(self) -> None:
                step.log.append("replay")
                result = step.function(step._inputs)
                step._output.resize_(result.shape).copy_(result)  # type: ignore[union-attr]

        self._graph = Graph()  # type: ignore[assignment]


def counter() -> tuple[Any, Tensor]:
    total = torch.zeros(2)

    def add(inputs: Inputs) -> Tensor:
        return total.add_(inputs["x"]).clone()

    return add, total


def test_the_first_calls_run_plainly_and_every_call_counts_once() -> None:
    function, total = counter()
    step = Recorded(function)
    results = [step({"x": torch.full((2,), float(i))}, (0.1,)) for i in range(PLAIN_CALLS + 3)]
    assert step.log == ["plain"] * PLAIN_CALLS + ["replay"] * 3
    assert [result[0].item() for result in results] == torch.arange(PLAIN_CALLS + 3).cumsum(0).tolist()
    assert total[0] == sum(range(PLAIN_CALLS + 3))


def test_a_moved_number_or_another_shape_runs_plainly() -> None:
    function, _ = counter()
    step = Recorded(function)
    for i in range(10):
        step({"x": torch.ones(2)}, (0.1 * i,))
    assert step.log == ["plain"] * 10  # a schedule never lets it settle
    for _ in range(PLAIN_CALLS + 1):
        step({"x": torch.ones(2)}, (5.0,))
    assert step.log[-1] == "replay"
    replays = step.log.count("replay")
    step({"x": torch.ones(1)}, (5.0,))
    step({"x": torch.ones(2)}, (6.0,))
    assert step.log.count("replay") == replays
    step({"x": torch.ones(2)}, (5.0,))
    assert step.log.count("replay") == replays + 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_graph_gives_what_plain_calls_give() -> None:
    weight = torch.randn(8, 8, device="cuda")

    def product(inputs: Inputs) -> Tensor:
        return (inputs["x"] @ weight).relu().sum(0)

    step = CapturedStep(product)
    for _ in range(PLAIN_CALLS + 3):
        x = torch.randn(4, 8, device="cuda")
        torch.testing.assert_close(step({"x": x}, ()), product({"x": x}))
