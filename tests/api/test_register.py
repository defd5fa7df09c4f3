"""Algorithms that a script registers: variants of ours by their class alone, and whole entries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import env_zoo
import rl_training
from resume_cases import stop_and_resume
from rl_training import A2CAlgorithm, DQNAlgorithm, PPOAlgorithm, SACAlgorithm
from rl_training.algorithms.base import ActOutput, Number, Setting, UpdateResult
from rl_training.cli.main import app
from rl_training.config import spec
from rl_training.errors import UserError
from rl_training.experiment.registry import get_algorithm_spec, list_algorithm_specs
from rl_training.run.evaluation import read_replay_buffer
from rl_training.run.workflows import train
from worker_cases import assert_same_end

TINY = {"num_envs": 1, "num_steps": 8, "eval_episodes": 0, "hidden_sizes": [4]}
SCRIPT = """
import rl_training

class OwnA2C(rl_training.A2CAlgorithm):
    def learn(self, batch):
        result = super().learn(batch)
        result.metrics["own"] = 7.0
        return result

rl_training.register(OwnA2C, like="a2c")
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves an algorithm behind."""
    monkeypatch.setattr(spec, "_registered", {})
    return


class Scaled(A2CAlgorithm):
    """A2C whose loss is scaled.

    More about it.
    """

    scale = Number("> 0", 2.0)
    rounds = Setting(">= 1", 3)
    gamma = Number("in [0, 1]", 0.5)

    def learn(self, batch: Any) -> UpdateResult:
        rows = self.rows(batch)
        policy = self.policy.evaluate_actions(rows["obs"], rows["actions"])
        loss = -self.scale * (policy.logprobs * rows["advantages"]).mean()
        self.optimizer.step(loss)
        return UpdateResult({"loss": loss, "seen_scale": self.scale, "seen_gamma": self.gamma})


def test_a_variant_learns_with_its_own_update_and_its_own_numbers(tmp_path: Path) -> None:
    managed: Any = rl_training.register(Scaled, like="a2c")
    model = managed("CartPole-v1", output_dir=tmp_path, scale=4.0, **TINY)
    metrics = model.learn(32).metrics
    assert (metrics["seen_scale"], metrics["seen_gamma"]) == (4.0, 0.5)
    assert model.hyperparameters["rounds"] == 3
    assert managed is rl_training.Scaled
    assert rl_training.ScaledAlgorithm is Scaled
    entry = get_algorithm_spec("scaled")
    assert (entry.scope, entry.paper) == ("A2C whose loss is scaled.", "none: a variant of A2C")
    assert entry in list_algorithm_specs()
    loaded = managed.load(model.save(tmp_path / "policy.ckpt"))
    assert loaded.hyperparameters["scale"] == 4.0


@pytest.mark.parametrize("given", [{"scale": 0.0}, {"rounds": 0}, {"gamma": 1.5}, {"rounds": 1.5}])
def test_the_bounds_of_a_variant_are_those_that_it_declares(given: dict[str, float]) -> None:
    managed: Any = rl_training.register(Scaled, like="a2c")
    with pytest.raises(UserError, match=next(iter(given))):
        managed("CartPole-v1", **given)


def test_a_schedule_of_an_own_number_reaches_the_update(tmp_path: Path) -> None:
    managed: Any = rl_training.register(Scaled, like="a2c")
    schedule = {"type": "linear", "start": 4.0, "end": 1.0}
    metrics = managed("CartPole-v1", output_dir=tmp_path, scale_schedule=schedule, **TINY).learn(32).metrics
    assert metrics["seen_scale"] < 4.0


class Shifted(SACAlgorithm):
    """SAC that does a little more than it would, and far too much in the second action."""

    shift = Number(">= 0", 0.1, read="to act")

    def explore(self, actions: Tensor, obs: Tensor, action_masks: Tensor | None = None) -> Tensor:
        return actions + self.shift * torch.rand(actions.shape, generator=self.generator) + torch.tensor([0.0, 9.0])


class AlwaysRight(PPOAlgorithm):
    """PPO that takes action 1, whatever its policy prefers."""

    def act(self, obs: Tensor, *given: Any, **more: Any) -> ActOutput:
        out = super().act(obs, *given, **more)
        return replace(out, actions=torch.ones_like(out.actions))


def test_a_learner_with_its_own_act_takes_those_actions_everywhere(tmp_path: Path) -> None:
    """On a CPU, small policies act in numpy, which is a form of the other learner's `act`."""
    managed: Any = rl_training.register(AlwaysRight, like="ppo")
    seen: list[int] = []

    class Counting(env_zoo.Walk):
        def step(self, action: Any) -> Any:
            seen.append(int(action))
            return super().step(action)

    model = managed(Counting, output_dir=tmp_path, **(TINY | {"eval_episodes": 2}))
    model.learn(32)
    assert len(seen) > 32
    assert set(seen) == {1}
    assert {model.predict(np.zeros(2, np.float32)) for _ in range(3)} == {1}
    with pytest.raises(UserError, match="always_right defines act, but with vectorization 'device' rollouts call samp"):
        managed("CartPole-v1", vectorization="device", output_dir=tmp_path, **TINY).learn(32)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "None"), (0.5, "a float"), (torch.tensor(0.5), r"a tensor of shape \(\)"),
        (torch.zeros(3), r"a tensor of shape \(3,\)"), ({"loss": 1.0}, "a dict"),
    ],
)  # fmt: skip
def test_a_step_that_returns_something_else_is_named(found: Any, said: str, tmp_path: Path) -> None:
    class Odd(PPOAlgorithm):
        """PPO whose step forgets its metrics."""

        def minibatch_step(self, rows: Any) -> Any:
            return found

    managed: Any = rl_training.register(Odd, like="ppo")
    wanted = "it must return a tensor of 7 numbers: loss, policy_loss, value_loss, entropy_loss, approx_kl, clip_frac"
    with pytest.raises(UserError, match=rf"^Odd.minibatch_step returned {said}; {wanted}"):
        managed("CartPole-v1", output_dir=tmp_path, **TINY).learn(32)


