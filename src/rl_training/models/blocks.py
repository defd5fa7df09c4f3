"""Building blocks of networks: MLPs, encoders, observation input and normalization, ensembles.

`MLPEnsemble` is E networks of one shape as one batched network, so that twin critics cost one call.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.ops.moments import merge_moments, moments_of_sums
from rl_training.speed.passes import Array, Columns, NumpyPolicy, NumpyStep, numpy_chain, numpy_step

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU, "gelu": nn.GELU,
}  # fmt: skip


def activation_layer(name: str) -> nn.Module:
    """The activation of that name."""
    if name not in ACTIVATIONS:
        raise UserError(f"activation is {name!r}; it must be one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]()


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2.0)) -> nn.Linear:
    """A linear layer with orthogonal weights and zero bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(
    inputs: int, hidden_sizes: Sequence[int], outputs: int, activation: str = "tanh", output_gain: float = 1.0,
    columns: Sequence[int] | None = None,
) -> nn.Sequential:  # fmt: skip
    """Linear layers with an activation between them, orthogonal weights, on all inputs or only these `columns`."""
    sizes = [inputs if columns is None else len(columns), *hidden_sizes]
    layers: list[nn.Module] = [] if columns is None else [Columns(columns)]
    for before, after in pairwise(sizes):
        layers += [linear(before, after), activation_layer(activation)]
    return nn.Sequential(*layers, linear(sizes[-1], outputs, output_gain))


class ImageEncoder(nn.Sequential):
    """Convolutions that fit the size of the image, then one linear layer: [B, C, H, W] -> [B, out_dim].

    From 36 pixels a side it has the three layers of the DQN paper; below that one 3x3 layer, as MinAtar's authors use.
    `width` is the width of the linear layer. With `out_dim` 0 there is no linear layer, for networks whose head has it.
    With `bounded`, it has 50 units, LayerNorm and tanh, as in DrQ-v2 (Yarats et al. 2021, arXiv:2107.09645).
    With `layer_norm`, LayerNorm over all channels and pixels comes before every ReLU, as in PQN.
    """

    def __init__(
        self, shape: Sequence[int], out_dim: int | None = None, *, bounded: bool = False, layer_norm: bool = False
    ) -> None:
        channels, height, width = shape
        if min(height, width) < 3:
            raise UserError(f"images of {height}x{width} are too small for the CNN encoder; it needs at least 3x3.")
        large = min(height, width) >= 36
        if large:
            convolutions = [
                nn.Conv2d(channels, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)
            ]  # fmt: skip
        else:
            convolutions = [nn.Conv2d(channels, 16, 3)]
        width = 50 if bounded else 512 if large else 128
        out_dim = width if out_dim is None else out_dim
        layers: list[nn.Module] = []
        found = torch.zeros(1, *shape)
        for convolution in convolutions:
            nn.init.orthogonal_(convolution.weight, math.sqrt(2.0))
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            with torch.no_grad():
                found = convolution(found)
            layers += [convolution, *[nn.LayerNorm(found.shape[1:])] * layer_norm, nn.ReLU()]
        layers.append(nn.Flatten())
        if out_dim:
            layers += [linear(found.numel(), out_dim), *[nn.LayerNorm(out_dim)] * (bounded or layer_norm)]
            layers.append(nn.Tanh() if bounded else nn.ReLU())
        super().__init__(*layers)
        self.width, self.out_dim = width, out_dim or found.numel()


class MixedEncoder(nn.Module):
    """Each image through its own convolutions, joined with the vector: [B, D] of `MixedInput` -> [B, out_dim].

    `shapes` are those of the images, with channels first; `options` are those of `ImageEncoder`.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], vector_size: int, **options: bool) -> None:
        super().__init__()
        self.shapes = [tuple(shape) for shape in shapes]
        self.sizes = [*map(math.prod, shapes), vector_size]
        encoders = [ImageEncoder(shape, **options) for shape in shapes]
        self.images = nn.ModuleList(encoders)
        self.out_dim = sum(encoder.out_dim for encoder in encoders) + vector_size

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> [B, out_dim]."""
        *images, vector = x.split(self.sizes, -1)
        rows = zip(self.images, images, self.shapes, strict=True)
        return torch.cat([*(encoder(image.unflatten(-1, shape)) for encoder, image, shape in rows), vector], -1)


