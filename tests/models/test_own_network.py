"""`network`: an encoder of the user's own, in training, resuming, predicting and exporting; and what a file may say."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn
from typer.testing import CliRunner

from registry_contract import OBSERVATIONS, check_actions, first_kind, kind_config
from resume_cases import SPECS, StopAt, assert_same_run, stop_and_resume, tiny
from rl_training import PPO, SAC
from rl_training.cli.main import app
from rl_training.config.networks import OwnEncoder, UserNetwork, resolve_network
from rl_training.config.params import read_params
from rl_training.config.train_config import dump_yaml
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run.learner import build_algorithm, load_policy
from rl_training.run.workflows import evaluate_checkpoint, predict_checkpoint, resume_training, train
from rl_training.tools.export import export_policy

NAME = f"{__name__}:Features"
SLOW = pytest.mark.slow


class Features(nn.Module):
    """Three features of any observation."""

    def __init__(self, spaces: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(spaces.obs_dim, 3)

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs.flatten(1)).relu()


def make_features(spaces: Any) -> nn.Module:
    return Features(spaces)


class Shaped(nn.Module):
    """Adds an axis."""

    def __init__(self, spaces: Any) -> None:
        super().__init__()

    def forward(self, obs: Tensor) -> Tensor:
        return obs.unflatten(1, (2, -1))


class TwoOutputs(Features):
    def forward(self, obs: Tensor) -> Any:
        return obs, obs


def encoders(algorithm: nn.Module) -> list[OwnEncoder]:
    return [part for part in algorithm.modules() if isinstance(part, OwnEncoder)]


def cartpole(folder: Path, **settings: Any) -> PPO:
    few = {"num_steps": 8, "hidden_sizes": [8], "minibatch_size": 8, "update_epochs": 2, "num_envs": 2}
    return PPO("CartPole-v1", total_timesteps=64, eval_episodes=2, output_dir=folder, **few, **settings)


QUICK = ("ppo", "dqn", "rainbow_dqn", "iqn", "fqf", "ddpg", "d4pg", "sac", "naf", "gail")  # one of each network
EVERY = [pytest.param(name, marks=() if name in QUICK else SLOW) for name in SPECS if name != "dreamer"]


@pytest.mark.parametrize("algo", EVERY)
def test_every_algorithm_learns_through_it(algo: str, tmp_path: Path) -> None:
    config = tiny(algo, tmp_path, kwargs={"network": NAME})
    result = train(config, console=False)
    spec, spaces = SPECS[algo], result.policy.spaces
    params = resolve_network(read_params(spec.params, result.policy.config.algo_kwargs), ())
    new = encoders(build_algorithm(spec, params, spaces, seed=config.seed, device="cpu"))
    learned = encoders(result.policy.algorithm)
    assert len(learned) == len(new) >= 1
    for one, other in zip(learned, new, strict=True):
        assert one.out_dim == 3
        assert not torch.equal(*(encoder.network.layer.weight for encoder in (one, other)))  # type: ignore[union-attr]
    assert load_checkpoint(result.checkpoint_path)["config"]["algo_kwargs"]["network"] == NAME
    assert np.isfinite(evaluate_checkpoint(result.checkpoint_path, num_episodes=1)["eval_return_mean"])


@pytest.mark.parametrize("algo", ["a2c", "fqf", "sac", *(pytest.param(name, marks=SLOW) for name in ("td3", "gail"))])
def test_a_resumed_run_is_the_run_that_never_stopped(algo: str, tmp_path: Path) -> None:
    config = tiny(algo, tmp_path, kwargs={"network": NAME})
    assert_same_run(train(config, console=False), stop_and_resume(config, 64))


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("algo", ["ppo", "iqn", "rlpd"])
def test_it_reads_every_kind_of_observation(algo: str, observation: str, tmp_path: Path) -> None:
    action = first_kind(algo)
    config = kind_config(algo, tmp_path, action, observation, kwargs={"network": NAME})
    policy = train(config, console=False).policy
    assert len(encoders(policy.algorithm)) >= 1
    check_actions(policy.predict, action, observation)


@pytest.mark.parametrize("given", [Features, make_features, Features(type("S", (), {"obs_dim": 4})), NAME])
def test_a_class_a_function_a_module_and_a_name_learn_the_same_way(given: Any, tmp_path: Path) -> None:
    model = cartpole(tmp_path, network=given)
    model.learn(progress=False)
    model.learn(64, progress=False)
    assert model.evaluate(1)["eval_episodes"] == 1
    path = model.save(tmp_path / "policy.ckpt")
    again = PPO.load(path, network=given)
    obs = np.full(4, 0.1, np.float32)
    assert again.predict(obs) == model.predict(obs)
    assert again.evaluate(2, seed=1)["eval_returns"] == model.evaluate(2, seed=1)["eval_returns"]
    again.learn(64, progress=False)
    pickled = pickle.loads(pickle.dumps(again._loaded()))
    assert pickled.predict(obs) == again.predict(obs)


def test_a_module_that_is_given_is_copied_with_its_weights(tmp_path: Path) -> None:
    """For actor and critics each, so that the user's own stays as it is."""
    own = nn.Linear(3, 5)
    before = own.weight.detach().clone()
    model = SAC(
        "Pendulum-v1", network=own, learning_rate=0.0, total_timesteps=40, learning_starts=16, batch_size=8,
        hidden_sizes=[8], output_dir=tmp_path, eval_episodes=0,
    )  # fmt: skip
    learner: Any = model.learn(progress=False).policy.algorithm
    copies = [learner.model.actor.encoder.network, learner.model.critics.encoder.network]
    for copied in copies:
        assert copied is not own
        assert torch.equal(copied.weight, before)
    assert copies[0] is not copies[1]


