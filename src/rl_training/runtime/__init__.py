"""What runs: algorithm specs, sources of experience, the loop, evaluation and the workflows over checkpoints."""
