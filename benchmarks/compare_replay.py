"""Compare the speed of the replay family with Stable-Baselines3, sb3-contrib and Tianshou: run this file.

Whole steps (environment, act, store, sample, update), one update per step, the same workload on both sides, in short
alternating runs (see `sides.py`), at the better of 1 and 2 torch threads. A fourth process, the floor, runs nothing but
the matrix products that one of our updates contains, so that the table can show how far whole steps are from them.

Tianshou 2 can be installed separately: `--tianshou FOLDER` is a folder made with `pip install --target`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from sides import (
    Comparison,
    Job,
    Rates,
    Side,
    Stopwatch,
    compare_speeds,
    make_parser,
    measure_speeds,
    our_speed,
    print_speeds,
    serve,
    start_report,
    write_report,
)

CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"
STARTS, PROBE_STEPS = 100, 400  # steps before the first update; steps of a warm-up run
EPSILON = 0.05
DISCRETE, CONTINUOUS = {"hidden": (64, 64), "batch": 128}, {"hidden": (256, 256), "batch": 256}
QUANTILES = {"qr_dqn": 50, "qr_dqn_200": 200}
FRACTIONS, COSINES, ACTING_FRACTIONS, PROPOSED = 8, 64, 32, 32

SPEEDS = (
    Comparison("dqn", "DQN, CartPole, 64x64, batch 128", "dqn", "dqn", 2_000, 2_000, 2.5),
    Comparison("qr_dqn", "QR-DQN, the same, 50 quantiles", "qr_dqn", "qr_dqn", 1_000, 1_000, 2.5),
    Comparison("qr_dqn_200", "QR-DQN, 200 quantiles", "qr_dqn_200", "qr_dqn_200", 600, 600, 2.5),
    Comparison("iqn", "IQN, 8 + 8 fractions, double, against Tianshou", "iqn", "iqn", 1_000, 1_000, 2.0, "tianshou"),
    Comparison("fqf", "FQF, 32 fractions, double, against Tianshou", "fqf", "fqf", 600, 600, 2.0, "tianshou"),
    Comparison("sac", "SAC, Pendulum, 256x256, batch 256", "sac", "sac", 600, 600, 1.5),
    Comparison("td3", "TD3, the same", "td3", "td3", 600, 600, 1.5),
)


# our side ---------------------------------------------------------------------------------------------------------


def our_workload(job: Job, folder: str) -> dict[str, Any]:
    """Steps and seconds of one run of ours."""
    from rl_training.config.train_config import load_config

    name = job["name"]
    discrete = name not in ("sac", "td3")
    size = DISCRETE if discrete else CONTINUOUS
    options: dict[str, Any] = {
        "hidden_sizes": size["hidden"], "batch_size": size["batch"], "learning_starts": STARTS,
        "buffer_capacity": 50_000,
    }  # fmt: skip
    if discrete:
        options |= {"epsilon_start": EPSILON, "epsilon_end": EPSILON, "target_update_interval": 250}
    if name in QUANTILES:
        options["num_quantiles"] = QUANTILES[name]
    if name == "iqn":
        options |= {"num_quantiles": FRACTIONS, "num_target_quantiles": FRACTIONS, "double_q": True}
        options |= {"num_acting_quantiles": ACTING_FRACTIONS, "embedding_dim": COSINES}
    if name == "fqf":
        options |= {"num_quantiles": PROPOSED, "embedding_dim": COSINES, "double_q": True}
    config = load_config(
        {"algo": name.removesuffix("_200"), "env_id": CARTPOLE if discrete else PENDULUM, "algo_kwargs": options,
         "total_timesteps": job["steps"], "log_interval": 500}
    )  # fmt: skip
    return our_speed(config, job, folder)


# their sides ------------------------------------------------------------------------------------------------------


def their_speed(job: Job, folder: str) -> dict[str, Any]:
    """Steps and seconds of one `learn()` of Stable-Baselines3 or sb3-contrib."""
    import numpy as np
    import torch
    from sb3_contrib import QRDQN
    from stable_baselines3 import DQN, SAC, TD3
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(job["threads"])
    name = job["name"]
    kinds: dict[str, Any] = {"dqn": DQN, "qr_dqn": QRDQN, "qr_dqn_200": QRDQN, "sac": SAC, "td3": TD3}
    discrete = name not in ("sac", "td3")
    size = DISCRETE if discrete else CONTINUOUS
    policy: dict[str, Any] = {"net_arch": list(size["hidden"])}
    options: dict[str, Any] = {
        "batch_size": size["batch"], "learning_starts": STARTS, "buffer_size": 50_000, "train_freq": 1,
        "gradient_steps": 1,
    }  # fmt: skip
    if discrete:
        options |= {"exploration_initial_eps": EPSILON, "exploration_final_eps": EPSILON, "target_update_interval": 250}
        options["max_grad_norm"] = 10.0
    if name in QUANTILES:
        policy["n_quantiles"] = QUANTILES[name]
    if name == "td3":
        options["action_noise"] = NormalActionNoise(np.zeros(1), 0.1 * np.ones(1))
    env = CARTPOLE if discrete else PENDULUM
    model = kinds[name]("MlpPolicy", env, policy_kwargs=policy, **options, seed=0, device="cpu", verbose=0)
    watch = Stopwatch()
    model.learn(job["steps"])
    return {"steps": model.num_timesteps, **watch.read()}


def tianshou_speed(job: Job, folder: str) -> dict[str, Any]:
    """Steps and seconds of one epoch of Tianshou's trainer, ten steps and ten updates a turn, which suits it best."""
    import gymnasium as gym
    import torch
    from tianshou.algorithm import FQF, IQN
    from tianshou.algorithm.modelfree.fqf import FQFPolicy
    from tianshou.algorithm.modelfree.iqn import IQNPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory, RMSpropOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.trainer import OffPolicyTrainerParams
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import FractionProposalNetwork, FullQuantileFunction, ImplicitQuantileNetwork

    torch.set_num_threads(job["threads"])
    envs = DummyVectorEnv([lambda: gym.make(CARTPOLE)])
    space, width = gym.make(CARTPOLE).action_space, DISCRETE["hidden"][-1]
    trunk = Net(state_shape=(4,), action_shape=width, hidden_sizes=DISCRETE["hidden"][:-1])
    parts: dict[str, Any] = {"preprocess_net": trunk, "action_shape": 2, "num_cosines": COSINES}
    common: dict[str, Any] = {"optim": AdamOptimizerFactory(lr=1e-3), "target_update_freq": 250}
    algorithm: Any
    if job["name"] == "iqn":
        policy: Any = IQNPolicy(
            model=ImplicitQuantileNetwork(**parts), action_space=space, eps_training=EPSILON,
            sample_size=ACTING_FRACTIONS, online_sample_size=FRACTIONS, target_sample_size=FRACTIONS,
        )  # fmt: skip
        algorithm = IQN(policy=policy, num_quantiles=FRACTIONS, **common)
    else:
        policy = FQFPolicy(
            model=FullQuantileFunction(**parts), fraction_model=FractionProposalNetwork(PROPOSED, width),
            action_space=space, eps_training=EPSILON,
        )  # fmt: skip
        fractions = RMSpropOptimizerFactory(lr=2.5e-9)
        algorithm = FQF(policy=policy, num_fractions=PROPOSED, fraction_optim=fractions, **common)
    collector = Collector(algorithm, envs, VectorReplayBuffer(50_000, 1), exploration_noise=True)
    watch = Stopwatch()
    collector.reset()
    collector.collect(n_step=STARTS)
    params = OffPolicyTrainerParams(
        training_collector=collector, max_epochs=1, epoch_num_steps=job["steps"] - STARTS,
        collection_step_num_env_steps=10, update_step_num_gradient_steps_per_sample=1.0,
        batch_size=DISCRETE["batch"], show_progress=False,
    )  # fmt: skip
    algorithm.run_training(params)
    return {"steps": job["steps"], **watch.read()}


