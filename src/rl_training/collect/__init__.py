"""Collecting experience: what acts (behaviour), and where (this process, worker processes)."""
