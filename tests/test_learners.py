"""What holds for every learner: bounds of its numbers, and a metric that is watched for NaN."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import pytest
import torch

from resume_cases import SPECS, take_steps, tiny
from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.bounds import BOUNDS
from rl_training.errors import UserError
from rl_training.run.build import open_session

LEARNERS = sorted({spec.learner for spec in SPECS.values()}, key=lambda learner: learner.__name__)
OUTSIDE = {">= 0": -0.5, "> 0": 0.0, ">= 1": 0, "in [0, 1]": 1.5, "in (0, 1]": 0.0, "in (0, 1)": 1.0}


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: learner.__name__)
def test_a_number_out_of_its_bounds_is_refused(learner: type) -> None:
    accepted = {
        name for part in learner.__mro__ if "__init__" in vars(part) for name in inspect.signature(part).parameters
    }
    names = accepted & set(BOUNDS)
    assert names
    for name in names:
        bound, _ = BOUNDS[name]
        for value in (OUTSIDE[bound], math.nan):
            with pytest.raises(ValueError) as refused:
                learner(**{name: value})
            assert str(refused.value) == f"{name} must be {bound}, got {value}"


# Defaults of a learner made by hand that are not those of a run, on purpose.
APART: dict[str, dict[str, str]] = {
    "QLearning": dict.fromkeys(("target_update_interval", "tau"), "made by hand, it copies the network"),
    "PPO": dict.fromkeys(("update_epochs", "minibatch_size"), "one pass over the whole batch, as the contract says"),
    "A2C": {"gae_lambda": "n-step returns, as in the paper"},
    "IMPALA": {"gae_lambda": "V-trace as in the paper"},
    "APPO": dict.fromkeys(("update_epochs", "minibatch_size"), "as PPO")
    | {"normalize_advantages": "without lag it is IMPALA"},
    "D4PG": dict.fromkeys(("v_min", "v_max", "num_atoms"), "the model's own"),
    "IQN": {"num_target_quantiles": "as many as num_quantiles"},
    "GAIL": {"discriminator_batch_size": "as many as there are"},
    "RLPD": {"actor_update_interval": "a learner knows no training turns"},
}


def defaults_of(learner: type) -> dict[str, object]:
    """The defaults of the constructor, with those of base classes that it passes its other arguments to."""
    found: dict[str, object] = {}
    for part in learner.__mro__:
        own = vars(part).get("__init__")
        arguments = inspect.signature(own).parameters.values() if inspect.isfunction(own) else ()
        found = {argument.name: argument.default for argument in arguments} | found
        if arguments and all(argument.kind != argument.VAR_KEYWORD for argument in arguments):
            break
    return found


@pytest.mark.parametrize("algo", sorted({spec.learner: name for name, spec in reversed(SPECS.items())}.values()))
def test_a_learner_and_a_run_have_the_same_defaults(algo: str) -> None:
    """Apart from what is listed here; presets of another algorithm's axes differ by their nature."""
    learner = SPECS[algo].learner
    apart = {name for part in learner.__mro__ for name in APART.get(part.__name__, {})}
    ours, theirs = defaults_of(learner), SPECS[algo].params().arguments_of(learner)
    different = {name for name, value in theirs.items() if name in ours and ours[name] != value}
    assert different - apart == set()
    assert {name for name in APART.get(learner.__name__, {}) if ours[name] == theirs[name]} == set()


@pytest.mark.parametrize("algo", SPECS)
def test_every_update_names_one_number_of_its_metrics_to_watch(algo: str) -> None:
    session = open_session(tiny(algo, Path("unused"), threads=1))
    store, algorithm, step, phases = session.store, session.algorithm, 0, set()
    while "policy" not in phases:
        step += take_steps(session, step)
        for phase, batch in store.batches(algorithm, step):
            result = algorithm.update(batch, phase=phase, global_step=step, sync=False)
            store.feedback(batch, result)
            watched = result.metrics[result.watch]
            assert torch.as_tensor(watched).numel() == 1
            assert not any(isinstance(x, torch.Tensor) and x.requires_grad for x in result.metrics.values())
            phases.add(phase)
    session.close()


@pytest.mark.parametrize("algo", ["ppo", "sac", "gail"])
def test_a_learner_is_not_moved_without_its_optimizers(algo: str) -> None:
    session = open_session(tiny(algo, Path("unused"), threads=1))
    learner = session.algorithm
    assert learner.to("cpu").float().share_memory() is learner  # where it is
    for where in ("meta", torch.float64):
        with pytest.raises(UserError, match=f"{type(learner).__name__} cannot be moved to another device, dtype or"):
            learner.to(where)
    for optimizer in learner._optimizers.values():
        assert optimizer.flat.data_ptr() == optimizer._params[0].data_ptr()
    session.close()


def test_a_learner_of_images_is_not_laid_out_anew() -> None:
    class Images(Algorithm):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Conv2d(2, 3, 3)
            self.numbers.update(learning_rate=0.1)
            self.make_optimizer("optimizer", self.layer.parameters())

    with pytest.raises(UserError, match="memory format; change its networks before you make it"):
        Images().to(memory_format=torch.channels_last)
