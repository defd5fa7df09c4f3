"""A2C through its trainer, on every kind of action and observation, and its example script."""

from registry_contract import ReferenceScript, TrainerSmoke


class TestTrainer(TrainerSmoke):
    algo = "a2c"


class TestReferenceScript(ReferenceScript):
    script, preset = "a2c_cartpole_reference", "a2c/cartpole"
