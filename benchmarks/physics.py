"""MuJoCo tasks on a GPU: physics alone and whole training, seconds to a return, and whether runs repeat to the bit.

    python benchmarks/physics.py speed HalfCheetah Ant [--worlds 4096]
    python benchmarks/physics.py peer HalfCheetah            # rsl_rl's PPO on the same worlds
    python benchmarks/physics.py learn ppo/halfcheetah_gpu --seed 0 --seconds 60 --folder DIR
    python benchmarks/physics.py score DIR...                # on CPUs, in Gymnasium's environments
    python benchmarks/physics.py repeat Ant

`speed` counts environment steps per second: of the physics in a graph of its own, of the task's `step` in a graph, and
of `learn()` with PPO. `learn` writes a checkpoint every few seconds, with its time; `score` evaluates them afterwards,
so that evaluation takes no time from training. Each prints JSON lines, which `--json FILE` collects.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

WARM_UP = 6  # updates; then everything is captured
EPISODES = 10


def tell(row: dict[str, Any]) -> None:
    """Print a row, and add it to the file."""
    line = json.dumps({name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()})
    print(line, flush=True)
    if GIVEN.json:
        with Path(GIVEN.json).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def finish_kernels() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_task(name: str) -> Any:
    """The device environment of a task of Gymnasium."""
    import gymnasium as gym

    from rl_training.envs.mujoco_tasks import TASKS

    env: Any = gym.make(f"{name}-v5").unwrapped
    return TASKS[f"{type(env).__module__}:{type(env).__name__}"](env)


def graph_of(function: Callable[[], Any]) -> Callable[[], None]:
    """A function as a graph; it is called three times before."""
    import torch

    from rl_training.speed.capture import Recording

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)

    class Alone(Recording):
        def keep(self, outputs: Any) -> None:
            self.kept = outputs

    recording = Alone(function, (), device=torch.device("cuda", 0), mode="relaxed")
    graph: Any = recording.graph

    def replay(recording: Any = recording) -> None:
        graph.replay()

    return replay


def rate(function: Callable[[], None], steps: int, seconds: float = 2.0) -> float:
    """Steps per second: the median of five stretches."""
    import torch

    function()
    torch.cuda.synchronize()
    rates = []
    for _ in range(5):
        begun, calls = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds / 5:
            function()
            torch.cuda.synchronize()
            calls += 1
        rates.append(calls * steps / (time.perf_counter() - begun))
    return statistics.median(rates)


def speed(name: str, worlds: int) -> None:
    """Physics alone, the task, and PPO."""
    import torch

    torch.manual_seed(0)
    task, device, inner = make_task(name), torch.device("cuda", 0), 8
    state = task.reset(torch.rand(worlds, task.reset_noise, device=device))
    low, high = (torch.as_tensor(bound, device=device) for bound in (task.action_space.low, task.action_space.high))
    actions = low + (high - low) * torch.rand(inner, worlds, *task.action_space.shape, device=device)
    physics, nothing = task.worlds(worlds, device), torch.zeros(worlds, 0, device=device)
    physics._load(state, actions[0])

    def alone() -> None:
        for action in actions:
            physics.tensors["ctrl"].copy_(action)
            with physics._launching():
                for _ in range(task.frame_skip):
                    physics.mjw.step(physics.model, physics.data)

    def whole() -> Any:
        now = state
        for action in actions:
            now, _, _ = task.step(now, action, nothing)
            task.observe(now)
        for part in state:
            state[part].copy_(now[part])
        return now

    begun = time.perf_counter()
    task_rate = rate(graph_of(whole), inner * worlds)
    alone_rate = rate(graph_of(alone), inner * worlds)
    row = {"what": "speed", "task": name, "worlds": worlds, "physics": alone_rate, "task_steps": task_rate}
    row |= {"fault": task.fault(state), "seconds": time.perf_counter() - begun}
    tell(row)
    tell({"what": "ppo", "task": name, "worlds": worlds, "steps": train_rate(name, worlds)})


def peer(name: str, worlds: int, updates: int = 20) -> None:
    """Steps per second of rsl_rl's PPO on the same worlds, whose step is a graph, with the settings of our preset."""
    import torch
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    from rl_training.envs.device import advance

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    task, given = make_task(name), preset(f"ppo/{name.lower()}_gpu")["algo_kwargs"]
    state = task.reset(torch.rand(worlds, task.reset_noise, device=device))
    ages = torch.zeros(worlds, dtype=torch.int32, device=device)
    kept: dict[str, Any] = {"obs": task.observe(state).float()}
    actions = torch.zeros(worlds, *task.action_space.shape, device=device)
    noise, nothing = torch.zeros(worlds, task.reset_noise, device=device), actions.new_zeros(worlds, 0)

    def one() -> None:
        after = advance(task, 1000, state, ages, actions, nothing, task.reset(noise))
        for part in state:
            state[part].copy_(after.state[part])
        ages.copy_(after.ages)
        kept.update(obs=after.obs, rewards=after.rewards, ends=after.terminated | after.truncated, late=after.truncated)

    move = graph_of(one) if device.type == "cuda" else one

    class Worlds:
        num_envs, num_actions, max_episode_length, cfg = worlds, actions.shape[1], 1000, {}
        episode_length_buf = ages

        def get_observations(self) -> Any:
            return TensorDict({"policy": kept["obs"].clone()}, batch_size=[worlds])

        def step(self, given: Any) -> Any:
            actions.copy_(given.clamp(-1.0, 1.0))
            noise.uniform_()
            move()
            late = {"time_outs": kept["late"].clone()}
            return self.get_observations(), kept["rewards"].clone(), kept["ends"].long(), late

    Worlds.device = str(device)  # type: ignore[attr-defined]
    net = {"class_name": "MLPModel", "hidden_dims": given["hidden_sizes"], "activation": "elu"}
    net["obs_normalization"] = True
    deviation = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    torch.backends.cuda.matmul.allow_tf32 = True
    config = {
        "num_steps_per_env": given["num_steps"], "save_interval": 10**9, "obs_groups": {},
        "actor": {**net, "distribution_cfg": deviation}, "critic": net, "check_for_nan": False,
        "algorithm": {
            "class_name": "PPO", "num_learning_epochs": given["update_epochs"], "desired_kl": given["desired_kl"],
            "num_mini_batches": worlds * given["num_steps"] // given["minibatch_size"], "entropy_coef": 0.0,
        },
    }  # fmt: skip
    runner = OnPolicyRunner(Worlds(), config, log_dir=None, device=str(device))
    runner.learn(WARM_UP)
    finish_kernels()
    begun = time.perf_counter()
    runner.learn(updates)
    finish_kernels()
    rate = updates * worlds * given["num_steps"] / (time.perf_counter() - begun)
    tell({"what": "rsl_rl", "task": name, "worlds": worlds, "steps": rate})


