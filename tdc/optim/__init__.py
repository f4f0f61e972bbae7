"""Optimisers as pure functions: `(gradients, state, parameters) -> (parameters, state)`.

    opt = chain(clip_by_global_norm(1.0), adamw(cosine(3e-4, steps=10_000, warmup=500)))
    state = opt.init(params)
    params, state = opt.update(grads, state, params)

States are TensorDicts with the keys of the parameters, so an optimiser works on one model or on an ensemble, stacked or
under `vmap`; a state is checkpointed like any TensorDict, and a whole training step compiles as one graph. The numbers
are those of `torch.optim`, step for step.

Invariant: nothing is changed in place; learning rates and steps are tensors or constants of the graph, never reread.
"""

from tdc.optim.adam import adam as adam
from tdc.optim.adam import adamw as adamw
from tdc.optim.adam import debias as debias
from tdc.optim.base import Optimizer as Optimizer
from tdc.optim.base import Rate as Rate
from tdc.optim.base import Schedule as Schedule
from tdc.optim.base import Transform as Transform
from tdc.optim.chain import chain as chain
from tdc.optim.clip import clip_by_global_norm as clip_by_global_norm
from tdc.optim.clip import global_norm as global_norm
from tdc.optim.ema import Average as Average
from tdc.optim.ema import ema as ema
from tdc.optim.lion import lion as lion
from tdc.optim.schedule import constant as constant
from tdc.optim.schedule import cosine as cosine
from tdc.optim.sgd import sgd as sgd
