"""Worker processes (`execution_backend: local_async`): a run depends on its seed, not on what happens to a worker."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import env_zoo
from resume_cases import SPECS, StopAt, load_checkpoint, stop_and_resume, tiny
from rl_training.collect.local import Behaviour
from rl_training.collect.worker_collector import WorkerCollector, WorkerRecord
from rl_training.collect.worker_process import CollectingWorker, WorkerPlan
from rl_training.config.choices import choose_workers
from rl_training.data.store import Experience, ExperienceLayout, Request
from rl_training.envs.engines import make_engine
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.envs.stepper import Stepper
from rl_training.envs.workers import WorkerFailure
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.run.build import Session, open_session
from rl_training.run.learner import build_algorithm
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import evaluate_checkpoint, resume_training, train
from worker_cases import assert_same_end, workers

STEPPING = [name for name, spec in SPECS.items() if spec.steps_environments]
pytestmark = pytest.mark.filterwarnings("ignore:.*It is restarted")


class Killer(Callback):
    """Kills a worker after some of the updates."""

    def __init__(self, updates: Any, seed: int = 0) -> None:
        self.updates, self.rng, self.pids = set(updates), random.Random(seed), []

    def on_update(self, run: Run) -> None:
        if run.updates in self.updates:
            pool: Any = run.session.collector.pool  # type: ignore[attr-defined]
            self.pids.append(self.rng.choice(pool._workers).process.pid)
            os.kill(self.pids[-1], signal.SIGKILL)


def test_a_run_whose_worker_is_killed_and_that_is_resumed_is_the_undisturbed_run(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"kwargs": {"policy_lag": 2}, "log_interval": 2}  # it stops between two rows
    whole = train(workers("ppo", tmp_path / "whole", **fields), console=False)
    assert whole.metrics["policy_lag"] == 3
    killed = train(workers("ppo", tmp_path / "parts", **fields), callbacks=[Killer([1]), StopAt(50)], console=False)
    assert (killed.metrics["stop_reason"], killed.metrics["worker_restarts"]) == ("callback", 1)
    assert_same_end(whole, resume_training(killed.checkpoint_path, console=False))


@pytest.mark.parametrize("algo", STEPPING)
def test_a_packed_behaviour_acts_as_the_learner_does(algo: str, tmp_path: Path) -> None:
    session = open_session(tiny(algo, tmp_path, num_envs=2))
    session.close()
    other = build_algorithm(session.spec, session.params, session.spaces, seed=99, device="cpu")
    for name in ("epsilon", "exploration_noise"):
        if session.algorithm.scheduled(name):
            setattr(session.algorithm, name, 0.25)
    copy = Behaviour(other, session.spaces, 2, np.random.default_rng(7))
    original = Behaviour(session.algorithm, session.spaces, 2, np.random.default_rng(7))
    copy.unpack(original.pack())
    assert np.array_equal(copy.pack(), original.pack())
    other.generator.set_state(session.algorithm.generator.get_state())
    rng = np.random.default_rng(0)
    for _ in range(5):
        obs = rng.standard_normal((2, *session.spaces.obs_shape)).astype(np.float32)
        first = np.zeros(2, dtype=bool)
        assert np.array_equal(copy.act(obs, None, first)[0], original.act(obs, None, first)[0])


def test_auto_leaves_one_core_to_the_learner(tmp_path: Path, monkeypatch: Any) -> None:
    three: Any = workers("a2c", tmp_path, "auto")  # environments
    even = three.model_copy(update={"num_envs": 9, "worker_order": "first"})
    for config, cores, count in ((three, 1, 1), (three, 64, 3), (even, 8, 3), (three, 3, 2)):
        monkeypatch.setattr("rl_training.config.choices.os.cpu_count", lambda cores=cores: cores)
        assert choose_workers(config) == count


@pytest.mark.slow
def test_workers_hold_random_actions_from_turn_to_turn(tmp_path: Path) -> None:
    kwargs = {"random_action_hold": 10**6, "learning_starts": 100}
    session = open_session(workers("td3", tmp_path, kwargs=kwargs))
    try:
        request = session.store.request(0)
        turns = [session.collector.collect(session.behaviour, request).actions.copy() for _ in range(3)]
    finally:
        session.close()
    for actions in turns:
        assert np.array_equal(actions, np.broadcast_to(turns[0][0], actions.shape))


def test_workers_act_with_weights_of_known_age_and_tell_their_log_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.config.choices.os.cpu_count", lambda: 3)
    session = open_session(workers("impala", tmp_path, "auto", env_id="Pendulum-v1", kwargs={"policy_lag": 2}))
    assert len(session.collector.records) == session.config.num_workers == 2  # type: ignore[attr-defined]
    learner: Any = session.algorithm
    acted: Any = build_algorithm(session.spec, session.params, session.spaces, seed=99, device="cpu")
    other, sent = Behaviour(acted, session.spaces, 3, np.random.default_rng(7)), []
    try:
        for turn in range(6):
            sent.append(session.behaviour.pack())
            experience = session.collector.collect(session.behaviour, session.store.request(0))
            other.unpack(sent[max(0, turn - 3)])  # the workers' turn and two more
            arrays: Any = (experience.obs, experience.actions, experience.logprobs)
            obs, actions, found = (torch.from_numpy(array[: experience.steps]).flatten(0, 1) for array in arrays)
            torch.testing.assert_close(found, acted.acting().distribution(obs).log_prob(actions).detach())
            with torch.no_grad():
                for parameter in learner.acting().parameters():
                    parameter += 0.01
    finally:
        session.close()


@pytest.mark.parametrize(
    ("epsilon", "ladder", "expected"),
    [(0.5, 4.0, [0.5, 0.5**3, 0.5**5]), (0.4, 7.0, [0.4, 0.047156, 0.005559, 0.000655])],  # the second is R2D2's
)
def test_workers_stand_on_a_ladder_of_epsilons(
    epsilon: float, ladder: float, expected: list[float], tmp_path: Path
) -> None:
    session = open_session(tiny("dqn", tmp_path, num_envs=4))
    session.close()
    make = partial(build_algorithm, session.spec, session.params, session.spaces, seed=3, device="cpu")
    store: Any = session.store
    layout, behaviour = store.layout, session.behaviour
    behaviour.algorithm.epsilon = epsilon  # type: ignore[assignment]
    where = make, session.recipe, session.spaces.to_dict(), {}, 3, "sync"
    plan = WorkerPlan(*where, layout, len(behaviour.pack()), len(expected), ladder)
    _, packed, _, descriptor = plan.share()
    packed[0][:] = behaviour.pack()
    seen = []
    for index in range(len(expected)):
        worker = CollectingWorker(plan, index, descriptor)
        for _ in range(2):  # the second time as the first
            worker.collect(0, Request(steps=1))
        seen.append(worker.collector.actor.algorithm.epsilon)
        worker.close()
    os.close(descriptor)
    assert seen == pytest.approx(expected, abs=1e-6)


def test_a_record_knows_the_actions_since_each_episode_began() -> None:
    experience = Experience(ExperienceLayout(4, 3, (1,), "float32"))
    experience.steps = 4
    record = WorkerRecord(3)

    def follow(first: int, *steps: int) -> list[list[int]]:
        brief = {"stepper": {"engine": {"episodes": [{"episode": 0, "steps": count} for count in steps]}}}
        record.follow(brief, experience, np.arange(first, first + 12).reshape(4, 3))
        return [one["actions"].tolist() for one in record.whole_state()["stepper"]["engine"]["episodes"]]

    assert follow(0, 4, 4, 0) == [[0, 3, 6, 9], [1, 4, 7, 10], []]
    assert follow(12, 8, 2, 4) == [[0, 3, 6, 9, 12, 15, 18, 21], [19, 22], [14, 17, 20, 23]]


def test_a_record_follows_games_that_go_on_after_a_lost_life() -> None:
    pytest.importorskip("ale_py")
    recipe = read_recipe("ALE/Breakout-v5", {"frameskip": 1, "wrappers": {"atari": {"terminal_on_life_loss": True}}})
    spaces = probe_spaces(recipe)
    experience = Experience(ExperienceLayout(9, 2, spaces.obs_shape, "uint8"))
    experience.steps, rng, record, ends = 9, np.random.default_rng(0), WorkerRecord(2), 0
    with closing(Stepper(make_engine(recipe, spaces, 2, 7, "sync"), spaces, 2)) as stepper:
        stepper.start()
        for _ in range(12):
            actions = rng.integers(spaces.action_dim, size=(9, 2))
            ends += sum(len(stepper.step(row)[1]) for row in actions)
            record.follow({"stepper": stepper.state_dict(stepper.engine.brief_state())}, experience, actions)
            known = record.whole_state()["stepper"]["engine"]["episodes"]
            for mine, own in zip(known, stepper.engine.state_dict()["episodes"], strict=True):
                assert np.array_equal(mine["actions"], own["actions"])
    assert ends > 4


@pytest.mark.parametrize(
    ("algo", "fields", "said"),
    [
        ("bc", {}, "bc steps no environments; use local_sync"),
        ("dqn", {"execution_backend": "local_sync", "kwargs": {"epsilon_ladder": 7}}, "epsilon_ladder needs workers"),
        ("ppo", {"num_workers": 4}, "num_workers is 4; it must be auto or from 1 to num_envs .3."),
        ("ppo", {"vectorization": "async"}, "vectorization is 'async'; with local_async it must be"),
        ("ppo", {"num_workers": 2, "worker_order": "first"}, "num_workers is 2; with worker_order 'first' it must div"),
        ("ppo", {"max_policy_lag": 1, "kwargs": {"policy_lag": 2}}, "max_policy_lag is 1; with policy_lag 2 all"),
    ],
)
def test_what_workers_cannot_do_is_refused(algo: str, fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    plain = {"num_envs": 3, "execution_backend": "local_async"}
    with pytest.raises(UserError, match=said):
        open_session(tiny(algo, tmp_path, **{**plain, **fields}))


def test_without_ray_one_sentence_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_training.run.build.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs Ray: pip install 'rl-training\[distributed\]'"):
        train(workers("a2c", tmp_path / "runs", execution_backend="ray"), console=False)
    assert not (tmp_path / "runs").exists()


# ---- worker_order: first ---------------------------------------------------------------------------------------------


def take_turn(session: Session) -> tuple[Experience, list[int]]:
    """A turn of the loop, and of which environments its parts were."""
    experience = session.collector.collect(session.behaviour, session.store.request(0))
    session.store.add(experience, 0)
    for phase, batch in session.store.batches(session.algorithm, 0):
        session.algorithm.update(batch, phase=phase, global_step=0)
    return experience, [int(envs[0]) for envs, _ in experience.parts]


@contextmanager
def stopped(session: Session, index: int) -> Iterator[None]:
    """A worker stands still."""
    process = session.collector.pool._workers[index].process  # type: ignore[attr-defined]
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_worker_that_stands_still_holds_up_nobody(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"num_envs": 4, "worker_order": "first", "env_id": "env_zoo:Walk"}
    session = open_session(workers("impala", tmp_path, **fields))
    with closing(session):
        take_turn(session)
        with stopped(session, 1):
            turns = [take_turn(session) for _ in range(5)]
            assert [parts for _, parts in turns][2:] == [[0, 0]] * 3  # one answer of it may have been under way
            experience = turns[-1][0]
            older, newer = (part for _, part in experience.parts)
            assert np.array_equal(older.obs[-1], newer.obs[0])  # one went on where the other ended
            assert np.array_equal(experience.obs[:, :2], older.obs)
            assert np.array_equal(experience.obs[:, 2:], newer.obs)
        session.collector.metrics()
        while 2 not in take_turn(session)[1]:  # it comes back
            pass
        assert session.collector.metrics()["policy_lag_max"] >= 3
        with pytest.raises(UserError, match="another number or order of workers"):
            session.collector.load_state_dict({"workers": [{}, {}], "flight": {"number": 1}, "weights": []})


@pytest.mark.slow
def test_a_long_update_is_not_held_against_workers(tmp_path: Path) -> None:
    session = open_session(workers("a2c", tmp_path, num_envs=4, worker_order="first"))
    with closing(session):
        take_turn(session)
        collector: Any = session.collector
        with stopped(session, 1):  # as in Ray, where a count of steps is as old as the last look
            take_turn(session)
            collector._moved -= 2 * collector.timeout
            collector._left -= 2 * collector.timeout
            take_turn(session)
        assert not collector._restarts


@pytest.mark.parametrize("algo", ["dqn", pytest.param("dreamer", marks=pytest.mark.slow)])
def test_replay_and_sequences_stay_whole_when_workers_answer_out_of_turn(algo: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"num_envs": 4, "worker_order": "first", "env_id": "env_zoo:Walk"}
    session = open_session(workers(algo, tmp_path, kwargs={"learning_starts": 10**6}, **fields))
    assert any(note.startswith("warning: worker_order is first") for note in session.notes)
    with closing(session):
        take_turn(session)
        with stopped(session, 0):
            for _ in range(12):
                take_turn(session)
        while 0 not in take_turn(session)[1]:
            pass
        for _ in range(3):
            take_turn(session)
        store: Any = session.store
        assert len(set(store.buffer._sizes.tolist())) > 1
    if algo == "dqn":
        rows = store.buffer.transitions()
        going = ~(rows["terminated"] | rows["truncated"])[:-1]
        assert np.array_equal(rows["rewards"], rows["next_obs"][:, 0])  # a walk says where it is, and when
        assert np.array_equal(rows["next_obs"][:, 1], rows["obs"][:, 1] + 1)
        assert np.array_equal(rows["next_obs"][:-1][going], rows["obs"][1:][going])
        assert (rows["obs"][1:][~going][:, 1] != 0).sum() == 0  # no episode is cut but at its newest row
    else:
        windows = {name: value.numpy() for name, value in store.buffer.sample(64, np.random.default_rng(0)).items()}
        times, first = windows["obs"][..., 1], windows["is_first"]
        assert np.array_equal(times[:, 1:], np.where(first[:, 1:], 0, times[:, :-1] + 1))
        assert np.array_equal(windows["rewards"], np.where(first, 0, windows["obs"][..., 0]))


@pytest.mark.slow
def test_a_run_that_takes_whoever_is_ready_says_so_and_resumes(tmp_path: Path, capfd: Any) -> None:
    config = workers("ppo", tmp_path, num_envs=4, worker_order="first")
    part = train(config, callbacks=[StopAt(60)], console=True)
    assert capfd.readouterr().err.count("warning: worker_order is first") == 1
    with pytest.warns(UserWarning, match="this run is not reproducible from its seed"):
        done = resume_training(part.checkpoint_path, console=False)
    assert done.metrics["stop_reason"] == "total_timesteps"


# ---- max_policy_lag --------------------------------------------------------------------------------------------------


DROPPING: dict[str, Any] = {"max_policy_lag": 0, "total_timesteps": 240, "log_interval": 3}


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of every answer that the learner has taken."""
    steps: list[int] = []
    take = WorkerCollector._take

    def count(collector: Any, index: int, answer: dict[str, Any], *more: Any) -> Experience:
        steps.append(answer["transitions"])
        return take(collector, index, answer, *more)

    monkeypatch.setattr(WorkerCollector, "_take", count)
    return steps


