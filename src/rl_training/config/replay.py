"""The replay family: hyper-parameters and registry entries of learners with a replay buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import nn

from rl_training.algorithms.base import Algorithm
from rl_training.config.networks import build_on_model
from rl_training.config.params import Activation, Facts, Params, Schedule, Unused, Widths
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.replay_store import ReplayStore
from rl_training.data.store import Store, StoreContext
from rl_training.validation import StrictModel

# Why a number cannot be scheduled: the end of a sentence.
DIVIDED_ONCE = "batches are divided once, when the run is built"


ReplayMemory = Annotated[
    Literal["auto", "host", "device"],
    Field(
        description="Where observations are kept: host, device (also in GPU memory), or auto: device if batches are "
        "large and all observations fit."
    ),
]



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



class ReplayParams(OffPolicyParams):
    """Hyper-parameters of algorithms with a replay buffer."""

    one_step_with: ClassVar[str] = ""  # the part that needs plain rows, without n-step returns and priorities
    unused: ClassVar[tuple[Unused, ...]] = (
        Unused(
            ("prioritized_alpha", "prioritized_beta_start", "prioritized_beta_end", "prioritized_eps"),
            "prioritized is false", lambda p: not p.prioritized,
        ),
        Unused(("random_action_hold",), "learning_starts is 0", lambda p: not p.learning_starts),
        Unused(("random_action_hold",), "actions are not held with masks", where=lambda s: s.has_action_mask),
    )  # fmt: skip

    buffer_capacity: int = Field(100_000, ge=1, le=10**9, description="Transitions kept, summed over environments.")
    learning_starts: int = Field(1_000, ge=0, description="Environment steps with random actions before learning.")
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
    prioritized_eps: float = Field(
        1e-6, gt=0, description="Added to every error, so that every transition can be sampled."
    )
    replay_folder: str | None = Field(None, description="Keep the buffer in files under this folder instead of memory.")
    replay_memory: ReplayMemory = "auto"

    @model_validator(mode="after")
    def _rows_fit(self) -> ReplayParams:
        if self.batch_size > self.buffer_capacity:
            raise ValueError(
                f"batch_size is {self.batch_size}; it must be at most buffer_capacity ({self.buffer_capacity})"
            )
        if self.one_step_with and (self.n_step != 1 or self.prioritized):
            values = f"n_step is {self.n_step} and prioritized {self.prioritized}"
            raise ValueError(f"{values}; with {self.one_step_with} they must be 1 and false")
        return self

    @property
    def facts(self) -> Facts:
        """As the base class, plus the replay buffer."""
        return super().facts._replace(
            replay_rows=self.buffer_capacity, replay_on_device=self.replay_memory == "device",
            random_steps=self.learning_starts,
        )  # fmt: skip

    def fixed_numbers(self) -> dict[str, str]:
        """As the base class, plus numbers that stored rows depend on and the ends of a built-in schedule."""
        stored = dict.fromkeys(("prioritized_alpha", "prioritized_eps"), "the priorities in the buffer depend on it")
        ends = ("prioritized_beta_start", "prioritized_beta_end")
        built_in = dict.fromkeys(ends, "it is a part of prioritized_beta's own schedule")
        warm_up = {"random_action_hold": "it is read before learning starts only"}
        return super().fixed_numbers() | stored | built_in | warm_up

    def built_in_schedules(self) -> dict[str, Schedule]:
        """The importance weights grow to full strength over the budget."""
        if not self.prioritized:
            return {}
        return {"prioritized_beta": Schedule(start=self.prioritized_beta_start, end=self.prioritized_beta_end)}



class ActorCriticParams(ReplayParams):
    """Slowly moving targets, and separate learning rates for the actor and the critics."""

    unused: ClassVar[tuple[Unused, ...]] = (
        Unused(
            ("learning_rate",), "critic_learning_rate and actor_learning_rate are given and replace it",
            lambda p: None not in (p.critic_learning_rate, p.actor_learning_rate) and not p.tunes_temperature,
        ),
    )  # fmt: skip

    tau: float = Field(0.005, gt=0, le=1, description="Polyak factor of the target networks per update.")
    critic_learning_rate: float | None = Field(
        None, ge=0, le=10, description="Learning rate of the critics; null: learning_rate."
    )
    actor_learning_rate: float | None = Field(
        None, ge=0, le=10, description="Learning rate of the actor; null: learning_rate."
    )

    @property
    def tunes_temperature(self) -> bool:
        """Whether a temperature is learned, with `learning_rate`."""
        return False



class DeterministicActorParams(ActorCriticParams):
    """A deterministic actor with exploration noise that follows the critic's gradient."""

    exploration_noise: float = Field(
        0.1, ge=0, le=10, description="Standard deviation of the noise on actions in [-1, 1]."
    )
    action_gradient_clip: float | None = Field(
        None, gt=0, description="Maximum norm of dQ/da in the actor's step; null: no clipping."
    )



