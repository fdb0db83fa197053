// States and parameters in fewer bits, one block of 256 elements at a time. Included by kernels_impl.h.
//
// The references are src/penstock/rules/dither.py and src/penstock/rules/blockwise.py, operation by operation.
using U = typename V::U;

// A 32-bit hash of the element's number in the block, under the block's 64-bit key.
void random_block(unsigned* to, unsigned key_low, unsigned key_high) noexcept {
  for (size_t i = 0; i < block_numel; i += V::width) {
    U x = (U::count() + U::splat(unsigned(i))) * U::splat(0x9E3779B9u) + U::splat(key_low);
    x = (x ^ (x >> 16)) * U::splat(0x7FEB352Du) ^ U::splat(key_high);
    x = (x ^ (x >> 15)) * U::splat(0x846CA68Bu);
    U::store(to + i, x ^ (x >> 16));
  }
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
    const U word = U::load(random + i);
    V::store_half(to + i, V::to_bf16_up(V::load(from + i), high ? word >> 16 : word & U::splat(0xFFFFu)));
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
alignas(32) constexpr float border_unsigned[8] = {
    begin_unsigned * 1e-7f, begin_unsigned * 1e-6f, begin_unsigned * 1e-5f, begin_unsigned * 1e-4f,
    begin_unsigned * 1e-3f, begin_unsigned * 1e-2f, begin_unsigned * 1e-1f, begin_unsigned};
alignas(32) constexpr float border_signed[8] = {
    begin_signed * 1e-6f, begin_signed * 1e-5f, begin_signed * 1e-4f, begin_signed * 1e-3f,
    begin_signed * 1e-2f, begin_signed * 1e-1f, begin_signed,         2.0f};

template <bool is_signed>
void decode_int8(float* to, const unsigned char* from, float scale) noexcept {
  const float* decade = is_signed ? decade_signed : decade_unsigned;
  const V slope = V::splat(is_signed ? slope_signed : slope_unsigned);
  const V minus_offset = V::splat(is_signed ? -offset_signed : -offset_unsigned);
  for (size_t i = 0; i < block_numel; i += V::width) {
    const U code = U::load_bytes(from + i);
    const U m = is_signed ? code & U::splat(127) : code;
    const U bits = U::bits(U::to_floats((m << 1) + U::splat(1)));
    const U e = (bits >> 23) - U::splat(128);
    const V mantissa = U::float_of((bits & U::splat(0x7FFFFFu)) | U::splat(0x3F800000u));
    const V value = V::fma(slope, mantissa, minus_offset) * V::lookup(decade, e) * V::splat(scale);
    const U sign = is_signed ? (code & U::splat(128)) << 24 : U::splat(0);
    // A scale that is NaN makes the whole block NaN, zeros too.
    const V zero = V::splat(0.0f) * V::splat(scale);
    const U none = U::is_zero(m);
    V::store(to + i, U::float_of((U::bits(value) & (none ^ U::splat(~0u))) | (U::bits(zero) & none) | sign));
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
  const float* border = is_signed ? border_signed : border_unsigned;
  const float* factor = is_signed ? inverse_signed : inverse_unsigned;
  constexpr int bits = is_signed ? 7 : 8;
  constexpr float slope = is_signed ? slope_signed : slope_unsigned;
  constexpr float offset = is_signed ? offset_signed : offset_unsigned;
  for (size_t i = 0; i < block_numel; i += V::width) {
    const V value = V::load(from + i);
    const U word = U::bits(value);
    const V x = U::float_of(word & U::splat(0x7FFFFFFFu)) * inverse;
    // The decade, or the one above it: log2 is taken as linear between powers of two, plus what that lacks at most.
    const V log2 = U::to_floats(U::bits(x)) * V::splat(0x1p-23f) + V::splat(0.09f - 127.0f);
    const V guess = V::clamp(V::fma(log2, V::splat(0.30103f), V::splat(float(bits))), 0.0f, bits - 0.5f);
    const U above = U::truncate(guess);
    const U below = V::less(x, V::lookup(border, above));
    const U e = above + below;  // minus 1 where it was one too many
    const V mantissa = V::clamp(V::fma(x * V::lookup(factor, e), V::splat(1.0f / slope), V::splat(offset / slope)),
                                1.0f, 0x1.fffffep0f);
    const U m = ((U::bits(mantissa) & U::splat(0x7FFFFFu)) | U::splat(0x800000u)).shifted(U::splat(23) - e);
    // Under the lowest decade (e is -1, all ones): zero, but where there is no sign nothing that is not zero becomes so.
    const U under = U::is_zero(e + U::splat(1));
    const U least = is_signed ? U::splat(0) : (U::is_zero(word << 1) + U::splat(1));
    const U code = (m & (under ^ U::splat(~0u))) | (least & under);
    const U sign = is_signed ? (word >> 24) & U::splat(128) & (U::is_zero(code) ^ U::splat(~0u)) : U::splat(0);
    U::store_bytes(to + i, code | sign);
  }
  return scale;
}
