"""Modules made of containers."""

from tdc.nn.params import TensorDictParams as TensorDictParams
