"""Simulators that keep their own state: rollouts, replay, bootstraps, logs, evaluation and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from fake_simulator import BlindPoints, GroupedPoints, Points, SavedPoints
from resume_cases import StopAt, assert_same_run, rows_of, tiny
from rl_training import PPO
from rl_training.cli.main import app
from rl_training.collect.device import SimulatorCollector
from rl_training.envs.simulator import Simulator, Stepped
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.run.build import open_session
from rl_training.run.evaluation import Evaluator
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import resume_training, train
from simulator_cases import SETTINGS, open_simulator, take_rollout

ROLLOUTS = ("a2c", "ppo", "trpo", "impala", "appo")
GROUPED = {"critic_obs": ["critic"]}


# ---- collecting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ROLLOUTS)
def test_a_rollout_is_what_the_simulator_does_with_its_actions(algo: str) -> None:
    simulator, again = Points(5, seed=3), Points(5, seed=3)
    session = open_simulator(lambda: simulator, algo)
    assert isinstance(session.collector, SimulatorCollector)
    assert (session.config.num_envs, session.config.vectorization, session.config.device) == (5, "device", "cpu")
    obs = again.reset(torch.arange(5)).clone()
    ends = [0, 0]
    for _ in range(3):
        rows = take_rollout(session)
        assert (rows["rewards"].shape, rows["obs"].shape) == ((24, 5), (25, 5, 2))
        for t in range(24):
            torch.testing.assert_close(rows["obs"][t], obs)
            now, rewards, terminated, truncated, final_obs, _ = again.step(rows["actions"][t].clamp(-1, 1))
            done = terminated | truncated
            torch.testing.assert_close(rows["rewards"][t], rewards)
            assert torch.equal(rows["terminated"][t], terminated)
            assert torch.equal(rows["truncated"][t], truncated)
            assert final_obs is not None
            torch.testing.assert_close(rows["final_obs"][t][done], final_obs[done])
            obs, ends = now.clone(), [ends[0] + int(terminated.sum()), ends[1] + int(truncated.sum())]
        torch.testing.assert_close(rows["obs"][24], obs)
    assert min(ends) > 0


class NoReads(TorchDispatchMode):
    """Fails if the host reads a value of a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "is_nonzero"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("make", "kwargs"), [(Points, {}), (BlindPoints, {}), (GroupedPoints, GROUPED)])
def test_the_host_reads_nothing_while_it_collects(make: Any, kwargs: dict[str, Any]) -> None:
    session = open_simulator(make, kwargs=kwargs)
    take_rollout(session)  # checks the first step
    with NoReads():
        session.collect(session.store.request(0))


def test_steps_and_episodes_are_counted_exactly(tmp_path: Path) -> None:
    simulator = Points(6)
    played: list[tuple[float, int]] = []
    returns, lengths = torch.zeros(6), torch.zeros(6)
    plain = simulator.step

    def step(actions: Tensor) -> Any:
        given = plain(actions)
        nonlocal returns, lengths
        returns, lengths, done = returns + given[1], lengths + 1, given[2] | given[3]
        played.extend((returns[i].item(), int(lengths[i])) for i in range(6) if done[i])
        returns, lengths = returns * ~done, lengths * ~done
        return given

    simulator.step = step  # type: ignore[method-assign]
    config = tiny("ppo", tmp_path, env_id="points", total_timesteps=480, log_interval=100, **SETTINGS)
    result = train(config.model_copy(update={"num_envs": 6}), env=simulator)
    assert result.metrics["global_step"] == 480
    assert len(simulator.actions) == 80
    assert result.metrics["episode_return_mean"] == pytest.approx(np.mean([one for one, _ in played]), rel=1e-5)
    assert result.metrics["episode_length_mean"] == pytest.approx(np.mean([one for _, one in played]))
    assert simulator.closed == 0, "an instance is the user's"


