"""Stores keep experience and turn it into batches, one store per kind of learning."""
