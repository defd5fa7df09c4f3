"""Runs in threads of one process equal the runs alone, and leave the global random generators as they were."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resume_cases import assert_same, tiny
from rl_training.run.build import open_session
from rl_training.run.workflows import train


def global_generators() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()


def initial_weights(seed: int, network: Any = None) -> dict[str, Any]:
    session = open_session(tiny("ppo", Path("unused"), seed=seed, kwargs={"network": network} if network else {}))
    session.close()
    return session.algorithm.state_dict()


def test_networks_that_are_made_at_the_same_time_have_their_own_weights() -> None:
    alone = [initial_weights(seed, lambda spaces: nn.Linear(spaces.obs_dim, 4)) for seed in range(2)]
    meeting = threading.Barrier(2)

    def met(spaces: Any) -> nn.Module:
        with suppress(threading.BrokenBarrierError):  # the other run is not let in
            meeting.wait(0.2)
        return nn.Linear(spaces.obs_dim, 4)

    before = global_generators()
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda seed: initial_weights(seed, met), range(2)))
    assert_same(together, alone)
    assert global_generators() == before


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_runs_in_threads_are_the_runs_alone(algo: str, tmp_path: Path) -> None:
    def learn(where: str, seed: int) -> dict[str, Any]:
        result = train(tiny(algo, tmp_path / f"{where}{seed}", seed=seed, eval_episodes=1), console=False)
        return result.policy.algorithm.state_dict()

    seeds = range(4)
    alone = [learn("alone", seed) for seed in seeds]
    before = global_generators()
    with ThreadPoolExecutor(len(seeds)) as threads:
        together = list(threads.map(lambda seed: learn("together", seed), seeds))
    assert_same(together, alone)
    assert global_generators() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_generator_of_the_gpu_is_left_alone(device: str) -> None:
    before = torch.cuda.get_rng_state()
    open_session(tiny("ppo", Path("unused"), device=device)).close()
    assert torch.equal(torch.cuda.get_rng_state(), before)
