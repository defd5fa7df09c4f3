"""Several learners: two ranks over gloo are one process on the joined batch, and stay equal to the bit."""

from __future__ import annotations

import hashlib
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from resume_cases import StopAt, assert_same_run, take_steps, tiny
from rl_training.errors import EnvironmentFailure, Terminated, TrainingFailure, UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run import interruption, workflows
from rl_training.run.build import Session, open_session
from rl_training.run.ranks import RankFailure, Ranks, TorchRanks, leave_ranks
from rl_training.run.restoring import part_of_rank
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import resume_training, train
from rl_training.safe_files import is_alive

LIMIT = 120  # seconds; a run that takes longer hangs
NORMALIZED = {"wrappers": {"normalize_observation": True, "normalize_reward": True}}
PARAMS: dict[str, dict[str, Any]] = {
    "a2c": {"normalize_advantages": True},
    "ppo": {"minibatch_size": 4096, "update_epochs": 2, "desired_kl": 1e-3},
    "trpo": {"value_minibatch_size": 4096},
    "impala": {},
    "appo": {"minibatch_size": 4096, "target_policy": True, "target_update_interval": 1, "normalize_advantages": True},
    "dqn": {}, "sac": {}, "td3": {},
}  # fmt: skip


def open_case(algo: str, folder: Path, **fields: Any) -> Session:
    kwargs = PARAMS[algo] | fields.pop("kwargs", {})
    wrappers = {"env_kwargs": NORMALIZED} if algo in ("a2c", "ppo", "trpo", "impala", "appo") else {}
    session = open_session(tiny(algo, folder, num_envs=4, vectorization="sync", kwargs=kwargs, **wrappers, **fields))
    learner: Any = session.algorithm
    if hasattr(learner, "draw_noise"):  # the same for a row wherever it is learned from
        learner.draw_noise = lambda rows: rows[:, :1].sin()
    return session


def batches_of(session: Session, count: int) -> list[dict[str, Tensor]]:
    """The first batches of a run, of which nothing is learned."""
    found: list[dict[str, Tensor]] = []
    step = 0
    while len(found) < count:
        step += take_steps(session, step)
        copies = [{name: value.clone() for name, value in batch.items()} for _, batch in session.store.batches(
            session.algorithm, step)]  # fmt: skip
        found += copies
    return found[:count]


def half(batch: Mapping[str, Tensor], rank: int, *, rollout: bool) -> dict[str, Tensor]:
    """One rank's environments of a rollout, or rows of a sample."""
    dims = {name: int(rollout and "bootstrap" not in name) for name in batch}
    return {name: value.chunk(2, dims[name])[rank] for name, value in batch.items()}


def tensors_of(session: Session) -> dict[str, Tensor]:
    """What ranks share: all tensors but the losses that are kept for the log."""
    state = session.algorithm.state_dict().items()
    return {name: value for name, value in state if isinstance(value, Tensor) and not name.startswith("last_")}


def check_joined(ranks: TorchRanks, algo: str, folder: Path, **kwargs: Any) -> None:
    """Two updates on halves, next to the same ones on the whole."""
    alone, joined = (open_case(algo, folder, kwargs=kwargs) for _ in range(2))
    ranks.join(joined.algorithm)
    for batch in batches_of(alone, 2):
        alone.algorithm.update(batch)
        joined.algorithm.update(half(batch, ranks.rank, rollout=alone.spec.lane == "rollout"))
    expected, found = tensors_of(alone), tensors_of(joined)
    for name, value in expected.items():
        close = torch.allclose(found[name], value, rtol=1e-3, atol=2e-5)
        assert close, f"{algo}: {name} is {found[name]}, not {value}"
    digest = hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in found.values())).digest()
    assert len(set(ranks.union([digest]))) == 1, f"{algo}: the ranks differ"


