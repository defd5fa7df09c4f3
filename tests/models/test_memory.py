"""`Memory`: golden numbers, resets inside a sequence, and the same result whether steps come one by one or together."""

import pytest
import torch

from rl_training.algorithms.base import Algorithm
from rl_training.models.memory import Memory, Recall, state_size

KINDS = pytest.mark.parametrize("kind", ["gru", "lstm"])


def make(kind, inputs=3, size=5, layers=2):
    torch.manual_seed(0)
    return Memory(kind, inputs, size, layers).double()


def read_some(memory, steps=9, count=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, count, memory.cells.input_size, dtype=torch.float64, generator=generator)
    starts = torch.rand(steps, count, generator=generator) < 0.3
    starts[0] = torch.tensor([True, False] * (count // 2))
    return x, Recall(torch.randn(count, memory.state_size, dtype=torch.float64, generator=generator), starts)


@pytest.mark.parametrize(
    ("kind", "third", "expected"),
    [
        ("lstm", True, [0.095241, 0.193465, 0.174270]),
        ("lstm", False, [0.095241, 0.193465, 0.293911]),
        ("gru", True, [0.107199, 0.204408, 0.163065]),
    ],
)
def test_golden_numbers(kind, third, expected):
    memory = make(kind, 1, 1, 1)
    for parameter in memory.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).view(3, 1, 1)
    recall = Recall(torch.full((1, memory.state_size), 7.0).double(), torch.tensor([[True], [False], [third]]))
    for outputs in (memory(x, recall), memory.follow(x, recall)[0]):
        torch.testing.assert_close(outputs.flatten().tolist(), expected, atol=1e-6, rtol=0.0)


@KINDS
def test_many_steps_at_once_equal_one_after_the_other(kind):
    memory = make(kind)
    x, recall = read_some(memory)
    state, outputs, states = recall.state, [], []
    for t in range(len(x)):
        read, after = memory.follow(x[t : t + 1], Recall(state, recall.starts[t : t + 1]))
        state = after[0]
        outputs.append(read[0])
        states.append(state)
    together, after = memory.follow(x, recall)
    torch.testing.assert_close(together, torch.stack(outputs))
    torch.testing.assert_close(after, torch.stack(states))
    torch.testing.assert_close(memory(x, recall), together)


@KINDS
def test_both_ways_have_the_same_gradients(kind):
    memory = make(kind)
    x, recall = read_some(memory)
    x.requires_grad_()
    slopes = torch.randn(*x.shape[:2], memory.size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    inputs = [x, *memory.parameters()]
    one = torch.autograd.grad((memory(x, recall) * slopes).sum(), inputs)
    other = torch.autograd.grad((memory.follow(x, recall)[0] * slopes).sum(), inputs)
    torch.testing.assert_close(one, other)


@KINDS
def test_an_episode_knows_nothing_of_what_was_before_it(kind):
    memory = make(kind)
    x, recall = read_some(memory)
    recall.starts[4] = True
    changed = torch.cat([x[:4] + 1.0, x[4:]])
    other = Recall(recall.state - 1.0, recall.starts)
    for read in (memory, lambda *given: memory.follow(*given)[0]):
        assert torch.equal(read(x, recall)[4:], read(changed, other)[4:])
        assert not torch.allclose(read(x, recall)[:4], read(changed, other)[:4])


@KINDS
def test_the_state_carries_no_gradient(kind):
    memory = make(kind)
    x, recall = read_some(memory)
    outputs, states = memory.follow(x, Recall(recall.state.requires_grad_(), recall.starts))
    assert not states.requires_grad
    outputs.sum().backward()
    memory(x, recall).sum().backward()
    assert recall.state.grad is None


@KINDS
def test_state_has_h_and_for_an_lstm_c_of_every_layer(kind):
    memory = make(kind)
    x, recall = read_some(memory)
    outputs, states = memory.follow(x, recall)
    assert states.shape == (*x.shape[:2], state_size(kind, 5, 2)) == (*x.shape[:2], 20 if kind == "lstm" else 10)
    assert torch.equal(states[..., 5:10], outputs)  # h of the last layer
    assert torch.equal(memory.initial_state(3), torch.zeros(3, memory.state_size).double())


@KINDS
def test_a_step_in_numpy_is_that_of_torch(kind):
    memory = make(kind)
    x, recall = read_some(memory)
    remember, states = memory.numpy_memory(), recall.state.numpy()
    _, after = memory.follow(x, recall)
    for t in range(len(x)):
        output, states = remember(x[t].numpy(), states, recall.starts[t].numpy())
        torch.testing.assert_close(torch.from_numpy(states), after[t])
        torch.testing.assert_close(torch.from_numpy(output), memory.outputs_in(after[t]))


def test_a_large_memory_stays_in_torch():
    assert Memory("lstm", 4, 256).numpy_memory() is None


@KINDS
def test_a_new_memory_can_keep_more_of_its_state(kind):
    kept = []
    for bias in (0.0, 3.0):
        torch.manual_seed(0)
        memory = Memory(kind, 1, 4, keep_bias=bias)
        state = memory.initial_state(1) + 1.0
        _, states = memory.follow(torch.zeros(6, 1, 1), Recall(state, torch.zeros(6, 1, dtype=torch.bool)))
        kept.append((states[-1, 0, -4:]).abs().mean())
    assert kept[1] > 2 * kept[0]


def test_steps_that_are_compiled_leave_the_passes_through_time_as_they_are(monkeypatch):
    monkeypatch.setattr(Memory, "forward", Memory.forward)  # which is put back afterwards, as what it says is
    monkeypatch.setattr(Memory, "stays_eager", True)

    class Small(Algorithm):
        def __init__(self):
            super().__init__()
            self.memory = Memory("gru", 3, 5)

    learner, given = Small(), (torch.ones(2, 1, 3), Recall(torch.zeros(1, 5), torch.zeros(2, 1, dtype=torch.bool)))
    expected = learner.memory(*given)
    learner.accelerate("compile")
    compiled = torch.compile(lambda *given: 2.0 * learner.memory(*given), backend="eager")
    assert torch.equal(compiled(*given), 2.0 * expected)
    with pytest.raises(torch._dynamo.exc.Unsupported):  # what is left out is no part of one graph
        torch.compile(lambda *given: 2.0 * learner.memory(*given), backend="eager", fullgraph=True)(*given)
