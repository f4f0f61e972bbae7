"""What operations that are written for one example do to a whole ragged batch: arguments counted from the batch on."""

from tdc.autobatch.per_example import dims, index, layers, operands, products, sizes, table

__all__ = ["dims", "index", "layers", "operands", "products", "sizes", "table"]
