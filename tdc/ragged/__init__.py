"""Ragged batches: NestedTensor, packed, and MaskedBatch, padded, TwoLevelTensor of two levels; their structure, indices and conversions."""

from tdc.ragged import methods as methods  # gives the classes their methods
from tdc.ragged.two_level import TwoLevelTensor as TwoLevelTensor
