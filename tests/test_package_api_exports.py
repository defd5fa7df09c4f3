"""The public names of the contract, for every algorithm in the registry: one object under each of its names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rl_training
import rl_training.algorithms
import rl_training.api
import rl_training.api.algorithms
import rl_training.models
from registry_contract import train_function
from rl_training.algorithms.base import Algorithm
from rl_training.experiment.registry import AlgorithmSpec, get_algorithm_spec, list_algorithm_specs

# Registry name -> managed class, as the contract lists them; not all of them need exist yet.
CONTRACT = {
    "a2c": "A2C", "ppo": "PPO", "trpo": "TRPO", "impala": "IMPALA", "appo": "APPO", "dqn": "DQN",
    "double_dqn": "DoubleDQN", "dueling_dqn": "DuelingDQN", "noisy_dqn": "NoisyDQN",
    "prioritized_dqn": "PrioritizedDQN", "n_step_dqn": "NStepDQN", "c51_dqn": "C51DQN", "qr_dqn": "QRDQN", "iqn": "IQN",
    "fqf": "FQF", "rainbow_dqn": "RainbowDQN", "ddpg": "DDPG", "td3": "TD3", "sac": "SAC", "naf": "NAF", "d4pg": "D4PG",
    "rlpd": "RLPD", "bc": "BC", "mopo": "MOPO", "mbpo": "MBPO", "gail": "GAIL", "dreamer": "Dreamer",
}  # fmt: skip
ROLLOUT = {"a2c", "ppo", "trpo", "impala", "appo"}
OWN = [spec for spec in list_algorithm_specs() if spec.name in CONTRACT]  # plugins of the machine keep their own names

each_algorithm = pytest.mark.parametrize("spec", OWN, ids=lambda spec: spec.name)


OF_SCRIPTS = {
    "rl_training.experiment.registry": "get_algorithm_spec list_algorithm_specs",
    "rl_training.experiment.config": "TrainConfig load_config",
    "rl_training.cli": "TrainConfig load_config",
    "rl_training.experiment.default_manager": "DefaultExperimentManager",
    "rl_training.runtime.workflows": "evaluate_checkpoint predict_checkpoint resume_training",
    "rl_training.algorithms.ops.returns": "gae vtrace lambda_returns",
    "rl_training.algorithms.ops.distributional": "project_categorical quantile_huber_loss two_hot symlog",
    "rl_training.algorithms.ops.policy": "conjugate_gradient",
}


def test_scripts_can_import_the_names_of_the_contract() -> None:
    """Each while nothing else of the package is imported, in one new process, since torch takes seconds."""
    lines, ours = ["import sys"], "[name for name in sys.modules if name.startswith('rl_training')]"
    for module, names in OF_SCRIPTS.items():
        lines.append(f"for name in {ours}: del sys.modules[name]")
        lines.append(f"from {module} import {', '.join(names.split())}")
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@pytest.mark.parametrize("stub", sorted(Path(rl_training.__file__).parent.rglob("*.pyi")), ids=lambda stub: stub.name)
def test_a_stub_imports_only_what_exists(stub: Path) -> None:
    for node in ast.walk(ast.parse(stub.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rl_training"):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], node.module


def test_the_rollout_family_is_registered() -> None:
    assert {spec.name for spec in OWN} >= ROLLOUT


@each_algorithm
def test_the_managed_class_is_one_object_under_its_names(spec: AlgorithmSpec) -> None:
    name = CONTRACT[spec.name]
    managed = getattr(rl_training, name)
    assert spec.class_name == name
    assert managed is getattr(rl_training.api, name)
    assert managed is getattr(rl_training.api.algorithms, name)
    assert issubclass(managed, rl_training.ManagedAlgorithm)
    assert (managed.__name__, managed.algo) == (name, spec.name)
    assert spec.paper in (managed.__doc__ or "")


@each_algorithm
def test_the_learner_is_one_object_under_its_names(spec: AlgorithmSpec) -> None:
    learner = getattr(rl_training, f"{CONTRACT[spec.name]}Algorithm")
    assert learner is spec.learner
    assert learner is getattr(rl_training.algorithms, CONTRACT[spec.name])
    assert learner is getattr(rl_training.algorithms, learner.__name__)
    assert issubclass(learner, Algorithm)
    module = importlib.import_module(learner.__module__)
    assert module.__name__.startswith("rl_training.algorithms.")
    assert getattr(module, learner.__name__) is learner
    if spec.name in ROLLOUT:
        assert (module.__name__, learner.__name__) == (f"rl_training.algorithms.{spec.name}", spec.class_name)
        assert callable(getattr(module, f"{spec.name}_loss"))


@each_algorithm
def test_learners_are_built_by_keyword_and_update_by_the_contract(spec: AlgorithmSpec) -> None:
    parameters = [p for name, p in inspect.signature(spec.learner.__init__).parameters.items() if name != "self"]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
    assert list(inspect.signature(spec.learner.update).parameters)[:2] == ["self", "batch"]
    assert "global_step" in inspect.signature(spec.learner.update).parameters
    assert "deterministic" in inspect.signature(spec.learner.act).parameters


@each_algorithm
def test_each_has_a_train_function(spec: AlgorithmSpec) -> None:
    function = train_function(spec.name)
    assert function.__name__.startswith("train_")
    assert getattr(sys.modules[function.__module__], function.__name__) is function  # so that it can be pickled
    assert spec.class_name in function.__doc__
    signature = inspect.signature(function)
    assert list(signature.parameters) == ["config", "run_suffix", "callbacks"]
    assert all(signature.parameters[name].default is None for name in ("run_suffix", "callbacks"))


@each_algorithm
def test_specs_say_what_the_algorithm_is(spec: AlgorithmSpec) -> None:
    assert get_algorithm_spec(spec.name) is spec
    assert 1980 <= spec.year <= 2030
    assert re.search(r"\d{4}", spec.paper)
    assert spec.scope.endswith(".")
    assert spec.action_kinds
    assert all(field.description for field in spec.params.model_fields.values())


@pytest.mark.parametrize("name", ["MLPActorCritic", "Categorical", "MultiCategorical", "DiagonalGaussian"])
def test_models_are_importable_from_the_package(name: str) -> None:
    assert getattr(rl_training.models, name).__name__ == name


def test_the_other_public_names() -> None:
    from rl_training import cli
    from rl_training.config.train_config import TrainConfig, load_config
    from rl_training.experiment.default_manager import DefaultExperimentManager
    from rl_training.runtime import workflows

    assert rl_training.TrainConfig is TrainConfig
    assert rl_training.ManagedAlgorithm is rl_training.api.ManagedAlgorithm
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", rl_training.__version__)
    assert cli.load_config is load_config
    assert cli.TrainConfig is TrainConfig
    assert callable(DefaultExperimentManager.setup)
    for name, arguments in {
        "evaluate_checkpoint": ["path", "num_episodes"],
        "predict_checkpoint": ["path", "obs", "deterministic"],
        "resume_training": ["path", "total_timesteps", "output_dir"],
    }.items():
        assert set(arguments) <= set(inspect.signature(getattr(workflows, name)).parameters), name


def test_an_unknown_name_is_an_attribute_error_that_helps() -> None:
    with pytest.raises(AttributeError, match="did you mean 'PPO'"):
        rl_training.PPPO  # noqa: B018
    with pytest.raises(AttributeError):
        rl_training.nothing  # noqa: B018
    with pytest.raises(AttributeError):
        rl_training.api.algorithms.Nobody  # noqa: B018
    with pytest.raises(AttributeError):
        rl_training.algorithms.Nobody  # noqa: B018
    assert not hasattr(rl_training, "__wrapped__")
    with pytest.raises(ImportError):
        from rl_training import Nobody  # type: ignore[attr-defined]  # noqa: F401


def test_importing_the_package_and_listing_its_names_does_not_import_torch() -> None:
    code = "import sys, rl_training; assert 'PPO' in dir(rl_training); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_dir_shows_every_public_name() -> None:
    names = set(dir(rl_training))
    assert names >= {f"{name}{end}" for name in CONTRACT.values() for end in ("", "Algorithm")}
    assert names >= {"ManagedAlgorithm", "Callback", "Schedule", "TrainResult", "TrainConfig", "__version__"}
    assert all(hasattr(rl_training, name) for name in names)


@each_algorithm
def test_the_constructors_signature_has_every_setting_with_its_default(spec: AlgorithmSpec) -> None:
    parameters = inspect.signature(getattr(rl_training, spec.class_name)).parameters
    assert list(parameters)[:2] == ["config_or_env", "env"]
    for name, field in spec.params.model_fields.items():
        if name != "schedules":
            assert parameters[name].default == field.default, name
    fields = {name: field.default for name, field in rl_training.TrainConfig.model_fields.items() if name != "algo"}
    assert set(fields) <= set(parameters)
    assert parameters["num_envs"].default == spec.defaults.get("num_envs", 1)
    assert "learning_rate_schedule" in parameters