def test_a_module_that_is_given_goes_where_the_learner_is_built() -> None:
    """As on a GPU, where `torch.device` says where new tensors are made; a copy would stay where it was."""
    spaces = EnvSpaces.from_gym("X-v0", gs.Box(-1, 1, (4,)), gs.Discrete(2))
    source = UserNetwork.read(nn.Linear(4, 3))
    assert source is not None
    with torch.device("meta"):
        encoder = OwnEncoder(source, spaces)
    assert {parameter.device.type for parameter in encoder.parameters()} == {"meta"}
    assert source.given.weight.device.type == "cpu"


def test_the_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = train(tiny("ppo", tmp_path, kwargs={"network": NAME}), console=False)
    torch.manual_seed(2)
    two = train(tiny("ppo", tmp_path, kwargs={"network": NAME}), console=False)
    assert_same_run(one, two)


@SLOW
def test_workers_have_it_too(tmp_path: Path) -> None:
    class Local(Features):
        """Which only the learner's process knows."""

    model = cartpole(tmp_path, network=Local, execution_backend="local_async", num_workers=2)
    assert isinstance(encoders(model.learn(progress=False).policy.algorithm)[0].network, Local)
    assert model.learn(64, progress=False).metrics["global_step"] >= 128


@SLOW
@pytest.mark.parametrize(("algo", "file_format"), [("ppo", "onnx"), ("sac", "torch")])
def test_it_is_exported(algo: str, file_format: str, tmp_path: Path) -> None:
    result = train(tiny(algo, tmp_path, kwargs={"network": NAME}), console=False)
    assert export_policy(result.checkpoint_path, file_format).facts["parity"]["different"] == 0


