"""Dreamer's networks (Hafner et al. 2023, arXiv:2301.04104): the parts of the world model, then actors and critic.

Time comes first, [L, B, ...]. A latent z is `latents` categorical variables of `classes` choices each, one-hot, flat
[B, latents * classes]; the features of a state are [h, z]. Noise comes from the caller.

Actions have three forms: `raw` is what the actor drew and what its density refers to, `as_input` gives what the world
model reads, and `as_action` what the policy returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.blocks import ObservationInput, activation_layer, linear
from rl_training.ops.distributional import categorical_cross_entropy, symexp, symlog, two_hot
from rl_training.ops.policy import categorical_entropy, gaussian_entropy, gaussian_log_prob

NORM_EPS = 1e-3
SMALL_IMAGE = 32  # pixels a side; smaller images get one 3x3 layer, because strides would lose details
STD_RANGE = (0.1, 1.0)  # of a Gaussian policy
OUTPUT_GAIN = 0.01  # a new policy is close to uniform
BIN_LIMIT = 20.0  # of the two-hot codes, on the symlog scale: returns up to exp(20)


class Size(NamedTuple):
    """Widths that grow together."""

    deter: int  # recurrent state h
    hidden: int  # layers inside the RSSM
    latents: int  # categorical variables of z
    classes: int  # choices of each
    units: int  # layers of every MLP
    layers: int  # how many of them
    depth: int  # channels of the first convolution


SIZES = {
    "xxs": Size(32, 32, 4, 4, 32, 1, 4),
    "xs": Size(128, 64, 8, 16, 64, 2, 8),
    "s": Size(256, 256, 16, 16, 256, 2, 16),
    "m": Size(512, 512, 32, 16, 256, 3, 24),
    "l": Size(1024, 512, 32, 32, 512, 3, 32),
    "xl": Size(2048, 768, 32, 32, 768, 4, 48),
}


def norm_mlp(
    inputs: int, widths: Sequence[int], outputs: int = 0, activation: str = "silu", output_gain: float = 1.0
) -> nn.Sequential:
    """Linear layers, each with layer normalization and an activation, then a plain one to `outputs` if any."""
    layers: list[nn.Module] = []
    for before, after in pairwise([inputs, *widths]):
        layers += [linear(before, after, 1.0), nn.LayerNorm(after, eps=NORM_EPS), activation_layer(activation)]
    return nn.Sequential(*layers, *([linear([inputs, *widths][-1], outputs, output_gain)] if outputs else []))


def conv_plan(shape: Sequence[int], depth: int) -> list[tuple[int, int, int]]:
    """(channels, height, width) of the image and after each halving, until a side is below 8."""
    plan = [(shape[0], shape[1], shape[2])]
    while min(plan[-1][1:]) >= 8:
        _, height, width = plan[-1]
        plan.append((depth << (len(plan) - 1), height // 2, width // 2))
    return plan


def is_small_image(shape: Sequence[int]) -> bool:
    """Whether this is the shape of an image too small for strided convolutions."""
    return len(shape) == 3 and min(shape[1:]) < SMALL_IMAGE


class Encoder(nn.Module):
    """Observations as `WorldModel.prepare` gives them, [L, B, *obs_shape] -> [L, B, embed_dim]."""

    def __init__(
        self, *, obs_shape: Sequence[int], hidden_sizes: Sequence[int], depth: int, activation: str = "silu"
    ) -> None:
        super().__init__()
        self.obs_dims = len(obs_shape)
        layers: list[nn.Module] = []
        features = math.prod(obs_shape)
        if is_small_image(obs_shape):
            layers = [nn.Conv2d(obs_shape[0], 2 * depth, 3, padding=1), activation_layer(activation), nn.Flatten()]
            features = 2 * depth * obs_shape[1] * obs_shape[2]
        elif self.obs_dims == 3:
            plan = conv_plan(obs_shape, depth)
            for (before, *_), (after, *_) in pairwise(plan):
                layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.GroupNorm(1, after, eps=NORM_EPS)]
                layers += [activation_layer(activation)]
            layers += [nn.Flatten()]
            features = math.prod(plan[-1])
        if not layers or is_small_image(obs_shape):
            layers += norm_mlp(features, hidden_sizes, activation=activation)
            features = hidden_sizes[-1]
        self.network, self.embed_dim = nn.Sequential(*layers), features

    def forward(self, obs: Tensor) -> Tensor:
        """[L, B, *obs_shape] -> [L, B, embed_dim]."""
        lead = obs.shape[: -self.obs_dims]
        return self.network(obs.flatten(0, len(lead) - 1)).view(*lead, -1)


class PartsEncoder(nn.Module):
    """An `Encoder` for every part of a mixed observation, joined: [L, B, D] -> [L, B, embed_dim]."""

    def __init__(self, *, shapes: Sequence[Sequence[int]], **layers: Any) -> None:
        super().__init__()
        self.shapes = shapes
        encoders = [Encoder(obs_shape=shape, **layers) for shape in shapes]
        self.encoders, self.embed_dim = nn.ModuleList(encoders), sum(encoder.embed_dim for encoder in encoders)

    def forward(self, obs: Tensor) -> Tensor:
        """[L, B, D] -> [L, B, embed_dim]."""
        parts = zip(self.encoders, split_parts(obs, self.shapes), strict=True)
        return torch.cat([encoder(part) for encoder, part in parts], -1)


def split_parts(rows: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Split rows [..., D] into consecutive parts of these shapes."""
    parts = zip(rows.split([math.prod(shape) for shape in shapes], -1), shapes, strict=True)
    return [part.unflatten(-1, tuple(shape)) for part, shape in parts]


