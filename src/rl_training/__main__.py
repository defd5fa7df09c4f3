"""`python -m rl_training` is the command `rl-training`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    here = os.getcwd()
    if sys.path[0] in ("", here) and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # `-m` puts it there, and a stray yaml.py in it must not run
        if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here:
            sys.path.append(here)  # this package itself, for worker processes
    from rl_training.cli.main import main

    main()
