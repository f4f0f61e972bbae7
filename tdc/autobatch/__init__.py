"""Code written for one example, control flow and all, run on a batch: source to control tree, blocks under vmap."""

from . import by_row as by_row  # what `tdc.vmap` runs over ragged rows
