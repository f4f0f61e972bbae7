"""Other things as containers and back: records, pytrees, structured arrays, Hugging Face, other classes; and specs."""

from tdc.interop.arrays import from_dlpack as from_dlpack
from tdc.interop.arrays import from_struct_array as from_struct_array
from tdc.interop.arrays import to_dlpack as to_dlpack
from tdc.interop.arrays import to_struct_array as to_struct_array
from tdc.interop.huggingface import from_hf as from_hf
from tdc.interop.huggingface import to_hf as to_hf
from tdc.interop.pytrees import LoadReport as LoadReport
from tdc.interop.pytrees import PytreeSpec as PytreeSpec
from tdc.interop.pytrees import from_pytree as from_pytree
from tdc.interop.pytrees import from_state_dict as from_state_dict
from tdc.interop.pytrees import load_into as load_into
from tdc.interop.pytrees import to_pytree as to_pytree
from tdc.interop.pytrees import to_state_dict as to_state_dict
from tdc.interop.records import infer_batch_size as infer_batch_size
from tdc.interop.records import to_dataclass as to_dataclass
from tdc.interop.records import to_namedtuple as to_namedtuple
from tdc.interop.spec import LeafSpec as LeafSpec
from tdc.interop.spec import Spec as Spec
from tdc.interop.spec import check as check
from tdc.interop.spec import spec as spec
from tdc.interop.spec import zeros as zeros
from tdc.tensordict.leaf import register_leaf as register_leaf
