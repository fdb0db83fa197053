// Lion. Included by kernels_impl.h; the reference is src/penstock/rules/standard.py.
class Lion {
 public:
  static constexpr Rule id = Rule::lion;
  static constexpr bool is_signed[] = {true};

  explicit Lion(const float* scalars)
      : grad_scale_(V::splat(scalars[0])),
        decay_(V::splat(scalars[1])),
        beta1_(V::splat(scalars[2])),
        grad_weight1_(V::splat(scalars[3])),
        beta2_(V::splat(scalars[4])),
        grad_weight2_(V::splat(scalars[5])),
        neg_lr_(V::splat(scalars[6])) {}

  static constexpr int parts = 1;
  void begin(V param, V grad, V* states, V* begun) const {
    const V g = grad * grad_scale_;
    const V direction = V::sign(V::fma(grad_weight1_, g, states[0] * beta1_));
    states[0] = V::fma(grad_weight2_, g, states[0] * beta2_);
    begun[0] = V::fma(neg_lr_, direction, param * decay_);
  }
  V end(const V* begun) const { return begun[0]; }

 private:
  V grad_scale_, decay_, beta1_, grad_weight1_, beta2_, grad_weight2_, neg_lr_;
};