def clock(after: int, until: int) -> Any:
    """A callback that measures the steps per second between two numbers of updates."""
    from rl_training import Callback

    class Clock(Callback):
        rate, begun = 0.0, (0.0, 0)

        def on_update(self, run: Any) -> bool | None:
            if run.updates in (after, until):
                finish_kernels()
                now = time.perf_counter()
                if run.updates == until:
                    self.rate = (run.step - self.begun[1]) / (now - self.begun[0])
                    return False
                self.begun = now, run.step
            return None

    return Clock()


def train_rate(name: str, worlds: int) -> float:
    """Steps per second of `learn()` with the settings of the packaged preset."""
    import rl_training

    ticks = clock(WARM_UP, WARM_UP + 20)
    with tempfile.TemporaryDirectory() as folder:
        config = {**preset(f"ppo/{name.lower()}_gpu"), "num_envs": worlds, "output_dir": folder}
        rl_training.PPO(config).learn(callbacks=[ticks], progress=False)
    return float(ticks.rate)


def preset(name: str) -> dict[str, Any]:
    """A packaged preset as a mapping, without evaluations, logs to other places, and minutely checkpoints."""
    import yaml

    import rl_training

    path = Path(rl_training.__file__).parent / "assets" / "configs" / f"{name}.yaml"
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {**config, "eval_episodes": 0, "loggers": [], "checkpoint_interval": 10**12, "checkpoint_keep": 0}


def learn(name: str, seed: int, seconds: float, folder: Path, every: float) -> None:
    """Train a preset for so many seconds, and keep a policy every few seconds; whoever stops it loses none of them."""
    import rl_training
    from rl_training import Callback

    begun, marks = time.perf_counter(), []

    class Keep(Callback):
        saving = 0.0  # seconds that checkpoints took, which are not counted

        def on_update(self, run: Any) -> bool | None:
            elapsed = time.perf_counter() - begun - self.saving
            if elapsed < every * (len(marks) + 1):
                return None
            finish_kernels()
            now = time.perf_counter()
            marks.append({"seconds": now - begun - self.saving, "step": run.step, "updates": run.updates})
            marks[-1]["training_return"] = run.metrics.get("episode_return_mean")
            run.save_checkpoint(keep_step=True)
            folder = Path(run.run_dir)
            reduce(folder / "checkpoints" / f"step_{run.step}.ckpt", folder / "policies" / f"{run.step}.policy")
            (folder / "marks.json").write_text(json.dumps({**about, "marks": marks}), encoding="utf-8")
            self.saving += time.perf_counter() - now
            print(name, seed, marks[-1], flush=True)
            return False if marks[-1]["seconds"] > seconds else None

    given = json.loads(GIVEN.set)
    config = {**preset(name), "seed": seed, "output_dir": str(folder), "checkpoint_keep": 1000}
    config |= {"total_timesteps": 10**10, "replay_in_checkpoint": False, **given.get("config", {})}
    config["algo_kwargs"] = {**config.get("algo_kwargs", {}), **given.get("algo_kwargs", {})}
    learner = getattr(rl_training, rl_training.experiment.registry.get_algorithm_spec(config["algo"]).class_name)
    about = {"preset": name, "seed": seed, "set": given, "worlds": config["num_envs"]}
    learner(config).learn(callbacks=[Keep()], progress=False)


