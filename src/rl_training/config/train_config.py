"""`TrainConfig`, the validated description of one run, and presets, which can be named from any directory."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PrivateAttr, model_validator

from rl_training.errors import UserError, first_line, near_name
from rl_training.validation import LARGEST_TREE, READ, StrictModel, check_plain, validate

MOST_PROCESSES = 1024
WORKER_BACKENDS = ("local_async", "ray")  # the run is bit-identical
LARGEST_TEXT = 200_000  # characters of a config
Presets = files("rl_training").joinpath("assets/configs")
Amount = Annotated[float, Field(ge=0, le=1e6)]


class RayResources(StrictModel):
    """The resources that each worker reserves on a Ray cluster."""

    cpus: Amount = Field(1.0, description="CPUs that each worker reserves.")
    gpus: Amount = Field(0.0, description="GPUs that each worker reserves, for its environments only.")
    resources: dict[str, Amount] = Field({}, description="Custom resources that each worker reserves, like {rtx: 1}.")

    @model_validator(mode="after")
    def _check_names(self) -> RayResources:
        for name in {"CPU", "GPU"} & self.resources.keys():
            raise ValueError(f"resources.{name} is {self.resources[name]:g}; set {name.lower()}s of ray instead")
        return self

    def needs(self) -> dict[str, float]:
        """By Ray's names."""
        return {"CPU": self.cpus, "GPU": self.gpus, **self.resources}


def name_again(env: str | None, modules: Iterable[str]) -> str:
    """The `--env` and `--import` that the next command needs, because a file alone never calls a user's function."""
    options = [*([] if env is None else [("--env", env)]), *(("--import", name) for name in dict.fromkeys(modules))]
    return "".join(f" {option} {shlex.quote(name)}" for option, name in options)


