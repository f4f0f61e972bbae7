"""einops on batches: `register()` makes einops take them; einops is imported by it, not by `import tdc`."""

from tdc.einops.backend import register as register
