"""The networks of the DQN family: shapes, the dueling identity, noise statistics, and numpy against torch."""

import math

import gymnasium.spaces as gs
import numpy as np
import pytest
import torch

import rl_training.models as models
from rl_training.config.spec import get_algorithm_spec
from rl_training.envs.spaces import EnvSpaces
from rl_training.models.blocks import ImageEncoder, ObservationInput
from rl_training.models.mlp_fqf_network import MLPFQFNetwork, MLPIQNNetwork
from rl_training.models.mlp_q_network import MLPQNetwork, NoisyLinear

NAMES = ["MLPQNetwork", "MLPDuelingQNetwork", "MLPNoisyQNetwork", "MLPDuelingNoisyQNetwork"]
AXES = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize("name", NAMES)
def test_named_networks_give_action_values(name):
    network = getattr(models, name)(obs_dim=4, action_dim=3, hidden_sizes=(16, 8))
    assert network(torch.randn(5, 4)).shape == (5, 3)
    assert bool(network.noise_dim) == ("Noisy" in name)
    assert hasattr(network.head, "advantage") == ("Dueling" in name)


@pytest.mark.parametrize(("dueling", "noisy"), AXES)
@pytest.mark.parametrize("hidden_sizes", [(), (8,), (16, 8)])
def test_every_combination_of_axes_and_depths_works(dueling, noisy, hidden_sizes):
    options = {"obs_dim": 4, "action_dim": 3, "hidden_sizes": hidden_sizes, "dueling": dueling, "noisy": noisy}
    assert MLPQNetwork(**options)(torch.randn(5, 4)).shape == (5, 3)
    assert MLPQNetwork(num_outputs=7, **options)(torch.randn(5, 4)).shape == (5, 3, 7)
    assert MLPIQNNetwork(**options)(torch.randn(5, 4), torch.rand(5, 6)).shape == (5, 3, 6)
    output = MLPFQFNetwork(num_quantiles=6, **options)(torch.randn(5, 4))
    assert output.quantile_hats.shape == (5, 3, 6)
    assert output.taus.shape == (5, 7)
    assert output.tau_hats.shape == (5, 6)
    assert output.quantiles_tau.shape == (5, 3, 5)


@pytest.mark.parametrize("make", [MLPQNetwork, MLPIQNNetwork])
@pytest.mark.parametrize("dueling", [False, True])
def test_images_go_through_an_encoder(make, dueling):
    network = make(
        obs_dim=4 * 10 * 10, action_dim=3, hidden_sizes=(), dueling=dueling, encoder=ImageEncoder((4, 10, 10)),
        observation_input=ObservationInput(image_scale=255.0),
    )  # fmt: skip
    images = torch.randint(256, (2, 4, 10, 10), dtype=torch.uint8)
    outputs = network(images) if make is MLPQNetwork else network(images, torch.rand(2, 5)).mean(-1)
    assert outputs.shape == (2, 3)
    assert (network.numpy_network() if make is MLPQNetwork else network.numpy_parts()) is None


