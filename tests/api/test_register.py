"""Algorithms that a script registers: variants of ours by their class alone, and whole entries."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import rl_training
from rl_training import A2CAlgorithm
from rl_training.algorithms.base import Number, Setting, UpdateResult
from rl_training.cli.main import app
from rl_training.config import spec
from rl_training.errors import UserError
from rl_training.experiment.registry import get_algorithm_spec, list_algorithm_specs
from rl_training.record.checkpoints import load_checkpoint

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


class FirstAction(rl_training.DQNAlgorithm):  # type: ignore[misc]
    """Always takes the first action while it trains, and the second one in evaluations."""

    def act(self, obs: Any, carry: Any = None, *, deterministic: bool = False, **more: Any) -> Any:
        out = super().act(obs, carry, deterministic=deterministic, **more)
        return dataclasses.replace(out, actions=torch.full_like(out.actions, int(deterministic)))


def test_a_subclass_decides_how_it_acts_although_its_parent_acts_in_numpy(tmp_path: Path) -> None:
    model = rl_training.register(FirstAction, like="dqn")(
        "CartPole-v1", num_envs=1, hidden_sizes=[4], learning_starts=1, batch_size=4, buffer_capacity=200,
        eval_episodes=0, output_dir=tmp_path,
    )  # fmt: skip
    result = model.learn(120, progress=False)
    replay = load_checkpoint(result.checkpoint_path)["source"]["replay"]
    actions = next(value for name, value in flat(replay) if name.endswith("actions"))
    assert not np.asarray(actions)[2:100].any()  # after the random ones
    assert model.predict([0.0, 0.0, 0.0, 0.0]) == 1
    assert model.evaluate(1)["eval_length_mean"] < 12  # always to the right


def flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their paths."""
    if isinstance(tree, dict):
        for key, part in tree.items():
            yield from flat(part, f"{name}.{key}")
    else:
        yield name, tree
