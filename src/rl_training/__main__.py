"""`python -m rl_training` is the command `rl-training`."""

from __future__ import annotations

from rl_training.cli.main import main

if __name__ == "__main__":
    main()
