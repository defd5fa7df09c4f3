"""Hints for users of Stable-Baselines3 and RL Zoo: their names and ours, and what `predict` returns."""

from __future__ import annotations

import dis
import warnings
from collections.abc import Collection
from itertools import islice
from types import CodeType, FrameType

ACTION_ALONE = "predict returns the action alone, not (action, state); write action = model.predict(obs)"
# Their name -> ours; of several, the one that the algorithm has.
NAMES: dict[str, tuple[str, ...]] = {
    "n_steps": ("num_steps", "n_step"), "n_epochs": ("update_epochs",), "clip_range": ("clip_coef",),
    "batch_size": ("minibatch_size", "value_minibatch_size"), "clip_range_vf": ("clip_value_loss",),
    "normalize_advantage": ("normalize_advantages",), "rms_prop_eps": ("optimizer_eps",),
    "use_rms_prop": ("optimizer",), "n_envs": ("num_envs",), "eval_freq": ("eval_interval",),
    "n_eval_episodes": ("eval_episodes",),
    "buffer_size": ("buffer_capacity",), "train_freq": ("train_frequency",), "ent_coef": ("alpha",),
    "gradient_steps": ("gradient_updates_per_step",), "exploration_initial_eps": ("epsilon_start",),
    "exploration_final_eps": ("epsilon_end",), "action_noise": ("exploration_noise",),
    "target_policy_noise": ("policy_noise",), "target_noise_clip": ("noise_clip",), "n_critics": ("num_critics",),
    "n_quantiles": ("num_quantiles",), "n_critic_updates": ("value_updates",), "cg_max_steps": ("cg_iterations",),
    "line_search_max_iter": ("line_search_steps",), "line_search_shrinking_factor": ("line_search_shrink",),
    "target_kl": ("max_kl",), "net_arch": ("hidden_sizes",), "activation_fn": ("activation",),
    "optimizer_class": ("optimizer",), "callback": ("callbacks",), "progress_bar": ("progress",),
}  # fmt: skip
RL_ZOO = {
    "enjoy": "eval", "-n": "--total-timesteps", "--n-timesteps": "--total-timesteps", "--n-envs": "--num-envs",
    "-f": "--output-dir", "--log-folder": "--output-dir", "--tensorboard-log": "--output-dir",
}  # fmt: skip
REMARKS = {
    "policy": "the networks follow from the environment's spaces, hidden_sizes and activation.",
    "policy_kwargs": "hidden_sizes, activation, optimizer and network (your own features extractor) replace it.",
    "reset_num_timesteps": "learn continues where it was; learn(reset=True) starts over.",
    "verbose": "learn(progress=True) shows a progress line.",
    "tensorboard_log": "every run writes TensorBoard events into its folder in output_dir.",
    "tb_log_name": "every run has its own folder in output_dir.",
    "stats_window_size": "episode statistics are over the last 100 episodes.",
    "use_sde": "there is no state-dependent exploration here.",
    "sde_sample_freq": "there is no state-dependent exploration here.",
    "optimize_memory_usage": "the replay buffer stores no observation twice anyway.",
    "replay_buffer_class": "buffer_capacity, n_step and prioritized describe the replay buffer.",
    "replay_buffer_kwargs": "buffer_capacity, n_step and prioritized describe the replay buffer.",
    "set_env": "load(path, env=other) continues in another environment.",
    "get_env": "the environments belong to the run; env_id in .config names them.",
    "num_timesteps": "learn returns it as metrics['global_step'].",
    "--hyperparams": "--set learning_rate=1e-3 sets a hyper-parameter.",
    "--eval-freq": "--set eval_interval=N sets the steps between evaluations.",
    "--optimize": "rl-training tune searches for hyper-parameters.",
}


def translate(name: str, known: Collection[str]) -> str | None:
    """The end of an error message about an unknown name that Stable-Baselines3 has; None for any other name."""
    ours = [our for our in NAMES.get(name, ()) if our in known]
    if not ours and "algo_kwargs" in known and "learning_rate" not in known:  # the top of a config file
        ours = [f"algo_kwargs.{our}" for our in NAMES.get(name, ())]
    if RL_ZOO.get(name) in known:
        return f"RL Zoo's {name} is {RL_ZOO[name]} here."
    return f"Stable-Baselines3's {name} is {ours[0]} here." if ours else REMARKS.get(name)


_seen: dict[tuple[int, int], CodeType] = {}  # by call; the code is kept, so that no other one gets its id


def warn_if_unpacked(caller: FrameType) -> None:
    """Warn once for each call whose result the caller unpacks into two names, the second one `_...` or `state...`.

    `throttle, steering = model.predict(obs)` is fine, so the names decide.
    """
    call = id(caller.f_code), caller.f_lasti
    if call in _seen:
        return
    _seen[call] = caller.f_code
    after = (one for one in dis.get_instructions(caller.f_code) if one.offset > caller.f_lasti)
    first = next(after, None)
    if first is None or (first.opname, first.argval) != ("UNPACK_SEQUENCE", 2):
        return
    names: list[str] = []
    for one in islice(after, 4):
        if one.opname.startswith("STORE"):
            names += one.argval if isinstance(one.argval, tuple) else [one.argval]  # Python 3.13 stores two at once
    if len(names) > 1 and names[1].startswith(("_", "state")):
        warnings.warn(ACTION_ALONE, stacklevel=3)