@pytest.mark.slow
def test_what_is_delivered_is_learned_from_or_dropped(tmp_path: Path, delivered: list[int]) -> None:
    result = train(workers("dqn", tmp_path, **DROPPING), console=False)
    dropped = result.metrics["worker_dropped"]
    assert 0 < dropped < sum(delivered) == result.metrics["global_step"] + dropped
    assert result.metrics["policy_lag_max"] == 0


@pytest.mark.slow
def test_a_run_that_drops_experience_resumes_exactly(tmp_path: Path) -> None:
    whole = train(workers("dqn", tmp_path / "whole", **DROPPING), console=False)
    assert_same_end(whole, stop_and_resume(workers("dqn", tmp_path / "parts", **DROPPING), 100))


@pytest.mark.slow
def test_nothing_is_dropped_unless_asked_for(tmp_path: Path, delivered: list[int]) -> None:
    result = train(workers("ppo", tmp_path, kwargs={"policy_lag": 2}, log_interval=10**6), console=False)
    assert sum(delivered) == result.metrics["global_step"]
    lags = [result.metrics[f"policy_lag{end}"] for end in ("_min", "", "_max")]
    assert lags == [0.0, (0 + 1 + 2 + 3 + 3 + 3) / 6, 3.0]
    assert result.metrics["worker_dropped"] == 0


