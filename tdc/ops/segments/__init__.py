"""Orders, extremes and scans of the segments of a packed batch on CPU, as one operator each."""
