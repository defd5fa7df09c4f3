"""Captured steps without a GPU: when they run plainly, when they replay, and that both are the same updates."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from recorded_steps import Recorded, RecordedOnHost
from rl_training.algorithms.base import Numbers
from rl_training.speed import capture
from rl_training.speed.capture import (
    MOST_GRAPHS,
    PLAIN_CALLS,
    CapturedStep,
    HostRecording,
    HostStep,
    Recording,
)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on the CPU are captured, in Python."""
    monkeypatch.setattr(capture, "CAPTURING", ("cpu",))
    monkeypatch.setattr(capture, "CapturedStep", Recorded)


class Pair(NamedTuple):
    low: Tensor
    high: Tensor | None


def counter() -> tuple[Callable[..., Any], Tensor]:
    total = torch.zeros(2)

    def add(batch: dict[str, Tensor], more: Any = None) -> tuple[dict[str, Tensor], Pair]:
        total.add_(batch["x"].sum())
        return {"sum": total.sum(), "whole": total}, Pair(batch["x"].long(), None)

    return add, total


def test_the_first_calls_run_plainly_and_every_call_counts_once() -> None:
    function, total = counter()
    step = Recorded(function, Numbers())
    results = [step({"x": torch.full((2,), float(i))}) for i in range(PLAIN_CALLS + 3)]
    assert (step.plain, step.replays) == (PLAIN_CALLS, [3])
    sums = (2 * torch.arange(PLAIN_CALLS + 3)).cumsum(0)
    for i, (metrics, pair) in list(enumerate(results))[PLAIN_CALLS:]:  # none is overwritten by a later call
        assert metrics["sum"].shape == ()
        assert metrics["sum"] == 2 * sums[i]
        assert torch.equal(metrics["whole"], sums[i].float().expand(2))
        assert isinstance(pair, Pair)
        assert pair.high is None
        assert torch.equal(pair.low, torch.tensor([i, i]))
    assert torch.equal(total, sums[-1].float().expand(2))


def test_inputs_are_copied_and_results_carry_no_gradient() -> None:
    weight = torch.ones(3, requires_grad=True)
    step = Recorded(lambda pair: (pair[0] * weight).sum() + pair[1], Numbers())
    for i in range(PLAIN_CALLS + 2):
        x, y = torch.full((3,), float(i)), torch.tensor(0.5)
        result = step((x, y))
    assert result == 3 * (PLAIN_CALLS + 1) + 0.5
    assert not result.requires_grad
    assert torch.equal(x, torch.full((3,), PLAIN_CALLS + 1.0))


OTHERS: list[Any] = [
    ({"x": torch.ones(3)}, None), ({"x": torch.ones(2, dtype=torch.float64)}, None), ({"x": torch.ones(2)}, 1),
    ({"x": torch.ones(2)}, torch.ones(1)), ({"x": torch.ones(2), "y": torch.ones(2)}, None),
]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_another_signature_gets_another_graph(other: Any) -> None:
    function, _ = counter()
    step = Recorded(function, Numbers())
    for _ in range(PLAIN_CALLS + 2):
        step({"x": torch.ones(2)}, None)
        step(*other)
    assert (step.plain, step.replays) == (2 * PLAIN_CALLS, [2, 2])


def test_a_step_has_no_more_graphs_than_it_may_and_drops_the_one_that_is_unused_longest() -> None:
    function, total = counter()
    step = Recorded(function, Numbers())

    def call(size: int, times: int) -> None:
        for _ in range(times):
            step({"x": torch.ones(size)})

    for size in range(1, MOST_GRAPHS + 2):
        call(size, PLAIN_CALLS + 1)
        call(1, 1 if size > 1 else 0)  # what is used again and again stays
    assert step.replays == [1] * (MOST_GRAPHS - 1) + [1 + MOST_GRAPHS]
    plain = step.plain
    call(2, PLAIN_CALLS + 2)  # it was dropped, and starts anew
    assert step.plain == plain + PLAIN_CALLS
    assert step.replays[-1] == 2
    assert total[0] == (PLAIN_CALLS + 1) * sum(range(1, MOST_GRAPHS + 2)) + MOST_GRAPHS + 2 * (PLAIN_CALLS + 2)


