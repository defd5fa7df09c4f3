"""Evaluate, predict, resume, save and load from a checkpoint file, and what is said of a file that is none."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import rl_training
from resume_cases import ONE_PER_LEARNER, SPECS, StopAt, assert_same, edit_checkpoint, env_of, rows_of, tiny
from rl_training.api import ManagedAlgorithm
from rl_training.errors import UserError
from rl_training.record import checkpoints as checkpointing
from rl_training.record.checkpoints import load_checkpoint, save_checkpoint
from rl_training.run.learner import load_policy, plain_action
from rl_training.run.workflows import evaluate_checkpoint, predict_checkpoint, resume_training, train


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One finished run per algorithm, and a continuous one."""
    folder = tmp_path_factory.mktemp("runs")
    paths = {name: train(tiny(name, folder), console=False).checkpoint_path for name in SPECS}
    continuous = next(spec.name for spec in SPECS.values() if "continuous" in spec.action_kinds)
    paths["continuous"] = train(tiny(continuous, folder, env_id="Pendulum-v1"), console=False).checkpoint_path
    return paths


def managed(algo: str) -> type[ManagedAlgorithm]:
    return getattr(rl_training, SPECS[algo].class_name)


# ---- predicting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", [name for name, spec in SPECS.items() if "discrete" in spec.action_kinds])
def test_one_discrete_observation_gives_an_int_and_a_batch_gives_a_batch(
    checkpoints: dict[str, Path], algo: str
) -> None:
    one = predict_checkpoint(checkpoints[algo], [0.1, 0.0, -0.1, 0.2])
    assert isinstance(one, int)
    assert one in (0, 1)
    many = predict_checkpoint(checkpoints[algo], np.array([[0.1, 0.0, -0.1, 0.2]] * 5, dtype=np.float64))
    assert isinstance(many, np.ndarray)
    assert many.tolist() == [one] * 5
    assert predict_checkpoint(checkpoints[algo], [[0.1, 0.0, -0.1, 0.2]]).shape == (1,)


@pytest.mark.parametrize("deterministic", [True, False])
def test_continuous_actions_are_arrays_in_the_environments_range(
    checkpoints: dict[str, Path], deterministic: bool
) -> None:
    space = gym.spaces.Box(-2.0, 2.0, (1,))
    batch = np.random.default_rng(0).normal(size=(50, 3)) * [1, 1, 8]
    actions = predict_checkpoint(checkpoints["continuous"], batch, deterministic=deterministic)
    assert actions.shape == (50, 1)
    assert all(space.contains(action) for action in actions)
    one = predict_checkpoint(checkpoints["continuous"], batch[0])
    assert isinstance(one, np.ndarray)
    assert one.shape == (1,)


def test_sampling_is_seeded_and_goes_on(checkpoints: dict[str, Path]) -> None:
    policies = [load_policy(checkpoints["continuous"]) for _ in range(2)]
    draws = [[float(policy.predict([1.0, 0.0, 0.0], False)[0]) for _ in range(5)] for policy in policies]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 1