def reduce(checkpoint: Path, policy: Path) -> None:
    """Replace a checkpoint by a policy file with weights of 16 bits, in a folder that is made if it is missing."""
    from rl_training.record.checkpoints import save_checkpoint
    from rl_training.run.learner import load_algorithm, policy_tree, read_checkpoint

    tree = read_checkpoint(checkpoint)
    algorithm, _, _ = load_algorithm(checkpoint, tree)
    policy.parent.mkdir(exist_ok=True)
    save_checkpoint(policy, policy_tree(tree, algorithm, half=True))
    checkpoint.unlink()


def play(path: Path) -> tuple[float, float]:
    """Mean and deviation of the returns of a checkpoint in Gymnasium's environment."""
    import torch

    from rl_training.run.workflows import evaluate_checkpoint

    torch.set_num_threads(1)
    found = evaluate_checkpoint(path, num_episodes=EPISODES, seed=10_000)
    return found["eval_return_mean"], found["eval_return_std"]


def score(folders: list[Path]) -> None:
    """The return of every kept policy, and when a run first reached a return."""
    runs = [path.parent for folder in folders for path in sorted(folder.rglob("marks.json"))]
    with ProcessPoolExecutor(GIVEN.jobs) as pool:
        for run in runs:
            known = json.loads((run / "marks.json").read_text(encoding="utf-8"))
            paths = [run / "policies" / f"{mark['step']}.policy" for mark in known["marks"]]
            for mark, (mean, deviation) in zip(known["marks"], pool.map(play, paths), strict=True):
                mark |= {"return": mean, "deviation": deviation}
            best = max(mark["return"] for mark in known["marks"])
            tell({"what": "learn", **known, "best": best, "marks": known["marks"]})


def repeat(name: str, worlds: int, steps: int = 50) -> None:
    """Whether three runs from the same states are the same to the bit, with and without `deterministic`; the cost.

    A GPU cannot capture the steps of `deterministic`, so both are made plainly, and those without it as a graph too.
    """
    import torch

    for deterministic, captured in ((False, True), (False, False), (True, False)):
        task, device = make_task(name), torch.device("cuda", 0)
        physics = task.worlds(worlds, device)
        if deterministic:
            physics.model.opt.deterministic = physics.mjw.DeterminismType.ALL
        generator = torch.Generator(device).manual_seed(0)
        first = task.reset(torch.rand(worlds, task.reset_noise, device=device, generator=generator))
        low, high = (torch.as_tensor(bound, device=device) for bound in (task.action_space.low, task.action_space.high))
        actions = torch.rand(steps, worlds, *task.action_space.shape, device=device, generator=generator)
        begun = time.perf_counter()
        ends, seconds = play_again(task, first, low + (high - low) * actions, captured=captured)
        same = all(torch.equal(ends[0][part], other[part]) for other in ends[1:] for part in ends[0])
        row = {"what": "repeat", "task": name, "worlds": worlds, "deterministic": deterministic, "same": same}
        row |= {"captured": captured, "steps": steps * worlds / seconds, "fault": task.fault(ends[0])}
        tell({**row, "seconds": time.perf_counter() - begun})


def play_again(task: Any, first: Any, actions: Any, times: int = 3, *, captured: bool) -> tuple[list[Any], float]:
    """The last states of the same steps, made several times, and the seconds that the last ones took."""
    import torch

    here, action = {part: value.clone() for part, value in first.items()}, actions[0].clone()
    nothing = action.new_zeros(len(action), 0)

    def one() -> None:
        now, _, _ = task.step(here, action, nothing)
        for part in here:
            here[part].copy_(now[part])

    replay, ends, taken = graph_of(one) if captured else one, [], 0.0
    for _ in range(times):
        for part in here:
            here[part].copy_(first[part])
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for row in actions:
            action.copy_(row)
            replay()
        torch.cuda.synchronize()
        taken = time.perf_counter() - begun
        ends.append({part: value.clone() for part, value in here.items()})
    return ends, taken


def main() -> None:
    """One of five jobs."""
    if GIVEN.job in ("speed", "peer"):
        for name in GIVEN.what:
            (speed if GIVEN.job == "speed" else peer)(name, GIVEN.worlds)
    elif GIVEN.job == "learn":
        learn(GIVEN.what[0], GIVEN.seed, GIVEN.seconds, Path(GIVEN.folder), GIVEN.every)
    elif GIVEN.job == "score":
        score([Path(folder) for folder in GIVEN.what])
    else:
        for name in GIVEN.what:
            repeat(name, GIVEN.worlds)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("job", choices=["speed", "peer", "learn", "score", "repeat"])
parser.add_argument("what", nargs="*")
parser.add_argument("--worlds", type=int, default=4096)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--seconds", type=float, default=60.0)
parser.add_argument("--every", type=float, default=3.0, help="seconds between checkpoints")
parser.add_argument("--folder", default="runs/physics")
parser.add_argument("--jobs", type=int, default=8)
parser.add_argument("--set", default="{}", help='JSON: {"config": {...}, "algo_kwargs": {...}}')
parser.add_argument("--json")

if __name__ == "__main__":
    GIVEN = parser.parse_args()
    main()