WRONG = {
    "three axes": (Shaped, ":Shaped returned [2, 2, 2] for 2 observations; it must be features [2, F]."),
    "no tensor": (TwoOutputs, "network test_own_network:TwoOutputs returned a tuple for 2 observations"),
    "wrong width": (nn.Linear(7, 3), "network Linear fails on observations [2, 4] of CartPole-v1: RuntimeError: mat1"),
    "fails": (lambda spaces: 1 / 0, "network <lambda> cannot be made for CartPole-v1: ZeroDivisionError: division by"),
    "no module": (lambda spaces: [1], "network <lambda> made a list; it must make a torch.nn.Module."),
    "a number": (3, "network: a int is not a network; give a torch.nn.Module, a class or function of the spaces"),
    "dropout": (nn.Sequential(nn.Linear(4, 3), nn.Dropout()), "network Sequential has a Dropout; a policy must act"),
    "no name": ("big", "network is 'big', which cannot be imported by that name; give the module, class or function"),
    "no module of that name": ("no_such_package:Net", "network 'no_such_package:Net': the module 'no_such_package'"),
    "no such class": (f"{__name__}:Nothing", "test_own_network has no class or function 'Nothing'; known: "),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_sentence_before_the_run(name: str, tmp_path: Path) -> None:
    network, said = WRONG[name]
    with pytest.raises(UserError) as failed:
        cartpole(tmp_path, network=network).learn(progress=False)
    assert said in str(failed.value)
    assert "\n" not in str(failed.value)
    assert list(tmp_path.iterdir()) == []


def test_dreamer_says_that_it_takes_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^dreamer has a world model in place of a network; leave network {NAME} out"):
        train(tiny("dreamer", tmp_path, kwargs={"network": NAME}), console=False)


def test_what_no_file_holds_has_to_be_given_again(tmp_path: Path) -> None:
    result = cartpole(tmp_path, network=lambda spaces: Features(spaces)).learn(progress=False)
    obs = np.zeros(4, np.float32)
    for use in (
        PPO.load, load_policy, evaluate_checkpoint, resume_training, lambda path: predict_checkpoint(path, obs)
    ):  # fmt: skip
        with pytest.raises(UserError, match="network is '<lambda>', which cannot be imported by that name; give"):
            use(result.checkpoint_path)
    assert predict_checkpoint(result.checkpoint_path, obs, network=Features) in (0, 1)
    with pytest.raises(UserError, match=r"resuming would change algo_kwargs\.network from '<lambda>' to"):
        resume_training(result.checkpoint_path, changes={"algo_kwargs": {"network": Features}})


def test_one_that_nobody_needs_is_refused(tmp_path: Path) -> None:
    path = cartpole(tmp_path).learn(progress=False).checkpoint_path
    with pytest.raises(UserError, match=r"network is given, but .*ckpt was trained without one of your own"):
        PPO.load(path, network=Features)


# ---- files are data --------------------------------------------------------------------------------------------------

MODULE = """
from pathlib import Path
from torch import nn

class Mine(nn.Module):
    def __init__(self, spaces):
        super().__init__()
        self.layer = nn.Linear(spaces.obs_dim, 3)

    def forward(self, obs):
        return self.layer(obs)

def make(spaces):
    Path("called").touch()
    return Mine(spaces)
"""


@pytest.fixture
def _my_nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("my_nets.py").write_text(MODULE)
    yield
    sys.modules.pop("my_nets", None)


def write_config(network: str) -> str:
    config = tiny("ppo", Path("runs"), kwargs={"network": network}).model_dump(mode="json")
    Path("mine.yaml").write_text(dump_yaml(config))
    return "mine.yaml"


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.mark.usefixtures("_my_nets")
def test_a_file_does_not_call_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    file = write_config("my_nets:make")
    importlib.import_module("my_nets")
    failed = run("train", "--config", file)
    assert failed.exit_code == 2
    said = " ".join(failed.stderr.split())
    assert "network 'my_nets:make' comes from a file and is not a torch.nn.Module class, so it is not called" in said
    assert "--set network=my_nets:make or --import my_nets, in Python network='my_nets:make'" in said
    with pytest.raises(UserError, match="comes from a file"):
        PPO(file).learn(progress=False)
    assert not Path("called").exists()
    assert PPO(file, network="my_nets:make").learn(progress=False).metrics["global_step"] >= 128
    assert Path("called").exists()


COMMANDS = {
    "predict": ["--obs", "[0, 0, 0, 0]"], "resume": ["--total-timesteps", "160"], "eval": ["--num-episodes", "1"],
    "export": ["--format", "torch"],
}  # fmt: skip


@pytest.mark.usefixtures("_my_nets")
@pytest.mark.parametrize("command", [pytest.param(name, marks=SLOW if name[0] == "e" else ()) for name in COMMANDS])
def test_the_command_line_names_it(command: str) -> None:
    file = write_config("my_nets:make")
    assert "add --import my_nets" in " ".join(run("train", "--config", file).stderr.split())
    trained = run("train", "--config", file, "--set", "network=my_nets:make")
    assert trained.exit_code == 0, trained.output
    assert "--import my_nets" in " ".join(trained.output.split())  # of the commands that come next
    folder = str(next(Path("runs").iterdir()))
    words = [command, "--checkpoint", folder, *COMMANDS[command]]
    refused = run(*words)
    assert refused.exit_code == 2
    assert "comes from a file" in " ".join(refused.stderr.split())
    named = ["--set", "network=my_nets:make"] if command == "resume" else ["--import", "my_nets"]
    done = run(*words, *named)
    assert done.exit_code == 0, done.output


@pytest.mark.usefixtures("_my_nets")
def test_a_class_may_come_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    with pytest.raises(UserError, match="in Python: import my_nets first, or give network='my_nets:Mine'"):
        PPO(write_config("my_nets:Mine")).learn(progress=False)
    importlib.import_module("my_nets")
    result = PPO(write_config("my_nets:Mine")).learn(progress=False)
    assert PPO.load(result.checkpoint_path).predict(np.zeros(4, np.float32)) in (0, 1)


@pytest.mark.usefixtures("_my_nets")
def test_a_checkpoint_does_not_call_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    result = train(tiny("ppo", Path("runs"), kwargs={"network": "my_nets:make"}), callbacks=[StopAt(64)], console=False)
    Path("called").unlink()
    for use in (PPO.load, load_policy, evaluate_checkpoint, resume_training, export_policy):
        with pytest.raises(UserError, match="network 'my_nets:make' comes from a file"):
            use(result.checkpoint_path)  # type: ignore[operator]
    assert not Path("called").exists()
    managed = PPO.load(result.checkpoint_path, network="my_nets:make")
    assert managed.learn(progress=False).metrics["global_step"] == 128
