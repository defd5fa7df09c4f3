"""The replay family: hyper-parameters and registry entries of learners of transitions, stored, recorded or imagined.

The support of a categorical distribution of returns is given, or derived from random play and widened in a run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from torch import nn

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.mbpo import MBPO
from rl_training.config.networks import build_on_ensemble, build_on_model
from rl_training.config.params import (
    Activation,
    CriticWidths,
    Facts,
    Limits,
    MemoryParams,
    Params,
    Reason,
    Reasons,
    Schedule,
    Widths,
)
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.replay_store import EDGE, ReplayStore, discounted_returns
from rl_training.data.store import Store, StoreContext
from rl_training.envs.factory import EnvRecipe, make_env
from rl_training.envs.probe import play_at_random
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.models.mlp_mopo import LogvarUnits
from rl_training.validation import StrictModel

EPISODES, STEPS = 10, 5_000  # limits of random play
UNKNOWN = (-10.0, 10.0)  # if random play earns no reward: the support of Bellemare et al. 2017
ROOM_ABOVE, ROOM_BELOW = 3.0, 1.0  # ranges of random returns that learning may gain, or lose
# Why a number cannot be scheduled: the end of a sentence.
BY_BATCH = ("batch_renorm", "unit_batch_norm")  # architectures whose networks normalize by the statistics of a batch
DIVIDED_ONCE = "batches are divided once, when the run is built"
REPLAY_MEMORY = (
    "Where observations are kept: host, device (also in GPU memory), or auto: device if batches are large and all "
    "observations fit. With vectorization device, the whole replay is on the device unless this is host."
)
DatasetKind = Literal["random", "npz", "minari", "checkpoint"]
NEEDED = {"npz": "expert_dataset_path", "minari": "expert_dataset_id", "checkpoint": "expert_checkpoint"}


class SupportParams(StrictModel):
    """Hyper-parameters of a categorical head; a part of `Params`."""

    fixed: ClassVar[Reasons] = (Reason(("v_min", "v_max"), "the atoms are placed when the learner is built"),)

    v_min: float | None = Field(None, description="Smallest return of the distribution; null: measured, then widened.")
    v_max: float | None = Field(None, description="Largest return of the distribution; null: measured, then widened.")
    num_atoms: int = Field(51, ge=2, le=10_001, description="Number of atoms of the distribution.")
    widen_support: Literal["auto", "none", "v_min", "v_max", "both"] = Field(
        "auto", description="Which ends move outward when a return beyond them is stored; auto: those that are null."
    )

    @model_validator(mode="after")
    def _support_has_width(self) -> SupportParams:
        if self.v_min is not None and self.v_max is not None and self.v_max <= self.v_min:
            raise ValueError(f"v_max is {self.v_max}; it must be above v_min ({self.v_min})")
        return self

    def check_new_run(self) -> None:
        """Refuse an open end of the support where it cannot be found by looking at stored returns."""
        super().check_new_run()  # type: ignore[misc]  # of the Params, as below
        if getattr(self, "her_ratio", 0.0) and None in (self.v_min, self.v_max):
            raise UserError("her_ratio is above 0, and returns of other goals are not measured: give v_min and v_max.")

    def arguments_of(self, owner: type) -> dict[str, Any]:
        """The arguments as usual; before `settle`, missing ends of the support are those of `UNKNOWN`."""
        arguments: dict[str, Any] = super().arguments_of(owner)  # type: ignore[misc]  # of the Params, as below
        ends = dict(zip(("v_min", "v_max"), UNKNOWN, strict=True))
        return {name: ends.get(name) if value is None else value for name, value in arguments.items()}

    @property
    def facts(self) -> Facts:
        """As the base class, plus the support, which has both ends after `settle`."""
        inherited: Facts = super().facts  # type: ignore[misc]
        return inherited._replace(has_support=self.v_min is not None)

    def settle(self, recipe: EnvRecipe, spaces: EnvSpaces, seed: int) -> Any:
        """A copy with both ends of the support set."""
        open_ends = self.v_min is None, self.v_max is None
        moving = {(False, False): "none", (True, False): "v_min", (False, True): "v_max", (True, True): "both"}
        widened = {"widen_support": moving[open_ends] if self.widen_support == "auto" else self.widen_support}
        if not any(open_ends):
            return self.model_copy(update=widened)
        low, high = derive_support(recipe, spaces, self.largest("gamma"), seed)  # type: ignore[attr-defined]
        low = low if self.v_min is None else self.v_min
        high = high if self.v_max is None else self.v_max
        if high <= low:  # the given end is beyond everything that was seen
            low, high = (low, low + 1.0) if self.v_max is None else (high - 1.0, high)
        return self.model_copy(update={"v_min": low, "v_max": high, **widened})


def derive_support(recipe: EnvRecipe, spaces: EnvSpaces, gamma: float, seed: int) -> tuple[float, float]:
    """The ends at the start of a run, from a few random episodes and the `reward_range` that environments may declare.

    They leave room for `ROOM_ABOVE` times the range of random returns above those, and `ROOM_BELOW` times below, but
    not for more than the largest reward at every step of the longest episode. One reward of any known size always fits.
    """
    if recipe.made:
        what = f"v_min or v_max is not given, and random play to measure it needs one environment, but {recipe.env_id}"
        raise UserError(f"{what} is a Simulator; give both in algo_kwargs.")
    env = make_env(recipe)
    declared, limit = getattr(env.unwrapped, "reward_range", None), getattr(env.spec, "max_episode_steps", None)
    with suppress(Exception, SystemExit):  # the environment was made only for this
        env.close()
    steps = limit or recipe.max_episode_steps or math.inf
    weight = min(steps, (1.0 - gamma**steps) / (1.0 - gamma) if gamma < 1.0 else STEPS)  # of a reward at every step
    rewards, returns = random_returns(recipe, spaces, gamma, seed)
    if declared is not None and not recipe.wrappers.clip_reward and all(map(math.isfinite, declared)):
        rewards += map(float, declared)
    least, most = min(0.0, *rewards), max(0.0, *rewards)  # an episode may end at any step
    spread = max(0.0, *returns) - min(0.0, *returns)
    low = min(least, max(weight * least, min(returns) - ROOM_BELOW * spread))
    high = max(most, min(weight * most, max(returns) + ROOM_ABOVE * spread))
    edge = EDGE * (high - low)
    return (float(f"{low - edge:.3g}"), float(f"{high + edge:.3g}")) if edge else UNKNOWN


def random_returns(recipe: EnvRecipe, spaces: EnvSpaces, gamma: float, seed: int) -> tuple[list[float], list[float]]:
    """Rewards of random play, and the discounted returns from every step of it."""
    rewards: list[float] = []
    returns: list[float] = []
    begun = ended = 0
    for step in play_at_random(recipe, spaces, seed, STEPS):
        rewards.append(step.reward)
        if step.terminated or step.truncated or len(rewards) == STEPS:
            returns += discounted_returns(rewards[begun:], gamma)
            begun, ended = len(rewards), ended + 1
            if ended == EPISODES:
                break
    if not all(map(math.isfinite, rewards)):
        raise EnvironmentFailure.not_finite(spaces.env_id, "a reward")
    return rewards, returns


def absolute(path: str | None) -> str | None:
    """The absolute path, so that a run can be resumed from any folder; the name of a packaged file stays."""
    return os.path.abspath(path) if path is not None and os.path.exists(path) else path


DataPath = Annotated[str | None, AfterValidator(absolute)]


class OffPolicyParams(Params):
    """Hyper-parameters of algorithms that learn from transitions."""

    hidden_sizes: Widths = Field((256, 256), description="Widths of the hidden layers.")
    activation: Activation = Field("relu", description="Activation of the hidden layers.")
    max_grad_norm: float | None = Field(None, gt=0, description="Maximum gradient norm; null: no clipping.")
    optimizer_eps: float = Field(1e-8, gt=0, le=1, description="Epsilon of the optimizer.")
    batch_size: int = Field(256, ge=1, le=10**6, description="Transitions per update.")

    @property
    def facts(self) -> Facts:
        """As the base class, plus the rows of a batch."""
        return super().facts._replace(rows=self.batch_size)


class BufferParams(StrictModel):
    """Hyper-parameters of a replay buffer; a part of `Params`."""

    buffer_capacity: int = Field(100_000, ge=1, le=10**9, description="Rows kept, summed over environments.")
    learning_starts: int = Field(1_000, ge=0, description="Environment steps with random actions before learning.")
    replay_folder: str | None = Field(None, description="Keep the buffer in files under this folder instead of memory.")
    replay_memory: Literal["auto", "host", "device"] = Field("auto", description=REPLAY_MEMORY)

    @property
    def facts(self) -> Facts:
        """As the base class, plus the replay buffer."""
        inherited: Facts = super().facts  # type: ignore[misc]  # of the Params that this is a part of
        return inherited._replace(
            replay_rows=self.buffer_capacity, replay_on_device=self.replay_memory == "device",
            random_steps=self.learning_starts,
        )  # fmt: skip


class ReplayParams(BufferParams, OffPolicyParams):
    """Hyper-parameters of algorithms that replay single transitions."""

    one_step_with: ClassVar[str] = ""  # the part that needs plain rows, without n-step returns and priorities
    unused: ClassVar[Reasons] = (
        Reason(
            ("prioritized_alpha", "prioritized_beta_start", "prioritized_beta_end", "prioritized_eps"),
            "prioritized is false", lambda p: not p.prioritized,
        ),
        Reason(("random_action_hold",), "learning_starts is 0", lambda p: not p.learning_starts),
        Reason(("her_strategy",), "her_ratio is 0", lambda p: not p.relabels),
        Reason(("random_action_hold",), "actions are not held with masks", where=lambda s: s.has_action_mask),
    )  # fmt: skip
    fixed: ClassVar[Reasons] = (
        Reason(("prioritized_alpha", "prioritized_eps"), "the priorities in the buffer depend on it"),
        Reason(("prioritized_beta_start", "prioritized_beta_end"), "it is a part of prioritized_beta's own schedule"),
        Reason(("random_action_hold",), "it is read before learning starts only"),
        Reason(("her_ratio",), DIVIDED_ONCE),
    )
    at_most: ClassVar[Limits] = (("batch_size", "buffer_capacity"),)

    random_action_hold: float = Field(
        8.0, ge=1, le=10**6, description="Mean number of steps that a random action is held, unless there are masks."
    )
    train_frequency: int = Field(1, ge=1, description="Environment steps, summed over environments, per training turn.")
    gradient_updates_per_step: int = Field(1, ge=1, le=10_000, description="Updates per training turn.")
    n_step: int = Field(1, ge=1, le=1_000, description="Number of rewards in a return before bootstrapping.")
    prioritized: bool = Field(False, description="Sample by the last error of a transition instead of uniformly.")
    prioritized_alpha: float = Field(0.6, ge=0, le=1, description="Exponent of the error in sampling; 0 is uniform.")
    prioritized_beta_start: float = Field(0.4, ge=0, le=1, description="Initial exponent of the importance weights.")
    prioritized_beta_end: float = Field(1.0, ge=0, le=1, description="Final exponent of the importance weights.")
    prioritized_eps: float = Field(1e-6, gt=0, description="Added to every error, so that each row can be sampled.")
    her_ratio: float = Field(
        0.0, ge=0, le=1, description="Hindsight: share of every batch whose desired goal becomes one that was achieved."
    )
    her_strategy: Literal["future", "final", "episode"] = Field(
        "future", description="Where in its episode a step finds another goal: at a later step, the last, or any."
    )

    @model_validator(mode="after")
    def _rows_are_plain(self) -> ReplayParams:
        if self.one_step_with and (self.n_step != 1 or self.prioritized):
            values = f"n_step is {self.n_step} and prioritized {self.prioritized}"
            raise ValueError(f"{values}; with {self.one_step_with} they must be 1 and false")
        return self

    def check_new_run(self) -> None:
        """Refuse what does not go with hindsight."""
        super().check_new_run()
        given = f"her_ratio is {self.her_ratio}"
        if self.relabels and self.one_step_with:
            raise UserError(f"{given}; with {self.one_step_with} it must be 0.")
        if self.relabels and self.prioritized:
            raise UserError(f"{given} and prioritized true; an error belongs to one goal, so it must be false.")
        if self.relabels and self.replay_memory == "device":
            raise UserError(f"{given} and replay_memory 'device'; goals are replaced on the host: auto or host.")

    @property
    def relabels(self) -> bool:
        """Whether rows of batches get other goals."""
        return self.her_ratio > 0.0

    @property
    def facts(self) -> Facts:
        """As the base classes, plus the numbers that the buffer reads."""
        return super().facts._replace(store_numbers=("gamma", "prioritized_beta"))

    def built_in_schedules(self) -> dict[str, Schedule]:
        """The importance weights grow to full strength over the budget."""
        if not self.prioritized:
            return {}
        return {"prioritized_beta": Schedule(start=self.prioritized_beta_start, end=self.prioritized_beta_end)}


class SequenceReplayParams(MemoryParams, ReplayParams):
    """Hyper-parameters of algorithms that replay transitions or, with a memory, sequences of them."""

    unused: ClassVar[Reasons] = (
        Reason(("sequence_length", "burn_in", "sequence_period"), "memory is none", lambda p: p.memory == "none"),
        Reason(("priority_eta",), "prioritized is false", lambda p: not p.prioritized),
        Reason(("priority_eta",), "memory is none", lambda p: p.memory == "none"),
    )

    sequence_length: int = Field(40, ge=1, le=10**5, description="Steps that are learned from, per sequence.")
    burn_in: int = Field(
        8, ge=0, le=10**5, description="Observations before them that only bring the stored memory up to date."
    )
    sequence_period: int | None = Field(
        None, ge=1, le=10**5, description="Steps between the starts of sequences; null: half of sequence_length."
    )
    priority_eta: float = Field(
        0.9, ge=0, le=1, description="Share of the largest error in a sequence's priority; the rest is their mean."
    )

    def check_new_run(self) -> None:
        """Refuse hindsight in sequences."""
        super().check_new_run()
        if self.relabels and self.memory != "none":
            given = f"her_ratio is {self.her_ratio} and memory {self.memory!r}"
            raise UserError(f"{given}; sequences keep their goals, so one of them must be off (0, none).")

    @property
    def facts(self) -> Facts:
        """As the base classes, plus the rows of a batch of sequences."""
        inherited = super().facts
        steps = self.burn_in + self.sequence_length if inherited.state_size else 1
        return inherited._replace(rows=inherited.rows * steps)


class ActorCriticParams(CriticWidths, ReplayParams):
    """Slowly moving targets, and separate learning rates for the actor and the critics."""

    unused: ClassVar[Reasons] = (
        Reason(
            ("learning_rate",), "critic_learning_rate and actor_learning_rate are given and replace it",
            lambda p: None not in (p.critic_learning_rate, p.actor_learning_rate) and not p.tunes_temperature,
        ),
    )  # fmt: skip

    tau: float = Field(0.005, gt=0, le=1, description="Polyak factor of the target networks per update.")
    critic_learning_rate: float | None = Field(None, ge=0, le=10, description="Rate of critics; null: learning_rate.")
    actor_learning_rate: float | None = Field(None, ge=0, le=10, description="Rate of the actor; null: learning_rate.")
    critic_obs: tuple[str, ...] = Field((), description="Keys of a Dict observation that only the critic sees.")

    @property
    def facts(self) -> Facts:
        """As the base class, plus what only the critic sees."""
        return super().facts._replace(critic_obs=self.critic_obs)

    @property
    def tunes_temperature(self) -> bool:
        """Whether a temperature is learned, with `learning_rate`."""
        return False


class DeterministicActorParams(ActorCriticParams):
    """A deterministic actor with exploration noise that follows the critic's gradient."""

    unused: ClassVar[Reasons] = (Reason(("shift_pixels",), "augmentation is none", lambda p: p.augmentation == "none"),)
    fixed: ClassVar[Reasons] = (
        Reason(("exploration_noise_min",), "it says how acting starts; exploration_noise may have a schedule"),
    )

    exploration_noise: float = Field(0.1, ge=0, le=10, description="Deviation of the noise on actions in [-1, 1].")
    exploration_noise_min: float | None = Field(
        None, ge=0, le=10, description="Draw a deviation between this and exploration_noise for each environment, when "
        "an episode begins; null: all have exploration_noise.",
    )  # fmt: skip
    action_gradient_clip: float | None = Field(None, gt=0, description="Maximum norm of dQ/da; null: no clipping.")
    augmentation: Literal["none", "shift"] = Field(
        "none",
        description="Whether every batch moves its images by a few pixels, as in DrQ-v2: shift or none.",
    )
    shift_pixels: int = Field(4, ge=1, le=64, description="Maximum move of augmentation shift, in each direction.")
    target_actor: bool = Field(
        True, description="The action of the critics' target is that of a target actor; false: of the actor itself."
    )

    @model_validator(mode="after")
    def _noise_has_a_range(self) -> DeterministicActorParams:
        low, high = self.exploration_noise_min, self.exploration_noise
        if low is not None and low > high:
            raise ValueError(f"exploration_noise_min is {low}; it must be at most exploration_noise ({high})")
        return self


