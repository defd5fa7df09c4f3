"""The commands that take a checkpoint: `eval`, `resume`, `predict` and `export`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.markup import escape

from rl_training.cli import options, screen
from rl_training.cli.options import Text, option
from rl_training.cli.screen import exit_after_signal
from rl_training.errors import UserError
from rl_training.safe_files import write_text

SHOWN = 20  # returns printed one by one
FRESH_SEED = 10_000  # added to the run's seed, so a card does not use the episodes that chose `best.ckpt`


def evaluate(
    checkpoint: options.CheckpointOption,
    num_episodes: Annotated[Text, option("Episodes; default: eval_episodes of the run.", metavar="N")] = None,
    stochastic: options.StochasticOption = False,
    seed: Annotated[Text, option("Seed of the episodes; default: the run's seed.", metavar="N")] = None,
    render: Annotated[bool, option("Show the episodes in a window.", "--render")] = False,
    record_video: Annotated[Text, option("Write one video per episode.", metavar="DIR")] = None,
    imagine: Annotated[bool, option("Draw the world model's predictions next to the checkpoint.", "--imagine")] = False,
    env: options.OwnEnvOption = None,
    modules: options.ImportOption = None,
) -> None:
    """Evaluate a checkpoint on whole episodes."""
    episodes = None if num_episodes is None else options.whole_number("--num-episodes", num_episodes, least=1)
    first = None if seed is None else options.whole_number("--seed", seed)
    if render and record_video is not None:
        raise UserError("--render and --record-video were both given; give one of them.")
    named = options.name_environment(env, modules)
    from rl_training.run.workflows import evaluate_checkpoint

    path = options.find_checkpoint(checkpoint)
    pictures: list[Path] = []
    if imagine:
        from rl_training.tools.imagination import draw_imagination

        pictures = draw_imagination(path, Path(path).parent, seed=first, env=named)
    with screen.drawing_shown(record_video) as watch:
        metrics = evaluate_checkpoint(
            path, num_episodes=episodes, deterministic=not stochastic, seed=first, record_video_dir=record_video,
            render=render, env=named, network=tuple(modules or ()), watch=watch,
        )  # fmt: skip
    returns = metrics["eval_returns"]
    listed = ", ".join(f"{value:.1f}" for value in returns[:SHOWN])
    screen.print_facts(screen.make_console(), [
        ("return", f"{screen.describe_return(metrics)}, {'sampled' if stochastic else 'deterministic'}"),
        ("range", f"{min(returns):.1f} to {max(returns):.1f}"),
        ("length", f"{metrics['eval_length_mean']:.1f} steps on average"),
        ("returns", listed + (f" and {len(returns) - SHOWN} more" if len(returns) > SHOWN else "")),
        ("videos", "" if record_video is None else screen.quote(Path(record_video))),
        ("imagined", ", ".join(screen.quote(picture) for picture in pictures)),
        ("checkpoint", screen.quote(Path(path))),
    ])  # fmt: skip


def resume(
    checkpoint: options.CheckpointOption,
    total_timesteps: options.StepsOption = None,
    output_dir: options.OutputOption = None,
    settings: options.SetOption = None,
    force: Annotated[bool, option("Allow changes to settings other than the budget.", "--force")] = False,
    env: options.OwnEnvOption = None,
    modules: options.ImportOption = None,
) -> None:
    """Continue from a checkpoint, exactly where the run stopped.

    The budget may change (schedules stretch with it); any other change needs --force.
    """
    budget = None if total_timesteps is None else options.whole_number("--total-timesteps", total_timesteps, least=1)
    path = options.find_checkpoint(checkpoint)
    changes = read_changes(path, settings or [])
    if env is None and isinstance(changes.get("env_id"), str):
        env = changes["env_id"]  # the user named it in --set
    network = changes.get("algo_kwargs", {}).get("network")
    networks = [network] if isinstance(network, str) else []
    named = options.name_environment(env, modules, networks)
    from rl_training.config.train_config import name_again
    from rl_training.run.workflows import resume_training

    begun: list[int] = []
    watch: Any = SimpleNamespace(on_start=lambda run: begun.append(run.step))
    result = resume_training(
        path, total_timesteps=budget, output_dir=output_dir, changes=changes, force=force,
        env=named, callbacks=[watch], console=True, raise_on_signal=False,
    )  # fmt: skip
    config = result.policy.config
    title = f"{config.algo} on {config.env_id}, resumed at step {begun[0]:,}"
    trained = result.metrics["global_step"] - begun[0]
    again = name_again(env, [*(modules or ()), *(name.partition(":")[0] for name in networks)])
    screen.print_run(screen.make_console(), result, title, again, trained=trained)
    exit_after_signal(result)


def read_changes(path: str, settings: list[str]) -> dict[str, Any]:
    """The changes of `--set` for `resume_training`; in `algo_kwargs` also values that stay the same."""
    if not settings:
        return {}
    from rl_training.run.learner import read_checkpoint

    stored = read_checkpoint(path)["config"]
    changed = options.apply_settings(stored, settings)
    changes = {name: value for name, value in changed.items() if stored.get(name) != value}
    said = options.named_keys(settings)
    params, before = (data.get("algo_kwargs") or {} for data in (changed, stored))
    changes["algo_kwargs"] = {
        name: value for name, value in params.items() if before.get(name) != value or name in said
    }
    return changes


def predict(
    checkpoint: options.CheckpointOption,
    obs: Annotated[str, option("An observation or a batch: JSON, .json or .npy, - is stdin.", metavar="JSON|FILE|-")],
    action_mask: Annotated[
        Text, option("1 for each legal action, else 0; a batch has one row per observation.", metavar="JSON|FILE|-")
    ] = None,
    stochastic: options.StochasticOption = False,
    modules: options.ImportOption = None,
) -> None:
    """Print the action for an observation as JSON; a batch gives a batch.

    Every call is treated as the first step of an episode; in Python, `actor()` keeps a policy's memory (Dreamer).
    """
    observation = read_values("--obs", obs, "an observation looks like [0.1, 0.2]")
    mask = None if action_mask is None else read_values("--action-mask", action_mask, "a mask looks like [1, 0, 1]")
    from rl_training.run.learner import load_policy

    policy = load_policy(options.find_checkpoint(checkpoint), options.name_environment(None, modules))
    action = policy.predict(observation, not stochastic, action_mask=mask)
    typer.echo(json.dumps(action if isinstance(action, int) else action.tolist()))


def read_values(name: str, given: str, example: str) -> Any:
    """The value of the option `name`: JSON text, a .json or .npy file, or stdin."""
    wanted = "a .npy file of numbers" if given.endswith(".npy") else "valid JSON"
    try:
        if given.endswith(".npy"):
            from numpy.lib.format import open_memmap

            return open_memmap(given, mode="r")  # mapped: a header may claim any size; no pickle is read
        is_file = given.endswith(".json") or os.path.isfile(given)
        return json.loads(sys.stdin.read() if given == "-" else Path(given).read_text("utf-8") if is_file else given)
    except OSError as error:
        raise UserError(f"{name} {given} cannot be read: {error.strerror or error}.") from None
    except Exception:  # a damaged file can fail in any way
        where = "stdin" if given == "-" else repr(given if len(given) <= 60 else given[:57] + "...")
        raise UserError(f"{name}: {where} is not {wanted}; {example}.") from None


def export(
    checkpoint: options.CheckpointOption,
    file_format: Annotated[
        str, option("onnx, for onnxruntime; torch, for torch.export.load.", "--format", metavar="NAME")
    ] = "onnx",
    output: Annotated[Text, option("The file to write; default: next to the checkpoint.", metavar="FILE")] = None,
    card: Annotated[bool, option("Evaluate the policy and write a model card next to it.", "--card")] = False,
    num_episodes: Annotated[str, option("Evaluation episodes for the card.", metavar="N")] = "20",
    env: options.OwnEnvOption = None,
    modules: options.ImportOption = None,
) -> None:
    """Write the deterministic policy to a file that acts without rl-training.

    It maps the environment's observations to its actions; normalizer, scaling and masks are included.
    """
    episodes = options.whole_number("--num-episodes", num_episodes, least=2)
    if not card and env is not None:
        raise UserError("--env is for --card, which was not given; leave --env out, or add --card.")
    named = options.name_environment(env, modules)
    from rl_training.run.learner import load_policy
    from rl_training.run.workflows import evaluate_checkpoint
    from rl_training.tools.export import export_policy

    path, names = options.find_checkpoint(checkpoint), tuple(modules or ())
    scores: dict[str, Any] = {}
    if card:  # first, so a missing environment leaves no partial result
        config = load_policy(path, names).config
        seed = config.seed + FRESH_SEED
        scores = evaluate_checkpoint(path, num_episodes=episodes, seed=seed, env=named, network=names)
    made = export_policy(path, file_format, output, names)
    facts, parity = made.facts, made.facts["parity"]
    if card:
        from rl_training.config.train_config import name_again
        from rl_training.tools.report import render_card

        mean, half = screen.mean_interval(scores["eval_returns"])
        interval = (mean - (half or 0.0), mean + (half or 0.0))
        own = [name.partition(":")[0] for name in config.callables if ":" in name]
        again = f"rl-training train --config config.yaml{name_again(None, [*names, *own])}"
        write_text(f"{made.path}.md", render_card(made, config, scores, interval, again))
    screen.print_facts(screen.make_console(), [
        ("policy", screen.quote(made.path)),
        *((kind, escape(", ".join(f"{value['name']} {value['dtype']} ({', '.join(map(str, value['shape']))})"
                                  for value in facts[kind]))) for kind in ("inputs", "outputs")),
        ("checked", f"{parity['observations']:,} observations, {parity['different']} actions differ from predict, "
                    f"largest difference {parity['max_abs_difference']:.2g}"),
        ("details", screen.quote(Path(f"{made.path}.json"))),
        ("card", screen.quote(Path(f"{made.path}.md")) if card else ""),
    ])  # fmt: skip
