"""Ragged batches: NestedTensor, packed, and MaskedBatch, padded; their structure, indices and conversions."""
