"""Rules of filled graphs for matrices: where their sides vary, the identity continues them behind the real ones.

    A real side of 2 in a bucket of 4          a b 0 0
    has the determinant, and the inverse       c d 0 0
    of its block, and as many pivots           0 0 1 0
                                               0 0 0 1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.compile.filling.run import Graph, bare, rule
from tdc.compile.filling.sums import named
from tdc.compile.filling.values import Filled, Node, refuse

CONTINUED = {  # by operator, the names of its square matrices
    "linalg_inv_ex": ("A",), "linalg_cholesky_ex": ("self",), "cholesky_inverse": ("self",), "_linalg_det": ("A",),
    "_linalg_slogdet": ("A",), "linalg_matrix_exp": ("self",), "_linalg_solve_ex": ("A",),
    "linalg_lu_factor_ex": ("A",), "linalg_solve_triangular": ("self",), "cholesky_solve": ("input2",),
    "linalg_lu_solve": ("LU",),
}  # fmt: skip
OTHERS = (
    "linalg_qr", "linalg_lu", "_linalg_eigh", "linalg_eig", "_linalg_svd", "linalg_ldl_factor_ex",
    "linalg_householder_product", "lu_unpack", "linalg_ldl_solve", "ormqr", "_linalg_check_errors", "triangular_solve",
)  # fmt: skip


def inside(x: Any) -> list[int]:
    """Filled dims of a tensor among its last two."""
    return [d for d in x.dims if d >= x.x.ndim - 2] if isinstance(x, Filled) else []


@rule(*OTHERS)
def by_matrix(g: Graph, node: Node, *args: Any, **kwargs: Any) -> Any:
    """An operation on the matrices of the last two dims."""
    if any([inside(x) for x in [*args, *kwargs.values()]]):
        raise refuse(f"{node.target} of matrices whose sides vary")
    return node.target(*bare(args), **bare(kwargs))


@rule(*CONTINUED)
def by_square(g: Graph, node: Node, *args: Any, **kwargs: Any) -> Any:
    """An operation on square matrices of the last two dims, which may vary."""
    if not any([inside(x) for x in [*args, *kwargs.values()]]):
        return node.target(*bare(args), **bare(kwargs))
    given = named(node, args, kwargs, 0)
    square = CONTINUED[node.target.__name__.split(".")[0]]
    for name, x in given.items():
        if name in square:
            given[name] = continued(g, node, x)
        elif name == "pivots":
            given[name] = g.masked(x, torch.arange(1, x.x.shape[-1] + 1, dtype=x.x.dtype, device=x.x.device))
        elif isinstance(x, Filled):
            given[name] = g.masked(x, 0)
    return node.target(*list(given.values())[: len(args)], **{name: given[name] for name in kwargs})


def continued(g: Graph, node: Node, x: Filled) -> Tensor:
    """Square matrices, with the identity behind the real ones."""
    n = x.x.shape[-1]
    if x.sizes[-1] != x.sizes[-2] or n != x.x.shape[-2]:
        raise refuse(f"{node.target} of matrices that are not square")
    return g.masked(x, torch.eye(n, dtype=x.x.dtype, device=x.x.device))
