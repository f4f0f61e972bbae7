// tdc::varlen_attention for programs without Python: attention within each row of a packed batch, on CPU.
//
// A package of a model with attention on ragged batches calls this operation. In Python `import tdc` registers it; a C++
// program links this file. Shapes: q (N, H, D), k and v (M, H, D), offsets (B + 1,) -> out (N, H, D), logsumexp (N, H).

#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace {

std::tuple<at::Tensor, at::Tensor> varlen_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const at::Tensor& q_offsets,
    const std::optional<at::Tensor>& k_offsets,
    bool causal,
    double scale) {
  at::Tensor out = at::zeros_like(q, at::MemoryFormat::Contiguous);
  const auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor lse = at::zeros({q.size(0), q.size(1)}, q.options().dtype(wide));
  const at::Tensor queries = q_offsets.contiguous(), keys = k_offsets.value_or(q_offsets).contiguous();
  const int64_t *a = queries.data_ptr<int64_t>(), *c = keys.data_ptr<int64_t>();
  for (int64_t row = 0; row + 1 < queries.size(0); ++row) {
    if (a[row] == a[row + 1] || c[row] == c[row + 1]) {
      continue;  // no query, or nothing to attend to
    }
    const auto heads_first = [](const at::Tensor& x, const int64_t* at) {
      return x.slice(0, at[0], at[1]).transpose(0, 1).unsqueeze(0);
    };
    const auto [o, s] = at::_scaled_dot_product_flash_attention_for_cpu(
        heads_first(q, a + row), heads_first(k, c + row), heads_first(v, c + row), 0.0, causal, {}, scale);
    out.slice(0, a[row], a[row + 1]).copy_(o[0].transpose(0, 1));
    lse.slice(0, a[row], a[row + 1]).copy_(s[0].transpose(0, 1));
  }
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY(tdc, library) {
  library.def(
      "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor? k_offsets, bool causal, float scale) -> "
      "(Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(tdc, CompositeExplicitAutograd, library) {
  library.impl("varlen_attention", &varlen_attention);
}
