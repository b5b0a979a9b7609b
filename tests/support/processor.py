"""The processor, and a run that has it for itself."""

import torch

from nmt.system.ranks import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