class Decoder(nn.Module):
    """Features -> observations as the encoder reads them; logits of pixel values for an image."""

    def __init__(
        self, *, feature_dim: int, obs_shape: Sequence[int], hidden_sizes: Sequence[int], depth: int,
        activation: str = "silu",
    ) -> None:  # fmt: skip
        super().__init__()
        self.obs_shape, self.is_image = tuple(obs_shape), len(obs_shape) == 3
        if not self.is_image or is_small_image(obs_shape):
            self.network = norm_mlp(feature_dim, hidden_sizes, math.prod(obs_shape), activation)
            return
        plan = conv_plan(obs_shape, depth)[::-1]
        layers: list[nn.Module] = [linear(feature_dim, math.prod(plan[0]), 1.0), nn.Unflatten(-1, plan[0])]
        for (before, height, width), (after, to_height, to_width) in pairwise(plan):
            odd = (to_height - 2 * height, to_width - 2 * width)
            layers += [nn.GroupNorm(1, before, eps=NORM_EPS), activation_layer(activation)]
            layers += [nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, output_padding=odd)]
        self.network = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """[L, B, F] -> [L, B, *obs_shape]."""
        return self.network(features.flatten(0, -2)).view(*features.shape[:-1], *self.obs_shape)

    def targets(self, obs: Tensor) -> Tensor:
        """Observations as they are encoded and predicted: an image in [0, 1], a vector in symlog."""
        return obs if self.is_image else symlog(obs)

    def loss(self, decoded: Tensor, obs: Tensor) -> Tensor:
        """Squared error of a vector, cross-entropy of an image's values in [0, 1], summed: -> [L, B]."""
        if self.is_image:
            errors = F.binary_cross_entropy_with_logits(decoded, obs, reduction="none")
        else:
            errors = (decoded - obs).square()
        return errors.flatten(2).sum(-1)


class PartsDecoder(nn.Module):
    """A `Decoder` for every part of a mixed observation: [L, B, F] -> [L, B, D]."""

    def __init__(self, *, shapes: Sequence[Sequence[int]], **layers: Any) -> None:
        super().__init__()
        self.shapes = shapes
        self.decoders: Any = nn.ModuleList(Decoder(obs_shape=shape, **layers) for shape in shapes)

    def forward(self, features: Tensor) -> Tensor:
        """[L, B, F] -> [L, B, D]."""
        return torch.cat([decoder(features).flatten(2) for decoder in self.decoders], -1)

    def targets(self, obs: Tensor) -> Tensor:
        """`Decoder.targets` of every part, [..., D] -> [..., D]."""
        parts = zip(self.decoders, split_parts(obs, self.shapes), strict=True)
        return torch.cat([decoder.targets(part).flatten(obs.dim() - 1) for decoder, part in parts], -1)

    def loss(self, decoded: Tensor, obs: Tensor) -> Tensor:
        """The sum of the parts' losses: -> [L, B]."""
        parts = zip(self.decoders, split_parts(decoded, self.shapes), split_parts(obs, self.shapes), strict=True)
        return torch.stack([decoder.loss(*pair) for decoder, *pair in parts]).sum(0)