class SmoothedTargetParams(DeterministicActorParams):
    """Several critics, noise on the target's action, and a delayed actor."""

    unused: ClassVar[Reasons] = (
        Reason(("actor_q",), "num_critics is 1", lambda p: p.num_critics == 1),
        Reason(
            ("noise_clip",),
            "policy_noise is null",
            lambda p: p.policy_noise is None and "policy_noise" not in p.schedules,
        ),
    )

    num_critics: int = Field(1, ge=1, le=100, description="Number of critics; the target is the smallest of them.")
    actor_q: Literal["first", "min", "mean"] = Field(
        "first", description="What the actor maximizes: the first critic, or the min or mean of all."
    )
    policy_noise: float | None = Field(
        None, ge=0, le=10, description="Standard deviation of the noise on the target's action; null: no noise."
    )
    noise_clip: float = Field(0.5, ge=0, le=10, description="Maximum size of policy_noise.")
    policy_delay: int = Field(1, ge=1, le=1_000, description="Critic steps per actor step and target update.")


class AlphaParams(StrictModel):
    """The temperature of every algorithm based on SAC; a part of `Params`."""

    unused: ClassVar[Reasons] = (
        Reason(
            ("target_entropy", "target_entropy_ratio", "initial_alpha"),
            "alpha is {p.alpha}, and only alpha 'auto' uses it", lambda p: p.alpha != "auto",
        ),
    )  # fmt: skip
    fixed: ClassVar[Reasons] = (
        Reason(("alpha",), "it is 'auto', which tunes it, so give alpha as a number too", lambda p: p.alpha == "auto"),
    )

    alpha: Annotated[float, Field(ge=0)] | Literal["auto"] = Field("auto", description="Temperature; auto tunes it.")

    @property
    def tunes_temperature(self) -> bool:
        """Whether the temperature is learned."""
        return self.alpha == "auto"


