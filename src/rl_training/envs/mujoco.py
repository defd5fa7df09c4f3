"""MuJoCo models as device environments: thousands of worlds that MuJoCo Warp steps together.

The state of a world is a dict of tensors. A step copies them into the physics' own buffers, launches it, and copies
them out, so that a checkpoint, a reset and a captured graph need nothing but the state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from rl_training.envs.device import DeviceEnvironment, space_of
from rl_training.envs.rendering import hear_mujoco
from rl_training.errors import UserError, install

State = dict[str, Tensor]
INTEGRATED = ("qpos", "qvel", "qacc_warmstart")  # what a step reads, next to the controls
OVERFLOW = "overflow"  # bit mask of what did not fit into the physics' buffers since an episode began
OF_MODEL = "model."  # a field of the model that differs between worlds
AFTER_FORCES = {"cacc", "cfrc_int", "cfrc_ext"}  # computed from the constraint forces, on request
WITH_FORCES = {"qfrc_constraint", "qfrc_actuator", "actuator_force", "qacc"}  # not from positions and velocities alone
MOST_PLACED = 4096  # worlds that are reset together


class Worlds(Protocol):
    """Steps worlds of one model from state to state."""

    def step(self, state: State, ctrl: Tensor, times: int) -> State:
        """The state after `times` steps with the same controls."""

    def place(self, state: State) -> State:
        """The state with the fields that follow from positions and velocities."""


class WarpWorlds:
    """N worlds in MuJoCo Warp, whose arrays are shared with torch."""

    def __init__(
        self, model: Any, count: int, device: torch.device, fields: Sequence[str], varied: Sequence[str],
        limits: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.mjw, self.wp = import_warp()
        self.device, self.fields = device, fields
        with self.wp.ScopedDevice(str(device)):
            self.model = self.mjw.put_model(with_known_solver(model), dict.fromkeys(varied, count))
            self.data = self.mjw.make_data(model, nworld=count, **limits)
        self.model.opt.warn_overflow = 0  # `MujocoEnvironment.fault` reads the mask instead
        names = (*INTEGRATED, "ctrl", OVERFLOW, *fields)
        self.tensors: State = {name: self.wp.to_torch(getattr(self.data, name)) for name in names}
        self.tensors |= {OF_MODEL + name: self.wp.to_torch(getattr(self.model, name)) for name in varied}

    def step(self, state: State, ctrl: Tensor, times: int) -> State:
        """The state after `times` steps with the same controls."""
        self._load(state, ctrl)
        with self._launching():
            for _ in range(times):
                self.mjw.step(self.model, self.data)
            if AFTER_FORCES.intersection(self.fields):
                self.mjw.rne_postconstraint(self.model, self.data)
        return state | self._read((*INTEGRATED, *self.fields)) | {OVERFLOW: state[OVERFLOW] | self.tensors[OVERFLOW]}

    def place(self, state: State) -> State:
        """The state with the fields that follow from positions and velocities; forces on bodies are 0."""
        self._load(state, torch.zeros_like(self.tensors["ctrl"]))
        for name in AFTER_FORCES.intersection(self.fields):
            self.tensors[name].zero_()
        with self._launching():
            if WITH_FORCES.intersection(self.fields):
                self.mjw.forward(self.model, self.data)
            else:
                for stage in (self.mjw.kinematics, self.mjw.com_pos, self.mjw.com_vel):
                    stage(self.model, self.data)
        return state | self._read(self.fields)

    def _load(self, state: State, ctrl: Tensor) -> None:
        for name in INTEGRATED:
            self.tensors[name].copy_(state[name])
        for name in state:
            if name.startswith(OF_MODEL):
                self.tensors[name].copy_(state[name])
        self.tensors["ctrl"].copy_(ctrl)
        self.tensors[OVERFLOW].zero_()

    def _read(self, names: Sequence[str]) -> State:
        return {name: self.tensors[name].clone() for name in names}

    @contextmanager
    def _launching(self) -> Iterator[None]:
        """Launch kernels on torch's current stream, and into the graph that torch is capturing, if it is."""
        wp = self.wp
        if self.device.type != "cuda":
            with wp.ScopedDevice("cpu"):
                yield
            return
        stream = wp.stream_from_torch(torch.cuda.current_stream(self.device))
        with wp.ScopedStream(stream, sync_enter=False, sync_exit=False):
            captures = torch.cuda.is_current_stream_capturing()
            if captures:
                wp.capture_begin(stream=stream, external=True, capture_mode=wp.CaptureMode.RELAXED)
            yield
            if captures:
                wp.capture_end(stream=stream)


