"""What every room builds on: errors, keys, dtypes, pytrees, the rule table, and what touches torch's internals."""
