"""Dreamer through its trainer, on every kind of action and observation."""

from registry_contract import TrainerSmoke


class TestTrainer(TrainerSmoke):
    algo = "dreamer"
