"""One trial of the W&B sweep in sweep.yaml; the agent gives its settings as --learning_rate=0.001 --ent_coef=0.01."""

from __future__ import annotations

import json
import sys

from rl_training import PPO


def main(words: list[str], total_timesteps: int = 50_000, loggers: tuple[str, ...] = ("wandb",)) -> float:
    """Train with these settings and return the last evaluation."""
    given = (word.removeprefix("--").split("=", 1) for word in words)
    ppo = PPO("ppo/cartpole", **{name: json.loads(value) for name, value in given}, loggers=loggers)
    return float(ppo.learn(total_timesteps).metrics["eval_return_mean"])


if __name__ == "__main__":
    main(sys.argv[1:])
