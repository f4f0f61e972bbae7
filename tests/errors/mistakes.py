"""Mistakes that no other test makes in the same place; each line is a program with `test_mistakes.names`."""

from __future__ import annotations

MISTAKES: dict[str, str] = {
    "attributes": """
        m.length
        x.numpy()
        x.data_ptr()
        m.data = torch.ones(2, 3, 4)
        float(x)
        int(x)
        bool(x)
        x.shape[1] + 1
        range(x.shape[1])
        torch.ones(2, x.shape[1])
        x.view(x.shape[0], x.shape[1] * 4)
        x.type("torch.Foo")
        td.to("nowhere")
        x.to("nowhere")
        m.to("nowhere")
    """,
    "indices": """
        x[None, None, "a"]
        x[0.5:2]
        x[0] = 1
        del x[0]
        m[0] = 1
        td.get(("n", 3))
        x.select(1, 9)
        x.index_select(1, torch.tensor([9]))
    """,
    "arithmetic": """
        x + "a"
        x * td
        x & 1.5
        ~x
        x << 1
        x // "a"
        x ** "a"
        torch.add(x, other)
        torch.where(x > 0)
        torch.maximum(x, torch.ones(9))
        torch.clamp(x)
        torch.lerp(x, x, other)
        torch.add(x, 1, out=x)
        x.add_(1)
        x.mul_("a")
        x.fill_(torch.ones(2))
        x.copy_(torch.ones(9))
        x.masked_fill(torch.ones(3).bool(), 0)
        td + torch.ones(9)
        td * None
        td @ td
    """,
    "reductions": """
        x.sum(5)
        x.max(0)
        x.max((1, 2))
        x.softmax(7)
        x.softmax(None)
        F.softmax(x)
        x.log_softmax(0)
        x.sort(0)
        x.median(0)
        x.mode(0)
        x.cumsum(9)
        x.argmax(9)
        x.norm("nuc")
        x.norm(2, 9)
        x.diff(-1)
        x.diff(1, 0)
        x.bincount()
        x.logsumexp(9)
        m.softmax(0)
        td.softmax(None)
    """,
    "shapes": """
        x.transpose(0, 9)
        x.permute(0, 1)
        x.permute(2, 0, 1, 3)
        x.unsqueeze(9)
        x.squeeze(9)
        x.tile("a")
        x.split(0, 2)
        x.split([1, 1], 2)
        x.roll(1, 9)
        x.flip(9)
        torch.cat([x, other], 2)
        torch.cat([x, m])
        torch.cat([x, x], 9)
        torch.stack([x, other])
        torch.stack([x, torch.ones(2, 3, 4)])
        F.one_hot(x)
        torch.meshgrid(x, x)
        td.unsqueeze(9)
        td.permute(0, 1)
        td.expand(2, 9)
    """,
    "modules": """
        nn.Linear(4, 2)(x.long())
        nn.Linear(4, 2)(td)
        nn.LayerNorm(5)(x)
        nn.LayerNorm((3, 4))(x)
        nn.RMSNorm(5)(x)
        nn.Conv1d(5, 2, 1)(x.transpose(1, 2))
        nn.Conv1d(4, 2, 3)(x[:, :, 0])
        nn.Conv2d(4, 2, 3)(x)
        nn.ConvTranspose1d(5, 2, 1)(x.transpose(1, 2))
        nn.MaxPool1d(0)(x.transpose(1, 2))
        nn.AvgPool1d(2, padding=2)(x.transpose(1, 2))
        nn.AdaptiveAvgPool1d(-1)(x.transpose(1, 2))
        nn.MultiheadAttention(4, 2, batch_first=True)(x, other, x)
        nn.TransformerDecoderLayer(4, 2, 8, batch_first=True)(x, torch.ones(3, 5, 4))
        F.scaled_dot_product_attention(q, q, q[:1])
        F.scaled_dot_product_attention(q, q, q, dropout_p=2.0)
        nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 3]))
        F.dropout(x, "a")
        F.normalize(x, dim=9)
        nn.CosineSimilarity(dim=9)(x, x)
        F.embedding(ids, torch.ones(2))
        F.embedding_bag(ids, torch.ones(9, 2), mode="foo")
    """,
    "losses": """
        F.cross_entropy(x, ids[:1])
        F.cross_entropy(x.transpose(1, 2), ids, reduction="foo")
        F.cross_entropy(x.transpose(1, 2), ids, label_smoothing=2.0)
        F.nll_loss(x.transpose(1, 2), ids, reduction="foo")
        F.mse_loss(x, torch.ones(7))
        F.mse_loss(x, other)
        F.mse_loss(x, "a")
        F.l1_loss(x, None)
        F.binary_cross_entropy(x, x)
        F.binary_cross_entropy_with_logits(x, other)
        F.kl_div(x, other)
        F.huber_loss(x, x, delta=-1.0)
        F.smooth_l1_loss(x, x, beta=-1.0)
        F.triplet_margin_loss(x, x, other)
        F.margin_ranking_loss(x, x, other)
        F.cosine_embedding_loss(x, x, other)
        F.gaussian_nll_loss(x, x, other)
    """,
    "tensordicts": """
        tdc.TensorDict({("a", 1): torch.ones(3)}, [3])
        tdc.TensorDict({"x": object}, [3])
        td.update(3)
        td.rename({"zz": "a"})
        td.apply(lambda v: "a")
        td.named_apply(3)
        td.with_batch_size([9])
        td.with_batch_size("a")
        td.at["x"].add("a")
        td.memmap(3)
        Point(x=torch.ones(3), name="a", batch_size=[3]).x = 3
    """,
    "functions": """
        tdc.jacrev(lambda a: "a")(torch.ones(2))
        tdc.scan(lambda c, a: c, torch.ones(()), torch.ones(2))
        tdc.scan(lambda c, a: (c.long(), a), torch.ones(()), torch.ones(2))
        tdc.while_loop(lambda a: a, lambda a: a + 1, (torch.ones(2),))
        tdc.while_loop(lambda a: 3, lambda a: a + 1, (torch.ones(()),))
        tdc.cond(torch.ones(2) > 0, lambda: 1, lambda: 2)
        tdc.functional_call(net, td)
        tdc.stack_modules([nn.Linear(1, 1), nn.Linear(2, 1)])
        tdc.ops.implements(torch.relu, kinds="foo")
        tdc.ops.implements(torch.relu, kinds="nested")(lambda x: x)
    """,
    "training": """
        step.load_into(3, step.init())
        step.load_into(nn.Linear(9, 9), step.init())
        tdc.optim.clip_by_norm(-1.0)
        tdc.compile.buckets(0, 4)
    """,
    "data": """
        tdc.data.collate([])
        tdc.io.save(td, 3)
    """,
    "transforms": """
        tdc.vmap(lambda a: a * 2)(torch.tensor(1.0))
        tdc.vmap(lambda a, b: a + b)(torch.ones(3), torch.ones(2))
        tdc.vmap(lambda a, b: a + b, in_dims=(0,))(torch.ones(3), torch.ones(3))
        tdc.vmap(lambda a: a, in_dims=5)(torch.ones(3, 2))
        tdc.vmap(lambda a: a, in_dims="a")(torch.ones(3, 2))
        tdc.vmap(lambda a: a, in_dims=True)(torch.ones(3, 2))
        tdc.vmap(lambda a: a, in_dims=None)(torch.ones(3, 2))
        tdc.vmap(lambda a: a, in_dims=({"x": 0},))(torch.ones(3, 2))
        tdc.vmap(lambda a: a, in_dims=({"zz": 0},))(td)
        tdc.vmap(lambda a: a, in_dims=2)(td)
        tdc.vmap(lambda a: a)(3)
        tdc.vmap(lambda a: a)(x)
        tdc.vmap(lambda a: a, in_dims=1)(x)
        tdc.vmap(lambda a: a, in_dims=9)(x)
        tdc.vmap(lambda a: a, in_dims="a")(x)
        tdc.vmap(lambda a: a, out_dims=5)(torch.ones(3, 2))
        tdc.vmap(lambda a: a, out_dims="a")(torch.ones(3, 2))
        tdc.vmap(lambda a: a, out_dims=(0, 1))(torch.ones(3, 2))
        tdc.vmap(lambda a: (a, a), out_dims=(0, 9))(torch.ones(3, 2))
        tdc.vmap(lambda a: a, out_dims=None)(torch.ones(3, 2))
        tdc.vmap(lambda a: a, out_dims=9)(td)
        tdc.vmap(lambda a: a, in_dims=2, out_dims=9)(x)
        tdc.vmap(lambda a: "a")(torch.ones(3))
        tdc.vmap(lambda a: a, randomness="foo")(torch.ones(3))
        tdc.vmap(lambda a: a, chunk_size=0)(torch.ones(3))
        tdc.vmap(lambda a: a, chunk_size="a")(torch.ones(3))
        tdc.vmap(lambda t: t)(tdc.TensorDict({"x": torch.ones(3)}, []))
        tdc.vmap(lambda a: a @ torch.ones(5))(torch.ones(3, 2))
        tdc.vmap(lambda t: t["zz"])(td)
        tdc.grad(lambda a: a)(torch.ones(2))
        tdc.grad(lambda a: a)(td)
        tdc.grad(lambda a: a.sum(), has_aux=True)(torch.ones(2))
        tdc.grad(lambda a: (a, a.sum()), has_aux=True)(torch.ones(2))
        tdc.grad(lambda a: a.sum(), argnums=1)(torch.ones(2))
        tdc.grad(lambda a, b: (a * b).sum(), argnums=(0, 0))(torch.ones(2), torch.ones(2))
        tdc.grad(lambda a: a.long().sum())(torch.ones(2))
        tdc.value_and_grad(lambda a: a)(torch.ones(2))
        tdc.value_and_grad(lambda a: a.sum(), argnums=3)(torch.ones(2))
        tdc.value_and_grad(lambda a: a.sum(), has_aux=True)(torch.ones(2))
        tdc.value_and_grad(lambda a: "a")(torch.ones(2))
        tdc.jvp(lambda a: a * 2, (torch.ones(2),), (torch.ones(3),))
        tdc.jvp(lambda a: a * 2, (x,), (other,))
        tdc.jvp(lambda a: a * 2, (td,), (td.select("x"),))
        tdc.jvp(lambda a: "a", (torch.ones(2),), (torch.ones(2),))
        tdc.jvp(lambda a: a, (torch.ones(2),), (torch.ones(2),), has_aux=True)
        tdc.vjp(lambda a: "a", torch.ones(2))
        tdc.vjp(lambda a: a * 2, torch.ones(2), has_aux=True)
        tdc.vjp(lambda a: a * 2, torch.ones(2))[1](torch.ones(3))
        tdc.vjp(lambda a: a * 2, torch.ones(2))[1](torch.ones(2).long())
        tdc.vjp(lambda a: a * 2, x)[1](other)
        tdc.vjp(lambda a: a * 2, td)[1](td.select("x"))
        tdc.jacrev(lambda a: a * 2)(torch.ones(2).long())
        tdc.jacrev(lambda a: a * 2, argnums=3)(torch.ones(2))
        tdc.jacrev(lambda a: a * 2, argnums="a")(torch.ones(2))
        tdc.jacrev(lambda a: a * 2, chunk_size=0)(torch.ones(2))
        tdc.jacrev(lambda a: a * 2, chunk_size="a")(torch.ones(2))
        tdc.jacrev(lambda a: a * 2, has_aux=True)(torch.ones(2))
        tdc.jacfwd(lambda a: a * 2)(torch.ones(2).long())
        tdc.jacfwd(lambda a: a * 2, argnums=3)(torch.ones(2))
        tdc.jacfwd(lambda a: "a")(torch.ones(2))
        tdc.jacfwd(lambda a: a * 2, randomness="foo")(torch.ones(2))
        tdc.hessian(lambda a: "a")(torch.ones(2))
        tdc.hessian(lambda a: a.sum())(torch.ones(2).long())
        tdc.hessian(lambda a: a.sum(), argnums=7)(torch.ones(2))
    """,
    "devices": """
        tdc.TensorDict({"x": torch.ones(3)}, [3], device="nowhere")
        tdc.TensorDict({"x": torch.ones(3)}, [3], device="cuda")
        td.with_device("nowhere")
        td.to(dtype="float32")
        td.to("float32")
        td.cuda()
        td.type("a")
        torch.zeros_like(td, device="nowhere")
        torch.zeros_like(x, device="nowhere")
        torch.zeros_like(x, device="cuda")
        torch.ones_like(m, device="nowhere")
        torch.rand_like(x, device="nowhere")
        torch.randn_like(x, dtype=torch.int64)
        torch.empty_like(td, device="nowhere")
        x.to(dtype="float32")
        x.to("float32")
        m.to(dtype="float32")
        x.new_zeros(3, device="nowhere")
        x.new_zeros(3, dtype="a")
        x.new_tensor([1], device="nowhere")
        x.new_full((2,), "a")
        x.sum(1, dtype="float32")
        x.softmax(1, dtype="a")
        x.cumsum(1, dtype="a")
        F.softmax(x, 1, dtype="a")
        tdc.from_list([[1, 2], [3]], device="nowhere")
        tdc.from_list([[1, 2], [3]], dtype="a")
        tdc.from_numpy([np.ones(2), np.ones(3)], device="nowhere")
        tdc.scan(lambda c, a: (c, a), torch.ones(()), torch.ones(2), dim=9)
        tdc.scan(lambda c, a: (c, a), torch.ones(()), torch.ones(2), dim="a")
        tdc.scan(lambda c, a: (c, a), torch.ones(()), torch.tensor(1.0))
        tdc.scan_map(lambda a: a, torch.tensor(1.0))
    """,
    "steps": """
        tdc.compile.train_step(net, lambda n, x: n(x), tdc.optim.sgd(0.1), compile="a")
        step.load_into(net, 3)
        tdc.optim.linear(0.1, 0.0, 0)
        tdc.optim.LossScale(init_scale=-1)
        tdc.optim.LossScale("a")
        tdc.optim.LossScale().init(device="nowhere")
        tdc.optim.LossScale().unscale(3, td)
        tdc.nn.TensorDictModule(3, ["x"], ["y"])
        tdc.nn.TensorDictSequential(3)
        tdc.nn.KVCache.allocate(2, 4, heads=2, head_dim=3, dtype="float32")
        tdc.nn.KVCache.allocate(2, 4, heads=2, head_dim=3, device="nowhere")
        tdc.nn.KVCache.allocate(2, 4, heads=2, head_dim=3).append_(x, x)
        tdc.nn.KVCache.allocate(2, 4, heads=2, head_dim=3).append_(3, 3)
    """,
    "files and loaders": """
        tdc.io.load("")
        tdc.io.memmap_empty(td, 3)
        tdc.io.to_safetensors(td, 3)
        tdc.io.dcp_save(td, 3)
        tdc.data.collate([{"x": 1}, {"y": 1}])
        tdc.data.collate([{"x": "a"}, {"x": 1}])
        tdc.data.pad_sequence([td, td], mask_key=3)
        tdc.data.ragged_stack([])
        tdc.interop.spec(td).with_device("nowhere")
        tdc.interop.spec(td).with_batch_size("a")
        tdc.interop.zeros(td, device="nowhere")
        tdc.interop.zeros(td, device="cuda")
        tdc.interop.from_state_dict({3: torch.ones(2)})
        tdc.as_tensordict({"x": torch.ones(3)}, batch_dims="a")
        tdc.as_tensordict({"x": torch.ones(3)}, [3], device="nowhere")
    """,
    "the rest": """
        tdc.hf.attend(3)
        tdc.hf.generate(3, x)
        tdc.functional_call(net, tdc.from_module(net), td)
        tdc.ensemble(net, tdc.stack_modules([net, net]))(torch.ones(3, 7))
        tdc.ensemble(net, tdc.stack_modules([net, net]), in_dims=5)(torch.ones(3, 4))
        tdc.ensemble(net, tdc.stack_modules([net, net]), in_dims=0)(torch.ones(3, 4))
        tdc.ensemble(net, tdc.from_module(net))(torch.ones(3, 4))
        tdc.cond(torch.tensor(True), lambda a: a, lambda a: (a, a), torch.ones(2))
        tdc.while_loop(lambda a: a < 3, lambda a: (a + 1).long(), (torch.ones(()),))
        tdc.while_loop(lambda a: a.sum() < 3, lambda a: (torch.ones(3),), (torch.ones(2),))
        tdc.scan(lambda c, a: (c, a), torch.ones(()), x)
        tdc.unbatched(lambda a: a.sum())(3)
        tdc.unbatched(lambda a: "a")(x)
        tdc.offsets_of(torch.tensor([1.5]))
    """,
    "values at an index": """
        td.at[0].mul("a")
    """,
    "indices of padded and nested batches": """
        m[1:"a"]
        m[::"a"]
        m[torch.tensor(7)]
        x[::"a"]
        tl[1:"a"]
    """,
    "layers of two levels": """
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
        tdc.ensemble(net, tdc.stack_modules([net, net]))(tl)
    """,
    "optimisers as in torch": """
        tdc.optim.adamw(net.parameters())
        tdc.optim.sgd(net.parameters(), 0.1)
        tdc.optim.lion([{"params": net.parameters()}])
        tdc.optim.schedule_free_sgd(net.parameters())
        tdc.optim.muon(net.parameters(), lr=1e-3)
        tdc.optim.clip_by_global_norm(net.parameters(), 1.0)
        tdc.optim.clip_by_norm(net.parameters(), 1.0)
        tdc.optim.clip_by_value(net.parameters(), 1.0)
        tdc.optim.adamw(1e-3).step()
    """,
    "paths of exported programs": """
        tdc.compile.export(net, (x,)).save("no/such/m.pt2")
        tdc.compile.export(net, (x,)).save("m.pt")
        tdc.compile.export(net, (x,)).save(3)
    """,
    "sizes of ragged dims": """
        nn.LayerNorm(x.shape[1])
        nn.Embedding(x.shape[1], 4)
        torch.randint(5, (2, x.shape[1]))
    """,
    "a container for a tensor": """
        torch.tensor(x)
        torch.tensor(m)
        torch.tensor(tl)
        torch.tensor(td)
        torch.asarray(m)
        torch.from_dlpack(x)
        np.from_dlpack(x)
        x.with_values(3)
        m.with_data(3)
        m.filled("a")
        x.to_padded(length=-1)
    """,
    "a container for a number": """
        round(x)
        round(td)
        divmod(x, 2)
        complex(x)
        f"{x:.2f}"
        f"{td:d}"
    """,
}
