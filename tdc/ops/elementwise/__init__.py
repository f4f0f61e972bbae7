"""Functions of each element, and of operands that broadcast."""
