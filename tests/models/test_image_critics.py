"""Actors and critics on images: an encoder each, trained by its own loss, and in the targets too."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from env_zoo import DotToTarget
from registry_contract import OBSERVATIONS, kind_config
from resume_cases import assert_same_run, stop_and_resume, tiny
from rl_training.config.params import Schedule
from rl_training.config.spec import get_algorithm_spec
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.models.mlp_ddpg import ReturningTanh
from rl_training.play import play
from rl_training.run.learner import build_algorithm
from rl_training.run.workflows import train

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from image_actors import RESULTS, ROOT, format_table, image_config

ALGORITHMS = ("sac", "td3", "ddpg", "d4pg", "rlpd")
DETERMINISTIC = ("td3", "ddpg", "d4pg")
SPACES = EnvSpaces.from_gym("Dot-v0", DotToTarget.observation_space, DotToTarget.action_space)
BATCH = {
    "obs": torch.randint(256, (4, 2, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
    "next_obs": torch.randint(256, (4, 2, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)),
    "actions": torch.zeros(4, 1), "rewards": torch.ones(4), "dones": torch.zeros(4),
}  # fmt: skip


def make(algo: str, **kwargs: Any) -> Any:
    spec = get_algorithm_spec(algo)
    params = spec.params(hidden_sizes=(8,), **kwargs)
    return build_algorithm(spec, params, SPACES, seed=0, device="cpu")


def snapshot(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_each_loss_trains_its_own_encoder(algo: str) -> None:
    """One optimizer stands still, so that whatever moves was moved by the other."""
    for moving, still in (("actor", "critics"), ("critics", "actor")):
        rates = {"actor_learning_rate": 0.0, "critic_learning_rate": 0.0}
        learner = make(algo, **{**rates, f"{moving.removesuffix('s')}_learning_rate": 0.1})
        parts = {name: getattr(learner.model, name).encoder for name in (moving, still)}
        before = {name: snapshot(part) for name, part in parts.items()}
        for _ in range(40):  # an actor step may come after several critic steps
            learner.update(BATCH)
        assert not torch.equal(snapshot(parts[moving]), before[moving])
        assert torch.equal(snapshot(parts[still]), before[still])


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_targets_have_an_encoder_that_follows(algo: str) -> None:
    learner = make(algo, tau=1.0, learning_rate=0.1)
    target = learner.target_critics if hasattr(learner, "target_critics") else learner.target_network.critics
    before = snapshot(target.encoder)
    for _ in range(2):  # TD3's targets move with its actor
        learner.update(BATCH)
    online = snapshot(learner.model.critics.encoder)
    assert not torch.equal(before, online)
    assert torch.equal(snapshot(target.encoder), online)
    assert not any(p.requires_grad for p in target.encoder.parameters())


def test_without_images_there_is_no_encoder() -> None:
    spec = get_algorithm_spec("sac")
    spaces = EnvSpaces.from_gym("X-v0", *(DotToTarget.action_space,) * 2)
    model: Any = build_algorithm(spec, spec.params(), spaces, seed=0, device="cpu").model
    assert model.actor.encoder is model.critics.encoder is None


@pytest.mark.parametrize(("algo", "observation"), [("sac", "image"), ("td3", "mixed"), ("naf", "image")])
def test_a_resumed_run_is_the_run_that_never_stopped(algo: str, observation: str, tmp_path: Path) -> None:
    config = kind_config(algo, tmp_path, "continuous", observation)
    assert_same_run(train(config, console=False), stop_and_resume(config, 32))


@pytest.mark.parametrize("observation", ["image", "mixed"])
@pytest.mark.parametrize("algo", [*DETERMINISTIC, "sac"])
def test_deterministic_actors_and_their_critics_see_bounded_features(algo: str, observation: str) -> None:
    """As in DrQ-v2: a layer of 50, LayerNorm and tanh behind the convolutions."""
    spec = get_algorithm_spec(algo)
    spaces = EnvSpaces.from_gym("X-v0", OBSERVATIONS[observation], DotToTarget.action_space)
    model: Any = build_algorithm(spec, spec.params(hidden_sizes=(8,)), spaces, seed=0, device="cpu").model
    for network in (model.actor, model.critics):
        encoder = network.encoder if observation == "image" else network.encoder.images[0]
        images = torch.rand(4, *spaces.obs_shape) if observation == "image" else torch.rand(4, 3, 6, 5)
        features = encoder(images)
        if algo == "sac":
            assert features.shape == (4, 128)
            continue
        linear = torch.nn.Sequential(*list(encoder)[:4])
        wanted = torch.nn.functional.layer_norm(linear(images), (50,)).tanh()
        torch.testing.assert_close(features, wanted)


def test_only_the_way_to_a_bound_is_slowed_down() -> None:
    x = torch.tensor([0.5, 0.5, -0.5, -0.5, 20.0, 20.0, 0.0], requires_grad=True)
    actions = ReturningTanh.apply(x)
    assert torch.equal(actions, x.tanh())
    downhill = torch.tensor([-2.0, 2.0, 2.0, -2.0, -2.0, 2.0, 2.0])  # steps go against it
    (slopes,) = torch.autograd.grad(actions, x, downhill)
    slowed = 2.0 * (1.0 - math.tanh(0.5) ** 2)
    torch.testing.assert_close(slopes, torch.tensor([-slowed, 2.0, slowed, -2.0, 0.0, 2.0, 2.0]))


@pytest.mark.parametrize("algo", DETERMINISTIC)
def test_an_actor_at_a_bound_in_all_states_comes_back(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A critic that knows nothing yet drives it there within 50 steps; tanh is 1 exactly, so it has no gradient."""
    learner = make(algo, actor_learning_rate=0.1)
    actor = learner.model.actor
    torch.nn.init.constant_(actor.network[-2].bias, 12.0)
    assert torch.equal(actor(BATCH["obs"]), torch.ones(4, 1))
    monkeypatch.setattr(learner.model, "q_values", lambda obs, actions: -(actions + 0.5).square().sum(-1))
    for _ in range(200):
        learner.actor_step(BATCH["obs"], BATCH["actions"])
    torch.testing.assert_close(actor(BATCH["obs"]), torch.full((4, 1), -0.5), atol=0.2, rtol=0.0)


