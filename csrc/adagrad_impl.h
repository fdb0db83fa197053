// Adagrad. Included by kernels_impl.h; the reference is src/penstock/rules/standard.py.
class Adagrad {
 public:
  static constexpr Rule id = Rule::adagrad;
  static constexpr bool is_signed[] = {false};

  explicit Adagrad(const float* scalars)
      : grad_scale_(V::splat(scalars[0])),
        l2_(V::splat(scalars[1])),
        eps_(V::splat(scalars[2])),
        neg_lr_(V::splat(scalars[3])),
        has_l2_(flag(scalars[4])) {}

  static constexpr int parts = 3;
  void begin(V param, V grad, V* states, V* begun) const {
    V g = grad * grad_scale_;
    if (has_l2_) g = V::fma(l2_, param, g);
    const V sum = V::fma(g, g, states[0]);
    states[0] = sum;
    begun[0] = param;
    begun[1] = neg_lr_ * g;
    begun[2] = V::sqrt(sum);
  }
  V end(const V* begun) const { return begun[0] + begun[1] / (begun[2] + eps_); }

 private:
  V grad_scale_, l2_, eps_, neg_lr_;
  bool has_l2_;
};
