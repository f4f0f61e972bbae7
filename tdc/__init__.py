"""tdc: batches of structured and variable-length data that go through torch.compile in one piece."""

from . import compile as compile
from . import ops as ops
from . import optim as optim
from ._errors import DtypeError as DtypeError
from ._errors import FormatError as FormatError
from ._errors import ImmutableError as ImmutableError
from ._errors import IndexingError as IndexingError
from ._errors import KeyPathError as KeyPathError
from ._errors import ShapeError as ShapeError
from ._errors import StructureError as StructureError
from ._errors import TdcError as TdcError
from ._errors import UnsupportedError as UnsupportedError
from ._keys import unravel_key as unravel_key
from ._leaf import register_leaf as register_leaf
from ._nodes import Static as Static
from ._objects import ObjectArray as ObjectArray
from ._structure import offsets_of as offsets_of
from .compile.functional import from_module as from_module
from .compile.functional import functional_call as functional_call
from .compile.grad import grad as grad
from .compile.grad import value_and_grad as value_and_grad
from .compile.vmap import vmap as vmap
from .convert import from_padded as from_padded
from .convert import from_torch as from_torch
from .convert import to_packed as to_packed
from .convert import to_padded as to_padded
from .convert import to_torch as to_torch
from .masked import MaskedBatch as MaskedBatch
from .memory import copy_ as copy_
from .nested import NestedTensor as NestedTensor
from .nested import pack as pack
from .nested import unpack as unpack
from .nested import validate as validate
from .ops.factory import positions as positions
from .ops.join import cat as cat
from .ops.join import stack as stack
from .tensorclass import TensorClass as TensorClass
from .tensorclass import tensorclass as tensorclass
from .tensordict import TensorDict as TensorDict

__version__ = "0.1.0"
