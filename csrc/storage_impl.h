// States and parameters in fewer bits, one block of 256 elements at a time. Included by kernels_impl.h.
//
// The references are src/penstock/rules/dither.py and src/penstock/rules/blockwise.py, operation by operation.
using U = typename V::U;

// A 32-bit hash of the element's number in the block, under the block's 64-bit key.
inline U random_words(size_t i, std::uint64_t key) {
  U x = U::count() * U::splat(0x9E3779B9u) + U::splat(unsigned(i) * 0x9E3779B9u + unsigned(key));
  x = (x ^ (x >> 16)) * U::splat(0x7FEB352Du) ^ U::splat(unsigned(key >> 32));
  x = (x ^ (x >> 15)) * U::splat(0x846CA68Bu);
  return x ^ (x >> 16);
}
void random_block(unsigned* to, std::uint64_t key) noexcept {
  for (size_t i = 0; i < block_numel; i += V::width) U::store(to + i, random_words(i, key));
}
template <bool high>
U random_half(U word) {
  return high ? word >> 16 : word & U::splat(0xFFFFu);
}

void decode_bf16(float* to, const unsigned short* from) noexcept {
  for (size_t i = 0; i < block_numel; i += V::width) V::store(to + i, Bf16::get(from + i));
}
void encode_bf16(unsigned short* to, const float* from) noexcept {
  for (size_t i = 0; i < block_numel; i += V::width) V::store_half(to + i, V::to_bf16(V::load(from + i)));
}
template <bool high>
void encode_bf16_random(unsigned short* to, const float* from, const unsigned* random) noexcept {
  for (size_t i = 0; i < block_numel; i += V::width) {
    V::store_half(to + i, V::to_bf16_up(V::load(from + i), random_half<high>(U::load(random + i))));
  }
}

// One fused pass with bf16 states over whole blocks, in registers from end to end.
template <class R, bool has_remainder, class Grad, bool random>
void update_bf16(const Arrays& arrays, const float* scalars, size_t begin, size_t end) noexcept {
  using Word = unsigned short;
  using Store = std::conditional_t<has_remainder, MasterRemainder, MasterNone<Bf16>>;
  constexpr int count = state_count[int(R::id)];
  constexpr bool second_draw = random && (count > 2 || !has_remainder);
  Word* const param = static_cast<Word*>(arrays.param);
  auto* const master = static_cast<typename Store::MasterWord*>(arrays.master);
  const auto* const grad = static_cast<const typename Grad::Word*>(arrays.grad);
  Word* states[count];
  for (int k = 0; k < count; ++k) states[k] = static_cast<Word*>(arrays.states[k]);
  const R rule(scalars);
  for (; begin < end; begin += block_numel) {
    const std::uint64_t block = arrays.first_block + begin / block_numel;
    const std::uint64_t keys[2] = {block_key(arrays.random_key, block, 0), block_key(arrays.random_key, block, 1)};
    for (size_t i = begin; i < begin + block_numel; i += V::width) {
      V values[count];
      for (int k = 0; k < count; ++k) values[k] = Bf16::get(states[k] + i);
      const V p = rule.step(Store::get(param, master, i), Grad::get(grad + i), values);
      if constexpr (random) {
        const U words = random_words(i - begin, keys[0]);
        const U more = second_draw ? random_words(i - begin, keys[1]) : words;
        V::store_half(states[0] + i, V::to_bf16_up(values[0], random_half<false>(words)));
        if constexpr (count > 1) V::store_half(states[1] + i, V::to_bf16_up(values[1], random_half<true>(words)));
        if constexpr (count > 2) V::store_half(states[2] + i, V::to_bf16_up(values[2], random_half<false>(more)));
        if constexpr (!has_remainder) V::store_half(param + i, V::to_bf16_up(p, random_half<true>(more)));
        if constexpr (has_remainder) Store::put(param, master, i, p);
      } else {
        for (int k = 0; k < count; ++k) V::store_half(states[k] + i, V::to_bf16(values[k]));
        Store::put(param, master, i, p);
      }
    }
  }
}

// The dynamic map: code m of magnitude 2^e * (1 + f) stands for the middle of one of the 2^e intervals of a decade, and
// code 0 for zero. There are 8 bits of magnitude, or 7 and a sign. Slope and offset have so few bits that the largest
// code is exactly 1; a decade begins at their difference.
alignas(32) constexpr float decade_unsigned[8] = {1e-7f, 1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
alignas(32) constexpr float decade_signed[8] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f, 1.0f};
alignas(32) constexpr float inverse_unsigned[8] = {1e7f, 1e6f, 1e5f, 1e4f, 1e3f, 1e2f, 1e1f, 1.0f};
alignas(32) constexpr float inverse_signed[8] = {1e6f, 1e5f, 1e4f, 1e3f, 1e2f, 1e1f, 1.0f, 1.0f};
constexpr float slope_unsigned = 0.9031982421875f, offset_unsigned = 0.8028683662414551f;
constexpr float slope_signed = 0.9063720703125f, offset_signed = 0.8056631088256836f;
constexpr float begin_unsigned = slope_unsigned - offset_unsigned, begin_signed = slope_signed - offset_signed;
// Where the decade above begins.
alignas(32) constexpr float next_unsigned[8] = {
    begin_unsigned * 1e-6f, begin_unsigned * 1e-5f, begin_unsigned * 1e-4f, begin_unsigned * 1e-3f,
    begin_unsigned * 1e-2f, begin_unsigned * 1e-1f, begin_unsigned,         2.0f};
