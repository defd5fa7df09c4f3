"""Environments: their spaces as plain data, how one or many are made, and the only code that steps them in training."""