# the floor --------------------------------------------------------------------------------------------------------

Product = tuple[int, int, int, int]  # batched [E, rows, inner] @ [E, inner, columns]


def forward(rows: int, sizes: tuple[int, ...], networks: int = 1) -> list[Product]:
    """The products of a forward pass of MLPs with these widths."""
    return [(networks, rows, before, after) for before, after in pairwise(sizes)]


def backward(rows: int, sizes: tuple[int, ...], networks: int = 1, *, weights: bool = True) -> list[Product]:
    """The products of a backward pass: into the layers' inputs (not the first's), and into the weights."""
    into_inputs = [(networks, rows, after, before) for before, after in list(pairwise(sizes))[1:]]
    into_weights = [(networks, before, rows, after) for before, after in pairwise(sizes)]
    return into_inputs + weights * into_weights


def products(name: str) -> list[tuple[float, list[Product]]]:
    """The matrix products of one of our updates, as (times per update, products)."""
    batch, hidden = DISCRETE["batch"], DISCRETE["hidden"]
    if name in ("dqn", *QUANTILES):
        sizes = (4, *hidden, 2 * QUANTILES.get(name, 1))
        return [(2, forward(batch, sizes)), (1, backward(batch, sizes))]
    if name in ("iqn", "fqf"):
        count = FRACTIONS if name == "iqn" else PROPOSED
        trunk, width = (4, *hidden), hidden[-1]
        at_fractions = [*forward(batch * count, (COSINES, width)), (batch, 2, width, count)]  # phi, and f per state
        # phi of the fractions that choose the next action: IQN has one set for the batch, FQF one per transition
        choosing = forward(ACTING_FRACTIONS if name == "iqn" else batch * count, (COSINES, width))
        rest = [(1, choosing + forward(batch, (width, 2)))]
        if name == "fqf":
            rest.append((1, at_fractions))  # at the inner edges
            rest.append((3, forward(batch, (width, count))))  # proposals for both states, twice for the next one
            rest.append((1, backward(batch, (width, count))))
        learned = [*backward(batch * count, (COSINES, width)), (batch, 2, count, width), (batch, count, 2, width)]
        learned += backward(batch, trunk)
        return [(3, forward(batch, trunk)), (2, at_fractions), (1, learned), *rest]
    batch, hidden = CONTINUOUS["batch"], CONTINUOUS["hidden"]
    critic, actor = (4, *hidden, 1), (3, *hidden, 2 if name == "sac" else 1)
    critic_step = forward(batch, actor) + 2 * forward(batch, critic, 2) + backward(batch, critic, 2)
    climbed = 2 if name == "sac" else 1  # critics whose values the actor climbs
    actor_step = forward(batch, actor) + forward(batch, critic, climbed) + backward(batch, actor)
    actor_step += [*backward(batch, critic, climbed, weights=False), (climbed, batch, hidden[0], 1)]  # into actions
    return [(1, critic_step), (1 if name == "sac" else 0.5, actor_step)]


