"""R2D2's mathematics: rescaled values, n-step targets, sequences read from a stored state, priorities, acting."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from resume_cases import take_steps, tiny
from rl_training.algorithms.c51_dqn import C51DQN
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.q_learning import QLearning
from rl_training.algorithms.q_sequences import sequence_priorities
from rl_training.algorithms.qr_dqn import QRDQN
from rl_training.config.params import read_params
from rl_training.data.sequences import n_step_returns
from rl_training.errors import UserError
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.ops.losses import rescale, unscale
from rl_training.run.build import open_session
from rl_training.runtime.dqn_trainer import DQNParams, IQNParams

SIZE, BURN_IN, LENGTH, COUNT = 5, 3, 10, 4


def test_rescaled_values_are_the_golden_ones() -> None:
    x = torch.tensor([1.0, -10.0, 100.0], dtype=torch.float64)
    torch.testing.assert_close(rescale(x), torch.tensor([0.415214, -2.326625, 9.149876]).double(), atol=1e-6, rtol=0)
    expected = torch.tensor([2.988057, 8546.626307], dtype=torch.float64)
    torch.testing.assert_close(unscale(torch.tensor([1.0, 100.0]).double()), expected, atol=1e-5, rtol=0)


def test_rescaling_and_back_loses_no_digits_in_single_precision() -> None:
    x = torch.cat([torch.logspace(-6, 5, 200), torch.zeros(1), -torch.logspace(-6, 5, 200)])
    torch.testing.assert_close(unscale(rescale(x)), x, rtol=1e-5, atol=1e-6)


class Constant(torch.nn.Module):
    """Values 3, whatever is observed."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, obs: Tensor) -> Tensor:
        return self.value.expand(len(obs), 2)


def test_target_of_five_rewards_is_the_golden_one() -> None:
    """r = 1, 0, 0, 2, 0 and Q' = 3 with gamma 0.997: the return is 17.641344 and its h 3.335204."""
    rewards = np.array([[0.0], [1.0], [0.0], [0.0], [2.0], [0.0]], np.float32)
    no = np.zeros((6, 1), bool)
    rows = {"rewards": rewards, "actions": no.astype(int), "terminated": no, "truncated": no, "is_first": no}
    steps = {name: torch.from_numpy(column)[0] for name, column in n_step_returns(rows, 5, 0.997).items()}
    batch = {**steps, "obs": torch.zeros(1, 3), "next_obs": torch.zeros(1, 3)}
    for rescaled, expected in ((True, 3.335204), (False, 1 + 2 * 0.997**3 + 0.997**5 * 3)):
        learner = DQN(q_network=Constant(), rescale_values=rescaled, learning_rate=0.0)
        assert learner.update(batch).metrics["target_mean"] == pytest.approx(expected, abs=1e-5)


def test_priority_mixes_the_largest_and_the_mean_error_of_the_steps_that_were_taken() -> None:
    errors = torch.tensor([[0.5, -1.0, 0.2, 2.0, 0.0]]).t().repeat(1, 2)
    taken = torch.ones(5, 2)
    taken[3, 1] = 0.0
    found = sequence_priorities(errors, taken, 0.9)
    torch.testing.assert_close(found, torch.tensor([1.874, 0.9 * 1.0 + 0.1 * 1.7 / 4]))


def make_learner(kind: type[QLearning] = DQN, outputs: int | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"obs_dim": 3, "action_dim": 2, "hidden_sizes": (6,), "num_outputs": outputs}
    network = MLPQNetwork(memory="gru", memory_size=SIZE, dueling=True, **shape)
    learner = kind(q_network=network, optimizer="sgd", learning_rate=0.1, burn_in=BURN_IN, **settings)
    with torch.no_grad():
        for parameter in learner.target_network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return learner


