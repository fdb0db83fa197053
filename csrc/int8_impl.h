// States of 8 bits: the dynamic map, and updates that pass through no memory in between. Included by kernels_impl.h.
//
// The reference is src/penstock/rules/formats.py. Read as an integer, an fp32 number is 2^23 times its logarithm, up
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
    const U log = U::bits(V::template load_middles<is_signed>(from));
    const U shifted = is_signed ? log + log : log << 2;
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

  // Writes the codes of values, given `from_of` the largest magnitude of their block; of a block without scale anything.
  static void encode(unsigned char* to, V value, U from) {
    const U distance = magnitude_of(value) + from;
    if constexpr (is_signed) {
      const U log = U::truncate(V::fma(U::to_floats(distance), V::splat(1.0f / 3.0f), V::splat(float(top))));
      V::template store_codes<true>(to, U::float_of(log), 1.0f, value);
    } else {
      V::template store_codes<false>(to, U::float_of(distance >> 2), 0x1p64f, value);
    }
  }
  // What `encode` adds to a magnitude. Without sign that gives 4 logarithms at once, each less 2^29 (2^-64 of the float): so
  // they are never negative and fit 32 bits.
  static U from_of(unsigned largest) {
    return U::splat((is_signed ? 0 : octaves * (top - (1u << 29))) - largest);
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
void decode_int8(float* to, const void* from, float scale) noexcept {
  const auto* const codes = static_cast<const unsigned char*>(from);
  const U zero = Map8<is_signed>::zero_of(scale), base = Map8<is_signed>::base_of(scale);
  for (size_t i = 0; i < block_numel; i += V::width) V::store(to + i, Map8<is_signed>::decode(codes + i, zero, base));
}
template <bool is_signed>
float encode_int8(void* to, const float* from, const unsigned*) noexcept {
  auto* const codes = static_cast<unsigned char*>(to);
  V values[block_vectors];
  U largest = U::splat(0);
  for (size_t v = 0; v < block_vectors; ++v) {
    values[v] = V::load(from + v * V::width);
    largest = U::larger(largest, Map8<is_signed>::magnitude_of(values[v]));
  }
  const unsigned top = U::largest(largest);
  for (size_t v = 0; v < block_vectors; ++v)
    Map8<is_signed>::encode(codes + v * V::width, values[v], Map8<is_signed>::from_of(top));
  clear_unless(has_codes(top), codes);
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

// One fused pass with 8-bit states over whole blocks, of a bf16 parameter with remainder, in two loops over each block: one
// begins the updates and writes the codes of the block before, whose largest magnitudes are known by then; the other
// ends the updates and reads the codes of the block after. In one loop the chain from code to root to quotient is longer
// than what a processor has registers to look ahead for, and it stands still most of the time.
template <class R, class Grad>
void update_int8(const Arrays& arrays, const float* scalars, size_t begin, size_t end) noexcept {
  constexpr int count = state_count[int(R::id)];
  auto* const param = static_cast<unsigned short*>(arrays.param);
  auto* const master = static_cast<unsigned short*>(arrays.master);
  const auto* const grad = static_cast<const typename Grad::Word*>(arrays.grad);
  unsigned char* states[count];
  for (int k = 0; k < count; ++k) states[k] = static_cast<unsigned char*>(arrays.states[k]);
  const R rule(scalars);
  if (begin == end) return;

  // Rows of a power of two would put the same element of all on one line of the cache.
  constexpr size_t row = block_numel + 48;
  alignas(64) unsigned values[2][count][row] = {}, begun[R::parts][row];
  U zero[count], base[count], largest[count], from[count];
  unsigned tops[count] = {};
  const auto look_up = [&]<int k>(size_t at) {
    const float scale = arrays.scales[k][at / block_numel];
    zero[k] = Map8<R::is_signed[k]>::zero_of(scale);
    base[k] = Map8<R::is_signed[k]>::base_of(scale);
  };
  const auto read = [&]<int k>(size_t at, size_t v, int turn) {
    const V value = Map8<R::is_signed[k]>::decode(states[k] + at + v * V::width, zero[k], base[k]);
    U::store(values[turn][k] + v * V::width, U::bits(value));
  };
  const auto write = [&]<int k>(size_t at, size_t v, int turn) {
    const V value = U::float_of(U::load(values[turn][k] + v * V::width));
    Map8<R::is_signed[k]>::encode(states[k] + at + v * V::width, value, from[k]);
  };

  each<count>([&]<int k>() {
    from[k] = U::splat(0);
    look_up.template operator()<k>(begin);
    for (size_t v = 0; v < block_vectors; ++v) read.template operator()<k>(begin, v, 0);
  });
  int turn = 0;
  for (size_t at = begin; at < end; at += block_numel, turn = !turn) {
    const size_t before = at > begin ? at - block_numel : at;  // the first is written twice, at first with anything
    each<count>([&]<int k>() { largest[k] = U::splat(0); });
    for (size_t v = 0; v < block_vectors; ++v) {
      const size_t i = at + v * V::width;
      V now[count], parts[R::parts];
      look_ahead(i, grad);  // the processor keeps up with codes by itself
      each<count>([&]<int k>() { now[k] = U::float_of(U::load(values[turn][k] + v * V::width)); });
      rule.begin(MasterRemainder::get(param, master, i), Grad::get(grad + i), now, parts);
      each<R::parts>([&]<int k>() { U::store(begun[k] + v * V::width, U::bits(parts[k])); });
      each<count>([&]<int k>() {
        U::store(values[turn][k] + v * V::width, U::bits(now[k]));
        largest[k] = U::larger(largest[k], Map8<R::is_signed[k]>::magnitude_of(now[k]));
        write.template operator()<k>(before, v, !turn);
      });
    }
    const size_t next = at + block_numel < end ? at + block_numel : at;  // the last is read again, for nothing
    each<count>([&]<int k>() {
      if (at > begin) clear_unless(has_codes(tops[k]), states[k] + at - block_numel);
      tops[k] = U::largest(largest[k]);
      from[k] = Map8<R::is_signed[k]>::from_of(tops[k]);
      look_up.template operator()<k>(next);
      arrays.scales[k][at / block_numel] = scale_of(tops[k]);
    });
    for (size_t v = 0; v < block_vectors; ++v) {
      V parts[R::parts];
      look_ahead<1024>(at + v * V::width, param, master);
      each<R::parts>([&]<int k>() { parts[k] = U::float_of(U::load(begun[k] + v * V::width)); });
      MasterRemainder::put(param, master, at + v * V::width, rule.end(parts));
      each<count>([&]<int k>() { read.template operator()<k>(next, v, !turn); });
    }
  }
  each<count>([&]<int k>() {
    for (size_t v = 0; v < block_vectors; ++v) write.template operator()<k>(end - block_numel, v, !turn);
    clear_unless(has_codes(tops[k]), states[k] + end - block_numel);
  });
}
