"""What turns functions on our types into one graph, and proves it."""

from tdc.compile.buckets import buckets as buckets
from tdc.compile.buckets import to_bucket as to_bucket
from tdc.compile.buckets import unbucket as unbucket
from tdc.compile.counts import Counts as Counts
from tdc.compile.counts import counted as counted
from tdc.compile.counts import peak_bytes as peak_bytes
from tdc.compile.dynamic import dynamic as dynamic
from tdc.compile.dynamic import dynamic_shapes as dynamic_shapes
from tdc.compile.ensemble import ensemble as ensemble
from tdc.compile.export import Exported as Exported
from tdc.compile.export import export as export
from tdc.compile.export import load as load
from tdc.compile.functional import from_module as from_module
from tdc.compile.functional import functional_call as functional_call
from tdc.compile.functional import stack_modules as stack_modules
from tdc.compile.grad import grad as grad
from tdc.compile.grad import value_and_grad as value_and_grad
from tdc.compile.inductor import backend as backend
from tdc.compile.jacobian import hessian as hessian
from tdc.compile.jacobian import jacfwd as jacfwd
from tdc.compile.jacobian import jacrev as jacrev
from tdc.compile.report import Report as Report
from tdc.compile.report import report as report
from tdc.compile.signature import Signature as Signature
from tdc.compile.vmap import vmap as vmap
