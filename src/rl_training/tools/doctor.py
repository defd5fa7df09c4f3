"""Check this machine, and an environment with an algorithm: what works, what it costs, what to change."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces as gs

from rl_training.config.spec import AlgorithmSpec
from rl_training.config.train_config import TrainConfig
from rl_training.data.memory import format_bytes
from rl_training.envs.engines import choose_vectorization, make_engine
from rl_training.envs.factory import EnvRecipe, episode_limit, make_env
from rl_training.envs.hidden_state import checksum
from rl_training.envs.probe import Player, Probe, compare_restored, make_stepper, play_at_random, probe, reuses_arrays
from rl_training.envs.spaces import Array, EnvSpaces, in_words
from rl_training.envs.stepper import Stepper
from rl_training.envs.workers import WorkerFailure, Workers, pickle_registrations
from rl_training.errors import EnvironmentFailure, UserError, counted
from rl_training.play import closed_after
from rl_training.record.logger import format_duration
from rl_training.tools.bench import estimate_seconds, open_measured, storage_bytes

OK, WARN, FAIL = "ok", "warn", "fail"
STEPS = 200  # of the checks that compare step by step
SECONDS = 1.0  # of each timing
PROCESS_SECONDS = 60.0  # maximum time without an answer from an environment's process
SHOWN = 6  # parts or dimensions named one by one
LARGE = 10.0  # observations beyond this learn badly unless normalized


class Check(NamedTuple):
    """The result of one check, and what to do about it."""

    name: str
    status: str
    detail: str
    fix: str = ""


def check_process(recipe: EnvRecipe, seed: int = 0, timeout: float = PROCESS_SECONDS) -> Check:
    """Whether a process that plays the environment survives and answers; the other checks play it in this process."""
    try:
        player = partial(Player, pickle_registrations(), recipe, seed)
        with closing(Workers([player], recipe.env_id, timeout)) as workers:
            (steps,) = workers.call("play", 10 * STEPS, 2 * SECONDS)
    except WorkerFailure as error:
        return Check("process", FAIL, _without_advice(error), "Fix this first: it would end a run, or this check, too.")
    except (EnvironmentFailure, UserError) as error:
        return Check("process", WARN, _without_advice(error), "See the checks below.")
    return Check("process", OK, f"survives {counted(steps, 'step')} in its own process")


def run_checks(recipe: EnvRecipe, spec: AlgorithmSpec | None, config: TrainConfig) -> Iterator[Check]:
    """Every check, each as soon as it is done; ends after a group of checks of which one fails.

    Without `spec` the environment is checked alone.
    """
    lives = check_process(recipe, timeout=PROCESS_SECONDS if spec is None else config.worker_timeout)
    found = probe(recipe) if lives.status != FAIL else None  # it might never return
    if found is not None and recipe.made:
        yield from _guarded("simulator", partial(check_simulator, recipe, found.spaces), recipe.env_id)
        return
    yield lives
    if found is None:
        return
    measured = [] if spec is None else [_guarded("memory", partial(check_algorithm, config), config.env_id)]
    for group in (check_environment(recipe, found, spec), *measured):
        fails = False
        for check in group:
            fails = fails or check.status == FAIL
            yield check
        if fails:
            return


def check_simulator(recipe: EnvRecipe, spaces: EnvSpaces) -> Check:
    """Whether a `Simulator` takes a few steps with random actions; its rows cannot be checked one at a time."""
    rows = recipe.made[0].simulator.num_envs
    with closing(Stepper(make_engine(recipe, spaces, rows, 0, "device"), spaces, rows)) as stepper:
        stepper.start()
        for _ in range(STEPS):
            stepper.step(spaces.random_actions(np.random.default_rng(0), rows))
        saved = "can be saved" if stepper.engine.state_format else "cannot be saved, so a resume is not exact"
    return Check("simulator", OK, f"{STEPS} steps of {counted(rows, 'row')} with random actions; its state {saved}")


def check_environment(
    recipe: EnvRecipe, found: Probe, spec: AlgorithmSpec | None = None, seed: int = 0
) -> Iterator[Check]:
    """Every check of one environment, each as soon as it is done; `found` is the result of a first probe."""
    spaces, problems, step = found
    for problem in problems:
        yield Check(problem.name, WARN, problem.detail, f"{problem.fix[0].upper()}{problem.fix[1:]}.")
    checks: dict[str, Callable[[], Check | Iterator[Check]]] = {
        **({} if spec is None else {"algorithm": partial(check_support, spec, spaces)}),
        "action scaling": partial(check_action_scaling, spaces),
        "observations": partial(check_spaces, recipe, spaces, seed),
        "truncation": partial(check_truncation, recipe, spaces, seed),
        "episodes": partial(check_episodes, recipe, spaces, seed, spec),
        "determinism": partial(check_determinism, recipe, spaces, seed),
        "replay": partial(check_replay, recipe, spaces, seed),
        "step cost": partial(check_step_cost, recipe, spaces, seed),
    }
    said: set[str] = set()
    for name, check in checks.items():
        for one in _guarded(name, check, recipe.env_id, step):
            what = re.sub(r" \([^()]+, line \d+\)", "", one.detail)
            if one.status != FAIL or what not in said:  # what raises in one check raises in the others too
                yield one
            said.add(what)


def _guarded(name: str, check: Callable[[], Check | Iterator[Check]], env_id: str, place: str = "") -> Iterator[Check]:
    """The results of a check; an exception is one that fails. `place` is where the user defines `step`."""
    try:
        found = check()
        yield from [found] if isinstance(found, Check) else found
    except (Exception, SystemExit) as error:
        if isinstance(error, UserError):
            what, _, fix = str(error).partition("; ")
        else:
            known = isinstance(error, EnvironmentFailure)
            what, fix = _without_advice(error if known else EnvironmentFailure.from_error(env_id, error)), ""
        fix = fix or f"fix this first{'' if 'reset' in what else place}."
        yield Check(name, FAIL, what, f"{fix[0].upper()}{fix[1:]}")


def _without_advice(error: BaseException) -> str:
    return str(error).partition("; fix")[0]


def check_spaces(recipe: EnvRecipe, spaces: EnvSpaces, seed: int) -> Iterator[Check]:
    """Whether observations match the space, and are small enough to learn from."""
    rows = [np.array(step.next_obs) for step in play_at_random(recipe, spaces, seed, STEPS)]
    floats = spaces.floats_of(spaces.encode_rows(rows))
    detail = f"{_shorten(spaces.observation_space)}, read as {spaces.obs_kind} {list(spaces.obs_shape)}"
    if not np.isfinite(floats.astype(np.float64)).all():
        yield Check("observations", FAIL, f"{detail}: a NaN or infinity within {STEPS} steps",
                    "Return finite observations only.")  # fmt: skip
        return
    outside, fix = _find_outside(spaces, np.array(rows))
    yield Check("observations", WARN if outside else OK, f"{detail}{outside}", fix)
    largest = float(np.abs(floats).max(initial=0.0)) if spaces.obs_kind != "image" else 0.0
    if largest > LARGE and not spaces.normalize_observations:
        yield Check("observation size", WARN, f"values up to {largest:.3g} in random play",
                    "--set env_kwargs.wrappers.normalize_observation=true")  # fmt: skip
    yield Check("actions", OK, f"{_shorten(spaces.action_space)}, {spaces.action_kind}"
                + (", with action masks" if spaces.has_action_mask else ""))  # fmt: skip


def _find_outside(spaces: EnvSpaces, rows: Array) -> tuple[str, str]:
    """What is wrong with observations [N, ...] that are not in their space, and what to do; empty if none is."""
    space = spaces.row_space
    if not np.can_cast(rows.dtype, space.dtype):
        return f": they are {rows.dtype}", f"Return observations of the space's dtype, {space.dtype}."
    odd = np.argwhere((rows < space.low) | (rows > space.high))
    if not odd.size:
        return "", ""
    row, *at = (int(i) for i in odd[0])
    place = tuple(at)
    where = f" at {at}" if isinstance(spaces.observation_space, gs.Box) else ""
    bounds = f"[{space.low[place]:g}, {space.high[place]:g}]"
    return f": the value {rows[row][place]:.4g}{where} lies outside {bounds}", "Widen the bounds of the space, or clip."


def _shorten(space: gs.Space[Any]) -> str:
    return f"Dict of {_some(list(space.spaces))}" if isinstance(space, gs.Dict) else in_words(space)


def _some(names: list[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def check_support(spec: AlgorithmSpec, spaces: EnvSpaces) -> Check:
    """Whether the algorithm supports these spaces."""
    spec.check_support(spaces)
    return Check("algorithm", OK, f"{spec.name} takes {spaces.action_kind} actions and {spaces.obs_kind} observations")


def check_action_scaling(spaces: EnvSpaces) -> Check:
    """Whether the policy's range maps to the environment's and back."""
    space = spaces.action_space
    if not isinstance(space, gs.Box):
        return Check("action scaling", OK, "not needed: actions are choices")
    ends = np.stack([np.full(spaces.action_shape, end, np.float32) for end in (-1.0, 0.0, 1.0)])
    mapped = spaces.map_actions(ends)
    exact = np.allclose(mapped[[0, 2]], [space.low, space.high])
    exact = exact and np.allclose(spaces.unmap_actions(mapped), ends, atol=1e-4)
    ranges = [f"[{a:g}, {b:g}]" for a, b in zip(np.ravel(space.low), np.ravel(space.high), strict=True)]
    detail = f"[-1, 1] becomes {ranges[0] if len(set(ranges)) == 1 else _some(ranges)}"
    if not exact:
        return Check("action scaling", FAIL, f"{detail}, but not exactly", "Make the action space's bounds smaller.")
    return Check("action scaling", OK, detail)


def check_truncation(recipe: EnvRecipe, spaces: EnvSpaces, seed: int) -> Check:
    """Whether a time limit arrives as a truncation with the true last observation, and the next episode starts."""
    short = dataclasses.replace(recipe, max_episode_steps=1)
    vectorization = choose_vectorization("auto", short, 2)
    with closing(make_stepper(short, spaces, seed, 2, vectorization)) as stepper:
        stepper.start()
        step, episodes = stepper.step(spaces.random_actions(np.random.default_rng(seed), 2, stepper.masks))
        final = step.obs if stepper.resets_next_step else step.final_obs
    how = f"{'next' if stepper.resets_next_step else 'same'}-step autoreset, {vectorization}"
    if step.terminated.all():
        return Check("truncation", OK, f"not seen: both episodes terminated at their first step ({how})")
    if not (step.truncated | step.terminated).all() or len(episodes) != 2 or final is None:
        return Check("truncation", FAIL, f"a time limit of one step did not end the episodes ({how})",
                     "Return truncated=True at your own limit, and keep gymnasium's TimeLimit outermost.")  # fmt: skip
    if reuses_arrays(recipe, spaces, seed):
        return Check("truncation", WARN, f"a reset overwrites the last observation ({how})",
                     "Return a new array from step and reset, not one that is written again.")  # fmt: skip
    return Check("truncation", OK, f"distinguished from termination, with the true last observation ({how})")


def check_episodes(recipe: EnvRecipe, spaces: EnvSpaces, seed: int, spec: AlgorithmSpec | None = None) -> Check:
    """Whether episodes end in random play, and whether rewards are finite and of a reasonable size."""
    rewards, ends, cuts = [], 0, 0
    budget = time.perf_counter() + 2 * SECONDS
    for step in play_at_random(recipe, spaces, seed, 10 * STEPS):
        rewards.append(step.reward)
        ends, cuts = ends + bool(step.terminated), cuts + bool(step.truncated and not step.terminated)
        if time.perf_counter() > budget:
            break
    env = make_env(recipe)
    with closed_after([env], recipe.env_id):
        limit = episode_limit(env)
    finite = [reward for reward in rewards if math.isfinite(reward)]
    sizes = f"time limit {limit or 'none'}, reward {min(finite, default=0):.3g}..{max(finite, default=0):.3g}"
    detail = f"{ends} terminated, {cuts} truncated in {counted(len(rewards), 'step')}, {sizes}"
    if (odd := np.flatnonzero(~np.isfinite(rewards))).size:
        what = f"{detail}, but {rewards[odd[0]]} at step {odd[0] + 1:,}"
        return Check("episodes", FAIL, what, "Return finite rewards only.")
    if not ends and not cuts and limit is None:
        return Check("episodes", WARN, detail, "An episode may never end: --set env_kwargs.max_episode_steps=1000")
    if max(map(abs, rewards)) > 100 and not spaces.normalize_rewards:
        fix = "Rewards are large: --set env_kwargs.wrappers.normalize_reward=true"
        if spec is None:
            fix += " helps rollout learners and GAIL; for the others divide them in the environment."
        elif not spec.normalizes_rewards:
            fix = f"Rewards are large: {spec.name} does not normalize them; divide them in the environment."
        return Check("episodes", WARN, detail, fix)
    return Check("episodes", OK, detail)


def check_determinism(recipe: EnvRecipe, spaces: EnvSpaces, seed: int) -> Check:
    """Whether two environments with the same seed and actions behave the same."""
    copies = (play_at_random(recipe, spaces, seed, STEPS) for _ in range(2))
    for number, pair in enumerate(zip(*copies, strict=True)):
        # a NaN in both is not a difference; another check reports it
        seen = ((np.asarray(step.next_obs), step.reward, step.terminated, step.truncated) for step in pair)
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*seen, strict=True))
        one, other = (checksum((step.info or {}).get("action_mask")) for step in pair)
        if not same or one != other:
            return Check("determinism", WARN, f"two copies with the same seed and actions differ at step {number}",
                         "Draw all randomness from self.np_random, seeded by super().reset(seed=seed).")  # fmt: skip
    return Check("determinism", OK, f"two copies agree in every value over {STEPS} steps")


def check_replay(recipe: EnvRecipe, spaces: EnvSpaces, seed: int) -> Check:
    """Whether a new copy, restored to the middle of an episode as in a resume, continues like the original.

    Checked early and late in the original's life and through several resets, as state may carry over between episodes.
    """
    short = dataclasses.replace(recipe, max_episode_steps=20)
    attributes = ""
    for tried, before in ((short, 50), (short, 330), (recipe, 2 * STEPS - 70)):
        found = compare_restored(tried, spaces, seed, before, 100)
        if found.seen:
            detail = f"a copy restored after {before} steps has a different {found.seen[0]}, so resuming is not exact"
            return Check("replay", WARN, detail, "Let reset(seed=...) rebuild everything that an earlier episode may "
                         "have changed, its rewards' scale too.")  # fmt: skip
        attributes = found.describe_attributes() or attributes
    if attributes:
        detail = f"{attributes}; if a step depends on that, resuming is not exact"
        return Check("replay", WARN, detail, "Let reset(seed=...) set it, so that nothing carries over.")
    return Check("replay", OK, "episodes replay and continue exactly, also through resets, so resuming is exact")


def check_step_cost(recipe: EnvRecipe, spaces: EnvSpaces, seed: int, num_envs: int = 8) -> Check:
    """Microseconds per environment step of several environments, as a run would step them."""
    vectorization = choose_vectorization("auto", recipe, num_envs)
    rng = np.random.default_rng(seed)
    with closing(make_stepper(recipe, spaces, seed, num_envs, vectorization)) as stepper:
        begun = time.perf_counter()
        stepper.start()
        reset = (time.perf_counter() - begun) / num_envs
        steps, spent = 0, 0.0
        while spent < SECONDS and steps < 100 * STEPS:
            actions = spaces.random_actions(rng, num_envs, stepper.masks)
            begun = time.perf_counter()
            stepper.step(actions)
            spent += time.perf_counter() - begun
            steps += num_envs
    cost = 1e6 * spent / steps
    fix = "Steps are slow: rl-training bench tries worker processes and vectorization=async." if cost > 2000 else ""
    how = f"{counted(num_envs, 'environment')}, {vectorization}"
    detail = f"{cost:,.1f} µs per step ({how}), first reset {1e3 * reset:.3g} ms"
    return Check("step cost", WARN if fix else OK, detail, fix)


def check_algorithm(config: TrainConfig) -> Iterator[Check]:
    """The memory and time that the algorithm needs in this environment for its budget."""
    with closing(open_measured(config)) as session:
        weights = sum(tensor.numel() for tensor in session.algorithm.parameters())
        stored = storage_bytes(session)
        yield Check("memory", OK, f"{format_bytes(stored)} of experience ({counted(config.num_envs, 'environment')}), "
                    f"{weights:,} weights ({format_bytes(4 * weights)})")  # fmt: skip
        left = estimate_seconds(session, SECONDS)
    rate = f"{config.total_timesteps / left:,.0f} steps/s"
    where = f"{session.config.device}, {session.config.vectorization}"
    detail = f"{config.total_timesteps:,} steps in about {format_duration(left)} at {rate}"
    fix = "Shorten it with --total-timesteps, or see rl-training bench." if left > 24 * 3600 else ""
    yield Check("time", WARN if fix else OK, f"{detail} ({where})", fix)