def floor_speed(job: Job, folder: str) -> dict[str, Any]:
    """Updates and seconds of the matrix products alone."""
    import torch

    torch.set_num_threads(job["threads"])
    updates, calls = max(1, job["steps"] // 2), []
    for times, shapes in products(job["name"]):
        for networks, rows, inner, columns in shapes:
            shape = (networks,) if networks > 1 else ()
            x, w = torch.randn(*shape, rows, inner), torch.randn(*shape, inner, columns)
            calls.append((round(updates * times), torch.matmul, x, w, torch.empty(*shape, rows, columns)))
    watch = Stopwatch()
    run_products(calls)
    return {"steps": updates, **watch.read()}


def run_products(calls: list[tuple[int, Callable[..., Any], Any, Any, Any]]) -> None:
    """Each product as often as it occurs."""
    for count, matmul, x, w, out in calls:
        for _ in range(count):
            matmul(x, w, out=out)


def add_floors(rows: list[dict[str, Any]], rates: Rates) -> None:
    """Seconds of a step with its update over those of the update's products, at the same number of threads."""
    steps = {row.name: row.their_steps for row in SPEEDS}
    for row in rows:
        name, threads = row["name"], row["our_threads"]
        floor = 1.0 / statistics.median(rates[f"floor/{name}/{threads}"]["wall"])
        step = 1.0 / row["ours"] * steps[name] / (steps[name] - STARTS)
        row |= {"step_us": 1e6 * step, "floor_us": 1e6 * floor, "floor_distance": step / floor}


def main() -> None:
    """Measure, print and write the results."""
    parser = make_parser(__file__, __doc__, [row.name for row in SPEEDS], rounds=7)
    parser.add_argument("--threads", default="1,2", help="numbers of torch threads; a busy machine can bear only 1")
    parser.add_argument("--tianshou", type=Path, help="folder with Tianshou 2, where it is not installed")
    arguments = parser.parse_args()
    if arguments.work:
        serve(
            {("ours", "speed"): our_workload, ("theirs", "speed"): their_speed, ("tianshou", "speed"): tianshou_speed,
             ("floor", "speed"): floor_speed}
        )  # fmt: skip
        return
    if arguments.tianshou:
        os.environ["PYTHONPATH"] = str(arguments.tianshou.resolve())
    wanted = [row for row in SPEEDS if row.name in arguments.only]
    threads = [int(n) for n in arguments.threads.split(",")]
    report = start_report(arguments.rounds)
    sides = {side: Side(__file__, side) for side in ("ours", "floor", *{row.their_side for row in wanted})}
    rates: Rates = {}
    try:
        for row in wanted:
            floor = (sides["floor"], row.name, row.our_steps)
            jobs = [(sides["ours"], row.our_name, row.our_steps), floor]
            jobs.append((sides[row.their_side], row.their_name, row.their_steps))
            rates |= measure_speeds(jobs, arguments.rounds, PROBE_STEPS, threads)
    finally:
        for side in sides.values():
            side.close()
    report["speeds"], report["rates"] = compare_speeds(rates, wanted), rates
    add_floors(report["speeds"], rates)
    print_speeds(report["speeds"], "peer")
    write_report(report, arguments.output)


if __name__ == "__main__":
    main()