def check_settling(ranks: TorchRanks) -> None:
    """What a run settles: numbers, items, what rank 0 does, and errors of either rank."""
    assert ranks.largest(ranks.rank) == 1
    assert ranks.average([ranks.rank, 4.0]) == [0.5, 4.0]
    assert ranks.union([]) == []
    assert ranks.union([ranks.rank] * ranks.rank) == [1]
    assert ranks.first(lambda: ranks.rank + 10) == 10
    x = torch.tensor([[1.0, 2.0, 3.0], [5.0, 7.0, 9.0]])
    torch.testing.assert_close(ranks.std_mean(x[ranks.rank]), torch.std_mean(x))
    with pytest.raises(UserError, match="of rank 0") as refused:
        ranks.first(lambda: fail(UserError("of rank 0")))
    assert ranks.knows(refused.value)
    error = EnvironmentFailure("of rank 1")
    if ranks.rank == 1:
        ranks.tell(error)
        assert ranks.knows(error)
    else:
        with pytest.raises(EnvironmentFailure, match="of rank 1") as told:
            ranks.union([])
        assert ranks.knows(told.value)
    assert not ranks.knows(ValueError("nobody heard of it"))
    assert ranks.seed(3) != 3 if ranks.rank else ranks.seed(3) == 3
    unlike = {"same": torch.ones(2), "own": torch.tensor(ranks.rank)}
    parts = ranks.gather(unlike, {"episodes": ranks.rank})
    assert parts == ([] if ranks.rank else [{"algorithm": {"own": torch.tensor(1)}, "source": {"episodes": 1}}])


def check_runs(ranks: TorchRanks, folder: Path) -> None:
    """A run stopped by one rank and resumed is the uninterrupted one; every step of every rank counts."""
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("ppo", {}, {"env_kwargs": NORMALIZED}),
        ("ppo", {}, {"vectorization": "device"}),
        ("ppo", {"memory": "lstm", "memory_size": 6, "sequence_length": 4}, {}),
        ("c51_dqn", {"n_step": 2}, {"vectorization": "device"}),
        ("dqn", {"prioritized": True, "n_step": 2}, {}),
        ("td3", {"policy_delay": 3}, {}),  # a loss that is kept for the log is each rank's own
    ]
    for algo, kwargs, fields in cases:
        config = tiny(algo, folder, num_envs=2, kwargs={"eval_interval": 64, **kwargs}, **fields)
        whole = train(config, console=False)
        assert whole.metrics["global_step"] == 128
        seen = ranks.union([whole.metrics.get("episode_return_mean")])
        assert seen[0] == seen[1], "the ranks know other episodes"
        stopped = train(config, callbacks=[StopAt(70)] if ranks.rank else [], console=False)
        assert stopped.metrics["stop_reason"] == "callback"
        resumed = resume_training(stopped.checkpoint_path, console=False)
        assert len(set(ranks.union([str(resumed.run_dir)]))) == 1
        if ranks.rank == 0:
            assert_same_run(whole, resumed)
            (other,) = load_checkpoint(whole.checkpoint_path)["ranks"]
            assert "_extra_state" in other["algorithm"], "both ranks draw the same numbers"
            assert not any(name.startswith(("policy", "q_network", "model")) for name in other["algorithm"]), other
    with pytest.raises(UserError, match="of a run with 2 learners, but this one has 1; continue with torchrun"):
        part_of_rank("it", load_checkpoint(whole.checkpoint_path), Ranks())
    refused: list[tuple[str, str, dict[str, Any]]] = [
        ("algo is 'bc'", "bc", {}), ("algo is 'dreamer'", "dreamer", {}),
        ("offline_updates is null", "iql", {"kwargs": {"offline_updates": None}}),
        ("vectorization is 'native'", "ppo", {"vectorization": "native"}),
        ("execution_backend is 'local_async'", "ppo", {"execution_backend": "local_async"}),
    ]  # fmt: skip
    for wrong, algo, fields in refused:
        with pytest.raises(UserError, match=f"{wrong}.*with several learners"):
            train(tiny(algo, folder, num_envs=2, **fields), console=False)


