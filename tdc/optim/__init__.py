"""Optimisers as pure functions: `(gradients, state, parameters) -> (parameters, state)`.

    opt = chain(clip_by_global_norm(1.0), adamw(cosine(3e-4, steps=10_000, warmup=500)), ema(0.999))
    state = opt.init(params)
    params, state = opt.update(grads, state, params)

All parts are a `Transform`. States are TensorDicts with the keys of the parameters, so an optimiser works on one model
or on an ensemble, stacked or under `vmap`; a state is saved like any TensorDict, and a whole training step compiles as
one graph. The numbers are those of `torch.optim`, step for step.

A learning rate `lr` is a float, a tensor `batch_size`, or a schedule `step -> lr`. A setting out of its range is a
StructureError, a count that is too small a ShapeError, and an argument of another type a DtypeError. `update` refuses
gradients and states of other parameters with the same errors.

Invariant: nothing is changed in place; learning rates and steps are tensors or constants of the graph.
"""

from tdc.optim.adam import adam as adam
from tdc.optim.adam import adamax as adamax
from tdc.optim.adam import adamw as adamw
from tdc.optim.adam import debias as debias
from tdc.optim.adam import nadam as nadam
from tdc.optim.adam import radam as radam
from tdc.optim.averages import averaged as averaged
from tdc.optim.averages import ema as ema
from tdc.optim.averages import lookahead as lookahead
from tdc.optim.averages import schedule_free_adamw as schedule_free_adamw
from tdc.optim.averages import schedule_free_sgd as schedule_free_sgd
from tdc.optim.by_leaf import adafactor as adafactor
from tdc.optim.by_leaf import lamb as lamb
from tdc.optim.by_leaf import muon as muon
from tdc.optim.clip import clip_by_global_norm as clip_by_global_norm
from tdc.optim.clip import clip_by_norm as clip_by_norm
from tdc.optim.clip import clip_by_value as clip_by_value
from tdc.optim.clip import decay as decay
from tdc.optim.clip import global_norm as global_norm
from tdc.optim.clip import noise as noise
from tdc.optim.combine import chain as chain
from tdc.optim.combine import masked as masked
from tdc.optim.combine import partition as partition
from tdc.optim.loss_scale import LossScale as LossScale
from tdc.optim.schedule import constant as constant
from tdc.optim.schedule import cosine as cosine
from tdc.optim.schedule import exponential as exponential
from tdc.optim.schedule import inverse_sqrt as inverse_sqrt
from tdc.optim.schedule import join as join
from tdc.optim.schedule import linear as linear
from tdc.optim.schedule import one_cycle as one_cycle
from tdc.optim.schedule import piecewise as piecewise
from tdc.optim.schedule import polynomial as polynomial
from tdc.optim.schedule import wsd as wsd
from tdc.optim.sgd import adadelta as adadelta
from tdc.optim.sgd import adagrad as adagrad
from tdc.optim.sgd import lion as lion
from tdc.optim.sgd import rmsprop as rmsprop
from tdc.optim.sgd import sgd as sgd
from tdc.optim.sharded import sharded as sharded
from tdc.optim.torch_optim import from_torch_optim as from_torch_optim
from tdc.optim.torch_optim import to_torch_state_dict as to_torch_state_dict
from tdc.optim.transform import Optimizer as Optimizer
from tdc.optim.transform import Rate as Rate
from tdc.optim.transform import Schedule as Schedule
from tdc.optim.transform import Transform as Transform
from tdc.optim.wrappers import inject as inject
from tdc.optim.wrappers import master_weights as master_weights
from tdc.optim.wrappers import multi_steps as multi_steps
from tdc.optim.wrappers import skip_nonfinite as skip_nonfinite
