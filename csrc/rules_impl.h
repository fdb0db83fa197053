// The optimizers' arithmetic. Included by kernels_impl.h.
//
// Order and roundings are those of the reference in src/penstock/rules/standard.py, operation by operation. A rule begins an
// update, which changes the states, and ends it from the `parts` vectors that it left in `begun`.

// Returns a scalar that is 0 or 1 as an integer: a loop tests it again for every vector.
inline bool flag(float scalar) {
  unsigned bits;
  __builtin_memcpy(&bits, &scalar, sizeof bits);
  return bits != 0;
}

// The scalars of one update: the factor on the gradient, those of the rule, and the flags, which are the same for all rules.
template <Rule rule>
class Scalars {
 public:
  static constexpr Rule id = rule;
  static constexpr int count = scalar_count[int(rule)] - 1 - flag_count;
  static constexpr int parts = 1;

  explicit Scalars(const float* from) : Scalars(from, std::make_index_sequence<count>{}) {}
  V end(const V* begun) const { return begun[0]; }

 protected:
  // The first value is weight decay that is added to the gradient, where there is any.
  V scaled(V param, V grad) const {
    V g = grad * grad_scale;
    if (has_l2) g = V::fma(values[0], param, g);
    return g;
  }

  V grad_scale, values[count];
  bool has_l2, lerp_from_grad, first, nesterov;

 private:
  template <size_t... i>
  Scalars(const float* from, std::index_sequence<i...>)
      : grad_scale(V::splat(from[0])),
        values{V::splat(from[1 + i])...},
        has_l2(flag(from[1 + count])),
        lerp_from_grad(flag(from[2 + count])),
        first(flag(from[3 + count])),
        nesterov(flag(from[4 + count])) {}
};

template <bool amsgrad>
class Adam : public Scalars<amsgrad ? Rule::amsgrad : Rule::adam> {
 public:
  static constexpr bool is_signed[] = {true, false, false};
  static constexpr int parts = 3;

  explicit Adam(const float* from) : Adam::Scalars(from), divides_(flag(from[6] - 1.0f)) {}
  void begin(V param, V grad, V* states, V* begun) const {
    const auto& [l2, decay, lerp_weight, beta2, grad_sq_weight, bias2_sqrt, eps, neg_step_size] = this->values;
    const V g = this->scaled(param, grad), before = states[0];
    V nearer = before;  // not by ?:, for which some compilers go through memory
    if (this->lerp_from_grad) nearer = g;
    const V exp_avg = V::fma(lerp_weight, g - before, nearer);
    V exp_avg_sq = V::fma(grad_sq_weight * g, g, states[1] * beta2);
    states[0] = exp_avg;
    states[1] = exp_avg_sq;
    if constexpr (amsgrad) states[2] = exp_avg_sq = V::larger(states[2], exp_avg_sq);
    begun[0] = param * decay;
    begun[1] = neg_step_size * exp_avg;
    begun[2] = V::sqrt(exp_avg_sq);
  }
  V end(const V* begun) const {
    const auto& [l2, decay, lerp_weight, beta2, grad_sq_weight, bias2_sqrt, eps, neg_step_size] = this->values;
    V root = begun[2];
    if (divides_) root = root / bias2_sqrt;
    return begun[0] + begun[1] / (root + eps);
  }

 private:
  bool divides_;
};

class Adagrad : public Scalars<Rule::adagrad> {
 public:
  static constexpr bool is_signed[] = {false};
  static constexpr int parts = 3;

  using Scalars::Scalars;
  void begin(V param, V grad, V* states, V* begun) const {
    const auto& [l2, eps, neg_lr] = values;
    const V g = scaled(param, grad);
    states[0] = V::fma(g, g, states[0]);
    begun[0] = param;
    begun[1] = neg_lr * g;
    begun[2] = V::sqrt(states[0]) + eps;
  }
  V end(const V* begun) const { return begun[0] + begun[1] / begun[2]; }
};

class Lion : public Scalars<Rule::lion> {
 public:
  static constexpr bool is_signed[] = {true};

  using Scalars::Scalars;
  void begin(V param, V grad, V* states, V* begun) const {
    const auto& [decay, beta1, grad_weight1, beta2, grad_weight2, neg_lr] = values;
    const V g = grad * grad_scale;
    const V direction = V::sign(V::fma(grad_weight1, g, states[0] * beta1));
    states[0] = V::fma(grad_weight2, g, states[0] * beta2);
    begun[0] = V::fma(neg_lr, direction, param * decay);
  }
};

template <bool has_momentum>
class Sgd : public Scalars<has_momentum ? Rule::sgd_momentum : Rule::sgd> {
 public:
  static constexpr bool is_signed[] = {true};

  using Sgd::Scalars::Scalars;
  void begin(V param, V grad, V* states, V* begun) const {
    const auto& [l2, neg_lr, momentum, grad_weight] = this->values;
    const V g = this->scaled(param, grad);
    V change = g;
    if constexpr (has_momentum) {
      states[0] = this->first ? g : V::fma(grad_weight, g, states[0] * momentum);
      change = this->nesterov ? V::fma(momentum, states[0], g) : states[0];
    }
    begun[0] = V::fma(neg_lr, change, param);
  }
};