def test_a_simulator_that_the_run_makes_is_made_once_and_closed(tmp_path: Path) -> None:
    made: list[Points] = []

    def make() -> Points:
        made.append(Points(4))
        return made[-1]

    train(tiny("ppo", tmp_path, env_id="make", num_envs=4, total_timesteps=64, **SETTINGS), env=make)
    assert [simulator.closed for simulator in made] == [1]


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_replay_learners_store_what_the_simulator_returns(algo: str) -> None:
    session = open_simulator(lambda: SavedPoints(4, seed=3), algo)
    again = Points(4, seed=3)
    obs = again.reset(torch.arange(4)).numpy().copy()
    for _ in range(30):
        experience = session.collect(session.store.request(100))
        for row in experience.rows():
            np.testing.assert_allclose(row["obs"], obs, atol=1e-5)
            actions = torch.from_numpy(row["actions"]).clamp(-1, 1)
            now, rewards, terminated, truncated, final_obs, _ = again.step(actions)
            assert final_obs is not None
            done = (terminated | truncated).numpy()
            np.testing.assert_allclose(row["rewards"], rewards.numpy(), atol=1e-5)
            np.testing.assert_array_equal(row["truncated"], truncated.numpy())
            np.testing.assert_allclose(row["final_obs"][done], final_obs.numpy()[done], atol=1e-5)
            obs = now.numpy().copy()


def test_ppo_learns(tmp_path: Path) -> None:
    settings = {"num_steps": 10, "minibatch_size": 160, "update_epochs": 8, "learning_rate": 3e-3, "hidden_sizes": [16]}
    learner = PPO(lambda: SavedPoints(64), vectorization="device", output_dir=tmp_path, device="cpu", **settings)
    metrics = learner.learn(19_200, progress=False).metrics
    assert metrics["eval_return_mean"] > 8.8, "an untrained policy gets about 5"
    assert metrics["eval_length_mean"] == 10


# ---- bootstraps ------------------------------------------------------------------------------------------------------


class Clock(Points):
    """Row i sees i + the step of its episode, out of 3; row 1 terminates there, the others time out."""

    observation_space = gs.Box(-np.inf, np.inf, (1,), np.float32)
    max_episode_steps = 3

    def observe(self) -> Tensor:
        return (10.0 * torch.arange(self.num_envs) + self.episode_length_buf)[:, None]

    def __init__(self, num_envs: int = 2) -> None:
        super().__init__(num_envs)
        self.obs, self.final_obs = torch.zeros(num_envs, 1), torch.zeros(num_envs, 1)

    def move(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        _, ended = super().move(actions)
        self.rewards.fill_(1.0)
        is_lost = torch.arange(self.num_envs) == 1
        return ended & is_lost, ended & ~is_lost


class BlindClock(Clock):
    """The same without final observations."""

    has_final_obs = False


@pytest.mark.parametrize(("make", "last"), [(Clock, 3.0), (BlindClock, 2.0)])
@pytest.mark.parametrize("algo", ROLLOUTS)
def test_time_outs_bootstrap_from_the_final_observation_or_the_one_before(algo: str, make: Any, last: float) -> None:
    session = open_simulator(make, algo, steps=4)
    learner: Any = session.algorithm
    learner.policy.values = lambda obs: obs[:, 0] * 100.0
    rows = take_rollout(session)
    assert rows["obs"][..., 0].T.tolist() == [[0.0, 1.0, 2.0, 0.0, 1.0], [10.0, 11.0, 12.0, 10.0, 11.0]]
    ((_, batch),) = session.store.batches(session.algorithm, 0)
    assert batch["truncated"].tolist() == [[False, False], [False, False], [True, False], [False, False]]
    assert batch["terminated"].tolist() == [[False, False], [False, False], [False, True], [False, False]]
    successors = learner.successor_values(100.0 * rows["obs"][:-1, :, 0], learner.value_finals(batch))
    # only the row that timed out reads a final value; the other one terminated, which masks its successor
    assert successors[:, 0].tolist() == [100.0, 200.0, 100.0 * last, 100.0]
    assert successors[:, 1].tolist() == [1100.0, 1200.0, 1000.0, 1100.0]
    if algo in ("a2c", "ppo"):  # one step from the end, with an advantage estimate by hand
        gamma, trace = learner.numbers["gamma"], learner.numbers["gae_lambda"]
        ended = 1.0 + gamma * 100.0 * last - 200.0
        wanted = [1.0 + gamma * 200.0 - 100.0 + gamma * trace * ended, ended]
        assert learner.advantages(batch)[0][1:3, 0].tolist() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("make", "last"), [(Clock, 3.0), (BlindClock, 2.0)])
