"""What holds for every learner: bounds of its numbers, and a metric that is watched for NaN."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from resume_cases import SPECS, take_steps, tiny
from rl_training.algorithms.base import Algorithm, Number, Setting
from rl_training.errors import UserError
from rl_training.run.build import open_session

OUTSIDE = {">= 0": -0.5, "> 0": 0.0, ">= 1": 0, "in [0, 1]": 1.5, "in (0, 1]": 0.0, "in (0, 1)": 1.0, "in [0, 1)": 1.0}


@pytest.mark.parametrize("algo", SPECS)
def test_a_number_out_of_its_bounds_is_refused(algo: str) -> None:
    session = open_session(tiny(algo, Path("unused"), threads=1))
    learner = session.algorithm
    declared = {name: value for part in reversed(type(learner).__mro__) for name, value in vars(part).items()}
    bounded = {name: value.bound for name, value in declared.items() if isinstance(value, Setting)}
    assert "learning_rate" in bounded
    for name, bound in bounded.items():
        before = getattr(learner, name, None)
        for value in (OUTSIDE[bound], math.nan) if bound != "any" else ():
            with pytest.raises(ValueError) as refused:
                setattr(learner, name, value)
            assert str(refused.value) == f"{name} must be {bound}, got {value}"
            assert getattr(learner, name, None) is before
    session.close()


@pytest.mark.parametrize("algo", SPECS)
def test_every_number_in_the_table_is_declared_by_a_learner(algo: str) -> None:
    session = open_session(tiny(algo, Path("unused"), threads=1))
    parts = [part for part in session.algorithm.modules() if isinstance(part, Algorithm)]
    numbers = {value.key for part in parts for owner in type(part).__mro__ for value in vars(owner).values()
               if isinstance(value, Number)}  # fmt: skip
    assert set(session.algorithm.numbers) - {"alpha"} <= numbers  # SAC's temperature is a number or a parameter
    session.close()


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


def test_a_declared_number_is_an_argument_with_its_default() -> None:
    class Small(Algorithm):
        learning_rate = Number(">= 0", 0.5)
        size = Setting(">= 1", 3)

    class Smaller(Small):
        size = Setting(">= 1", 2)

    made = Smaller(learning_rate=0.25)
    assert (made.learning_rate, made.size, made.optimizer_eps) == (0.25, 2, 1e-8)
    assert dict(made.numbers) == {"optimizer_eps": 1e-8, "max_grad_norm": None, "learning_rate": 0.25}
    with pytest.raises(ValueError, match=r"size must be >= 1, got 0$"):
        Smaller(size=0)
    with pytest.raises(TypeError, match=r"^Small\(\) got an unexpected keyword argument 'sise'$"):
        Small(sise=1)
