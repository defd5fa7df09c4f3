"""`DeviceReplayStore`: replay for environments on the device, of which nothing is copied to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_training.data.device_ring import DeviceRing
from rl_training.data.replay_store import ReplayStore, SupportWatch
from rl_training.data.store import Experience, StoreContext


class DeviceReplayStore(ReplayStore):
    """A `ReplayStore` whose buffer is a `DeviceRing` and whose samples are drawn on the device, by its own generator.

    A support that may widen is compared with all stored rows each time there are an eighth more, because that is the
    only time that the host reads them.
    """

    buffer: DeviceRing  # type: ignore[assignment]  # with the same methods
    counters = ("credit", "next_look")
    on_device = True

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self.draws_ahead = False
        self.generator = torch.Generator(context.device)
        seed = np.random.SeedSequence([context.seed, 2]).generate_state(1, np.uint64)  # 1 seeds the host's draws
        self.generator.manual_seed(int(seed[0]))
        self.next_look = 0  # the step at which the support is compared next
        if self.support is not None:
            self.support = SupportWatch(self.params, 0)  # the rewards of current episodes are in the ring

    def make_buffer(self, context: StoreContext) -> DeviceRing:
        """The ring."""
        params, spaces = self.params, self.spaces
        return DeviceRing(
            params.buffer_capacity, context.num_envs, obs_shape=spaces.obs_shape, obs_dtype=spaces.obs_dtype,
            action_shape=spaces.action_shape, continuous=spaces.action_kind == "continuous", n_step=params.n_step,
            gamma=params.gamma, device=context.device,
        )  # fmt: skip

    def add(self, experience: Experience, step: int) -> int:
        """Add to the ring; every step from `learning_starts` on adds one credit."""
        self.credit += self.keep(experience, step)
        if self.support is not None and step >= self.next_look:
            self.support.compare(self.buffer.extremes())
            self.next_look = step + len(self.buffer) // 8
        return experience.transitions

    def sample(self) -> dict[str, Any]:
        """One batch."""
        return self.buffer.sample(self.params.batch_size, self.generator)

    def state_dict(self) -> dict[str, Any]:
        """The state of a store, and the generator of samples."""
        sampler = {"generator": self.generator.get_state().numpy(), "device": self.generator.device.type}
        return super().state_dict() | {"sampler": sampler}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`; the generator is not restored on another kind of device."""
        sentences = super().load_state_dict(state)
        sampler = state["sampler"]
        if sampler["device"] != self.generator.device.type:
            return [*sentences, "samples are drawn on another kind of device now, so this resume is not exact."]
        self.generator.set_state(torch.from_numpy(np.array(sampler["generator"])))
        return sentences
