"""Operations: a file for each family, in folders of kin, each a table of rows and the rules they name.

Importing this package fills the rule table and gives the containers their methods.
"""

from tdc.core.rules import RULES as RULES
from tdc.core.rules import Rule as Rule
from tdc.ops.attention import multi_head as multi_head
from tdc.ops.attention import scaled_dot_product as scaled_dot_product
from tdc.ops.attention.flex_attention import flex_attention as flex_attention
from tdc.ops.attention.scaled_dot_product import varlen_attention as varlen_attention
from tdc.ops.distributions import distribution as distribution
from tdc.ops.extend import implements as implements
from tdc.ops.images.windows import random_masking as random_masking
from tdc.ops.images.windows import window_partition as window_partition
from tdc.ops.images.windows import window_unpartition as window_unpartition
from tdc.ops.products.distance import max_sim as max_sim
from tdc.ops.reduce.counts import histc as histc
from tdc.ops.sampling import top_k_top_p_filtering as top_k_top_p_filtering

# isort: off
from tdc.ops import extend, indexing, loss, masks, rnn, stft, unbatched  # noqa: F401
from tdc.ops.elementwise import comparison, factory, pointwise, random  # noqa: F401
from tdc.ops.images import conv, pool, resample  # noqa: F401
from tdc.ops.layers import channel, embedding_bag, feature_sizes, norm, positionwise  # noqa: F401
from tdc.ops.products import distance, einsum, linalg, matmul  # noqa: F401
from tdc.ops.reduce import (  # noqa: F401
    counts, extremes, moments, order_statistics, partial_ragged, product, reduction, scan, sort, torch_masked,
    vector_norm,
)  # fmt: skip
from tdc.ops.shape import flatten, join, lengths, dims, moves, split  # noqa: F401
from tdc.ops.tensordict import batch, batch_dims, memory, sizes  # noqa: F401
from tdc.ops import two_level  # noqa: F401  # which runs rows of the others
from tdc.ops import install  # noqa: F401
# isort: on