def test_replay_bootstraps_from_the_same_observations(make: Any, last: float) -> None:
    session = open_simulator(make, "sac")
    store: Any = session.store
    taken = 0
    while taken < 16:
        taken += store.add(session.collect(store.request(taken)), taken)
    batch = store.buffer.sample(400, np.random.default_rng(0))
    row = batch["obs"][:, 0] < 10
    ends = row & (batch["obs"][:, 0] == 2.0)
    assert ends.any()
    assert set(batch["next_obs"][ends, 0].tolist()) == {last}
    torch.testing.assert_close(batch["discounts"][ends], torch.full((int(ends.sum()),), 0.99))
    lost = batch["obs"][:, 0] == 12.0
    assert set(batch["discounts"][lost].tolist()) == {0.0}
    assert batch["next_obs"][row & ~ends, 0].tolist() == (batch["obs"][row & ~ends, 0] + 1).tolist()


def test_without_final_observations_the_run_says_so_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tiny("ppo", tmp_path, env_id="blind", num_envs=4, **SETTINGS)
    train(config, env=lambda: BlindPoints(4), console=True)
    said = "the simulator gives no final observation, so time-outs bootstrap from V(s_t)"
    shown = capfd.readouterr()
    assert (shown.out + shown.err).count(said) == 1
    with pytest.raises(UserError, match="algo is 'dreamer', which learns from final observations, but points gives"):
        open_simulator(BlindPoints, "dreamer")


# ---- settings --------------------------------------------------------------------------------------------------------


class Unlimited(Points):
    """The same without limits of its actions."""

    action_space = gs.Box(-np.inf, np.inf, (1,), np.float32)


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_action_limit(algo: str) -> None:
    simulator = Unlimited(4)
    session = open_simulator(simulator, algo, env_kwargs={"simulator": {"action_limit": 0.25}})
    session.collect(session.store.request(0))
    seen = torch.cat(simulator.actions)
    assert seen.abs().max() <= 0.25
    assert seen.unique().numel() > 2


def test_random_ages_spread_the_first_time_outs_and_nothing_else(tmp_path: Path) -> None:
    simulator = SavedPoints(40)
    settings = {"env_kwargs": {"simulator": {"random_ages": True, "eval_rows": 8}}, "eval_episodes": 8}
    session = open_simulator(simulator, **settings)
    session.collector.stepper.start()  # type: ignore[attr-defined]
    ages = simulator.episode_length_buf.clone()
    assert session.config.num_envs == 32
    assert set(ages[32:].tolist()) == {0}, "evaluation plays whole episodes"
    assert ages.max() < 10
    assert len(ages[:32].unique()) > 5
    again = SavedPoints(40)
    open_simulator(again, **settings).collector.stepper.start()  # type: ignore[attr-defined]
    assert torch.equal(again.episode_length_buf, ages), "drawn with the run's seed"


class NoStep(Simulator):
    """Nothing to step."""

    num_envs = 4
    observation_space, action_space = Points.observation_space, Points.action_space


class Ageless(Points):
    """A simulator that hides its step counts."""

    def __init__(self) -> None:
        super().__init__(4)
        self.episode_length_buf = None  # type: ignore[assignment]


class Endless(Points):
    """A simulator without a time limit."""

    max_episode_steps = None  # type: ignore[assignment]


