"""Every setting of every algorithm changes what is learned, or a run says that it has no effect."""

from __future__ import annotations

import json
import warnings
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pytest
from torch import Tensor

from resume_cases import ONE_PER_LEARNER, SPECS, env_of, tiny
from rl_training import DQN, TRPO
from rl_training.cli.options import build_config
from rl_training.config.params import read_params
from rl_training.config.settings import read_config
from rl_training.config.spec import AlgorithmSpec
from rl_training.config.train_config import TrainConfig, dump_yaml, list_presets, read_yaml
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.run.build import open_session
from rl_training.run.workflows import resume_training, train
from setting_cases import other_value, run, same

# Settings that do not change what is learned in a short run on the CPU, each with a test of its effect.
ELSEWHERE = {
    "schedules": "not a setting", "eval_interval": "test_run_cadence", "early_stopping": "test_run_cadence",
    "max_updates": "test_resume_exact", "replay_folder": "test_mapped_replay", "replay_memory": "test_device_copy",
    "capture": "test_accelerate", "heldout_interval": "test_bc_update",
}  # fmt: skip
# What else a setting needs so that a short run shows its effect.
NEEDS: dict[str, dict[str, Any]] = {
    "line_search_shrink": {"max_kl": 2.0}, "line_search_steps": {"max_kl": 2.0}, "clip_coef": {"update_epochs": 3},
    "policy_lag": {"learning_rate": 0.3}, "double_q": {"learning_rate": 0.3, "target_update_interval": 9},
    "epsilon_end": {"exploration_fraction": 0.1}, "rollout_batch_size": {"rollout_horizon": 1},
    "exploration_fraction": {"num_steps": 4},
    "synthetic_buffer_capacity": {"rollout_horizon": 1, "rollout_refresh_interval": 1},
    "synthetic_rounds": {"rollout_horizon": 1, "rollout_refresh_interval": 1},
    "widen_support": {"v_min": -1.0, "v_max": 1.0}, "memory": {"sequence_length": 16},
}  # fmt: skip
PRIORITIES = ("prioritized_alpha", "prioritized_beta_start", "prioritized_beta_end", "prioritized_eps")
OF_SEQUENCES = ("burn_in", "sequence_period")
OF_MEMORY = {"memory_size", "memory_layers", "sequence_length", "priority_eta", *OF_SEQUENCES}
# What makes a setting that is unused by default used.
USED_WITH = {
    "pg_rho_clip": {"target_policy": True}, "kl_coef": {"target_policy": True}, "kl_target": {"target_policy": True},
    "target_update_interval": {"target_policy": True},
    **{name: {"noisy": False} for name in ("epsilon_start", "epsilon_end", "exploration_fraction")},
    **{name: {"prioritized": True} for name in PRIORITIES},
    **{name: {"memory": "lstm", "sequence_length": 16} for name in ("memory_size", "memory_layers", *OF_SEQUENCES)},
    "priority_eta": {"memory": "lstm", "sequence_length": 16, "prioritized": True},
    "sequence_length": {"memory": "lstm"}, "refresh_memory": {"memory": "lstm", "sequence_length": 4},
}  # fmt: skip
# In the environment of `tiny`, whatever the other settings are.
NEVER_USED = {
    "trpo": {"ent_coef", "vf_coef"}, "bc": {"gamma"},
    **{name: set(PRIORITIES) for name in ("rlpd", "mbpo", "td3_bc", "rebrac", "awac", "iql", "cql")},
    "a2c": {"refresh_memory"}, **{name: {"sequence_length", "refresh_memory"} for name in ("impala", "appo")},
    "gail": {"memory_size", "memory_layers", "sequence_length", "refresh_memory"},
    "iqn": OF_MEMORY, "fqf": OF_MEMORY,
}  # fmt: skip
# What a run refuses in a sentence, because of other settings.
REFUSED = {
    "epsilon_ladder", "network", "critic_obs", "n_step", "prioritized", "dataset_kind", "dataset_path", "dataset_id",
    "expert_dataset_kind", "expert_dataset_path", "expert_dataset_id", "expert_checkpoint", "augmentation",
    "memory", "critic_dropout", "her_ratio", "num_quantiles", "num_atoms", "architecture", "own_targets",
}  # fmt: skip


@cache
def plain_run(algo: str, settings: tuple[tuple[str, Any], ...]) -> list[list[Tensor]]:
    return list(run(algo, dict(settings)))


def changes_something(algo: str, name: str, settings: dict[str, Any]) -> bool:
    """Whether another value of a setting leads to other weights; ends at the first difference."""
    base = plain_run(algo, tuple(settings.items()))
    other = run(algo, {**settings, name: other_value(algo, name)})
    return any(one is None or two is None or not same(one, two) for one, two in zip_longest(base, other))