class TwoHotHead(nn.Module):
    """A number as a distribution over bins, symexp of equal steps; a new head predicts exactly 0.

    The number is the mean of the bins themselves, as in the published code: an even mix of 0 and 1,000 is 500.
    """

    def __init__(
        self, *, feature_dim: int, hidden_sizes: Sequence[int], num_bins: int = 255, activation: str = "silu"
    ) -> None:
        super().__init__()
        self.network = norm_mlp(feature_dim, hidden_sizes, num_bins, activation)
        nn.init.zeros_(self.network[-1].weight)  # type: ignore[arg-type]
        steps = torch.linspace(-BIN_LIMIT, BIN_LIMIT, num_bins)
        self.bins = nn.Buffer(symexp((steps - steps.flip(0)) / 2.0))  # exactly antisymmetric

    def forward(self, features: Tensor) -> Tensor:
        """Logits [..., F] -> [..., K]."""
        return self.network(features)

    def mean(self, logits: Tensor) -> Tensor:
        """The number that the logits encode: [..., K] -> [...].

        Bins are summed in pairs b and -b: left to right, rounding would give an untrained head a value other than 0.
        """
        probs, half = logits.float().softmax(-1), len(self.bins) // 2
        return ((probs[..., -half:] - probs[..., :half].flip(-1)) * self.bins[-half:]).sum(-1)

    def codes(self, values: Tensor) -> Tensor:
        """Two-hot targets: [...] -> [..., K]."""
        return two_hot(values, self.bins)

    def loss(self, logits: Tensor, values: Tensor) -> Tensor:
        """Cross-entropy to the code of each value: [..., K], [...] -> [...]."""
        return categorical_cross_entropy(logits.float(), self.codes(values))


class RewardHead(TwoHotHead):
    """The reward received on arriving in a state."""


class ContinueHead(nn.Module):
    """Logits of the episode continuing after a state."""

    def __init__(self, *, feature_dim: int, hidden_sizes: Sequence[int], activation: str = "silu") -> None:
        super().__init__()
        self.network = norm_mlp(feature_dim, hidden_sizes, 1, activation)

    def forward(self, features: Tensor) -> Tensor:
        """[..., F] -> [...]."""
        return self.network(features).squeeze(-1)

    def loss(self, logits: Tensor, terminated: Tensor) -> Tensor:
        """Cross-entropy to 1 - terminated [...]; a truncation is not an end."""
        return F.binary_cross_entropy_with_logits(logits.float(), 1.0 - terminated, reduction="none")


def sample_one_hot(probs: Tensor, noise: Tensor | None) -> Tensor:
    """One-hot draws [..., C] by inversion of uniform noise [..., 1]; the most likely choices where it is None.

    One number per variable: on a CPU Gumbel noise for every choice costs more than the network.
    """
    if noise is None:
        index = probs.argmax(-1, keepdim=True)
    else:
        index = torch.searchsorted(probs.detach().cumsum(-1), noise).clamp_(max=probs.shape[-1] - 1)
    return torch.zeros_like(probs).scatter_(-1, index, 1.0)


def straight_through(probs: Tensor, noise: Tensor | None) -> Tensor:
    """The same draws with the gradient of the probabilities (Bengio et al. 2013)."""
    return sample_one_hot(probs, noise) + (probs - probs.detach())


class States(NamedTuple):
    """Posterior states of a window: h [L, B, D], z [L, B, S * C] and the posterior's probabilities [L, B, S, C]."""

    deter: Tensor
    latent: Tensor
    probs: Tensor

    @property
    def features(self) -> Tensor:
        """[L, B, D + S * C]."""
        return torch.cat([self.deter, self.latent], -1)


