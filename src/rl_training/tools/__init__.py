"""Tools for the command line: doctor, bench, pictures of imagination, reports on finished runs, export, tune."""
