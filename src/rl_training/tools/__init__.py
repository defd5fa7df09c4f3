"""Tools over the runtime: `doctor`, `bench`, and what a world model imagines. Only the command line calls them."""