class TemperatureParams(AlphaParams):
    """SAC's temperature for continuous actions; a part of `Params`."""

    target_entropy: float | None = Field(None, description="Of alpha auto; null: minus the count of action dimensions.")


RESIDUAL = ("residual", "hypersphere", "unit_batch_norm")  # architectures of blocks of one width


class CriticParams(StrictModel):
    """The axes of SAC's critics; a part of `Params`."""

    unused: ClassVar[Reasons] = (
        Reason(("top_quantiles_to_drop",), "num_quantiles is null", lambda p: p.num_quantiles is None),
        Reason(("v_min", "v_max"), "num_atoms is null", lambda p: p.num_atoms is None),
        Reason(("tau",), "target_networks is false", lambda p: not p.target_networks),
        Reason(
            ("critic_dropout", "critic_layer_norm"), "architecture is {p.architecture}, and only an mlp has it",
            lambda p: p.architecture != "mlp",
        ),
        Reason(
            ("joint_forward",), "architecture is {p.architecture}, which treats every row alone",
            lambda p: p.architecture not in BY_BATCH,
        ),
    )
    at_most: ClassVar[Limits] = (("critic_subset_size", "num_critics"),)
    fixed: ClassVar[Reasons] = (
        Reason(("critic_dropout",), "the critics are made with it"),
        Reason(("v_min", "v_max"), "the atoms are placed when the learner is built"),
        Reason(("return_bound",), "the statistics of returns have it"),
    )

    architecture: Literal["mlp", "batch_renorm", "residual", "hypersphere", "unit_batch_norm"] = Field(
        "mlp",
        description="Layers of actor and critics: mlp; batch_renorm, an mlp with batch renormalization (CrossQ); "
        "residual, one block with LayerNorm for each hidden size (SimBa); hypersphere, the same with weights and "
        "features of norm 1 (SimbaV2); unit_batch_norm, blocks with batch normalization and weights of norm 1 "
        "(FlashSAC).",
    )
    target_networks: bool = Field(True, description="Value the next state by slowly moving copies of the critics.")
    joint_forward: Literal["none", "critics", "both"] = Field(
        "none",
        description="What learns by batch statistics of state and next state together, in one pass: critics, or both "
        "critics and actor.",
    )
    num_critics: int = Field(2, ge=1, le=1_000, description="Number of critics, as one batched network.")
    critic_subset_size: int | None = Field(
        None, ge=1, description="Critics, drawn for each update, of which the target is made; null: all."
    )
    own_targets: bool = Field(
        False, description="Each critic learns the target of its own copy, not that of the smallest one of each row."
    )
    actor_q: Literal["mean", "min"] | None = Field(
        None, description="What the actor maximizes, over critics; null: the mean with a subset or quantiles, else min."
    )
    num_quantiles: int | None = Field(
        None, ge=2, le=1_000, description="Quantiles of the return that each critic predicts; null: its expectation."
    )
    top_quantiles_to_drop: int = Field(
        2, ge=0, description="Largest quantiles left out of the target, per critic, of all critics' quantiles together."
    )
    num_atoms: int | None = Field(
        None, ge=2, le=10_001, description="Returns whose probabilities each critic predicts; null: its expectation."
    )
    v_min: float | None = Field(None, description="Smallest return of num_atoms; null: minus return_bound.")
    v_max: float | None = Field(None, description="Largest return of num_atoms; null: return_bound.")
    return_bound: float | None = Field(
        None, gt=0, description="Divide rewards so that returns vary by 1 and are at most this; null: not."
    )
    critic_dropout: float = Field(0.0, ge=0, lt=1, description="Share of the critics' hidden units that are dropped.")
    critic_layer_norm: bool = Field(False, description="LayerNorm after each hidden layer of the critics.")
    actor_update_interval: int | None = Field(
        1, ge=1, description="Critic steps per actor and temperature step; null: one actor step per training turn."
    )

    @model_validator(mode="after")
    def _blocks_have_one_width(self) -> CriticParams:
        for name in ("hidden_sizes", "critic_hidden_sizes") if self.architecture in RESIDUAL else ():
            if (sizes := getattr(self, name)) is not None and len(set(sizes)) > 1:
                one = f"with architecture {self.architecture} it must be one width, given once for each block"
                raise ValueError(f"{name} is {list(sizes)}; {one}")
        return self

    @model_validator(mode="after")
    def _some_quantiles_are_kept(self) -> CriticParams:
        if self.num_quantiles is not None and self.top_quantiles_to_drop >= self.num_quantiles:
            dropped = f"top_quantiles_to_drop is {self.top_quantiles_to_drop}"
            raise ValueError(f"{dropped}; it must be below num_quantiles ({self.num_quantiles})")
        return self

    @model_validator(mode="after")
    def _targets_are_whole(self) -> CriticParams:
        pools = self.num_quantiles is not None or self.critic_subset_size not in (None, self.num_critics)
        if self.own_targets and pools:
            why = "with num_quantiles, or a critic_subset_size below num_critics, it must be false"
            raise ValueError(f"own_targets is true; {why}")
        return self

    @model_validator(mode="after")
    def _atoms_have_ends(self) -> CriticParams:
        if self.num_atoms is None:
            return self
        if self.num_quantiles is not None:
            atoms = f"with num_atoms ({self.num_atoms}) it must be null"
            raise ValueError(f"num_quantiles is {self.num_quantiles}; {atoms}")
        low, high, bound = self.v_min, self.v_max, self.return_bound
        if bound is not None:
            low, high = -bound if low is None else low, bound if high is None else high
        if low is None or high is None:
            raise ValueError(f"num_atoms is {self.num_atoms}; give v_min and v_max, or a return_bound, too")
        if low >= high:
            raise ValueError(f"v_max is {high}; it must be above v_min ({low})")
        return self

    @property
    def facts(self) -> Facts:
        """As the base class, plus the number of critics."""
        inherited: Facts = super().facts  # type: ignore[misc]  # of the Params that this is a part of
        return inherited._replace(members=self.num_critics)

    def arguments_of(self, owner: type) -> dict[str, Any]:
        """The arguments; the default of `actor_update_interval` is `gradient_updates_per_step`."""
        arguments: dict[str, Any] = super().arguments_of(owner)  # type: ignore[misc]  # of the Params, as above
        if "actor_update_interval" in arguments and self.actor_update_interval is None:
            arguments["actor_update_interval"] = self.gradient_updates_per_step  # type: ignore[attr-defined]
        return arguments


