"""One `<algo>_trainer.py` per algorithm: its parameters and its registry entries."""
