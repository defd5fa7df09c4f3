"""Workers on a Ray cluster (`execution_backend: ray`): the run of as many worker processes, to the bit."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import env_zoo
from resume_cases import SPECS, StopAt, take_steps
from rl_training.data.store import Experience, ExperienceLayout
from rl_training.errors import UserError
from rl_training.run.build import open_session
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import evaluate_checkpoint, resume_training, train
from worker_cases import assert_same_end, workers

ray = pytest.importorskip("ray")

from ray._private import ray_constants  # noqa: E402

from rl_training.collect.ray_workers import check_room, connect, pack_arrays, unpack_arrays  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*It is restarted")
LEARNED = [name for name, spec in SPECS.items() if spec.lane in ("rollout", "replay") and spec.steps_environments]


def on_ray(algo: str, output_dir: Path, **fields: Any) -> Any:
    return workers(algo, output_dir, execution_backend="ray", **fields)


def process_of(actor: Any) -> int:
    """The process of an actor, which may be at work."""
    return ray.get(actor.__ray_call__.options(concurrency_group="watch").remote(lambda _: os.getpid()))


class ActorKiller(Callback):
    """Sends a signal to the process of a Ray actor after one of the updates."""

    def __init__(self, update: int, number: int = signal.SIGKILL) -> None:
        self.update, self.number = update, number

    def on_update(self, run: Run) -> None:
        if run.updates == self.update:
            os.kill(process_of(run.session.collector.pool._actors[0]), self.number)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def local_cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.mark.slow
def test_a_rollout_and_a_replay_run_are_those_of_worker_processes(local_cluster: None, tmp_path: Path) -> None:
    killed = train(on_ray("ppo", tmp_path / "ray"), callbacks=[ActorKiller(1)], console=False)
    assert killed.metrics["worker_restarts"] == 1
    assert_same_end(train(workers("ppo", tmp_path / "processes"), console=False), killed)

    whole = train(workers("dqn", tmp_path / "whole", count=1), console=False)
    half = train(workers("dqn", tmp_path / "moved", count=1), callbacks=[StopAt(50)], console=False)
    moved = {"execution_backend": "ray", "ray": {"cpus": 0.5}}  # from worker processes to a cluster
    assert_same_end(whole, resume_training(half.checkpoint_path, changes=moved, console=False))


@pytest.mark.slow
def test_the_object_store_holds_no_more_after_many_turns(local_cluster: None, tmp_path: Path) -> None:
    kwargs = {"num_steps": 2000, "hidden_sizes": [512]}  # an answer of 100 KB and more is an object of the store
    session = open_session(on_ray("a2c", tmp_path, kwargs=kwargs, num_envs=4))
    try:
        for turn in range(30):
            take_steps(session, turn)
        deadline = time.monotonic() + 20
        while (held := count_objects()) > 2 + 2 and time.monotonic() < deadline:  # Ray frees once a second
            time.sleep(0.1)
    finally:
        session.close()
    assert 2 <= held <= 2 + 2  # weights of two turns, and an answer of each worker


def count_objects() -> int:
    """Objects in the store of the cluster."""
    from ray._private.internal_api import memory_summary

    stats = re.search(r"Plasma memory usage .*?, (\d+) objects", memory_summary(stats_only=True))
    assert stats is not None
    return int(stats[1])


@pytest.mark.slow
def test_a_worker_that_stalls_on_ray_is_started_again(local_cluster: None, tmp_path: Path) -> None:
    whole = train(workers("a2c", tmp_path / "whole"), console=False)
    stop = ActorKiller(3, signal.SIGSTOP)
    stalled = train(on_ray("a2c", tmp_path / "stalled", worker_timeout=20), callbacks=[stop], console=False)
    assert stalled.metrics["worker_restarts"] == 1
    assert_same_end(whole, stalled)


def test_more_workers_than_the_nodes_hold_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 3.0, "rtx": 1.0}}, {"Alive": True, "Resources": {"CPU": 1.5}}]
    nodes.append({"Alive": False, "Resources": {"CPU": 64.0}})
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    for needs, room in (({"CPU": 1.0}, 4), ({"CPU": 1.5, "GPU": 0.0}, 3), ({"CPU": 0.1, "rtx": 0.5}, 2)):
        check_room(room, needs)
        with pytest.raises(UserError, match=f"num_workers is {room + 1}, but the Ray cluster has room for {room} "):
            check_room(room + 1, needs)
    check_room(1000, {"CPU": 0.0})


def test_experience_arrives_in_its_columns_as_it_was() -> None:
    layout = ExperienceLayout(5, 4, (3,), "float32", mask_size=2, logprobs=True)
    rng = np.random.default_rng(0)
    sent, got = Experience(layout), Experience(layout)
    for array in sent.arrays.values():
        array[...] = rng.integers(0, 2, array.shape) if array.dtype == bool else rng.normal(size=array.shape)
    sent.steps = 4
    part = sent.columns(1, 3)
    part.steps = 4
    packed = pack_arrays(part)
    unpack_arrays(got.columns(1, 3), packed)
    ends = (sent.terminated | sent.truncated)[:4, 1:3]
    for name, array in got.arrays.items():
        here, there = array[:4, 1:3], sent.arrays[name][:4, 1:3]
        assert np.array_equal(*((here[ends], there[ends]) if name.startswith("final_") else (here, there))) == (
            name != "values"
        )
        assert not array[:, [0, 3]].any()
    assert np.array_equal(got.obs[4, 1:3], sent.obs[4, 1:3])
    assert len(packed["final_obs"]) == ends.sum()


def test_an_address_at_which_nobody_answers_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{bound.getsockname()[1]}")
        with pytest.raises(UserError, match=r"RAY_ADDRESS is '127.*no Ray cluster to use .*refused"):
            connect(1, {"CPU": 1.0, "GPU": 0.0})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ray": {"cpus": -1}}, "ray.cpus is -1"),
        ({"ray": {"resources": {"CPU": 1}}}, "resources.CPU is 1; set cpus of ray"),
        ({"ray": {"cpu": 1}}, "unknown key 'ray.cpu'"),
        ({"vectorization": "async"}, "vectorization is 'async'; with ray it must be"),
    ],
)
def test_what_a_worker_cannot_reserve_is_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        on_ray("ppo", tmp_path, **fields)


# ---- long ------------------------------------------------------------------------------------------------------------


class TwoNodes:
    """Two nodes that can hold two workers each, next to one that holds the learner; all on this machine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        ray.shutdown()  # of what the tests above are connected to
        soon = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 200, "health_check_timeout_ms": 2000}
        soon["health_check_failure_threshold"] = 2
        self.cluster = Cluster(True, head_node_args={"num_cpus": 0, "_system_config": soon})
        self.nodes = [self.cluster.add_node(num_cpus=2) for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="error")

    def lose_one(self, position: int) -> None:
        """A node is gone without a word; another one comes."""
        self.cluster.remove_node(self.nodes[position], allow_graceful=False)
        self.nodes[position] = self.cluster.add_node(num_cpus=2)

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    nodes = TwoNodes()
    yield nodes
    nodes.close()


