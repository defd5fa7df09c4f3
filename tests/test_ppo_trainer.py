"""PPO through its trainer, on every kind of action and observation, and its example script."""

from registry_contract import ReferenceScript, TrainerSmoke


class TestTrainer(TrainerSmoke):
    algo = "ppo"


class TestReferenceScript(ReferenceScript):
    script, preset = "ppo_cartpole_reference", "ppo/cartpole"
