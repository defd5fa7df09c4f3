"""What a rollout holds: true values at truncations, the behaviour policy's log-probabilities, no reset rows, no masked
actions; and which policy acts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import env_zoo
from resume_cases import take_steps
from rl_training.config.train_config import TrainConfig
from rl_training.experiment.registry import get_algorithm_spec, list_algorithm_specs
from rl_training.models.blocks import ImageEncoder, ObservationInput
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.run.build import Session, open_session
from rl_training.run.workflows import train

ROLLOUT_NAMES = [spec.name for spec in list_algorithm_specs() if spec.lane == "rollout"]
SMALL = {"num_steps": 16, "hidden_sizes": [8]}


def config(env_id: str, algo: str = "ppo", *, algo_kwargs: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
    return TrainConfig(
        **{"algo": algo, "env_id": env_id, "total_timesteps": 100, "device": "cpu", "eval_episodes": 0, "num_envs": 3,
           "threads": 1, "seed": 5, "algo_kwargs": {**SMALL, **(algo_kwargs or {})}, **changes}
    )  # fmt: skip


@contextmanager
def opened(env_id: str, algo: str = "ppo", **changes: Any) -> Iterator[Session]:
    session = open_session(config(env_id, algo, **changes))
    try:
        yield session
    finally:
        session.close()


def collect(session: Session) -> tuple[Any, dict[str, torch.Tensor]]:
    store: Any = session.store
    take_steps(session, 0)
    ((_, batch),) = store.batches(session.algorithm, 0)
    return store.experience, {name: tensor.clone() for name, tensor in batch.items()}


def values_of(session: Session, obs: Any) -> Any:
    with torch.no_grad():
        return policy_of(session).values(torch.as_tensor(obs)).numpy()


def policy_of(session: Session) -> Any:
    return session.algorithm.policy


# ---- values and log-probabilities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["tanh", "elu"])  # acting in numpy, and in torch
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_truncation_values_are_the_values_of_the_final_observations(vectorization: str, activation: str) -> None:
    """In the walk the final observation is known from the reward (its position) and the time limit."""
    kwargs: dict[str, Any] = {"env_kwargs": {"length": 4}, "vectorization": vectorization}
    with opened("env_zoo:Walk", algo_kwargs={"activation": activation}, **kwargs) as session:
        for _ in range(2):  # the second rollout must not read what the first one left
            _, batch = collect(session)
            where = batch["truncated"] & ~batch["terminated"]
            assert where.sum() >= 3
            positions = batch["rewards"][where]
            finals = torch.stack([positions, torch.full_like(positions, 4.0)], 1)
            assert np.allclose(batch["truncation_values"][where], values_of(session, finals), atol=1e-6)


def test_truncation_values_of_vector_code_are_the_values_of_the_final_observations() -> None:
    with opened("CartPole-v1", vectorization="native", env_kwargs={"max_episode_steps": 5}) as session:
        _, batch = collect(session)
        where = batch["truncated"]
        assert where.sum() >= 6
        following = torch.cat([batch["obs"][1:], torch.as_tensor(session.store.experience.obs[-1:])])  # type: ignore[attr-defined]
        assert np.allclose(batch["truncation_values"][where], values_of(session, following[where]), atol=1e-6)
        assert (batch["valid"][1:] == ~(batch["truncated"] | batch["terminated"])[:-1]).all()


def test_native_atari_values_and_stores_the_final_observations_of_truncated_episodes() -> None:
    """Its emulators reset in the same step, so the next row is of another episode."""
    pytest.importorskip("ale_py")
    wrappers = {"atari": {"noop_max": 0, "screen_size": 40, "frame_stack": 2}}
    env_kwargs = {"frameskip": 1, "repeat_action_probability": 0.0, "max_episode_steps": 20, "wrappers": wrappers}
    found: list[list[Any]] = []
    for vectorization in ("sync", "native"):
        kwargs: dict[str, Any] = {"env_kwargs": env_kwargs, "vectorization": vectorization, "num_envs": 1}
        with opened("ALE/Breakout-v5", **kwargs) as session:
            _, batch = collect(session)
        assert batch["truncated"].sum() >= 3
        replay = {"learning_starts": 99, "buffer_capacity": 99, "batch_size": 9, "train_frequency": 12}
        settings = config("ALE/Breakout-v5", "dqn", **kwargs).model_copy(update={"algo_kwargs": replay})
        with closing(open_session(settings)) as session:
            take_steps(session, 0)
            transitions = session.store.buffer.transitions()  # type: ignore[attr-defined]
        found.append([batch["truncation_values"][batch["truncated"]], *transitions.values()])
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


EVERY_KIND = [
    "CartPole-v1", "Pendulum-v1", "env_zoo:MultiDiscreteActions", "env_zoo:MultiBinaryActions", "env_zoo:Masked",
    "env_zoo:MaskedFactors", "env_zoo:MinAtarLike", "env_zoo:Image", "env_zoo:DictObservation",
]  # fmt: skip


@pytest.mark.parametrize("env_id", EVERY_KIND)
@pytest.mark.parametrize("activation", ["tanh", "elu"])
def test_stored_logprobs_and_values_are_the_policys(env_id: str, activation: str) -> None:
    with opened(env_id, vectorization="sync", algo_kwargs={"activation": activation}) as session:
        _, batch = collect(session)
        rows = {name: batch[name].flatten(0, 1) for name in ("obs", "actions", "logprobs", "values")}
        masks = batch["action_masks"].flatten(0, 1) if "action_masks" in batch else None
        with torch.no_grad():
            found = policy_of(session).evaluate_actions(rows["obs"], rows["actions"], masks)
        assert torch.allclose(rows["logprobs"], found.logprobs, atol=1e-5)
        assert torch.allclose(rows["values"], found.values, atol=1e-5)
        last = values_of(session, session.store.experience.obs[-1])  # type: ignore[attr-defined]
        assert np.allclose(batch["bootstrap_value"], last, atol=1e-5)
        assert torch.equal(batch["behavior_logprobs"], batch["logprobs"])


# ---- reset rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("algo", ROLLOUT_NAMES)
def test_what_stands_in_a_reset_row_changes_nothing(algo: str, normalize: bool) -> None:
    """Garbage in every row that is not valid: the same parameters, normalizers and moments, bit for bit."""
    wrappers = {"normalize_observation": True, "normalize_reward": True} if normalize else {}
    env_kwargs = {"max_episode_steps": 7, "wrappers": wrappers}
    states = []
    for garbage in (False, True):
        with opened("CartPole-v1", algo, vectorization="native", env_kwargs=env_kwargs) as session:
            _, batch = collect(session)
            invalid = ~batch["valid"]
            assert invalid.sum() >= 3
            if garbage:
                for name in ("obs", "values", "logprobs", "behavior_logprobs", "truncation_values"):
                    rows = invalid.clone()
                    if name == "obs" and "values" not in batch:  # after a truncation it is the final one, to be valued
                        rows[1:] &= ~batch["truncated"][:-1]
                    if name in batch:
                        batch[name][rows] = torch.randn_like(batch[name][rows]) * 3
                if not normalize:  # an engine's reset row has reward 0, and the running return counts on it
                    batch["rewards"][invalid] = 3.0
                batch["actions"][invalid] = 1 - batch["actions"][invalid]
            session.algorithm.update(batch)
            states.append(session.algorithm.state_dict())
    for name, tensor in states[0].items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, states[1][name]), name


def test_a_rollout_of_reset_rows_alone_gives_no_update(tmp_path: Path) -> None:
    """Episodes of one step: every second row only resets, and rollouts of one step are then empty."""
    result = train(
        config("CartPole-v1", "a2c", vectorization="native", num_envs=2, total_timesteps=10, output_dir=str(tmp_path),
               env_kwargs={"max_episode_steps": 1}, algo_kwargs={"num_steps": 1})
    )  # fmt: skip
    assert result.metrics["global_step"] == 10
    assert result.metrics["updates"] == 5


# ---- counting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [1, 2, 5])
def test_every_step_of_the_environments_is_counted_once(num_envs: int, tmp_path: Path) -> None:
    env_zoo.CountsSteps.steps = 0
    result = train(config("env_zoo:CountsSteps", num_envs=num_envs, total_timesteps=160, output_dir=str(tmp_path)))
    assert result.metrics["global_step"] == env_zoo.CountsSteps.steps == 160


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_steps_and_episodes_add_up(vectorization: str) -> None:
    """All steps are in finished episodes, or in those that still run."""
    with opened("CartPole-v1", vectorization=vectorization, algo_kwargs={"num_steps": 200}) as session:
        collected, batch = collect(session)
        running = session.collector.stepper.lengths.sum()  # type: ignore[attr-defined]
        assert collected.transitions == sum(episode.length for episode in collected.episodes) + running
        assert batch["rewards"].sum() == collected.transitions
        assert len(collected.episodes) == (batch["terminated"] | batch["truncated"]).sum()


# ---- acting ----------------------------------------------------------------------------------------------------------


def make_policy(kind: str, sizes: tuple[int, ...], *, normalize: bool = False) -> MLPActorCritic:
    torch.manual_seed(0)
    policy = MLPActorCritic(
        obs_dim=3, action_dim=sum(sizes), hidden_sizes=(16,), action_kind=kind, action_sizes=sizes,
        observation_input=ObservationInput(normalize_size=3 if normalize else None),
    )  # fmt: skip
    with torch.no_grad():
        policy.actor[-1].weight.mul_(100.0)  # type: ignore[operator]  # logits that are not all alike
    policy.observation_input.update(torch.randn(50, 3) * 4 + 1)
    return policy


KINDS = [("discrete", (4,)), ("continuous", (1, 1)), ("multi_discrete", (2, 3)), ("multi_binary", (2, 2))]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("kind", "sizes"), KINDS)
def test_numpy_acting_is_torch_acting(kind: str, sizes: tuple[int, ...], normalize: bool) -> None:
    policy = make_policy(kind, sizes, normalize=normalize)
    act = policy.numpy_policy()
    assert act is not None
    obs = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    rng = np.random.default_rng(1)
    greedy = policy.act(torch.from_numpy(obs), deterministic=True).actions.detach().numpy()
    assert np.allclose(act(obs, None, rng, True), greedy, atol=1e-5)
    many = np.repeat(obs[:1], 20_000, 0)
    sampled = act(many, None, rng, False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        drawn = policy.act(torch.from_numpy(many), generator=generator).actions.numpy()
    assert sampled.shape == drawn.shape
    assert np.allclose(sampled.mean(0), drawn.mean(0), atol=0.03)
    assert np.allclose(sampled.std(0), drawn.std(0), atol=0.03)
    if kind == "discrete":
        with torch.no_grad():
            truth = policy.distribution(torch.from_numpy(obs[:1])).log_probs.exp()[0].numpy()  # type: ignore[attr-defined]
        for actions in (sampled, drawn):
            assert np.allclose(np.bincount(actions, minlength=4) / 20_000, truth, atol=0.015)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("kind", "sizes"), [("discrete", (4,)), ("multi_discrete", (2, 3)), ("multi_binary", (2, 2))])
def test_a_masked_action_is_never_taken(kind: str, sizes: tuple[int, ...], deterministic: bool) -> None:
    policy = make_policy(kind, sizes)
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(5_000, 3)).astype(np.float32)
    masks = rng.random((5_000, sum(sizes))) < 0.5
    ends = np.cumsum(sizes)
    for end, size in zip(ends, sizes, strict=True):  # at least one legal choice per factor
        masks[np.arange(5_000), end - size + rng.integers(0, size, 5_000)] = True
    act = policy.numpy_policy()
    assert act is not None
    with torch.no_grad():
        out = policy.act(
            torch.from_numpy(obs), deterministic=deterministic, action_masks=torch.from_numpy(masks),
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
    for actions in (act(obs, masks, rng, deterministic), out.actions.numpy()):
        columns = actions.reshape(5_000, -1)
        for factor, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            assert masks[np.arange(5_000), end - size + columns[:, factor]].all()
    assert (out.logprobs > -50).all()


@pytest.mark.parametrize("env_id", ["env_zoo:Masked", "env_zoo:MaskedFactors"])
@pytest.mark.parametrize("algo", ROLLOUT_NAMES)
def test_masks_hold_in_training_and_evaluation(algo: str, env_id: str, tmp_path: Path) -> None:
    """These environments raise at an illegal action."""
    if env_id == "env_zoo:MaskedFactors" and "multi_discrete" not in get_algorithm_spec(algo).action_kinds:
        pytest.skip(f"{algo} has one choice only")
    result = train(config(env_id, algo, output_dir=str(tmp_path), eval_episodes=3))
    assert result.metrics["eval_episodes"] == 3


def test_image_encoder_fits_the_size_of_the_image() -> None:
    for shape in ((1, 3, 3), (4, 10, 10), (3, 12, 10), (1, 35, 50), (3, 36, 36), (4, 84, 84)):
        encoder = ImageEncoder(shape)
        assert encoder(torch.zeros(2, *shape)).shape == (2, encoder.out_dim)


# ---- whose policy acts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["tanh", "elu"])
def test_policy_lag_acts_with_the_weights_of_that_many_updates_ago(activation: str) -> None:
    with opened("CartPole-v1", algo_kwargs={"policy_lag": 2, "activation": activation}) as session:
        algorithm: Any = session.algorithm
        collector: Any = session.collector
        history = []
        for update in range(5):
            history.append({name: tensor.clone() for name, tensor in algorithm.policy.state_dict().items()})
            _, batch = collect(session)
            actor = collector.actor.algorithm.policy
            behind = actor.state_dict()
            wanted = history[max(0, update - 2)]
            assert all(torch.equal(behind[name], wanted[name]) for name in wanted)
            obs, actions = batch["obs"].flatten(0, 1), batch["actions"].flatten(0, 1)
            logprobs = actor.evaluate_actions(obs, actions).logprobs.detach()
            assert torch.allclose(logprobs, batch["logprobs"].flatten(), atol=1e-5)
            assert np.allclose(values_of(session, obs), batch["values"].flatten(), atol=1e-5)  # the learner's own
            algorithm.update(batch)
        assert not torch.equal(history[0]["actor.0.weight"], history[1]["actor.0.weight"])


def test_a_resumed_collector_still_lags(tmp_path: Path) -> None:
    """Even when its state is saved and loaded once more before it collects."""
    with opened("CartPole-v1", algo_kwargs={"policy_lag": 2}) as session:
        for _ in range(4):
            _, batch = collect(session)
            session.algorithm.update(batch)
        state, weights = session.source_state(), session.algorithm.state_dict()
        with opened("CartPole-v1", algo_kwargs={"policy_lag": 2}) as middle:
            middle.load_source(state)
            state = middle.source_state()
        with opened("CartPole-v1", algo_kwargs={"policy_lag": 2}) as resumed:
            resumed.algorithm.load_state_dict(weights)
            assert resumed.load_source(state) == []
            _, again = collect(resumed)
        _, batch = collect(session)
    for name, tensor in batch.items():
        assert torch.equal(tensor, again[name]), name


@pytest.mark.parametrize("algo", ["impala", "appo"])
def test_vtrace_learners_get_the_observations_at_the_ends_and_value_them_while_they_learn(
    algo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights move between two epochs, so values that came with the batch would be old in the second."""
    kwargs = {"learning_rate": 0.1, "optimizer": "sgd"} | ({"update_epochs": 2} if algo == "appo" else {})
    with opened("env_zoo:Walk", algo, algo_kwargs=kwargs, env_kwargs={"length": 4}, vectorization="sync") as session:
        learner: Any = session.algorithm
        experience, batch = collect(session)
        assert not {"values", "bootstrap_value", "truncation_values"} & set(batch)
        assert np.array_equal(batch["bootstrap_obs"], experience.obs[-1])
        cut = experience.truncated
        assert cut.sum() >= 3
        assert np.array_equal(batch["final_obs"][cut], experience.final_obs[cut])
        successors, seen = learner.successor_values, []

        def watched(values: torch.Tensor, rows: Any) -> torch.Tensor:
            found = successors(values, rows)
            seen.append((found[-1], torch.as_tensor(values_of(session, experience.obs[-1])), rows["truncated"][-1]))
            return found

        monkeypatch.setattr(learner, "successor_values", watched)
        learner.update(batch)
    assert len(seen) == kwargs.get("update_epochs", 1)
    for found, now, truncated in seen:
        torch.testing.assert_close(found[~truncated], now[~truncated])
    if algo == "appo":
        assert not torch.allclose(seen[0][1], seen[1][1])


