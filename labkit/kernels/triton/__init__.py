"""GPU kernels in Triton. Importing this package needs Triton; nothing else in labkit imports it unless there is a GPU.

Each function takes and returns tensors, and equals the plain PyTorch of ``labkit.kernels.ops`` and ``packed``. With
TRITON_INTERPRET=1 they run on CPU tensors, which is how they are tested without a GPU.
"""