def encoded_dim(obs_dim: int, encoder: nn.Module | None) -> int:
    """Input width of the layers after an encoder: the observation's if there is none."""
    return obs_dim if encoder is None else int(encoder.out_dim)  # type: ignore[arg-type]


def encode(encoder: nn.Module | None, x: Tensor) -> Tensor:
    """The input of the layers after an encoder: the observation itself if there is none."""
    return x if encoder is None else encoder(x)


PRIOR = 1e-4  # rows, as which the statistics before the first step count


class ObservationNorm(nn.Module):
    """Running mean and variance of observations; changed only by `update`, so it is frozen outside learning."""

    ranks: Any = None  # the other learners of a distributed run, whose rows count too (run/ranks.py)

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        self.mean = nn.Buffer(torch.zeros(size))
        self.var = nn.Buffer(torch.ones(size))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.float64))

    def forward(self, obs: Tensor) -> Tensor:
        """[B, D] -> [B, D], about unit scale."""
        return ((obs - self.mean) * torch.rsqrt(self.var + 1e-8)).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, obs: Tensor) -> None:
        """Add rows [B, D] to the statistics."""
        if len(obs) == 0:
            return
        mean, var, rows = obs.mean(0), obs.var(0, correction=0), float(len(obs))
        if self.ranks is not None:
            (mean, var), rows = self.ranks.moments(mean, var), rows * self.ranks.count
        self._add(rows, mean, var)

    @torch.no_grad()
    def update_where(self, obs: Tensor, valid: Tensor) -> None:
        """Add the valid ones of rows [B, D]; a function of tensors. There may be none, and ranks may differ in number.

        The first time, mean 0 and variance 1 count as `PRIOR` rows.
        """
        self.count.clamp_(min=PRIOR)
        rows = obs.double() * valid.unsqueeze(-1)
        sums = torch.cat([valid.double().sum().view(1), rows.sum(0), rows.square().sum(0)])
        if self.ranks is not None:
            sums = self.ranks.mean_(sums) * self.ranks.count
        count, mean, var = moments_of_sums(sums)
        self._add(count, mean.to(obs.dtype), var.to(obs.dtype))

    def _add(self, rows: float | Tensor, mean: Tensor, var: Tensor) -> None:
        moments = merge_moments((self.count, self.mean, self.var), rows, mean, var)
        for held, value in zip((self.count, self.mean, self.var), moments, strict=True):
            held.copy_(value)

    def numpy_step(self) -> NumpyStep | None:
        """The same in numpy."""
        if not self.mean.is_cpu:
            return None
        mean, var, clip = self.mean.numpy(), self.var.numpy(), self.clip
        return lambda obs, rng: np.clip((obs - mean) / np.sqrt(var + 1e-8), -clip, clip)


class DatasetNorm(ObservationNorm):
    """Mean and deviation of recorded observations, set once: (obs - mean) / (deviation + 0.001), as in TD3+BC."""

    @torch.no_grad()
    def fit(self, obs: Tensor) -> None:
        """Take the statistics of these rows [M, D]."""
        super().update(obs)

    def forward(self, obs: Tensor) -> Tensor:
        """[B, D] -> [B, D], about unit scale."""
        return (obs - self.mean) / (self.var.sqrt() + 1e-3)

    def update(self, obs: Tensor) -> None:
        """Nothing: the statistics are those of the recorded data."""

    def numpy_step(self) -> NumpyStep | None:
        """The same in numpy."""
        if not self.mean.is_cpu:
            return None
        mean, var = self.mean.numpy(), self.var.numpy()
        return lambda obs, rng: (obs - mean) / (np.sqrt(var) + np.float32(1e-3))