def test_predicting_makes_no_environment(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("an environment was made")

    for name in ("make", "make_vec"):
        monkeypatch.setattr(gym, name, refuse)
    for algo, path in checkpoints.items():
        size = load_checkpoint(path)["spaces"]["obs_shape"][0]
        predict_checkpoint(path, np.zeros(size))
        if algo in SPECS:
            managed(algo).load(path).predict(np.zeros((2, size)))


def test_a_policy_predicts_what_the_run_would_do(tmp_path: Path) -> None:
    result = train(tiny("ppo", tmp_path), console=False)
    batch = np.random.default_rng(0).normal(size=(64, 4))
    assert_same(result.policy.predict(batch), predict_checkpoint(result.checkpoint_path, batch))


@pytest.mark.parametrize(
    ("obs", "words"),
    [
        ([0.0, 0.0, 0.0], "shape"), ([[0.0] * 5], "shape"), ([[[0.0] * 4]], "shape"), (0.5, "shape"), ([], "shape"),
        ("left", "numbers"), (None, "numbers"), ({"x": 1}, "numbers"), ([0.0, 0.0, 0.0, np.nan], "NaN"),
        ([0.0, 0.0, 0.0, np.inf], "infinity"), ([[0.0] * 4, [0.0] * 3], "one length"), (np.zeros((0, 4)), "empty"),
        ([0, 0, 0, "x"], "numbers"), ([0, 0, 0, None], "numbers"),
    ],
)  # fmt: skip
def test_a_wrong_observation_is_one_sentence(checkpoints: dict[str, Path], obs: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        predict_checkpoint(checkpoints["ppo"], obs)
    assert "obs" in str(error.value)
    assert "CartPole-v1" in str(error.value) or "finite" in str(error.value)


MASKED = [name for name, spec in SPECS.items() if "discrete" in spec.action_kinds and name != "dreamer"]


def train_masked(tmp_path: Path, algo: str, env: str = "Masked", **kwargs: Any) -> Any:
    return train(tiny(algo, tmp_path, env_id=f"env_zoo:{env}", eval_episodes=0, kwargs=kwargs), console=False)


@pytest.mark.parametrize(("algo", "kwargs"), [*((name, {}) for name in MASKED), ("ppo", {"activation": "elu"})])
def test_a_mask_is_obeyed(tmp_path: Path, algo: str, kwargs: dict[str, Any]) -> None:
    path = train_masked(tmp_path, algo, **kwargs).checkpoint_path
    rng = np.random.default_rng(0)
    batch, legal = rng.normal(size=(20, 2)), rng.integers(0, 5, 20)
    loaded, masks = managed(algo).load(path), np.eye(5, dtype=np.int8)[legal]
    for deterministic in (True, False):
        assert loaded.predict(batch, deterministic, action_mask=masks).tolist() == legal.tolist()
        assert loaded.predict(batch[0], deterministic, action_mask=masks[0].tolist()) == legal[0]
        actor = loaded.actor(deterministic)
        assert [actor.act(obs, action_mask=m) for obs, m in zip(batch, masks, strict=True)] == legal.tolist()
    assert predict_checkpoint(path, batch, action_mask=masks.tolist()).tolist() == legal.tolist()
    free = loaded.predict(batch).tolist()  # without a mask every action is allowed
    assert free == loaded.predict(batch, action_mask=np.ones((20, 5))).tolist()
    without_best = [[int(action != best) for action in range(5)] for best in free]
    assert all(a != b for a, b in zip(loaded.predict(batch, action_mask=without_best), free, strict=True))


def test_a_mask_of_several_factors_is_flat_or_in_parts(tmp_path: Path) -> None:
    policy = train_masked(tmp_path, "ppo", "MaskedFactors").policy
    parts = [[0, 0, 1], [0, 1, 0, 0, 0]]
    for mask in (parts, tuple(np.array(part, dtype=np.int8) for part in parts), [*parts[0], *parts[1]]):
        assert policy.predict([0.1, 0.2], action_mask=mask).tolist() == [2, 1]
        assert policy.predict([[0.1, 0.2]] * 2, action_mask=[mask, mask]).tolist() == [[2, 1]] * 2
    with pytest.raises(UserError, match=r"^action_mask\[1\] forbids every action in part 0; at least one"):
        policy.predict([[0.1, 0.2]] * 2, action_mask=[parts, [[0, 0, 0], [1] * 5]])


@pytest.fixture(scope="module")
def masked_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_masked(tmp_path_factory.mktemp("masked"), "ppo").checkpoint_path


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([1, 0, 1], r"action_mask of env_zoo:Masked has 3 entries; its action space needs 5\.$"), ([], "has 0 entries"),
        ([[1, 0, 1, 1, 1]] * 2, "has 10 entries"), (1, "has 1 entries"), ([0] * 5, "forbids every action;"),
        ([0, 2, 3, 1, 1], "something other than 0 and 1"), ("10111", "numbers"), ({"a": 1}, "numbers"),
        ([1, 0, None, 1, 1], "numbers"), ([1, 0, np.nan, 1, 1], "NaN"), ([[1, [0]], [1, 1, 1]], "rows of one length"),
    ],
)  # fmt: skip
def test_a_wrong_mask_is_one_sentence(masked_path: Path, mask: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        predict_checkpoint(masked_path, [0.0, 0.0], action_mask=mask)
    assert str(error.value).startswith("action_mask ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mask", [[[1] * 5], [1, 1, 1], 1, np.ones(5), "x"])
def test_a_batch_needs_a_mask_for_each_observation(masked_path: Path, mask: Any) -> None:
    with pytest.raises(UserError, match=r"^action_mask has .* rows; obs is a batch of 2, and each row needs a mask"):
        predict_checkpoint(masked_path, [[0.0, 0.0]] * 2, action_mask=mask)


@pytest.mark.parametrize(("name", "size", "env_id"), [("ppo", 4, "CartPole-v1"), ("continuous", 3, "Pendulum-v1")])
def test_a_mask_where_there_are_none_is_refused(
    checkpoints: dict[str, Path], name: str, size: int, env_id: str
) -> None:
    with pytest.raises(UserError, match=f"^action_mask is given, but {env_id} has no action masks; leave it out.$"):
        predict_checkpoint(checkpoints[name], [0.0] * size, action_mask=[1, 0])


# ---- evaluating ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", SPECS)
def test_evaluating_gives_returns_and_lengths_of_whole_episodes(checkpoints: dict[str, Path], algo: str) -> None:
    metrics = evaluate_checkpoint(checkpoints[algo], num_episodes=3)
    assert metrics["eval_episodes"] == len(metrics["eval_returns"]) == len(metrics["eval_lengths"]) == 3
    assert metrics["eval_return_mean"] == np.mean(metrics["eval_returns"])
    assert metrics["eval_return_std"] == np.std(metrics["eval_returns"])
    if env_of(SPECS[algo]) == "CartPole-v1":
        assert metrics["eval_returns"] == metrics["eval_lengths"]


def test_evaluating_is_repeatable_and_its_seed_matters(checkpoints: dict[str, Path]) -> None:
    first, again = (evaluate_checkpoint(checkpoints["ppo"], num_episodes=4, deterministic=False) for _ in range(2))
    assert first == again
    other = evaluate_checkpoint(checkpoints["ppo"], num_episodes=4, deterministic=False, seed=99)
    assert other["eval_returns"] != first["eval_returns"]
    more = evaluate_checkpoint(checkpoints["ppo"], num_episodes=30)
    assert len(more["eval_returns"]) == 30


def test_the_number_of_episodes_is_the_configs_unless_given(checkpoints: dict[str, Path]) -> None:
    assert evaluate_checkpoint(checkpoints["ppo"])["eval_episodes"] == 2


@pytest.mark.parametrize("count", [0, -1, 2.5, "three", True, float("nan")])
def test_a_wrong_number_of_episodes_is_one_sentence(checkpoints: dict[str, Path], count: Any) -> None:
    with pytest.raises(UserError, match=r"num_episodes is .*; it must be a whole number of at least 1"):
        evaluate_checkpoint(checkpoints["ppo"], num_episodes=count)


# ---- managed classes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ONE_PER_LEARNER)
def test_save_and_load_keep_everything(tmp_path: Path, algo: str) -> None:
    config = tiny(algo, tmp_path / "runs")
    trained = managed(algo)(config)
    result = trained.learn(callbacks=[StopAt(64)])
    path = trained.save(tmp_path / "saved" / "policy.ckpt", include_replay=True)
    assert path.is_file()
    loaded = managed(algo).load(path)
    assert loaded.config == load_checked(path).model_copy(update={"output_dir": "runs"})  # which no file decides
    batch = np.random.default_rng(1).normal(size=(16, load_checkpoint(path)["spaces"]["obs_shape"][0]))
    assert_same(loaded.predict(batch), trained.predict(batch))
    assert_same(loaded.predict(batch[0]), trained.predict(batch[0]))
    assert loaded.evaluate(2) == trained.evaluate(2) == evaluate_checkpoint(path, num_episodes=2)
    assert_same(
        load_checkpoint(loaded.resume(console=False).checkpoint_path)["algorithm"],
        load_checkpoint(trained.resume(console=False).checkpoint_path)["algorithm"],
    )
    assert result.run_dir.parent == tmp_path / "runs"


@pytest.mark.parametrize("algo", [one for one in ONE_PER_LEARNER if SPECS[str(one.values[0])].lane == "replay"])
def test_a_file_without_its_replay_buffer_is_smaller_and_resumes(tmp_path: Path, algo: str) -> None:
    trained = managed(algo)(tiny(algo, tmp_path / "runs"))
    trained.learn(callbacks=[StopAt(64)])
    whole, light = (trained.save(tmp_path / f"{keep}.ckpt", include_replay=keep) for keep in (True, False))
    assert light.stat().st_size < whole.stat().st_size
    assert managed(algo).load(light).resume(console=False).metrics["global_step"] == 128


def load_checked(path: Path) -> Any:
    return rl_training.TrainConfig(**load_checkpoint(path)["config"])


def test_asking_for_a_replay_buffer_that_was_not_kept_is_refused(tmp_path: Path) -> None:
    dqn = managed("dqn")(tiny("dqn", tmp_path, replay_in_checkpoint=False, eval_episodes=0))
    dqn.learn()
    with pytest.raises(UserError, match="replay_in_checkpoint is false"):
        dqn.save(tmp_path / "with.ckpt", include_replay=True)


def test_an_older_checkpoint_of_a_run_goes_on_in_a_folder_of_its_own(tmp_path: Path) -> None:
    config = tiny("dqn", tmp_path, checkpoint_interval=48, eval_episodes=0)
    finished = train(config, console=False)
    before = {path: path.read_bytes() for path in finished.run_dir.rglob("*") if path.is_file()}
    older = min(finished.run_dir.glob("checkpoints/step_*.ckpt"), key=lambda path: load_checkpoint(path)["run"]["step"])
    with pytest.warns(UserWarning, match="no replay buffer"):
        branch = resume_training(older, console=False)
    assert_same(rows_of(branch.run_dir)[0], rows_of(finished.run_dir)[0])  # its history up to there
    assert branch.run_dir != finished.run_dir
    assert {path: path.read_bytes() for path in finished.run_dir.rglob("*") if path.is_file()} == before
    manifest = json.loads((branch.run_dir / "manifest.json").read_text(encoding="utf-8"))
    assert any("is not the newest state of" in message for message in manifest["messages"])


def test_a_manifest_keeps_the_earlier_starts(tmp_path: Path) -> None:
    run_dir = train(tiny("a2c", tmp_path, total_timesteps=64), console=False).run_dir
    for budget in (96, 128):
        resume_training(run_dir / "checkpoints" / "latest.ckpt", total_timesteps=budget, console=False)
    manifest = json.loads((run_dir / "manifest.json").read_text(encoding="utf-8"))
    assert [("command" in start, "earlier" in start) for start in manifest["earlier"]] == [(True, False)] * 2


def test_an_environment_is_given_as_what_makes_it(tmp_path: Path) -> None:
    config = {"total_timesteps": 64}
    assert managed("ppo")(config, env=lambda: gym.make("CartPole-v1")).config.env_id == "custom"
    assert managed("ppo")(config, env=gym.make("CartPole-v1")).config.env_id == "CartPole-v1"


def test_an_actor_takes_one_observation(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="obs is a batch of 2; an actor takes one at a time"):
        managed("ppo").load(checkpoints["ppo"]).actor().act([[0.0] * 4] * 2)


def test_a_continuous_action_without_dimensions_is_no_whole_number() -> None:
    action = plain_action(np.float32(0.25))
    assert (action.shape, action.item()) == ((), 0.25)
    assert plain_action(np.int64(1)) == 1


def test_an_actor_acts_like_predict_until_it_is_told_to_forget(checkpoints: dict[str, Path]) -> None:
    loaded = managed("ppo").load(checkpoints["ppo"])
    actor = loaded.actor()
    observations = np.random.default_rng(2).normal(size=(10, 4))
    assert [actor.act(obs) for obs in observations] == [loaded.predict(obs) for obs in observations]
    actor.reset()
    assert isinstance(actor.act(observations[0]), int)


def test_a_checkpoint_of_another_algorithm_is_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"is a checkpoint of ppo, not of a2c; use PPO\.load"):
        managed("a2c").load(checkpoints["ppo"])