class SACParams(CriticParams, TemperatureParams, ActorCriticParams):
    """Hyper-parameters of SAC, and with other defaults those of its variants."""

    unused: ClassVar[Reasons] = (
        Reason(
            ("target_entropy_per_dimension",), "target_entropy is given", lambda p: p.target_entropy is not None
        ),
        Reason(("target_entropy_per_dimension",), "alpha is {p.alpha}, and only alpha 'auto' uses it",
               lambda p: p.alpha != "auto"),
        Reason(
            ("observation_statistics",), "observations are not normalized",
            where=lambda spaces: not spaces.normalize_observations,
        ),
    )  # fmt: skip
    fixed: ClassVar[Reasons] = (
        Reason(("initial_alpha",), "it is where the tuned temperature starts"),
        Reason(("target_entropy_per_dimension",), "target_entropy may have a schedule instead"),
    )

    initial_alpha: float = Field(1.0, gt=0, description="Initial temperature of alpha auto.")
    target_entropy_per_dimension: float | None = Field(
        None, description="Of target_entropy null: its share of each action dimension; null: -1."
    )
    backup_entropy: bool = Field(True, description="Include the entropy in the critics' targets, as SAC does.")
    learning_rate_decay: Literal["none", "linear", "cosine"] = Field(
        "none", description="How the learning rates fall to half of their values in the course of a run."
    )
    noise_repeat: int = Field(
        1, ge=1, le=1_000, description="Most steps for which noise in actions is held, n steps with chance ~ 1 / n^2."
    )
    actor_first: bool = Field(False, description="Update actor and temperature before the critics, not after them.")
    observation_statistics: Literal["batches", "steps"] = Field(
        "batches", description="What moves the statistics of normalized observations: every batch, or every new step."
    )


    def built_in_schedules(self) -> dict[str, Schedule]:
        """As the base class, plus learning rates that fall."""
        inherited, how = super().built_in_schedules(), self.learning_rate_decay
        if how == "none":
            return inherited
        names = [name for name in ("learning_rate", "critic_learning_rate", "actor_learning_rate")
                 if getattr(self, name) is not None and name not in self.find_unused()]  # fmt: skip
        rates = {name: getattr(self, name) for name in names}
        return inherited | {name: Schedule(type=how, start=rate, end=0.5 * rate) for name, rate in rates.items()}


