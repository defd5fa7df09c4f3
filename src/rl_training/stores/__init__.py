"""Stores: what is kept of experience and how it becomes batches, one per kind; they know no trainer and no tool."""
