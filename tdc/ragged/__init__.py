"""Ragged batches: NestedTensor, packed, and MaskedBatch, padded; their structure, indices and conversions."""

from tdc.ragged import methods as methods  # gives the classes their methods
