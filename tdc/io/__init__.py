"""TensorDicts on disk: a store, which is a folder of raw tensors and a manifest, and is mapped into memory."""

from tdc.io.load import load as load
from tdc.io.save import memmap_empty as memmap_empty
from tdc.io.save import save as save
