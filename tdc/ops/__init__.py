"""Operations: one file for each family, each a table of rows and the rules they name.

Importing this package fills the rule table and gives the containers their methods.
"""

from tdc.core.rules import RULES as RULES
from tdc.core.rules import Rule as Rule
from tdc.ops.attention import multi_head as multi_head
from tdc.ops.attention import scaled_dot_product as scaled_dot_product
from tdc.ops.attention.scaled_dot_product import varlen_attention as varlen_attention
from tdc.ops.extend import implements as implements

# isort: off
from tdc.ops import (  # noqa: F401  # each fills the table with the rows of its family
    batch, batch_dims, channel, checkpoint, comparison, conv, distance, einsum, embedding_bag, extend,
    extremes, factory, feature_sizes, flatten, indexing, join, lengths, linalg, loss, masks, matmul, memory, moments,
    norm, order_statistics, partial_ragged, pointwise, pool, positionwise, product, random, reduction, resample, rnn,
    scan, shape, shape_moves, sort, split, torch_masked, unbatched, vector_norm,
)  # fmt: skip
from tdc.ops import two_level  # noqa: F401  # which runs rows of the others
from tdc.ops import install  # noqa: F401
# isort: on
