"""Configs, checkpoint files and run logs (low); the registry and the experiment manager (high)."""
