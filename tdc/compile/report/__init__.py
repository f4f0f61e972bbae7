"""What became of a function under torch.compile."""
