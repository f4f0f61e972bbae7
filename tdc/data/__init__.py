"""Lists of examples as batches, padded or ragged, and back; batches in groups; functions of parts; datasets, samplers
and loaders; tables."""

from tdc.data.arrow import from_arrow as from_arrow
from tdc.data.arrow import from_parquet as from_parquet
from tdc.data.arrow import to_arrow as to_arrow
from tdc.data.arrow import to_dataset as to_dataset
from tdc.data.arrow import to_parquet as to_parquet
from tdc.data.collate import collate as collate
from tdc.data.dataset import Dataset as Dataset
from tdc.data.group_by import group_by as group_by
from tdc.data.loader import Loader as Loader
from tdc.data.loader import loader as loader
from tdc.data.map import map_iter as map_iter
from tdc.data.pad_sequence import pad_sequence as pad_sequence
from tdc.data.pad_sequence import ragged_stack as ragged_stack
from tdc.data.pad_sequence import unpad_sequence as unpad_sequence
from tdc.data.samplers import BucketSampler as BucketSampler
from tdc.data.samplers import TokenBudgetSampler as TokenBudgetSampler
from tdc.data.windows import windows as windows