# ---- long ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("algo", STEPPING)
def test_every_algorithm_that_steps_environments_trains_evaluates_and_resumes_exactly(
    algo: str, count: int, tmp_path: Path
) -> None:
    whole = train(workers(algo, tmp_path / "whole", count, eval_episodes=1), console=False)
    assert evaluate_checkpoint(whole.checkpoint_path)["eval_return_mean"] == whole.metrics["eval_return_mean"]
    assert_same_end(whole, stop_and_resume(workers(algo, tmp_path / "parts", count, eval_episodes=1), 60))


@pytest.mark.slow
def test_fifty_kills_change_nothing(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"total_timesteps": 80 * 24}
    whole = train(workers("a2c", tmp_path / "whole", **fields), console=False)
    killer = Killer(range(2, 72))  # some hit a process that is dead already
    killed = train(workers("a2c", tmp_path / "killed", **fields), callbacks=[killer], console=False)
    assert killed.metrics["worker_restarts"] == len(set(killer.pids)) >= 50
    assert_same_end(whole, killed)


@pytest.mark.slow
def test_a_worker_that_stalls_is_started_again(tmp_path: Path) -> None:
    class Stop(Killer):
        def on_update(self, run: Run) -> None:
            if run.updates == 3:
                os.kill(run.session.collector.pool._workers[0].process.pid, signal.SIGSTOP)  # type: ignore[attr-defined]

    whole = train(workers("a2c", tmp_path / "whole"), console=False)
    stalled = train(workers("a2c", tmp_path / "stalled", worker_timeout=20), callbacks=[Stop([])], console=False)
    assert stalled.metrics["worker_restarts"] == 1
    assert_same_end(whole, stalled)


