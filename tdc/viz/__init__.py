"""Pictures of batches, data sets, trees and compile reports by matplotlib, which the extra `viz` installs.

`import tdc` does not import it.
"""

from tdc.viz.batches import attention as attention
from tdc.viz.batches import batch as batch
from tdc.viz.compiled import report as report
from tdc.viz.data import lengths as lengths
from tdc.viz.figure import to_html as to_html
from tdc.viz.trees import tree as tree
