"""Private parts of torch, one file for each part; no other file of this room names them.

Modules of torch are loaded when a function runs: `import tdc` loads neither Dynamo nor Inductor.
"""