class ObservationInput(nn.Module):
    """Converts raw observations for the first layer: floats, images divided by their scale, normalized on request."""

    def __init__(
        self, *, image_scale: float | None = None, normalize_size: int | None = None,
        norm: type[ObservationNorm] = ObservationNorm,
    ) -> None:  # fmt: skip
        super().__init__()
        self.image_scale = image_scale
        self.norm = norm(normalize_size) if normalize_size else None

    def forward(self, obs: Tensor) -> Tensor:
        """[B, ...] in its own dtype -> float32."""
        if self.image_scale is not None:
            return obs.float() / self.image_scale
        obs = obs if obs.dtype == torch.float32 else obs.float()
        return obs if self.norm is None else self.norm(obs)

    def update(self, obs: Tensor, valid: Tensor | None = None) -> None:
        """Add observations, or the valid ones of them, to the running statistics, if there are any."""
        if self.norm is None:
            return
        if valid is None:
            self.norm.update(self.vectors(obs))
        else:
            self.norm.update_where(self.vectors(obs), valid)

    def vectors(self, obs: Tensor) -> Tensor:
        """The part of raw observations that is normalized, as floats."""
        return obs.float()

    def fit(self, obs: Tensor) -> None:
        """Take the statistics of recorded observations, if they are used."""
        if isinstance(self.norm, DatasetNorm):
            self.norm.fit(self.vectors(obs))

    def numpy_step(self) -> NumpyStep | None:
        """The same in numpy; None for images."""
        if self.image_scale is not None:
            return None
        return numpy_chain([] if self.norm is None else [self.norm.numpy_step()])


class MixedInput(ObservationInput):
    """Images and a vector, packed into bytes by `EnvSpaces.encode`, as one row of floats: [B, bytes] -> [B, D].

    Pixels come first, divided by their image's scale, then the vector, normalized on request. Rows that are already
    floats are only scaled, because an exported policy has no bytes.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], scales: Sequence[float], vector_size: int, *, normalize: bool,
        norm: type[ObservationNorm] = ObservationNorm,
    ) -> None:  # fmt: skip
        super().__init__(normalize_size=vector_size if normalize else None, norm=norm)
        every = [torch.full((math.prod(shape),), scale) for shape, scale in zip(shapes, scales, strict=True)]
        self.scales = nn.Buffer(torch.cat(every), persistent=False)

    def split(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels [..., P] on their own scale and the vector [..., V], as floats."""
        pixels, vector = obs[..., : len(self.scales)], obs[..., len(self.scales) :]
        if obs.dtype == torch.uint8 and vector.shape[-1]:  # a copy: floats must start at a multiple of four bytes
            vector = vector.clone(memory_format=torch.contiguous_format).view(torch.float32)
        return pixels.float(), vector.float()

    def forward(self, obs: Tensor) -> Tensor:
        """[..., bytes] or [..., D] -> [..., D]."""
        pixels, vector = self.split(obs)
        return torch.cat([pixels / self.scales, vector if self.norm is None else self.norm(vector)], -1)

    def vectors(self, obs: Tensor) -> Tensor:
        """The vectors, without the images."""
        return self.split(obs)[1]

    def numpy_step(self) -> NumpyStep | None:
        """There is none: images are encoded by convolutions."""
        return None


