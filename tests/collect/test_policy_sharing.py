"""One policy in several threads, and in a process of its own."""

from __future__ import annotations

import multiprocessing
import operator
import pickle
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resume_cases import tiny
from rl_training import SAC
from rl_training.run.learner import TrainedPolicy
from rl_training.run.workflows import train

OBS = np.array([[0.1, 0.9, -0.3], [1.0, 0.0, 2.0]], dtype=np.float32)


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainedPolicy:
    """One that acts in torch, with the generator and the mode of the learner."""
    result = train(tiny("sac", tmp_path, total_timesteps=40, eval_episodes=0), console=False)
    monkeypatch.setattr(result.policy.algorithm, "numpy_policy", lambda: None)
    return result.policy


def test_sampling_continues_whatever_the_number_of_rows(policy: TrainedPolicy) -> None:
    """One session for all, also so that a server of batches of every size does not keep a session for each."""
    first = policy.predict(OBS[:1], deterministic=False)
    drawn = [policy.predict(OBS[:1].repeat(rows, 0), deterministic=False)[0] for rows in (2, 3, 4)]
    assert len({*map(float, first[0]), *(float(action[0]) for action in drawn)}) == 4
    assert policy.predict(OBS).shape == (2, 1)


def test_threads_act_one_after_the_other(policy: TrainedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that are inside at once would each take the other's generator for the learner's own."""
    learner: Any = policy.algorithm
    learner.train()
    own, act, both = learner.generator, learner.act, threading.Barrier(2)
    met = []

    def waits_for_another(*arguments: Any, **options: Any) -> Any:
        assert not learner.training
        with suppress(threading.BrokenBarrierError):  # nobody came
            met.append(both.wait(timeout=0.3))
        return act(*arguments, **options)

    monkeypatch.setattr(learner, "act", waits_for_another)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda rows: policy.predict(OBS[:rows], deterministic=False), [1, 2, 1, 2]))
    assert met == []
    assert learner.generator is own
    assert all(module.training for module in learner.modules())


def test_many_threads_leave_the_learner_as_it_was_and_get_the_right_actions(policy: TrainedPolicy) -> None:
    learner = policy.algorithm
    learner.train()
    own, state = learner.generator, learner.generator.get_state()
    wanted = policy.predict(OBS)

    def ask(number: int) -> Any:
        return policy.predict(OBS, deterministic=number % 2 == 0)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(160)))
    assert all(np.array_equal(answer, wanted) for answer in answers[::2])
    assert learner.generator is own
    assert np.array_equal(learner.generator.get_state(), state)
    assert all(module.training for module in learner.modules())


def test_a_policy_and_a_managed_algorithm_predict_in_a_spawned_process(tmp_path: Path) -> None:
    managed = SAC(tiny("sac", tmp_path, total_timesteps=40, eval_episodes=0))
    result = managed.learn()
    predict = operator.methodcaller("predict", OBS)
    wanted = predict(managed)  # before it is pickled: what a prediction leaves behind must not be in the way
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        answers = [pool.submit(predict, one).result(timeout=120) for one in (result.policy, managed, result.policy)]
    assert all(np.array_equal(answer, wanted) for answer in answers)


def test_a_pickled_policy_draws_from_the_start_of_its_seed(policy: TrainedPolicy) -> None:
    one, other = (pickle.loads(pickle.dumps(policy)) for _ in range(2))
    first = one.predict(OBS, deterministic=False)
    assert np.array_equal(other.predict(OBS, deterministic=False), first)
    assert not np.array_equal(one.predict(OBS, deterministic=False), first)
