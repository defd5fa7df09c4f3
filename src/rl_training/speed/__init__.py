"""Everything that exists only to be fast; skip it on a first reading. It imports torch, numpy and `ops` alone."""