class ObservationNetwork(nn.Module):
    """A network that reads raw observations, through one `encoder` if there is one."""

    def __init__(
        self, *, obs_dim: int, observation_input: ObservationInput | None = None, encoder: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.observation_input, self.encoder = observation_input or ObservationInput(), encoder
        self.input_dim = encoded_dim(obs_dim, encoder)

    def features(self, obs: Tensor) -> Tensor:
        """The input [B, input_dim] of the layers, from observations [B, ...]."""
        return encode(self.encoder, self.observation_input(obs))

    def numpy_form(self, *layers: nn.Module, most_weights: int = 256 * 256) -> NumpyStep | None:
        """The observation's input and these layers in numpy on the same weights.

        None with an encoder, on a GPU, or if a layer has more than `most_weights`.
        """
        steps = [numpy_step(layer, most_weights) for layer in (self.observation_input, *layers)]
        return numpy_chain(steps) if self.encoder is None else None


def noisy_policy(forward: NumpyStep | None, deviation: Callable[[], float]) -> NumpyPolicy | None:
    """mu(s) in numpy, with clipped Gaussian noise of the current deviation unless deterministic."""
    if forward is None:
        return None

    def act(obs: Array, masks: Array | None, rng: np.random.Generator, deterministic: bool) -> Array:
        actions = forward(obs, None)
        if not deterministic:
            actions = actions + deviation() * rng.standard_normal(actions.shape, dtype=np.float32)
            np.clip(actions, -1.0, 1.0, out=actions)
        return actions

    return act


class _Layer(NamedTuple):
    """Parameters of E linear layers, [E, in, out] and [E, 1, out], and of the normalization after them."""

    weight: Tensor
    bias: Tensor
    scale: Tensor | None
    shift: Tensor | None

    def select(self, subset: Tensor | slice) -> _Layer:
        """The parameters of these members."""
        is_slice = isinstance(subset, slice)
        return _Layer(*(p if p is None else p[subset] if is_slice else p.index_select(0, subset) for p in self))  # type: ignore[arg-type]


class MLPEnsemble(nn.Module):
    """E independent MLPs: [B, inputs], the same rows for all, or [E, B, inputs] -> [E, B, outputs], or [E, B] for one.

    `layer_norm` puts LayerNorm between each hidden linear layer and its activation (RLPD). `dropout` is the share of
    hidden units that the masks of `draw_masks` drop, before LayerNorm (DroQ). Weights are orthogonal, drawn for each
    member.
    """

    def __init__(
        self, *, num_members: int, inputs: int, hidden_sizes: Sequence[int] = (256, 256), outputs: int = 1,
        activation: str = "relu", layer_norm: bool = False, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_members, self.outputs, self.layer_norm, self.dropout = num_members, outputs, layer_norm, dropout
        self.activation = activation_layer(activation)
        if isinstance(self.activation, nn.ReLU):
            self.activation.inplace = True  # no backward pass needs the values that the ReLU overwrites
        self._layers: list[_Layer] = []  # plain references to the parameters: reading a ParameterList is slow
        sizes = [inputs, *hidden_sizes, outputs]
        for i, (before, after) in enumerate(pairwise(sizes)):
            hidden = i < len(sizes) - 2
            weight = torch.empty(num_members, before, after)
            for member in weight:
                nn.init.orthogonal_(member, math.sqrt(2.0) if hidden else 1.0)
            parts = {"weight": weight, "bias": torch.zeros(num_members, 1, after)}
            if layer_norm and hidden:
                parts |= {"scale": torch.ones(num_members, 1, after), "shift": torch.zeros(num_members, 1, after)}
            for name, value in parts.items():
                self.register_parameter(f"{name}{i}", nn.Parameter(value))
            self._layers.append(_Layer(*(getattr(self, f"{name}{i}", None) for name in _Layer._fields)))  # type: ignore[arg-type]

    def draw_masks(self, members: int, rows: int, generator: torch.Generator) -> tuple[Tensor, ...] | None:
        """Dropout masks [members, rows, H] of every hidden layer, each its own for every member; None without dropout.

        A unit that is kept is scaled up, so that its mean stays. The masks are used whether a module trains or not.
        """
        if not self.dropout:
            return None
        shapes = [(members, rows, layer.bias.shape[-1]) for layer in self._layers[:-1]]
        sizes, kept = [math.prod(shape) for shape in shapes], 1.0 - self.dropout
        drawn = torch.empty(sum(sizes), device=generator.device).bernoulli_(kept, generator=generator).div_(kept)
        return tuple(mask.view(shape) for mask, shape in zip(drawn.split(sizes), shapes, strict=True))

    def run(self, x: Tensor, subset: Tensor | slice | None = None, masks: Sequence[Tensor] | None = None) -> Tensor:
        """Outputs of every member, or only of those in `subset` (indices [M] or a slice); others are not computed.

        `masks` of `draw_masks` are for the members that are computed.
        """
        layers = self._layers if subset is None else [layer.select(subset) for layer in self._layers]
        if x.dim() == 2:
            x = x.expand(layers[0].weight.shape[0], *x.shape)
        for i, layer in enumerate(layers[:-1]):
            x = torch.baddbmm(layer.bias, x, layer.weight)
            if masks is not None:
                x = x * masks[i]
            if layer.scale is not None and layer.shift is not None:
                x = torch.addcmul(layer.shift, F.layer_norm(x, x.shape[-1:]), layer.scale)
            x = self.activation(x)
        head = layers[-1]
        if self.outputs > 1:
            return torch.baddbmm(head.bias, x, head.weight)
        # A batched product with one column is 5 times slower than this.
        return (x * head.weight.mT).sum(-1) + head.bias.squeeze(-1)

    @torch.no_grad()
    def combine_outputs(self, weights: Tensor, offsets: Tensor) -> None:
        """Change the last layer so that the outputs [K] become `weights` [K, K] @ outputs + `offsets`."""
        head = self._layers[-1]
        head.weight.copy_(head.weight @ weights.T)
        head.bias.copy_(head.bias @ weights.T + offsets)


class CriticEnsemble(MLPEnsemble):
    """E critics on (features, actions): [B, F], [B, A] -> [E, B], or [E, B, outputs] for several outputs.

    All of them read the features through one `encoder`, if there is one.
    """

    def __init__(self, *, num_critics: int, encoder: nn.Module | None = None, **shape: Any) -> None:
        super().__init__(num_members=num_critics, **shape)
        self.encoder = encoder

    def forward(
        self, features: Tensor, actions: Tensor, subset: Tensor | slice | None = None,
        masks: Sequence[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Values of every critic, or only of those in `subset`; dropout where there are `masks`."""
        return self.run(torch.cat([encode(self.encoder, features), actions], -1), subset, masks)


class ActorAndCritics(nn.Module):
    """An `actor` of the given kind and `critics`, which share nothing but the observation's input layer.

    With an `encoder`, the actor has one and the critics share another, initially a copy, each trained by its own loss.
    With a shared encoder, the actor's gradient spoils the features that the critics need (Yarats et al. 2021,
    arXiv:1910.01741). Those authors drop that gradient, which is cheaper but ties actor and critics together; here they
    have their own optimizers and targets. With `actor_columns`, the actor sees only these columns of its features, the
    critics all of theirs. The critics have the actor's widths unless they have their own. `critic_options` are those of
    `make_critics`.
    """

    bounded_features = False  # whether its `ImageEncoder` is `bounded`, as deterministic actors need

    def __init__(
        self, actor: Callable[..., nn.Module], *, obs_dim: int, action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256), critic_hidden_sizes: Sequence[int] | None = None,
        activation: str = "relu", observation_input: ObservationInput | None = None, encoder: nn.Module | None = None,
        actor_columns: Sequence[int] | None = None, **critic_options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.action_dim = action_dim
        self.actor: Any = actor(
            obs_dim=obs_dim, action_dim=action_dim, observation_input=observation_input, encoder=encoder,
            columns=actor_columns, hidden_sizes=hidden_sizes, activation=activation,
        )  # fmt: skip
        inputs = encoded_dim(obs_dim, encoder) + action_dim
        sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        self.critics = self.make_critics(
            inputs=inputs, encoder=copy.deepcopy(encoder), hidden_sizes=sizes, activation=activation, **critic_options
        )

    def make_critics(self, **options: Any) -> Any:
        """A network of critics; a subclass may make another one."""
        return CriticEnsemble(**options)

    def features(self, obs: Tensor) -> Tensor:
        """The input of the critics, before their encoder."""
        return self.actor.observation_input(obs)

    def ensemble_values(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Values of every critic [E, B]."""
        return self.critics(self.features(obs), actions)
