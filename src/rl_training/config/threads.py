"""The number of torch threads: one for small networks, otherwise the number that measures as fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rl_training.algorithms.base import Algorithm
from rl_training.config.params import Params
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.experience import Experience, ExperienceLayout
from rl_training.data.store import StoreContext
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.spaces import EnvSpaces

SECONDS = 1.0  # for all measurements together, and at most for each
FEW_UPDATES = 3  # with fewer, a single slow update would decide
NEARLY_AS_FAST = 1.1  # up to this multiple of the shortest time, fewer threads win
MEASURED_LANES = ("rollout", "replay")  # their stores accept artificial experience


@contextmanager
def torch_settings_restored() -> Iterator[None]:
    """Restore torch settings that a run changes for the whole process: threads, and precision of matrix products."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def time_updates(
    spec: AlgorithmSpec, params: Params, spaces: EnvSpaces, recipe: EnvRecipe, num_envs: int, most: int,
    build: Callable[[Params], Algorithm],
) -> dict[int, float]:  # fmt: skip
    """Seconds that an update takes with 1, 2, 4, ... up to `most` threads, until more do not help.

    The result is empty if nothing is measured. A separate learner and store learn from noise, so the run itself does
    not change. Each update has one minibatch.
    """
    if most == 1 or spec.lane not in MEASURED_LANES or params.facts.reads_recordings:
        return {}
    params = params.model_copy(update=one_minibatch(params, num_envs))
    algorithm = build(params)
    envs = num_envs if spec.lane == "rollout" else 1
    rng = np.random.default_rng(0)
    store = spec.store(StoreContext(params, spaces, envs, 0, "cpu", recipe, rng))
    store.add(make_up_experience(store.layout, rng), 0)
    (phase, batch), *_ = store.batches(algorithm, 0)
    counts = [*(1 << i for i in range((most - 1).bit_length())), most]
    taken: dict[int, float] = {}
    with torch_settings_restored():
        for count in counts:
            taken[count] = _time_update(algorithm, phase, batch, count, SECONDS / len(counts))
            if taken[count] > min(taken.values()):
                break  # more will not help either
    return taken


def make_up_experience(layout: ExperienceLayout, rng: np.random.Generator) -> Experience:
    """Experience filled with noise; all images are the same frame, because buffers check frame stacks."""
    experience = Experience(layout)
    experience.steps, experience.transitions = layout.max_steps, layout.max_steps * layout.num_envs
    for noisy in (experience.obs, experience.rewards):
        is_image = noisy.dtype.kind == "u"
        noisy[...] = 100 * rng.random(noisy.shape[-2:]) if is_image else rng.standard_normal(noisy.shape)
    for masks in (experience.masks, experience.final_masks):
        if masks is not None:
            masks.fill(True)
    return experience


def one_minibatch(params: Params, num_envs: int) -> dict[str, Any]:
    """Changes to the hyper-parameters, so that a turn is one update on as many rows as an update of the run."""
    said = params.model_dump()
    once = ("update_epochs", "value_updates", "gradient_updates_per_step", "n_step")
    changes: dict[str, Any] = {**dict.fromkeys(once, 1), "learning_starts": 0, "replay_folder": None}
    if batch := said.get("batch_size"):
        changes |= {"train_frequency": batch, "buffer_capacity": 2 * batch}
    if minibatch := said.get("minibatch_size"):
        changes["num_steps"] = min(said["num_steps"], -(-minibatch // num_envs))
    return {name: value for name, value in changes.items() if name in said}


def _time_update(algorithm: Algorithm, phase: str, batch: Any, threads: int, seconds: float) -> float:
    torch.set_num_threads(threads)
    algorithm.update(batch, phase=phase, global_step=0, sync=False)  # includes one-time costs
    times: list[float] = []
    begun = time.perf_counter()
    while not times or time.perf_counter() - begun < (seconds if len(times) >= FEW_UPDATES else SECONDS):
        start = time.perf_counter()
        algorithm.update(batch, phase=phase, global_step=0, sync=False)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def fastest(seconds: Mapping[int, float]) -> int:
    """The fewest threads that are nearly as fast as the fastest."""
    return min(count for count, taken in seconds.items() if taken <= NEARLY_AS_FAST * min(seconds.values()))
