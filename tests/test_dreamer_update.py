"""Dreamer's mathematics: two-hot codes, KL with free nats, straight-through draws, resets inside a window, dreams."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import env_zoo
from recorded_steps import Recorded
from resume_cases import tiny
from rl_training.algorithms.base import read_metrics
from rl_training.algorithms.dreamer import METRICS, Dreamer, ReturnScale, balanced_kl
from rl_training.config.choices import choose_threads
from rl_training.config.params import read_params
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.errors import UserError
from rl_training.models.blocks import ObservationInput
from rl_training.models.dreamer import RSSM, SIZES, GaussianActor, TwoHotHead, sample_one_hot, straight_through
from rl_training.run.build import open_session
from rl_training.runtime.dreamer_trainer import DreamerParams, build
from rl_training.speed import capture
from rl_training.speed.capture import PLAIN_CALLS

torch.set_num_threads(1)


class LargeImage(env_zoo.Image):
    """An image with odd sides, large enough for strided convolutions."""

    shape = (42, 37, 3)


SPACES = {
    "vector": probe_spaces(read_recipe("CartPole-v1", {})),
    "continuous": probe_spaces(read_recipe("env_zoo:BoxActions", {})),
    "small image": probe_spaces(read_recipe("env_zoo:MinAtarLike", {})),
    "large image": probe_spaces(read_recipe("LargeImage", {}, LargeImage)),
}


def make(kind: str = "vector", seed: int = 0, **kwargs: Any) -> Dreamer:
    torch.manual_seed(seed)
    algorithm = build(DreamerParams(size="xxs", num_bins=31, imagination_horizon=4, **kwargs), SPACES[kind])
    algorithm.seed(seed)
    return algorithm


def make_batch(kind: str = "vector", rows: int = 3, length: int = 6, seed: int = 1) -> dict[str, Tensor]:
    spaces, generator = SPACES[kind], torch.Generator().manual_seed(seed)
    shape = (rows, length)
    obs = torch.randn(*shape, *spaces.obs_shape, generator=generator)
    actions = torch.randint(0, spaces.action_dim, shape, generator=generator)
    return {
        "obs": (obs.sigmoid() * spaces.image_scale).round().byte() if spaces.obs_kind == "image" else obs,
        "actions": actions if spaces.action_kind == "discrete" else torch.rand(*shape, 2, generator=generator) * 2 - 1,
        "rewards": torch.randn(shape, generator=generator), "terminated": torch.zeros(shape, dtype=torch.bool),
        "is_first": torch.zeros(shape, dtype=torch.bool),
    }  # fmt: skip


def observe(algorithm: Dreamer, inputs: dict[str, Tensor]) -> Any:
    model = algorithm.world_model
    embeds = model.encoder(model.prepare(inputs["obs"]))
    return model.rssm.observe(embeds, inputs["actions"], inputs["is_first"], inputs["noise"])


# ---- numbers as distributions ----------------------------------------------------------------------------------------


def test_a_number_comes_back_from_its_two_hot_code() -> None:
    head = TwoHotHead(feature_dim=3, hidden_sizes=(4,), num_bins=41)
    values = torch.tensor([-1e4, -3.2, -0.01, 0.0, 0.5, 1.0, 77.7, 1e6])
    codes = head.codes(values)
    torch.testing.assert_close(codes.sum(-1), torch.ones(8))
    assert (codes > 0).sum(-1).max() <= 2
    torch.testing.assert_close(head.mean(codes.clamp(min=1e-30).log()), values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_bins", [255, 64])
def test_a_mix_of_two_numbers_reads_their_mean(num_bins: int) -> None:
    head = TwoHotHead(feature_dim=3, hidden_sizes=(4,), num_bins=num_bins)
    mix = head.codes(torch.tensor([0.0, 1000.0])).mean(0)
    torch.testing.assert_close(head.mean(mix.clamp(min=1e-30).log()), torch.tensor(500.0))


def test_rewards_and_values_start_at_zero() -> None:
    algorithm = make()
    features = torch.randn(50, algorithm.world_model.rssm.feature_dim)
    for head in (algorithm.world_model.reward_head, algorithm.critic, algorithm.slow_critic):
        assert head.mean(head(features)).eq(0.0).all()
    assert TwoHotHead(feature_dim=3, hidden_sizes=(4,), num_bins=64).mean(torch.full((64,), 0.3)) == 0.0


def test_the_two_hot_loss_is_least_at_the_value_itself() -> None:
    head = TwoHotHead(feature_dim=3, hidden_sizes=(4,), num_bins=41)
    logits = head.codes(torch.tensor([2.0])).clamp(min=1e-9).log()
    losses = [head.loss(logits, torch.tensor([value])).item() for value in (0.0, 1.0, 2.0, 4.0, 9.0)]
    assert min(losses) == losses[2]


# ---- the KL ----------------------------------------------------------------------------------------------------------


def test_the_kl_is_summed_over_variables_balanced_and_free_below_its_limit() -> None:
    posterior = torch.tensor([[[0.9, 0.1], [0.5, 0.5]], [[0.5, 0.5], [0.6, 0.4]]]).log().requires_grad_()
    prior = torch.full((2, 2, 2), 0.5).log().requires_grad_()
    first = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)  # 0.368
    second = 0.6 * math.log(1.2) + 0.4 * math.log(0.8)  # 0.020
    loss, kl = balanced_kl(posterior, prior, free_nats=0.1)
    torch.testing.assert_close(kl, torch.tensor([first, second]))
    torch.testing.assert_close(loss, torch.tensor([1.1 * first, 1.1 * 0.1]))
    on_posterior, on_prior = torch.autograd.grad(loss.sum(), [posterior, prior])
    assert on_posterior[0].abs().sum() > 0
    assert on_prior[0].abs().sum() > on_posterior[0].abs().sum()
    assert on_posterior[1].abs().sum() == on_prior[1].abs().sum() == 0.0


def test_each_side_is_pulled_with_its_own_weight() -> None:
    posterior = torch.tensor([[[0.8, 0.2]]]).log().requires_grad_()
    prior = torch.tensor([[[0.3, 0.7]]]).log().requires_grad_()
    loss, _ = balanced_kl(posterior, prior, free_nats=0.0)
    on_posterior, on_prior = torch.autograd.grad(loss.sum(), [posterior, prior])
    torch.testing.assert_close(on_prior, -torch.tensor([[[0.8, 0.2]]]))  # d KL / d log prior, weight 1
    plain = (posterior.exp() * (posterior - prior.detach())).sum()
    torch.testing.assert_close(on_posterior, 0.1 * torch.autograd.grad(plain, posterior)[0])


# ---- draws -----------------------------------------------------------------------------------------------------------


def test_draws_follow_the_probabilities_and_without_noise_are_the_likeliest() -> None:
    probs = torch.tensor([0.1, 0.6, 0.3]).expand(20_000, 3)
    drawn = sample_one_hot(probs, torch.rand(20_000, 1, generator=torch.Generator().manual_seed(0)))
    assert drawn.sum(-1).eq(1.0).all()
    torch.testing.assert_close(drawn.mean(0), probs[0], atol=0.015, rtol=0)
    assert sample_one_hot(probs[:1], None).tolist() == [[0.0, 1.0, 0.0]]
    assert sample_one_hot(probs[:1], torch.tensor([[1.0]])).tolist() == [[0.0, 0.0, 1.0]]


def test_straight_through_draws_carry_the_gradient_of_the_probabilities() -> None:
    logits = torch.randn(5, 2, 4, requires_grad=True)
    probs, weights = logits.softmax(-1), torch.randn(5, 2, 4)
    drawn = straight_through(probs, torch.rand(5, 2, 1))
    assert set(drawn.detach().flatten().tolist()) == {0.0, 1.0}
    (through,) = torch.autograd.grad((drawn * weights).sum(), logits, retain_graph=True)
    torch.testing.assert_close(through, torch.autograd.grad((probs * weights).sum(), logits)[0])


def test_no_choice_of_a_latent_or_of_the_policy_is_impossible() -> None:
    algorithm = make()
    rssm = algorithm.world_model.rssm
    assert rssm.probabilities(torch.tensor([100.0, *[0.0] * 15])).min() >= 0.01 / 4 - 1e-6
    with torch.no_grad():
        algorithm.actor.network[-1].bias.copy_(torch.tensor([100.0, 0.0]))
    assert algorithm.actor.probabilities(torch.zeros(1, rssm.feature_dim)).min() >= 0.005 - 1e-6


def test_a_little_of_the_uniform_distribution_is_mixed_in_and_the_rest_gives_way() -> None:
    algorithm = make()
    rssm, logits = algorithm.world_model.rssm, np.random.default_rng(0).normal(size=(5, 4, 4))
    expected = 0.99 * softmax(logits) + 0.01 / 4
    probs = rssm.probabilities(torch.from_numpy(logits).flatten(1))
    np.testing.assert_allclose(probs.numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(expected.sum(-1), 1.0)
    features = torch.randn(5, rssm.feature_dim)
    policy = 0.99 * softmax(algorithm.actor.network(features).detach().double().numpy()) + 0.01 / 2
    np.testing.assert_allclose(algorithm.actor.probabilities(features).detach().numpy(), policy, atol=1e-6)


# ---- the recurrent cell ----------------------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


class Reference:
    """The RSSM in numpy, from its weights: h' = (1 - u) h + u tanh(r c), and the two distributions of z."""

    def __init__(self, rssm: RSSM) -> None:
        self.weights = {name: value.double().numpy() for name, value in rssm.state_dict().items()}

    def layer(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def silu_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        x = self.norm(name, x)
        return x * sigmoid(x)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def recur(self, h: np.ndarray, z: np.ndarray, a: np.ndarray) -> np.ndarray:
        inputs = self.silu_norm("input_norm", self.layer("action_input", a) + self.layer("latent_input", z))
        gates = self.norm("cell_norm", self.layer("cell", np.concatenate([inputs, h], -1)))
        reset, update, candidate = np.split(gates, 3, -1)
        update = sigmoid(update)
        return (1.0 - update) * h + update * np.tanh(sigmoid(reset) * candidate)

    def prior(self, h: np.ndarray) -> np.ndarray:
        hidden = self.silu_norm("prior_network.1", self.layer("prior_network.0", h))
        return self.mixed(self.layer("prior_network.3", hidden))

    def posterior(self, h: np.ndarray, embed: np.ndarray) -> np.ndarray:
        hidden = self.silu_norm("posterior_norm", self.layer("deter_input", h) + self.layer("embed_input", embed))
        return self.mixed(self.layer("posterior_output", hidden))

    @staticmethod
    def mixed(logits: np.ndarray) -> np.ndarray:
        return 0.99 * softmax(logits.reshape(*logits.shape[:-1], 4, 4)) + 0.01 / 4


def stir(module: torch.nn.Module, seed: int = 5) -> None:
    """Weights that are all different, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))


def test_the_next_recurrent_state_is_that_of_the_equations() -> None:
    rssm, rng = make().world_model.rssm, np.random.default_rng(0)
    stir(rssm)
    h, a = rng.normal(size=(7, 32)), rng.normal(size=(7, 2))
    z = np.eye(4)[rng.integers(0, 4, (7, 4))].reshape(7, 16)
    features = torch.from_numpy(np.concatenate([h, z], -1)).float()
    after = rssm.imagine(features, torch.from_numpy(a).float(), None).detach().numpy()
    expected = Reference(rssm).recur(h, z, a)
    np.testing.assert_allclose(after[:, :32], expected, atol=1e-5)
    likeliest = np.eye(4)[Reference(rssm).prior(expected).argmax(-1)]  # without noise
    np.testing.assert_array_equal(after[:, 32:], likeliest.reshape(7, 16))


def test_a_new_cell_keeps_three_quarters_of_its_state() -> None:
    rssm = make().world_model.rssm
    torch.nn.init.zeros_(rssm.cell.weight)  # what is left of the gates is their bias
    h = torch.randn(5, 32)
    kept = rssm.recur(h, torch.zeros(5, 16), torch.zeros(5, 32)).detach()
    torch.testing.assert_close(kept, (1.0 - 1.0 / (1.0 + math.e)) * h)


def test_the_kl_of_an_update_is_from_the_posterior_to_the_prior_along_the_window() -> None:
    algorithm = make(free_nats=0.0)
    model = algorithm.world_model
    stir(model.rssm)
    inputs = algorithm.prepare(make_batch())
    reference = Reference(model.rssm)
    with torch.no_grad():
        embeds = model.encoder(model.prepare(inputs["obs"])).double().numpy()
    h, z, kls = np.zeros((3, 32)), np.zeros((3, 16)), []
    for t in range(6):
        h = reference.recur(h, z, inputs["actions"][t].double().numpy())
        posterior, prior = reference.posterior(h, embeds[t]), reference.prior(h)
        kls.append((posterior * np.log(posterior / prior)).sum((-2, -1)))
        below = inputs["noise"][t].numpy() <= posterior.cumsum(-1)
        z = np.eye(4)[below.argmax(-1)].reshape(3, 16)
    metrics, _ = algorithm.world_model_step(inputs)
    assert metrics["kl"].item() == pytest.approx(np.mean(kls), rel=1e-4)
    assert metrics["kl_loss"].item() == pytest.approx(1.1 * np.mean(kls), rel=1e-4)


@pytest.mark.parametrize("kind", ["small image", "large image"])
def test_an_image_is_scored_by_the_cross_entropy_of_its_pixels(kind: str) -> None:
    decoder = make(kind).world_model.decoder
    shape = (2, 3, *SPACES[kind].obs_shape)
    rng = np.random.default_rng(0)
    logits, pixels = rng.normal(size=shape), rng.random(shape)
    said = sigmoid(logits)
    expected = -(pixels * np.log(said) + (1.0 - pixels) * np.log(1.0 - said)).reshape(2, 3, -1).sum(-1)
    np.testing.assert_allclose(decoder.loss(torch.from_numpy(logits), torch.from_numpy(pixels)).numpy(), expected)


# ---- the scan --------------------------------------------------------------------------------------------------------


def test_a_first_row_inside_a_window_starts_afresh() -> None:
    algorithm, batch = make(), make_batch()
    batch["is_first"][:, 3] = True
    inputs = algorithm.prepare(batch)
    whole = observe(algorithm, inputs)
    tail = {name: inputs[name][3:].clone() for name in ("obs", "actions", "is_first", "noise")}
    tail["actions"][0] = 0.7  # whatever stands there is no action of this episode
    for mine, theirs in zip(whole, observe(algorithm, tail), strict=True):
        torch.testing.assert_close(mine[3:], theirs, rtol=0, atol=1e-6)
    inputs["is_first"] = torch.zeros_like(inputs["is_first"])
    assert not torch.allclose(observe(algorithm, inputs).deter[3:], whole.deter[3:])


def test_acting_step_by_step_filters_as_the_scan_does() -> None:
    algorithm, batch = make(), make_batch(rows=2)
    batch["is_first"][:, 0] = True
    batch["is_first"][1, 4] = True
    inputs = algorithm.prepare(batch)
    inputs["noise"] = None  # type: ignore[assignment]
    states = observe(algorithm, inputs)
    carry = algorithm.initial_carry(2)
    for t in range(6):
        carry[:, -2:] = inputs["actions"][t]  # not what the actor chose, but what the window says
        carry = algorithm.act(batch["obs"][:, t], carry, is_first=batch["is_first"][:, t], deterministic=True).carry
        torch.testing.assert_close(carry[:, :-2], states.features[t], rtol=1e-5, atol=1e-6)


def test_acting_goes_on_from_its_carry_and_repeats_by_seed() -> None:
    algorithm, obs = make(), torch.randn(4, 4)
    first = algorithm.act(obs, is_first=torch.ones(4, dtype=torch.bool))
    algorithm.seed(0)
    again = algorithm.act(obs, is_first=torch.ones(4, dtype=torch.bool))
    assert torch.equal(first.carry, again.carry)
    onward = algorithm.act(obs, first.carry, deterministic=True)
    afresh = algorithm.act(obs, first.carry, is_first=torch.ones(4, dtype=torch.bool), deterministic=True)
    assert torch.equal(afresh.carry, algorithm.act(obs, deterministic=True).carry)
    assert not torch.equal(onward.carry, afresh.carry)


# ---- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPACES)
def test_an_update_moves_everything_and_reports_what_the_contract_says(kind: str) -> None:
    algorithm = make(kind)
    parts = {name: getattr(algorithm, name) for name in ("world_model", "actor", "critic", "slow_critic")}
    before = {name: [p.clone() for p in part.parameters()] for name, part in parts.items()}
    metrics = algorithm.update(make_batch(kind)).metrics
    assert tuple(metrics) == METRICS
    assert all(math.isfinite(value) for value in metrics.values())
    parts_of_loss = ("reconstruction_loss", "reward_loss", "continue_loss", "kl_loss")
    assert metrics["world_model_loss"] == pytest.approx(sum(metrics[name] for name in parts_of_loss), rel=1e-5)
    for name, part in parts.items():
        assert any(not torch.equal(p, q) for p, q in zip(part.parameters(), before[name], strict=True)), name


@pytest.mark.parametrize("kind", ["vector", "small image", "continuous"])
def test_a_window_can_be_learned_by_heart(kind: str) -> None:
    algorithm, batch = make(kind, world_model_learning_rate=3e-3), make_batch(kind, rows=2, length=4)
    batch["is_first"][:, 0] = True
    losses = [read_metrics(algorithm.update(batch, sync=False).metrics) for _ in range(100)]
    for name in ("reconstruction_loss", "reward_loss", "continue_loss"):
        assert losses[-1][name] < 0.5 * losses[0][name], name


def test_truncation_is_no_end_for_the_continue_head() -> None:
    batch = make_batch()
    batch["truncated"] = torch.zeros(3, 6, dtype=torch.bool)
    first = make().update(batch).metrics["continue_loss"]
    batch["truncated"][:, 2] = True
    assert make().update(batch).metrics["continue_loss"] == first
    batch["terminated"][:, 2] = True
    assert make().update(batch).metrics["continue_loss"] != first


def test_dreams_have_their_shapes_and_no_gradient_of_theirs_reaches_the_world_model() -> None:
    algorithm = make(world_model_learning_rate=0.0)
    inputs = algorithm.prepare(make_batch())
    dream = algorithm.imagine(torch.zeros(18, 48), inputs["dream_noise"], inputs["action_noise"])
    assert dream.features.shape == (5, 18, 48)
    assert dream.actions.shape == (4, 18, 2)
    before = [p.clone() for p in algorithm.world_model.parameters()]
    assert algorithm.update(make_batch()).metrics["world_model_grad_norm"] > 0
    assert all(torch.equal(p, q) for p, q in zip(algorithm.world_model.parameters(), before, strict=True))
    assert all(p.grad is None for p in algorithm.parameters())


def symlog(values: Tensor) -> Tensor:
    return values.sign() * (1.0 + values.abs()).log()


def bins_of(head: TwoHotHead) -> np.ndarray:
    """symexp of equal steps from -20 to 20."""
    steps = np.linspace(-20.0, 20.0, len(head.bins))
    return np.sign(steps) * np.expm1(np.abs(steps))


def expected_number(head: TwoHotHead, features: Tensor) -> Tensor:
    """The mean of the bins, each as likely as its logit says."""
    probs = head.network(features).double().softmax(-1)
    return (probs * torch.from_numpy(bins_of(head))).sum(-1).float()


def two_hot_loss(head: TwoHotHead, features: Tensor, values: Tensor) -> Tensor:
    """Cross-entropy to the two bins around each value, each weighted by how near it is."""
    codes = [np.interp(values.numpy(), bins_of(head), row) for row in np.eye(len(head.bins))]
    return -(torch.from_numpy(np.stack(codes, -1)).float() * head.network(features).log_softmax(-1)).sum(-1)


def shake(*heads: TwoHotHead) -> None:
    """Heads as after some learning: new ones say 0 everywhere, and the far bins have little to say."""
    for head in heads:
        last = head.network[-1]
        torch.nn.init.normal_(last.weight, std=0.3)  # type: ignore[arg-type]
        with torch.no_grad():
            last.bias.copy_(-torch.linspace(-20.0, 20.0, len(head.bins)).abs())  # type: ignore


def test_every_row_of_a_window_is_scored_against_its_own_observation_reward_and_end() -> None:
    algorithm, batch = make(), make_batch()
    batch["obs"] *= 20.0
    batch["terminated"][:, 2] = True
    inputs = algorithm.prepare(batch)
    model = algorithm.world_model
    shake(model.reward_head)
    with torch.no_grad():
        features = observe(algorithm, inputs).features
        decoded, goes_on = model.decoder(features), model.continue_head.network(features).squeeze(-1).sigmoid()
        reward_loss = two_hot_loss(model.reward_head, features, batch["rewards"].T).mean()
    expected = {
        "reconstruction_loss": (decoded - symlog(batch["obs"].transpose(0, 1))).square().sum(-1).mean(),
        "reward_loss": reward_loss,
        "continue_loss": -torch.where(batch["terminated"].T, 1.0 - goes_on, goes_on).log().mean(),
    }
    metrics, _ = algorithm.world_model_step(inputs)
    torch.testing.assert_close({name: metrics[name].detach() for name in expected}, expected)


def test_critic_and_actor_follow_the_gradients_of_their_losses_written_out_step_by_step() -> None:
    """Eqs. 7 to 11; with plain gradient descent at rate 1 the weights move by minus the gradient."""
    gamma, trace, entropy_coef = 0.9, 0.8, 0.3
    algorithm = make(
        gamma=gamma, gae_lambda=trace, entropy_coef=entropy_coef, optimizer="sgd", learning_rate=1.0, max_grad_norm=None
    )
    model, actor, critic = algorithm.world_model, algorithm.actor, algorithm.critic
    shake(critic, algorithm.slow_critic, model.reward_head)
    algorithm.return_scale.ends[1] = 5.0
    alive = (torch.arange(18) % 3 > 0).float()
    with torch.no_grad():
        dream = algorithm.imagine(torch.rand(18, 48), *algorithm.draw_noise(4, 18))
        states, steps = dream.features, len(dream.actions)
        rewards, values, slow_values = (
            expected_number(head, states) for head in (model.reward_head, critic, algorithm.slow_critic)
        )
        goes_on = model.continue_head.network(states).squeeze(-1).sigmoid()
        returns = [values[steps]]
        for t in reversed(range(steps)):
            following = (1.0 - trace) * values[t + 1] + trace * returns[0]
            returns.insert(0, rewards[t + 1] + gamma * goes_on[t + 1] * following)
        shares = torch.tensor([0.05, 0.95])
        low, high = torch.stack(returns[:-1]).quantile(shares, interpolation="nearest")
        scale = (0.99 * 5.0 + 0.01 * high) - 0.01 * low  # the moving average of the range, which is above 1
    weights, critic_loss, actor_loss = alive, torch.tensor(0.0), torch.tensor(0.0)
    for t in range(steps):
        targets = (returns[t], slow_values[t])
        critic_loss = critic_loss + sum((weights * two_hot_loss(critic, states[t], x)).mean() for x in targets) / steps
        policy = 0.99 * actor.network(states[t]).softmax(-1) + 0.01 / 2
        logprobs, entropy = (policy.log() * dream.actions[t]).sum(-1), -(policy * policy.log()).sum(-1)
        gain = (returns[t] - values[t]) / scale * logprobs + entropy_coef * entropy
        actor_loss = actor_loss - (weights * gain).mean() / steps
        weights = weights * gamma * goes_on[t + 1]

    parts = [(critic, critic_loss), (actor, actor_loss)]
    moved = [
        [p.detach() - gradient for p, gradient in zip(part.parameters(), gradients, strict=True)]
        for part, gradients in [(part, torch.autograd.grad(loss, list(part.parameters()))) for part, loss in parts]
    ]
    metrics = algorithm.behavior_step(dream, alive)
    torch.testing.assert_close(metrics["return_scale"], scale)
    torch.testing.assert_close(metrics["critic_loss"], critic_loss)
    torch.testing.assert_close(metrics["actor_loss"], actor_loss)
    for (part, _), expected in zip(parts, moved, strict=True):
        torch.testing.assert_close([p.detach() for p in part.parameters()], expected, rtol=1e-4, atol=1e-6)


def test_a_dream_that_begins_at_an_end_teaches_nothing() -> None:
    algorithm = make(entropy_coef=0.0)
    inputs = algorithm.prepare(make_batch())
    _, starts = algorithm.world_model_step(inputs)
    with torch.no_grad():
        dream = algorithm.imagine(starts, inputs["dream_noise"], inputs["action_noise"])
    metrics = algorithm.behavior_step(dream, torch.zeros(18))
    assert metrics["critic_loss"] == 0.0
    assert metrics["actor_loss"] == 0.0


def test_the_actor_learns_in_imagination_what_the_reward_head_likes() -> None:
    algorithm = make(learning_rate=3e-3, gamma=0.5)
    generator = torch.Generator().manual_seed(0)
    for number in range(200):
        batch = make_batch(rows=4, seed=number)
        batch["obs"] = torch.zeros_like(batch["obs"])
        batch["actions"] = torch.randint(0, 2, (4, 6), generator=generator)
        batch["rewards"] = batch["actions"].float()  # the reward on arrival is the action that led there
        algorithm.update(batch, sync=False)
    features = algorithm.act(torch.zeros(1, 4)).carry[:, :-2]
    assert algorithm.actor.probabilities(features)[0, 1] > 0.75


def test_the_return_scale_is_the_range_without_outliers_and_at_least_one() -> None:
    scale = ReturnScale(decay=0.0)
    returns = torch.arange(101.0)
    returns[-1] = 1e9
    assert scale.update(returns.view(1, -1)) == 90.0
    assert scale.update(returns / 1e9) == 1.0
    slow = ReturnScale()
    slow.update(torch.arange(101.0))
    torch.testing.assert_close(slow.ends, torch.tensor([0.05, 0.95]))


def test_a_gaussian_actor_is_clipped_for_the_model_and_the_environment_alike() -> None:
    actor = GaussianActor(feature_dim=3, action_dim=2, hidden_sizes=(4,))
    features = torch.randn(500, 3)
    raw = actor.sample(features, 3.0 * torch.randn(500, 2))
    assert raw.abs().max() > 1.0
    assert torch.equal(actor.as_input(raw), actor.as_action(raw))
    assert actor.as_action(raw).abs().max() == 1.0
    mean, log_std = actor.gaussian(features)
    expected = torch.distributions.Normal(mean, log_std.exp())
    logprobs, entropy = actor.evaluate(features, raw)
    torch.testing.assert_close(logprobs, expected.log_prob(raw).sum(-1))
    torch.testing.assert_close(entropy, expected.entropy().sum(-1))


def test_an_update_depends_on_its_generator_alone() -> None:
    one, other = make(), make()
    for algorithm in (one, other):
        algorithm.update(make_batch())
        torch.rand(7)
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert name == "_extra_state" or torch.equal(mine, theirs), name


def numbers_of(algorithm: Dreamer) -> list[str]:
    names = [name for name in DreamerParams.model_fields if algorithm.scheduled(name)]
    assert {"learning_rate", "actor_learning_rate", "tau", "free_nats"} < set(names)
    return names


def move_numbers(algorithm: Dreamer, factor: float) -> None:
    """As schedules do, every one of them, but for the epsilon."""
    for name in numbers_of(algorithm):
        if name != "optimizer_eps":
            setattr(algorithm, name, factor * {"max_grad_norm": 0.5, "tau": 0.1}.get(name, 0.01))


def assert_same_weights(one: Dreamer, other: Dreamer) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def make_captured(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Dreamer:
    """As on a GPU, without one."""
    monkeypatch.setattr(capture, "CAPTURING", ("cpu",))
    monkeypatch.setattr(capture, "CapturedStep", Recorded)
    algorithm = make(**options)
    algorithm.accelerate("graph")
    return algorithm


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop", "rmsprop_tf"])
def test_a_captured_update_reads_every_scheduled_number_in_place(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = dict.fromkeys(("world_model_learning_rate", "actor_learning_rate", "critic_learning_rate"), 1e-3)
    captured, plain = make_captured(monkeypatch, optimizer=optimizer, **rates), make(optimizer=optimizer, **rates)
    move_numbers(captured, 0.02)
    tensors = dict(captured.numbers)
    for turn in range(PLAIN_CALLS + 3):
        for algorithm in (captured, plain):
            move_numbers(algorithm, 0.02 * (1.0 + turn))
            algorithm.update(make_batch(seed=turn))
    step: Any = captured.train_step
    assert (step.plain, step.replays) == (PLAIN_CALLS, [3])
    for name, tensor in tensors.items():
        assert isinstance(tensor, Tensor) == (name != "optimizer_eps")
        assert captured.numbers[name] is tensor
    assert_same_weights(captured, plain)
    captured.optimizer_eps = 1e-3  # which a kernel takes by value
    captured.update(make_batch())
    assert step.replays == [3]


def test_without_capture_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(make_captured(monkeypatch, capture=False).train_step, Recorded)


def weights_of(algorithm: Dreamer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in algorithm.parameters()])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_follows_schedules_without_being_rebuilt() -> None:
    with torch.device("cuda"):
        captured, plain = make(), make()
    captured.accelerate("graph")
    step: Any = captured.train_step
    start = weights_of(plain)
    for turn in range(PLAIN_CALLS + 5):
        for algorithm in (captured, plain):
            move_numbers(algorithm, 1.0 + turn)
            algorithm.update({name: value.cuda() for name, value in make_batch(seed=turn).items()})
    assert len(step._graphs) == 1
    # Rates this large blow up a difference of rounding: 4e-7 in the third update, 1.5 % of the way in the last.
    way = weights_of(plain) - start
    assert (weights_of(captured) - weights_of(plain)).norm() < 0.05 * way.norm()


@pytest.mark.parametrize("kind", SPACES)
def test_half_precision_products_leave_states_and_losses_in_full_precision(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = make(kind).update(make_batch(kind)).metrics
    monkeypatch.setattr(Dreamer, "_autocast", lambda self: torch.autocast("cpu", torch.bfloat16))
    algorithm = make(kind)
    # Some virtual machines announce AMX and do not allow it; oneDNN's bfloat16 products crash there.
    with torch.backends.mkldnn.flags(enabled=False):
        half = algorithm.update(make_batch(kind)).metrics
        with torch.autocast("cpu", torch.bfloat16):
            states = observe(algorithm, algorithm.prepare(make_batch(kind)))
    assert half["world_model_loss"] == pytest.approx(full["world_model_loss"], rel=0.05)
    assert states.features.dtype == states.probs.dtype == torch.float32


# ---- building --------------------------------------------------------------------------------------------------------


def test_action_masks_are_refused() -> None:
    masked = probe_spaces(read_recipe("env_zoo:Masked", {}))
    with pytest.raises(UserError, match="dreamer does not support the action masks of env_zoo:Masked"):
        build(DreamerParams(), masked)


def rates_of(algorithm: Dreamer) -> list[float]:
    parts = ("world_model", "actor", "critic")
    return [algorithm.optimizers[part].learning_rate for part in parts]


def test_the_common_learning_rate_is_that_of_the_parts_without_their_own() -> None:
    algorithm = make(learning_rate=0.01, actor_learning_rate=0.02)
    assert rates_of(algorithm) == [0.01, 0.02, 0.01]
    algorithm.learning_rate = 0.5  # as its schedule does
    assert rates_of(algorithm) == [0.5, 0.02, 0.5]
    assert make(world_model_learning_rate=0.02, learning_rate=0.01).learning_rate == 0.01


@pytest.mark.parametrize("order", [1, -1])
def test_a_rate_with_its_own_schedule_does_not_follow_the_common_one(order: int) -> None:
    schedules = {f"{name}_schedule": {"start": 0.1, "end": 0.0} for name in ("learning_rate", "actor_learning_rate")}
    params = read_params(DreamerParams, {"size": "xxs", **dict(list(schedules.items())[::order])})
    algorithm = build(params, SPACES["vector"])
    algorithm.learning_rate = 0.5
    assert rates_of(algorithm) == [0.5, 0.1, 0.5]


def test_a_schedule_of_the_common_rate_that_nobody_follows_is_refused(tmp_path: Path) -> None:
    own = {f"{part}_learning_rate": 0.1 for part in ("world_model", "actor", "critic")}
    with pytest.raises(UserError, match="dreamer cannot change learning_rate during a run"):
        open_session(tiny("dreamer", tmp_path, kwargs={**own, "learning_rate_schedule": {"start": 0.1, "end": 0.0}}))


def test_threads_are_chosen_by_the_widths_of_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    chosen = {size: choose_threads(DreamerParams(size=size), SPACES["vector"]) for size in SIZES}
    assert chosen == {"xxs": 1, "xs": 1, "s": 2, "m": 4, "l": 4, "xl": 4}
    assert choose_threads(DreamerParams(size="xs", hidden_sizes=(512,)), SPACES["vector"]) == 4


# ---- what else dreams and acting depend on ---------------------------------------------------------------------------


def test_dreams_from_the_ends_of_an_update_are_the_ones_that_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, batch, seen = make(), make_batch(), []
    batch["terminated"][0, 2] = batch["terminated"][2, 4] = True
    behave, observed = algorithm.behavior_step, []
    monkeypatch.setattr(
        algorithm, "behavior_step", lambda dream, alive: seen.append((dream, alive)) or behave(dream, alive)
    )
    learn = algorithm.world_model_step
    monkeypatch.setattr(
        algorithm, "world_model_step", lambda inputs: observed.append(observe(algorithm, inputs)) or learn(inputs)
    )
    algorithm.update(batch)
    ((dream, alive),) = seen
    torch.testing.assert_close(dream.features[0], observed[0].features.detach().flatten(0, 1))  # row by row, [L, B]
    assert torch.equal(alive.view(6, 3) == 0, batch["terminated"].T)
    batch["terminated"][:] = True
    assert make().update(batch).metrics["critic_loss"] == 0.0


def test_the_memory_holds_the_action_that_the_environment_got() -> None:
    algorithm = make("continuous")
    obs = torch.randn(200, *SPACES["continuous"].obs_shape)
    found = algorithm.act(obs, is_first=torch.ones(200, dtype=torch.bool))
    assert torch.equal(found.carry[:, -2:], found.actions)
    assert (found.actions.abs() == 1.0).any()  # some were clipped


def test_a_new_policy_is_nearly_uniform() -> None:
    features = torch.randn(100, make().world_model.rssm.feature_dim)
    with torch.no_grad():
        assert (make().actor.probabilities(features) - 0.5).abs().max() < 0.02
        mean, log_std = make("continuous").actor.gaussian(features)
    assert mean.abs().max() < 0.1
    # 0.1 + 0.9 sigmoid(2): wide, but not at the end, where the slope would vanish
    torch.testing.assert_close(log_std.exp(), torch.full_like(log_std, 0.8927), atol=0.02, rtol=0)


def test_predicted_observations_are_in_the_environments_own_units() -> None:
    model = make().world_model
    norm = ObservationInput(normalize_size=4)
    obs = torch.randn(30, 4) * torch.tensor([0.1, 1.0, 5.0, 30.0]) + torch.tensor([0.0, 3.0, -20.0, 100.0])
    norm.update(obs)
    model.observation_input = norm
    encoded = symlog((obs - obs.mean(0)) / obs.std(0, correction=0))
    torch.testing.assert_close(model.prepare(obs), encoded, rtol=1e-4, atol=1e-5)
    model.decoder.forward = lambda features: encoded  # a decoder without any error
    torch.testing.assert_close(model.predict(torch.zeros(30, 1)), obs, rtol=1e-4, atol=1e-4)


def test_statistics_of_observations_change_after_learning() -> None:
    """The first update is that of a model which does not normalize; then the windows are in the statistics."""
    algorithm, batch, inputs = make(), make_batch(), ObservationInput(normalize_size=4)
    algorithm.world_model.observation_input = inputs
    found, expected = algorithm.update(batch).metrics, make().update(batch).metrics
    assert found["reconstruction_loss"] == pytest.approx(expected["reconstruction_loss"], rel=1e-4)
    obs = batch["obs"].flatten(0, 1)
    assert inputs.norm is not None
    assert inputs.norm.count == 18
    torch.testing.assert_close(inputs.norm.mean, obs.mean(0))
    torch.testing.assert_close(inputs.norm.var, obs.var(0, correction=0))
