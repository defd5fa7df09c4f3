"""Search PPO's learning rate and entropy bonus with Optuna; `rl-training tune` does this without code."""

from __future__ import annotations

from typing import Any

import optuna

from rl_training import PPO, Callback


class Prune(Callback):
    """Ends a trial that is behind the others."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_evaluation(self, run: Any, metrics: dict[str, Any]) -> bool:
        """False stops the run."""
        self.trial.report(metrics["eval_return_mean"], run.step)
        return not self.trial.should_prune()


def main(trials: int = 20, total_timesteps: int = 50_000) -> float:
    """Run the study and return the best value."""

    def objective(trial: optuna.Trial) -> float:
        ppo = PPO(
            "ppo/cartpole",
            learning_rate=trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
            ent_coef=trial.suggest_float("ent_coef", 0.0, 0.02),
            seed=trial.number, eval_interval=max(1, total_timesteps // 5),
        )  # fmt: skip
        ppo.learn(total_timesteps, callbacks=Prune(trial), progress=False)
        if trial.should_prune():
            raise optuna.TrialPruned
        return float(ppo.evaluate(20)["eval_return_mean"])

    study = optuna.create_study(direction="maximize")  # storage="sqlite:///study.db" shares it between processes
    study.optimize(objective, n_trials=trials)
    print(study.best_params)
    return study.best_value


if __name__ == "__main__":
    main()
