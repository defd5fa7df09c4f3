"""One run: built from a config, looped, counted, evaluated, saved, stopped and restored."""
