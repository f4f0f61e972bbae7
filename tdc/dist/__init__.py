"""Whole structures over `torch.distributed`: TensorDicts, tensorclasses and ragged batches from rank to rank.

    batch = tdc.dist.all_gather(batch)                        rows of all ranks, of any numbers and lengths
    grads = tdc.dist.all_reduce(grads, "mean", weight=tokens)

A structure is a few messages, whatever it holds: a handshake, and one buffer or one for each dtype. Ranks that call
different operations, or have different keys, all get an error that names them. Nothing is pickled.
"""

from tdc.dist.balance import Moves as Moves
from tdc.dist.balance import balance as balance
from tdc.dist.balance import restore as restore
from tdc.dist.copies import all_gather as all_gather
from tdc.dist.copies import all_to_all as all_to_all
from tdc.dist.copies import broadcast as broadcast
from tdc.dist.copies import gather as gather
from tdc.dist.copies import scatter as scatter
from tdc.dist.point import Pending as Pending
from tdc.dist.point import irecv as irecv
from tdc.dist.point import isend as isend
from tdc.dist.point import recv as recv
from tdc.dist.point import send as send
from tdc.dist.reductions import all_reduce as all_reduce
from tdc.dist.reductions import reduce as reduce
from tdc.dist.reductions import reduce_scatter as reduce_scatter
from tdc.dist.sharding import full_tensor as full_tensor
from tdc.dist.sharding import redistribute as redistribute
from tdc.dist.sharding import replicate as replicate
from tdc.dist.sharding import shard as shard
