"""Products of a matrix of each example by another, as one node of a graph that is the same for all sizes."""
