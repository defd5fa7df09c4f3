"""Every learner's constructor refuses numbers out of their bounds, in one sentence."""

from __future__ import annotations

import inspect
import math

import pytest

from resume_cases import SPECS
from rl_training.algorithms.bounds import BOUNDS

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
