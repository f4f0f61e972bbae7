"""Recurrent networks on rows of different lengths: the orders in which they run, and the operator of a graph."""
