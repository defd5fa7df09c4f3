"""Everything that a user can set: `TrainConfig`, the parameters of every family, the registry entry, every `auto`."""
