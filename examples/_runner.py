"""Shared by all reference scripts: train a packaged preset with its managed class and print the result."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence

import rl_training
from rl_training.errors import UserError
from rl_training.experiment.config import load_config
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.run.workflows import TrainResult

OPTIONS = {
    "--total-timesteps": "environment steps to train for",
    "--eval-episodes": "episodes of the evaluation at the end",
    "--output-dir": "folder in which the run's own folder is made",
    "--seed": "seed of every random draw",
    "--env-id": "Gymnasium id, or module:Class, of another environment",
}


def reference(preset: str) -> Callable[[Sequence[str] | None], TrainResult]:
    """The `main(argv=None)` of a script that trains a preset such as `ppo/cartpole`."""

    def main(argv: Sequence[str] | None = None) -> TrainResult:
        config = load_config(preset)
        spec = get_algorithm_spec(config.algo)
        parser = ArgumentParser(description=f"Train {spec.class_name} with the packaged preset {preset}. {spec.paper}.")
        for option, meaning in OPTIONS.items():
            default = getattr(config, option[2:].replace("-", "_"))
            parser.add_argument(option, default=default, help=f"{meaning} (default: {default})")
        changes = vars(parser.parse_args(argv))
        try:
            managed = getattr(rl_training, spec.class_name)({**config.model_dump(mode="json"), **changes})
            result = managed.learn()
        except UserError as error:
            parser.error(str(error))
        show(result)
        return result

    return main


def show(result: TrainResult) -> None:
    """A few lines on a finished run."""
    metrics = result.metrics
    print(f"steps:      {metrics['global_step']} in {metrics['train_seconds']:.1f} s, {metrics['updates']} updates")
    if metrics.get("eval_episodes"):
        mean, std = metrics["eval_return_mean"], metrics["eval_return_std"]
        print(f"return:     {mean:.1f} ± {std:.1f} over {metrics['eval_episodes']} evaluation episodes")
    print(f"run:        {result.run_dir}")
    print(f"checkpoint: {result.checkpoint_path}")
