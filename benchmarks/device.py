"""Updates/s on a GPU through `Algorithm.update`: plain calls, CUDA graphs, compiled graphs, and a hand-written capture.

device.py [--only sac,dqn] [--check 1000] [--seconds 1] [--compile] [--cpu] [--json FILE]

Every learner is built from its registry entry and gets synthetic batches on the device. `--check N` runs N updates as
plain code and as graphs from the same seed, and prints the difference of the weights relative to how far they moved.
The floor of SAC, TD3, DQN and RLPD is the same arithmetic captured by hand, with torch's own optimizers.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium.spaces as gs
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.config.params import read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.data.model_store import ModelStore
from rl_training.data.store import StoreContext
from rl_training.envs.factory import read_recipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.run.learner import build_algorithm

CHEETAH = EnvSpaces.from_gym("cheetah", gs.Box(-np.inf, np.inf, (17,), np.float32), gs.Box(-1, 1, (6,), np.float32))
LANDER = EnvSpaces.from_gym("lander", gs.Box(-np.inf, np.inf, (8,), np.float32), gs.Discrete(4))
ATARI = EnvSpaces.from_gym("atari", gs.Box(0, 255, (4, 84, 84), np.uint8), gs.Discrete(4))
WIDE = {"hidden_sizes": (256, 256), "batch_size": 256}
DISCRETE = {"hidden_sizes": (128, 128), "batch_size": 128, "target_update_interval": 100}
POOL = 8  # batches
ROWS, ENVS = 64, 32  # of a rollout
STARTS = 100_000  # of rollouts through a model


def transitions(spaces: EnvSpaces, count: int) -> dict[str, Tensor]:
    """Rows of a replay buffer."""
    if spaces.action_kind == "discrete":
        actions = torch.randint(spaces.action_dim, (count,))
    else:
        actions = torch.rand(count, spaces.action_dim) * 2 - 1
    ends = torch.rand(count) < 0.01
    obs = torch.randn(2, count, *spaces.obs_shape)
    obs, next_obs = obs if spaces.obs_kind == "vector" else (50 * obs).abs().to(torch.uint8)
    return {
        "obs": obs, "actions": actions, "rewards": torch.randn(count),
        "next_obs": next_obs, "terminated": ends, "truncated": torch.zeros_like(ends),
        "dones": ends.float(), "discounts": torch.where(ends, 0.0, 0.99), "indices": torch.arange(count),
    }  # fmt: skip


def replay(spaces: EnvSpaces, params: Any) -> dict[str, Tensor]:
    """A batch, with weights where it is prioritized."""
    batch = transitions(spaces, params.batch_size)
    return batch | ({"weights": torch.rand(params.batch_size)} if getattr(params, "prioritized", False) else {})


def rollout(spaces: EnvSpaces, params: Any) -> dict[str, Tensor]:
    """[T, N]."""
    flat = transitions(spaces, ROWS * ENVS)
    batch = {name: value.unflatten(0, (ROWS, ENVS)) for name, value in flat.items()}
    logprobs = torch.randn(ROWS, ENVS) * 0.1 - 8.0
    return batch | {
        "logprobs": logprobs, "behavior_logprobs": logprobs, "values": torch.randn(ROWS, ENVS),
        "bootstrap_value": torch.randn(ENVS), "expert_obs": torch.randn(512, spaces.obs_dim),
        "expert_actions": torch.rand(512, spaces.action_dim) * 2 - 1,
    }  # fmt: skip


def windows(spaces: EnvSpaces, params: Any) -> dict[str, Tensor]:
    """[B, L]."""
    shape = params.batch_size, params.sequence_length
    flat = transitions(spaces, shape[0] * shape[1])
    return {name: value.unflatten(0, shape) for name, value in flat.items()} | {"is_first": torch.rand(shape) < 0.02}


# name -> spaces, batch, hyper-parameters
Case = tuple[EnvSpaces, Callable[[EnvSpaces, Any], dict[str, Tensor]], dict[str, Any]]
ON_POLICY: dict[str, Any] = {"hidden_sizes": (64, 64)}
EPOCHS: dict[str, Any] = ON_POLICY | {"update_epochs": 4, "minibatch_size": 256}
CASES: dict[str, Case] = {
    **dict.fromkeys(("sac", "td3", "ddpg", "d4pg", "naf", "bc", "mbpo"), (CHEETAH, replay, WIDE)),
    "rlpd": (CHEETAH, replay, WIDE | {"gradient_updates_per_step": 20}),
    **dict.fromkeys(
        ("dqn", "double_dqn", "c51_dqn", "qr_dqn", "iqn", "fqf", "rainbow_dqn"), (LANDER, replay, DISCRETE)
    ),
    "ppo": (CHEETAH, rollout, EPOCHS), "appo": (CHEETAH, rollout, EPOCHS | {"minibatch_size": 4 * ROWS}),
    **dict.fromkeys(("a2c", "impala", "trpo"), (CHEETAH, rollout, ON_POLICY)), "gail": (CHEETAH, rollout, EPOCHS),
    **dict.fromkeys(("tqc", "redq", "droq", "crossq", "simba", "simbav2", "flash_sac"), (CHEETAH, replay, {})),
    **dict.fromkeys(("iql", "awac", "td3_bc", "rebrac", "cql"), (CHEETAH, replay, {})),
    "discrete_sac": (LANDER, replay, WIDE), "pqn": (LANDER, rollout, EPOCHS),
    "dqn of images": (ATARI, replay, {"hidden_sizes": (512,), "batch_size": 32}),
    "dreamer": (CHEETAH, windows, {"size": "xs", "batch_size": 16, "sequence_length": 32}),
}  # fmt: skip


class Learner:
    """A learner on a device, and batches for it."""

    def __init__(self, name: str, device: str, how: str, phase: str = "policy") -> None:
        spaces, make_batch, chosen = CASES[name]
        spec = get_algorithm_spec(name.partition(" ")[0])
        fields = spec.params.model_fields
        params = read_params(spec.params, {key: value for key, value in chosen.items() if key in fields})
        self.algorithm = build_algorithm(spec, params, spaces, seed=1, device=device)
        self.phase = phase
        if how != "none":
            self.algorithm.accelerate(how)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            batches = [make_batch(spaces, params) for _ in range(POOL)]
        self.batches = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
        self.gradient_steps = self.update()
        self.warm_up = 5 * getattr(self.algorithm, "actor_update_interval", 4)  # all graphs are captured by then

    def update(self, count: int = 1) -> int:
        """So many updates; the gradient steps of the last one."""
        for i in range(count):
            result = self.algorithm.update(self.batches[i % POOL], phase=self.phase, sync=False)
        return result.num_gradient_steps

    def weights(self) -> Tensor:
        """All parameters."""
        return torch.cat([parameter.detach().flatten() for parameter in self.algorithm.parameters()])


def wait() -> None:
    """Until the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def speed(update: Callable[[int], Any], seconds: float, warm_up: int = 20) -> float:
    """Updates/s: the best of three rounds."""
    update(warm_up)
    wait()
    start = time.perf_counter()
    update(5)
    wait()
    count = max(5, int(seconds / 3 * 5 / (time.perf_counter() - start)))
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        update(count)
        wait()
        rates.append(count / (time.perf_counter() - start))
    return max(rates)


