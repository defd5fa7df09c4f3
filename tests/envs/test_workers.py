"""Worker processes: what ends, stalls or raises in one is told in a sentence, and nothing of them is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import env_zoo
from rl_training.envs import workers as workers_module
from rl_training.envs.engines import make_engine
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.envs.workers import WorkerFailure, Workers
from rl_training.errors import EnvironmentFailure, UserError

LIMIT = 60.0  # seconds until a test says that something hangs


def maker(act: Callable[..., Any], close: Callable[[], Any] = int) -> Any:
    """An object of the standard library's own with two methods: workers that hold it start in no time."""
    return partial(SimpleNamespace, act=act, close=close, pid=os.getpid)


@contextmanager
def running(*makers: Any) -> Iterator[Workers]:
    workers = Workers(makers, "mine", LIMIT)
    processes = [worker.process for worker in workers._workers]
    try:
        yield workers
    finally:
        workers.close()
        workers.close()
        assert all(process.returncode is not None for process in processes), "every process is reaped"


def start_a_program() -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_results_come_in_order_and_from_processes_of_their_own() -> None:
    with running(*[maker(partial(divmod, number)) for number in (7, 8, 9)]) as workers:
        assert workers.call("act", 4) == [(1, 3), (2, 0), (2, 1)]
        pids = workers.call("pid")
        assert len({*pids, os.getpid()}) == 4
        assert workers.call("act", 7) == [(1, 0), (1, 1), (1, 2)]


def test_nobody_waits_for_an_answer_that_is_not_owed_nor_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    with running(maker(time.sleep)) as workers:
        with pytest.raises(WorkerFailure, match=r"gave no answer for 1e\+06 seconds"):
            workers.get(0, 1e6)
        workers.ask(0, "act", 1000)
        monkeypatch.setattr(workers._workers[0], "poll", SimpleNamespace(poll=waited.append))
        with pytest.raises(WorkerFailure, match="gave no answer for 0 seconds"):
            workers.get(0, 0.0)
    assert waited == [0]


def test_processes_that_cannot_start_are_a_sentence_and_one_that_is_replaced_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(maker(partial(divmod, 7))) as workers:
        with monkeypatch.context() as patch:
            patch.setattr(workers_module.subprocess, "Popen", lambda *_, **__: os.listdir("/nowhere"))
            for _ in range(2):
                with pytest.raises(WorkerFailure, match="mine needs a new process, which cannot start"):
                    workers.restart(0)
            with pytest.raises(UserError, match=r"2 processes for mine cannot start here .*; lower num_envs"):
                Workers([maker(int)] * 2, "mine", LIMIT)
        workers.restart(0)
        assert workers.call("act", 4) == [(1, 3)]


def test_a_message_larger_than_any_buffer_arrives_whole() -> None:
    with running(maker(bytes.upper)) as workers:
        assert workers.call("act", b"a" * 5_000_000) == [b"A" * 5_000_000]