class Breaks(Callback):
    """After two updates: a signal, a NaN, a reward on the device that is one, an environment that raises, or one that
    gets the signal and never returns."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_update(self, run: Run) -> None:
        learner: Any = run.session.algorithm
        if run.updates != 2:
            return
        if self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.how == "nan":
            learn = learner.learn
            learner.learn = lambda batch: learn({**batch, "rewards": batch["rewards"] * math.nan})
        elif self.how == "reward":
            collector: Any = run.session.collector
            roll = collector._roll
            collector._roll = lambda noise: roll(noise) * math.nan
        elif self.how == "stall":
            collector = run.session.collector
            collector.stepper.engine.step = stall
        else:
            run.session.collector.interrupt(EnvironmentFailure("it broke"))


def stall(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        signal.pause()


def check_ends(ranks: TorchRanks, folder: Path) -> None:
    """What happens to rank 1 alone ends both, with everything learned in a checkpoint."""
    config = tiny("a2c", folder, num_envs=2, total_timesteps=1024, eval_episodes=0)

    def callbacks(how: str) -> list[Callback]:
        return [Breaks(how)] if ranks.rank else []

    with pytest.raises(Terminated):  # in both ranks
        train(config, callbacks=callbacks("signal"), console=False)
    result = train(config, callbacks=callbacks("signal"), console=False, raise_on_signal=False)
    assert (result.metrics["stop_reason"], result.metrics["global_step"]) == ("SIGTERM", 64)
    state = load_checkpoint(result.checkpoint_path)
    assert (state["run"]["step"], state["run"]["abandoned"]) == (64, False)
    interruption.STOP_SECONDS = 0.1  # type: ignore[misc]
    warned = pytest.warns(UserWarning, match="middle of a turn") if ranks.rank == 0 else nullcontext()
    with warned:
        result = train(config, callbacks=callbacks("stall"), console=False, raise_on_signal=False)
    state = load_checkpoint(result.checkpoint_path)
    assert (result.metrics["stop_reason"], state["run"]["step"], state["run"]["abandoned"]) == ("SIGTERM", 64, True)
    on_device = config.model_copy(update={"vectorization": "device"})
    with pytest.raises(EnvironmentFailure, match="returned a reward or an observation"):
        train(on_device, callbacks=callbacks("reward"), console=False)
    with pytest.raises(TrainingFailure, match="not finite"):
        train(config, callbacks=callbacks("nan"), console=False)
    config = tiny("dqn", folder, num_envs=2, total_timesteps=128, eval_episodes=0)
    warned = pytest.warns(UserWarning, match="middle of a turn") if ranks.rank == 0 else nullcontext()
    with warned, pytest.raises(EnvironmentFailure, match="it broke"):
        train(config, callbacks=callbacks("environment"), run_suffix="broken", console=False)
    (saved,) = folder.glob("*broken/checkpoints/latest.ckpt")
    tree = load_checkpoint(saved)
    (other,) = tree["ranks"]
    assert (tree["run"]["updates"], tree["run"]["abandoned"]) == (2, True)
    for name in ("credit", "sizes"):  # else one rank would learn more often than the other
        found = [part["source"] if name == "credit" else part["source"]["replay"] for part in (tree, other)]
        assert np.array_equal(found[0][name], found[1][name])
    ranks.largest(0)  # the other has looked
    warned = pytest.warns(UserWarning, match="not exact") if ranks.rank == 0 else nullcontext()
    with warned:
        assert resume_training(saved, console=False).metrics["global_step"] == 128


def fail(error: Exception) -> None:
    raise error


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    ranks = TorchRanks()
    check_settling(ranks)
    for algo in PARAMS:
        check_joined(ranks, algo, folder)
    for algo in ("ppo", "impala"):
        check_joined(ranks, algo, folder, memory="gru", memory_size=6)
    workflows.join_ranks = lambda: ranks
    check_runs(ranks, folder / "runs")
    check_ends(ranks, folder / "ends")
    if rank == 1:
        leave_ranks()
    else:
        with pytest.raises(RankFailure, match="lost another learner"):
            ranks.largest(0)
        leave_ranks()


def test_two_ranks_are_one_process_on_the_joined_batch(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, (tmp_path,), nprocs=2)


def test_one_process_settles_with_nobody() -> None:
    ranks = Ranks()
    settled = ranks.largest(3), ranks.average([1.0]), ranks.union((1, 2)), ranks.first(lambda: 5)
    assert settled == (3, [1.0], [1, 2], 5)
    assert (ranks.knows(ValueError()), ranks.seed(7), ranks.gather({}, {})) == (True, 7, [])


# Each rank says its number and process when it has learned, and how its run ended.
SCRIPT = """
import atexit, os, sys
import torch.distributed as dist
from rl_training.cli.screen import exit_after_signal, run_to_exit_code
from rl_training.errors import EnvironmentFailure
from rl_training.run.run import Callback
from rl_training.run.workflows import resume_training, train

