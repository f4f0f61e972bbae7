"""Pictures of batches and data sets by matplotlib, which the extra `viz` installs; `import tdc` does not import it."""

from tdc.viz.batches import attention as attention
from tdc.viz.batches import batch as batch
from tdc.viz.data import lengths as lengths
