"""Operations: one file for each family, each a table of rows and the rules they name.

Importing this package fills the rule table and gives the containers their methods.
"""

from tdc import _attributes as _attributes
from tdc import _facts as _facts
from tdc._rules import RULES as RULES
from tdc._rules import Rule as Rule
from tdc._rules import install_methods
from tdc.masked import MaskedBatch
from tdc.nested import NestedTensor
from tdc.ops import alias as alias
from tdc.ops import attention as attention
from tdc.ops import batch as batch
from tdc.ops import channel as channel
from tdc.ops import chunked as chunked
from tdc.ops import conv as conv
from tdc.ops import distance as distance
from tdc.ops import einsum as einsum
from tdc.ops import embedding_bag as embedding_bag
from tdc.ops import extend as extend
from tdc.ops import extremes as extremes
from tdc.ops import factory as factory
from tdc.ops import gate as gate
from tdc.ops import handed_on as handed_on
from tdc.ops import higher as higher
from tdc.ops import indexing as indexing
from tdc.ops import join as join
from tdc.ops import linalg as linalg
from tdc.ops import lines as lines
from tdc.ops import lookup as lookup
from tdc.ops import loop as loop
from tdc.ops import loss as loss
from tdc.ops import masked_lookup as masked_lookup
from tdc.ops import masked_shape as masked_shape
from tdc.ops import matmul as matmul
from tdc.ops import moments as moments
from tdc.ops import multi_head as multi_head
from tdc.ops import norm as norm
from tdc.ops import order as order
from tdc.ops import pointwise as pointwise
from tdc.ops import pool as pool
from tdc.ops import ragged_grow as ragged_grow
from tdc.ops import ragged_lookup as ragged_lookup
from tdc.ops import ragged_loss as ragged_loss
from tdc.ops import ragged_move as ragged_move
from tdc.ops import ragged_shape as ragged_shape
from tdc.ops import ragged_split as ragged_split
from tdc.ops import random as random
from tdc.ops import reduction as reduction
from tdc.ops import refused as refused
from tdc.ops import resample as resample
from tdc.ops import rnn as rnn
from tdc.ops import rowwise_norm as rowwise_norm
from tdc.ops import scan as scan
from tdc.ops import shape as shape
from tdc.ops import sort as sort
from tdc.ops import torch_masked as torch_masked
from tdc.ops import whole as whole
from tdc.ops.attention import varlen_attention as varlen_attention
from tdc.ops.extend import implements as implements
from tdc.tensordict import TensorDict

CLASSES: dict[str, type] = {"tensordict": TensorDict, "nested": NestedTensor, "masked": MaskedBatch}
alias.install(CLASSES)
install_methods(CLASSES)
