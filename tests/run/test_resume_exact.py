"""N steps in one go, and the same run stopped and resumed, agree bit for bit; generic over the registry."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from resume_cases import (
    ONE_PER_LANE,
    ONE_PER_LEARNER,
    SPECS,
    FirstReturns,
    StopAt,
    assert_same,
    assert_same_run,
    reward_scales,
    rows_of,
    stop_and_resume,
    tiny,
    without,
)
from rl_training.config.params import read_params
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.record.metrics_file import read_metrics
from rl_training.run.build import open_session
from rl_training.run.restoring import find_history
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import evaluate_checkpoint, resume_training, train

EVALUATED = {"eval_interval": 40}
SCHEDULED = {"learning_rate_schedule": {"type": "linear", "start": 1e-2, "end": 0.0}}


def assert_resumes_exactly(output: Path, algo: str, *stops: int, **fields: Any) -> None:
    config = tiny(algo, output, **fields)
    straight = train(config, console=False)
    resumed = stop_and_resume(config, *(stops or (config.total_timesteps // 2,)))
    assert_same_run(straight, resumed)


@pytest.mark.parametrize("algo", ONE_PER_LEARNER)
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path, algo: str) -> None:
    assert_resumes_exactly(tmp_path, algo, num_envs=4, kwargs=EVALUATED)


@pytest.mark.parametrize(
    "algo", [pytest.param(algo, marks=[pytest.mark.slow] * (algo not in ONE_PER_LANE)) for algo in SPECS]
)
def test_a_resumed_run_with_one_environment_is_the_run_that_never_stopped(tmp_path: Path, algo: str) -> None:
    assert_resumes_exactly(tmp_path, algo, num_envs=1, kwargs=EVALUATED)


def test_what_auto_decided_is_kept_by_a_resume(tmp_path: Path) -> None:
    wrappers = {"normalize_observation": "auto", "normalize_reward": True}
    assert_resumes_exactly(tmp_path, "a2c", num_envs=2, env_id="Pendulum-v1", env_kwargs={"wrappers": wrappers})


@pytest.mark.parametrize("stop", [1, 37, 63, 100])
def test_the_moment_of_the_stop_does_not_matter(tmp_path: Path, stop: int) -> None:
    assert_resumes_exactly(tmp_path, "ppo", stop, num_envs=2, log_interval=3, kwargs=EVALUATED)


def test_a_run_may_be_resumed_again_and_again(tmp_path: Path) -> None:
    assert_resumes_exactly(tmp_path, "ppo", 20, 50, 90, num_envs=4, log_interval=3, kwargs=EVALUATED | SCHEDULED)


def test_a_stop_before_the_first_step_loses_nothing(tmp_path: Path) -> None:
    class StopAtOnce(Callback):
        def on_start(self, run: Run) -> bool:
            return False

    config = tiny("ppo", tmp_path)
    begun = train(config, callbacks=[StopAtOnce()], console=False)
    assert begun.metrics["global_step"] == 0
    assert_same_run(train(config, console=False), resume_training(begun.checkpoint_path, console=False))


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    finished = train(tiny("a2c", tmp_path, log_interval=3), console=False)
    rows, tree = rows_of(finished.run_dir), load_checkpoint(finished.checkpoint_path)
    again = resume_training(finished.checkpoint_path, console=False)
    assert again.run_dir == finished.run_dir
    assert_same(rows_of(again.run_dir), rows)
    assert_same(load_checkpoint(again.checkpoint_path)["algorithm"], tree["algorithm"])
    assert_same(without(again.metrics, {"train_seconds"}), without(finished.metrics, {"train_seconds"}))


@pytest.mark.parametrize("name", ["best", "step"])
def test_best_and_step_checkpoints_resume_exactly_too(tmp_path: Path, name: str) -> None:
    config = tiny("ppo", tmp_path, num_envs=2, checkpoint_interval=48, kwargs=EVALUATED | SCHEDULED)
    straight = train(config, console=False)
    halfway = train(config, callbacks=[StopAt(70)], console=False)
    folder = halfway.checkpoint_path.parent
    path = folder / "best.ckpt" if name == "best" else min(folder.glob("step_*.ckpt"))
    assert load_checkpoint(path)["run"]["step"] < 128
    assert_same_run(straight, resume_training(path, console=False))


def test_a_resume_elsewhere_leaves_the_first_run_alone(tmp_path: Path) -> None:
    config = tiny("ppo", tmp_path / "first")
    halfway = train(config, callbacks=[StopAt(64)], console=False)
    before = {path: path.read_bytes() for path in halfway.run_dir.rglob("*") if path.is_file()}
    resumed = resume_training(halfway.checkpoint_path, output_dir=tmp_path / "second", console=False)
    assert resumed.run_dir.parent == tmp_path / "second"
    assert {path: path.read_bytes() for path in halfway.run_dir.rglob("*") if path.is_file()} == before
    straight = train(config, console=False)
    assert_same(
        load_checkpoint(resumed.checkpoint_path)["algorithm"], load_checkpoint(straight.checkpoint_path)["algorithm"]
    )


def test_a_checkpoint_next_to_somebodys_config_is_resumed_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halfway = train(tiny("ppo", tmp_path / "runs"), callbacks=[StopAt(64)], console=False)
    project = tmp_path / "project"
    (project / "models").mkdir(parents=True)
    (project / "config.yaml").write_text("mine: true\n")
    (project / "models" / "policy.ckpt").write_bytes(halfway.checkpoint_path.read_bytes())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    resumed = resume_training(project / "models" / "policy.ckpt", console=False)
    assert resumed.run_dir.resolve().parent == tmp_path / "here" / "runs"  # not where the checkpoint says
    assert sorted(path.name for path in project.rglob("*")) == ["config.yaml", "models", "policy.ckpt"]
    assert (project / "config.yaml").read_text() == "mine: true\n"


# ---- what a resume may change ----------------------------------------------------------------------------------------


def test_a_budget_without_schedules_stretches_none(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """And the folder is shown as it was in the first run: relative to where the user is."""
    monkeypatch.chdir(tmp_path)
    halfway = train(tiny("a2c", Path("runs")), callbacks=[StopAt(64)], console=True)
    started = capsys.readouterr().err.splitlines()[0]
    resume_training(halfway.checkpoint_path, total_timesteps=2048, console=True)
    again, budget = capsys.readouterr().err.splitlines()[:2]
    assert again == started
    assert budget == "the budget is now 2,048 steps (was 128)"


def test_a_larger_budget_stretches_the_schedules_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halfway = train(tiny("ppo", tmp_path, kwargs=SCHEDULED), callbacks=[StopAt(64)], console=False)
    capsys.readouterr()
    longer = resume_training(halfway.checkpoint_path, total_timesteps=256, console=True)
    assert "the budget is now 256 steps (was 128); schedules stretch with it" in capsys.readouterr().err
    assert longer.metrics["global_step"] == 256
    assert longer.metrics["learning_rate"] == 0.0
    rates = {row["step"]: row["learning_rate"] for row in rows_of(longer.run_dir) if row["kind"] == "train"}
    assert rates[64] == pytest.approx(1e-2 * (1 - 64 / 128))
    assert rates[128] == pytest.approx(1e-2 * (1 - 128 / 256))


def test_max_updates_and_max_seconds_are_budgets_too(tmp_path: Path) -> None:
    halfway = train(tiny("ppo", tmp_path, kwargs={"max_updates": 4}), console=False)
    assert halfway.metrics["stop_reason"] == "max_updates"
    changes = {"max_seconds": 1e6, "algo_kwargs": {"max_updates": 7}}
    assert resume_training(halfway.checkpoint_path, changes=changes, console=False).metrics["updates"] == 7


@pytest.mark.parametrize(
    "changes",
    [{"seed": 4}, {"num_envs": 2}, {"algo_kwargs": {"gamma": 0.5}}, {"tags": ["new"]}, {"algo_kwargs": SCHEDULED}],
)
def test_any_other_change_needs_force_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    halfway = train(tiny("ppo", tmp_path), callbacks=[StopAt(64)], console=False)
    before = halfway.checkpoint_path.read_bytes()
    ((name, value),) = changes.items()
    key = f"algo_kwargs.{next(iter(value))}" if name == "algo_kwargs" else name
    with pytest.raises(UserError, match=f"resuming would change {key} from .*needs --force"):
        resume_training(halfway.checkpoint_path, changes=changes, console=False)
    assert halfway.checkpoint_path.read_bytes() == before
    capsys.readouterr()
    forced = resume_training(halfway.checkpoint_path, changes=changes, force=True, console=True)
    assert f"changed by --force: {key} is now" in capsys.readouterr().err
    assert forced.metrics["global_step"] >= 128


@pytest.mark.parametrize(
    ("algo", "backend"),
    [("a2c", "local_sync"), ("ppo", "local_sync"), ("impala", "local_sync"), ("appo", "local_sync"),
     ("gail", "local_sync"), ("ppo", "local_async")],
)  # fmt: skip
def test_scaled_rewards_allow_another_number_of_environments(tmp_path: Path, algo: str, backend: str) -> None:
    """The running return of an environment is dropped with its episode; what was learned about rewards stays."""
    fields: dict[str, Any] = {"execution_backend": backend, "env_kwargs": {"wrappers": {"normalize_reward": True}}}
    config = tiny(algo, tmp_path, num_envs=2, eval_episodes=0, **fields)
    halfway = train(config, callbacks=[StopAt(64)], console=False)
    seen = reward_scales(halfway)[0].moments[0]
    watch = FirstReturns()
    resumed = resume_training(
        halfway.checkpoint_path, changes={"num_envs": 4}, force=True, callbacks=[watch], console=False
    )
    assert watch.running == [None]
    (scale,) = reward_scales(resumed)
    assert scale.running.shape == (4,)
    assert scale.moments[0] > seen


def test_what_is_given_again_unchanged_is_no_change(tmp_path: Path) -> None:
    halfway = train(tiny("ppo", tmp_path, tags=["a"]), callbacks=[StopAt(64)], console=False)
    changes = {"seed": "3", "tags": ["a"], "algo_kwargs": {"hidden_sizes": (8,), "gamma": "0.99"}}
    assert resume_training(halfway.checkpoint_path, changes=changes, console=False).metrics["global_step"] == 128


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sed": 1}, "unknown key 'sed'; did you mean 'seed'"),
        ({"algo_kwargs": {"gama": 0.9}}, "unknown key 'gama'; did you mean 'gamma'"),
        ({"algo_kwargs": 5}, "algo_kwargs is 5"),
        ({"total_timesteps": "soon"}, "total_timesteps is 'soon'"),
        ({"total_timesteps": 32}, "total_timesteps is 32, but .* is at step 64 already"),
        ({"env_id": "Pendulum-v1"}, "the checkpoint was made for observations"),
        ({"algo": "a2c"}, "algo is 'a2c', but the run is of ppo"),
    ],
)
def test_a_wrong_change_is_refused_with_force_too(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    halfway = train(tiny("ppo", tmp_path), callbacks=[StopAt(64)], console=False)
    with pytest.raises(UserError, match=sentence):
        resume_training(halfway.checkpoint_path, changes=changes, force=True, console=False)


# ---- evaluation stands beside training -------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ONE_PER_LEARNER)
def test_evaluating_does_not_disturb_training(tmp_path: Path, algo: str) -> None:
    trees = [
        load_checkpoint(train(config, console=False).checkpoint_path)
        for fields in ({"eval_episodes": 0}, {"eval_episodes": 2, "kwargs": {"eval_interval": 32}})
        for config in [tiny(algo, tmp_path, num_envs=2, total_timesteps=80, **fields)]
    ]
    for part in ("algorithm", "source"):
        assert_same(trees[0][part], trees[1][part], part)


def test_the_last_evaluation_is_what_evaluating_the_checkpoint_gives(tmp_path: Path) -> None:
    result = train(tiny("ppo", tmp_path), console=False)
    assert evaluate_checkpoint(result.checkpoint_path)["eval_return_mean"] == result.metrics["eval_return_mean"]
    (row,) = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if row["kind"] == "eval"]
    assert evaluate_checkpoint(result.checkpoint_path)["eval_returns"] == row["eval_returns"]


def test_evaluations_in_an_environment_with_history_are_the_same_after_a_resume(tmp_path: Path) -> None:
    """The training environment is another one, whose history cannot come back, and which says so."""
    config = tiny("bc", tmp_path, env_id="env_zoo:KeepsHistory", eval_episodes=3, kwargs=EVALUATED)
    assert_same_run(train(config, console=False), stop_and_resume(config, 50, 90))


@pytest.mark.parametrize(
    ("env_id", "env_kwargs", "what"),
    [
        ("ScalesByHistory", {}, "return and ScalesByHistory.begun, so this resume is not exact"),
        ("KeepsHistory", {"since": 7}, "in a trial with random actions"),
    ],
)
def test_an_inexact_resume_says_so_everywhere(
    tmp_path: Path, env_id: str, env_kwargs: dict[str, Any], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the screen, in the manifest, and as a warning of Python's."""
    config = tiny("ppo", tmp_path, env_id=f"env_zoo:{env_id}", env_kwargs=env_kwargs, kwargs={"num_steps": 13})
    halfway = train(config, callbacks=[StopAt(50)], console=False)
    capsys.readouterr()
    resume_training(halfway.checkpoint_path, callbacks=[StopAt(60)], console=True)
    assert what in " ".join(capsys.readouterr().err.split())
    assert what in " ".join(json.loads((halfway.run_dir / "manifest.json").read_text())["messages"])
    with pytest.warns(UserWarning, match=f"{env_id} (did not replay to the stored|came to a different) .*{what}"):
        resume_training(halfway.checkpoint_path, console=False)


