"""One `<algo>_trainer.py` per algorithm (its parameters and registry entries), and `workflows` for scripts."""
