"""Deployment without torch: train, export to ONNX, act with numpy and onnxruntime alone (extra `export`)."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from rl_training import PPO


def main(total_timesteps: int = 50_000) -> int:
    """The action of the exported policy for one observation."""
    with TemporaryDirectory() as folder:
        ppo = PPO("CartPole-v1", output_dir=folder)
        ppo.learn(total_timesteps)
        checkpoint = ppo.save(Path(folder) / "policy.ckpt")

        from rl_training.tools.export import export_policy

        exported = export_policy(checkpoint, "onnx").path

        from rl_training.deploy import Policy  # all that the target machine needs, next to the file

        action: int = Policy(exported).predict([0.0, 0.0, 0.05, 0.0])
    print(f"action {action}")
    return action


if __name__ == "__main__":
    main()