@pytest.mark.parametrize(
    ("act", "how"),
    [
        ("import ctypes; ctypes.string_at(0)", "its process ended in a segmentation fault (worker 2 of 3)"),
        ("import os; os._exit(3)", "its process exited with code 3 (worker 2 of 3)"),
        ("import os; os._exit(0)", "its process exited with code 0 (worker 2 of 3)"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9, often because memory ran out (worker 2 of 3)"),
        ("import os; os.fork() or __import__('time').sleep(20); os._exit(4)", "exited with code 4 (worker 2 of 3)"),
    ],
)
def test_a_process_that_ends_is_told_with_how_it_ended(act: str, how: str) -> None:
    """The second of three: only the first was ever noticed before. In the last case a child holds the line open."""
    with running(maker(int), maker(partial(exec, act)), maker(int)) as workers:
        with pytest.raises(WorkerFailure) as error:
            workers.call("act")
        assert str(error.value).startswith("the environment mine failed: ")
        assert how in str(error.value)
        with pytest.raises(EnvironmentFailure, match="has lost its worker processes"):
            workers.call("act")


@pytest.mark.parametrize(
    ("act", "what"),
    [
        ("raise KeyError('pole')", "raised KeyError: 'pole' (worker 2 of 2); fix"),
        ("import sys; sys.exit(5)", "called sys.exit(5) (worker 2 of 2); fix"),
        ("raise type('Odd', (Exception,), {'__reduce__': None})('x')", "raised Odd: x (worker 2 of 2); fix"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt: no message (worker 2 of 2); fix"),
    ],
)
def test_what_is_raised_arrives_as_text(act: str, what: str) -> None:
    with running(maker(int), maker(partial(exec, act))) as workers:
        with pytest.raises(EnvironmentFailure) as error:
            workers.call("act")
        assert f"the environment mine {what}" in str(error.value)
        assert "Traceback" in str(error.value.__cause__)


def test_a_result_that_cannot_be_pickled_is_told_too() -> None:
    with running(maker(threading.Lock)) as workers, pytest.raises(EnvironmentFailure, match="raised TypeError: cannot"):
        workers.call("act")


def test_a_silent_worker_ends_the_call_and_close_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LEAVE_SECONDS", 0.1)
    with running(maker(int), maker(partial(time.sleep, 1000))) as workers:
        pids = workers.call("pid")
        workers.timeout = 1.0
        with pytest.raises(WorkerFailure, match=r"gave no answer for 1 seconds \(worker_timeout\) \(worker 2 of 2\)"):
            workers.call("act")
        assert not any(map(is_running, pids))


def test_a_replay_has_a_second_for_every_step_besides_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[float, str]] = []
    recipe = read_recipe("env_zoo:Misbehaves", {})
    engine = make_engine(recipe, probe_spaces(recipe), 1, 0, "async", 300.0)
    try:
        engine.reset()
        for _ in range(3):
            engine.step(np.zeros(1, dtype=np.int64))
        state, original = engine.state_dict(), Workers._exchange

        def exchange(self: Workers, requests: list[bytes], timeout: float, limit: str) -> list[Any]:
            waited.append((timeout, limit))
            return original(self, requests, timeout, limit)

        with monkeypatch.context() as patch:
            patch.setattr(Workers, "_exchange", exchange)
            engine.load_state_dict(state)
    finally:
        engine.close()
    assert waited == [(303.0, "worker_timeout and 3 more")]


def test_a_worker_stuck_in_close_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(workers_module, "LEAVE_SECONDS", 0.1)
    with running(maker(int, partial(time.sleep, 1000))) as workers:
        (pid,) = workers.call("pid")
        with pytest.raises(WorkerFailure, match=r"gave no answer for 0\.2 seconds \(the limit for close\)"):
            workers.close()
        assert not is_running(pid)


def test_a_call_that_was_interrupted_is_not_mixed_up_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LEAVE_SECONDS", 0.1)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with running(maker(partial(divmod, 7))) as workers:
        with monkeypatch.context() as patch:
            patch.setattr(workers, "_take_answer", interrupt)
            with pytest.raises(KeyboardInterrupt):
                workers.call("act", 4)
        with pytest.raises(EnvironmentFailure, match="was interrupted"):
            workers.call("act", 3)


def test_what_raises_in_close_is_told_after_all_are_closed(tmp_path: Path) -> None:
    touch = partial(Path.touch, tmp_path / "closed")
    with running(maker(int, partial(exec, "import sys; sys.exit(0)")), maker(int, touch)) as workers:
        with pytest.raises(EnvironmentFailure, match=r"called sys.exit\(0\)"):
            workers.close()
        assert (tmp_path / "closed").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_leave_signals_to_the_parent(number: signal.Signals) -> None:
    with running(maker(partial(divmod, 7))) as workers:
        (pid,) = workers.call("pid")
        os.kill(pid, number)
        assert workers.call("act", 4) == [(1, 3)]


def test_what_a_worker_started_ends_with_it() -> None:
    with running(partial(SimpleNamespace, act=start_a_program, close=int)) as workers:
        (pid,) = workers.call("act")
        assert is_running(pid)
    wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize("act", ["int", "partial(time.sleep, 1000)"])
def test_workers_end_with_a_parent_that_is_killed(act: str) -> None:
    """Idle, and in the middle of a call that would never return."""
    code = f"""
        import os, signal, threading, time
        from functools import partial
        from types import SimpleNamespace
        from rl_training.envs.workers import Workers
        workers = Workers([partial(SimpleNamespace, pid=os.getpid, act={act}, close=int)] * 2, "mine", 60.0)
        print(*workers.call("pid"), flush=True)
        workers.call("act")
        time.sleep(1000)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
        wait_until(lambda: not any(map(is_running, pids)))


def test_workers_outlive_the_thread_that_started_them() -> None:
    started: list[Workers] = []
    thread = threading.Thread(target=lambda: started.append(Workers([maker(partial(divmod, 7))], "mine", LIMIT)))
    thread.start()
    thread.join()
    assert started[0].call("act", 4) == [(1, 3)]
    started[0].close()


def test_what_cannot_be_pickled_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match=r"^mine cannot be sent to a worker process \(TypeError: .*; use vectorizatio"):
        Workers([partial(SimpleNamespace, lock=threading.Lock())], "mine", LIMIT)


def test_a_maker_that_raises_is_named() -> None:
    with pytest.raises(EnvironmentFailure, match="the environment mine raised ZeroDivisionError"):
        Workers([maker(int), partial(divmod, 1, 0)], "mine", LIMIT)


# ---- environments in them --------------------------------------------------------------------------------------------


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path: Path) -> None:
    """Its environment is a class of `__main__`, made by a lambda, with a registered one inside."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent("""
        import gymnasium as gym
        from rl_training.envs.engines import make_engine
        from rl_training.envs.probe import probe_spaces
        from rl_training.envs.factory import read_recipe

        print("running")

        class Mine(gym.Wrapper):
            def __init__(self):
                super().__init__(gym.make("Inner-v0"))

        class Inner(gym.Env):
            observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
            def reset(self, *, seed=None, options=None):
                return self.observation_space.sample(), {}

        gym.register("Inner-v0", Inner)
        recipe = read_recipe("mine", {}, lambda: Mine())
        engine = make_engine(recipe, probe_spaces(recipe), 2, 0, "async")
        print(engine.reset()[0].shape)
        engine.close()
    """))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout) == (0, "running\n(2, 2)\n"), done.stderr


def test_a_worker_imports_no_torch() -> None:
    code = "import sys, rl_training.envs.engines, rl_training.envs.worker_process; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_steps_are_not_seen_through_the_memory_that_the_next_ones_write() -> None:
    recipe = read_recipe("env_zoo:Masked", {})
    engine = make_engine(recipe, probe_spaces(recipe), 2, 0, "async")
    try:
        obs, masks = engine.reset()
        assert masks is not None
        kept = obs.copy(), masks.copy()
        step = engine.step(masks.argmax(1))
        values = [None if part is None else part.copy() for part in step]
        assert step.masks is not None
        engine.step(step.masks.argmax(1))
    finally:
        engine.close()
    assert np.array_equal(obs, kept[0])
    assert np.array_equal(masks, kept[1])
    for part, value in zip(step, values, strict=True):
        assert part is None or np.array_equal(part, value)


def test_an_environment_whose_module_registers_it_is_made_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    recipe = read_recipe("ZooWalk-v0", {})
    engine = make_engine(recipe, probe_spaces(recipe), 1, 0, "async")
    engine.reset()
    engine.close()
    assert capfd.readouterr() == ("", "")


def test_an_environment_registered_in_this_process_alone_is_known_there() -> None:
    gym.register("OnlyHere-v0", lambda: env_zoo.Walk(length=3))
    try:
        recipe = read_recipe("OnlyHere-v0", {})
        engine = make_engine(recipe, probe_spaces(recipe), 1, 0, "async")
        engine.reset()
        engine.close()
    finally:
        del gym.registry["OnlyHere-v0"]