@pytest.mark.parametrize("algo", ["iqn", "fqf"])
@pytest.mark.parametrize("dueling", [False, True])
def test_quantiles_of_an_image_are_those_of_the_paper(algo, dueling):
    """Z = W2 relu(W1 (psi * relu(W cos(pi i tau) + b)) + b1) + b2 with psi the convolutions, written out."""
    spaces = EnvSpaces.from_gym("Screen", gs.Box(0, 255, (2, 10, 10), np.uint8), gs.Discrete(3))
    spec = get_algorithm_spec(algo)
    network = spec.build(spec.params(embedding_dim=6, head_hidden_sizes=(7,), dueling=dueling), spaces).q_network
    weights = {name: value.detach().numpy().astype(np.float64) for name, value in network.state_dict().items()}
    images = torch.randint(256, (4, 2, 10, 10), dtype=torch.uint8)
    taus = torch.rand(4, 5)
    patches = np.lib.stride_tricks.sliding_window_view(images.numpy() / 255, (3, 3), axis=(2, 3))
    filters = np.einsum("bchwij,ocij->bohw", patches, weights["encoder.0.weight"])
    psi = np.maximum(filters + weights["encoder.0.bias"][:, None, None], 0).reshape(4, -1)
    assert psi.shape == (4, 16 * 8 * 8) == (4, network.feature_dim)
    cosines = np.cos(np.pi * np.arange(6) * taus.numpy()[..., None])
    phi = np.maximum(cosines @ weights["embedding.weight"].T + weights["embedding.bias"], 0)
    product = psi[:, None] * phi

    def layer(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    if dueling:
        hidden = np.maximum(layer("head.hidden", product), 0)
        advantages = layer("head.advantage", hidden[..., 7:])
        wanted = layer("head.value", hidden[..., :7]) + advantages - advantages.mean(-1, keepdims=True)
    else:
        wanted = layer("head", np.maximum(layer("middle.0", product), 0))
    found = network(images, taus).detach().numpy()
    np.testing.assert_allclose(found, wanted.swapaxes(1, 2), rtol=1e-4, atol=1e-5)
    features = network.features(images)
    means = network.expected_values(features, taus[:1]).detach().numpy()
    everywhere = network.quantiles(features, taus[:1].expand(4, 5)).detach().numpy()
    np.testing.assert_allclose(means, everywhere.mean(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_outputs", [None, 5])
def test_dueling_subtracts_the_mean_advantage(num_outputs):
    network = MLPQNetwork(obs_dim=4, action_dim=3, hidden_sizes=(8, 8), num_outputs=num_outputs, dueling=True)
    head, x = network.head, torch.randn(6, 4)
    streams = head.activation(head.hidden(network.trunk(x)))
    value = head.value(streams[:, :8])
    outputs = network(x).view(6, 3, -1)
    torch.testing.assert_close(outputs.mean(1), value)  # per atom: the advantages' mean is gone
    before = outputs.detach().clone()
    head.advantage.bias.data += torch.arange(head.outputs).repeat(3)  # the same shift of every action's advantage
    torch.testing.assert_close(network(x).view(6, 3, -1), before)


def test_noise_has_the_papers_mean_and_variance():
    torch.manual_seed(0)
    network = MLPQNetwork(obs_dim=6, action_dim=3, hidden_sizes=(), noisy=True)
    layer = network.head
    assert isinstance(layer, NoisyLinear)
    torch.testing.assert_close(layer.weight_sigma, torch.full((3, 6), 0.5 / math.sqrt(6)))
    assert layer.weight.abs().max() <= 1 / math.sqrt(6)
    x = torch.randn(1, 6)
    generator = torch.Generator().manual_seed(0)
    outputs = []
    with torch.no_grad():
        mean = network(x)[0]
        for noise in network.draw_noise(20_000, generator):
            network.set_noise(noise)
            outputs.append(network(x)[0])
    samples = torch.stack(outputs)
    half = math.sqrt(2 / math.pi)  # E f(e)^2 = E |e|
    variance = half * (half * (layer.weight_sigma**2 * x**2).sum(1) + layer.bias_sigma**2)
    torch.testing.assert_close(samples.mean(0), mean, atol=0.02, rtol=0)
    torch.testing.assert_close(samples.var(0), variance.detach(), rtol=0.06, atol=0)
    network.set_noise(None)
    assert torch.equal(network(x)[0], mean)


def test_noise_depends_on_the_generator_alone_and_trains_the_deviations():
    network = MLPQNetwork(obs_dim=4, action_dim=2, hidden_sizes=(8, 8), noisy=True)
    assert [isinstance(layer, NoisyLinear) for layer in (network.trunk[0], network.trunk[2], network.head)] == [
        False, True, True,
    ]  # fmt: skip
    same = [network.draw_noise(2, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0][0], same[0][1])
    assert same[0].shape == (2, network.noise_dim) == (2, 8 + 8 + 8 + 2)
    network.set_noise(same[0][0])
    gradients = torch.autograd.grad(network(torch.randn(5, 4)).square().sum(), list(network.parameters()))
    assert all(g.abs().sum() > 0 for g in gradients)


@pytest.mark.parametrize(("dueling", "noisy"), AXES)
@pytest.mark.parametrize("num_outputs", [None, 5])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_numpy_forward_is_torchs(dueling, noisy, num_outputs, activation):
    network = MLPQNetwork(
        obs_dim=4, action_dim=3, hidden_sizes=(16, 8), num_outputs=num_outputs, dueling=dueling, noisy=noisy,
        activation=activation, observation_input=ObservationInput(normalize_size=4),
    )  # fmt: skip
    network.observation_input.update(torch.randn(100, 4) * 2 + 1)
    forward, obs = network.numpy_network(), torch.randn(7, 4)
    np.testing.assert_allclose(forward(obs.numpy(), None), network(obs).detach().numpy(), rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # the arrays are views
        for parameter in network.parameters():
            parameter.mul_(1.1)
    np.testing.assert_allclose(forward(obs.numpy(), None), network(obs).detach().numpy(), rtol=1e-4, atol=1e-5)
    rng = np.random.default_rng(0)
    draws = [forward(obs.numpy(), rng) for _ in range(2)]
    assert np.array_equal(draws[0], draws[1]) != noisy


def test_numpy_noise_has_torchs_statistics():
    torch.manual_seed(0)
    network = MLPQNetwork(obs_dim=4, action_dim=2, hidden_sizes=(8, 8), noisy=True)
    forward, obs, rng = network.numpy_network(), torch.randn(1, 4), np.random.default_rng(0)
    mine = np.stack([forward(obs.numpy(), rng)[0] for _ in range(8000)])
    theirs = []
    with torch.no_grad():
        for noise in network.draw_noise(8000, torch.Generator().manual_seed(0)):
            network.set_noise(noise)
            theirs.append(network(obs)[0].numpy())
    np.testing.assert_allclose(mine.mean(0), np.mean(theirs, 0), atol=0.04)
    np.testing.assert_allclose(mine.std(0), np.std(theirs, 0), rtol=0.08)


@pytest.mark.parametrize("dueling", [False, True])
def test_expected_values_are_the_mean_of_the_quantiles(dueling):
    network = MLPIQNNetwork(obs_dim=4, action_dim=3, hidden_sizes=(16, 8), dueling=dueling)
    features, taus = network.features(torch.randn(5, 4)), torch.rand(5, 9)
    widths = torch.rand(5, 9).softmax(-1)
    quantiles = network.quantiles(features, taus)
    torch.testing.assert_close(network.expected_values(features, taus), quantiles.mean(-1))
    torch.testing.assert_close(network.expected_values(features, taus, widths), (quantiles * widths[:, None]).sum(-1))
    shared = network.expected_values(features, taus[0])
    torch.testing.assert_close(shared, network.quantiles(features, taus[:1].expand(5, 9)).mean(-1))


def test_embedding_is_multiplied_into_the_features():
    torch.manual_seed(0)
    network = MLPIQNNetwork(obs_dim=4, action_dim=3, hidden_sizes=(32,), embedding_dim=5)
    obs, tau = torch.randn(6, 4), 0.3
    cosines = torch.tensor([math.cos(math.pi * i * tau) for i in range(5)])
    phi = (network.embedding.weight @ cosines + network.embedding.bias).relu()
    features = network.trunk(obs) * phi
    assert (features > 0).any(-1).all()  # else every head would do
    torch.testing.assert_close(network(obs, torch.full((6, 1), tau))[:, :, 0], network.head(features))
