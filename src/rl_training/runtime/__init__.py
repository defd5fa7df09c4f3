"""What runs: algorithm specs, trainers, the loop, evaluation and the workflows over checkpoints."""
