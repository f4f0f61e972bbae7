"""The base of every room: errors, keys, dtypes, pytrees, the rule table, and all use of private parts of torch."""

import gc

# The garbage collector takes what is there for old, so that an import, which makes thousands of objects that stay, sets
# off no search through torch's (12 to 100 ms). No setting changes.
if not gc.get_freeze_count():
    gc.freeze()
    gc.unfreeze()
