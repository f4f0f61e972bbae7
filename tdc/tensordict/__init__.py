"""TensorDict and tensorclass: an immutable dictionary of tensors that share their batch dims."""
