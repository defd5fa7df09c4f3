"""E networks of one shape as one batched network, so that twin critics cost one call; an actor with such critics."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.blocks import ObservationInput, activation_layer, encode, encoded_dim


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

    `layer_norm` puts LayerNorm between each hidden linear layer and its activation (RLPD). Weights are orthogonal,
    drawn for each member.
    """

    def __init__(
        self, *, num_members: int, inputs: int, hidden_sizes: Sequence[int] = (256, 256), outputs: int = 1,
        activation: str = "relu", layer_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_members, self.outputs, self.layer_norm = num_members, outputs, layer_norm
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

    def run(self, x: Tensor, subset: Tensor | slice | None = None) -> Tensor:
        """Outputs of every member, or only of those in `subset` (indices [M] or a slice); others are not computed."""
        layers = self._layers if subset is None else [layer.select(subset) for layer in self._layers]
        if x.dim() == 2:
            x = x.expand(layers[0].weight.shape[0], *x.shape)
        for layer in layers[:-1]:
            x = torch.baddbmm(layer.bias, x, layer.weight)
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

    def forward(self, features: Tensor, actions: Tensor, subset: Tensor | slice | None = None) -> Tensor:
        """Values of every critic, or only of those in `subset`."""
        return self.run(torch.cat([encode(self.encoder, features), actions], -1), subset)


class ActorAndCritics(nn.Module):
    """An `actor` of the given kind and `critics`, which share nothing but the observation's input layer.

    With an `encoder`, the actor has one and the critics share another, initially a copy, each trained by its own loss.
    With a shared encoder, the actor's gradient spoils the features that the critics need (Yarats et al. 2021,
    arXiv:1910.01741). Those authors drop that gradient, which is cheaper but ties actor and critics together; here they
    have their own optimizers and targets. With `actor_columns`, the actor sees only these columns of its features, the
    critics all of theirs. `critic_options` are those of `CriticEnsemble`.
    """

    bounded_features = False  # whether its `ImageEncoder` is `bounded`, as deterministic actors need

    def __init__(
        self, actor: type[nn.Module], *, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (256, 256),
        activation: str = "relu", observation_input: ObservationInput | None = None, encoder: nn.Module | None = None,
        actor_columns: Sequence[int] | None = None, **critic_options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.action_dim = action_dim
        shape: dict[str, Any] = {"hidden_sizes": hidden_sizes, "activation": activation}
        self.actor: Any = actor(
            obs_dim=obs_dim, action_dim=action_dim, observation_input=observation_input, encoder=encoder,
            columns=actor_columns, **shape,
        )  # fmt: skip
        inputs = encoded_dim(obs_dim, encoder) + action_dim
        self.critics = CriticEnsemble(inputs=inputs, encoder=copy.deepcopy(encoder), **shape, **critic_options)

    def features(self, obs: Tensor) -> Tensor:
        """The input of the critics, before their encoder."""
        return self.actor.observation_input(obs)

    def ensemble_values(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Values of every critic [E, B]."""
        return self.critics(self.features(obs), actions)
