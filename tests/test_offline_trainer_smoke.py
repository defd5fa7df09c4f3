"""Learners from recorded data in the trainer, for every kind of space: selections from the tests of all algorithms."""

from registry_contract import TrainerSmoke


class TestIQLTrainer(TrainerSmoke):
    algo = "iql"


class TestReBRACTrainer(TrainerSmoke):
    algo = "rebrac"


class TestCQLTrainer(TrainerSmoke):
    algo = "cql"