class ShortTuple(Points):
    """A step of another form."""

    def step(self, actions: Tensor) -> Any:
        return super().step(actions)[:5]


class Flat(Points):
    """Rewards of another shape."""

    def step(self, actions: Tensor) -> Any:
        obs, rewards, *rest = super().step(actions)
        return obs, rewards[:, None], *rest


class Liar(BlindPoints):
    """Promises what it does not give."""

    def step(self, actions: Tensor) -> Any:
        self.has_final_obs = False
        given = super().step(actions)
        self.has_final_obs = True
        return given


class Broken(Points):
    """Fails in the third step."""

    def step(self, actions: Tensor) -> Any:
        if len(self.actions) == 2:
            raise ValueError("the solver diverged")
        return super().step(actions)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (Points, {"num_envs": 8}, "num_envs is 8, but the Simulator points has 16 rows; leave it out"),
    (Points, {"vectorization": "sync"}, "vectorization is 'sync'; with the Simulator points it must be device or auto"),
    (Points, {"execution_backend": "local_async", "num_workers": 1, "vectorization": "auto"},
     "execution_backend is 'local_async'; with the Simulator points it must be local_sync"),
    (Unlimited, {}, "points: action_space is Box.*, which has no finite limits; --set env_kwargs.simulator"),
    (Points, {"env_kwargs": {"simulator": {"action_limit": 1.0}}}, "the actions of points have finite limits"),
    (Points, {"env_kwargs": {"simulator": {"action_limits": 1.0}}}, "did you mean 'action_limit'"),
    (Ageless, {"env_kwargs": {"simulator": {"random_ages": True}}}, "random_ages is true, but points has no epi"),
    (Endless, {"env_kwargs": {"simulator": {"random_ages": True}}}, "random_ages is true, but points has no max"),
    (Points, {"env_kwargs": {"max_episode_steps": 5}}, "points is a Simulator, which has a time limit of its own"),
    (Points, {"env_kwargs": {"wrappers": {"frame_stack": 2}}}, "env_kwargs.wrappers.frame_stack is 2; a Simulator's"),
    (Points, {"eval_episodes": 2, "env_kwargs": {"simulator": {"eval_rows": 16}}}, "eval_rows is 16, but points has"),
    (Points, {"env_kwargs": {"simulator": {"eval_rows": 2}}}, "eval_rows is 2, but eval_episodes is 0"),
    (lambda: Points(1), {"eval_episodes": 2}, "eval_episodes is 2; with a Simulator of 1 row it must be 0"),
    (ShortTuple, {}, "points: step must return a tuple of six parts"),
    (Flat, {}, r"the rewards of points are \(16, 1\) on cpu; they must be a tensor of shape \(16,\) on cpu"),
    (NoStep, {}, "points has no reset; a Simulator must define reset and step"),
    (Liar, {}, "points: has_final_obs is True, but step returned none"),
    (lambda: Points(0), {}, "points: num_envs is 0; it must be a whole number of at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "fields", "said"), REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(make: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        take_rollout(open_simulator(make, **fields))


def test_settings_of_a_simulator_are_for_simulators() -> None:
    given: dict[str, Any] = {"env_id": "Pendulum-v1", "env_kwargs": {"simulator": {"random_ages": True}}}
    with pytest.raises(UserError, match=r"env_kwargs.simulator is for a Simulator .*, which Pendulum-v1 is not"):
        open_session(tiny("ppo", Path("unused"), **given))
    given |= {"vectorization": "device", "env_kwargs": {"simulator": {"random_ages": True, "eval_rows": 2}}}
    with pytest.raises(UserError, match="with vectorization 'device' only random_ages may be given"):
        open_session(tiny("ppo", Path("unused"), **given))


def test_an_exception_in_a_simulator_names_it() -> None:
    with pytest.raises(EnvironmentFailure, match="points raised ValueError: the solver diverged"):
        take_rollout(open_simulator(Broken))


def test_another_user_of_the_same_simulator_is_noticed() -> None:
    simulator = Points(4)
    first, second = open_simulator(simulator), open_simulator(simulator)
    take_rollout(first)
    take_rollout(second)
    with pytest.raises(UserError, match="something else began new episodes in points during this run"):
        take_rollout(first)


# ---- what it logs ----------------------------------------------------------------------------------------------------


class Logs(Points):
    """Logs its step count, sometimes more."""

    def step(self, actions: Tensor) -> Any:
        *given, _ = super().step(actions)
        count = float(len(self.actions))
        log = {"count": torch.tensor(count), "/even": 7} if count % 2 == 0 else {"count": torch.tensor(count)}
        return *given, log


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_logged_values_are_means_since_the_last_row(algo: str, tmp_path: Path) -> None:
    config = tiny(algo, tmp_path, env_id="logs", num_envs=4, total_timesteps=96, **SETTINGS)
    result = train(config, env=lambda: Logs(4))
    rows = [row for row in rows_of(result.run_dir) if "sim/count" in row]
    steps = [0, *(row["step"] // 4 for row in rows)]
    assert len(rows) > 2
    for before, row in zip(steps, rows, strict=False):
        assert row["sim/count"] == np.mean(np.arange(before + 1, row["step"] // 4 + 1))
        assert row["sim/even"] == 7
    assert result.metrics["sim/count"] == rows[-1]["sim/count"]


# ---- evaluation ------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Remembers results of evaluations."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_evaluation(self, run: Run, metrics: dict[str, Any]) -> None:
        self.seen.append({**metrics, "step": run.step})


def evaluating(tmp_path: Path, **fields: Any) -> Any:
    settings = {"env_kwargs": {"simulator": {"eval_rows": 3}}, "eval_episodes": 7, "vectorization": "device"}
    return tiny("ppo", tmp_path, env_id="points", num_envs=11, **{**settings, **fields}, kwargs={"eval_interval": 64})


@pytest.mark.parametrize("make", [Points, SavedPoints])
def test_evaluation_plays_a_quota_in_rows_that_training_does_not_see(make: Any, tmp_path: Path) -> None:
    simulator, watch = make(11), Watch()
    result = train(evaluating(tmp_path), env=simulator, callbacks=[watch])
    assert result.policy.config.num_envs == 8
    assert [(one["step"], one["eval_episodes"]) for one in watch.seen] == [(64, 7), (128, 7)]
    trained = [step for step in simulator.actions if (step[8:] == 0).all()]
    assert len(trained) == 128 // 8, "held-out rows rest while the others are trained"
    evaluations = len(simulator.actions) - len(trained)
    assert evaluations <= 2 * 3 * 10, "7 episodes in 3 rows: 3 + 2 + 2"
    restored = 2 if make is SavedPoints else 0
    assert simulator.resets == (1 + 2 + restored if restored else 1 + 2 + 1), "one more start after each evaluation"


def test_evaluation_is_deterministic_and_leaves_a_saved_simulator_as_it_was(tmp_path: Path) -> None:
    with_it = train(evaluating(tmp_path / "a"), env=SavedPoints(11))
    without = evaluating(tmp_path / "b")
    without.algo_kwargs["eval_interval"] = 0
    without = train(without, env=SavedPoints(11))
    losses = [[row["loss"] for row in rows_of(run.run_dir) if "loss" in row] for run in (with_it, without)]
    assert losses[0] == losses[1]


def test_the_results_of_an_evaluation_are_the_first_episodes_of_the_rows() -> None:
    simulator = SavedPoints(5)
    session = open_simulator(simulator, eval_episodes=4, env_kwargs={"simulator": {"eval_rows": 3}})
    evaluator = Evaluator(session.recipe, session.spaces, 0, engine=session.engine)
    result = evaluator.evaluate(session.algorithm, 4)
    assert len(result.returns) == 4
    assert all(1 <= length <= 10 for length in result.lengths)
    cut = Evaluator(session.recipe, session.spaces, 0, engine=session.engine, max_steps=2, warn=lambda text: None)
    result = cut.evaluate(session.algorithm, 4)
    assert result.lengths == [2, 2, 2]
    assert result.cut == 3


def test_a_run_evaluates_again_later(tmp_path: Path) -> None:
    learner = PPO(Points(16), num_steps=8, minibatch_size=32, output_dir=tmp_path, hidden_sizes=[8], device="cpu")
    learner.learn(200, progress=False)
    assert learner.config.num_envs == 15
    assert len(learner.evaluate(6)["eval_returns"]) == 6
    assert len(learner.evaluate(40)["eval_returns"]) == 40, "two or three in each row"


def test_replay_ends_episodes_that_an_evaluation_has_left(tmp_path: Path) -> None:
    config = tiny("sac", tmp_path, env_id="clock", num_envs=5, total_timesteps=60, vectorization="device")
    config.algo_kwargs["eval_interval"] = 8
    config = config.model_copy(update={"env_kwargs": {"simulator": {"eval_rows": 1}}, "eval_episodes": 1})
    stored: dict[str, Any] = {}

    class Look(Callback):
        def on_end(self, run: Run) -> None:
            store: Any = run.session.store
            stored.update(store.buffer.sample(2_000, np.random.default_rng(0)))

    train(config, env=lambda: Clock(5), callbacks=[Look()])
    torch.testing.assert_close(stored["next_obs"], stored["obs"] + 1.0, rtol=0, atol=0)
    assert stored["truncated"][stored["obs"][:, 0] % 10 < 2].any(), "cut there"


class Steered(Points):
    """The same with two choices."""

    action_space = gs.Discrete(2)

    def step(self, actions: Tensor) -> Stepped:
        return super().step(actions[:, None] * 2.0 - 1.0)


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_choices_are_actions_too(algo: str, tmp_path: Path) -> None:
    result = train(tiny(algo, tmp_path, env_id="steered", num_envs=6, vectorization="device"), env=lambda: Steered(6))
    assert result.metrics["eval_episodes"] == 2


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "impala", "appo", "sac"])
@pytest.mark.parametrize("random_ages", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(algo: str, random_ages: bool, tmp_path: Path) -> None:
    def config(folder: str) -> Any:
        settings = {"random_ages": random_ages, "eval_rows": 2}
        fields = {"num_envs": 10, "vectorization": "device", "env_kwargs": {"simulator": settings}}
        return tiny(algo, tmp_path / folder, env_id="fake_simulator:TenPoints", kwargs={"eval_interval": 100}, **fields)

    whole = train(config("whole"))
    half = train(config("halves"), callbacks=[StopAt(64)])
    assert half.metrics["stop_reason"] == "callback"
    assert_same_run(whole, resume_training(half.checkpoint_path))


def test_without_a_state_the_run_says_so_at_its_start_and_at_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "points has no state_dict and load_state_dict, so its state cannot be saved: a resume starts new episodes"
    config = tiny("ppo", tmp_path, env_id="points", num_envs=4, **SETTINGS)
    half = train(config, env=lambda: Points(4), callbacks=[StopAt(64)], console=True)
    assert said in capfd.readouterr().err
    whole = resume_training(half.checkpoint_path, env=lambda: Points(4), console=True)
    assert said in capfd.readouterr().err
    assert whole.metrics["global_step"] == 128


def test_the_command_line_takes_a_function(tmp_path: Path) -> None:
    given = ["--algo", "ppo", "--env", "fake_simulator:make", "--set", "vectorization=device", "--device", "cpu"]
    small = ["--total-timesteps", "256", "--set", "num_steps=8", "--set", "minibatch_size=32"]
    own = ["--set", "env_kwargs.count=8", "--set", f"output_dir={tmp_path}"]
    result = CliRunner().invoke(app, ["train", *given, *small, *own])
    assert result.exit_code == 0, result.output