def test_without_images_an_actor_has_the_gradient_of_tanh() -> None:
    spec = get_algorithm_spec("td3")
    spaces = EnvSpaces.from_gym("X-v0", *(DotToTarget.action_space,) * 2)
    actor: Any = build_algorithm(spec, spec.params(hidden_sizes=(8,)), spaces, seed=0, device="cpu").model.actor
    obs = torch.tensor([[0.3], [-0.9]])
    for sign in (1.0, -1.0):
        found, wanted = (
            torch.autograd.grad(sign * network(obs).sum(), list(actor.network.parameters()))
            for network in (actor, actor.network)
        )
        torch.testing.assert_close(found, wanted)


def test_the_results_page_has_the_recorded_numbers() -> None:
    recorded = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert set(recorded) == {"before", "after"}
    assert format_table(recorded) in (ROOT / "docs" / "results" / "history.md").read_text(encoding="utf-8")
    for algo in DETERMINISTIC:
        assert min(recorded["after"][algo]) > -3.0  # an actor that is stuck has about -7
    assert min(recorded["before"]["d4pg"]) < -7.0


def test_drq_s_axes_are_no_worse_on_the_image_task_and_the_page_says_so() -> None:
    recorded = json.loads((RESULTS.parent / "image_drqv2.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "results" / "history.md").read_text(encoding="utf-8")
    for runs in recorded.values():
        *first, last = (f"{x:.2f}".replace("-", "−") for x in runs["ddpg"])
        assert f"{', '.join(first)} and {last}" in page
    assert sum(recorded["drqv2"]["ddpg"]) > sum(recorded["plain"]["ddpg"])


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "bar"), [("sac", -2.2), ("td3", -2.5), ("ddpg", -2.5), ("d4pg", -2.5)])
def test_an_actor_learns_to_move_a_dot_that_it_sees(algo: str, bar: float, tmp_path: Path) -> None:
    """Three seeds of each are in `benchmarks/results/image_actors.json`."""
    learned = train(image_config(algo, 2, tmp_path), console=False).metrics["eval_return_mean"]
    env = DotToTarget()
    env.action_space.seed(0)
    steps = play([env], lambda *_: [env.action_space.sample()], lambda episode: episode, "Dot", episodes=50)
    assert sum(step.reward for step in steps) / 50 < -4.0  # -4.8 at random
    assert learned > bar