@pytest.mark.parametrize(
    ("env_id", "episode", "what"),
    [
        ("KeepsHistory", 1, "came to a different .* in a trial with random actions"),
        ("MasksByHistory", 0, "MasksByHistory.begun did not come back in a trial of .*, so .* may not be"),
        ("OwnGenerator", 0, "came to a different"),
        ("Walk", 1, None),
    ],
)
def test_what_workers_do_not_send_is_found_in_a_trial(tmp_path: Path, env_id: str, episode: int, what: Any) -> None:
    session = open_session(tiny("ppo", tmp_path, env_id=f"env_zoo:{env_id}"))
    session.close()
    brief = {"stepper": {"engine": {"episodes": [{"episode": episode}]}}}
    said = find_history(session, {"workers": [{}, brief], "flight": {}, "weights": []})
    assert [bool(re.search(what, sentence)) for sentence in said] == [True] if what else said == []


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_pool_says_that_it_cannot_be_resumed_exactly(algo: str, tmp_path: Path) -> None:
    pytest.importorskip("envpool")
    config = tiny(algo, tmp_path, env_id="Acrobot-v1", vectorization="native", num_envs=2, total_timesteps=300)
    halfway = train(config, callbacks=[StopAt(100)], console=False)
    messages = json.loads((halfway.run_dir / "manifest.json").read_text())["messages"]
    assert "Acrobot-v1 is stepped by EnvPool" in " ".join(messages)
    resumed = resume_training(halfway.checkpoint_path, console=False)
    assert load_checkpoint(resumed.checkpoint_path)["run"]["step"] >= 300


