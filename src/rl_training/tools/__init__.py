"""Tools over the runtime: doctor, bench, dreams, what finished runs say, export, tune. Only the command line calls them."""
