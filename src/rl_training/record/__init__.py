"""The files that a run writes: checkpoints, metrics and event files."""