class RSSM(nn.Module):
    """Recurrent state-space model: h' = GRU(h, z, a), prior p(z'|h'), posterior q(z'|h', observation).

    Everything that does not depend on the recurrent state is computed for all steps at once, outside the scan: before
    it, the contributions of actions and embeddings to their layers; after it, the priors.
    """

    def __init__(
        self, *, embed_dim: int, action_dim: int, size: Size, activation: str = "silu", unimix: float = 0.01
    ) -> None:
        super().__init__()
        self.size, self.action_dim, self.unimix = size, action_dim, unimix
        self.deter_dim, self.latent_dim = size.deter, size.latents * size.classes
        self.feature_dim = self.deter_dim + self.latent_dim
        self.activation = activation_layer(activation)
        self.action_input = linear(action_dim, size.hidden, 1.0)
        self.latent_input = nn.Linear(self.latent_dim, size.hidden, bias=False)  # the action's layer has the bias
        self.input_norm = nn.LayerNorm(size.hidden, eps=NORM_EPS)
        self.cell = linear(size.hidden + size.deter, 3 * size.deter, 1.0)
        self.cell_norm = nn.LayerNorm(3 * size.deter, eps=NORM_EPS)
        nn.init.constant_(self.cell_norm.bias[size.deter : 2 * size.deter], -1.0)  # the update gate starts nearly shut
        self.prior_network = norm_mlp(size.deter, [size.hidden], self.latent_dim, activation)
        self.embed_input = linear(embed_dim, size.hidden, 1.0)
        self.deter_input = nn.Linear(size.deter, size.hidden, bias=False)  # the embedding's layer has the bias
        self.posterior_norm = nn.LayerNorm(size.hidden, eps=NORM_EPS)
        self.posterior_output = linear(size.hidden, self.latent_dim, 1.0)
        for layer in (self.latent_input, self.deter_input):
            nn.init.orthogonal_(layer.weight)

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., S * C] -> [..., S, C], mixed with a little of the uniform distribution."""
        soft = logits.float().unflatten(-1, (self.size.latents, self.size.classes)).softmax(-1)
        return soft * (1.0 - self.unimix) + self.unimix / self.size.classes

    def prior(self, deter: Tensor) -> Tensor:
        """[..., D] -> probabilities [..., S, C]."""
        return self.probabilities(self.prior_network(deter))

    def recur(self, deter: Tensor, latent: Tensor, action_input: Tensor) -> Tensor:
        """The next h [N, D] from h, z and the action's contribution to the input layer [N, hidden]."""
        inputs = torch.addmm(action_input, latent, self.latent_input.weight.t())
        inputs = self.activation(self.input_norm(inputs))
        gates = self.cell_norm(self.cell(torch.cat([inputs, deter], -1))).float()
        reset, update = gates[:, : 2 * self.deter_dim].sigmoid().chunk(2, -1)
        # tanh by the sigmoid: torch's own takes six times as long on a CPU
        candidate = 2.0 * torch.sigmoid(2.0 * reset * gates[:, 2 * self.deter_dim :]) - 1.0
        return torch.lerp(deter, candidate, update)

    def observe(
        self, embeds: Tensor, actions: Tensor, is_first: Tensor, noise: Tensor | None, start: Tensor | None = None
    ) -> States:
        """The scan over embeddings [L, B, E], actions that led there [L, B, A], is_first [L, B], noise [L, B, S, 1].

        `start`: features [B, F] before the first step (zeros if None). Where `is_first`, h, z and action are zeroed
        first, so that nothing carries over from an earlier episode in the window.
        """
        keep = 1.0 - is_first.to(actions.dtype).unsqueeze(-1)
        action_inputs = self.action_input(actions * keep).unbind(0)
        embed_inputs = self.embed_input(embeds).unbind(0)
        keeps = keep.unbind(0)
        features = actions.new_zeros(actions.shape[1], self.feature_dim) if start is None else start
        deter, latent = features.split([self.deter_dim, self.latent_dim], -1)
        deters, latents, all_probs = [], [], []
        for t in range(len(keeps)):
            deter = self.recur(deter * keeps[t], latent * keeps[t], action_inputs[t])
            hidden = torch.addmm(embed_inputs[t], deter, self.deter_input.weight.t())
            probs = self.probabilities(self.posterior_output(self.activation(self.posterior_norm(hidden))))
            latent = straight_through(probs, None if noise is None else noise[t]).flatten(1)
            deters.append(deter)
            latents.append(latent)
            all_probs.append(probs)
        return States(torch.stack(deters), torch.stack(latents), torch.stack(all_probs))

    def imagine(self, features: Tensor, actions: Tensor, noise: Tensor | None) -> Tensor:
        """One step of the prior: features [N, F], actions [N, A], noise [N, S, 1] -> the next features [N, F]."""
        deter, latent = features.split([self.deter_dim, self.latent_dim], -1)
        deter = self.recur(deter, latent, self.action_input(actions))
        return torch.cat([deter, sample_one_hot(self.prior(deter), noise).flatten(1)], -1)


