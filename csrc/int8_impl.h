// States of 8 bits: the dynamic map, and updates that pass through no memory in between. Included by kernels_impl.h.
//
// The reference is src/penstock/rules/blockwise.py. Read as an integer, an fp32 number is 2^23 times its logarithm, up
// to a constant and taken as linear between powers of two. The logarithm of a code's magnitude is a third or a quarter
// of the value's.
template <bool is_signed>
struct Map8 {
  static constexpr unsigned octaves = is_signed ? 3 : 4;
  static constexpr unsigned half = 0x3F000000u;                              // the bits of 0.5
  static constexpr unsigned top = is_signed ? 0x42FF0000u : 0x437F8000u;  // of 127.5 or 255.5: the largest code and 1/2

  // What the codes of a block with this scale stand for; the two vectors are `zero_of` and `base_of` the scale. Negative
  // codes are -1 - m: adding 1/2 makes the middles symmetric, and three times the bits keeps the sign.
  static V decode(const unsigned char* from, U zero, U base) {
    const U code = is_signed ? U::load_signed_bytes(from) : U::load_bytes(from);
    const U log = U::bits(U::to_floats(code) + V::splat(0.5f));
    const U shifted = is_signed ? log << 1 : log << 2;
    const U spread = is_signed ? log + shifted : shifted;
    return U::float_of(U::sum_unless(shifted, U::splat(half << (is_signed ? 1 : 2)), spread, base, zero));
  }
  // 0, or NaN where there is no scale.
  static U zero_of(float scale) { return U::bits(V::splat(0.0f * scale)); }
  // What moves the largest code to the scale.
  static U base_of(float scale) {
    unsigned bits;
    __builtin_memcpy(&bits, &scale, sizeof bits);
    return U::splat(bits - octaves * top);
  }

  // The codes of values under the largest magnitude of their block, as integers; of a block without scale anything. Without sign, values are not
  // negative, and none but 0 becomes 0.
  static U encode(V value, U largest) {
    const U distance = magnitude_of(value) - largest;
    if constexpr (is_signed) {
      const U log = U::truncate(V::fma(U::to_floats(distance), V::splat(1.0f / 3.0f), V::splat(float(top))));
      return U::truncate(U::float_of(log)) ^ U::shifted_signed(U::bits(value), 31);
    } else {
      const U log = U::shifted_signed(distance, 2) + U::splat(top);
      return U::larger(U::truncate(U::float_of(log)), U::smaller(U::bits(value), U::splat(1)));
    }
  }
  static U magnitude_of(V value) { return is_signed ? U::bits(value) & U::splat(0x7FFFFFFFu) : U::bits(value); }
};

constexpr size_t block_vectors = block_numel / V::width;

// A block below 2^-96 is zero, and one that is not finite has no scale; both have codes of zero.
inline bool has_codes(unsigned largest) { return largest >= 31u << 23 && largest < 255u << 23; }
inline float scale_of(unsigned largest) {
  if (!has_codes(largest)) return largest < 31u << 23 ? 0.0f : __builtin_nanf("");
  float scale;
  __builtin_memcpy(&scale, &largest, sizeof scale);
  return scale;
}
inline void clear_unless(bool kept, unsigned char* codes) {
  for (size_t i = 0; !kept && i < block_numel; ++i) codes[i] = 0;
}

template <bool is_signed>
void decode_int8(float* to, const unsigned char* from, float scale) noexcept {
  const U zero = Map8<is_signed>::zero_of(scale), base = Map8<is_signed>::base_of(scale);
  for (size_t i = 0; i < block_numel; i += V::width) V::store(to + i, Map8<is_signed>::decode(from + i, zero, base));
}
template <bool is_signed>
float encode_int8(unsigned char* to, const float* from) noexcept {
  V values[block_vectors];
  U largest = U::splat(0);
  for (size_t v = 0; v < block_vectors; ++v) {
    values[v] = V::load(from + v * V::width);
    largest = U::larger(largest, Map8<is_signed>::magnitude_of(values[v]));
  }
  const unsigned top = U::largest(largest);
  for (size_t v = 0; v < block_vectors; ++v)
    U::template store_codes<is_signed>(to + v * V::width, Map8<is_signed>::encode(values[v], U::splat(top)));
  clear_unless(has_codes(top), to);
  return scale_of(top);
}

// Calls body.operator()<k>() for k from 0 to count.
template <int count, class Body>
inline __attribute__((always_inline)) void each(Body&& body) {
  if constexpr (count > 0) {
    each<count - 1>(body);
    body.template operator()<count - 1>();
  }
}

// One fused pass with 8-bit states over whole blocks, of a bf16 parameter with remainder. A block's codes are written
// while the next one is updated: its largest magnitude is known by then, and neither waits for the other.
template <class R, class Grad>
void update_int8(const Arrays& arrays, const float* scalars, size_t begin, size_t end) noexcept {
  constexpr int count = state_count[int(R::id)];
  auto* const param = static_cast<unsigned short*>(arrays.param);
  auto* const master = static_cast<unsigned short*>(arrays.master);
  const auto* const grad = static_cast<const typename Grad::Word*>(arrays.grad);
  unsigned char* states[count];
  for (int k = 0; k < count; ++k) states[k] = static_cast<unsigned char*>(arrays.states[k]);
  const R rule(scalars);

  V values[2][count][block_vectors];
  unsigned top[count] = {};
  const auto write = [&]<int k>(size_t at, size_t v, int turn) {
    U::template store_codes<R::is_signed[k]>(states[k] + at + v * V::width,
                                             Map8<R::is_signed[k]>::encode(values[turn][k][v], U::splat(top[k])));
  };
  int turn = 0;
  for (size_t at = begin; at < end; at += block_numel, turn = !turn) {
    U zero[count], base[count], largest[count];
    each<count>([&]<int k>() {
      const float scale = arrays.scales[k][at / block_numel];
      zero[k] = Map8<R::is_signed[k]>::zero_of(scale);
      base[k] = Map8<R::is_signed[k]>::base_of(scale);
      largest[k] = U::splat(0);
    });
    const auto pass = [&]<bool is_first>() {
      for (size_t v = 0; v < block_vectors; ++v) {
        const size_t i = at + v * V::width;
        look_ahead(i, param, master, grad);
        V now[count];
        if (v % 2 == 0) each<count>([&]<int k>() { look_ahead(i, states[k]); });
        each<count>([&]<int k>() { now[k] = Map8<R::is_signed[k]>::decode(states[k] + i, zero[k], base[k]); });
        MasterRemainder::put(param, master, i, rule.step(MasterRemainder::get(param, master, i), Grad::get(grad + i), now));
        each<count>([&]<int k>() {
          values[turn][k][v] = now[k];
          largest[k] = U::larger(largest[k], Map8<R::is_signed[k]>::magnitude_of(now[k]));
          if constexpr (!is_first) write.template operator()<k>(at - block_numel, v, !turn);
        });
      }
    };
    if (at == begin) {
      pass.template operator()<true>();
    } else {
      pass.template operator()<false>();
    }
    each<count>([&]<int k>() {
      if (at > begin) clear_unless(has_codes(top[k]), states[k] + at - block_numel);
      top[k] = U::largest(largest[k]);
      arrays.scales[k][at / block_numel] = scale_of(top[k]);
    });
  }
  if (begin == end) return;
  each<count>([&]<int k>() {
    for (size_t v = 0; v < block_vectors; ++v) write.template operator()<k>(end - block_numel, v, !turn);
    clear_unless(has_codes(top[k]), states[k] + end - block_numel);
  });
}
