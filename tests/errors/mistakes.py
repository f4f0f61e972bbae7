"""Four hundred mistakes, by section; each line is a program with the names of `test_mistakes.names`."""

from __future__ import annotations

MISTAKES: dict[str, str] = {
    "construction": """
        tdc.pack([])
        tdc.pack(None)
        tdc.pack(3)
        tdc.pack([1, 2])
        tdc.pack(["a", "b"])
        tdc.pack([torch.ones(2, 3), torch.ones(2)])
        tdc.pack([torch.ones(2), None])
        tdc.pack([np.ones(2), torch.ones(3)])
        tdc.pack(torch.ones(()))
        tdc.pack([torch.ones(2), torch.ones(3).long()])
        tdc.pack([torch.ones(2), torch.ones(3)], ragged_dim=0)
        tdc.NestedTensor(torch.ones(5, 2), torch.tensor([2, 3]))
        tdc.NestedTensor(torch.ones(5, 2), [0, 2, 5])
        tdc.NestedTensor(torch.ones(5, 2), torch.tensor([0.0, 2.0, 5.0]))
        tdc.NestedTensor(torch.ones(5, 2), torch.tensor([0, 2, 5], dtype=torch.int32))
        tdc.NestedTensor([1, 2, 3], torch.tensor([0, 3]))
        tdc.NestedTensor(torch.ones(5, 2), torch.tensor([0, 2, 5]), max_length=1)
        tdc.NestedTensor(torch.ones(5, 2), torch.tensor([0, 2, 5]), max_length="3")
        tdc.NestedTensor(torch.ones(5, 2), torch.tensor([[0, 2, 5]]))
        tdc.NestedTensor(torch.ones(5, 2))
        tdc.MaskedBatch(torch.ones(2, 3), torch.tensor([2]))
        tdc.MaskedBatch(torch.ones(2, 3), torch.tensor([True, False]))
        tdc.MaskedBatch([[1, 2]], torch.tensor([2]))
        tdc.MaskedBatch(torch.ones(2, 3), [2, 3])
        tdc.from_list([])
        tdc.from_list(3)
        tdc.from_list([[1, 2], 3])
        tdc.from_list([["a"], ["b", "c"]])
        tdc.from_padded(torch.ones(2, 3))
        tdc.from_padded(torch.ones(2, 3), torch.tensor([2, 9]))
        tdc.from_padded(torch.ones(2, 3), torch.tensor([2.0, 3.0]))
        tdc.from_padded([[1, 2], [3, 0]], torch.tensor([2, 1]))
        tdc.from_numpy([1, 2])
        tdc.from_torch(torch.ones(2, 3))
        tdc.nested_like(torch.ones(3, 4), x)
        tdc.nested_like(x, torch.ones(5))
        tdc.nested_like([1], x)
        tdc.offsets_of([2, 3])
        tdc.truncate(x, "2")
        tdc.truncate(torch.ones(2, 3), 2)
        tdc.positions(torch.ones(2, 3))
        tdc.validate(torch.ones(2))
    """,
    "attributes": """
        m.length
        x.T
        x.item()
        x.numpy()
        x.numpy(force=True)
        x.backward()
        x.data_ptr()
        x.lengths = 3
        x.values = torch.ones(5, 4)
        m.data = torch.ones(2, 3, 4)
        del x.values
        float(x)
        int(x)
        bool(x)
        x.shape[1] + 1
        range(x.shape[1])
        torch.ones(2, x.shape[1])
        x.view(x.shape[0], x.shape[1] * 4)
        x.type("torch.Foo")
        x.requires_grad = True
        td.batch_size = [2]
        td.device = "cpu"
        td.to("nowhere")
        x.to("nowhere")
        m.to("nowhere")
        float(td)
        bool(td)
        td.item()
    """,
    "indices": """
        x[5]
        x[-3]
        x[0, 9]
        x[0, 0, 9]
        x["a"]
        x[None, None, "a"]
        x[1.0]
        x[0.5:2]
        x[:, [0, 1], [0, 1]]
        x[torch.tensor([5])]
        x[torch.tensor([0.0])]
        x[torch.tensor([True])]
        x[torch.tensor([True, False, True])]
        x[..., ...]
        x[0, 0, 0, 0]
        x[:, :, :, 0]
        x[{1: 2}]
        x[[0, "a"]]
        x[:, 7]
        x[0] = 1
        x[:, 0] = torch.ones(2, 4)
        del x[0]
        m[5]
        m["a"]
        m[torch.tensor([3])]
        m[0] = 1
        td[5]
        td[-4]
        td[1.5]
        td["missing"]
        td["n", "missing"]
        td["x", "y"]
        td[None, "x"]
        td[torch.tensor([7])]
        td[torch.tensor([True])]
        td[torch.tensor([0.5])]
        td[0, 0]
        td[..., 0, 0]
        td["x"] = 3
        td[0] = 1
        del td["x"]
        td[()]["zz"]
        td.get(3)
        td.get(("n", 3))
        x.select(1, 9)
        x.narrow(1, 0, 9)
        x.index_select(1, torch.tensor([9]))
        x.gather(1, torch.tensor([0]))
    """,
    "arithmetic": """
        x + torch.ones(7)
        x + torch.ones(3, 3, 4)
        x + "a"
        x + None
        x + [1, 2]
        x + other
        x + m
        x * td
        x @ torch.ones(5, 2)
        x @ x
        x @ torch.ones(2, 2, 2, 2)
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
        td + {"x": 1}
        td + "a"
        td + torch.ones(9)
        td * None
        td @ td
    """,
    "reductions": """
        x.sum(5)
        x.sum("a")
        x.sum((1, 1))
        x.sum((0, 2))
        x.sum(0)
        x.mean(3)
        x.long().mean(1)
        x.max(0)
        x.max((1, 2))
        x.softmax(7)
        x.softmax(None)
        F.softmax(x)
        x.softmax((1, 2))
        x.log_softmax(0)
        x.sort(0)
        x.sort("a")
        x.topk(9, 1)
        x.topk(-1, 1)
        x.topk("2", 1)
        x.kthvalue(0, 1)
        x.kthvalue(9, 1)
        x.quantile(2.0, 1)
        x.long().quantile(0.5, 1)
        x.median(0)
        x.mode(0)
        x.cumsum(9)
        x.cumsum("a")
        x.cumsum(0)
        x.argmax(9)
        x.std(9)
        x.std(1, True, correction=1)
        x.norm("nuc")
        x.norm(2, 9)
        x.diff(-1)
        x.diff(1, 0)
        x.unique()
        x.bincount()
        x.logsumexp(9)
        x.any(9)
        m.sum(9)
        m.softmax(0)
        m.topk(9, 1)
        td.sum(3)
        td.mean("a")
        td.softmax(None)
        td.topk(9, 0)
    """,
    "shapes": """
        x.view(7, 7)
        x.reshape("a")
        x.flatten(2, 1)
        x.flatten(0, 2)
        x.unflatten(2, (3, 3))
        x.unflatten(1, (2, 2))
        x.transpose(0, 9)
        x.transpose("a", 1)
        x.permute(0, 1)
        x.permute(0, 0, 1)
        x.permute(2, 0, 1, 3)
        x.unsqueeze(9)
        x.unsqueeze("a")
        x.squeeze(9)
        x.expand(2, 3)
        x.expand(2, 9, 9)
        x.repeat(2)
        x.repeat(1, "a", 1)
        x.tile("a")
        x.chunk(0, 1)
        x.split(0, 2)
        x.split([1, 1], 2)
        x.split("a")
        x.unbind(1)
        x.unfold(1, 9, 1)
        x.unfold(2, 2, 0)
        x.roll(1, 9)
        x.flip(9)
        x.movedim(0, 9)
        torch.cat([x, other], 2)
        torch.cat([x, m])
        torch.cat([x, x], 9)
        torch.stack([x, other])
        torch.stack([x, torch.ones(2, 3, 4)])
        F.pad(x, (1,))
        F.pad(x, (1, 1, 1, 1, 1, 1, 1, 1))
        F.pad(x, "a")
        F.one_hot(x)
        torch.meshgrid(x, x)
        td.reshape(7)
        td.view(2, 2)
        td.unsqueeze(9)
        td.permute(0, 1)
        td.expand(2, 9)
        td.split(0)
        torch.stack([td, td[:2]])
        torch.cat([td, x])
    """,
    "modules": """
        nn.Linear(5, 2)(x)
        nn.Linear(4, 2)(x.long())
        nn.Linear(4, 2)(x.double())
        nn.Linear(4, 2)(td)
        nn.Bilinear(4, 5, 2)(x, x)
        nn.Embedding(9, 2)(x)
        nn.Embedding(9, 2)(ids - 5)
        nn.LayerNorm(5)(x)
        nn.LayerNorm((3, 4))(x)
        nn.RMSNorm(5)(x)
        nn.BatchNorm1d(5)(x.transpose(1, 2))
        nn.Conv1d(5, 2, 1)(x.transpose(1, 2))
        nn.Conv1d(4, 2, 3)(x[:, :, 0])
        nn.Conv2d(4, 2, 3)(x)
        nn.ConvTranspose1d(5, 2, 1)(x.transpose(1, 2))
        nn.MaxPool1d(0)(x.transpose(1, 2))
        nn.AvgPool1d(2, padding=2)(x.transpose(1, 2))
        nn.AdaptiveAvgPool1d(-1)(x.transpose(1, 2))
        nn.Upsample(scale_factor=0.0)(x.transpose(1, 2))
        nn.LSTM(4, 2)(x)
        nn.MultiheadAttention(6, 2, batch_first=True)(x, x, x)
        nn.MultiheadAttention(4, 2, batch_first=True)(x, other, x)
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)(x)
        nn.TransformerDecoderLayer(4, 2, 8, batch_first=True)(x, torch.ones(3, 5, 4))
        F.scaled_dot_product_attention(q, q, q[:1])
        F.scaled_dot_product_attention(q, q, q, dropout_p=2.0)
        nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 3]))
        F.dropout(x, "a")
        nn.PReLU(5)(x.transpose(1, 2))
        F.glu(x[:, :, :3])
        nn.PixelShuffle(3)(x)
        F.normalize(x, dim=9)
        nn.CosineSimilarity(dim=9)(x, x)
        F.interpolate(x.transpose(1, 2))
        F.embedding(ids, torch.ones(2))
        F.embedding_bag(ids, torch.ones(9, 2), mode="foo")
        F.linear(x, torch.ones(2, 5))
    """,
    "losses": """
        F.cross_entropy(x, torch.zeros(2).long())
        F.cross_entropy(x, ids[:1])
        F.cross_entropy(x.transpose(1, 2), ids + 9)
        F.cross_entropy(x.transpose(1, 2), ids.float())
        F.cross_entropy(x.transpose(1, 2), ids, reduction="foo")
        F.cross_entropy(x.transpose(1, 2), ids, weight=torch.ones(9))
        F.cross_entropy(x.transpose(1, 2), ids, label_smoothing=2.0)
        F.nll_loss(x.transpose(1, 2), ids, reduction="foo")
        F.mse_loss(x, torch.ones(7))
        F.mse_loss(x, other)
        F.mse_loss(x, x, reduction="foo")
        F.mse_loss(x, "a")
        F.l1_loss(x, None)
        F.binary_cross_entropy(x, x)
        F.binary_cross_entropy_with_logits(x, other)
        F.kl_div(x, other)
        F.huber_loss(x, x, delta=-1.0)
        F.smooth_l1_loss(x, x, beta=-1.0)
        F.ctc_loss(x, ids, torch.tensor([2, 3]), torch.tensor([1, 1]))
        F.triplet_margin_loss(x, x, other)
        F.margin_ranking_loss(x, x, other)
        F.cosine_embedding_loss(x, x, other)
        F.gaussian_nll_loss(x, x, other)
    """,
    "tensordicts": """
        tdc.TensorDict(3)
        tdc.TensorDict([1, 2], [2])
        tdc.TensorDict({"x": torch.ones(3)}, [2])
        tdc.TensorDict({"x": torch.ones(3)}, "a")
        tdc.TensorDict({"x": torch.ones(3)}, [-1])
        tdc.TensorDict({"x": torch.ones(3)}, [1.5])
        tdc.TensorDict({1: torch.ones(3)}, [3])
        tdc.TensorDict({("a", 1): torch.ones(3)}, [3])
        tdc.TensorDict({"x": torch.ones(3), "y": torch.ones(4)}, [3])
        tdc.TensorDict({"x": object}, [3])
        tdc.TensorDict({"x": torch.ones(3)}, batch_dims=1)
        tdc.TensorDict({"x": torch.ones(3)}, [3], foo=1)
        td.set("z", torch.ones(9))
        td.set(3, torch.ones(3))
        td.set(("n", "y", "z"), torch.ones(3))
        td.update(3)
        td.update({"x": torch.ones(9, 2)})
        td.select("zz")
        td.select(3)
        td.rename({"zz": "a"})
        td.rename({"x": "n"})
        td.apply(3)
        td.apply(lambda v: "a")
        td.named_apply(3)
        td.flatten_keys(3)
        td.unflatten_keys(3)
        td.with_batch_size([9])
        td.with_batch_size("a")
        td.at["x"].add("a")
        td.at[9].set(td[0])
        td.memmap(3)
        td.pop("zz")
        tdc.stack_keys(td, "zz", "x")
        tdc.merge(td, 3)
        tdc.partition(td, 3)
        tdc.ravel(3)
        tdc.unravel_key(3)
        tdc.as_tensordict(3)
        Point(x=torch.ones(3), name="a", batch_size=[4])
        Point(x="a", name="a", batch_size=[3]).foo
        Point(x=torch.ones(3), name="a", batch_size=[3]).x = 3
    """,
    "functions": """
        tdc.batch(3)
        tdc.batch(lambda a: a + 1)()
        tdc.batch(lambda a: a + 1)(1, 2)
        tdc.batch(lambda a: a.foo)(x)
        tdc.batch(lambda a: a.sum(5))(x)
        tdc.batch(lambda a, b: a + b)(x, tdc.pack(ROWS[:1]))
        tdc.vmap(3)
        tdc.grad(3)
        tdc.grad(lambda a: a.sum())(torch.ones(2).long())
        tdc.jacrev(lambda a: "a")(torch.ones(2))
        tdc.scan(3, torch.ones(()), torch.ones(2))
        tdc.scan(lambda c, a: c, torch.ones(()), torch.ones(2))
        tdc.scan(lambda c, a: (c.long(), a), torch.ones(()), torch.ones(2))
        tdc.while_loop(lambda a: a, lambda a: a + 1, (torch.ones(2),))
        tdc.while_loop(lambda a: 3, lambda a: a + 1, (torch.ones(()),))
        tdc.cond(torch.ones(2) > 0, lambda: 1, lambda: 2)
        tdc.cond("a", lambda a: a, lambda a: a, x)
        tdc.functional_call(3, td)
        tdc.functional_call(net, 3)
        tdc.functional_call(net, td)
        tdc.stack_modules([])
        tdc.stack_modules([nn.Linear(1, 1), nn.Linear(2, 1)])
        tdc.from_module(3)
        tdc.param_count(3)
        tdc.unbatched(3)
        tdc.map(3, td)
        tdc.map(lambda p: p, 3)
        tdc.map(lambda p: p, td, 9)
        tdc.map(lambda p: p, td, chunksize=-1)
        tdc.map(lambda p: "a", td)
        tdc.map(lambda p: p, td, executor=3)
        tdc.ops.implements(torch.relu, kinds="foo")
        tdc.ops.implements(torch.relu, kinds="nested")(lambda x: x)
    """,
    "training": """
        tdc.compile.counted(3)
        tdc.compile.train_step(3, lambda n, x: n(x), tdc.optim.sgd(0.1))
        tdc.compile.train_step(net, 3, tdc.optim.sgd(0.1))
        tdc.compile.train_step(net, lambda n, x: n(x).sum(), 3)
        tdc.compile.train_step(net, lambda n, x: n(x).sum(), torch.optim.SGD(net.parameters(), 0.1))
        tdc.compile.train_step(net, lambda n, x: n(x).sum(), tdc.optim.sgd(0.1), accumulate=0)
        step(3, x)
        step(step.init())
        step.load_into(3, step.init())
        step.load_into(nn.Linear(9, 9), step.init())
        tdc.optim.sgd("a")
        tdc.optim.sgd(-1.0)
        tdc.optim.adam(0.1, betas=(2.0, 0.9))
        tdc.optim.adam(0.1, eps="a")
        tdc.optim.adamw(0.1, weight_decay=-1.0)
        tdc.optim.chain(3)
        tdc.optim.clip_by_norm(-1.0)
        tdc.optim.clip_by_global_norm("a")
        tdc.optim.linear("a", 0.0, 10)
        tdc.optim.ema(2.0)
        tdc.optim.masked(tdc.optim.sgd(0.1), 3)
        tdc.optim.sgd(0.1).init(3)
        tdc.compile.export(3, x)
        tdc.compile.load("nowhere.pt2")
        tdc.compile.buckets(0, 4)
        tdc.compile.checkpoint(3)
        tdc.compile.report(3)
        tdc.nn.TensorDictParams(3)
        tdc.nn.lora_init(3, rank=2)
        tdc.nn.expose_tensors(3)
    """,
    "data": """
        tdc.data.loader(3)
        tdc.data.loader(td, batch_size=0)
        tdc.data.loader(td, batch_size="a")
        tdc.data.loader(td, batch_size=2, seed="a")
        tdc.data.loader(td, batch_size=2, drop_last=3)
        tdc.data.collate([])
        tdc.data.collate([1, "a"])
        tdc.data.collate(3)
        tdc.data.pad_sequence(3)
        tdc.data.pad_sequence([])
        tdc.data.pad_sequence([td, 3])
        tdc.data.ragged_stack(3)
        tdc.data.group_by(td, "zz")
        tdc.data.group_by(3, "x")
        tdc.data.BucketSampler([3, 2], 0)
        tdc.data.BucketSampler("a", 2)
        tdc.data.TokenBudgetSampler([3, 2], 0)
        tdc.data.TokenBudgetSampler([3, 2], 1)
        tdc.data.from_arrow(3)
        tdc.io.load("nowhere")
        tdc.io.load(3)
        tdc.io.save(3, "nowhere")
        tdc.io.save(td, 3)
        tdc.io.to_buffer(3)
        tdc.io.memmap_empty(3, "nowhere", [2])
        tdc.io.memmap_empty({"x": 3}, "nowhere", [2])
        tdc.io.from_safetensors("nowhere.safetensors")
        tdc.io.to_safetensors(3, "nowhere.safetensors")
        tdc.io.dcp_load("nowhere")
        tdc.interop.from_state_dict(3)
        tdc.interop.from_struct_array(np.ones(2))
        tdc.interop.to_struct_array(3)
        tdc.interop.from_dlpack(3)
        tdc.interop.check(td, 3)
        tdc.interop.spec(3)
        tdc.interop.infer_batch_size(3)
        tdc.interop.to_hf(3)
        tdc.interop.from_hf(3)
    """,
}