def compare(name: str, updates: int) -> dict[str, Any]:
    """The weights after as many updates, plainly and as graphs."""
    plain, graph = Learner(name, "cuda", "none"), Learner(name, "cuda", "graph")
    start = Learner(name, "cuda", "none").weights()
    updates = max(5, updates // plain.gradient_steps)
    for learner in (plain, graph):
        learner.update(updates - 1)
    apart = (plain.weights() - graph.weights()).norm().item()
    way = (plain.weights() - start).norm().item()
    return {"updates": updates, "difference": apart, "share": apart / way, "finite": way < float("inf")}


# floors --------------------------------------------------------------------------------------------------------------


def capture(function: Callable[..., None], inputs: list[Tensor]) -> Callable[[list[Tensor]], None]:
    """A function as one graph over its own inputs."""
    own = [tensor.clone() for tensor in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(*own)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(*own)

    def run(tensors: list[Tensor]) -> None:
        for mine, theirs in zip(own, tensors, strict=True):
            mine.copy_(theirs, non_blocking=True)
        graph.replay()

    return run


def adam(parameters: Iterable[Tensor], rate: float = 3e-4) -> torch.optim.Adam:
    """Torch's own."""
    return torch.optim.Adam(parameters, lr=rate, fused=True, capturable=True)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Differentiate and move."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def follow(target: nn.Module, online: nn.Module, tau: float = 0.005) -> None:
    """Polyak, in one call."""
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), tau)


