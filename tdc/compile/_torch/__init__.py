"""What this room asks of torch's private parts, one file for each part; no other file of it names them.

    dynamo       backends by name, counts, marks of sizes
    tracing      the graph that Dynamo is tracing, its loops, and transforms around a call
    inductor     the compiler, its settings and counters
    aoti         packages of machine code
    symbolic     sizes that are symbols
    trace        what torch.compile says while it works
    probes       a list of questions: does the torch that is installed have all of this

Each function is one thing that is wanted. Modules of torch are loaded when a function runs: Dynamo and Inductor are
heavy, and `import tdc` loads neither.
"""