what, path, breaks = sys.argv[1:]
atexit.register(lambda: os.write(1, b"still joined\\n" if dist.is_initialized() else b"left\\n"))

class Tell(Callback):
    told = False
    def on_update(self, run):
        if not self.told:
            self.told = True
            os.write(1, f"rank {os.environ['RANK']} {os.getpid()}\\n".encode())
            if breaks == os.environ["RANK"]:
                run.session.collector.interrupt(EnvironmentFailure("it broke"))

def go():
    begin = train if what == "train" else resume_training
    result = begin(path, callbacks=[Tell()], console=False, raise_on_signal=False)
    os.write(1, f"ended {result.metrics['stop_reason']}\\n".encode())
    exit_after_signal(result)

sys.exit(run_to_exit_code(go))
"""


class Torchrun:
    """Two ranks in processes of their own, both past their first update."""

    def __init__(self, folder: Path, what: str, path: Path, breaks: str = "none") -> None:
        script = folder / "script.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
        self.process = subprocess.Popen(
            [*command, what, str(path), breaks], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.said = ""
        self.pids: dict[int, int] = {}
        for line in self.process.stdout:
            self.said += line
            if line.startswith("rank "):
                rank, pid = map(int, line.split()[1:])
                self.pids[rank] = pid
            if len(self.pids) == 2:
                return
        raise AssertionError(self.said)

    def wait(self) -> int:
        """Its exit code, when it and its ranks are gone."""
        self.said += self.process.communicate(timeout=LIMIT)[0]
        assert not any(is_alive(pid) for pid in self.pids.values())
        return self.process.returncode


def endless(folder: Path) -> Path:
    path = folder / "config.yaml"
    config = tiny("ppo", folder / "runs", num_envs=2, total_timesteps=10**9, checkpoint_interval=64)
    path.write_text(config.model_dump_json())  # JSON is YAML
    return path


def saved_in(folder: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = folder.glob("runs/*/checkpoints/latest.ckpt")
    return path, load_checkpoint(path)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["rank 0", "rank 1", "torchrun"])
def test_a_signal_stops_all_ranks_with_a_checkpoint_that_resumes(tmp_path: Path, to: str) -> None:
    run = Torchrun(tmp_path, "train", endless(tmp_path))
    os.kill(run.process.pid if to == "torchrun" else run.pids[int(to[-1])], signal.SIGTERM)
    code = run.wait()
    assert (run.said.count("ended SIGTERM"), run.said.count("left")) == (2, 2), run.said
    assert code == 1  # torchrun's own, which names the ranks' exit codes
    assert to == "torchrun" or re.search(r"exitcode *: 143", run.said), run.said
    path, tree = saved_in(tmp_path)
    assert not tree["run"]["abandoned"]
    again = Torchrun(tmp_path, "resume", path)
    os.kill(again.pids[0], signal.SIGINT)
    assert again.wait() == 1, again.said
    assert "ended SIGINT" in again.said
    assert saved_in(tmp_path)[1]["run"]["step"] > tree["run"]["step"]


@pytest.mark.slow
def test_an_environment_that_breaks_in_one_rank_ends_all_with_a_checkpoint(tmp_path: Path) -> None:
    run = Torchrun(tmp_path, "train", endless(tmp_path), breaks="1")
    assert run.wait() == 1
    assert run.said.count("error: it broke") == 2, run.said
    assert "still joined" not in run.said
    _, tree = saved_in(tmp_path)
    assert (tree["run"]["abandoned"], len(tree["ranks"])) == (True, 1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_and_the_newest_checkpoint_is_whole(tmp_path: Path, rank: int) -> None:
    run = Torchrun(tmp_path, "train", endless(tmp_path))
    os.kill(run.pids[rank], signal.SIGKILL)
    assert run.wait() == 1, run.said
    assert len(saved_in(tmp_path)[1]["ranks"]) == 1