class WorldModel(nn.Module):
    """The five parts, and observations in the form that they read and predict."""

    def __init__(
        self, *, encoder: Any, rssm: RSSM, decoder: Any, reward_head: RewardHead, continue_head: ContinueHead,
        observation_input: ObservationInput | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.encoder, self.rssm, self.decoder = encoder, rssm, decoder
        self.reward_head, self.continue_head = reward_head, continue_head
        self.observation_input = observation_input or ObservationInput()

    def prepare(self, obs: Tensor) -> Tensor:
        """Raw observations as floats: an image in [0, 1], a vector in symlog."""
        return self.decoder.targets(self.observation_input(obs))

    def predict(self, features: Tensor) -> Tensor:
        """The observations that features encode, on the environment's own scale: [L, B, F] -> [L, B, *obs_shape]."""
        decoded = self.decoder(features).float()
        if self.decoder.is_image:
            return decoded.sigmoid() * (self.observation_input.image_scale or 1.0)
        norm = self.observation_input.norm
        floats = symexp(decoded)
        return floats if norm is None else floats * (norm.var + 1e-8).sqrt() + norm.mean


class Critic(TwoHotHead):
    """The return from a state onward."""


class CategoricalActor(nn.Module):
    """One choice out of `action_dim`; raw is one-hot [..., A]. A little of the uniform policy is mixed in."""

    def __init__(
        self, *, feature_dim: int, action_dim: int, hidden_sizes: Sequence[int], activation: str = "silu",
        unimix: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__()
        self.action_dim, self.unimix = action_dim, unimix
        self.network = norm_mlp(feature_dim, hidden_sizes, action_dim, activation, OUTPUT_GAIN)

    def draw_noise(self, *shape: int, generator: torch.Generator) -> Tensor:
        """Uniform noise [*shape, 1] for `sample`."""
        return torch.rand(*shape, 1, generator=generator, device=generator.device)

    def probabilities(self, features: Tensor) -> Tensor:
        """[..., F] -> [..., A]."""
        return self.network(features).float().softmax(-1) * (1.0 - self.unimix) + self.unimix / self.action_dim

    def sample(self, features: Tensor, noise: Tensor | None) -> Tensor:
        """Raw actions; the most likely ones without noise."""
        return sample_one_hot(self.probabilities(features), noise)

    def evaluate(self, features: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of raw actions, and entropies, each [...]."""
        log_probs = self.probabilities(features).log()
        return (log_probs * raw).sum(-1), categorical_entropy(log_probs)

    def as_input(self, raw: Tensor) -> Tensor:
        """One-hot, unchanged."""
        return raw

    def as_action(self, raw: Tensor) -> Tensor:
        """Integers [...]."""
        return raw.argmax(-1)

    def input_of(self, actions: Tensor) -> Tensor:
        """Replayed actions [...] as the world model reads them, [..., A]."""
        return F.one_hot(actions.long(), self.action_dim).float()


class GaussianActor(nn.Module):
    """Independent Gaussians with means in (-1, 1); raw is unbounded, the action is clipped to [-1, 1]."""

    def __init__(
        self, *, feature_dim: int, action_dim: int, hidden_sizes: Sequence[int], activation: str = "silu"
    ) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.network = norm_mlp(feature_dim, hidden_sizes, 2 * action_dim, activation, OUTPUT_GAIN)

    def draw_noise(self, *shape: int, generator: torch.Generator) -> Tensor:
        """Standard normal noise [*shape, A] for `sample`."""
        return torch.randn(*shape, self.action_dim, generator=generator, device=generator.device)

    def gaussian(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log deviation, each [..., A]; the deviation starts near its upper end."""
        mean, spread = self.network(features).float().chunk(2, -1)
        low, high = STD_RANGE
        return mean.tanh(), (low + (high - low) * torch.sigmoid(spread + 2.0)).log()

    def sample(self, features: Tensor, noise: Tensor | None) -> Tensor:
        """Raw actions; the mean without noise."""
        mean, log_std = self.gaussian(features)
        return mean if noise is None else torch.addcmul(mean, log_std.exp(), noise)

    def evaluate(self, features: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Log-densities of raw actions, and entropies, each [...]."""
        mean, log_std = self.gaussian(features)
        return gaussian_log_prob(raw, mean, log_std), gaussian_entropy(log_std)

    def as_input(self, raw: Tensor) -> Tensor:
        """Clipped, as by the environment."""
        return raw.clamp(-1.0, 1.0)

    as_action = as_input

    def input_of(self, actions: Tensor) -> Tensor:
        """Replayed actions, unchanged."""
        return actions.float()
