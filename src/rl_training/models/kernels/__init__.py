"""GPU kernels, which need Triton; they are not imported if it is missing."""
