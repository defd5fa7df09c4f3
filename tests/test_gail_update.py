"""GAIL's mathematics: signs, gradients, penalty, absorbing states, and that the generator is PPO as it is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import env_zoo
from resume_cases import StopAt, assert_same, assert_same_run, edit_checkpoint, stop_and_resume, take_steps, tiny
from rl_training.algorithms.gail import GAIL, REWARD_FORMS, gail_loss, penalize_gradient
from rl_training.algorithms.ppo import PPO
from rl_training.data import TransitionDataset, load_transition_dataset
from rl_training.data.rollout_store import DemonstrationStore, absorbing_steps, find_horizon
from rl_training.envs.factory import read_recipe
from rl_training.errors import UserError
from rl_training.models.blocks import ImageEncoder, ObservationInput
from rl_training.models.mlp_gail_discriminator import MLPGAILDiscriminator
from rl_training.run.build import open_session
from rl_training.run.workflows import predict_checkpoint, resume_training, train
from rollout_cases import KINDS, OBS_DIM, make_policy, make_rollout, weights_of

PPO_OPTIONS: dict[str, Any] = {"learning_rate": 1e-2, "update_epochs": 2, "minibatch_size": 8}


def make_discriminator(kind: str = "discrete", **options: Any) -> MLPGAILDiscriminator:
    torch.manual_seed(3)
    sizes = KINDS[kind]
    return MLPGAILDiscriminator(
        obs_dim=OBS_DIM, action_dim=sum(sizes), hidden_sizes=(16,), action_kind=kind, action_sizes=sizes, **options
    )


def make_gail(kind: str = "discrete", seed: int = 0, **options: Any) -> GAIL:
    absorbing = options.get("absorbing_states", False)
    ppo = PPO(policy=make_policy(kind), **PPO_OPTIONS)
    ppo.seed(seed)
    gail = GAIL(ppo=ppo, discriminator=make_discriminator(kind, absorbing_states=absorbing), **options)
    gail.seed(seed)
    return gail


def make_batch(kind: str = "discrete", **options: Any) -> dict[str, Tensor]:
    """A rollout, and an expert whose observations all lie on the other side of 0."""
    batch = make_rollout(make_policy(kind), truncates=True, **options)
    batch["obs"] = -batch["obs"].abs() - 0.1
    expert = make_rollout(make_policy(kind), seed=9)
    return batch | {"expert_obs": expert["obs"].flatten(0, 1).abs(), "expert_actions": expert["actions"].flatten(0, 1)}


# ---- signs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["discrete", "continuous", "multi_discrete"])
@pytest.mark.parametrize("form", REWARD_FORMS)
def test_what_looks_like_the_expert_gets_the_higher_reward(kind: str, form: str) -> None:
    batch = make_batch(kind)
    gail = make_gail(kind, reward_form=form, discriminator_updates=100, discriminator_learning_rate=0.01)
    metrics = gail.update(batch).metrics
    assert metrics["discriminator_accuracy"] == 1.0
    assert metrics["discriminator_loss"] < 0.2 < math.log(2)
    as_expert = {"obs": batch["expert_obs"][None], "actions": batch["expert_actions"][None]}
    assert gail.rewards(as_expert).min() > gail.rewards(batch).max()
    assert metrics["reward_mean"] == pytest.approx(gail.rewards(batch).mean().item(), rel=1e-5)


def test_the_forms_are_those_of_the_papers() -> None:
    logits = torch.linspace(-3, 3, 7)
    d = torch.sigmoid(logits)
    torch.testing.assert_close(REWARD_FORMS["softplus"](logits), -(1 - d).log())
    torch.testing.assert_close(REWARD_FORMS["log_d"](logits), d.log())
    torch.testing.assert_close(REWARD_FORMS["logit"](logits), d.log() - (1 - d).log())


def test_the_loss_is_the_cross_entropy_with_the_expert_as_1() -> None:
    expert, generated = torch.tensor([2.0, -1.0]), torch.tensor([0.5, -3.0, -1.0])
    losses = gail_loss({"expert_logits": expert, "generator_logits": generated})
    cross_entropy = nn.functional.binary_cross_entropy_with_logits
    sides = cross_entropy(expert, torch.ones(2)) + cross_entropy(generated, torch.zeros(3))
    assert losses["discriminator_loss"] == pytest.approx(0.5 * sides.item())
    assert losses["discriminator_accuracy"] == pytest.approx(0.5 * (1 / 2 + 2 / 3))


# ---- the reward and the generator ------------------------------------------------------------------------------------


def test_the_reward_carries_no_gradient_and_ppo_leaves_the_discriminator_alone() -> None:
    gail, batch = make_gail(discriminator_updates=3, discriminator_learning_rate=0.01), make_batch()
    seen: list[Tensor] = []
    learn = gail.ppo.learn

    def watched(rollout: Any) -> Any:
        seen.extend([rollout["rewards"], weights_of(gail.discriminator)])
        return learn(rollout)

    gail.ppo.learn = watched
    gail.update(batch)
    rewards, discriminator = seen
    assert not rewards.requires_grad
    assert rewards.grad_fn is None
    torch.testing.assert_close(weights_of(gail.discriminator), discriminator, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_the_generator_is_ppo_on_the_replaced_rewards_bit_for_bit(kind: str) -> None:
    gail, batch = make_gail(kind, discriminator_updates=2, discriminator_learning_rate=0.01), make_batch(kind)
    before = batch["rewards"].clone()
    metrics = gail.update(batch).metrics
    torch.testing.assert_close(batch["rewards"], before, rtol=0, atol=0)  # the caller's batch stays as it is
    ppo = PPO(policy=make_policy(kind), **PPO_OPTIONS)
    ppo.seed(0)
    expected = ppo.update({**batch, "rewards": gail.rewards(batch)}).metrics
    assert_same(dict(gail.ppo.policy.state_dict()), dict(ppo.policy.state_dict()))
    assert {name: metrics[name] for name in expected} == expected
    assert set(metrics) - set(expected) == {"discriminator_loss", "discriminator_accuracy", "reward_mean"}


def test_reset_rows_of_an_engine_are_not_paid() -> None:
    gail, batch = make_gail(discriminator_updates=2), make_batch()
    batch["valid"] = torch.ones_like(batch["truncated"])
    batch["valid"][2, 1] = False
    gail.update(batch)
    rewards = gail.rewards(batch)
    assert rewards[2, 1] == 0
    assert (rewards[batch["valid"]] > 0).all()


def test_reset_rows_of_an_engine_touch_neither_discriminator_nor_mean() -> None:
    batch = make_batch()
    batch["valid"] = torch.ones_like(batch["truncated"])
    batch["valid"][2, 1] = False
    other = {**batch, "obs": batch["obs"].clone()}
    other["obs"][2, 1] = 1e3
    one, two = (make_gail(discriminator_updates=2) for _ in range(2))
    assert one.update(batch).metrics["reward_mean"] == two.update(other).metrics["reward_mean"]
    torch.testing.assert_close(weights_of(one.discriminator), weights_of(two.discriminator), rtol=0, atol=0)


def test_without_discriminator_updates_every_pair_has_the_same_reward() -> None:
    gail, batch = make_gail(discriminator_updates=0), make_batch()
    metrics = gail.update(batch).metrics
    torch.testing.assert_close(gail.rewards(batch), torch.full((7, 3), math.log(2)))
    assert metrics["discriminator_loss"] == pytest.approx(math.log(2))
    assert metrics["discriminator_accuracy"] == 0.5


def test_schedules_move_the_numbers_of_the_learner_inside() -> None:
    gail = make_gail()
    for name in ("learning_rate", "clip_coef", "ent_coef", "gamma", "gae_lambda", "vf_coef"):
        assert gail.scheduled(name)
        gail.set_number(name, 0.125)
        assert getattr(gail.ppo, name) == 0.125
    gail.discriminator_learning_rate = 0.5
    assert gail.discriminator_optimizer.learning_rate == 0.5
    assert gail.ppo.optimizer.learning_rate == 0.125


def test_a_discriminator_step_sees_as_many_steps_of_either_side_as_it_is_told() -> None:
    gail, batch = make_gail(discriminator_updates=3, discriminator_batch_size=5), make_batch()
    sizes: list[int] = []
    gail.discriminator.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    gail.update(batch)
    assert sizes == [10] * 4 + [21]  # three steps, the losses that are reported, and the rewards of the rollout [7, 3]


# ---- gradient penalty ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "expected"), [(0.0, 1.0), (1.0, 5.0)])
def test_penalty_golden(at: float, expected: float) -> None:
    """acme `ail/losses_test.py`: D = obs + act^2 has the squared gradient norm 1 at (0, 0) and 5 at (1, 1)."""
    obs, actions = (torch.full((2, 1), at, requires_grad=True) for _ in range(2))
    logits = (obs + actions.square()).squeeze(-1)
    torch.testing.assert_close(penalize_gradient(logits, [obs, actions], target=0.0), torch.full((2,), expected))
    one_off = penalize_gradient((obs + actions.square()).squeeze(-1), [obs, actions])
    torch.testing.assert_close(one_off, torch.full((2,), (math.sqrt(expected) - 1) ** 2), rtol=1e-4, atol=1e-6)


def test_the_penalty_holds_the_slope_at_1() -> None:
    batch = make_batch("continuous")
    slopes = []
    for weight in (0.0, 10.0):
        gail = make_gail(
            "continuous", gradient_penalty=weight, discriminator_updates=300, discriminator_learning_rate=0.02
        )
        gail.update(batch)
        names = ("obs", "actions")
        both = (torch.cat([batch[f"expert_{name}"], batch[name].flatten(0, 1)]) for name in names)
        inputs = gail.discriminator.prepare(*both)
        between = gail.interpolate(inputs, len(batch["expert_obs"]), torch.rand(len(batch["expert_obs"])))
        slopes.append(penalize_gradient(gail.discriminator.logits(*between), between, target=0.0).sqrt().mean().item())
    assert slopes[1] == pytest.approx(1.0, abs=0.15)
    assert slopes[0] > 2 * slopes[1]


# ---- the network -----------------------------------------------------------------------------------------------------


def test_choices_are_one_hot_and_continuous_actions_clipped_as_the_environment_clips_them() -> None:
    obs = torch.zeros(2, OBS_DIM)
    assert make_discriminator().prepare(obs, torch.tensor([1, 0]))[1].tolist() == [[0, 1], [1, 0]]
    several = make_discriminator("multi_discrete")
    columns = several.prepare(obs, torch.tensor([[1, 0], [0, 2]]))[1]
    assert columns.shape == (2, sum(several.action_sizes))
    assert columns.sum(-1).tolist() == [2, 2]
    actions = torch.tensor([[0.5], [-7.0]])
    assert make_discriminator("continuous").prepare(obs, actions)[1].tolist() == [[0.5], [-1.0]]


def test_it_reads_images_through_the_encoder() -> None:
    discriminator = MLPGAILDiscriminator(
        obs_dim=3 * 12 * 10, action_dim=4, encoder=ImageEncoder((3, 12, 10)),
        observation_input=ObservationInput(image_scale=255.0), absorbing_states=True,
    )  # fmt: skip
    images, actions = torch.randint(256, (5, 3, 12, 10), dtype=torch.uint8), torch.tensor([0, 1, 2, 3, 0])
    assert discriminator(images, actions).shape == (5,)
    gail = GAIL(
        ppo=PPO(policy=make_policy()), discriminator=discriminator, gradient_penalty=10.0, absorbing_states=True
    )
    between = gail.interpolate(discriminator.prepare(images, actions), 2, torch.rand(2))
    assert penalize_gradient(discriminator.logits(*between), between).shape == (2,)


def test_inputs_are_normalized_by_what_both_sides_saw() -> None:
    gail, batch = make_gail(), make_batch()
    gail.discriminator.observation_input = ObservationInput(normalize_size=OBS_DIM)
    gail.update(batch)
    both = torch.cat([batch["expert_obs"], batch["obs"].flatten(0, 1)])
    norm = gail.discriminator.observation_input.norm
    assert norm is not None
    torch.testing.assert_close(norm.mean, both.mean(0))
    torch.testing.assert_close(norm.var, both.var(0, correction=0))


# ---- absorbing states ------------------------------------------------------------------------------------------------


def test_an_end_is_worth_the_absorbing_states_reward_for_ever() -> None:
    gail = make_gail(absorbing_states=True, discriminator_updates=20, discriminator_learning_rate=0.01)
    batch = make_batch()
    batch["absorbing_steps"] = torch.where(batch["terminated"], 50, 0)
    batch["expert_absorbing_steps"] = torch.zeros(len(batch["expert_obs"]), dtype=torch.long)
    gail.update(batch)
    rewards = gail.rewards(batch)
    with_ends = gail.with_ends(rewards, batch)
    absorbing = gail.discriminator(batch["expert_obs"][:1], batch["expert_actions"][:1], torch.tensor([True]))
    assert absorbing < gail.discriminator(batch["expert_obs"], batch["expert_actions"]).min()  # no expert was there
    tail = sum(gail.gamma**k for k in range(1, 3000)) * REWARD_FORMS["softplus"](absorbing).item()
    torch.testing.assert_close(with_ends[batch["terminated"]], rewards[batch["terminated"]] + tail, rtol=1e-4, atol=0)
    torch.testing.assert_close(with_ends[~batch["terminated"]], rewards[~batch["terminated"]], rtol=0, atol=0)


def test_an_expert_that_was_absorbed_makes_ends_look_like_the_expert() -> None:
    gail = make_gail(absorbing_states=True, discriminator_updates=20, discriminator_learning_rate=0.01)
    batch = make_batch()
    batch |= {f"expert_{name}": batch[name].flatten(0, 1) for name in ("obs", "actions")}  # nothing else differs
    batch["absorbing_steps"] = torch.zeros_like(batch["terminated"], dtype=torch.long)
    batch["expert_absorbing_steps"] = torch.full((len(batch["expert_obs"]),), 5)
    gail.update(batch)
    absorbing = gail.discriminator(batch["obs"][0, :1], batch["actions"][0, :1], torch.tensor([True]))
    assert absorbing > 0.5 + gail.discriminator(batch["expert_obs"], batch["expert_actions"]).max()


def test_dones_alone_mean_terminated() -> None:
    batch = make_batch()
    del batch["truncated"], batch["truncation_values"]
    batch |= {"absorbing_steps": torch.where(batch["terminated"], 50, 0)}
    batch |= {"expert_absorbing_steps": torch.zeros(len(batch["expert_obs"]), dtype=torch.long)}
    plain = {**batch, "dones": batch["terminated"].float()}
    del plain["terminated"]
    one, two = (make_gail(absorbing_states=True) for _ in range(2))
    assert one.update(batch).metrics == two.update(plain).metrics
    torch.testing.assert_close(weights_of(one.ppo.policy), weights_of(two.ppo.policy), rtol=0, atol=0)


def test_the_horizon_counts_steps_where_the_limit_counts_frames() -> None:
    expert = load_transition_dataset("random", env_id="CartPole-v1", size=40)
    kwargs = {"frameskip": 1, "max_episode_steps": 1001, "wrappers": {"atari": {"frame_skip": 4}}}
    assert find_horizon(read_recipe("ALE/Breakout-v5", kwargs), expert) == 251
    assert find_horizon(read_recipe("CartPole-v1", {"max_episode_steps": 30}), expert) == 30
    assert find_horizon(read_recipe("env_zoo:Walk", {}), expert) == expert.episode_lengths.max()


def test_the_absorbing_row_forgets_where_it_came_from() -> None:
    discriminator = make_discriminator("continuous", absorbing_states=True)
    ended = torch.tensor([True, True, False])
    obs, actions = discriminator.prepare(torch.randn(3, OBS_DIM), torch.rand(3, 1), ended)
    assert not obs[:2].any()
    assert actions[:2].tolist() == [[0, 1], [0, 1]]
    assert actions[2, -1] == 0


def test_steps_until_the_horizon_are_counted_after_terminations_only() -> None:
    terminated = np.array([[False, True], [True, False], [False, False]])
    truncated = np.array([[False, False], [False, True], [False, False]])
    steps = absorbing_steps(terminated, truncated, np.array([3, 7, 20]), horizon=10)
    assert steps.tolist() == [[0, 7], [3, 0], [0, 0]]


@pytest.mark.parametrize("vectorization", ["native", "sync"])
def test_the_store_counts_what_its_episodes_left(tmp_path: Path, vectorization: str) -> None:
    kwargs = {"absorbing_states": True, "num_steps": 64}
    config = tiny("gail", tmp_path, num_envs=4, vectorization=vectorization, kwargs=kwargs)
    session = open_session(config)
    store = session.store
    assert isinstance(store, DemonstrationStore)
    take_steps(session, 0)
    ((_, batch),) = store.batches(session.algorithm, 0)
    session.close()
    assert store.horizon == 500
    collected = store.experience
    assert len(collected.episodes) > 3
    assert int(batch["absorbing_steps"].sum()) == sum(500 - episode.length for episode in collected.episodes)
    assert (batch["absorbing_steps"] > 0).equal(batch["terminated"])
    expert = store.expert
    ended = np.diff(np.flatnonzero(expert.terminated), prepend=-1)
    assert int(batch["expert_absorbing_steps"].sum()) == sum(500 - length for length in ended)


@pytest.mark.parametrize(
    ("env_name", "absorbing", "worth"),
    [
        ("AlwaysTruncates", False, 10.0),
        ("AlwaysTerminates", True, 10.0),  # to end and to go on are the same to a discriminator that knows nothing
        ("AlwaysTerminates", False, 3.3),
    ],
)
def test_a_constant_reward_is_worth_its_future(tmp_path: Path, env_name: str, absorbing: bool, worth: float) -> None:
    kwargs = {
        "gamma": 0.9, "learning_rate": 0.02, "max_grad_norm": None, "num_steps": 16, "minibatch_size": 64,
        "update_epochs": 4, "hidden_sizes": [16], "discriminator_updates": 0, "absorbing_states": absorbing,
    }  # fmt: skip
    config = tiny(
        "gail", tmp_path, env_id=f"env_zoo:{env_name}", env_kwargs={"length": 5}, num_envs=4, total_timesteps=6_000,
        eval_episodes=0, log_interval=1000, kwargs=kwargs,
    )  # fmt: skip
    algorithm: Any = train(config, console=False).policy.algorithm
    observation, _ = getattr(env_zoo, env_name)().reset()
    value = algorithm.ppo.policy.values(torch.from_numpy(np.asarray(observation))[None]).item()
    assert value == pytest.approx(worth * math.log(2), rel=0.15 if worth == 10.0 else 0.4)


# ---- the expert ------------------------------------------------------------------------------------------------------


def test_the_expert_may_be_a_checkpoint_of_ours(tmp_path: Path) -> None:
    expert = train(tiny("ppo", tmp_path, total_timesteps=16, eval_episodes=0, threads=2), console=False)
    kwargs = {"expert_dataset_kind": "checkpoint", "expert_checkpoint": str(expert.checkpoint_path)}
    config = tiny("gail", tmp_path, kwargs=kwargs, threads=1, total_timesteps=64)
    session = open_session(config)
    store = session.store
    session.close()
    assert isinstance(store, DemonstrationStore)
    assert torch.get_num_threads() == 1
    assert len(store.expert) == 64
    assert store.expert.metadata["policy"] == "ppo"
    assert f"from the policy in {expert.checkpoint_path}" in store.describe()
    assert_same_run(train(config, console=False), stop_and_resume(config, 32))


def test_another_expert_is_refused_on_resume(tmp_path: Path) -> None:
    dataset = load_transition_dataset("random", env_id="CartPole-v1", size=40)
    path = dataset.save_npz(tmp_path / "expert.npz")
    kwargs = {"expert_dataset_kind": "npz", "expert_dataset_path": str(path), "expert_dataset_size": None}
    stopped = train(tiny("gail", tmp_path, kwargs=kwargs), callbacks=[StopAt(64)], console=False)
    TransitionDataset(**{**dataset.arrays(), "actions": 1 - dataset.actions}).save_npz(path)
    with pytest.raises(UserError, match="expert's data is not what the checkpoint was trained with"):
        resume_training(stopped.checkpoint_path, console=False)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"expert_dataset_kind": "npz"}, "expert_dataset_path is missing"),
        ({"expert_dataset_kind": "minari"}, "expert_dataset_id is missing"),
        ({"expert_dataset_kind": "checkpoint"}, "expert_checkpoint is missing"),
        (
            {"expert_dataset_kind": "npz", "expert_dataset_path": "absent.npz"},
            r"^expert_dataset_path is absent\.npz, which does not exist",
        ),
        (
            {"expert_dataset_kind": "checkpoint", "expert_checkpoint": "absent.ckpt"},
            r"^expert_checkpoint is absent\.ckpt, which does not exist",
        ),
        (
            {"expert_dataset_kind": "npz", "expert_dataset_path": "cartpole_expert.npz", "expert_dataset_size": 5001},
            "^expert_dataset_size is 5001, but cartpole_expert.npz has only 5000 rows",
        ),
        (
            {"expert_checkpoint": "some.ckpt"},
            "expert_checkpoint is 'some.ckpt', but expert_dataset_kind is 'random'.*expert_dataset_kind to checkpoint",
        ),
        (
            {"expert_dataset_path": "some.npz"},
            "expert_dataset_path is 'some.npz', but expert_dataset_kind is 'random'.*set expert_dataset_kind to npz",
        ),
        (
            {"expert_dataset_kind": "npz", "expert_dataset_path": "cartpole_expert.npz", "expert_checkpoint": "x.ckpt"},
            "expert_checkpoint is 'x.ckpt', but expert_dataset_kind is 'npz'",
        ),
        ({"expert_dataset_kind": "npz", "expert_dataset_path": "pendulum_expert.npz"}, "does not fit CartPole-v1"),
        ({"absorbing_states": True, "gamma": 1.0}, "gamma is 1; with absorbing_states it must be below"),
        (
            {"absorbing_states": True, "gamma_schedule": {"type": "linear", "start": 0.9, "end": 1.0}},
            "gamma_schedule: gamma is 1; with absorbing_states",
        ),
        (
            {"absorbing_states": True, "gamma_schedule": {"type": "constant", "start": 1.0}},
            "gamma_schedule: gamma is 1; with absorbing_states",
        ),
    ],
)
def test_an_expert_that_is_not_there_or_does_not_fit_is_one_sentence(
    tmp_path: Path, kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        open_session(tiny("gail", tmp_path, kwargs=kwargs))


@pytest.mark.parametrize(
    ("env_id", "kwargs", "warns"),
    [
        ("CartPole-v1", {}, True),
        ("CartPole-v1", {"absorbing_states": True}, False),
        ("CartPole-v1", {"expert_dataset_kind": "npz", "expert_dataset_path": "cartpole_expert.npz"}, True),
        ("Pendulum-v1", {}, False),
    ],
)
def test_survival_bias_is_warned_of_where_episodes_can_end_early(
    tmp_path: Path, env_id: str, kwargs: dict[str, Any], warns: bool
) -> None:
    session = open_session(tiny("gail", tmp_path, env_id=env_id, kwargs=kwargs))
    store = session.store
    session.close()
    assert ("survival bias" in store.describe()) == warns


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (64, "64 expert steps in one incomplete episode, from cartpole_expert.npz"),
        (500, "500 expert steps in 1 episode of return 500.0, from cartpole_expert.npz"),
        (1100, "1,100 expert steps in 2 episodes of return 500.0 and one incomplete episode, from cartpole_expert.npz"),
    ],
)
def test_the_start_says_what_the_expert_is(tmp_path: Path, size: int, said: str) -> None:
    kwargs = {"expert_dataset_kind": "npz", "expert_dataset_path": "cartpole_expert.npz", "expert_dataset_size": size}
    for env_id, note in (("CartPole-v1", ""), ("CartPole-v0", " (note: recorded in CartPole-v1, not in CartPole-v0)")):
        config = tiny("gail", tmp_path, env_id=env_id, kwargs={**kwargs, "absorbing_states": True})
        session = open_session(config)
        store = session.store
        session.close()
        assert store.describe().endswith(said + note)
    session = open_session(tiny("gail", tmp_path, kwargs={"absorbing_states": True}))
    store = session.store
    session.close()
    assert store.describe().endswith("from random play")


@pytest.mark.parametrize("kwargs", [{"absorbing_states": True, "gradient_penalty": 10.0}, {"reward_form": "logit"}])
def test_its_options_resume_exactly(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    config = tiny("gail", tmp_path, num_envs=4, kwargs=kwargs)
    assert_same_run(train(config, console=False), stop_and_resume(config, 64))


def test_a_checkpoint_of_a_gpu_is_read_on_a_cpu(tmp_path: Path) -> None:
    """A generator's state is of its device: the learner's own and that of the one inside are not taken over."""
    result = train(tiny("gail", tmp_path, total_timesteps=16, eval_episodes=0), console=False)

    def move(tree: dict[str, Any]) -> None:
        for name in ("_extra_state", "ppo._extra_state"):
            tree["algorithm"][name] |= {"device": "cuda", "generator": torch.zeros(16, dtype=torch.uint8)}

    path = edit_checkpoint(result.checkpoint_path, tmp_path / "cuda.ckpt", move)
    assert predict_checkpoint(path, np.zeros(4)) == predict_checkpoint(result.checkpoint_path, np.zeros(4))


def test_a_truncated_episode_does_not_stay_in_the_absorbing_state() -> None:
    """However early it was cut."""
    terminated, truncated = np.array([[False], [False], [True]]), np.array([[False], [True], [False]])
    assert absorbing_steps(terminated, truncated, np.array([2, 1]), horizon=10).tolist() == [[0], [0], [9]]
    assert absorbing_steps(terminated, truncated, np.array([2, 12]), horizon=10).tolist() == [[0], [0], [0]]


def test_the_mean_reward_is_that_of_the_rows_that_are_no_resets() -> None:
    gail, batch = make_gail(discriminator_updates=2), make_batch()
    batch["valid"] = torch.ones_like(batch["truncated"])
    batch["valid"][2:5, 1] = False
    found = gail.update(batch).metrics["reward_mean"]
    logits = gail.discriminator(batch["obs"][batch["valid"]], batch["actions"][batch["valid"]])
    assert found == pytest.approx(logits.exp().log1p().mean().item(), rel=1e-5)  # 18 rows, each -log(1 - D)