@pytest.mark.slow
@pytest.mark.parametrize("algo", LEARNED)
def test_on_two_nodes_every_rollout_and_replay_algorithm_trains_resumes_exactly_and_evaluates(
    algo: str, two_nodes: TwoNodes, tmp_path: Path
) -> None:
    whole = train(workers(algo, tmp_path / "processes"), console=False)
    first = train(on_ray(algo, tmp_path / "ray"), callbacks=[StopAt(60)], console=False)
    assert first.metrics["stop_reason"] == "callback"
    assert_same_end(whole, resume_training(first.checkpoint_path, console=False))
    assert len(evaluate_checkpoint(first.checkpoint_path, num_episodes=1)["eval_returns"]) == 1


@pytest.mark.slow
def test_the_command_line_uses_the_cluster_in_ray_address_and_leaves_it_running(
    two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--config", "impala/cartpole", "--output-dir", str(tmp_path)]
    settings = ["execution_backend=ray", "num_workers=3", "total_timesteps=3000", "eval_episodes=1"]
    command = [sys.executable, "-m", "rl_training", "train", *options, *(f"--set={setting}" for setting in settings)]
    monkeypatch.setenv("RAY_ADDRESS", two_nodes.cluster.address)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "in 3 workers on Ray" in done.stderr
    assert sum(node["Alive"] for node in ray.nodes()) == 3
    refused = subprocess.run([*command, "--set=ray.gpus=1"], capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert "has room for 0 that need 1 CPU, 1 GPU each" in refused.stderr


@pytest.mark.slow
def test_ten_lost_nodes_change_nothing(two_nodes: TwoNodes, tmp_path: Path) -> None:
    class Loser(Callback):
        """Loses a node that holds a worker, at random moments."""

        def __init__(self) -> None:
            self.rng, self.lost = random.Random(0), 0

        def on_update(self, run: Run) -> None:
            if run.updates % 6 == 5 and self.lost < 10:
                time.sleep(self.rng.random() / 10)  # somewhere in a request
                two_nodes.lose_one(self.rng.randrange(2))
                self.lost += 1

    fields = {"total_timesteps": 80 * 24, "count": 3}
    whole = train(workers("a2c", tmp_path / "whole", **fields), console=False)
    loser = Loser()
    lost = train(on_ray("a2c", tmp_path / "lost", **fields), callbacks=[loser], console=False)
    assert loser.lost == 10
    assert lost.metrics["worker_restarts"] >= 10
    assert_same_end(whole, lost)


def test_a_cluster_of_the_run_is_started_for_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **given: seen.append((given["address"], ray_constants.ENABLE_RAY_CLUSTER)))
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    assert connect(2, {"CPU": 1.0})
    assert seen == [("local", False)]
    assert ray_constants.ENABLE_RAY_CLUSTER
    monkeypatch.setattr(ray, "__version__", "2.58.1")
    with pytest.raises(UserError, match=r"Ray 2\.58\.1 starts clusters that ask for no token; install ray>=2\.59"):
        connect(2, {"CPU": 1.0})
    assert len(seen) == 1


@pytest.mark.slow
def test_a_cluster_of_the_run_listens_on_this_machine_alone(tmp_path: Path) -> None:
    addresses: set[str] = set()

    class Look(Callback):
        def on_start(self, run: Run) -> None:
            session, mine = ray.get_runtime_context().get_session_name().encode(), set()
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if session in (process / "cmdline").read_bytes() or process.name == str(os.getpid()):
                        mine |= {os.readlink(path) for path in (process / "fd").iterdir()}
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                    _, local, _, state, *_, inode = line.split()[:10]
                    if state == "0A" and f"socket:[{inode}]" in mine:
                        addresses.add(local.partition(":")[0])

    train(on_ray("a2c", tmp_path), callbacks=[Look()], console=False)
    assert addresses
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_cluster_of_the_run_ends_with_it(number: int, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), env_zoo.FOLDER]!r}\n"
        "from test_ray import *\n"
        "class Say(Callback):\n"
        "    def on_update(self, run):\n"
        "        if run.updates == 2:\n"
        "            print(ray.get_runtime_context().get_session_name(), flush=True)\n"
        f"config = on_ray('a2c', Path({str(tmp_path)!r}), total_timesteps=10**7)\n"
        "print(train(config, callbacks=[Say()], console=False, raise_on_signal=False).metrics['stop_reason'])\n"
    )
    learner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert learner.stdout is not None
    session = learner.stdout.readline().strip()
    assert session
    assert processes_of(session)
    learner.send_signal(number)
    said, _ = learner.communicate(timeout=60)
    assert said.strip() == ("SIGTERM" if number == signal.SIGTERM else "")
    deadline = time.monotonic() + 20
    while processes_of(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(session) == []


def processes_of(session: str) -> list[str]:
    """Command lines of a Ray session's processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if session in line]