class ModelParams(CriticWidths, TemperatureParams):
    """Hyper-parameters of SAC on rollouts through a learned model; a part of `Params`."""

    synonyms: ClassVar[Mapping[str, str]] = {"learning_rate": "policy_learning_rate"}
    fixed: ClassVar[Reasons] = (Reason(("synthetic_batch_ratio",), DIVIDED_ONCE),)
    at_most: ClassVar[Limits] = (("num_elites", "num_ensembles"),)

    policy_learning_rate: float = Field(
        3e-4, ge=0, le=10, description="Learning rate of actor, critics and temperature; the same as learning_rate."
    )
    tau: float = Field(0.005, gt=0, le=1, description="Polyak factor of the target networks per update.")
    model_learning_rate: float = Field(1e-3, ge=0, le=10, description="Learning rate of the model's Adam.")
    model_weight_decay: float = Field(
        0.0, ge=0, description="L2 penalty of the model, as a multiple of the published one (2.5e-5 to 1e-4 by layer)."
    )
    model_hidden_sizes: Widths = Field((200, 200, 200, 200), description="Widths of each member's hidden layers.")
    num_ensembles: int = Field(7, ge=1, le=100, description="Number of members of the model.")
    num_elites: int | None = Field(
        None, ge=1, description="Members with the smallest held-out error, used for rollouts; null: all but two."
    )
    model_batch_size: int = Field(256, ge=1, le=10**6, description="Rows per gradient step of each member.")
    logvar_units: LogvarUnits = Field(
        "environment", description="Units of the bounds of the model's log-variances, which begin at -10 and 0.5: the "
        "environment's, as published, or those of standardized targets.",
    )  # fmt: skip
    model_updates: int | None = Field(
        2_000, ge=1, description="Maximum gradient steps per fit; the held-out error usually stops it earlier. null: "
        "it alone does, as published.",
    )  # fmt: skip
    rollout_batch_size: int = Field(10_000, ge=1, le=10**7, description="Real states from which rollouts start.")
    rollout_horizon: float = Field(1.0, ge=1, le=1_000, description="Steps per rollout, rounded down.")
    rollout_refresh_interval: int = Field(
        1_000, ge=1, description="Policy updates between rounds of rollouts, checked once per training turn."
    )
    synthetic_buffer_capacity: int | None = Field(
        100_000, ge=1, le=10**9, description="Imagined transitions kept, at least one round; the oldest are dropped. "
        "null: as many as synthetic_rounds have at the longest rollout_horizon.",
    )  # fmt: skip
    synthetic_rounds: int | None = Field(
        None, ge=1, description="Keep only as many of the newest imagined rows as this many rounds have at the current "
        "rollout_horizon; null: as many as fit.",
    )  # fmt: skip
    synthetic_batch_ratio: float = Field(0.95, ge=0, le=1, description="Share of every policy batch that is imagined.")

    @property
    def facts(self) -> Facts:
        """As the base class, plus the model, which is fitted once, and the horizon that the store reads."""
        inherited: Facts = super().facts
        numbers = (*inherited.store_numbers, "rollout_horizon")
        return inherited._replace(members=self.num_ensembles, store_numbers=numbers, fits_every=math.inf)

    def check_new_run(self) -> None:
        """Refuse a buffer of imagined transitions that is too small for one round of rollouts, or for those to keep."""
        super().check_new_run()  # type: ignore[misc]  # of the Params that this is a part of
        assert isinstance(self, Params)
        capacity, rounds = self.synthetic_buffer_capacity, self.synthetic_rounds
        if not self.synthetic_batch_ratio:
            return
        if capacity is None and rounds is None:
            raise UserError(
                "algo_kwargs: synthetic_buffer_capacity is null, which means as many as synthetic_rounds have; give "
                "one of the two."
            )
        if capacity is not None and capacity < self.rows_of(rounds or 1):
            sizes = f"{self.rollout_batch_size} x {int(self.largest('rollout_horizon'))}"
            what, so = "rollout_batch_size times the longest rollout_horizon", "or it keeps only the ends of rollouts"
            if rounds is not None:
                what, sizes = f"synthetic_rounds times {what}", f"{rounds} x {sizes}"
                so = "or null, which is that"
            raise UserError(
                f"algo_kwargs: synthetic_buffer_capacity is {capacity}; it must be at least {what} ({sizes}), {so}."
            )

    def rows_of(self, rounds: int) -> int:
        """The imagined transitions of that many rounds, at the longest horizon."""
        assert isinstance(self, Params)
        return rounds * self.rollout_batch_size * int(self.largest("rollout_horizon"))


