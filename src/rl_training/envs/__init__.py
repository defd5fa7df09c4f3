"""Environments: their spaces as plain data, how one and many are made, and the one place that steps them."""
