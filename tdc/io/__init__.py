"""TensorDicts on disk, mapped into memory: a store, or one safetensors file. And in memory: one buffer of bytes."""

from tdc.io import by_path as by_path
from tdc.io.buffer import from_buffer as from_buffer
from tdc.io.buffer import to_buffer as to_buffer
from tdc.io.dcp import dcp_load as dcp_load
from tdc.io.dcp import dcp_save as dcp_save
from tdc.io.load import load as load
from tdc.io.packed import from_safetensors as from_safetensors
from tdc.io.packed import to_safetensors as to_safetensors
from tdc.io.save import memmap_empty as memmap_empty
from tdc.io.save import save as save
from tdc.io.writer import Writer as Writer
from tdc.io.writer import writer as writer