class SequenceParams(BufferParams, Params):
    """Hyper-parameters of algorithms that learn from sequences."""

    at_most: ClassVar[Limits] = (("sequence_length", "buffer_capacity"),)

    batch_size: int = Field(16, ge=1, le=10**5, description="Windows per update.")
    sequence_length: int = Field(64, ge=1, le=10**5, description="Consecutive steps per window.")
    train_ratio: float = Field(32.0, gt=0, le=10**6, description="Replayed steps per environment step.")

    @property
    def facts(self) -> Facts:
        """As the base classes, plus the rows of a batch."""
        return super().facts._replace(rows=self.batch_size * self.sequence_length, store_numbers=("train_ratio",))


# ---- recorded data ------------------------------------------------------------------------------------------------


class DatasetParams(StrictModel):
    """Hyper-parameters that name recorded data."""

    dataset_kind: DatasetKind = Field("random", description="Where the recorded data comes from.")
    dataset_path: DataPath = Field(
        None, description="An npz file, the name of a packaged one, a checkpoint with its replay, or Minari's folder."
    )
    dataset_id: str | None = Field(None, description="Name of a Minari dataset.")
    dataset_size: int | None = Field(None, ge=1, description="Transitions to generate, or to use from a larger set.")
    dataset_seed: int = Field(0, ge=0, description="Seed of the generated data.")


