"""Operations written for one example, on a whole ragged batch: dims are counted from the batch on."""

from tdc.autobatch.per_example import composed, dims, index, layers, operands, products, sizes, table

__all__ = ["composed", "dims", "index", "layers", "operands", "products", "sizes", "table"]
