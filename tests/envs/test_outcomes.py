"""Known functions of a step, for rollouts through a learned model: the user's own, and those of Gymnasium's tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from torch import Tensor

from resume_cases import assert_same_run, stop_and_resume, tiny
from rl_training.envs.factory import EnvRecipe, read_recipe
from rl_training.envs.outcomes import Outcomes, never
from rl_training.envs.probe import play_at_random, probe_spaces
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.run.build import open_session
from rl_training.run.workflows import train


class Known(PendulumEnv):
    """Pendulum with its reward as a function of tensors; it also ends where it turns fast."""

    def step(self, action: Any) -> Any:
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, bool(abs(obs[2]) > 1.0), truncated, info

    def model_reward(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
        angle = torch.atan2(obs[:, 1], obs[:, 0])
        return -(angle**2 + 0.1 * obs[:, 2] ** 2 + 0.001 * actions[:, 0] ** 2)

    def model_terminated(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
        return next_obs[:, 2].abs() > 1.0


def parts(env: Any) -> tuple[EnvRecipe, EnvSpaces]:
    recipe = read_recipe("mine", {}, env)
    return recipe, probe_spaces(recipe)


def make(env: Any) -> Outcomes:
    return Outcomes(*parts(env), 0, "cpu")


def test_functions_of_the_environment_say_what_its_steps_did() -> None:
    recipe, spaces = parts(Known)
    outcomes = Outcomes(recipe, spaces, 0, "cpu")
    steps = list(play_at_random(recipe, spaces, 1, 200))
    obs, next_obs = (torch.tensor(np.stack([getattr(s, part) for s in steps])) for part in ("obs", "next_obs"))
    actions = torch.tensor(np.stack([step.action for step in steps])) / 2.0  # as the policy's, in [-1, 1]
    assert outcomes.ends is not None
    assert outcomes.rewards is not None
    assert outcomes.ends(obs, actions, next_obs).tolist() == [step.terminated for step in steps]
    expected = torch.tensor([step.reward for step in steps], dtype=torch.float32)
    torch.testing.assert_close(outcomes.rewards(obs, actions, next_obs), expected, rtol=1e-4, atol=1e-4)
    assert 0 < sum(step.terminated for step in steps) < 200
    assert outcomes.notes == []
    outcomes.close()


def test_an_environment_may_reuse_its_arrays() -> None:
    class Reuses(Known):
        row = np.zeros(3, np.float32)

        def _get_obs(self) -> Any:
            self.row[:] = super()._get_obs()
            return self.row

    assert make(Reuses).notes == []


def test_a_wrapper_may_have_them_and_they_come_before_a_known_termination() -> None:
    class Ends(gym.Wrapper[Any, Any, Any, Any]):
        def model_terminated(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
            return next_obs[:, 2] > 100.0

    known = Outcomes(read_recipe("Pendulum-v1", {}), probe_spaces(read_recipe("Pendulum-v1", {})), 0, "cpu")
    assert known.ends is never
    assert known.rewards is None
    own = make(lambda: Ends(gym.make("Pendulum-v1")))
    rows = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 101.0]])
    assert own.ends is not None
    assert own.ends(rows, torch.zeros(2, 1), rows).tolist() == [False, True]
    assert own.rewards is None


@pytest.mark.parametrize(
    ("told", "kind", "words"),
    [
        (lambda *step: 1.0, UserError, r"returned a float for 8 steps; it must be a float tensor \[8\]"),
        (lambda *step: torch.zeros(8, 1), UserError, r"returned a tensor \[8, 1\] of torch.float32 for 8 steps"),
        (lambda *step: torch.zeros(8) > 0, UserError, r"a tensor \[8\] of torch.bool for 8 steps; it must be a float"),
        (lambda obs: obs, EnvironmentFailure, r"failed in model_reward\(obs, actions, next_obs\): TypeError"),
    ],
)
def test_functions_that_take_no_batches_are_refused(told: Any, kind: Any, words: str) -> None:
    class Wrong(PendulumEnv):
        model_reward = staticmethod(told)

    with pytest.raises(kind, match=words):
        make(Wrong)


def test_functions_that_differ_from_the_steps_are_named_in_a_warning() -> None:
    class Wrong(PendulumEnv):
        def model_reward(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
            return obs[:, 0] * 0.0 + 5.0

        def model_terminated(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
            return obs[:, 0] > -2.0

    ends, rewards = make(Wrong).notes
    assert ends == "a step of mine ended 0 and model_terminated says 1; imagined steps have the latter kind"
    assert "and model_reward says 5; imagined" in rewards


@pytest.mark.parametrize("algo", ["mbpo", "mopo"])
def test_imagined_steps_have_the_functions_outcomes(tmp_path: Path, algo: str) -> None:
    session = open_session(tiny(algo, tmp_path, env_id="ignored"), env=Known)
    store: Any = session.store
    assert "ends by a known function, rewards by a known function" in store.describe()
    learner: Any = session.algorithm
    if algo == "mopo":
        learner.penalty_coef = 0.0
    store.imagine(learner, torch.randn(50, 3), 2)
    rows = {name: torch.from_numpy(column) for name, column in store.imagined.state_dict()["arrays"].items()}
    env = Known()
    expected = env.model_reward(rows["obs"], 2.0 * rows["actions"], rows["next_obs"])
    torch.testing.assert_close(rows["rewards"], expected)
    assert torch.equal(rows["dones"] > 0, rows["next_obs"][:, 2].abs() > 1.0)
    session.close()


def test_a_run_with_them_resumes_exactly(tmp_path: Path) -> None:
    config = tiny("mbpo", tmp_path, env_id=f"{__name__}:Known", env_kwargs={"max_episode_steps": 20}, log_interval=3)
    assert_same_run(train(config, console=False), stop_and_resume(config, 30, 70))
