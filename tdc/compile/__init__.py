"""Functions of containers compiled as one graph: training steps, export, dynamic sizes, and reports that prove it."""

from tdc.compile.buckets import buckets as buckets
from tdc.compile.buckets import to_bucket as to_bucket
from tdc.compile.buckets import unbucket as unbucket
from tdc.compile.checkpoint import checkpoint as checkpoint
from tdc.compile.checkpoint import checkpoint_blocks as checkpoint_blocks
from tdc.compile.counts import Counts as Counts
from tdc.compile.counts import counted as counted
from tdc.compile.counts import peak_bytes as peak_bytes
from tdc.compile.dynamic import dynamic as dynamic
from tdc.compile.dynamic import dynamic_shapes as dynamic_shapes
from tdc.compile.export import Exported as Exported
from tdc.compile.export import export as export
from tdc.compile.export import load as load
from tdc.compile.filling.sizes import Buckets as Buckets
from tdc.compile.inductor import backend as backend
from tdc.compile.report.build import report as report
from tdc.compile.report.record import Report as Report
from tdc.compile.scan_blocks import scan_blocks as scan_blocks
from tdc.compile.scan_blocks import unscan_blocks as unscan_blocks
from tdc.compile.signature import Signature as Signature
from tdc.compile.train_step import TrainStep as TrainStep
from tdc.compile.train_step import train_step as train_step
