"""Modules made of containers, and adapters of modules."""

from tdc.nn.expose import expose_tensors as expose_tensors
from tdc.nn.hooks import register_full_backward_hook as register_full_backward_hook
from tdc.nn.kv_cache import KVCache as KVCache
from tdc.nn.lora import lora_init as lora_init
from tdc.nn.lora import lora_merge as lora_merge
from tdc.nn.lora import lora_unmerge as lora_unmerge
from tdc.nn.params import TensorDictParams as TensorDictParams
