"""Steps/s of two versions of this package, alternating: compare_versions.py OLD_SRC NEW_SRC [--only ppo,dqn].

A number is the median over rounds of new/old, by wall clock and by CPU time; on a busy machine, use the second. Each
version's process has imported and warmed up before the first round, and sleeps while the other one works.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sides import Side, our_speed, serve

# preset -> steps of one round, about a second or two
STEPS = {
    "ppo/cartpole": 40_000, "a2c/cartpole": 20_000, "trpo/cartpole": 30_000, "impala/cartpole": 40_000,
    "appo/cartpole": 30_000, "dqn/cartpole": 6_000, "qr_dqn/cartpole": 4_000, "sac/pendulum": 1_250,
    "td3/pendulum": 1_400, "c51_dqn/cartpole": 3_000, "iqn/cartpole": 2_500, "fqf/cartpole": 2_500,
    "rainbow_dqn/cartpole": 2_500, "ddpg/pendulum": 1_400, "d4pg/pendulum": 1_400, "naf/pendulum": 1_500,
    "rlpd/pendulum": 1_050, "gail/cartpole": 16_000,
}  # fmt: skip


def speed(job: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Steps and seconds of one run."""
    from rl_training.experiment.config import load_config

    config = load_config(job["name"]).model_copy(update={"total_timesteps": job["steps"], "log_interval": 100})
    return our_speed(config, job, folder)


def main() -> None:
    """Measure and print a table."""
    if "--work" in sys.argv:
        return serve({(side, "speed"): speed for side in ("old", "new")})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs=2, type=Path, metavar="SRC", help="folder with rl_training, old then new")
    parser.add_argument("--only", default=",".join(STEPS), help="presets or algorithms, by comma")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    names = [name for name in STEPS if name in wanted or name.split("/")[0] in wanted]
    sides = [
        Side(__file__, side, PYTHONPATH=str(source.resolve()))
        for side, source in zip(("old", "new"), arguments.sources, strict=True)
    ]
    print("| preset | old, steps/s | new, steps/s | new/old | of CPU time | rounds |")
    print("| --- | --: | --: | --: | --: | --- |")
    for name in names:
        for side in sides:
            side.run("speed", name, steps=STEPS[name] // 4, threads=arguments.threads)
        rates: dict[str, list[tuple[float, float]]] = {"old": [], "new": []}
        for number in range(arguments.rounds):
            for side in sides if number % 2 else sides[::-1]:
                result = side.run("speed", name, steps=STEPS[name], threads=arguments.threads)
                rates[side.side].append((result["steps"] / result["seconds"], result["steps"] / result["cpu_seconds"]))
        pairs = list(zip(rates["old"], rates["new"], strict=True))
        wall, cpu = ([new[clock] / old[clock] for old, new in pairs] for clock in (0, 1))
        old, new = (statistics.median(rate[0] for rate in rates[side]) for side in ("old", "new"))
        spread = " ".join(f"{ratio:.2f}" for ratio in sorted(cpu))
        ratios = f"{statistics.median(wall):.2f} | {statistics.median(cpu):.2f} | {spread}"
        print(f"| {name} | {old:,.0f} | {new:,.0f} | {ratios} |", flush=True)
    for side in sides:
        side.close()


if __name__ == "__main__":
    main()
