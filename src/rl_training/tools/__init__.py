"""`doctor`, `bench`, what a world model imagines, what finished runs say. Only the command line calls these tools."""
