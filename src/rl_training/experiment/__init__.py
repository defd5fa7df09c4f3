"""The config, the registry and the experiment manager, under the names that scripts use."""