class TrainConfig(StrictModel):
    """One training run. The YAML keys of a preset are these fields.

    An algorithm has its own defaults for some fields (`AlgorithmSpec.defaults`), used where a config does not set them.
    """

    algo: str = Field(min_length=1, description="Registry name of the algorithm, e.g. ppo.")
    env_id: str = Field(min_length=1, description="Gymnasium id, or module:Class for your own environment.")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of all random numbers of the run.")
    total_timesteps: int = Field(
        ge=1, description="Budget in transitions of all environments; the turn (a rollout) that reaches it is finished."
    )
    output_dir: str = Field("runs", min_length=1, description="Folder in which the run's folder is created.")
    execution_backend: Literal["local_sync", "local_async", "ray"] = Field(
        "local_sync", description="Where environments are stepped: local_sync in this process, local_async in worker "
        "processes, ray in workers on a Ray cluster.",
    )  # fmt: skip
    num_workers: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="Workers of local_async and ray, which share the environments; auto: all cores but one."
    )
    worker_order: Literal["fixed", "first"] = Field(
        "fixed", description="Which answers a turn uses: fixed, one from every worker; first, those that arrive first."
    )
    max_policy_lag: int | None = Field(
        None, ge=0, description="Drop experience whose weights are more than this many updates old; null: never."
    )
    max_worker_restarts: int = Field(100, ge=0, description="Maximum restarts of workers that died or stalled.")
    ray: RayResources = Field(default_factory=RayResources, description="Resources that each Ray worker reserves.")
    device: str = Field("auto", description="cpu, cuda, cuda:<index> or auto (a GPU if there is one and it is faster).")
    num_envs: int = Field(1, ge=1, le=65536, description="Environments stepped together.")
    eval_episodes: int = Field(5, ge=0, le=100_000, description="Episodes per evaluation; 0 switches evaluation off.")
    eval_max_steps: int | None = Field(
        None, ge=1, description="Maximum steps of an evaluation episode; null: the environment's limit, or 10,000."
    )
    eval_deterministic: bool = Field(True, description="Evaluate with the most likely actions; false: sampled actions.")
    log_interval: int = Field(1, ge=1, description="Updates between rows of metrics.jsonl.")
    checkpoint_interval: int = Field(0, ge=0, description="Environment steps between checkpoints; 0: every minute.")
    checkpoint_keep: int = Field(3, ge=0, description="How many step_<n> checkpoints to keep.")
    replay_in_checkpoint: bool = Field(True, description="Whether the latest checkpoint includes the replay buffer.")
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = Field("auto", description="Threads for torch.")
    vectorization: Literal["auto", "native", "sync", "async", "device"] = Field(
        "auto", description="How environments are stepped: native by their own vector code, sync one after another, "
        "async in processes, device as functions of tensors.",
    )  # fmt: skip
    worker_timeout: float = Field(
        300.0, gt=0, le=1e6, description="Maximum seconds for a step, start or reset of an environment's process."
    )
    accelerate: Literal["auto", "none", "graph", "compile"] = Field(
        "auto", description="How gradient steps run: none as plain code, graph as CUDA graphs, compile with "
        "torch.compile (on a GPU inside graphs); auto is graph on a GPU, none on a CPU.",
    )  # fmt: skip
    matmul_precision: Literal["highest", "high"] = Field(
        "highest", description="Precision of matrix products on a GPU: highest (float32), or high (TF32, faster)."
    )
    max_seconds: float | None = Field(
        None, gt=0, description="Stop after this many seconds of training, without evaluations, counted across resumes."
    )
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        ("tensorboard",), description="Where metrics go in addition to metrics.jsonl: tensorboard, wandb, mlflow."
    )
    name: str | None = Field(None, description="Name of the run's folder; null: algorithm, environment and time.")
    tags: tuple[str, ...] = Field((), description="Words stored with the run, and shown by wandb and mlflow.")
    benchmark: dict[str, Any] = Field({}, description="Notes stored with the run, for your own scripts.")
    algo_kwargs: dict[str, Any] = Field({}, description="Hyper-parameters of the algorithm.")
    env_kwargs: dict[str, Any] = Field({}, description="Arguments of the environment, max_episode_steps and wrappers.")
    _named: tuple[str, ...] | None = PrivateAttr(None)
    _given: tuple[str, ...] | None = PrivateAttr(None)

    def model_post_init(self, context: Any) -> None:
        """The user gave everything in a config made in Python; for one that was read, `naming` and `giving` say it."""
        self._named = self._given = () if context is READ else None

    @property
    def named(self) -> tuple[str, ...]:
        """Modules, environments and networks that the user named, so they may be called; a file names none."""
        return self.callables if self._named is None else self._named

    @property
    def named_options(self) -> str:
        """The `name_again` of a command that continues this run."""
        own = self.env_id if ":" in self.env_id and self.env_id in self.named else None
        modules = [name for name in self.named if ":" not in name and name != self.env_id]
        modules += [name.partition(":")[0] for name in self.callables[1:] if name in self.named]
        return name_again(own, modules)

    @property
    def callables(self) -> tuple[str, ...]:
        """The values that may name a function: the environment, and the user's own network."""
        network = self.algo_kwargs.get("network")
        return (self.env_id, network) if isinstance(network, str) else (self.env_id,)

    def naming(self, *names: str) -> TrainConfig:
        """A copy in which the user also named these modules or environments."""
        config = self.model_copy()
        config._named = (*self.named, *names)
        return config

    @property
    def given(self) -> tuple[str, ...]:
        """Fields and hyper-parameters that the user gave; the others are defaults or come from a preset."""
        return (*self.model_fields_set, *self.algo_kwargs) if self._given is None else self._given

    def giving(self, *names: str) -> TrainConfig:
        """A copy in which the user also gave these settings."""
        config = self.model_copy()
        config._given = (*self.given, *names)
        return config

    @property
    def has_workers(self) -> bool:
        """Whether environments are stepped by workers."""
        return self.execution_backend in WORKER_BACKENDS

    def __eq__(self, other: object) -> bool:
        """Compare fields only, not who named the environment."""
        return isinstance(other, TrainConfig) and self.model_dump() == other.model_dump()

    @model_validator(mode="after")
    def _check_choices(self) -> TrainConfig:
        most, workers = min(self.num_envs, MOST_PROCESSES), 1 if self.num_workers == "auto" else self.num_workers
        if workers > most:
            raise ValueError(f"num_workers is {workers}; it must be auto or from 1 to num_envs ({most})")
        if self.num_envs % workers and self.worker_order == "first" and self.has_workers:
            wanted = f"with worker_order 'first' it must divide num_envs ({self.num_envs})"
            raise ValueError(f"num_workers is {workers}; {wanted}")
        if self.has_workers and self.vectorization in ("async", "device"):
            backend = self.execution_backend
            raise ValueError(f"vectorization is {self.vectorization!r}; with {backend} it must be auto, native or sync")
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", self.device):
            raise ValueError(f"device is {self.device!r}; it must be auto, cpu, cuda or cuda:<index>")
        if self.name is not None and not re.fullmatch(r"\w[\w.-]{0,99}", self.name):
            raise ValueError(f"name is {self.name!r}; it must be a word of letters, digits, '.', '_' and '-'")
        if self.vectorization == "async" and self.num_envs > MOST_PROCESSES:
            raise ValueError(f"num_envs is {self.num_envs}; async runs a process for each, at most {MOST_PROCESSES}")
        for name in ("benchmark", "env_kwargs"):  # the algorithm checks its own
            check_plain(getattr(self, name), name)
        return self


