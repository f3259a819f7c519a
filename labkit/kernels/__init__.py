"""Fast forms of the model's operations, and the plain PyTorch that each must equal."""
