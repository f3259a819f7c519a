from __future__ import annotations

import torch

torch.set_num_threads(1)  # the tensors here are small, and test processes run side by side