@pytest.mark.slow
def test_a_worker_that_stalls_is_noticed_though_nobody_waits_for_it(tmp_path: Path) -> None:
    session = open_session(workers("a2c", tmp_path, num_envs=4, worker_order="first"))
    with closing(session):
        take_turn(session)
        collector: Any = session.collector
        with stopped(session, 1):
            while not collector._restarts:
                take_turn(session)
                collector._moved[1] -= collector.timeout / 4  # time flies
        while 2 not in take_turn(session)[1]:
            pass


@pytest.mark.slow
def test_an_environment_that_kills_its_process_every_time_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_FAULT", "segfault")
    monkeypatch.setenv("ZOO_AFTER", "1")
    with pytest.raises(WorkerFailure, match="segmentation fault"):
        train(workers("a2c", tmp_path, env_id="env_zoo:Misbehaves"), console=False)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["segfault", "stalls"])
def test_an_environment_that_crashes_or_stalls_now_and_then_changes_nothing(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"env_id": "env_zoo:Misbehaves", "worker_timeout": 20}
    whole = train(workers("a2c", tmp_path / "whole", **fields), console=False)
    monkeypatch.setenv("ZOO_FAULT", fault)  # in the 30th step of every process
    broken = train(workers("a2c", tmp_path / "broken", **fields), console=False)
    assert broken.metrics["worker_restarts"] >= 2
    assert_same_end(whole, broken)


@pytest.mark.slow
def test_an_environment_that_raises_ends_the_run_with_what_was_learned_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_FAULT", "raises in step")
    with pytest.raises(EnvironmentFailure, match="Misbehaves"):
        train(workers("a2c", tmp_path, env_id="env_zoo:Misbehaves"), console=False)
    (latest,) = tmp_path.glob("*/checkpoints/latest.ckpt")
    assert load_checkpoint(latest)["run"]["step"] > 0


@pytest.mark.slow
def test_workers_end_with_a_learner_that_is_killed(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), env_zoo.FOLDER]!r}\n"
        "from pathlib import Path; from test_collect_workers import workers, train, Callback\n"
        "class Say(Callback):\n"
        "    def on_update(self, run):\n"
        "        if run.updates == 2:\n"
        "            print(*[w.process.pid for w in run.session.collector.pool._workers], flush=True)\n"
        f"train(workers('a2c', Path({str(tmp_path)!r}), total_timesteps=10**7), callbacks=[Say()], console=False)\n"
    )
    learner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert learner.stdout is not None
    pids = [int(pid) for pid in learner.stdout.readline().split()]
    assert len(pids) == 2
    learner.kill()
    learner.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/status").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}/status").exists()]
