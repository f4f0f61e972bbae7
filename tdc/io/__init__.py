"""TensorDicts on disk, mapped into memory: a store, a folder of raw tensors and a manifest; or one safetensors file."""

from tdc.io import by_path as by_path
from tdc.io.load import load as load
from tdc.io.packed import from_safetensors as from_safetensors
from tdc.io.packed import to_safetensors as to_safetensors
from tdc.io.save import memmap_empty as memmap_empty
from tdc.io.save import save as save