# ---- a new policy, and observations far away -------------------------------------------------------------------------


def test_a_new_policy_is_nearly_uniform_behind_orthogonal_layers() -> None:
    """Hidden layers with gain sqrt(2), the actor's last layer with 0.01 and the critic's with 1; deviations are 1."""
    policy = MLPActorCritic(obs_dim=3, action_dim=2, hidden_sizes=(16, 8), action_kind="continuous")
    for part, last_gain in ((policy.actor, 0.01), (policy.critic, 1.0)):
        layers = [layer for layer in part if isinstance(layer, torch.nn.Linear)]
        for layer, gain in zip(layers, (2.0**0.5, 2.0**0.5, last_gain), strict=True):
            assert not layer.bias.any()
            lengths = torch.linalg.svdvals(layer.weight.detach())
            torch.testing.assert_close(lengths, torch.full_like(lengths, gain), rtol=1e-4, atol=1e-6)
    assert policy.log_std is not None
    assert not policy.log_std.any()
    chooses = MLPActorCritic(obs_dim=3, action_dim=4, hidden_sizes=(16,))
    log_probs: Any = chooses.distribution(10 * torch.randn(50, 3)).log_probs  # type: ignore[attr-defined]
    assert (log_probs.exp() - 0.25).abs().max() < 0.02


def test_a_normalized_observation_is_at_most_ten_deviations_away() -> None:
    """In torch and in numpy alike."""
    policy = make_policy("continuous", (1, 1), normalize=True)
    norm = policy.observation_input.norm
    assert norm is not None
    mean, deviation = norm.mean.clone(), norm.var.sqrt()
    far = mean + deviation * torch.tensor([[9.0, 50.0, -1e6]])
    torch.testing.assert_close(policy.observation_input(far), torch.tensor([[9.0, 10.0, -10.0]]), rtol=1e-4, atol=1e-4)
    act = policy.numpy_policy()
    assert act is not None
    greedy = act(far.numpy(), None, np.random.default_rng(0), True)
    held = mean + deviation * torch.tensor([[9.0, 10.0, -10.0]])
    np.testing.assert_allclose(greedy, act(held.numpy(), None, np.random.default_rng(0), True), atol=1e-4)
