"""Lists of examples as batches, padded or ragged, and back."""