class ExpertParams(StrictModel):
    """Hyper-parameters that name an expert's steps."""

    expert_dataset_kind: DatasetKind = Field("random", description="Where the expert's steps come from.")
    expert_dataset_path: DataPath = Field(None, description="An npz file, a packaged one's name, or Minari's folder.")
    expert_dataset_id: str | None = Field(None, description="Name of a Minari dataset.")
    expert_dataset_size: int | None = Field(None, ge=1, description="Steps to record, or to use from a larger set.")
    expert_dataset_seed: int = Field(0, ge=0, description="Seed of the recorded steps.")
    expert_checkpoint: DataPath = Field(None, description="Checkpoint whose policy is recorded before the run.")

    @model_validator(mode="after")
    def _says_where(self) -> ExpertParams:
        name = NEEDED.get(self.expert_dataset_kind)
        if name is not None and getattr(self, name) is None:
            raise ValueError(f"{name} is missing; expert_dataset_kind {self.expert_dataset_kind} needs it")
        return self

    def as_dataset(self) -> DatasetParams:
        """The same settings under the names that other data uses; only an expert can be a checkpoint."""
        return DatasetParams(**{name: getattr(self, f"expert_{name}") for name in DatasetParams.model_fields})


# ---- registry entries ---------------------------------------------------------------------------------------------


def continuous_spec(
    learner: type[Algorithm], network: type[nn.Module], *, store: Callable[[StoreContext], Store] = ReplayStore,
    **entry: Any,
) -> AlgorithmSpec:  # fmt: skip
    """The registry entry of a replay learner for continuous actions; `network` is the class of its `model`."""
    entry.setdefault("defaults", {"log_interval": 1_000, "total_timesteps": 20_000})
    return AlgorithmSpec(
        lane="replay", learner=learner, build=partial(build_on_model, learner, network), store=store,
        action_kinds=("continuous",), **entry,
    )  # fmt: skip


def model_spec(learner: type[MBPO], *, total_timesteps: int, **entry: Any) -> AlgorithmSpec:
    """The registry entry of a learner of continuous actions with a model of vectors."""
    return AlgorithmSpec(
        lane="model rollouts", learner=learner, build=partial(build_on_ensemble, learner),
        action_kinds=("continuous",), observation_kinds=("vector",),
        defaults={"log_interval": 1_000, "total_timesteps": total_timesteps}, **entry,
    )  # fmt: skip