class OnlyLegal(DQNAlgorithm):
    """DQN that takes the last legal action."""

    def explore(self, actions: Tensor, obs: Tensor, action_masks: Tensor | None = None) -> Tensor:
        assert action_masks is not None
        return (action_masks * torch.arange(action_masks.shape[1])).argmax(-1)


class NotOfItsPolicy(A2CAlgorithm):
    """A2C that takes other actions than it learns from."""

    def explore(self, actions: Tensor, obs: Tensor, action_masks: Tensor | None = None) -> Tensor:
        return 1 - actions


SMALL = {"hidden_sizes": [8], "learning_starts": 4, "batch_size": 4, "eval_episodes": 0, "total_timesteps": 60}


def test_a_learner_from_replay_explores_in_a_way_of_its_own(tmp_path: Path) -> None:
    """From the deterministic action on, clipped; only the steps before learning starts are random."""
    managed: Any = rl_training.register(Shifted, like="sac")
    for shift in (0.0, 0.2):
        model = managed("env_zoo:BoxActions", output_dir=tmp_path, shift=shift, learning_rate=0.0, **SMALL)
        result = model.learn()
        stored = read_replay_buffer(result.checkpoint_path)
        actions = result.policy.spaces.unmap_actions(stored.actions)
        assert (actions[4:, 1] == 1.0).all()
        assert not (actions[:4, 1] == 1.0).any()
        with torch.no_grad():
            best = result.policy.algorithm.act(torch.from_numpy(stored.obs), deterministic=True).actions.numpy()
        more = actions[4:, 0] - best[4:, 0]
        assert more.min() >= -1e-5
        assert (more.max() > 0.1) == (shift > 0.1)
        assert more.max() < shift + 1e-5


def test_an_own_exploration_gets_masks(tmp_path: Path) -> None:
    """An illegal action raises."""
    managed: Any = rl_training.register(OnlyLegal, like="dqn")
    managed("env_zoo:Masked", output_dir=tmp_path, **SMALL).learn()


@pytest.mark.parametrize("backend", ["local_sync", pytest.param("local_async", marks=pytest.mark.slow)])
def test_a_run_with_an_own_exploration_resumes_exactly(tmp_path: Path, backend: str) -> None:
    managed: Any = rl_training.register(Shifted, like="sac")
    where = {"execution_backend": backend, "num_envs": 2, "device": "cpu"}
    config = managed("env_zoo:BoxActions", output_dir=tmp_path, **SMALL, **where).config
    assert_same_end(train(config, console=False), stop_and_resume(config, 33))


def test_a_rollout_learner_may_not_explore_otherwise(tmp_path: Path) -> None:
    managed: Any = rl_training.register(NotOfItsPolicy, like="a2c")
    with pytest.raises(UserError, match="not_of_its_policy defines explore, which only learners from replay may"):
        managed("CartPole-v1", output_dir=tmp_path, **TINY).learn(32)


def test_registered_again_the_new_class_counts() -> None:
    first = rl_training.register(Scaled, like="a2c")
    newer = type("Scaled", (Scaled,), {"scale": Number("> 0", 5.0)})
    second: Any = rl_training.register(newer, like="a2c")
    assert second is not first
    assert rl_training.Scaled is second
    assert second("CartPole-v1").hyperparameters["scale"] == 5.0


def test_a_whole_entry_can_be_registered() -> None:
    entry = replace(get_algorithm_spec("a2c"), name="mine", class_name="Mine")
    assert rl_training.register(entry).algo == "mine"


@pytest.mark.parametrize(
    ("given", "like", "said"),
    [
        (Scaled, None, r'Scaled is a class; register\(Scaled, like="ppo"\) says what it is like'),
        (Scaled, "gail", "no learner derives from gail, which builds more than one"),
        (Scaled, "a2", "algo 'a2' is not a registered algorithm; did you mean 'a2c'"),
        (type("A2C", (A2CAlgorithm,), {}), "a2c", "the class_name 'A2C' is taken by another algorithm"),
        (type("a2c", (A2CAlgorithm,), {}), "a2c", "the name 'a2c' is taken by another algorithm"),
    ],
)
def test_what_cannot_be_registered_is_refused(given: Any, like: str | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        rl_training.register(given, like=like)
    assert rl_training.A2CAlgorithm is A2CAlgorithm


def test_commands_import_the_module_that_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_a2c_script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def invoke(line: str) -> Any:
        spec._registered.clear()
        sys.modules.pop("own_a2c_script", None)
        return CliRunner().invoke(app, line.split())

    tiny = "--total-timesteps 16 --num-envs 1 --eval-episodes 1 --set num_steps=8 --set eval_interval=0"
    trained = invoke(f"train --algo own_a2_c --env CartPole-v1 {tiny} --name r --import own_a2c_script")
    assert trained.exit_code == 0, trained.output
    assert '"own":7.0' in (tmp_path / "runs/r/metrics.jsonl").read_text().replace(" ", "")
    for command in ("resume --total-timesteps 32", "eval", "export --format torch"):
        name, _, rest = command.partition(" ")
        done = invoke(f"{name} --checkpoint runs/r {rest} --import own_a2c_script")
        assert done.exit_code == 0, done.output
    refused = invoke("eval --checkpoint runs/r")
    assert refused.exit_code == 2
    assert "one of your own needs --import MODULE" in refused.output
