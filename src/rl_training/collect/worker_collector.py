"""Collect in workers: the learner learns while they act, and a run stays reproducible from its seed."""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from rl_training.algorithms.base import Array
from rl_training.collect.local import NOTHING, Behaviour, Collector, Lag
from rl_training.collect.worker_process import MEMORIES, SharedMemory, WorkerPlan
from rl_training.data.store import Experience, Request
from rl_training.envs.engines import REPLAY_SECONDS
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.workers import LOOK_EVERY, WorkerFailure
from rl_training.errors import EnvironmentFailure, UserError

MOST_TRIES = 3  # per request: if it kills a worker every time, the environment is at fault
DRAIN_SECONDS = 2.0  # how long the end of a run waits for pending answers
PACK_EVERY = 1024  # join the parts of an episode's actions into one after this many


class Flight(NamedTuple):
    """One request, which may go to several workers; `packed` is the behaviour that acts."""

    number: int
    request: Request
    packed: Array
    version: int


class WorkerRecord:
    """A worker's state after its last answer, and the actions of each environment since its episode or game began."""

    def __init__(self, num_envs: int) -> None:
        self.state: dict[str, Any] = {}
        self._actions: list[list[Array]] = [[] for _ in range(num_envs)]

    def follow(self, brief: dict[str, Any], columns: Experience, actions: Array) -> None:
        """Record an answer: the worker's `columns` and `actions` [T, n, ...], the latter in the environment's range."""
        self.state = {**brief, "stepper": {**brief["stepper"], "obs": columns.obs[columns.steps].copy()}}
        for env, (parts, episode) in enumerate(zip(self._actions, self.episodes(), strict=False)):
            earlier = len(actions) - episode["steps"]  # of these actions
            if earlier >= 0:
                parts.clear()
            parts.append(actions[max(0, earlier) :, env].copy())
            if len(parts) > PACK_EVERY:
                parts[:] = [np.concatenate(parts)]

    def whole_state(self) -> dict[str, Any]:
        """A state from which a new worker can continue; empty before the first answer."""
        if not self.episodes():
            return self.state
        stepper = self.state["stepper"]
        episodes = [
            {**{name: value for name, value in brief.items() if name != "steps"}, "actions": np.concatenate(parts)}
            for brief, parts in zip(self.episodes(), self._actions, strict=True)
        ]
        return {**self.state, "stepper": {**stepper, "engine": {"episodes": episodes}}}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `whole_state`."""
        self.state = state
        for parts, episode in zip(self._actions, self.episodes(), strict=False):
            parts[:] = [np.asarray(episode["actions"])]

    def episodes(self) -> list[dict[str, Any]]:
        """The current episode of each environment, where the engine replays episodes."""
        return self.state.get("stepper", {}).get("engine", {}).get("episodes", [])

    def replay_seconds(self) -> float:
        """How long replaying the episodes may take."""
        return REPLAY_SECONDS * max(sum(map(len, parts)) for parts in self._actions)


class WorkerCollector(Collector):
    """Environments in `num_workers` processes or actors, each with its columns of an experience.

    A turn takes the answers to the requests of the previous turn. When a worker's answer arrives, it gets its next
    request, with the current weights. So experience is always one turn old, however fast a worker is. A worker that
    dies or stalls is restarted from its state after its last answer, and gets the same request again.
    """

    part = "wait for workers"
    answers_again = False  # whether a worker may give several answers in one turn

    def __init__(
        self, plan: WorkerPlan, spaces: EnvSpaces, transport: SharedMemory, *, lag: int | None, timeout: float,
        max_restarts: int, max_lag: int | None = None,
    ) -> None:  # fmt: skip
        self.spaces, self.timeout, self.max_restarts, self.max_lag = spaces, timeout, max_restarts, max_lag
        self.num_envs, self.packed_size, self.columns = plan.layout.num_envs, plan.packed_size, plan.columns()
        self.transport, self.pool, self.experiences = transport, transport.pool, transport.experiences
        self.experience = self.experiences[0]  # to read sizes from
        self.lag = Lag(lag or 0)
        self.records: list[WorkerRecord] = []
        self._flights: list[Flight] = []  # the pending request of each worker
        self.abandon()
        self._answers: dict[int, tuple[int, dict[str, Any]]] = {}  # by place in the batch, with the worker
        self._steps, self._moved = transport.steps(), np.zeros(plan.num_workers)  # and when each last changed
        self._left = time.monotonic()  # when the learner last stopped waiting
        self._interruption: BaseException | None = None
        self._tries = [0] * plan.num_workers
        self._restarts = self._dropped = 0
        self._begun = time.perf_counter()
        self._waited = self._acted = 0.0
        self._told = [1, 0, 0, 0]
        self._lags: list[int] = []  # count, sum, least and most of the answers since the last row of metrics

    # a turn -----------------------------------------------------------------------------------------------------

    def collect(self, behaviour: Behaviour, request: Request) -> Experience:
        """Return the experience from the previous turn's weights, and send each worker its next request."""
        if request.is_empty:
            return NOTHING
        rows = max(request.steps, -(-request.transitions // self.num_envs))
        request = request._replace(steps=rows, transitions=0)
        if not self._flights:
            self._ask_all(self._prepare(behaviour, 0, request))
        later = request._replace(random=max(0, request.random - rows * self.num_envs))
        self.started = True
        self._answers.clear()
        while len(self._answers) < len(self.records):  # repeats if answers were too old
            following = self._prepare(behaviour, self._next_number(), later)
            experience = self._wait(following, behaviour.version)
        return self._join(experience)

    def _next_number(self) -> int:
        """The number of the next flight, which says where its weights and experience are."""
        return max(flight.number for flight in self._flights) + 1

    def _prepare(self, behaviour: Behaviour, number: int, request: Request) -> Flight:
        packed = self.lag.follow(behaviour)
        self.transport.send(number, packed)
        return Flight(number, request, packed, behaviour.version)

    def _ask_all(self, flight: Flight) -> None:
        self._flights, self._begun = [flight] * len(self.records), time.perf_counter()
        for index in range(len(self.records)):
            self._ask(index, flight)

    def _ask(self, index: int, flight: Flight) -> None:
        self._flights[index], self._moved[index] = flight, time.monotonic()
        try:
            self.transport.ask(index, flight.number, flight.request)
        except WorkerFailure as failure:
            self._restart(index, failure)

    def _wait(self, following: Flight, version: int) -> Experience:
        """Take one answer per worker, or fewer if that fills the batch, and send each of these workers the following
        request; return the experience that holds the last answer."""
        begun = time.perf_counter()
        owing = set(range(len(self.records)))
        away = time.monotonic() - self._left
        if not self.answers_again or away > self.timeout / 2:  # do not count the learner's own time
            self._moved[:] = time.monotonic()
        left = len(self.records)
        while left and len(self._answers) < len(self.records):
            if self._interruption is not None:
                raise self._interruption
            ready = self.pool.ready(owing, LOOK_EVERY)
            if not ready or self.answers_again:  # with `answers_again`, others may answer while one stalls
                self._restart_stalled(owing - set(ready))
            free = min(left, len(self.records) - len(self._answers))
            for index in sorted(ready, key=lambda index: (self._flights[index].version, index))[:free]:
                try:
                    answer = self.transport.receive(index, self._flights[index].number)
                except WorkerFailure as failure:
                    self._restart(index, failure)
                    continue
                self._tries[index] = 0
                left -= 1
                if not self.answers_again:
                    owing.discard(index)
                experience = self._take(index, answer, version)
                self._ask(index, following)
        self._waited += time.perf_counter() - begun
        self._left = time.monotonic()
        return experience

    def _restart_stalled(self, owing: set[int]) -> None:
        before, self._steps = self._steps, self.transport.steps()
        self._moved[before != self._steps] = time.monotonic()
        for index in sorted(owing):
            if self.pool.has_ended(index) or time.monotonic() - self._moved[index] > self.timeout:
                self._restart(index, self.pool.failure(index, self.timeout))
                self._moved[index] = time.monotonic()

    def _take(self, index: int, answer: dict[str, Any], version: int) -> Experience:
        """Record the worker's new state, and give its answer a place in the batch unless it is too old; return the
        experience that holds its columns."""
        experience = self.experiences[self._flights[index].number % MEMORIES]
        columns = experience.columns(*self.columns[index])
        columns.steps = answer["steps"]
        taken = columns.actions[: columns.steps]
        mapped = self.spaces.map_actions(taken.reshape(-1, *taken.shape[2:]))
        self.records[index].follow(answer["state"], columns, mapped.reshape(*taken.shape[:2], *mapped.shape[1:]))
        self._acted += answer["seconds"]
        lag = version - answer["version"]
        if self.max_lag is not None and lag > self.max_lag:
            self._dropped += answer["transitions"]
            return experience
        number, total, least, most = self._lags or (0, 0, lag, lag)
        self._lags = [number + 1, total + lag, min(least, lag), max(most, lag)]
        self._answers[self._place(index, columns)] = index, answer
        return experience

    def _place(self, index: int, columns: Experience) -> int:
        """The place in the batch of a worker's columns; here the worker has already written them there."""
        return index

    def _join(self, experience: Experience) -> Experience:
        answers = {place: answer for place, (_, answer) in self._answers.items()}
        experience.clear()
        experience.version = min(answer["version"] for answer in answers.values())
        experience.steps = answers[0]["steps"]
        experience.transitions = sum(answer["transitions"] for answer in answers.values())
        experience.has_resets = any(answer["has_resets"] for answer in answers.values())
        episodes = {place: iter(answer["episodes"]) for place, answer in answers.items()}
        place_of = np.repeat(range(len(self.columns)), [stop - first for first, stop in self.columns])
        ends = experience.terminated[: experience.steps] | experience.truncated[: experience.steps]
        experience.episodes = [next(episodes[place_of[env]]) for _, env in np.argwhere(ends)]
        return experience

    def _restart(self, index: int, failure: WorkerFailure) -> None:
        """Start a new worker from the last answer, with the same request; after too many restarts, raise `failure`."""
        while True:
            self._restarts += 1
            self._tries[index] += 1
            if self._restarts > self.max_restarts or self._tries[index] >= MOST_TRIES:
                raise failure
            warnings.warn(f"{failure} It is restarted from its last answer.", stacklevel=2)
            try:
                self.pool.restart(index)
                self._restore(index)
                self.transport.ask(index, self._flights[index].number, self._flights[index].request)
                return
            except WorkerFailure as error:
                failure = error

    def _restore(self, index: int) -> None:
        record = self.records[index]
        if record.state:
            self.pool.ask(index, "restore", record.whole_state())
            for sentence in self.pool.get(index, self.timeout + record.replay_seconds()):
                warnings.warn(f"{sentence} New episodes start in worker {index + 1}.", stacklevel=2)

    # the collector interface ------------------------------------------------------------------------------------

    def metrics(self, *, last: bool = False) -> dict[str, float]:
        """The age of the experience, shares of waiting time, restarts, and the steps that `max_policy_lag` dropped."""
        lived = max(time.perf_counter() - self._begun, 1e-9)
        number, total, least, most = self._lags or self._told
        if not last:
            self._told, self._lags = [number, total, least, most], []
        return {
            "policy_lag_min": float(least), "policy_lag": total / number, "policy_lag_max": float(most),
            "learner_waiting": self._waited / lived,
            "worker_waiting": max(0.0, 1.0 - self._acted / lived / len(self.records)),
            "worker_restarts": float(self._restarts), "worker_dropped": float(self._dropped),
        }  # fmt: skip

    def interrupt(self, error: BaseException) -> None:
        """Raise this instead of waiting any longer."""
        self._interruption = error

    def abandon(self) -> None:
        """Discard the current episodes."""
        self.started, self._flights = False, []
        self.records = [WorkerRecord(stop - first) for first, stop in self.columns]

    def state_dict(self) -> dict[str, Any]:
        """Every worker's state after its last answer, and the request in flight, if all have the same."""
        flight = self._flights[0] if self._flights and not self.answers_again else None
        asked = {} if flight is None else {**flight._asdict(), "request": list(flight.request)}
        states = [record.whole_state() for record in self.records] if self.started else []
        counted = {"lags": list(self._lags), "dropped": self._dropped}
        state = {"workers": states, "flight": asked, "weights": list(self.lag.packed)}
        return state | {name: value for name, value in counted.items() if value}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore every worker, and send the request that was in flight again, if all had the same."""
        flight, states = state["flight"], state["workers"]
        self._lags, self._dropped = [int(number) for number in state.get("lags", [])], int(state.get("dropped", 0))
        if not states:
            return []
        if len(states) != len(self.records) or bool(flight) == self.answers_again:
            raise UserError("it was saved with another number or order of workers.")
        if flight and len(flight["packed"]) != self.packed_size:
            raise UserError("it was saved with other networks.")
        self.lag.restore(state["weights"], self.packed_size)
        self.started = True
        sentences: list[str] = []
        for index, record in enumerate(self.records):
            record.restore(states[index])
            self.pool.ask(index, "restore", states[index])
        for index, record in enumerate(self.records):
            sentences += self.pool.get(index, self.timeout + record.replay_seconds())
        if flight:
            asked = Flight(**{**flight, "request": Request(*flight["request"])})
            self.transport.send(asked.number, asked.packed)
            self._ask_all(asked)
        return list(dict.fromkeys(sentences))

    def close(self) -> None:
        """End the workers; those that answer soon close their environments first."""
        try:
            deadline = time.monotonic() + DRAIN_SECONDS
            for index in range(len(self.records)):
                with suppress(EnvironmentFailure, UserError):
                    self.pool.get(index, max(0.0, deadline - time.monotonic()))
        finally:
            self.transport.close()


class FirstComers(WorkerCollector):
    """Takes as many answers in a turn as there are workers, from those that are ready first.

    Slow workers delay nothing, but a run depends on timing.

    The answers of one turn may be in the same columns of different memories, so they are copied into one batch.
    """

    answers_again = True

    def __init__(self, plan: WorkerPlan, *arguments: Any, **options: Any) -> None:
        super().__init__(plan, *arguments, **options)
        self.joined = Experience(plan.layout)

    def _next_number(self) -> int:
        """The smallest number that no pending request uses, so that no worker reads the weights with that number."""
        held = {flight.number for flight in self._flights}
        return next(number for number in count() if number not in held)

    def _place(self, index: int, columns: Experience) -> int:
        """Copy the answer to the worker's own columns, or to other ones if those are taken; return the place."""
        place = min(set(range(len(self.records))) - set(self._answers), key=lambda free: (free != index, free))
        for name, array in self.joined.columns(*self.columns[place]).arrays.items():
            array[:] = columns.arrays[name]
        return place

    def _join(self, experience: Experience) -> Experience:
        """The copies; `parts` say which environments they come from."""
        joined = super()._join(self.joined)
        joined.parts = [
            (np.arange(*self.columns[index]), joined.columns(*self.columns[place]))
            for place, (index, _) in self._answers.items()
        ]
        return joined