def make_batch(n_step: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Random arrivals [L, B], in which an episode terminates and another is truncated."""
    rng = np.random.default_rng(seed)
    shape = (LENGTH, COUNT)
    rows = {
        "rewards": rng.normal(size=shape).astype(np.float32), "actions": rng.integers(0, 2, shape),
        "terminated": np.zeros(shape, bool), "truncated": np.zeros(shape, bool), "is_first": np.zeros(shape, bool),
    }  # fmt: skip
    for b, (t, how) in enumerate([(6, "terminated"), (5, "truncated"), (1, "truncated")]):
        rows[how][t, b] = rows["is_first"][t + 1, b] = True
    batch = {name: torch.from_numpy(column) for name, column in n_step_returns(rows, n_step, 0.9).items()}
    obs, states, weights = rng.normal(size=(*shape, 3)), rng.normal(size=(COUNT, SIZE)), rng.random(COUNT)
    batch |= {"obs": torch.from_numpy(obs), "states": torch.from_numpy(states), "weights": torch.from_numpy(weights)}
    batch = {name: column.float() if column.is_floating_point() else column for name, column in batch.items()}
    return batch | {"starts": torch.from_numpy(rows["is_first"])}


def read_one_by_one(network: Any, batch: dict[str, Tensor], b: int) -> Tensor:
    """Values [L, A] of one sequence, one observation after the other; no gradient flows into the burn-in."""
    state, values = batch["states"][b : b + 1], []
    for t in range(LENGTH):
        if t == BURN_IN:
            state = state.detach()
        state = state * ~batch["starts"][t, b]
        state = torch.gru_cell(batch["obs"][t, b : b + 1], state, *network.memory.cells.all_weights[0])
        values.append(network.head(network.trunk(state))[0])
    return torch.stack(values)


@pytest.mark.parametrize("double_q", [True, False])
def test_update_equals_one_written_step_by_step(double_q: bool) -> None:
    settings: dict[str, Any] = {"huber_delta": None, "rescale_values": True, "double_q": double_q}
    learner, batch = make_learner(max_grad_norm=None, **settings), make_batch()
    online, target = learner.q_network, learner.target_network
    losses, errors = [], []
    for b in range(COUNT):
        values = read_one_by_one(online, batch, b)
        next_values = read_one_by_one(target, batch, b).detach()
        deltas = []
        for t in range(BURN_IN, LENGTH - 1):
            if not batch["taken"][t, b]:
                continue
            following = int(batch["next"][t, b])
            best = (values.detach() if double_q else next_values)[following].argmax()
            backup = unscale(next_values[following, best])
            y = rescale(batch["rewards"][t, b] + batch["discounts"][t, b] * backup)
            deltas.append(y - values[t, batch["actions"][t, b]])
        deltas = torch.stack(deltas)
        losses.append(batch["weights"][b] * 0.5 * deltas.square().sum())
        errors.append(0.9 * deltas.abs().max() + 0.1 * deltas.abs().mean())
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, list(online.parameters()))
    expected = [p.detach() - 0.1 * g for p, g in zip(online.parameters(), gradients, strict=True)]
    result = learner.update(batch)
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(result.priorities, torch.stack(errors).detach(), rtol=1e-4, atol=1e-5)
    for parameter, value in zip(online.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-4, atol=1e-6)


def test_final_observation_of_an_episode_is_valued_but_not_learned_from() -> None:
    """What is observed after a truncation counts; the action and value at a final observation do not."""
    batch = make_batch(n_step=1)
    base = make_learner().update(batch).metrics["loss"]
    other = {**batch, "actions": batch["actions"].clone(), "rewards": batch["rewards"].clone()}
    other["actions"][5, 1] = 1 - other["actions"][5, 1]  # the row after which an episode begins
    other["rewards"][5, 1] = 100.0
    assert make_learner().update(other).metrics["loss"] == base
    moved = {**batch, "obs": batch["obs"].clone()}
    moved["obs"][5, 1] += 1.0  # the final observation of a truncated episode
    assert make_learner().update(moved).metrics["loss"] != pytest.approx(base)
    ended = {**batch, "obs": batch["obs"].clone()}
    ended["obs"][6, 0] += 1.0  # that of a terminated one
    assert make_learner().update(ended).metrics["loss"] == pytest.approx(base, rel=1e-7)


@pytest.mark.parametrize(("kind", "outputs"), [(C51DQN, "num_atoms"), (QRDQN, "num_quantiles")])
def test_distributional_heads_learn_from_sequences(kind: Any, outputs: str) -> None:
    batch = make_batch()
    learner = make_learner(kind, 7, **{outputs: 7})
    losses = [learner.update(batch).metrics["loss"] for _ in range(30)]
    assert losses[-1] < 0.97 * losses[0]
    assert learner.update(batch).priorities.shape == (COUNT,)


def test_acting_one_by_one_gives_the_values_of_the_sequence() -> None:
    learner, batch = make_learner(), make_batch()
    carry, starts = batch["states"], batch["starts"]
    values = torch.stack([read_one_by_one(learner.q_network, batch, b) for b in range(COUNT)], 1)
    for t in range(LENGTH):
        out = learner.act(batch["obs"][t], carry, is_first=starts[t], deterministic=True)
        assert torch.equal(out.actions, values[t].argmax(-1))
        assert out.extras["states"] is out.carry
        carry = out.carry
    fresh = learner.act(batch["obs"][0], deterministic=True)
    begun = learner.act(batch["obs"][0], batch["states"], is_first=torch.ones(COUNT, dtype=torch.bool))
    torch.testing.assert_close(fresh.carry, begun.carry)


def test_stored_states_are_those_of_the_policy_that_acted(tmp_path: Path) -> None:
    """With a learning rate of 0, reading the stored sequences again gives the stored states."""
    kwargs = {"learning_rate": 0.0, "learning_starts": 8, "burn_in": 0, "sequence_length": 6, "sequence_period": 2}
    with closing(open_session(tiny("r2d2", tmp_path, num_envs=2, kwargs=kwargs))) as session:
        step = 0
        while step < 160:
            step += take_steps(session, step)
        buffer, network = session.store.buffer, session.algorithm.q_network
        batch = buffer.sample(64, np.random.default_rng(0))
        starts = {tuple(obs.tolist()): i for i, obs in enumerate(batch["obs"][0])}
        compared = 0
        with torch.no_grad():
            states = network.states(batch["obs"].flatten(0, 1), batch["states"], batch["starts"])
        for t in range(1, len(batch["obs"])):
            for b in range(64):
                place = starts.get(tuple(batch["obs"][t, b].tolist()))
                if place is not None and not batch["starts"][t, b]:
                    torch.testing.assert_close(batch["states"][place], states[t - 1, b])
                    compared += 1
        assert compared > 20
        assert batch["states"].abs().sum() > 0


def test_networks_of_fractions_refuse_a_memory() -> None:
    with pytest.raises(UserError, match="memory is 'gru'; with a network of fractions it must be none"):
        read_params(IQNParams, {"memory": "gru"})


def test_hindsight_in_sequences_is_refused() -> None:
    params = read_params(DQNParams, {"memory": "gru", "her_ratio": 0.8})
    with pytest.raises(UserError, match=r"her_ratio is 0.8 and memory 'gru'; sequences keep their goals"):
        params.check_new_run()


def test_acting_in_numpy_is_acting_in_torch() -> None:
    learner, batch = make_learner(), make_batch()
    remember, policy = learner.numpy_memory(), learner.numpy_policy()
    carry = batch["states"]
    states = carry.numpy()
    for obs, starts in zip(batch["obs"], batch["starts"], strict=True):
        out = learner.act(obs, carry, is_first=starts, deterministic=True)
        outputs, states = remember(obs.numpy(), states, starts.numpy())
        np.testing.assert_allclose(states, out.carry.numpy(), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(policy(outputs, None, np.random.default_rng(0), True), out.actions.numpy())
        carry = out.carry