# ---- the full matrix -------------------------------------------------------------------------------------------------

ATARI = {"frameskip": 1, "wrappers": {"atari": {"screen_size": 40, "frame_stack": 2}}}
CASES: dict[str, dict[str, Any]] = {
    "cartpole-native": {"env_id": "CartPole-v1", "vectorization": "native"},
    "cartpole-sync": {"env_id": "CartPole-v1", "vectorization": "sync"},
    "pendulum": {"env_id": "Pendulum-v1", "total_timesteps": 900},
    "acrobot": {"env_id": "Acrobot-v1", "env_kwargs": {"max_episode_steps": 60}},
    "mujoco": {"env_id": "Hopper-v5"},
    "atari": {"env_id": "ALE/Breakout-v5", "env_kwargs": ATARI, "eval_episodes": 0, "total_timesteps": 96},
    "atari-native": {
        "env_id": "ALE/Breakout-v5", "env_kwargs": ATARI, "eval_episodes": 0, "total_timesteps": 96,
        "vectorization": "native",
    },
    "async": {"env_id": "Acrobot-v1", "vectorization": "async"},
    "lag": {"env_id": "CartPole-v1", "kwargs": {"policy_lag": 3}},
    "schedules": {
        "env_id": "CartPole-v1",
        "kwargs": {**SCHEDULED, "gamma_schedule": {"type": "cosine", "start": 0.9, "end": 0.99}},
    },
    "normalized": {
        "env_id": "Pendulum-v1",
        "env_kwargs": {
            "max_episode_steps": 30, "wrappers": {"normalize_observation": "auto", "normalize_reward": True},
        },
    },
    "normalized-native": {
        "env_id": "CartPole-v1",
        "env_kwargs": {"wrappers": {"normalize_observation": True, "normalize_reward": True}},
    },
    "clipped-stack": {"env_id": "CartPole-v1", "env_kwargs": {"wrappers": {"frame_stack": 3, "clip_reward": True}}},
    "pixels": {
        "env_id": "CartPole-v1", "eval_episodes": 0, "total_timesteps": 96,
        "env_kwargs": {"wrappers": {"pixels": {"resize_shape": [36, 36], "frame_stack": 2, "grayscale": True}}},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("algo", SPECS)
def test_every_algorithm_resumes_exactly_everywhere(tmp_path: Path, algo: str, case: str, num_envs: int) -> None:
    fields = {"total_timesteps": 400, "log_interval": 2, "threads": 1, **CASES[case]}
    spec = SPECS[algo]
    kinds = {"Pendulum-v1": "continuous", "Hopper-v5": "continuous"}
    if kinds.get(fields["env_id"], "discrete") not in spec.action_kinds:
        pytest.skip(f"{algo} does not take the actions of {fields['env_id']}")
    kwargs = {"eval_interval": 150, **fields.pop("kwargs", {})}
    params = read_params(spec.params, tiny(algo, tmp_path).algo_kwargs)
    fixed = params.fixed_numbers() | params.find_unused()
    names = {name: name.removesuffix("_schedule") for name in kwargs}
    unknown = {name for name, number in names.items() if number not in spec.params.model_fields or number in fixed}
    if case.startswith("normalized") and not spec.normalizes_rewards:
        fields["env_kwargs"] = {"wrappers": {"normalize_observation": True}}
    assert_resumes_exactly(tmp_path, algo, num_envs=num_envs, kwargs=without(kwargs, unknown), **fields)


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("stop", [9, 55, 123, 240])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_appo_with_a_target_policy_resumes_exactly(tmp_path: Path, env_id: str, stop: int, num_envs: int) -> None:
    kwargs = {"target_policy": True, "target_update_interval": 3, "policy_lag": 2}
    assert_resumes_exactly(
        tmp_path, "appo", stop, env_id=env_id, num_envs=num_envs, kwargs=kwargs, total_timesteps=300
    )


@pytest.mark.slow
@pytest.mark.parametrize("algo", SPECS)
def test_the_stop_may_fall_anywhere(tmp_path: Path, algo: str) -> None:
    config = tiny(algo, tmp_path, num_envs=3, total_timesteps=200, log_interval=2, kwargs=EVALUATED)
    straight = train(config, console=False)
    for stop in range(5, 170, 23):
        assert_same_run(straight, stop_and_resume(config, stop))