class TemperatureParams(StrictModel):
    """SAC's temperature, for every algorithm based on SAC; a part of `Params`."""

    unused: ClassVar[tuple[Unused, ...]] = (
        Unused(
            ("target_entropy", "initial_alpha"), "alpha is {p.alpha}, and only alpha 'auto' uses it",
            lambda p: p.alpha != "auto",
        ),
    )  # fmt: skip

    alpha: Annotated[float, Field(ge=0)] | Literal["auto"] = Field("auto", description="Temperature; auto tunes it.")
    target_entropy: float | None = Field(
        None, description="Target entropy of alpha auto; null: minus the number of action dimensions."
    )

    @property
    def tunes_temperature(self) -> bool:
        """Whether the temperature is learned."""
        return self.alpha == "auto"

    def fixed_numbers(self) -> dict[str, str]:
        """As the base class, plus the temperature if it is tuned."""
        tuned = {"alpha": "it is 'auto', which tunes it, so give alpha as a number too"}
        inherited: dict[str, str] = super().fixed_numbers()  # type: ignore[misc]  # of the Params that this is a part of
        return inherited | (tuned if self.tunes_temperature else {})



def continuous_spec(
    learner: type[Algorithm], network: type[nn.Module], *, store: Callable[[StoreContext], Store] | None = None,
    **entry: Any,
) -> AlgorithmSpec:  # fmt: skip
    """The registry entry of a replay learner for continuous actions; `network` is the class of its `model`."""
    entry.setdefault("defaults", {"log_interval": 1_000, "total_timesteps": 20_000})
    return AlgorithmSpec(
        lane="replay", learner=learner, build=partial(build_on_model, learner, network), store=store or ReplayStore,
        action_kinds=("continuous",), **entry,
    )  # fmt: skip


class SequenceParams(Params):
    """Hyper-parameters of algorithms that learn from sequences."""

    buffer_capacity: int = Field(100_000, ge=1, le=10**9, description="Rows kept, summed over environments.")
    batch_size: int = Field(16, ge=1, le=10**5, description="Windows per update.")
    sequence_length: int = Field(64, ge=1, le=10**5, description="Consecutive steps per window.")
    train_ratio: float = Field(32.0, gt=0, le=10**6, description="Replayed steps per environment step.")
    learning_starts: int = Field(1_000, ge=0, description="Environment steps with random actions before learning.")
    replay_folder: str | None = Field(None, description="Keep the buffer in files under this folder instead of memory.")
    replay_memory: ReplayMemory = "auto"

    @model_validator(mode="after")
    def _window_fits(self) -> SequenceParams:
        if self.sequence_length > self.buffer_capacity:
            raise ValueError(
                f"sequence_length is {self.sequence_length}; it must be at most buffer_capacity "
                f"({self.buffer_capacity})"
            )
        return self

    @property
    def facts(self) -> Facts:
        """As the base class, plus the replay buffer and the rows of a batch."""
        return super().facts._replace(
            rows=self.batch_size * self.sequence_length, replay_rows=self.buffer_capacity,
            replay_on_device=self.replay_memory == "device", random_steps=self.learning_starts,
        )  # fmt: skip
