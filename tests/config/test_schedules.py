"""Schedules: every number of every algorithm either moves what is learned, or is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from resume_cases import ONE_PER_LEARNER, SPECS, tiny
from rl_training.config.params import Schedule, change_params, parameter_names, read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.errors import UserError
from rl_training.run.build import open_session
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import train
from setting_cases import learned, other_value, same

# What else a number needs in order to be read.
SETTING: dict[str, dict[str, Any]] = {
    "alpha": {"alpha": 0.2}, "kl_target": {"target_policy": True}, "pg_rho_clip": {"target_policy": True},
    "line_search_shrink": {"max_kl": 2.0}, "clip_coef": {"update_epochs": 3},
    **{f"{whose}learning_rate": {"learning_rate_decay": "none"} for whose in ("", "actor_", "critic_")},
}  # fmt: skip


def floats_of(algo: str) -> list[str]:
    known = parameter_names(SPECS[algo].params)
    return [name for name in known if f"{name}_schedule" in known]


@pytest.mark.parametrize("algo", ONE_PER_LEARNER)
def test_a_constant_schedule_is_the_value_itself_or_is_refused_with_the_reason(algo: str) -> None:
    wrong: dict[str, str] = {}
    plain: dict[str, list[Tensor]] = {}
    for name in floats_of(algo):
        value, setting = other_value(algo, name), SETTING.get(name, {})
        setting = {key: part for key, part in setting.items() if key in SPECS[algo].params.model_fields}
        try:
            scheduled = learned(algo, {**setting, f"{name}_schedule": {"type": "constant", "start": value}})
        except UserError as error:
            if f"{algo} cannot change {name} during a run; " not in str(error):
                wrong[name] = str(error)
            continue
        key = repr(setting)
        if key not in plain:
            plain[key] = learned(algo, setting)
        if same(scheduled, plain[key]):
            wrong[name] = "the schedule does nothing"
        elif not same(scheduled, learned(algo, {**setting, name: value})):
            wrong[name] = "the schedule does something else than the value"
    assert wrong == {}


REFUSALS = [  # algorithm, other settings, a schedule's key, and what the sentence says
    ("c51_dqn", {}, "v_min", "cannot change v_min during a run; the atoms are placed when"),
    ("rainbow_dqn", {}, "v_max", "cannot change v_max during a run; the atoms are placed when"),
    ("d4pg", {}, "v_max", "cannot change v_max during a run; the atoms are placed when"),
    ("sac", {}, "alpha", "cannot change alpha during a run; it is 'auto', which tunes it"),
    ("mopo", {}, "alpha", "cannot change alpha during a run; it is 'auto', which tunes it"),
    ("rlpd", {"alpha": 0.1}, "target_entropy", "; alpha is 0.1, and only alpha 'auto' uses it"),
    ("sac", {"alpha": 0.1}, "alpha", None),
    ("prioritized_dqn", {}, "prioritized_alpha", "; the priorities in the buffer depend on it"),
    ("prioritized_dqn", {}, "prioritized_beta_end", "; it is a part of prioritized_beta's own schedule"),
    ("dqn", {}, "epsilon_start", "; it is a part of epsilon's own schedule"),
    ("rlpd", {}, "offline_batch_ratio", "; batches are divided once, when the run is built"),
    ("mbpo", {}, "synthetic_batch_ratio", "; batches are divided once, when the run is built"),
    ("bc", {}, "gamma", "; it learns from recorded actions and discounts nothing"),
    ("bc", {}, "heldout_fraction", "; the data is divided once, when the run is built"),
    ("trpo", {}, "vf_coef", "; policy and critic have steps of their own, without it"),
    ("appo", {}, "kl_target", "; target_policy is false, and nothing else reads it"),
    ("appo", {"target_policy": True}, "kl_coef", "; it is where a weight starts that then adapts to kl_target"),
    ("appo", {"target_policy": True}, "kl_target", None),
    ("dqn", {}, "n_step", "n_step_schedule: n_step is a whole number, which cannot change during a run."),
    ("appo", {}, "minibatch_size", "minibatch_size_schedule: minibatch_size is a whole number"),
    ("dqn", {}, "hidden_sizes", "'hidden_sizes_schedule' schedules no number; known:"),
    ("dqn", {}, "gama", "schedules no number; did you mean 'gamma'"),
]


@pytest.mark.parametrize(("algo", "settings", "name", "sentence"), REFUSALS)
def test_what_cannot_move_is_refused_in_a_sentence(
    algo: str, settings: dict[str, Any], name: str, sentence: str | None, tmp_path: Path
) -> None:
    config = tiny(algo, tmp_path, kwargs={**settings, f"{name}_schedule": {"start": 0.5, "end": 0.6}})
    if sentence is None:
        open_session(config).close()
        return
    with pytest.raises(UserError) as refused:
        open_session(config)
    assert f"{name}_schedule" in str(refused.value)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_no_schedule_is_refused_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        train(tiny("ppo", tmp_path, kwargs={"learning_rate_schedule": "linear"}), console=False)
    wanted = "it should be such as {type: linear, start: 0.1, end: 0}."
    assert str(refused.value) == f"algo_kwargs: learning_rate_schedule is 'linear'; {wanted}"


def test_a_schedule_of_no_length_is_at_its_end_from_the_start(tmp_path: Path) -> None:
    result = train(tiny("dqn", tmp_path, kwargs={"exploration_fraction": 0, "epsilon_end": 0.125}), console=False)
    assert result.metrics["epsilon"] == 0.125
    learner: Any = result.policy.algorithm
    assert learner.epsilon == 0.125


@pytest.mark.parametrize(("name", "value"), [("alpha", -0.1), ("max_grad_norm", 0.0), ("gamma", -0.1)])
def test_a_schedule_stays_within_the_bounds_of_its_number(name: str, value: float, tmp_path: Path) -> None:
    schedule = {f"{name}_schedule": {"start": 0.5, "end": value}}
    with pytest.raises(UserError, match=rf"{name}_schedule: {name} is {value}; it should be greater than"):
        open_session(tiny("sac", tmp_path, kwargs={"alpha": 0.2, **schedule}))


def test_a_common_rate_that_nobody_follows_is_refused(tmp_path: Path) -> None:
    rates = {f"{part}_learning_rate": 1e-4 for part in ("world_model", "actor", "critic")}
    kwargs = {**rates, "learning_rate_schedule": {"start": 0.5, "end": 0.6}}
    with pytest.raises(UserError, match="critic_learning_rate are given and replace it"):
        open_session(tiny("dreamer", tmp_path, kwargs=kwargs))


class Discounts(Callback):
    """Notes learner's and buffer's gamma, and that of the rows sampled, at every turn."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, ...]] = []

    def on_update(self, run: Run) -> None:
        store: Any = run.session.store
        if len(store.buffer):
            learner: Any = run.session.algorithm
            self.seen.append((learner.gamma, store.buffer.gamma, float(store.sample()["discounts"].max())))


