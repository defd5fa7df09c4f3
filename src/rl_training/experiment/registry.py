"""The registry under its public name."""

from rl_training.config.spec import (
    AlgorithmSpec,
    get_algorithm_spec,
    list_algorithm_specs,
    register_algorithm,
    spec_of_class,
)

__all__ = ["AlgorithmSpec", "get_algorithm_spec", "list_algorithm_specs", "register_algorithm", "spec_of_class"]
