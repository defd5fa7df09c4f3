"""`envpool:ID`: environments that only EnvPool has, here one of DeepMind Control and two with discrete actions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces as gs

from resume_cases import assert_same, assert_same_run, stop_and_resume, tiny
from rl_training.config.choices import resolve
from rl_training.config.params import read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.envs import pool
from rl_training.envs.engines import choose_vectorization
from rl_training.envs.factory import make_env, read_recipe
from rl_training.envs.native import make_native_engine
from rl_training.envs.pool import flatten_rows, read_space
from rl_training.envs.probe import probe, probe_spaces
from rl_training.envs.stepper import episode_seed
from rl_training.errors import UserError
from rl_training.run.build import open_session
from rl_training.run.workflows import evaluate_checkpoint, resume_training, train

CONTROL, GRID, LAKE = "envpool:CartpoleSwingup-v1", "envpool:MiniGrid-Empty-5x5-v0", "envpool:FrozenLake-v1"


@pytest.fixture(autouse=True)
def _needs_envpool(request: pytest.FixtureRequest) -> None:
    if "absent" not in request.node.name:
        pytest.importorskip("envpool")


@pytest.mark.parametrize(
    ("env_id", "kind", "obs_dim", "actions"),
    [(CONTROL, "vector", 5, "continuous"), (GRID, "mixed", 247, "discrete"), (LAKE, "vector", 16, "discrete")],
)
def test_spaces_come_from_the_pool(env_id: str, kind: str, obs_dim: int, actions: str) -> None:
    """A Dict with images is an observation with images, a number one-hot; bounds that are none are open."""
    spaces = probe_spaces(read_recipe(env_id, {}))
    assert (spaces.obs_kind, spaces.obs_dim, spaces.action_kind) == (kind, obs_dim, actions)
    if env_id == CONTROL:
        bounds = spaces.observation_space["position"]  # type: ignore[index]
        assert (bounds.low == -np.inf).all()
        assert (bounds.high == np.inf).all()


@pytest.mark.parametrize("env_id", [CONTROL, GRID, LAKE])
def test_a_pool_and_a_pool_of_one_are_the_same_environment(env_id: str) -> None:
    """Observations, rewards and ends of the same seed, through the ends of episodes of seven steps."""
    recipe = read_recipe(env_id, {"max_episode_steps": 7})
    spaces = probe_spaces(recipe)
    engine, env = make_native_engine(recipe, spaces, 1, 5), make_env(recipe)
    seen, rng = engine.reset()[0], np.random.default_rng(0)
    assert_same(seen, spaces.encode_rows([env.reset(seed=episode_seed(5, 0, 0) >> 2)[0]]))
    cuts = 0
    for _ in range(30):
        actions = spaces.random_actions(rng, 1)
        step = engine.step(spaces.map_actions(actions))
        obs, reward, terminated, truncated, _ = env.step(spaces.as_given(actions)[0])
        assert_same(step.obs, spaces.encode_rows([obs]))
        assert (step.rewards[0], step.terminated[0], step.truncated[0]) == (np.float32(reward), terminated, truncated)
        cuts += truncated
        if terminated or truncated:
            begun = engine.step(spaces.map_actions(actions))
            assert begun.valid is not None
            assert not begun.valid.any()
            assert_same(begun.obs, spaces.encode_rows([env.reset()[0]]))
    assert cuts >= 2
    for opened in (engine, env):
        opened.close()


def test_rows_are_flattened_as_gymnasium_does() -> None:
    space = gs.Dict(
        b=gs.Box(-1, 1, (2, 2)), a=gs.Discrete(3, start=2), c=gs.Dict(x=gs.Box(-1, 1, ()), y=gs.MultiBinary(2))
    )
    rng = np.random.default_rng(0)
    space.seed(0)
    samples = [space.sample() for _ in range(int(rng.integers(4, 6)))]
    batch = {name: np.stack([row[name] for row in samples]) for name in ("a", "b")}
    batch["c"] = {name: np.stack([row["c"][name] for row in samples]) for name in ("x", "y")}
    np.testing.assert_allclose(flatten_rows(space, batch), np.stack([gs.flatten(space, row) for row in samples]))
    limits = np.finfo(np.float64)
    odd = gs.Box(np.array([limits.tiny, -2.0, limits.min]), np.array([limits.max, 3.0, 1.0]), dtype=np.float64)
    assert read_space(odd) == gs.Box(np.array([-np.inf, -2.0, -np.inf]), np.array([np.inf, 3.0, 1.0]), dtype=np.float64)


def test_a_run_on_a_pool_evaluates_the_same_and_says_that_a_resume_is_not_exact(tmp_path: Path) -> None:
    config = tiny("sac", tmp_path, env_id=CONTROL, env_kwargs={"max_episode_steps": 20}, num_envs=2)
    with pytest.warns(UserWarning, match="a resume starts new episodes and is not exact"):
        result = train(config, console=False)
    assert result.metrics["eval_length_mean"] == 20
    told = json.loads((result.run_dir / "manifest.json").read_text())["messages"]
    assert [text for text in told if "resume" in text] == [
        f"warning: {CONTROL} is stepped by EnvPool, whose state cannot be saved: a resume starts new episodes and is "
        "not exact"
    ]
    again = evaluate_checkpoint(result.checkpoint_path)
    assert again["eval_returns"] == evaluate_checkpoint(result.checkpoint_path)["eval_returns"]
    assert again["eval_return_mean"] == result.metrics["eval_return_mean"]
    with pytest.warns(UserWarning, match="a resume starts new episodes and is not exact"):
        on = resume_training(result.checkpoint_path, total_timesteps=160, console=False)
    assert on.metrics["global_step"] == 160
    assert isinstance(on.policy.predict({"position": np.zeros(3), "velocity": np.zeros(2)}), np.ndarray)


@pytest.mark.parametrize("algo", ["dqn", "ppo"])
def test_pools_of_one_resume_exactly(algo: str, tmp_path: Path) -> None:
    config = tiny(algo, tmp_path, env_id=LAKE, vectorization="sync", num_envs=2)
    assert_same_run(train(config, console=False), stop_and_resume(config, 70))


@pytest.mark.parametrize(
    ("backend", "wrappers", "expected"),
    [("local_sync", {}, "native"), ("local_async", {}, "sync"), ("local_sync", {"clip_reward": True}, "sync")],
)
def test_auto_is_the_pool_where_it_can_be(backend: str, wrappers: dict[str, Any], expected: str) -> None:
    config = tiny("dqn", Path("unused"), env_id=LAKE, execution_backend=backend, env_kwargs={"wrappers": wrappers})
    recipe = read_recipe(LAKE, config.env_kwargs)
    params = read_params(get_algorithm_spec("dqn").params, config.algo_kwargs)
    assert resolve(config, params, recipe).vectorization == expected
    with pytest.raises(UserError, match="takes no wrappers but normalizing ones"):
        choose_vectorization("native", read_recipe(LAKE, {"wrappers": {"frame_stack": 2}}), 2)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "said"),
    [
        ("envpool:CartpoleSwingup-v9", {}, "is not in EnvPool; did you mean 'CartpoleSwingup-v1'"),
        (LAKE, {"seed": 3}, "env_kwargs.seed is decided by the run"),
        (LAKE, {"batch_size": 3}, "env_kwargs.batch_size is decided by the run"),
        (LAKE, {"slope": 3}, "unknown key 'slope'; envpool:FrozenLake-v1 does not take it"),
    ],
)
def test_what_is_wrong_is_said(env_id: str, kwargs: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        open_session(tiny("dqn", tmp_path, env_id=env_id, env_kwargs=kwargs))


def test_an_absent_envpool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(UserError, match="needs the extra 'envpool'"):
        probe(read_recipe(LAKE, {}))


def test_success_is_read_from_infos() -> None:
    """Meta-World calls it success."""
    recipe = read_recipe("envpool:MetaWorld/Reach-v3", {"max_episode_steps": 3})
    spaces = probe_spaces(recipe)
    engine = make_native_engine(recipe, spaces, 2, 0)
    engine.reset()
    steps = [engine.step(np.zeros((2, 4), np.float32)) for _ in range(3)]
    assert [step.successes is None for step in steps] == [True, True, False]
    assert steps[-1].successes is not None
    assert steps[-1].successes.tolist() == [0.0, 0.0]
    engine.close()
    env = make_env(recipe)
    env.reset(seed=0)
    assert env.step(np.zeros(4, np.float32))[4]["is_success"] is False


def test_what_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe(GRID, {})
    with pytest.raises(UserError, match="is shown in no window; record videos instead"):
        make_env(recipe, render_mode="human")
    env = make_env(recipe, render_mode="rgb_array")
    env.reset(seed=0)
    frame = env.render()
    assert (frame.dtype, frame.shape[2]) == (np.uint8, 3)  # type: ignore[union-attr]
    for code, said in {"raise SystemExit('no paint here.')": "no paint here", "exit(3)": "exit code 3"}.items():
        pool.find_fault.cache_clear()
        monkeypatch.setattr(pool, "RENDERS", code)
        with pytest.raises(UserError, match=f"cannot be drawn here, so no video is made of it: .*{said}"):
            make_env(recipe, render_mode="rgb_array")
    pool.find_fault.cache_clear()