# ---- shifted images --------------------------------------------------------------------------------------------------


def test_the_images_before_and_after_a_step_are_shifted_by_draws_of_their_own() -> None:
    learner = make("ddpg", augmentation="shift", shift_pixels=3)
    image = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(64, 2, 16, 16)
    moved = learner.augment({**BATCH, "obs": image, "next_obs": image})
    offsets = {}
    for name in ("obs", "next_obs"):
        frames = moved[name]
        assert torch.equal(frames[:, 0], frames[:, 1])  # all frames of an image together
        offsets[name] = frames[:, 0, 8, 8].int() - 136
        assert len(offsets[name].unique()) > 20  # of 49: each image by itself
    assert (offsets["obs"] != offsets["next_obs"]).float().mean() > 0.8
    assert moved["rewards"] is BATCH["rewards"]


@pytest.mark.parametrize("augmentation", ["none", "shift"])
def test_shifts_come_from_the_learner_s_generator(augmentation: str) -> None:
    learner = make("ddpg", augmentation=augmentation)
    before = learner.generator.get_state()
    first = learner.augment(BATCH)["obs"]
    assert torch.equal(learner.generator.get_state(), before) == (augmentation == "none")
    learner.generator.set_state(before)
    assert torch.equal(learner.augment(BATCH)["obs"], first)
    assert torch.equal(first, BATCH["obs"]) == (augmentation == "none")


@pytest.mark.parametrize("algo", DETERMINISTIC)
def test_both_losses_see_the_shifted_images(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, seen = make(algo, augmentation="shift"), {}
    shifted = {**BATCH, "obs": BATCH["obs"] // 2, "next_obs": BATCH["next_obs"] // 2}
    critic_step, actor_step = learner.critic_step, learner.actor_step
    monkeypatch.setattr(learner, "augment", lambda batch: shifted)
    monkeypatch.setattr(learner, "critic_step", lambda batch, noise: (seen.update(batch), critic_step(batch, noise))[1])
    monkeypatch.setattr(learner, "actor_step", lambda obs, of: (seen.update(actor=obs), actor_step(obs, of))[1])
    for _ in range(2):
        learner.update(BATCH)
    assert seen["obs"] is seen["actor"] is shifted["obs"]
    assert seen["next_obs"] is shifted["next_obs"]


@pytest.mark.parametrize("observation", ["vector", "mixed"])
def test_observations_that_are_not_images_cannot_be_shifted(observation: str, tmp_path: Path) -> None:
    config = kind_config("ddpg", tmp_path, "continuous", observation)
    config.algo_kwargs["augmentation"] = "shift"
    with pytest.raises(UserError, match="augmentation is 'shift', but the observations are not images; it must be no"):
        train(config, console=False)
    assert not any(tmp_path.iterdir())


def test_a_run_with_drq_s_axes_resumes_to_the_bit(tmp_path: Path) -> None:
    falls = {"type": "linear", "start": 1.0, "end": 0.1, "fraction": 0.5}
    axes = {
        "augmentation": "shift", "shift_pixels": 1, "n_step": 3, "num_critics": 2, "noise_clip": 0.3,
        "exploration_noise_schedule": falls, "policy_noise_schedule": falls,
    }  # fmt: skip
    settings: dict[str, Any] = {"env_id": "env_zoo:DotToTarget", "num_envs": 2, "kwargs": axes}
    whole = train(tiny("ddpg", tmp_path / "one", **settings), console=False)
    learner: Any = whole.policy.algorithm
    assert Schedule(**falls | {"fraction": 1.0}).value(0.5) == pytest.approx(0.55)  # linear(1, 0.1, 100k) at 50k
    assert float(learner.exploration_noise) == float(learner.policy_noise) == pytest.approx(0.1)
    assert_same_run(whole, stop_and_resume(tiny("ddpg", tmp_path / "two", **settings), 60))
