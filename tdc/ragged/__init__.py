"""Ragged batches: NestedTensor, packed, MaskedBatch, padded, and TwoLevelTensor; their structure and conversions."""

from tdc.ragged import methods as methods  # gives the classes their methods
from tdc.ragged.convert import TwoLevelPadded as TwoLevelPadded
from tdc.ragged.two_level import TwoLevelTensor as TwoLevelTensor
