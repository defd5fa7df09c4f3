"""Observation groups: parts of a Dict that only the critic sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from env_zoo import HiddenScale
from resume_cases import assert_same_run, rows_of, stop_and_resume, tiny
from rl_training.config.networks import make_encoder, make_policy
from rl_training.config.params import Params
from rl_training.config.spec import get_algorithm_spec
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.models.blocks import mlp
from rl_training.run.build import open_session
from rl_training.run.evaluation import read_replay_buffer
from rl_training.run.learner import load_policy
from rl_training.run.workflows import train
from rl_training.speed.passes import WrittenOut, numpy_step
from rl_training.tools.export import export_policy

HIDDEN = {"critic_obs": ["hidden"]}
ROLLOUT = ["a2c", "ppo", "trpo", "impala", "appo"]
REPLAY = ["sac", "td3", "ddpg", "d4pg"]
NORMALIZED = {"wrappers": {"normalize_observation": True}}


def hidden_config(algo: str, folder: Path, *, kwargs: Any = HIDDEN, **fields: Any) -> Any:
    fields = {"env_id": "env_zoo:HiddenScale", "num_envs": 2, "env_kwargs": NORMALIZED, **fields}
    return tiny(algo, folder, kwargs=kwargs, **fields)


def seen(hidden: float, t: float = 0.5) -> dict[str, Any]:
    return {"clock": np.array([t, 0.3], np.float32), "hidden": np.array([hidden], np.float32), "goal": 1}


@pytest.mark.parametrize("algo", [*ROLLOUT, *REPLAY])
def test_acting_does_not_read_what_is_for_the_critic(tmp_path: Path, algo: str) -> None:
    result = train(hidden_config(algo, tmp_path, eval_episodes=2), env=HiddenScale, console=False)
    policy = load_policy(result.checkpoint_path)
    whole = [seen(hidden, t) for hidden in (-3.0, 0.0, 2.5) for t in (0.1, 0.9)]
    chosen = policy.predict(whole)
    for others in (chosen[2:4], chosen[4:]):  # a product of several rows may round each differently
        np.testing.assert_allclose(chosen[:2], others, rtol=1e-5, atol=1e-7)
    assert abs(chosen[0] - chosen[1]) > 1e-4  # it does see the clock
    without = [{name: part for name, part in row.items() if name != "hidden"} for row in whole]
    np.testing.assert_array_equal(policy.predict(without), chosen)
    algorithm: Any = policy.algorithm
    obs = torch.tensor([[0.5, 0.3, hidden, 0, 1, 0] for hidden in (-3.0, 2.5)])
    torch.testing.assert_close(*algorithm.act(obs, deterministic=True).actions)
    if algo in REPLAY:
        values = algorithm.model.q_values(obs, torch.zeros(2, 1)).reshape(-1, 2)[0]
    else:
        values = algorithm.policy.values(obs)
    assert abs(values[0].item() - values[1].item()) > 1e-4


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_the_exported_policy_has_no_input_for_it(tmp_path: Path, algo: str) -> None:
    result = train(hidden_config(algo, tmp_path, eval_episodes=0), env=HiddenScale, console=False)
    facts = export_policy(result.checkpoint_path, "torch").facts
    assert [entry["name"] for entry in facts["inputs"]] == ["obs.clock", "obs.goal"]
    assert facts["parity"]["different"] == 0
    assert facts["parity"]["distinct_actions"] > 100


@pytest.mark.parametrize("algo", ["ppo", "impala", "sac", "td3"])
def test_a_resume_is_exact(tmp_path: Path, algo: str) -> None:
    config = hidden_config(algo, tmp_path)
    assert_same_run(
        train(config, env=HiddenScale, console=False), stop_and_resume(config, 64, env=HiddenScale)
    )


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_workers_act_like_one_process(tmp_path: Path, algo: str) -> None:
    """They make the same networks; storage keeps every part."""
    workers = {"execution_backend": "local_async", "num_workers": 2}
    result = train(hidden_config(algo, tmp_path, **workers), env=HiddenScale, console=False)
    assert result.policy.spaces.critic_obs == ("hidden",)
    assert result.metrics["global_step"] == 128
    if algo == "sac":
        stored = read_replay_buffer(result.checkpoint_path).obs
        assert len(np.unique(stored[:, 2])) > 2


def value_loss(folder: Path, **settings: Any) -> float:
    kwargs = {"num_steps": 64, "minibatch_size": 64, "hidden_sizes": [32], "learning_rate": 3e-3, "gamma": 0.9}
    shows = settings.pop("shows", True)
    config = tiny(
        "ppo", folder, env_id="HiddenScale", num_envs=4, total_timesteps=10_240, eval_episodes=0,
        env_kwargs={"shows": shows}, kwargs=kwargs | {"update_epochs": 4} | settings,
    )  # fmt: skip
    rows = [row for row in rows_of(train(config, env=HiddenScale, console=False).run_dir) if "value_loss" in row]
    return float(np.mean([row["value_loss"] for row in rows[-5:]]))


def test_a_critic_that_sees_more_errs_less(tmp_path: Path) -> None:
    told, guesses = value_loss(tmp_path, **HIDDEN), value_loss(tmp_path, shows=False)
    assert told < 0.2 * guesses


def test_the_critic_alone_sees_the_part_next_to_images() -> None:
    space = gs.Dict(
        [("image", gs.Box(0, 255, (8, 8, 3), np.uint8)), ("extra", gs.Box(-1, 1, (2,))), ("speed", gs.Box(-1, 1, (3,)))]
    )
    spaces = EnvSpaces.from_gym("Mixed-v0", space, gs.Discrete(2)).with_critic_obs(["extra"])
    policy = make_policy(Params(hidden_sizes=(8,)), spaces)
    space.seed(0)
    rows = np.stack([gs.flatten(space, space.sample())] * 2)
    rows[1, 8 * 8 * 3 : 8 * 8 * 3 + 2] += 0.5
    distribution, values = policy.evaluate(torch.from_numpy(spaces.encode(rows)))
    torch.testing.assert_close(*distribution.log_probs)
    assert abs(values[0].item() - values[1].item()) > 1e-4
    rows[1, -1] += 0.5
    one, other = policy.evaluate(torch.from_numpy(spaces.encode(rows)))[0].log_probs
    assert not torch.allclose(one, other)
    encoder: Any = make_encoder(Params(), spaces)
    assert policy.actor[1].in_features == encoder.out_dim - 2


def test_passes_and_numpy_read_the_columns_like_autograd() -> None:
    torch.manual_seed(0)
    actor, critic, x = mlp(5, [8], 2, columns=[0, 3, 4]), mlp(5, [8], 1), torch.randn(6, 5)
    assert actor[1].in_features == 3
    traced = WrittenOut().trace(x, actor, critic)
    assert traced is not None
    (outputs, _), backward = traced
    torch.testing.assert_close(outputs, actor(x))
    found = backward(torch.ones(6, 2), torch.ones(6, 1))
    loss = actor(x).sum() + critic(x).sum()
    expected = torch.autograd.grad(loss, [*actor.parameters(), *critic.parameters()])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    in_numpy = numpy_step(actor)
    assert in_numpy is not None
    np.testing.assert_allclose(in_numpy(x.numpy().copy(), None), actor(x).detach(), rtol=1e-5, atol=1e-6)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("ppo", {"critic_obs": ["hiden"]}, {}, "no part 'hiden'; did you mean 'hidden'?"),
    ("sac", {"critic_obs": ["hidden", "clock", "goal"]}, {}, "which is everything; the actor of .* must see"),
    ("ppo", HIDDEN, {"env_id": "Pendulum-v1"}, "Pendulum-v1 has no Dict observation: Box"),
    ("ppo", HIDDEN | {"network": torch.nn.Linear(6, 5)}, {}, "which network does not support"),
    ("gail", HIDDEN, {}, "gail has no groups of observations"),
    ("naf", HIDDEN, {}, "unknown key 'critic_obs'"),
    ("mbpo", HIDDEN, {}, "unknown key 'critic_obs'"),
]


@pytest.mark.parametrize(("algo", "kwargs", "fields", "sentence"), REFUSED)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, algo: str, kwargs: dict[str, Any], fields: dict[str, Any], sentence: str
) -> None:
    env = None if fields else HiddenScale
    with pytest.raises(UserError, match=sentence):
        open_session(hidden_config(algo, tmp_path, kwargs=kwargs, **fields), env=env)


def test_an_image_for_the_critic_alone_is_refused() -> None:
    space = gs.Dict(image=gs.Box(0, 255, (8, 8, 3), np.uint8), speed=gs.Box(-1, 1, (3,)))
    spaces = EnvSpaces.from_gym("Mixed-v0", space, gs.Discrete(2))
    with pytest.raises(UserError, match="'image' has an image; only vectors can be for the critic alone"):
        spaces.with_critic_obs(["image"])


def test_spaces_of_earlier_checkpoints_have_no_groups() -> None:
    spaces = EnvSpaces.from_gym("Some-v0", gs.Box(-1, 1, (3,)), gs.Discrete(2))
    data = {name: value for name, value in spaces.to_dict().items() if name != "critic_obs"}
    assert EnvSpaces.from_dict(data).critic_obs == ()
    assert get_algorithm_spec("ppo").params().facts.critic_obs == ()
