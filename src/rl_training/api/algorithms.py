"""The managed classes by name: `from rl_training.api.algorithms import PPO`."""

from __future__ import annotations

from inspect import Parameter, Signature, cleandoc, signature
from typing import Any, Optional

from rl_training.api.managed import ManagedAlgorithm
from rl_training.config.params import Schedule, parameter_names
from rl_training.config.train_config import TrainConfig
from rl_training.experiment.registry import AlgorithmSpec, register_algorithm, spec_of_class

_classes: dict[str, tuple[AlgorithmSpec, type[ManagedAlgorithm]]] = {}


def managed_class(class_name: str) -> type[ManagedAlgorithm]:
    """The managed class of that name; the same object every time, unless another spec is registered."""
    spec = spec_of_class(class_name)
    assert spec is not None, class_name
    if class_name not in _classes or _classes[class_name][0] is not spec:
        _classes[class_name] = spec, make_managed(spec)
    return _classes[class_name][1]


def register(spec: AlgorithmSpec | type[Any], *, like: str | None = None) -> type[ManagedAlgorithm]:
    """Register an algorithm for this process, and return its managed class.

    `spec` is an `AlgorithmSpec`, or the class of a learner; `like` then names the algorithm that it is a variant of.
    The numbers that the learner declares become hyper-parameters. In a notebook, a cell may be run again.
    """
    return managed_class(register_algorithm(spec, like=like).class_name)


def make_managed(spec: AlgorithmSpec) -> type[ManagedAlgorithm]:
    """A managed class, with the documentation and the signature that its entry says."""
    doc = f"{spec.class_name}, managed: {spec.paper}. {spec.scope}\n\n{cleandoc(ManagedAlgorithm.__doc__ or '')}"
    own = {"algo": spec.name, "__doc__": doc, "__module__": __name__, "__signature__": constructor_signature(spec)}
    return type(spec.class_name, (ManagedAlgorithm,), own)


def constructor_signature(spec: AlgorithmSpec) -> Signature:
    """The signature of a managed class: config fields and hyper-parameters, with their defaults."""
    own = signature(ManagedAlgorithm.__init__).parameters
    kept = [own["config_or_env"], own["env"]]
    for name, field in {**TrainConfig.model_fields, **spec.params.model_fields}.items():
        if name not in ("algo", "schedules"):
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            default = spec.defaults.get(name, default)
            kind: Any = field.annotation if default is not None else Optional[field.annotation]  # noqa: UP045
            kept.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    names = [name for name in parameter_names(spec.params) if name not in spec.params.model_fields]
    kept += [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Schedule | None) for name in names]
    return Signature(kept, return_annotation=None)


def __getattr__(name: str) -> Any:
    if not name[:1].isupper() or spec_of_class(name) is None:
        raise AttributeError(f"module {__name__!r} has no class {name!r}")
    return managed_class(name)