@pytest.mark.parametrize("verb", ["evaluate", "save", "resume", "predict", "actor"])
def test_nothing_works_before_learning(tmp_path: Path, verb: str) -> None:
    fresh = managed("ppo")(tiny("ppo", tmp_path))
    given: dict[str, list[Any]] = {"predict": [[0.0] * 4], "save": [tmp_path / "x.ckpt"]}
    with pytest.raises(UserError, match=r"call learn\(\) or load\(\) first"):
        getattr(fresh, verb)(*given.get(verb, []))
    assert list(tmp_path.iterdir()) == []


# ---- files that are none ---------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def write_wrong_file(kind: str, good: Path, path: Path) -> None:
    data = good.read_bytes()
    bomb = {"schema": 1, "config": Bomb(path.with_name("exploded"))}
    match kind:
        case "missing":
            pass
        case "directory":
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("algo: ppo\n")
        case "pickle":
            path.write_bytes(pickle.dumps(bomb))
        case "torch":
            torch.save(bomb, path)
        case "truncated":
            path.write_bytes(data[: len(data) // 2])
        case "flipped":
            middle = len(data) // 2
            path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        case "appended":
            path.write_bytes(data + b"x")
        case "future schema":
            edit_checkpoint(good, path, lambda tree: tree.update(schema=99))
        case "future format":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(checkpointing, "FORMAT_VERSION", 2)
                save_checkpoint(path, load_checkpoint(good))
        case "not a training checkpoint":
            save_checkpoint(path, {"weights": torch.zeros(3)})


FILES = {
    "missing": "does not exist", "directory": "is a directory", "empty": "it is empty", "text": r"\(another format\)",
    "pickle": "could run code and is not opened", "torch": "could run code and is not opened",
    "truncated": "cut short", "flipped": "checksum", "appended": "cut short",
    "future schema": "has the schema 99; this rl-training reads schema 1", "future format": "a newer rl-training",
    "not a training checkpoint": "it has no algorithm, config, run, schema, source, spaces",
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_checkpoint_is_one_sentence_everywhere(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "policy.ckpt"
    write_wrong_file(kind, checkpoints["ppo"], path)
    before = sorted(tmp_path.rglob("*"))
    for use in (
        evaluate_checkpoint,
        resume_training,
        managed("ppo").load,
        lambda path: predict_checkpoint(path, [0.0] * 4),
    ):
        with pytest.raises(UserError, match=f"{re.escape(str(path))}.*{FILES[kind]}") as error:
            use(path)
        assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before  # nothing ran, nothing was written
