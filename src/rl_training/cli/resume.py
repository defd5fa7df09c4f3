"""`rl-training resume`: continue from a checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

from rl_training.cli.exits import exit_after_signal
from rl_training.cli.options import (
    CheckpointOption,
    ImportOption,
    OutputOption,
    OwnEnvOption,
    SetOption,
    StepsOption,
    find_checkpoint,
    name_environment,
    option,
    whole_number,
)
from rl_training.cli.screen import make_console, print_run, repeat_names


def resume(
    checkpoint: CheckpointOption,
    total_timesteps: StepsOption = None,
    output_dir: OutputOption = None,
    settings: SetOption = None,
    force: Annotated[bool, option("Allow changes to settings other than the budget.", "--force")] = False,
    env: OwnEnvOption = None,
    modules: ImportOption = None,
) -> None:
    """Continue from a checkpoint, exactly where the run stopped.

    The budget may change (schedules stretch with it); any other change needs --force.
    """
    budget = None if total_timesteps is None else whole_number("--total-timesteps", total_timesteps, least=1)
    path = find_checkpoint(checkpoint)
    changes = read_changes(path, settings)
    if env is None and isinstance(changes.get("env_id"), str):
        env = changes["env_id"]  # the user named it in --set
    network = changes.get("algo_kwargs", {}).get("network")
    networks = [network] if isinstance(network, str) else []
    for name in networks:
        name_environment(name, None)
    named = name_environment(env, modules)
    from rl_training.run.run import Callback, Run
    from rl_training.run.workflows import resume_training

    class Watch(Callback):
        """Remembers where the resumed run began and what it trains."""

        first_step, title = 0, ""

        def on_start(self, run: Run) -> None:
            self.first_step, self.title = run.step, f"{run.config.algo} on {run.config.env_id}"

    watch = Watch()
    result = resume_training(
        path, total_timesteps=budget, output_dir=output_dir, changes=changes, force=force,
        env=named, callbacks=[watch], console=True, raise_on_signal=False,
    )  # fmt: skip
    trained = result.metrics["global_step"] - watch.first_step
    title = f"{watch.title}, resumed at step {watch.first_step:,}"
    print_run(make_console(), result, title, repeat_names(env, modules, networks), trained=trained)
    exit_after_signal(result)


def read_changes(path: str, settings: list[str] | None) -> dict[str, Any]:
    """The changes of `--set` for `resume_training`; in `algo_kwargs` also values that stay the same."""
    if not settings:
        return {}
    from rl_training.cli.overrides import apply_settings
    from rl_training.run.learner import read_checkpoint

    stored = read_checkpoint(path)["config"]
    changed = apply_settings(stored, settings)
    changes = {name: value for name, value in changed.items() if stored.get(name) != value}
    said = {text.partition("=")[0].strip().removeprefix("algo_kwargs.") for text in settings}
    params, before = (data.get("algo_kwargs") or {} for data in (changed, stored))
    changes["algo_kwargs"] = {
        name: value for name, value in params.items() if before.get(name) != value or name in said
    }
    return changes
