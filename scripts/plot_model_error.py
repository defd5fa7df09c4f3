"""Plot how the error of a learned model grows with the length of a rollout: open-loop error by horizon.

`python scripts/plot_model_error.py CHECKPOINT [CHECKPOINT ...]` plays the checkpoint's policy in its environment, feeds
the recorded actions to the model from states early in episodes (later states may hardly change), and draws the error of
the predictions (RMS over the observation's dimensions, in standard deviations of the recorded observations) and the
error of predicting no change.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.dreamer import Dreamer
from rl_training.algorithms.mbpo import MBPO
from rl_training.data import TransitionDataset
from rl_training.errors import UserError
from rl_training.run.evaluation import record_policy
from rl_training.run.learner import load_algorithm, read_checkpoint
from rl_training.tools.imagination import Windows, cut_windows, open_loop

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "mbpo_model_error.png"
Array = NDArray[Any]


class Predicted(NamedTuple):
    """What follows the context: obs [W, H, ...] and, of a model that predicts them, rewards [W, H]."""

    obs: Tensor
    rewards: Tensor | None = None


# windows and how many of their observations are the context, from which a model may infer where it is
Predictor = Callable[[Any, Windows, int], Predicted]


def predict_with_ensemble(algorithm: MBPO, windows: Windows, context: int) -> Predicted:
    """Each window by one elite throughout, which predicts its mean."""
    obs = windows.obs[:, context - 1]
    rows = torch.arange(len(obs))
    member = algorithm.elites[rows % len(algorithm.elites)]
    predicted, rewards = [], []
    for actions in windows.actions[:, context:].unbind(1):
        means = algorithm.dynamics_model(obs, actions).means[member, rows]
        rewards.append(means[:, 0])
        predicted.append(obs := obs + means[:, 1:])
    return Predicted(torch.stack(predicted, 1), torch.stack(rewards, 1))


def predict_with_world_model(algorithm: Dreamer, windows: Windows, context: int) -> Predicted:
    """Filter the context, then dream with the recorded actions, at modes."""
    return Predicted(open_loop(algorithm, windows.obs, windows.actions, context)[:, context:])


# A model of another kind is drawn by adding its learner and its function here.
PREDICTORS: dict[type[Algorithm], Predictor] = {
    MBPO: predict_with_ensemble, Dreamer: predict_with_world_model,
}  # fmt: skip


def predictor_of(algorithm: Algorithm) -> Predictor:
    """The function that rolls this learner's model out."""
    for kind, predict in PREDICTORS.items():
        if isinstance(algorithm, kind):
            return predict
    raise UserError(f"{type(algorithm).__name__} has no dynamics model that this script knows.")


def draw_starts(dataset: TransitionDataset, length: int, arguments: argparse.Namespace) -> Array:
    """First rows of windows at random, each inside one episode and begun in the first `starts` steps of it."""
    rows, ends = np.arange(len(dataset)), dataset.episode_ends
    episode = np.searchsorted(ends, rows)
    begins = np.concatenate([[0], ends[:-1] + 1])
    starts = np.flatnonzero((rows + length - 2 <= ends[episode]) & (rows - begins[episode] < arguments.starts))
    if not len(starts):
        raise UserError(f"no recorded episode has {length - 1} steps; give a smaller --horizon.")
    return np.random.default_rng(arguments.seed).choice(starts, arguments.windows)


@torch.no_grad()
def measure(checkpoint: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Errors [W, H] of one checkpoint's model and of predicting no change, and of the summed reward."""
    algorithm, spaces, config = load_algorithm(checkpoint, read_checkpoint(checkpoint))
    algorithm.eval()
    dataset = record_policy(checkpoint, arguments.steps, seed=arguments.seed, deterministic=not arguments.stochastic)
    dataset = dataset.map(obs=spaces.encode, actions=spaces.unmap_actions)
    context, length = arguments.context, arguments.context + arguments.horizon
    windows = cut_windows(dataset, draw_starts(dataset, length, arguments), length)
    predicted = predictor_of(algorithm)(algorithm, windows, context)
    real, start = windows.obs[:, context:].float(), windows.obs[:, context - 1, None].float()
    scale = torch.from_numpy(dataset.obs).float().std(0).clamp(min=1e-6)
    measured = {
        "name": f"{config.algo}, {config.env_id}, seed {config.seed}",
        "model": rms((predicted.obs - real) / scale), "no change": rms((start - real) / scale),
    }  # fmt: skip
    if predicted.rewards is not None:
        sums = (predicted.rewards - windows.rewards[:, context:]).cumsum(1)
        measured["return"] = sums.abs().numpy()
    return measured


def rms(errors: Tensor) -> Array:
    """Root of the mean square over an observation's entries: [W, H, ...] -> [W, H]."""
    return errors.flatten(2).square().mean(-1).sqrt().numpy()


def draw(path: Path, measured: Sequence[dict[str, Any]]) -> None:
    """Observations, and return where a model predicts it: medians as lines, the middle 80 % as bands."""
    from matplotlib.figure import Figure

    names = [name for name in ("model", "return") if any(name in each for each in measured)]
    figure = Figure(figsize=(4.2 * len(names), 3.4), layout="constrained")
    panels = dict(zip(names, figure.subplots(1, len(names), squeeze=False)[0], strict=True))
    for color, each in zip(("tab:blue", "tab:orange", "tab:green", "tab:red"), measured, strict=False):
        steps = np.arange(1, each["model"].shape[1] + 1)
        for name, axes in panels.items():
            if name in each:
                low, middle, high = np.quantile(each[name], [0.1, 0.5, 0.9], axis=0)
                axes.plot(steps, middle, color=color, linewidth=2, label=each["name"])
                axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        still = np.median(each["no change"], axis=0)
        panels["model"].plot(steps, still, color=color, linestyle="--", linewidth=1, label="predicting no change")
    panels["model"].set(title="observation", ylabel="error, deviations of the data")
    if "return" in panels:
        panels["return"].set(title="sum of rewards", ylabel="absolute error")
    for axes in panels.values():
        axes.set(xlabel="steps without looking", yscale="log")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every checkpoint and draw them into one picture."""
    parser = argparse.ArgumentParser(description="Open-loop error of learned models against horizon.")
    parser.add_argument("checkpoints", type=Path, nargs="+", help="checkpoints of learners with a model")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the picture")
    parser.add_argument("--horizon", type=int, default=50, help="steps predicted without looking")
    parser.add_argument("--context", type=int, default=1, help="observations that a model may see first")
    parser.add_argument("--windows", type=int, default=500, help="rollouts")
    parser.add_argument("--starts", type=int, default=50, help="they begin in the first so many steps of an episode")
    parser.add_argument("--steps", type=int, default=4_000, help="real steps recorded for them")
    parser.add_argument("--seed", type=int, default=0, help="of the recorded episodes")
    parser.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the mean")
    arguments = parser.parse_args(argv)
    measured = [measure(checkpoint, arguments) for checkpoint in arguments.checkpoints]
    draw(arguments.output, measured)
    shown = [step for step in (1, 5, 10, 20, 50, 100) if step <= arguments.horizon]
    for each in measured:
        medians = {step: round(float(np.median(each["model"][:, step - 1])), 4) for step in shown}
        print(f"{each['name']}: median error by horizon {json.dumps(medians)}")
    print(f"wrote: {arguments.output}")


if __name__ == "__main__":
    main()
