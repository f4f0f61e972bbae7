"""Models of Hugging Face on ragged batches; transformers is imported by the functions, not by `import tdc`."""

from tdc.hf.generate import generate as generate
from tdc.hf.model import attend as attend
