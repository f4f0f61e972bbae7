"""Graphs on batches that are filled up to a size of a bucket, with the results of the batches that are not."""
