"""Mistakes at the edges of containers, by section: other containers, optimisers, files, sizes; as in `mistakes`."""

from __future__ import annotations

EDGES: dict[str, str] = {
    "values at an index": """
        td.at[0].set("a")
        td.at[0].set({"zz": 1})
        td.at[0].mul("a")
        td.at[0].set(torch.ones(7))
        td.at["a"].set(1)
        td.at[9].set(1)
    """,
    "indices of padded and nested batches": """
        m[1:"a"]
        m["a":]
        m[::"a"]
        m[torch.tensor(7)]
        m[range(9)]
        x[::"a"]
        x[torch.tensor(7)]
        x[range(9)]
        x[None, "a"]
        tl[1:"a"]
        tl[9]
        tl["a"]
        tdc.ObjectArray(["a", "b"])[1:"a"]
    """,
    "layers of two levels": """
        nn.Linear(5, 2)(tl)
        nn.LayerNorm(5)(tl)
        nn.RMSNorm(5)(tl)
        nn.Bilinear(5, 4, 2)(tl, tl)
        nn.Embedding(2, 3)(tl)
        nn.Embedding(2, 3)(tl.long() + 5)
        F.one_hot(tl.long() + 5, 3)
        F.cross_entropy(tl, tl[:, :, :, 0].long() + 9)
        nn.Conv1d(4, 2, 3)(tl)
        tl + x
        tl.sum(0)
        tl @ torch.ones(5, 2)
        torch.cat([tl, x])
        torch.stack([tl, tl])
        tl.flatten(0, 3)
        tl.softmax(9)
        tl.squeeze()
    """,
    "optimisers as in torch": """
        tdc.optim.adamw(net.parameters())
        tdc.optim.adamw(net.parameters(), lr=1e-3)
        tdc.optim.sgd(net.parameters(), 0.1)
        tdc.optim.sgd(net, lr=0.1)
        tdc.optim.lion([{"params": net.parameters()}])
        tdc.optim.adamw(tdc.from_module(net), lr=1e-3)
        tdc.optim.schedule_free_sgd(net.parameters())
        tdc.optim.muon(net.parameters(), lr=1e-3)
        tdc.optim.clip_by_global_norm(net.parameters(), 1.0)
        tdc.optim.clip_by_norm(net.parameters(), 1.0)
        tdc.optim.clip_by_value(net.parameters(), 1.0)
        tdc.optim.adamw(1e-3).step()
        tdc.optim.adamw(1e-3).zero_grad()
        tdc.optim.adamw(1e-3).param_groups[0]["lr"]
        tdc.optim.adamw(1e-3).state_dict()
        tdc.optim.adamw(1e-3).load_state_dict({})
        tdc.optim.adamw(1e-3).foo
        tdc.optim.chain(tdc.optim.clip_by_global_norm(1.0), tdc.optim.adamw(1e-3)).step()
    """,
    "paths of exported programs": """
        tdc.compile.export(net, (x,)).save("no/such/m.pt2")
        tdc.compile.export(net, (x,)).save("m.pt")
        tdc.compile.export(net, (x,)).save(3)
        tdc.compile.load("no/such/m.pt2")
        tdc.compile.load(3)
    """,
    "sizes of ragged dims": """
        torch.ones((x.shape[1], x.shape[1]))
        torch.ones(6).view(x.shape[1], x.shape[1])
        nn.LayerNorm(x.shape[1])
        nn.Embedding(x.shape[1], 4)
        torch.randint(5, (2, x.shape[1]))
    """,
    "pytrees": """
        torch.utils._pytree.tree_map(lambda t: -t, m)
        torch.utils._pytree.tree_map(lambda t: t.float(), m)
        torch.utils._pytree.tree_map(lambda t: t[1:], x)
        torch.utils._pytree.tree_map(lambda t: t.double(), tl)
    """,
}
