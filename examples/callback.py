"""A callback that watches a run and stops it when the return is good enough."""

from __future__ import annotations

from typing import Any

from rl_training import PPO, Callback


class GoodEnough(Callback):
    """Stops at the first evaluation at the bar; False from any method ends the run with everything saved."""

    def __init__(self, bar: float) -> None:
        self.bar, self.seen = bar, []

    def on_evaluation(self, run: Any, metrics: dict[str, Any]) -> bool:
        """Called after each evaluation with its metrics."""
        self.seen.append(metrics["eval_return_mean"])
        print(f"step {run.step:,}: {self.seen[-1]:.1f}")
        return self.seen[-1] < self.bar


def main(total_timesteps: int = 100_000) -> list[float]:
    """Train with it."""
    callback = GoodEnough(475.0)
    PPO("CartPole-v1", eval_interval=max(1, total_timesteps // 10)).learn(total_timesteps, callbacks=[callback])
    return callback.seen


if __name__ == "__main__":
    main()
