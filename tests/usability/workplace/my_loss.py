"""PPO with a loss of one's own, as in the guide."""

import rl_training
from rl_training.algorithms.base import Number


class Weighted(rl_training.PPOAlgorithm):
    """PPO with a weight on every loss."""

    weight = Number("> 0", 2.0)

    def minibatch_step(self, rows):
        policy = self.policy.evaluate_actions(rows["obs"], rows["actions"])
        loss = -self.weight * (policy.logprobs * rows["advantages"]).mean()
        norm = self.optimizer.step(loss)
        return loss.detach() * loss.new_zeros(7) + norm


rl_training.register(Weighted, like="ppo")