class HostWorlds:
    """The same in MuJoCo itself, one world after the other, on the CPU."""

    def __init__(self, model: Any, fields: Sequence[str], varied: Sequence[str]) -> None:
        import mujoco

        self.mujoco, self.fields = mujoco, fields
        self.model = copy.copy(model) if varied else model
        self.data = mujoco.MjData(self.model)

    def step(self, state: State, ctrl: Tensor, times: int) -> State:
        """The state after `times` steps with the same controls."""
        rows = []
        for i, controls in enumerate(ctrl.numpy()):
            self._load(state, i)
            self.data.ctrl[:] = controls
            self.mujoco.mj_step(self.model, self.data, times)
            self.mujoco.mj_rnePostConstraint(self.model, self.data)
            rows.append(self._row((*INTEGRATED, *self.fields)))
        return state | join(rows)

    def place(self, state: State) -> State:
        """The state with the fields that follow from positions and velocities; forces on bodies are 0."""
        rows = []
        for i in range(len(state["qpos"])):
            self._load(state, i)
            self.mujoco.mj_forward(self.model, self.data)
            rows.append(self._row(self.fields))
        return state | join(rows)

    def _load(self, state: State, row: int) -> None:
        self.mujoco.mj_resetData(self.model, self.data)
        for name in INTEGRATED:
            getattr(self.data, name)[:] = state[name][row].numpy()
        for name in state:
            if name.startswith(OF_MODEL):
                getattr(self.model, name.removeprefix(OF_MODEL))[:] = state[name][row].numpy()

    def _row(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: np.array(getattr(self.data, name)) for name in names}


def join(rows: Sequence[Mapping[str, Any]]) -> State:
    """The rows as float32 tensors [N, ...]."""
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])).float() for name in rows[0]}


def import_warp() -> tuple[Any, Any]:
    """MuJoCo Warp and Warp."""
    try:
        import mujoco_warp
        import warp
    except ImportError:
        why = "physics for vectorization 'device' on a GPU is MuJoCo Warp, which is not installed"
        raise UserError(f"{why}: {install('warp')}.") from None
    settings: Any = warp.config
    settings.quiet = True
    return mujoco_warp, warp


def with_known_solver(model: Any) -> Any:
    """The model, with Newton's solver in place of PGS, which MuJoCo Warp does not have."""
    import mujoco

    if model.opt.solver != mujoco.mjtSolver.mjSOL_PGS:
        return model
    model = copy.copy(model)
    model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    return model


def can_touch(model: Any) -> bool:
    """Whether two of the model's geoms can be in contact."""
    meets = model.geom_contype[:, None] & model.geom_conaffinity
    return bool(((meets | meets.T) * (model.geom_bodyid[:, None] != model.geom_bodyid)).any())


WORLDS: WeakKeyDictionary[Any, dict[tuple[int, str], Worlds]] = WeakKeyDictionary()  # the buffers of each environment
COPIES: WeakKeyDictionary[Any, dict[tuple[str, str], Tensor]] = WeakKeyDictionary()  # of its constants, on devices