def load_config(source: str | Path | Mapping[str, Any] | TrainConfig) -> TrainConfig:
    """A config from a file, from a packaged preset (`ppo/cartpole`, `configs/ppo/cartpole.yaml`), or from a mapping."""
    if isinstance(source, TrainConfig):
        return source
    if isinstance(source, Mapping):
        config = validate(TrainConfig, source, "config")
        return config.naming(*config.callables).giving(*settings_in(source))  # a mapping comes from the user's code
    return validate(TrainConfig, data := read_yaml(source), str(source)).giving(*settings_in(data, source))


def settings_in(data: Mapping[str, Any], source: str | Path | None = None) -> tuple[str, ...]:
    """Names of the fields and hyper-parameters that a user gave in this mapping; none in a packaged preset."""
    if source is not None and not Path(source).is_file():
        return ()
    inner = data.get("algo_kwargs")
    return (*data, *(inner if isinstance(inner, Mapping) else ()))


def read_yaml(source: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, or in the packaged preset of that name when there is no such file."""
    path = Path(source)
    try:
        if path.is_file() and path.stat().st_size > LARGEST_TEXT:
            raise UserError(f"{source} is larger than {LARGEST_TEXT:,} bytes; a config is a short YAML file.")
        data = parse_yaml(path.read_text(encoding="utf-8") if path.is_file() else _preset_text(str(source)))
    except UserError:
        raise
    except Exception as error:  # a value that does not match its tag can fail in any way
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f" (line {mark.line + 1})" if mark is not None else ""
        deep = "it is nested too deeply" if isinstance(error, RecursionError) else None
        raise UserError(f"{source} cannot be read as YAML{place}: {problem or deep or first_line(error)}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{source} contains a {type(data).__name__}; a config is a mapping of names to values.")
    return data


def parse_yaml(text: str) -> Any:
    """The plain data in a YAML text; duplicate keys and aliases that expand to too many values are errors."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        _count_values(node, {})
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _count_values(node: Any, counted: dict[int, int]) -> int:
    """Count the values under a node with all aliases and merges expanded: the cost of reading it."""
    if id(node) in counted:
        return counted[id(node)]
    counted[id(node)] = LARGEST_TREE  # until it is known; an alias inside itself never ends
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    if isinstance(node, yaml.MappingNode):
        names = Counter(key.value for key, _ in parts if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        if twice := [name for name, count in names.items() if count > 1]:
            raise yaml.MarkedYAMLError(problem=f"the key {twice[0][:60]!r} occurs twice", problem_mark=node.start_mark)
        parts = [part for pair in parts for part in pair]
    counted[id(node)] = 1 + sum(_count_values(part, counted) for part in parts)
    if counted[id(node)] > LARGEST_TREE:
        raise yaml.MarkedYAMLError(problem=f"it holds more than {LARGEST_TREE} values", problem_mark=node.start_mark)
    return counted[id(node)]


def list_presets() -> list[str]:
    """Names of the packaged presets, such as `ppo/cartpole`."""
    folders = [folder for folder in Presets.iterdir() if folder.is_dir()]
    found = [(folder.name, file.name) for folder in folders for file in folder.iterdir()]
    return sorted(f"{folder}/{name.removesuffix('.yaml')}" for folder, name in found if name.endswith(".yaml"))


def read_reached() -> dict[str, dict[str, float]]:
    """Results of recorded runs by preset: median `score` over `seeds`, and the maximum number of `steps`."""
    text = files("rl_training").joinpath("assets/reached.yaml").read_text(encoding="utf-8")
    reached: dict[str, dict[str, float]] = yaml.safe_load(text)
    return reached


def names_config(text: str) -> bool:
    """Whether a text names a config (a file, a YAML path or a preset) rather than an environment."""
    folder, slash, _ = _preset_name(text).partition("/")
    in_presets = bool(slash) and Presets.joinpath(folder).is_dir()
    return in_presets or text.endswith((".yaml", ".yml")) or os.path.isfile(text)


def _preset_name(text: str) -> str:
    return text.replace("\\", "/").removeprefix("./").removeprefix("configs/").removesuffix(".yaml")


def _preset_text(name: str) -> str:
    preset = _preset_name(name)
    if own := [one for one in list_presets() if one.startswith(f"{preset}/")]:
        some = ", ".join(own[:4]) + (", ..." if len(own) > 4 else "")
        raise UserError(f"{name!r} is an algorithm; give one of its presets ({some}), or --algo and --env.")
    if preset not in list_presets():
        near = near_name(preset, list_presets())
        hint = "rl-training config --list shows the presets." if near is None else f"did you mean {near!r}?"
        raise UserError(f"{name!r} is neither a file nor a packaged preset; {hint}")
    return Presets.joinpath(f"{preset}.yaml").read_text(encoding="utf-8")


def dump_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as YAML, in the given order."""
    return yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)