@pytest.mark.parametrize("algo", ONE_PER_LEARNER)
def test_every_setting_changes_what_is_learned_or_is_named(algo: str) -> None:
    spec = SPECS[algo]
    spaces = probe_spaces(read_recipe(env_of(spec), {}))
    unused = read_params(spec.params, tiny(algo, Path("unused")).algo_kwargs).find_unused(spaces)
    wrong: dict[str, str] = {}
    for name in spec.params.model_fields.keys() - ELSEWHERE.keys():
        settings = {key: value for key, value in NEEDS.get(name, {}).items() if key in spec.params.model_fields}
        try:
            if name not in unused and not changes_something(algo, name, settings):
                wrong[name] = "has no effect, and is not named"
            if name in unused and changes_something(algo, name, settings):
                wrong[name] = "is named, but has an effect"
            used_with = USED_WITH.get(name) if name in unused.keys() - NEVER_USED.get(algo, set()) else None
            if used_with and not changes_something(algo, name, {**settings, **used_with}):
                wrong[name] = f"has no effect with {used_with} either"
        except UserError as error:
            if name not in REFUSED or name not in str(error):
                wrong[name] = str(error)
    plain_run.cache_clear()
    assert wrong == {}


RATES = {"actor_learning_rate": 0.01, "critic_learning_rate": 0.01}
CONDITIONS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("dqn", {"noisy": True}, ("epsilon_start", "epsilon_end", "exploration_fraction")),
    ("dqn", {"learning_starts": 0}, ("random_action_hold",)),
    ("fqf", {"optimizer": "sgd"}, ("optimizer_eps",)),
    ("r2d2", {"memory": "none"}, ("memory_size", "memory_layers", "sequence_length", "burn_in", "priority_eta")),
    ("r2d2", {"prioritized": False}, ("priority_eta",)),
    ("sac", {"alpha": 0.2}, ("target_entropy",)),
    ("sac", {"alpha": 0.2, **RATES}, ("learning_rate",)),
    ("rlpd", {"alpha": 0.2}, ("target_entropy", "initial_alpha")),
    ("td3", RATES, ("learning_rate",)),
    ("dreamer", {**RATES, "world_model_learning_rate": 0.01}, ("learning_rate",)),
    ("gail", {"discriminator_updates": 0},
     ("discriminator_learning_rate", "discriminator_batch_size", "gradient_penalty")),
]  # fmt: skip


@pytest.mark.parametrize(("algo", "settings", "names"), CONDITIONS)
def test_other_settings_can_make_a_setting_unused(algo: str, settings: dict[str, Any], names: tuple[str, ...]) -> None:
    model = SPECS[algo].params
    assert not set(names) & read_params(model, {}).find_unused().keys()
    assert set(names) <= read_params(model, settings).find_unused().keys()
    assert [name for name in names if changes_something(algo, name, settings)] == []
    plain_run.cache_clear()


def networks_of(spec: AlgorithmSpec, spaces: EnvSpaces, **settings: Any) -> list[tuple[Any, ...]]:
    """Which modules a learner has, and the shapes of their weights."""
    learner = spec.build(read_params(spec.params, settings), spaces)
    modules = [(name, type(module), getattr(module, "norm", None) is None) for name, module in learner.named_modules()]
    return [*modules, *((name, weight.shape) for name, weight in learner.named_parameters())]


