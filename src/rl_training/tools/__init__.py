"""Tools over the runtime: doctor, bench, dreams, what finished runs say, export, tune; for the command line."""