def floor(name: str) -> Callable[[int], None]:
    """Updates of the same networks, captured by hand."""
    learner = Learner(name, "cuda", "none")
    names = ("obs", "actions", "rewards", "next_obs", "discounts")
    batches = [[batch[key] for key in names] for batch in learner.batches]
    parts = {"sac": floor_sac, "rlpd": floor_sac, "td3": floor_td3, "dqn": floor_dqn}[name](learner.algorithm, name)
    runs = [(capture(function, batches[0]), every) for function, every in parts]

    def update(count: int) -> None:
        for i in range(count):
            for run, every in runs:
                if (i + 1) % every == 0:
                    run(batches[i % POOL])

    return update


Parts = list[tuple[Callable[..., None], int]]  # and once per so many updates


def floor_sac(algorithm: Any, name: str) -> Parts:
    """One graph for all, or for RLPD one of the critics and one of the actor."""
    model, many = copy.deepcopy(algorithm.model), name == "rlpd"
    target = copy.deepcopy(model.critics).requires_grad_(False)
    log_alpha = torch.zeros((), device="cuda", requires_grad=True)
    critic, actor, temperature = adam(model.critics.parameters()), adam(model.actor.parameters()), adam([log_alpha])
    model.critics.requires_grad_(True)

    def noise(obs: Tensor) -> Tensor:
        return torch.randn(len(obs), 6, device="cuda")

    def learn_critics(obs: Tensor, actions: Tensor, rewards: Tensor, next_obs: Tensor, discounts: Tensor) -> None:
        with torch.no_grad():
            following, logprobs = model.actor.sample(next_obs, noise(obs))
            subset = torch.rand(10, device="cuda").argsort()[:2] if many else None
            values = target(next_obs, following, subset).amin(0) - log_alpha.exp() * logprobs
            goal = rewards + discounts * values
        step(critic, (model.critics(obs, actions) - goal).square().mean())
        follow(target, model.critics)

    def learn_actor(obs: Tensor, *_: Tensor) -> None:
        actions, logprobs = model.actor.sample(obs, noise(obs))
        values = model.critics(obs, actions)
        climbed = values.mean(0) if many else values.amin(0)
        actor.zero_grad(set_to_none=True)
        loss = (log_alpha.detach().exp() * logprobs - climbed).mean()
        for parameter, gradient in zip(
            model.actor.parameters(), torch.autograd.grad(loss, list(model.actor.parameters())), strict=True
        ):
            parameter.grad = gradient
        actor.step()
        step(temperature, -log_alpha * (logprobs.detach().mean() + 6.0))

    def both(*batch: Tensor) -> None:
        learn_critics(*batch)
        learn_actor(*batch)

    return [(learn_critics, 1), (learn_actor, 20)] if many else [(both, 1)]


def floor_td3(algorithm: Any, name: str) -> Parts:
    """One graph of the critics, one of the actor and the targets."""
    model = copy.deepcopy(algorithm.model)
    target = copy.deepcopy(model).requires_grad_(False)
    critic, actor = adam(model.critics.parameters()), adam(model.actor.parameters())

    def learn_critics(obs: Tensor, actions: Tensor, rewards: Tensor, next_obs: Tensor, discounts: Tensor) -> None:
        with torch.no_grad():
            noise = (torch.randn_like(actions) * 0.2).clamp(-0.5, 0.5)
            following = (target.actor(next_obs) + noise).clamp(-1.0, 1.0)
            goal = rewards + discounts * target.critics(next_obs, following).amin(0)
        step(critic, (model.critics(obs, actions) - goal).square().mean() * 2)

    def learn_actor(obs: Tensor, *_: Tensor) -> None:
        loss = -model.critics(obs, model.actor(obs))[0].mean()
        gradients = torch.autograd.grad(loss, list(model.actor.parameters()))
        for parameter, gradient in zip(model.actor.parameters(), gradients, strict=True):
            parameter.grad = gradient
        actor.step()
        follow(target, model)

    return [(learn_critics, 1), (learn_actor, 2)]