alignas(32) constexpr float next_signed[8] = {
    begin_signed * 1e-5f, begin_signed * 1e-4f, begin_signed * 1e-3f, begin_signed * 1e-2f,
    begin_signed * 1e-1f, begin_signed,         2.0f,                 2.0f};

template <bool is_signed>
void decode_int8(float* to, const unsigned char* from, float scale) noexcept {
  const float* decade = is_signed ? decade_signed : decade_unsigned;
  const V slope = V::splat(is_signed ? slope_signed : slope_unsigned);
  const V minus_offset = V::splat(is_signed ? -offset_signed : -offset_unsigned);
  const V zero = V::splat(0.0f * scale);
  for (size_t i = 0; i < block_numel; i += V::width) {
    const U code = U::load_bytes(from + i);
    const U m = is_signed ? code & U::splat(127) : code;
    const U bits = U::bits(U::to_floats((m << 1) + U::splat(1)));
    const U e = (bits >> 23) - U::splat(128);
    const V mantissa = U::float_of((bits & U::splat(0x7FFFFFu)) | U::splat(0x3F800000u));
    const V value = V::fma(slope, mantissa, minus_offset) * V::lookup(decade, e) * V::splat(scale);
    // A scale that is NaN makes the whole block NaN, zeros too.
    const V magnitude = V::if_zero(m, zero, value);
    V::store(to + i, is_signed ? U::float_of(U::bits(magnitude) | ((code & U::splat(128)) << 24)) : magnitude);
  }
}

template <bool is_signed>
float encode_int8(unsigned char* to, const float* from) noexcept {
  U largest = U::splat(0);
  for (size_t i = 0; i < block_numel; i += V::width)
    largest = U::larger(largest, U::bits(V::load(from + i)) & U::splat(0x7FFFFFFFu));
  unsigned words[V::width], top = 0;
  U::store(words, largest);
  for (const unsigned word : words) top = word > top ? word : top;
  // Below 2^-120 a block is zero, and one that is not finite has no scale.
  if (top < 7u << 23 || top >= 0x7F800000u) {
    for (size_t i = 0; i < block_numel; ++i) to[i] = 0;
    return top < 7u << 23 ? 0.0f : __builtin_nanf("");
  }
  float scale;
  __builtin_memcpy(&scale, &top, sizeof scale);
  const V inverse = V::splat(1.0f / scale);
  const float* next = is_signed ? next_signed : next_unsigned;
  const float* factor = is_signed ? inverse_signed : inverse_unsigned;
  constexpr int bits = is_signed ? 7 : 8;
  constexpr float slope = is_signed ? slope_signed : slope_unsigned;
  constexpr float offset = is_signed ? offset_signed : offset_unsigned;
  for (size_t i = 0; i < block_numel; i += V::width) {
    const V value = V::load(from + i);
    const U word = U::bits(value);
    const V x = U::float_of(word & U::splat(0x7FFFFFFFu)) * inverse;
    // The decade, or the one below it: log2 taken as linear between powers of two is too small by up to 0.0861, and
    // decades begin up to 0.7 % late.
    const V guess = V::fma(U::to_floats(U::bits(x)), V::splat(0.30103f * 0x1p-23f),
                           V::splat(float(bits) - 127.0f * 0.30103f - 0x1p-8f));
    const U least_decade = U::truncate(V::clamp(guess, 0.0f, bits - 0.5f));
    const U e = V::one_more_unless_less(least_decade, x, V::lookup(next, least_decade));
    const V mantissa = V::clamp(V::fma(x * V::lookup(factor, e), V::splat(1.0f / slope), V::splat(offset / slope)),
                                1.0f, 0x1.fffffep0f);
    const U m = ((U::bits(mantissa) & U::splat(0x7FFFFFu)) | U::splat(0x800000u)).shifted(U::splat(23) - e);
    // Under the lowest decade: zero, but where there is no sign nothing that is not zero becomes so.
    if constexpr (is_signed) {
      const U code = m | ((word >> 24) & U::splat(128));
      U::store_bytes(to + i, V::if_less(x, V::splat(begin_signed * 1e-6f), U::splat(0), code));
    } else {
      const U least = U::splat(1) - V::if_less(V::splat(0.0f), U::float_of(word & U::splat(0x7FFFFFFFu)), U::splat(0),
                                               U::splat(1));
      U::store_bytes(to + i, V::if_less(x, V::splat(begin_unsigned * 1e-7f), least, m));
    }
  }
  return scale;
}
