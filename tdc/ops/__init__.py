"""Operations: one file for each family, each a table of rows and the rules they name.

Importing this package fills the rule table and gives the containers their methods.
"""

from tdc.core.container import install_methods
from tdc.core.rules import RULES as RULES
from tdc.core.rules import Rule as Rule
from tdc.ops.attention import multi_head as multi_head
from tdc.ops.attention import scaled_dot_product as scaled_dot_product
from tdc.ops.attention.scaled_dot_product import varlen_attention as varlen_attention
from tdc.ops.extend import implements as implements
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.two_level import TwoLevelTensor
from tdc.tensordict import methods as _tensordict_methods  # noqa: F401  # and TensorDict its own
from tdc.tensordict.tensordict import TensorDict

# isort: off
from tdc.ops import (  # noqa: F401  # each fills the table with the rows of its family
    adaptive_pool, alias, batch, batch_indexing, batch_join, batch_shape, channel, checkpoint, comparison, conv,
    distance, einsum, embedding_bag, extend, extremes, factory, flatten, indexing, join, lengths, linalg, loss, masks,
    matmul, memory, moments, norm, order_statistics, partial_ragged, pointwise, pool, positionwise, product, random,
    reduction, resample, rnn, scan, shape, shape_moves, sort, split, torch_masked, unbatched, vector_norm,
)  # fmt: skip
from tdc.ops import two_level  # which runs rows of the others
# isort: on

CLASSES: dict[str, type] = {
    "tensordict": TensorDict, "nested": NestedTensor, "masked": MaskedBatch, "two_level": TwoLevelTensor,
}  # fmt: skip
alias.install(CLASSES)
install_methods(CLASSES, (*RULES, *two_level.TWO_LEVEL_RULES))