SEEN = {"image": gs.Box(0, 255, (12, 10, 3), np.uint8), "vector": gs.Box(-1, 1, (3,))}
OF_NETWORKS = {
    "hidden_sizes": [5], "activation": "elu", "head_hidden_sizes": [5], "discriminator_hidden_sizes": [5],
    "normalize_inputs": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("algo", [spec.name for spec in SPECS.values() if "image" in spec.observation_kinds])
def test_settings_of_networks_are_used_or_named_for_images_and_vectors(algo: str, kind: str) -> None:
    spec = SPECS[algo]
    actions = gs.Discrete(2) if "discrete" in spec.action_kinds else gs.Box(-1, 1, (2,))
    spaces = EnvSpaces.from_gym("Some-v0", SEEN[kind], actions)
    widths = [name for name in ("hidden_sizes", "critic_hidden_sizes") if name in spec.params.model_fields]
    size: dict[str, Any] = {name: [6] for name in widths if spec.params.model_fields[name].default}
    size |= {"size": "xxs"} if algo == "dreamer" else {}
    before, known = networks_of(spec, spaces, **size), OF_NETWORKS.keys() & spec.params.model_fields
    idle = {name for name in known if networks_of(spec, spaces, **{**size, name: OF_NETWORKS[name]}) == before}
    assert idle == read_params(spec.params, {}).find_unused(spaces).keys() & known


@pytest.mark.parametrize("algo", ["dqn", "td3"])
def test_masked_actions_are_not_held(algo: str) -> None:
    spaces = EnvSpaces.from_gym("Some-v0", SEEN["vector"], gs.Discrete(2), has_action_mask=True)
    unused = read_params(SPECS[algo].params, {}).find_unused(spaces)
    assert unused["random_action_hold"] == "actions are not held with masks"


# ---- what the user gave ----------------------------------------------------------------------------------------------

WITHOUT_WORKERS = "execution_backend is 'local_sync', which has no workers"


def notes_of(config: Any) -> list[str]:
    session = open_session(config)
    session.close()
    return [note.removeprefix("warning: ") for note in session.notes if "no effect" in note]


@pytest.mark.parametrize(
    ("settings", "sentences"),
    [
        ({"ent_coef": 0.1}, ["ent_coef has no effect: policy and critic have steps of their own, without it"]),
        ({"ent_coef": 0.0, "vf_coef": 1},
         ["ent_coef and vf_coef have no effect: policy and critic have steps of their own, without it"]),
        ({"worker_order": "first", "max_policy_lag": 3, "num_workers": 1},
         [f"num_workers, worker_order and max_policy_lag have no effect: {WITHOUT_WORKERS}"]),
        ({"max_kl": 0.1, "num_workers": "auto"}, []),
        ({"ray": {"cpus": 2.0}}, ["ray has no effect: execution_backend is 'local_sync'"]),
        ({"checkpoint_keep": 5, "replay_in_checkpoint": False, "worker_timeout": 9.0, "matmul_precision": "high"},
         ["worker_timeout has no effect: no environment has a process of its own",
          "matmul_precision has no effect: device is 'cpu'",
          "checkpoint_keep has no effect: checkpoint_interval is 0, so no step_<n> is written",
          "replay_in_checkpoint has no effect: trpo has no replay buffer"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["keywords", "mapping", "TrainConfig", "file", "--set"])
def test_a_run_names_the_given_settings_that_have_no_effect(
    how: str, settings: dict[str, Any], sentences: list[str], tmp_path: Path
) -> None:
    start: dict[str, Any] = {"algo": "trpo", "env_id": "CartPole-v1", "total_timesteps": 64, "device": "cpu"}
    fields = {name: value for name, value in settings.items() if name in TrainConfig.model_fields}
    data = {**start, **fields, "algo_kwargs": {name: settings[name] for name in settings if name not in fields}}
    if how == "keywords":
        config = TRPO("CartPole-v1", total_timesteps=64, device="cpu", **settings).config
    elif how == "mapping":
        config = read_config(data, None)
    elif how == "TrainConfig":
        config = read_config(TrainConfig(**data), None)
    elif how == "file":
        path = tmp_path / "mine.yaml"
        path.write_text(dump_yaml(data))
        config = build_config(str(path), None, None)
    else:
        given = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
        config = build_config(None, "trpo", "CartPole-v1", [*given, "device=cpu"], total_timesteps=64)
    assert notes_of(config) == sentences


def test_defaults_and_the_values_of_presets_and_earlier_runs_are_not_named(tmp_path: Path) -> None:
    """With noisy layers, the preset's own epsilon has no effect; a run's config.yaml has every setting."""
    preset = read_yaml("dqn/cartpole")["algo_kwargs"]
    assert {"epsilon_end", "exploration_fraction"} <= preset.keys()
    assert notes_of(build_config("dqn/cartpole", None, None, ["noisy=true", "device=cpu"])) == []
    said = ["epsilon_end has no effect: noisy is true, and noisy layers explore instead"]
    given = ["noisy=true", "epsilon_end=0.1", "device=cpu"]
    assert notes_of(build_config("dqn/cartpole", None, None, given)) == said
    assert notes_of(DQN("dqn/cartpole", noisy=True, epsilon_end=0.1, device="cpu").config) == said
    session = open_session(build_config("dqn/cartpole", None, None, given))
    session.close()
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(session.config.model_dump(mode="json")))
    assert notes_of(build_config(str(path), None, None)) == []
    assert notes_of(read_config(session.config.model_dump(), None)) == []


@pytest.mark.parametrize("preset", list_presets())
def test_no_preset_sets_what_has_no_effect(preset: str) -> None:
    data = read_yaml(preset)
    params = read_params(SPECS[data["algo"]].params, data.get("algo_kwargs", {}))
    assert params.find_unused().keys() & data.get("algo_kwargs", {}).keys() == set()


def test_a_resume_names_only_what_it_changes(tmp_path: Path) -> None:
    first = train(tiny("trpo", tmp_path, kwargs={"ent_coef": 0.1}, eval_episodes=0), console=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resume_training(first.checkpoint_path, total_timesteps=160, console=False)
    changes = {"total_timesteps": 192, "algo_kwargs": {"vf_coef": 0.1}}
    with pytest.warns(UserWarning, match="^vf_coef has no effect: policy and critic"):
        resume_training(first.checkpoint_path, changes=changes, force=True, console=False)
