// Adam and AdamW, one fused pass. Included by kernels_impl.h.
//
// The order and the roundings are those of the reference in src/penstock/rules/adam.py, operation by operation.

struct AdamConstants {
  explicit AdamConstants(const AdamTask& task)
      : grad_scale(V::splat(task.grad_scale)),
        l2(V::splat(task.l2)),
        decay(V::splat(task.decay)),
        lerp_weight(V::splat(task.lerp_weight)),
        beta2(V::splat(task.beta2)),
        grad_sq_weight(V::splat(task.grad_sq_weight)),
        bias2_sqrt(V::splat(task.bias2_sqrt)),
        eps(V::splat(task.eps)),
        neg_step_size(V::splat(task.neg_step_size)),
        has_l2(task.l2 != 0.0f),
        lerp_from_grad(task.lerp_from_grad) {}

  V grad_scale, l2, decay, lerp_weight, beta2, grad_sq_weight, bias2_sqrt, eps, neg_step_size;
  bool has_l2, lerp_from_grad;
};

// One vector of the update; returns the new parameter and writes the moments.
inline V adam_step(const AdamConstants& c, V param, V grad, float* exp_avg_at, float* exp_avg_sq_at) {
  V g = grad * c.grad_scale;
  if (c.has_l2) g = V::fma(c.l2, param, g);
  const V p = param * c.decay;
  const V before = V::load(exp_avg_at);
  const V exp_avg = V::fma(c.lerp_weight, g - before, c.lerp_from_grad ? g : before);
  const V exp_avg_sq = V::fma(c.grad_sq_weight * g, g, V::load(exp_avg_sq_at) * c.beta2);
  V::store(exp_avg_at, exp_avg);
  V::store(exp_avg_sq_at, exp_avg_sq);
  const V denominator = V::sqrt(exp_avg_sq) / c.bias2_sqrt + c.eps;
  return p + c.neg_step_size * exp_avg / denominator;
}

template <class Store, class Grad>
void adam(const AdamTask& task, size_t begin, size_t end) noexcept {
  using ParamWord = typename Store::ParamWord;
  using MasterWord = typename Store::MasterWord;
  using GradWord = typename Grad::Word;
  ParamWord* param = static_cast<ParamWord*>(task.param);
  MasterWord* master = static_cast<MasterWord*>(task.master);
  const GradWord* grad = static_cast<const GradWord*>(task.grad);
  const AdamConstants c(task);

  size_t i = begin;
  for (; i + V::width <= end; i += V::width)
    Store::put(param, master, i,
               adam_step(c, Store::get(param, master, i), Grad::get(grad + i), task.exp_avg + i, task.exp_avg_sq + i));
  if (i == end) return;

  const size_t count = end - i;
  Tail<ParamWord> p(param + i, count);
  Tail<MasterWord> rest;
  if constexpr (Store::has_master) rest = Tail<MasterWord>(master + i, count);
  const Tail<GradWord> g(grad + i, count);
  Tail<float> exp_avg(task.exp_avg + i, count);
  Tail<float> exp_avg_sq(task.exp_avg_sq + i, count);
  Store::put(p.words, rest.words, 0,
             adam_step(c, Store::get(p.words, rest.words, 0), Grad::get(g.words), exp_avg.words, exp_avg_sq.words));
  p.put(param + i, count);
  if constexpr (Store::has_master) rest.put(master + i, count);
  exp_avg.put(task.exp_avg + i, count);
  exp_avg_sq.put(task.exp_avg_sq + i, count);
}

template <class Store, class Row>
constexpr void add_adam(Row& row) {
  row[int(DType::fp32)] = adam<Store, Fp32>;
  row[int(DType::bf16)] = adam<Store, Bf16>;
  row[int(DType::fp16)] = adam<Store, Fp16>;
}
