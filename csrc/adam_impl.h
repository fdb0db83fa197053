// Adam and AdamW, with and without amsgrad. Included by kernels_impl.h.
//
// The order and the roundings are those of the reference in src/penstock/rules/standard.py, operation by operation.
template <bool amsgrad>
class Adam {
 public:
  static constexpr Rule id = amsgrad ? Rule::amsgrad : Rule::adam;
  static constexpr bool is_signed[] = {true, false, false};

  explicit Adam(const float* scalars)
      : grad_scale_(V::splat(scalars[0])),
        l2_(V::splat(scalars[1])),
        decay_(V::splat(scalars[2])),
        lerp_weight_(V::splat(scalars[3])),
        beta2_(V::splat(scalars[4])),
        grad_sq_weight_(V::splat(scalars[5])),
        bias2_sqrt_(V::splat(scalars[6])),
        eps_(V::splat(scalars[7])),
        neg_step_size_(V::splat(scalars[8])),
        has_l2_(flag(scalars[9])),
        divides_(flag(scalars[6] - 1.0f)),
        lerp_from_grad_(flag(scalars[10])) {}

  static constexpr int parts = 3;
  void begin(V param, V grad, V* states, V* begun) const {
    V g = grad * grad_scale_;
    if (has_l2_) g = V::fma(l2_, param, g);
    const V before = states[0];
    V nearer = before;  // not by ?:, for which some compilers go through memory
    if (lerp_from_grad_) nearer = g;
    const V exp_avg = V::fma(lerp_weight_, g - before, nearer);
    V exp_avg_sq = V::fma(grad_sq_weight_ * g, g, states[1] * beta2_);
    states[0] = exp_avg;
    states[1] = exp_avg_sq;
    if constexpr (amsgrad) states[2] = exp_avg_sq = V::larger(states[2], exp_avg_sq);
    begun[0] = param * decay_;
    begun[1] = neg_step_size_ * exp_avg;
    begun[2] = V::sqrt(exp_avg_sq);
  }
  V end(const V* begun) const {
    V root = begun[2];
    if (divides_) root = root / bias2_sqrt_;
    return begun[0] + begun[1] / (root + eps_);
  }

 private:
  V grad_scale_, l2_, decay_, lerp_weight_, beta2_, grad_sq_weight_, bias2_sqrt_, eps_, neg_step_size_;
  bool has_l2_, divides_, lerp_from_grad_;
};