class MujocoEnvironment(DeviceEnvironment):
    """A task of your own: a MuJoCo model and a few functions of named tensors.

    `state["qpos"]`, `state["qvel"]` and the `fields` of `mujoco.MjData` that you name are tensors `[N, ...]`. Define
    `observe` and `reward`; `terminated` if episodes can end early, `start` if they begin elsewhere than near `qpos0`,
    and `vary` for models that differ between worlds.
    """

    fields: tuple[str, ...] = ()
    varied: tuple[str, ...] = ()  # fields of `mujoco.MjModel` that `vary` draws
    frame_skip: int = 1
    start_noise: float = 0.01
    vary_noise: int = 0  # random numbers that `vary` gets per episode
    limits: Mapping[str, int] = {}  # `njmax`, `nconmax`: the sizes of MuJoCo Warp's buffers for one world
    capture_mode = "relaxed"  # MuJoCo Warp allocates memory in a step
    physics = "auto"  # "mujoco" on a CPU and "warp" on a GPU, or one of them

    def __init__(self, model: Any) -> None:
        """`model` is a path of an MJCF file, its text, or an `MjModel`."""
        import mujoco

        hear_mujoco()
        if not isinstance(model, mujoco.MjModel):
            read = mujoco.MjModel.from_xml_string if "<" in str(model) else mujoco.MjModel.from_xml_path
            model = read(str(model))
        low, high = model.actuator_ctrlrange.astype(np.float32).T
        self.prepare(model, gs.Box(low, high, dtype=np.float32), model.qpos0)
        with self.naming_fields():
            self.observation_space = space_of(self.observe(self.reset(torch.full((1, self.reset_noise), 0.5))))

    def prepare(self, model: Any, action_space: gs.Box, qpos: Any) -> None:
        """Set the model, the actions, and the positions around which episodes start."""
        self.model, self.action_space = model, action_space
        self.dt = float(model.opt.timestep) * self.frame_skip
        self.reset_noise = model.nq + model.nv + self.vary_noise
        self.qpos = torch.as_tensor(np.array(qpos), dtype=torch.float32)

    def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
        """Rewards [N] of a step."""
        raise NotImplementedError("define reward(before, after, actions)")

    @contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Turn the KeyError of a field of the data that is not in `fields` into a sentence."""
        try:
            yield
        except KeyError as error:
            import mujoco

            name = error.args[0]
            if not isinstance(name, str) or not hasattr(mujoco.MjData, name):
                raise
            wanted = f"name it in the class: fields = {(*self.fields, name)!r}"
            raise UserError(f"{type(self).__name__} reads state[{name!r}], which is not in fields; {wanted}.") from None

    def terminated(self, state: State) -> Tensor:
        """Whether an episode ends in this state, [N]."""
        return torch.zeros_like(state["qpos"][:, 0], dtype=torch.bool)

    def start(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """First positions and velocities, from uniform noise [N, nq + nv]."""
        spread = (2.0 * noise - 1.0) * self.start_noise
        moved, qvel = spread.split([self.model.nq, self.model.nv], -1)
        return moved + self.constant("qpos", noise), qvel.clone()

    def constant(self, name: str, like: Tensor) -> Tensor:
        """The tensor `self.<name>` on the device of another; copied once, since a CUDA graph cannot hold the copy."""
        made, key = COPIES.setdefault(self, {}), (name, str(like.device))
        if key not in made:
            made[key] = getattr(self, name).to(like.device)
        return made[key]

    def vary(self, noise: Tensor) -> State:
        """The `varied` fields of each world's model, [N, ...], from uniform noise [N, vary_noise]."""
        return {}

    def reset(self, noise: Tensor) -> State:
        """The first states of N episodes."""
        starts, varies = noise.split([self.reset_noise - self.vary_noise, self.vary_noise], -1)
        qpos, qvel = self.start(starts)
        overflow = torch.zeros_like(qpos[:, 0], dtype=torch.int32)
        state = {"qpos": qpos, "qvel": qvel, "qacc_warmstart": torch.zeros_like(qvel), OVERFLOW: overflow}
        state |= {OF_MODEL + name: value for name, value in self.vary(varies).items()}
        if not self.fields:
            return state
        size = next(size for size in range(min(len(qpos), MOST_PLACED), 0, -1) if len(qpos) % size == 0)
        parts = zip(*(part.split(size) for part in state.values()), strict=True)
        worlds = self.worlds(size, qpos.device)
        placed = [worlds.place(dict(zip(state, part, strict=True))) for part in parts]
        return {name: torch.cat([part[name] for part in placed]) for name in placed[0]}

    def step(self, state: State, actions: Tensor, noise: Tensor) -> tuple[State, Tensor, Tensor]:
        """Launch the physics; what follows is computed from the states before and after."""
        after = self.worlds(len(actions), actions.device).step(state, actions, self.frame_skip)
        with self.naming_fields():
            return after, self.reward(state, after, actions), self.terminated(after)

    def fault(self, state: State) -> str:
        """The buffers of MuJoCo Warp that were too small for some world, which makes its contacts wrong."""
        found = int(state[OVERFLOW].max())
        if not found:
            return ""
        mjw, _ = import_warp()
        masks = state[OVERFLOW].unique().tolist()
        serious = mjw.OverflowType.ALL & ~(mjw.OverflowType.ITERATIONS | mjw.OverflowType.LS_ITERATIONS)
        names = [kind.name for kind in mjw.OverflowType if kind & serious and any(mask & kind for mask in masks)]
        if not names:
            return ""
        buffers = "MuJoCo Warp's buffers overflowed"
        return f"{buffers} ({', '.join(names)}), so contacts are missing; raise njmax or nconmax in `limits`"

    def why_inexact(self, device: torch.device) -> str:
        """On a GPU, the order in which contact forces are added is not fixed."""
        if not self.uses_warp(device) or device.type == "cpu" or not can_touch(self.model):
            return ""
        return "MuJoCo Warp adds contact forces in an order that changes from run to run, so no resume is exact"

    def uses_warp(self, device: torch.device) -> bool:
        """Whether the physics is MuJoCo Warp there."""
        return self.physics == "warp" or (self.physics == "auto" and device.type != "cpu")

    def worlds(self, count: int, device: torch.device) -> Worlds:
        """The buffers for this many worlds."""
        made = WORLDS.setdefault(self, {})
        key = count, str(device)
        if key not in made:
            if self.uses_warp(device):
                made[key] = WarpWorlds(self.model, count, device, self.fields, self.varied, self.limits)
            else:
                made[key] = HostWorlds(self.model, self.fields, self.varied)
        return made[key]
