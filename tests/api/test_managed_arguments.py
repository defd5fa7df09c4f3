"""What a managed class takes: environments and configs as first argument, and settings by keyword."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml

import env_zoo
import rl_training
from resume_cases import SPECS, assert_same_run, edit_checkpoint, tiny
from rl_training import A2C, DQN, PPO, TRPO, TrainConfig
from rl_training.cli.options import apply_settings, build_config
from rl_training.config.params import EarlyStopping
from rl_training.config.settings import read_config
from rl_training.config.train_config import list_presets, load_config
from rl_training.errors import UserError, sb3_hints
from rl_training.run.run import Callback
from rl_training.run.workflows import resume_training, train

SMALL = {"total_timesteps": 32, "eval_episodes": 2, "device": "cpu", "num_steps": 8, "hidden_sizes": (8,)}


class Counting(env_zoo.Walk):
    """Counts its steps, and whether it was closed."""

    steps, closed = 0, False

    def step(self, action: Any) -> Any:
        assert not self.closed
        self.steps += 1
        return super().step(action)

    def close(self) -> None:
        self.closed = True


def test_an_id_and_keywords_are_a_config_with_the_defaults_of_the_command_line(tmp_path: Path) -> None:
    managed = PPO("CartPole-v1", output_dir=tmp_path, learning_rate=1e-3, env_kwargs={"sutton_barto_reward": True})
    config = managed.config
    defaults = SPECS["ppo"].defaults
    assert (config.algo, config.env_id, config.output_dir) == ("ppo", "CartPole-v1", str(tmp_path))
    assert config.num_envs == defaults["num_envs"]
    assert config.total_timesteps == defaults["total_timesteps"]
    assert config.algo_kwargs == {"learning_rate": 1e-3}
    assert config.env_kwargs == {**defaults["env_kwargs"], "sutton_barto_reward": True}
    assert PPO("CartPole-v1", num_envs=3).config.num_envs == 3


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ("env_zoo:Walk", "env_zoo:Walk"), (env_zoo.Walk, "Walk"), (lambda: env_zoo.Walk(), "custom"),
        (env_zoo.Walk(), "Walk"), (gym.make("CartPole-v1"), "CartPole-v1"),
    ],
    ids=["id", "class", "function", "instance", "registered instance"],
)  # fmt: skip
def test_the_first_argument_may_be_an_environment_of_any_kind(env: Any, name: str, tmp_path: Path) -> None:
    managed = A2C(env, output_dir=tmp_path, **SMALL)
    assert managed.config.env_id == name
    result = managed.learn()
    assert result.metrics["eval_episodes"] == 2
    assert managed.evaluate(num_episodes=1)["eval_episodes"] == 1


def test_settings_change_a_preset_and_a_config(tmp_path: Path) -> None:
    preset = PPO("ppo/hopper").config
    managed = PPO("ppo/hopper", seed=3, gamma=0.9, env_kwargs={"max_episode_steps": 7}, algo_kwargs={"ent_coef": 0.5})
    assert managed.config.seed == 3
    assert managed.config.algo_kwargs == {**preset.algo_kwargs, "gamma": 0.9, "ent_coef": 0.5}
    assert managed.config.env_kwargs == {**preset.env_kwargs, "max_episode_steps": 7}
    mine = tiny("ppo", tmp_path)
    changed = PPO(mine, env="Acrobot-v1", num_envs=2).config
    assert changed == mine.model_copy(update={"env_id": "Acrobot-v1", "num_envs": 2})
    assert PPO("ppo/cartpole", env=env_zoo.Walk).config.env_id == "Walk"  # a preset does not name another environment


def test_training_steps_the_environment_that_was_given_and_leaves_it_open(tmp_path: Path) -> None:
    env = Counting()
    managed = A2C(env, output_dir=tmp_path, **SMALL)
    assert managed.config.num_envs == 1  # one environment was given, whatever the algorithm's default is
    managed.learn()
    assert env.steps == 32  # evaluation has copies
    managed.evaluate(num_episodes=2)
    assert env.steps == 32
    assert not env.closed
    with pytest.raises(UserError, match="is a single environment instance, but num_envs is 2; give a function"):
        resume_training(train(tiny("a2c", tmp_path, num_envs=2), console=False).checkpoint_path, env=env)


@pytest.mark.filterwarnings("error")
def test_an_environment_that_is_used_again_resumes_exactly(tmp_path: Path) -> None:
    env = env_zoo.Walk()
    results = [
        A2C(given, output_dir=tmp_path, num_envs=1, **{**SMALL, "total_timesteps": 28}).learn()
        for given in (env, env_zoo.Walk)
    ]
    again = [
        resume_training(result.checkpoint_path, total_timesteps=64, env=given)
        for result, given in zip(results, (env, env_zoo.Walk), strict=True)
    ]
    assert_same_run(*again)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_envs": 2}, "num_envs is 2"), ({"env_kwargs": {"length": 2}}, "cannot take length"),
        ({"execution_backend": "local_async"}, "execution_backend is 'local_async'"),
        ({"vectorization": "async"}, "vectorization is 'async'"),
    ],
)  # fmt: skip
def test_one_environment_is_refused_where_it_does_not_suffice(settings: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{said}; give a function that makes environments"):
        A2C(env_zoo.Walk(), output_dir=tmp_path, **SMALL, **settings).learn()


def test_an_environment_that_cannot_be_copied_is_refused_with_the_reason() -> None:
    env = env_zoo.Walk()
    env.connection = (part for part in ())  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"cannot be copied \(cannot pickle 'generator' object\).* give a function"):
        DQN(env)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: PPO("CartPole-v1", learning=1), "PPO has no setting 'learning'; did you mean 'learning_rate'?"),
        (lambda: PPO("CartPole-v1", num_env=1), "PPO has no setting 'num_env'; did you mean 'num_envs'?"),
        (lambda: PPO("CartPole-v1", xyz=1),
         "PPO has no setting 'xyz'; rl-training config --schema --algo ppo shows them all."),
        (lambda: TRPO("CartPole-v1", memory="lstm"), "TRPO has no setting 'memory'; it is a setting of a2c, ppo, "
         "impala, appo and others; rl-training config --schema --algo trpo shows those of trpo."),
        (lambda: PPO("CartPole-v1", num_envs="many"), "config: num_envs is 'many'; it should be a whole number."),
        (lambda: PPO("CartPole-v1", algo="dqn"), "algo is 'dqn'; PPO needs 'ppo'."),
        (lambda: PPO("CartPole-v1", env="Acrobot-v1"),
         "PPO got two environments, 'CartPole-v1' and env='Acrobot-v1'; give one."),
        (lambda: PPO("X-v0", env_kwargs=3), "env_kwargs is 3; it must be a mapping of names to values."),
        (lambda: PPO({"algo_kwargs": 3}, env="X-v0", seed=1),
         "algo_kwargs is 3; it must be a mapping of names to values."),
        (PPO, 'PPO needs an environment, such as PPO("CartPole-v1").'),
        (lambda: PPO(3), "env is of type int; it must be a Gymnasium id, a function, a class or a gymnasium.Env."),
        (lambda: PPO(gym.make_vec("CartPole-v1", 2)), "env is a vector environment; give a function that makes "
         "environments, such as env=lambda: make_mine(), and num_envs."),
    ],
)  # fmt: skip
def test_what_makes_no_sense_gets_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value) == sentence


def test_a_file_or_preset_wins_over_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert PPO("CartPole-v1").config.env_id == "CartPole-v1"
    (tmp_path / "CartPole-v1").write_text("algo: ppo\nenv_id: Acrobot-v1\ntotal_timesteps: 100\n")
    assert PPO("CartPole-v1").config.env_id == "Acrobot-v1"
    with pytest.raises(UserError, match="'ppo/nothing' is neither a file nor a packaged preset"):
        PPO("ppo/nothing")
    with pytest.raises(UserError, match=r"'mine.yaml' is neither a file nor a packaged preset"):
        PPO("mine.yaml")
    assert PPO("ALE/Pong-v5").config.env_id == "ALE/Pong-v5"


def test_a_config_file_names_no_function_but_the_users_own_code_does(tmp_path: Path) -> None:
    """A setting next to a file must not make the file trusted."""
    file = tmp_path / "mine.yaml"
    file.write_text("algo: ppo\nenv_id: os:system\ntotal_timesteps: 100\n")
    assert PPO(file, seed=1).config.named == ()
    assert PPO(file, env_id="env_zoo:make").config.named == ("env_zoo:make",)
    assert PPO(file, env="env_zoo:make").config.named == ("env_zoo:make",)


@pytest.mark.parametrize("algo", SPECS)
def test_no_hyper_parameter_hides_behind_a_field_of_the_config(algo: str) -> None:
    assert not set(SPECS[algo].params.model_fields) & set(TrainConfig.model_fields)
    assert getattr(rl_training, SPECS[algo].class_name)("X-v0", gamma=0.5).config.algo_kwargs["gamma"] == 0.5


def test_hyper_parameters_can_be_read_back(tmp_path: Path) -> None:
    managed = rl_training.C51DQN("CartPole-v1", gamma=0.5, learning_rate_schedule={"start": 1e-3, "end": 0.0})
    found = managed.hyperparameters
    assert (found["gamma"], found["tau"], found["v_min"]) == (0.5, 0.005, None)
    assert found["learning_rate_schedule"]["end"] == 0.0
    managed = rl_training.C51DQN(tiny("c51_dqn", tmp_path))
    managed.learn()
    assert isinstance(managed.hyperparameters["v_min"], float)  # which is measured at the start of the run
    assert managed.config.threads == 1
    assert rl_training.C51DQN.load(managed.save(tmp_path / "x.ckpt")).hyperparameters == managed.hyperparameters


def test_a_hyper_parameter_out_of_bounds_is_refused_at_once() -> None:
    with pytest.raises(UserError, match="learning_rate is -1; it should be greater than or equal to 0"):
        PPO("CartPole-v1", learning_rate=-1)


def test_none_takes_a_presets_schedule_away() -> None:
    assert "learning_rate_schedule" in PPO("ppo/cartpole").hyperparameters
    assert "learning_rate_schedule" not in PPO("ppo/cartpole", learning_rate_schedule=None).hyperparameters


# ---- one set of defaults ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", SPECS)
def test_python_yaml_and_the_command_line_have_the_same_defaults(algo: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"algo: {algo}\nenv_id: X-v0\n")
    managed = getattr(rl_training, SPECS[algo].class_name)
    expected = build_config(None, algo, "X-v0")
    assert expected.num_envs == SPECS[algo].defaults.get("num_envs", 1)
    steps = expected.total_timesteps
    written = TrainConfig(algo=algo, env_id="X-v0", total_timesteps=steps)
    found = [managed("X-v0"), managed({"env_id": "X-v0"}), managed(file), managed(str(file)), managed(written)]
    assert [one.config for one in found] == [expected] * 5
    assert build_config(str(file), None, None) == expected


def test_a_run_writes_the_defaults_that_it_took(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("{algo: a2c, env_id: CartPole-v1, total_timesteps: 64, eval_episodes: 0}")
    stored = yaml.safe_load((A2C(file, output_dir=tmp_path).learn().run_dir / "config.yaml").read_text())
    assert (stored["num_envs"], stored["log_interval"]) == (4, 100)
    assert stored["env_kwargs"] == {"wrappers": {"normalize_observation": True, "normalize_reward": True}}
    assert train(load_config(stored), console=False).run_dir.is_dir()


def test_what_is_said_is_kept_wrapper_by_wrapper() -> None:
    wrappers = {"normalize_reward": False, "frame_stack": 2}
    config = PPO("X-v0", env_kwargs={"wrappers": wrappers, "size": 3}, num_envs=1).config
    assert config.num_envs == 1
    assert config.env_kwargs == {"wrappers": {"normalize_observation": "auto", **wrappers}, "size": 3}


@pytest.mark.parametrize("preset", list_presets())
def test_a_packaged_preset_says_all_that_its_algorithm_recommends(preset: str) -> None:
    """So that a new recommendation does not change what it trains, nor make its recorded gates stale."""
    assert read_config(preset, None) == load_config(preset)


def test_a_checkpoint_does_not_follow_the_recommendations(tmp_path: Path) -> None:
    """One of an earlier version has no wrappers in its config: it learned without them, and so it goes on."""
    path = train(tiny("a2c", tmp_path), console=False).checkpoint_path

    def forget(tree: dict[str, Any]) -> None:
        tree["config"]["env_kwargs"] = {}

    old = A2C.load(edit_checkpoint(path, tmp_path / "old.ckpt", forget))
    assert not any(old.config.env_kwargs["wrappers"].values())
    assert old.learn(32, progress=False).metrics["global_step"] == 160
    assert not old._policy.spaces.normalize_observations  # type: ignore[union-attr]
    old.learn(32, reset=True)
    assert old.config.num_envs == 1
    assert not old._policy.spaces.normalize_observations  # type: ignore[union-attr]


def test_predict_works_with_an_instance(tmp_path: Path) -> None:
    managed = A2C(env_zoo.Walk(), output_dir=tmp_path, **SMALL)
    managed.learn()
    assert managed.predict(np.zeros(2, np.float32)) in (0, 1)


# ---- the habits of Stable-Baselines3 ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "theirs", "ours"),
    [
        ("ppo", "n_steps", "num_steps"), ("ppo", "n_epochs", "update_epochs"), ("ppo", "clip_range", "clip_coef"),
        ("ppo", "batch_size", "minibatch_size"), ("ppo", "clip_range_vf", "clip_value_loss"),
        ("a2c", "n_steps", "num_steps"), ("a2c", "use_rms_prop", "optimizer"), ("dqn", "n_steps", "n_step"),
        ("dqn", "buffer_size", "buffer_capacity"), ("dqn", "train_freq", "train_frequency"),
        ("dqn", "gradient_steps", "gradient_updates_per_step"), ("dqn", "exploration_final_eps", "epsilon_end"),
        ("sac", "ent_coef", "alpha"), ("td3", "target_policy_noise", "policy_noise"), ("trpo", "target_kl", "max_kl"),
        ("td3", "action_noise", "exploration_noise"), ("qr_dqn", "n_quantiles", "num_quantiles"),
    ],
)  # fmt: skip
def test_a_name_of_stable_baselines3_gets_ours_in_python_yaml_and_on_the_command_line(
    algo: str, theirs: str, ours: str, tmp_path: Path
) -> None:
    said = f"{theirs!r}; Stable-Baselines3's {theirs} is {ours} here."
    with pytest.raises(UserError, match=f"has no setting {said}"):
        getattr(rl_training, SPECS[algo].class_name)("X-v0", **{theirs: 1})
    with pytest.raises(UserError, match=f"unknown key {said}"):
        apply_settings({"algo": algo}, [f"{theirs}=1"])
    file = tmp_path / "mine.yaml"
    file.write_text(f"algo: {algo}\nenv_id: X-v0\ntotal_timesteps: 1\nalgo_kwargs: {{{theirs}: 1}}\n")
    with pytest.raises(UserError, match=f"unknown key {said}"):
        getattr(rl_training, SPECS[algo].class_name)(file)


def test_such_a_name_at_the_top_of_a_file_gets_its_place() -> None:
    for theirs, ours in (("clip_range", "algo_kwargs.clip_coef"), ("n_envs", "num_envs")):
        with pytest.raises(UserError, match=f"Stable-Baselines3's {theirs} is {ours} here"):
            PPO({"env_id": "X-v0", theirs: 1})


def test_what_an_algorithm_does_not_have_is_not_promised() -> None:
    with pytest.raises(UserError, match="A2C has no setting 'clip_range'") as caught:
        A2C("X-v0", clip_range=0.2)
    assert "clip_coef" not in str(caught.value)


def test_every_name_of_ours_in_the_table_exists() -> None:
    known = {name for spec in SPECS.values() for name in spec.params.model_fields} | set(TrainConfig.model_fields)
    known |= set(EarlyStopping.model_fields)
    hints = sb3_hints()
    others = {"callbacks", "progress", "reset", "num_episodes", *vars(Callback)}
    assert {our for ours in hints["names"].values() for our in ours} <= known | others
    assert not hints["remarks"].keys() & known
    assert hints["values"].keys() <= known
    assert not any(hasattr(rl_training, name) for name in hints["remarks"])


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda: PPO("MlpPolicy", "CartPole-v1", verbose=1), "PPO takes no policy such as 'MlpPolicy'; write "
         "PPO('CartPole-v1'): the networks follow from the environment's spaces, hidden_sizes and activation."),
        (lambda: PPO("CartPole-v1", verbose=1),
         "PPO has no setting 'verbose'; learn(progress=True) shows a progress line."),
        (lambda: PPO("CartPole-v1", policy_kwargs={}),
         "PPO has no setting 'policy_kwargs'; hidden_sizes, critic_hidden_sizes, activation, optimizer and network "
         "(your own features extractor) replace it."),
        (lambda: PPO("CartPole-v1", tensorboard_log="logs"), "PPO has no setting 'tensorboard_log'; every run writes "
         "TensorBoard events into its folder in output_dir."),
        (lambda: PPO("CartPole-v1", 3),
         "PPO takes one environment or config; give everything else by name, as in seed=1."),
        (lambda: PPO("CartPole-v1").learn(10, progress_bar=True),
         "learn has no argument 'progress_bar'; Stable-Baselines3's progress_bar is progress here."),
        (lambda: PPO("CartPole-v1").learn(10, callback=[]),
         "learn has no argument 'callback'; Stable-Baselines3's callback is callbacks here."),
        (lambda: PPO("CartPole-v1").learn(10, resett=True), "learn has no argument 'resett'; did you mean 'reset'?"),
    ],
)  # fmt: skip
def test_other_habits_get_one_sentence(use: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        use()
    assert str(caught.value) == sentence


def test_a_setting_cannot_be_assigned_but_anything_else_can() -> None:
    model = PPO("CartPole-v1")
    with pytest.raises(AttributeError, match=r"learning_rate cannot be assigned: PPO\(env, learning_rate"):
        model.learning_rate = 1e-5  # type: ignore[attr-defined]
    model.note = "mine"  # type: ignore[attr-defined]
    assert (model.note, copy.deepcopy(model).note) == ("mine", "mine")  # type: ignore[attr-defined]

    class Mine(PPO):  # type: ignore[misc]
        def __init__(self, env: str) -> None:
            super().__init__(env)
            self.seed = 7

    assert Mine("CartPole-v1").seed == 7