def test_inputs_of_ever_other_shapes_end_the_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MOST_CAPTURES", 2)
    step = Recorded(lambda x: x + 1, Numbers())
    for size in (1, 2):
        for _ in range(PLAIN_CALLS + 1):
            step(torch.zeros(size))
    for _ in range(PLAIN_CALLS):
        step(torch.zeros(3))
    with pytest.warns(UserWarning, match="was captured 2 times as a CUDA graph; inputs of other shapes run eagerly"):
        assert torch.equal(step(torch.zeros(3)), torch.ones(3))
    assert torch.equal(step(torch.zeros(3)), torch.ones(3))
    assert torch.equal(step(torch.zeros(1)), torch.ones(1))  # as a graph still
    assert (step.plain, step.replays) == (3 * PLAIN_CALLS, [1, 2])


def test_a_number_that_moves_is_read_in_place_and_others_are_constants() -> None:
    numbers = Numbers(rate=0.5, fixed=2.0, optimizer_eps=1e-8, target_kl=1.0, epsilon=1.0, unset=None)
    numbers.read = {"optimizer_eps": "by value", "target_kl": "never", "epsilon": "to act"}
    numbers.device = torch.device("cpu")
    step = Recorded(lambda x: x * numbers["rate"] * numbers["fixed"] + numbers["optimizer_eps"], numbers)
    assert isinstance(numbers["rate"], float)  # no schedule has set it
    numbers["rate"] = 0.5
    assert isinstance(numbers["rate"], Tensor)
    for turn in range(PLAIN_CALLS + 4):
        numbers["rate"], numbers["target_kl"] = 1.0 + turn, 1.0 / (1 + turn)
        assert step(torch.ones(1)).item() == pytest.approx(2.0 * (1 + turn))
    assert isinstance(numbers["target_kl"], float)
    assert (step.plain, step.replays) == (PLAIN_CALLS, [4])
    numbers.update({"optimizer_eps": 1.0})
    assert isinstance(numbers["optimizer_eps"], float)
    assert step(torch.ones(1)).item() == pytest.approx(2.0 * (PLAIN_CALLS + 4) + 1.0)  # not what the graph holds
    assert step.plain == PLAIN_CALLS + 1
    numbers["rate"], numbers["epsilon"] = None, 0.5
    assert numbers["rate"] is None
    assert isinstance(numbers["epsilon"], float)  # which a CPU reads in numpy


def test_a_graph_of_a_constant_is_not_one_of_a_number_that_is_set() -> None:
    numbers = Numbers(rate=1.0)  # which is equal to True
    numbers.device = torch.device("cpu")
    step = Recorded(lambda x: x * numbers["rate"], numbers)
    function, frozen = step.function, {"rate": 1.0}
    step.function = lambda x: x * frozen["rate"]  # what the graph holds
    for _ in range(PLAIN_CALLS + 1):
        step(torch.ones(1))
    step.function = function
    numbers["rate"] = 3.0
    assert step(torch.ones(1)).item() == 3.0


def test_a_table_without_a_device_holds_floats() -> None:
    numbers = Numbers(rate=0.5)
    numbers["rate"] = 0.25
    numbers.update(more=1.0)
    assert dict(numbers) == {"rate": 0.25, "more": 1.0}
    assert isinstance(numbers["rate"], float)


def test_a_step_that_cannot_be_captured_says_so_and_runs_plainly() -> None:
    function, total = counter()

    class Unable(Recorded):
        def _record(self, inputs: tuple[Any, ...]) -> Recording:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    step = Unable(function, Numbers())
    for _ in range(PLAIN_CALLS):
        step({"x": torch.ones(2)})
    with pytest.warns(UserWarning, match=r"counter.*add cannot be captured .* not permitted when stream is capturing$"):
        step({"x": torch.ones(2)})
    step({"x": torch.ones(2)})
    assert total[0] == 2 * (PLAIN_CALLS + 2)