@pytest.mark.parametrize(("algo", "env_id"), [("dqn", "CartPole-v1"), ("rlpd", "Pendulum-v1")])
def test_gamma_moves_in_the_buffer_and_in_prior_data(algo: str, env_id: str, tmp_path: Path) -> None:
    looks, kwargs = Discounts(), {"gamma_schedule": {"start": 0.9, "end": 0.5}, "offline_batch_ratio": 1.0}
    kwargs = {name: value for name, value in kwargs.items() if algo == "rlpd" or name != "offline_batch_ratio"}
    result = train(tiny(algo, tmp_path, env_id=env_id, kwargs=kwargs), callbacks=[looks], console=False)
    assert result.metrics["gamma"] == 0.5
    assert [learner for learner, _, _ in looks.seen] == [buffer for _, buffer, _ in looks.seen]
    assert [rows for _, _, rows in looks.seen] == pytest.approx([buffer for _, buffer, _ in looks.seen])
    assert looks.seen[0][0] > 0.88
    assert looks.seen[-1][0] < 0.53


def test_a_scheduled_temperature_reaches_its_end(tmp_path: Path) -> None:
    kwargs = {"alpha": 0.2, "alpha_schedule": {"type": "cosine", "start": 0.5, "end": 0.125}}
    result = train(tiny("sac", tmp_path, kwargs=kwargs), console=False)
    assert result.metrics["alpha"] == 0.125
    learner: Any = result.policy.algorithm
    assert 0.125 < learner.alpha < 0.2  # of the last update


def test_gamma_moves_the_scale_of_rewards_too(tmp_path: Path) -> None:
    wrapped = {"wrappers": {"normalize_reward": True}}
    moments: list[list[float]] = []
    for kwargs in ({}, {"gamma": 0.5}, {"gamma_schedule": {"type": "constant", "start": 0.5}}):
        result = train(tiny("ppo", tmp_path, env_kwargs=wrapped, kwargs=kwargs), console=False)
        learner: Any = result.policy.algorithm
        moments.append(learner.reward_scale.moments.tolist())
    assert moments[1] == moments[2] != moments[0]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"learning_rate": 0.1}, {"learning_rate": 0.1}),
        ({"policy_learning_rate": 0.1}, {"policy_learning_rate": 0.1}),  # which means the same
        ({"learning_rate": 0.1, "learning_rate_schedule": {"start": 0.2, "end": 0.0}}, None),
        ({"gamma": 0.5}, None),
    ],
)
def test_a_changed_number_replaces_its_schedule(given: dict[str, Any], left: dict[str, Any] | None) -> None:
    stored = {"learning_rate_schedule": {"start": 1.0, "end": 0.0}}
    changed = change_params(get_algorithm_spec("mbpo").params, stored, given)
    assert changed == (left if left is not None else {**stored, **given})


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 3.0), (0.2, 2.0 + 0.5**0.5), (0.4, 2.0), (0.8, 1.0)])
def test_a_cosine_falls_slowly_at_both_ends(progress: float, expected: float) -> None:
    """Half a period from 3 to 1 within four fifths of the budget: an eighth of the period is 45 degrees."""
    assert Schedule(type="cosine", start=3.0, end=1.0, fraction=0.8).value(progress) == pytest.approx(expected)


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 1.0), (0.2, 1.0), (0.3, 2.0), (0.6, 5.0), (1.0, 5.0)])
def test_a_schedule_may_begin_later(progress: float, expected: float) -> None:
    assert Schedule(start=1.0, end=5.0, begin=0.2, fraction=0.6).value(progress) == pytest.approx(expected)


def test_a_schedule_may_jump_but_not_begin_after_its_end() -> None:
    jump = Schedule(start=1.0, end=5.0, begin=0.5, fraction=0.5)
    assert (jump.value(0.49), jump.value(0.5)) == (1.0, 5.0)
    late = {"gamma_schedule": {"start": 0, "end": 1, "begin": 0.7, "fraction": 0.5}}
    with pytest.raises(UserError, match=r"begin is 0\.7; it must be at most fraction \(0\.5\)"):
        read_params(get_algorithm_spec("ppo").params, late)


def test_trpos_learning_rate_may_end_at_zero_under_its_other_name() -> None:
    falls = {"learning_rate_schedule": {"type": "linear", "start": 0.01, "end": 0.0}}
    assert read_params(get_algorithm_spec("trpo").params, falls).schedules["learning_rate"].end == 0.0
