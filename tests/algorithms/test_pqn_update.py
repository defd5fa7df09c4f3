"""PQN: its returns and the published numbers, its gradient step, epsilon-greedy sampling, LayerNorm, masks, resume."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from registry_contract import TrainerSmoke
from resume_cases import assert_same_run, stop_and_resume, take_steps, tiny
from rl_training.algorithms.pqn import PQN
from rl_training.models.blocks import ImageEncoder
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.run.build import open_session
from rl_training.run.workflows import train

RETURNS = [0.9217, 0.2, 5.128725, 5.35]  # of max Q 1, 2, 3, 4, then 5; the second row ends


class TestTrainer(TrainerSmoke):
    algo = "pqn"


def make(seed: int = 0, **options: Any) -> PQN:
    torch.manual_seed(seed)
    network = MLPQNetwork(obs_dim=3, action_dim=4, hidden_sizes=(16, 16), layer_norm=True)
    learner = PQN(q_network=network, **options)
    learner.seed(seed)
    return learner


def make_batch(steps: int = 6, envs: int = 2) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return {
        "obs": torch.randn(steps, envs, 3, generator=draws), "rewards": torch.randn(steps, envs, generator=draws),
        "actions": torch.randint(4, (steps, envs), generator=draws), "terminated": torch.zeros(steps, envs).bool(),
        "truncated": torch.zeros(steps, envs).bool(), "bootstrap_value": torch.randn(envs, generator=draws),
    }  # fmt: skip


def golden_batch(**more: Tensor) -> dict[str, Tensor]:
    no = torch.zeros(4, 1).bool()
    return {
        "values": torch.tensor([[1.0], [2], [3], [4]]), "bootstrap_value": torch.tensor([5.0]),
        "rewards": torch.tensor([[0.1], [0.2], [0.3], [0.4]]), "terminated": no, "truncated": no, **more,
    }  # fmt: skip


def test_returns_are_the_golden_ones_and_not_the_shifted_ones() -> None:
    ends = torch.tensor([[False], [True], [False], [False]])
    returns = make(gamma=0.99, gae_lambda=0.65).advantages(golden_batch(terminated=ends))[1].flatten()
    torch.testing.assert_close(returns, torch.tensor(RETURNS), rtol=0, atol=1e-5)
    assert abs(float(returns[2]) - 5.475225) > 0.3  # with the last row's value one step too early


def test_a_truncated_row_is_worth_its_final_observation_and_cuts_the_traces() -> None:
    ends = torch.tensor([[False], [True], [False], [False]])
    finals = torch.full((4, 1), 7.0)
    batch = golden_batch(truncated=ends, truncation_values=finals)
    returns = make(gamma=0.99, gae_lambda=0.65).advantages(batch)[1].flatten()
    second = 0.2 + 0.99 * 7.0
    first = 0.1 + 0.99 * (0.65 * second + 0.35 * 2.0)
    torch.testing.assert_close(returns, torch.tensor([first, second, *RETURNS[2:]]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("gae_lambda", "depends"), [(0.0, False), (0.5, True)])
def test_only_traces_look_past_the_next_row(gae_lambda: float, depends: bool) -> None:
    learner, returns = make(gae_lambda=gae_lambda), []
    for last in (0.0, 100.0):
        batch = golden_batch()
        batch["rewards"][3] = last
        returns.append(float(learner.advantages(batch)[1][0]))
    assert (returns[0] != returns[1]) == depends


def test_the_step_follows_the_gradient_of_half_the_squared_error_of_the_actions_taken() -> None:
    learner = make(optimizer="sgd", learning_rate=0.1, max_grad_norm=None)
    rows = {"obs": torch.randn(8, 3), "actions": torch.arange(8) % 4, "returns": torch.randn(8)}
    chosen = learner.q_network(rows["obs"])[torch.arange(8), rows["actions"]]
    loss = 0.5 * (chosen - rows["returns"]).square().mean()
    parameters = list(learner.q_network.parameters())
    expected = [p - 0.1 * g for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True)]
    metrics = learner.minibatch_step(rows)
    torch.testing.assert_close(metrics[:2], torch.stack([loss, chosen.mean()]).detach())
    for one, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_targets_stay_the_same_in_all_epochs_and_every_row_is_seen_once_in_each() -> None:
    learner, batch, seen = make(update_epochs=3, minibatch_size=4), make_batch(), []
    wanted = learner.advantages(batch)[1].flatten()
    take = learner.minibatch_step

    def record(rows: Any) -> Tensor:
        seen.append(rows["returns"])
        return take(rows)

    learner.minibatch_step = record  # type: ignore[method-assign]
    result = learner.update(batch)
    assert result.num_gradient_steps == 9
    for epoch in torch.cat(seen).view(3, 12):
        torch.testing.assert_close(epoch.sort().values, wanted.sort().values)


def test_values_are_the_largest_of_legal_actions() -> None:
    learner, obs = make(), torch.randn(5, 3)
    masks = torch.ones(5, 4).bool()
    masks[:, learner.q_network(obs).argmax(-1)[0]] = False
    q_values = learner.q_network(obs)
    torch.testing.assert_close(learner.state_values(obs), q_values.amax(-1))
    legal = torch.stack([q[mask].max() for q, mask in zip(q_values, masks, strict=True)])
    torch.testing.assert_close(learner.state_values(obs, masks), legal)
    assert learner.state_values(obs, masks)[0] < q_values[0].max()


def collect(tmp_path: Path, **settings: Any) -> tuple[PQN, Any, dict[str, Tensor]]:
    """A learner, the rollout that it collected, and the batch that the store made of it."""
    config = tiny("pqn", tmp_path, num_envs=3, kwargs={"num_steps": 12}, **settings)
    with closing(open_session(config)) as session:
        take_steps(session, 0)
        learner: Any = session.algorithm
        store: Any = session.store
        ((_, batch),) = store.batches(learner, 0)
        return learner, store.experience, batch


def largest(learner: PQN, obs: Any, masks: Any) -> Tensor:
    """The largest value of each observation [T, N, ...], illegal actions left out unless no action is legal."""
    with torch.no_grad():
        q_values = learner.q_network(torch.from_numpy(obs).flatten(0, 1)).view(*obs.shape[:2], -1)
    illegal = torch.from_numpy(~masks & masks.any(-1, keepdims=True))
    return q_values.masked_fill(illegal, -torch.inf).amax(-1)


def test_a_rollout_is_valued_with_the_masks_of_its_observations(tmp_path: Path) -> None:
    learner, experience, batch = collect(tmp_path, env_id="env_zoo:LastMoves", vectorization="sync")
    values = torch.cat([batch["values"], batch["bootstrap_value"].unsqueeze(0)])
    torch.testing.assert_close(values, largest(learner, experience.obs, experience.masks))
    rows = experience.truncated & ~experience.terminated
    finals = largest(learner, experience.final_obs, experience.final_masks)
    assert (experience.final_masks[rows].sum(-1) == 1).all()
    assert rows.any()
    torch.testing.assert_close(batch["truncation_values"][rows], finals[rows])


def test_where_an_engine_resets_in_the_next_step_the_row_after_an_end_has_the_final_observation(tmp_path: Path) -> None:
    learner, experience, batch = collect(tmp_path, vectorization="native")
    with torch.no_grad():
        following = learner.state_values(torch.from_numpy(experience.obs[1:]).flatten(0, 1)).view(12, 3)
    torch.testing.assert_close(batch["truncation_values"], following)


def test_samples_on_a_device_are_epsilon_greedy() -> None:
    learner, obs = make(epsilon=0.4), torch.randn(1, 3).expand(20_000, 3)
    noise = -torch.empty(20_000, 4).exponential_(generator=torch.Generator().manual_seed(0)).log()
    with torch.no_grad():
        actions, logprobs = learner.sample(obs, noise)
        best = int(learner.q_network(obs[:1]).argmax())
    wanted = torch.full((4,), 0.1)
    wanted[best] += 0.6
    torch.testing.assert_close(actions.bincount(minlength=4) / 20_000, wanted, rtol=0, atol=0.015)
    torch.testing.assert_close(logprobs.exp(), wanted[actions])
    learner.epsilon = 0.0
    assert (learner.sample(obs, noise)[0] == best).all()


def test_every_activation_comes_after_a_layer_norm() -> None:
    layers = [
        *make().q_network.trunk,
        *ImageEncoder((4, 84, 84), layer_norm=True),
        *ImageEncoder((4, 10, 10), layer_norm=True),
    ]
    for before, layer in pairwise(layers):
        assert not isinstance(layer, nn.ReLU) or isinstance(before, nn.LayerNorm)
    shapes = [layer.normalized_shape for layer in layers if isinstance(layer, nn.LayerNorm)]
    assert shapes == [(16,), (16,), (32, 20, 20), (64, 9, 9), (64, 7, 7), (512,), (16, 8, 8), (128,)]


@pytest.mark.parametrize("vectorization", ["sync", "device"])
def test_epsilon_falls_over_its_share_of_the_budget(vectorization: str, tmp_path: Path) -> None:
    kwargs = {"epsilon_start": 0.9, "epsilon_end": 0.1, "exploration_fraction": 0.5}
    config = tiny("pqn", tmp_path, kwargs=kwargs, num_envs=4, vectorization=vectorization, total_timesteps=256)
    assert float(train(config, console=False).policy.algorithm.epsilon) == pytest.approx(0.1)


def test_images_on_several_environments_resume_to_the_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"env_id": "env_zoo:Image", "num_envs": 3}
    whole = train(tiny("pqn", tmp_path / "one", **settings), console=False)
    assert_same_run(whole, stop_and_resume(tiny("pqn", tmp_path / "two", **settings), 60))


def test_device_environments_resume_to_the_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_envs": 4, "vectorization": "device"}
    whole = train(tiny("pqn", tmp_path / "one", **settings), console=False)
    assert_same_run(whole, stop_and_resume(tiny("pqn", tmp_path / "two", **settings), 60))


def test_it_solves_a_bandit() -> None:
    learner, draws = make(learning_rate=3e-3, update_epochs=2, minibatch_size=32), torch.Generator().manual_seed(1)
    for _ in range(80):
        obs = torch.randn(16, 8, 3, generator=draws)
        actions = torch.randint(4, (16, 8), generator=draws)
        best = (obs[..., 0] > 0).long() + 2 * (obs[..., 1] > 0).long()
        ends = torch.ones(16, 8).bool()
        rewards = (actions == best).float()
        learner.update(
            {"obs": obs, "actions": actions, "rewards": rewards, "terminated": ends, "bootstrap_value": torch.zeros(8)}
        )
    obs = torch.randn(200, 3, generator=draws)
    best = (obs[:, 0] > 0).long() + 2 * (obs[:, 1] > 0).long()
    assert (learner.act(obs, deterministic=True).actions == best).float().mean() > 0.9
