"""Pure functions on tensors that the learners share: `returns`, `distributional`, `losses`, `policy`.

Time comes first ([T, N]). Nothing here draws random numbers, reads a tensor back to Python or branches on a tensor's
content, so every function can be compiled or captured as part of one CUDA graph.
"""
