"""MinAtar's games: registered when asked for, booleans as images, replayable episodes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from resume_cases import assert_same_run, stop_and_resume, tiny
from rl_training.config.train_config import load_config
from rl_training.envs.factory import make_env, read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.errors import UserError
from rl_training.run.workflows import train


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rl_training.envs.minatar", None)
    monkeypatch.setattr("gymnasium.registry", {})
    with pytest.raises(UserError, match=r"MinAtar/Breakout-v1 needs the extra 'results'"):
        probe_spaces(read_recipe("MinAtar/Breakout-v1", {}))


def test_games_are_images_of_planes_with_the_minimal_actions() -> None:
    pytest.importorskip("minatar")
    spaces = probe_spaces(read_recipe("MinAtar/Breakout-v1", {}))
    assert (spaces.obs_kind, spaces.obs_shape, spaces.image_scale) == ("image", (4, 10, 10), 1.0)
    assert spaces.action_dim == 3
    for game in ("Asterix", "Freeway", "Seaquest", "SpaceInvaders"):
        assert probe_spaces(read_recipe(f"MinAtar/{game}-v1", {})).obs_kind == "image"
    with pytest.raises(UserError, match="not registered"):
        probe_spaces(read_recipe("MinAtar/Chess-v1", {}))


def test_an_episode_depends_on_its_seed_and_actions_alone() -> None:
    pytest.importorskip("minatar")
    env, fresh = (make_env(read_recipe("MinAtar/Breakout-v1", {"sticky_action_prob": 1.0})) for _ in range(2))
    env.reset(seed=5)
    env.step(2)
    frames = []
    for one in (env, fresh):
        one.reset(seed=1)
        frames.append([one.step(action)[0] for action in (1, 1, 1)])
    np.testing.assert_array_equal(*frames)


def test_a_run_on_it_resumes_exactly(tmp_path: Path) -> None:
    pytest.importorskip("minatar")
    config = tiny("dreamer", tmp_path, env_id="MinAtar/Breakout-v1", num_envs=2, eval_episodes=0)
    assert_same_run(train(config, console=False), stop_and_resume(config, 64))


@pytest.mark.parametrize("preset", ["dreamer/minatar_breakout", "dqn/minatar_breakout"])
def test_presets_cut_episodes_that_a_good_policy_would_never_end(preset: str) -> None:
    assert load_config(preset).env_kwargs["max_episode_steps"] == 1000
