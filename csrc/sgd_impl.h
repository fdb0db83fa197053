// SGD, plain and with momentum. Included by kernels_impl.h; the reference is src/penstock/rules/standard.py.
class Sgd {
 public:
  static constexpr Rule id = Rule::sgd;

  explicit Sgd(const float* scalars)
      : grad_scale_(V::splat(scalars[0])),
        l2_(V::splat(scalars[1])),
        neg_lr_(V::splat(scalars[2])),
        has_l2_(flag(scalars[3])) {}

  static constexpr int parts = 1;
  void begin(V param, V grad, V*, V* begun) const {
    V g = grad * grad_scale_;
    if (has_l2_) g = V::fma(l2_, param, g);
    begun[0] = V::fma(neg_lr_, g, param);
  }
  V end(const V* begun) const { return begun[0]; }

 private:
  V grad_scale_, l2_, neg_lr_;
  bool has_l2_;
};

class SgdMomentum {
 public:
  static constexpr Rule id = Rule::sgd_momentum;
  static constexpr bool is_signed[] = {true};

  explicit SgdMomentum(const float* scalars)
      : grad_scale_(V::splat(scalars[0])),
        l2_(V::splat(scalars[1])),
        neg_lr_(V::splat(scalars[2])),
        momentum_(V::splat(scalars[3])),
        grad_weight_(V::splat(scalars[4])),
        has_l2_(flag(scalars[5])),
        first_(flag(scalars[6])),
        nesterov_(flag(scalars[7])) {}

  static constexpr int parts = 1;
  void begin(V param, V grad, V* states, V* begun) const {
    V g = grad * grad_scale_;
    if (has_l2_) g = V::fma(l2_, param, g);
    const V buffer = first_ ? g : V::fma(grad_weight_, g, states[0] * momentum_);
    states[0] = buffer;
    begun[0] = V::fma(neg_lr_, nesterov_ ? V::fma(momentum_, buffer, g) : buffer, param);
  }
  V end(const V* begun) const { return begun[0]; }

 private:
  V grad_scale_, l2_, neg_lr_, momentum_, grad_weight_;
  bool has_l2_, first_, nesterov_;
};
