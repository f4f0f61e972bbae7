"""Operations: one file for each family, each a table of rows and the rules they name.

Importing this package fills the rule table and gives the containers their methods.
"""

from tdc.core.container import install_methods
from tdc.core.rules import RULES as RULES
from tdc.core.rules import Rule as Rule
from tdc.ops import alias as alias
from tdc.ops import batch as batch
from tdc.ops import batch_indexing as batch_indexing
from tdc.ops import channel as channel
from tdc.ops import checkpoint as checkpoint
from tdc.ops import comparison as comparison
from tdc.ops import conv as conv
from tdc.ops import distance as distance
from tdc.ops import einsum as einsum
from tdc.ops import embedding_bag as embedding_bag
from tdc.ops import extend as extend
from tdc.ops import extremes as extremes
from tdc.ops import factory as factory
from tdc.ops import handed_on as handed_on
from tdc.ops import indexing as indexing
from tdc.ops import join as join
from tdc.ops import linalg as linalg
from tdc.ops import loss as loss
from tdc.ops import masked_shape as masked_shape
from tdc.ops import matmul as matmul
from tdc.ops import moments as moments
from tdc.ops import norm as norm
from tdc.ops import order_statistics as order_statistics
from tdc.ops import partial_ragged as partial_ragged
from tdc.ops import pointwise as pointwise
from tdc.ops import pool as pool
from tdc.ops import positionwise as positionwise
from tdc.ops import ragged_grow as ragged_grow
from tdc.ops import ragged_move as ragged_move
from tdc.ops import ragged_shape as ragged_shape
from tdc.ops import ragged_split as ragged_split
from tdc.ops import random as random
from tdc.ops import reduction as reduction
from tdc.ops import resample as resample
from tdc.ops import rnn as rnn
from tdc.ops import scan as scan
from tdc.ops import shape as shape
from tdc.ops import sort as sort
from tdc.ops import torch_masked as torch_masked
from tdc.ops import unbatched as unbatched
from tdc.ops import vector_norm as vector_norm
from tdc.ops.attention import multi_head as multi_head
from tdc.ops.attention import scaled_dot_product as scaled_dot_product
from tdc.ops.attention.scaled_dot_product import varlen_attention as varlen_attention
from tdc.ops.extend import implements as implements
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.tensordict import methods as _tensordict_methods  # noqa: F401  # and TensorDict its own
from tdc.tensordict.tensordict import TensorDict

CLASSES: dict[str, type] = {"tensordict": TensorDict, "nested": NestedTensor, "masked": MaskedBatch}
alias.install(CLASSES)
install_methods(CLASSES)