def test_after_a_failed_capture_no_step_replays_a_graph_of_the_generator_before() -> None:
    class Unable(Recorded):
        def _record(self, inputs: tuple[Any, ...]) -> Recording:
            raise RuntimeError("out of memory")

    numbers, generator = Numbers(), torch.Generator()
    numbers["rate"] = 1.0
    able, unable = (kind(lambda x: x + 1, numbers, generator) for kind in (Recorded, Unable))
    for _ in range(PLAIN_CALLS + 2):
        able(torch.ones(2))
    for _ in range(PLAIN_CALLS):
        unable(torch.ones(2))
    with pytest.warns(UserWarning, match="out of memory"):
        unable(torch.ones(2))
    numbers["rate"] = 2.0
    numbers["rate"] = 1.0
    assert able.replays == [2]
    for _ in range(PLAIN_CALLS + 1):
        able(torch.ones(2))
    assert (able.plain, able.replays) == (2 * PLAIN_CALLS, [2, 1])


def test_a_number_that_was_unset_may_be_elsewhere_afterwards() -> None:
    numbers = Numbers()
    numbers.device = torch.device("cpu")
    numbers["rate"] = 1.0
    before, constants = numbers["rate"], numbers.constants
    numbers["rate"] = None
    numbers["rate"] = 2.0
    assert numbers["rate"].data_ptr() != before.data_ptr()
    assert numbers.constants != constants  # a graph would read the memory of before


def test_however_numbers_change_a_step_reads_those_of_now() -> None:
    rng, values = np.random.default_rng(0), [None, 0.25, 3, True, np.float32(0.5), np.float64(0.75), torch.tensor(2.0)]
    numbers = Numbers(rate=0.5, unset=None, optimizer_eps=1.0, epsilon=0.125)
    numbers.device = torch.device("cpu")

    def read(x: Tensor) -> Tensor:
        return x + sum((0.0 if value is None else value + 1.0) * 10**i for i, value in enumerate(numbers.values()))

    step = Recorded(read, numbers)
    for _ in range(400):
        if rng.random() < 0.2:
            name = ("rate", "unset", "optimizer_eps", "epsilon")[rng.integers(4)]
            numbers[name] = values[rng.integers(0, 7) if name in ("rate", "unset") else rng.integers(1, 3)]
        if rng.random() < 0.02:
            numbers = step.numbers = copy.deepcopy(numbers)
            step._graphs.clear()  # as a copy of a step
        assert torch.equal(step(torch.zeros(1)), read(torch.zeros(1)))
    assert step._captures > 5
    assert step._can_capture


def test_threads_capture_one_after_the_other() -> None:
    second = Recorded(lambda x: x + 1, Numbers())

    def call() -> None:
        second(torch.ones(2))

    class First(Recorded):
        waits: threading.Thread

        def _record(self, inputs: tuple[Any, ...]) -> Recording:
            self.waits = threading.Thread(target=call)
            self.waits.start()
            self.waits.join(0.1)
            assert self.waits.is_alive()
            return super()._record(inputs)

    first = First(lambda x: x + 1, Numbers())
    for _ in range(PLAIN_CALLS):
        first(torch.ones(2))
        call()
    first(torch.ones(2))
    first.waits.join()
    assert (first.replays, second.replays) == ([1], [1])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("captures", [True, False])
def test_a_step_on_the_host_takes_and_returns_arrays(captures: bool) -> None:
    numbers, cpu = Numbers(), torch.device("cpu")
    numbers.device = cpu if captures else None
    step = RecordedOnHost(lambda given, state: ({"x": given["x"] + state}, state + 1), numbers, torch.Generator(), cpu)
    state, results = torch.zeros(2), []
    for turn in range(PLAIN_CALLS + 3):
        found, state = step({"x": np.full(2, turn, np.float32)}, state)
        results.append(found["x"])
    for turn, result in enumerate(results):  # none is overwritten by a later call
        assert np.array_equal(result, np.full(2, 2 * turn, np.float32))
    assert torch.equal(state, torch.full((2,), PLAIN_CALLS + 3.0))
    assert step.replays == ([3] if captures else [])


