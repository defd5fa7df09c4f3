"""One torch thread for the whole suite: tiny networks lose more by sharing two busy cores than they gain."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