def floor_dqn(algorithm: Any, name: str) -> Parts:
    """One graph; the target's copy apart."""
    model = copy.deepcopy(algorithm.q_network)
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = adam(model.parameters())

    def learn(obs: Tensor, actions: Tensor, rewards: Tensor, next_obs: Tensor, discounts: Tensor) -> None:
        with torch.no_grad():
            goal = rewards + discounts * target(next_obs).amax(-1)
        loss = F.smooth_l1_loss(model(obs).gather(1, actions.unsqueeze(1)).squeeze(1), goal)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()

    def move(*_: Tensor) -> None:
        follow(target, model, 1.0)

    return [(learn, 1), (move, 100)]


FLOORS = ("sac", "td3", "dqn", "rlpd")


def roll_out(horizon: int) -> float:
    """Model steps/s of MBPO's rollouts as its store makes them: from states on the host into the synthetic buffer."""
    algorithm, params = Learner("mbpo", "cuda", "none").algorithm, get_algorithm_spec("mbpo").params
    chosen = params(rollout_batch_size=STARTS, rollout_horizon=horizon, synthetic_buffer_capacity=STARTS * horizon)
    recipe, rng = read_recipe("HalfCheetah-v5", {}), np.random.default_rng(0)
    store = ModelStore(StoreContext(chosen, CHEETAH, 1, 0, "cuda", recipe, rng))
    states = torch.randn(STARTS, CHEETAH.obs_dim)

    def roll(count: int) -> None:
        for _ in range(count):
            store.imagine(algorithm, states, horizon)

    return STARTS * horizon * speed(roll, 0.5, 2)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All numbers of one learner; a failure is a number too."""
    found: dict[str, Any] = {"name": name}

    def rate(device: str, how: str, phase: str = "policy") -> float:
        learner = Learner(name, device, how, phase)
        return speed(learner.update, arguments.seconds, learner.warm_up)

    jobs: dict[str, Callable[[], Any]] = {}
    for how in ("none", "graph", *["compile"] * arguments.compile):
        jobs[how] = partial(rate, "cuda", how)
        if name == "mbpo":
            jobs[f"fit_{how}"] = partial(rate, "cuda", how, "model")
    if name == "mbpo":
        jobs |= {f"rollouts_of_{horizon}": partial(roll_out, horizon) for horizon in (1, 5)}
    if arguments.check:
        jobs["check"] = lambda: compare(name, arguments.check)
    if name in FLOORS:
        jobs["floor"] = lambda: speed(floor(name), arguments.seconds)
    if arguments.cpu:
        jobs["cpu"] = partial(rate, "cpu", "none")
    for job, run in jobs.items():
        try:
            found[job] = run()
        except Exception:
            print(f"--- {name} {job}\n{traceback.format_exc()}", flush=True)
            found[job] = None
    return found


def row(found: dict[str, Any]) -> str:
    """One line of the table."""

    def number(value: float | None, form: str = ",.0f") -> str:
        return "" if value is None else format(value, form)

    plain, graph, base = found.get("none"), found.get("graph"), found.get("floor")
    check = found.get("check") or {}
    cells = [
        found["name"], number(plain), number(graph), number(graph / plain if plain and graph else None, ".1f"),
        number(found.get("compile")), number(base), number(graph / base if base and graph else None, ".0%"),
        number(found.get("cpu")), number(check.get("share"), ".1e"),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--check", type=int, default=0, help="updates that are compared")
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="the CPU of the same machine too")
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")) / "device.json")
    arguments = parser.parse_args()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    print(machine)
    print("| updates/s | plain | graph | graph/plain | compiled | by hand | share | CPU | apart |")
    print("| --- | --: | --: | --: | --: | --: | --: | --: | --: |", flush=True)
    results = []
    for name in arguments.only.split(","):
        results.append(measure(name, arguments))
        print(row(results[-1]), flush=True)
        for job, found in results[-1].items():
            if job.startswith(("fit_", "rollouts_")):
                print(f"| {name}, {job.replace('_', ' ')} | {found or 0:,.0f} |", flush=True)
        with contextlib.suppress(OSError):
            arguments.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
