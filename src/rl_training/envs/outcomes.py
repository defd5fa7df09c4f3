"""What a learned model need not learn: known functions of a step that say where an episode ends and what a step earns.

A user's environment, or a wrapper around it, may define

    def model_terminated(self, obs, actions, next_obs): ...  # whether the episode ends there, bool [B]
    def model_reward(self, obs, actions, next_obs): ...  # the reward of the step, float [B]

Their arguments are float32 tensors of the learner's device: observations [B, O] as the policy reads them, before any
normalization, and actions [B, A] in the range of the environment's action space.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.envs.device import map_actions
from rl_training.envs.factory import EnvRecipe, make_env
from rl_training.envs.probe import play_at_random
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import EnvironmentFailure, UserError, kind_and_line
from rl_training.play import close_all

ARGUMENTS = "(obs, actions, next_obs)"
TRIED = 8  # random steps, before a run, with which a function is compared
Ends = Callable[..., Any]  # next observations [B, O], an array or a tensor -> whether the episode ends there [B]
Outcome = Callable[[Tensor, Tensor, Tensor], Tensor]  # obs, actions in [-1, 1] and next_obs -> one value each [B]


class Outcomes:
    """The known functions of a step, `ends` and `rewards`; None for what the model learns.

    The environment's own functions come before a known termination. They are compared with a few random steps, and one
    that does not take batches is refused. They are called on an environment of their own.
    """

    def __init__(self, recipe: EnvRecipe, spaces: EnvSpaces, seed: int, device: str) -> None:
        self.env_id = spaces.env_id
        self.notes: list[str] = []
        self.ends: Outcome | None = of_step(known_termination(recipe))
        self.rewards: Outcome | None = None
        self._env: Any = None
        if recipe.made:  # a simulator, which nobody else may step
            return
        self._env, self._to_env = make_env(recipe), map_actions(spaces, torch.device(device))
        try:
            self._find(recipe, spaces, seed, device)
        except BaseException:
            self.close()
            raise

    def _find(self, recipe: EnvRecipe, spaces: EnvSpaces, seed: int, device: str) -> None:
        """Find the environment's own functions, and try them."""
        names = [name for name in ("model_terminated", "model_reward") if self._env.has_wrapper_attr(name)]
        rows: list[list[Any]] = []
        for step in play_at_random(recipe, spaces, seed, TRIED if names else 0):  # encoded at once: arrays are reused
            seen = [spaces.encode_rows([obs])[0] for obs in (step.obs, step.next_obs)]
            rows.append([seen[0], spaces.unmap_actions(step.action[None])[0], seen[1], step.terminated, step.reward])
        parts = [np.array(part, np.float32) for part in zip(*rows, strict=True)]
        columns = [torch.from_numpy(part).to(device) for part in parts]
        for name in names:
            is_end = name == "model_terminated"
            found = self._of_batch(name, torch.bool if is_end else torch.float32)
            told, true = found(*columns[:3]), columns[3 if is_end else 4]
            if is_end:
                self.ends = found
            else:
                self.rewards = found
            for one, other in zip(true.tolist(), told.float().tolist(), strict=True):
                if not math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-3):
                    both = f"{'ended' if is_end else 'paid'} {one:.4g} and {name} says {other:.4g}"
                    self.notes.append(f"a step of {self.env_id} {both}; imagined steps have the latter kind")
                    break

    def _of_batch(self, name: str, dtype: torch.dtype) -> Outcome:
        """The environment's function, for actions in [-1, 1]; what it returns is checked."""
        function, in_words = self._env.get_wrapper_attr(name), "bool" if dtype == torch.bool else "float"

        def outcome(obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
            try:
                told = function(obs, self._to_env(actions), next_obs)
            except Exception as error:
                what = f"failed in {name}{ARGUMENTS}: {kind_and_line(error)}"
                raise EnvironmentFailure.of(self.env_id, what) from error
            given = f"a {type(told).__name__}"
            if isinstance(told, Tensor):
                given = f"a tensor {list(told.shape)} of {told.dtype}"
                if told.shape == (len(obs),) and (told.dtype == torch.bool) == (dtype == torch.bool):
                    return told.to(dtype)
            wanted = f"a {in_words} tensor [{len(obs)}]"
            raise UserError(f"{name} of {self.env_id} returned {given} for {len(obs)} steps; it must be {wanted}.")

        return outcome

    def close(self) -> None:
        """Close the environment."""
        close_all([] if self._env is None else [self._env])


# Gymnasium's environments whose termination is a function of the next observation


def never(*step: Any) -> Any:
    """No step ends the episode."""
    return step[0][:, 0] != step[0][:, 0]


def inverted_pendulum(obs: Any) -> Any:
    """The pole leans more than 0.2 rad."""
    return ~(abs(obs[:, 1]) <= 0.2)


def hopper(obs: Any) -> Any:
    """The torso is low or leans, or a part of the state has left its range or is NaN."""
    return ~((obs[:, 0] > 0.7) & (abs(obs[:, 1]) < 0.2) & (abs(obs[:, 1:]) < 100.0).all(-1))


def walker2d(obs: Any) -> Any:
    """The torso is low, high or leans."""
    return ~((obs[:, 0] > 0.8) & (obs[:, 0] < 2.0) & (abs(obs[:, 1]) < 1.0))


def ant(obs: Any) -> Any:
    """The torso is low or high, or the state is not finite."""
    return ~((obs[:, 0] >= 0.2) & (obs[:, 0] <= 1.0) & (abs(obs) < float("inf")).all(-1))


def mountain_car(obs: Any) -> Any:
    """The car has reached the flag and does not roll back."""
    return (obs[:, 0] >= 0.45) & (obs[:, 1] >= 0.0)


TERMINATIONS: dict[str, Ends] = {
    "Pendulum-v1": never, "HalfCheetah-v5": never, "Swimmer-v5": never, "Reacher-v5": never, "Pusher-v5": never,
    "InvertedPendulum-v5": inverted_pendulum, "Hopper-v5": hopper, "Walker2d-v5": walker2d, "Ant-v5": ant,
    "MountainCarContinuous-v0": mountain_car,
}  # fmt: skip


def of_step(ends: Ends | None) -> Outcome | None:
    """The function of a step that looks at the next observation alone."""
    return ends if ends is None or ends is never else lambda obs, actions, next_obs: ends(next_obs)


def known_termination(recipe: EnvRecipe) -> Ends | None:
    """The termination function, if it is known and no option or wrapper of the recipe may change it."""
    return TERMINATIONS.get(recipe.env_id) if recipe.is_plain and not recipe.kwargs else None
