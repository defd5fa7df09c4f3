"""The pure functions of `rl_training.ops`, under the name that scripts use: `rl_training.algorithms.ops.returns`."""

import sys

from rl_training.ops import distributional, losses, policy, returns

for _module in (distributional, losses, policy, returns):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
