"""Lanes: how experience is collected, kept and turned into batches, one per kind; they know no trainer and no tool."""