@pytest.mark.parametrize(("device", "strides"), [("cpu", (1, 4)), ("meta", (2, 1))])
def test_plain_calls_on_another_device_read_rows_as_graphs_do(device: str, strides: tuple[int, ...]) -> None:
    seen: list[tuple[int, ...]] = []

    def look(given: dict[str, Tensor], state: None) -> tuple[dict[str, Tensor], None]:
        seen.append(given["x"].stride())
        return {"y": torch.zeros(4)}, state

    step = HostStep(look, Numbers(), torch.Generator(), torch.device(device))
    step({"x": np.zeros((2, 4), np.float32).T}, None)  # as Gymnasium's vectorized CartPole returns observations
    assert seen == [strides]
    recording = HostRecording.allocate(torch.zeros(2, 4).T, torch.device("cpu"))
    assert recording.stride() == (2, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_graph_gives_what_plain_calls_give() -> None:
    weight = torch.randn(8, 8, device="cuda")

    def product(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (batch["x"] @ weight).relu().sum(0), batch["x"].argmax()

    step = CapturedStep(product, Numbers())
    for size in (4, 5, 4):
        for _ in range(PLAIN_CALLS + 3):
            x = torch.randn(size, 8, device="cuda")
            torch.testing.assert_close(step({"x": x}), product({"x": x}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_host_read_on_a_gpu_falls_back_to_plain_calls() -> None:
    step, before = CapturedStep(lambda x: x * x.sum().item(), Numbers()), torch.cuda.current_stream()
    x = torch.ones(2, device="cuda")
    for _ in range(PLAIN_CALLS):
        step(x)
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph and runs eagerly"):
        assert torch.equal(step(x), 2 * x)
    assert torch.equal(step(x), 2 * x)
    assert torch.cuda.current_stream() == before
    torch.randn(2, device="cuda")  # the default generator is not left in the failed capture
    torch.cuda.synchronize()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:.*cannot be captured")
@pytest.mark.parametrize("reads", [False, True])  # a read on the host ends the capture
def test_a_graph_draws_on_from_where_its_generator_is(reads: bool) -> None:
    own, plain = (torch.Generator("cuda").manual_seed(3) for _ in range(2))

    def draw(x: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.randn(5, generator=generator, device="cuda") + torch.rand(5, generator=generator, device="cuda")
        return drawn * x.sum().item() if reads else drawn * x.sum()

    step = CapturedStep(lambda x: draw(x, own), Numbers(), own)
    x = torch.ones(2, device="cuda")
    for turn in range(PLAIN_CALLS + 6):
        if turn == PLAIN_CALLS + 3:  # as a resume does
            state = own.get_state()
            own.manual_seed(9)
            own.set_state(state)
        assert torch.equal(step(x), draw(x, plain))
        assert torch.equal(own.get_state(), plain.get_state())
        assert torch.equal(torch.rand(2, generator=own, device="cuda"), torch.rand(2, generator=plain, device="cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:.*cannot be captured")
def test_steps_that_share_a_generator_draw_in_turn_after_one_of_them_failed() -> None:
    own, plain = (torch.Generator("cuda").manual_seed(3) for _ in range(2))
    numbers, x = Numbers(), torch.ones(2, device="cuda")

    def draw(x: Tensor) -> Tensor:
        return x * torch.randn(2, generator=own, device="cuda")

    able = CapturedStep(draw, numbers, own)
    unable = CapturedStep(lambda x: draw(x) * x.sum().item() / 2, numbers, own)
    for turn in range(PLAIN_CALLS + 6):
        for step in (able, able, unable):
            assert torch.equal(step(x), torch.randn(2, generator=plain, device="cuda")), turn
        assert torch.equal(own.get_state(), plain.get_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:.*cannot be captured")  # what one thread runs may end a capture of another
def test_threads_that_capture_at_the_same_time_compute_what_plain_code_does_on_a_gpu() -> None:
    def work() -> None:
        step = CapturedStep(lambda x: (x @ x).relu(), Numbers())
        for size in range(8, 16):
            x = torch.randn(size, size).cuda()  # while a thread captures, torch's generator there cannot draw
            for _ in range(PLAIN_CALLS + 2):
                torch.testing.assert_close(step(x), (x @ x).relu())

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
