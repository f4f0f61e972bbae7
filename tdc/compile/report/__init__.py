"""Reports of torch.compile."""
