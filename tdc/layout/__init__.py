"""Index arithmetic of ragged batches on tensors: structure, segments, spans, padding, rectangles. No containers."""
