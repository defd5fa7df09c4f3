"""Compare the speed of PPO with an LSTM with sb3-contrib's RecurrentPPO and with a loop in the style of CleanRL.

Run `python benchmarks/compare_recurrent.py`. All sides learn CartPole-v1 with 8 environments of one process x 128
steps, 4 epochs of 4 minibatches, one LSTM of 128 units that actor and critic share, and two hidden layers of 64 after
it. One run measures them in turns (see `sides.py`). RecurrentPPO's default, an LSTM of its own for the critic, is
slower still.
"""

from __future__ import annotations

from typing import Any

from sides import (
    Comparison,
    Job,
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

ENV, ENVS, STEPS, EPOCHS, MINIBATCHES, SIZE, HIDDEN = "CartPole-v1", 8, 128, 4, 4, 128, 64
GAMMA, LAMBDA, RATE, CLIP, VALUE_WEIGHT, LONGEST = 0.99, 0.95, 3e-4, 0.2, 0.5, 0.5
PROBE_STEPS = 2 * ENVS * STEPS
SPEEDS = (
    Comparison("contrib", "PPO, LSTM of 128, against RecurrentPPO", "lstm", "contrib", 16_384, 4_096, 3.0, "contrib"),
    Comparison("clean", "the same, against a CleanRL-style loop", "lstm", "clean", 16_384, 4_096, 3.0, "clean"),
    Comparison("contrib_gru", "PPO, GRU of 128, against RecurrentPPO", "gru", "contrib", 16_384, 4_096, 3.0, "contrib"),
)


def our_workload(job: Job, folder: str) -> dict[str, Any]:
    """Steps and seconds of one run of ours."""
    from rl_training.config.train_config import load_config

    rows = ENVS * STEPS // MINIBATCHES
    settings = {
        "memory": job["name"], "memory_size": SIZE, "num_steps": STEPS, "update_epochs": EPOCHS, "minibatch_size": rows,
        "hidden_sizes": [HIDDEN, HIDDEN], "learning_rate": RATE, "gamma": GAMMA, "gae_lambda": LAMBDA,
    }  # fmt: skip
    given = {"algo": "ppo", "env_id": ENV, "num_envs": ENVS, "vectorization": "sync", "log_interval": 4}
    wrappers = {"normalize_observation": False, "normalize_reward": False}
    whole = {**given, "total_timesteps": job["steps"], "env_kwargs": {"wrappers": wrappers}, "algo_kwargs": settings}
    return our_speed(load_config(whole), job, folder)


def contrib_speed(job: Job, folder: str) -> dict[str, Any]:
    """Steps and seconds of one `learn()` of sb3-contrib."""
    import torch
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(job["threads"])
    net = {"pi": [HIDDEN, HIDDEN], "vf": [HIDDEN, HIDDEN]}
    policy = {"lstm_hidden_size": SIZE, "shared_lstm": True, "enable_critic_lstm": False, "net_arch": net}
    model = RecurrentPPO(
        "MlpLstmPolicy", make_vec_env(ENV, n_envs=ENVS, seed=0), n_steps=STEPS, batch_size=ENVS * STEPS // MINIBATCHES,
        n_epochs=EPOCHS, learning_rate=RATE, gamma=GAMMA, gae_lambda=LAMBDA, policy_kwargs=policy, seed=0, device="cpu",
    )  # fmt: skip
    watch = Stopwatch()
    model.learn(job["steps"])
    return {"steps": model.num_timesteps, **watch.read()}


def clean_speed(job: Job, folder: str) -> dict[str, Any]:
    """Steps and seconds of a plain loop: one step of torch's LSTM after the other, minibatches of environments."""
    import gymnasium as gym
    import numpy as np
    import torch
    from torch import nn
    from torch.distributions import Categorical

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)

    def head(outputs: int) -> nn.Sequential:
        layers = nn.Linear(SIZE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs)
        return nn.Sequential(*layers)

    lstm, actor, critic = nn.LSTM(4, SIZE), head(2), head(1)
    parameters = [p for part in (lstm, actor, critic) for p in part.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=RATE, eps=1e-5)

    def read(x: Any, state: Any, dones: Any) -> tuple[Any, Any]:
        found = []
        for row, done in zip(x, dones, strict=True):
            keep = (1.0 - done).view(1, -1, 1)
            output, state = lstm(row.unsqueeze(0), (keep * state[0], keep * state[1]))
            found.append(output)
        return torch.cat(found).flatten(0, 1), state

    mode = gym.vector.AutoresetMode.SAME_STEP
    envs = gym.vector.SyncVectorEnv([lambda: gym.make(ENV)] * ENVS, autoreset_mode=mode)
    obs, actions, logprobs, rewards, dones, values = (
        torch.zeros(STEPS, ENVS, *shape) for shape in ((4,), (), (), (), (), ())
    )
    given, _ = envs.reset(seed=0)
    seen, done = torch.tensor(given), torch.zeros(ENVS)
    state = torch.zeros(1, ENVS, SIZE), torch.zeros(1, ENVS, SIZE)
    watch, taken = Stopwatch(), 0
    while taken < job["steps"]:
        first = state
        for t in range(STEPS):
            taken, obs[t], dones[t] = taken + ENVS, seen, done
            with torch.no_grad():
                hidden, state = read(seen.unsqueeze(0), state, done.unsqueeze(0))
                policy = Categorical(logits=actor(hidden))
                actions[t] = action = policy.sample()
                logprobs[t], values[t] = policy.log_prob(action), critic(hidden).flatten()
            given, reward, terminated, truncated, _ = envs.step(action.numpy())
            rewards[t] = torch.as_tensor(reward)
            seen, done = torch.tensor(given), torch.tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
        with torch.no_grad():
            following = critic(read(seen.unsqueeze(0), state, done.unsqueeze(0))[0]).flatten()
            advantages, trace, over = torch.zeros_like(rewards), 0.0, done
            for t in reversed(range(STEPS)):
                delta = rewards[t] + GAMMA * following * (1.0 - over) - values[t]
                trace = delta + GAMMA * LAMBDA * (1.0 - over) * trace
                advantages[t], following, over = trace, values[t], dones[t]
            returns = advantages + values
        for _ in range(EPOCHS):
            for index in torch.randperm(ENVS).split(ENVS // MINIBATCHES):
                hidden, _ = read(obs[:, index], (first[0][:, index], first[1][:, index]), dones[:, index])
                policy = Categorical(logits=actor(hidden))
                gains = advantages[:, index].flatten()
                gains = (gains - gains.mean()) / (gains.std() + 1e-8)
                ratio = (policy.log_prob(actions[:, index].flatten()) - logprobs[:, index].flatten()).exp()
                loss = -torch.minimum(ratio * gains, ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * gains).mean()
                errors = critic(hidden).flatten() - returns[:, index].flatten()
                loss = loss + VALUE_WEIGHT * 0.5 * errors.square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, LONGEST)
                optimizer.step()
    envs.close()
    return {"steps": taken, **watch.read()}


def main() -> None:
    """Measure, print and write the results."""
    parser = make_parser(__file__, __doc__, [row.name for row in SPEEDS], rounds=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="numbers of torch threads")
    arguments = parser.parse_args()
    if arguments.work:
        each = {"ours": our_workload, "contrib": contrib_speed, "clean": clean_speed}
        serve({(side, "speed"): worker for side, worker in each.items()})
        return
    report = start_report(arguments.rounds)
    wanted = [row for row in SPEEDS if row.name in arguments.only]
    names = dict.fromkeys(["ours", *(row.their_side for row in wanted)])
    sides = {name: Side(__file__, name) for name in names}
    try:
        jobs = [
            job for row in wanted
            for job in (
                (sides["ours"], row.our_name, row.our_steps), (sides[row.their_side], row.their_name, row.their_steps)
            )
        ]  # fmt: skip
        rates = measure_speeds(jobs, arguments.rounds, PROBE_STEPS, arguments.threads)
    finally:
        for side in sides.values():
            side.close()
    report["speeds"], report["rates"] = compare_speeds(rates, wanted), rates
    print_speeds(report["speeds"], "theirs")
    write_report(report, arguments.output)


if __name__ == "__main__":
    main()
