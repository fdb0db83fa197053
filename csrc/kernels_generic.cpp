// The kernels in plain C++, for any processor: one element at a time, left to the compiler to vectorise.
//
// Without fused multiply-add in hardware, std::fma is a slow but exact library routine; the bits are the same.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace penstock {
namespace {

using std::size_t;

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float value_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct V {
  static constexpr size_t width = 1;
  static constexpr bool knows_e4m3 = false;
  using Half = std::uint16_t;
  float v;

  static V splat(float value) { return {value}; }
  static V load(const float* from) { return {*from}; }
  static void store(float* to, V value) { *to = value.v; }
  static void stream(float* to, V value) { store(to, value); }
  static void end_stream() {}
  static Half load_half(const unsigned short* from) { return *from; }
  static void store_half(unsigned short* to, Half half) { *to = half; }
  static void stream_half(unsigned short* to, Half half) { store_half(to, half); }
  static Half larger_half(Half so_far, Half half) {
    const Half magnitude = half & 0x7FFFu;
    return magnitude > so_far ? magnitude : so_far;
  }
  static unsigned short largest_half(Half half) { return half; }

  static V sqrt(V a) { return {std::sqrt(a.v)}; }
  static V fma(V a, V b, V c) { return {std::fma(a.v, b.v, c.v)}; }
  friend V operator+(V a, V b) { return {a.v + b.v}; }
  friend V operator-(V a, V b) { return {a.v - b.v}; }
  friend V operator*(V a, V b) { return {a.v * b.v}; }
  friend V operator/(V a, V b) { return {a.v / b.v}; }

  static V from_bf16(Half half) { return {value_of(std::uint32_t{half} << 16)}; }
  static Half to_bf16(V value) {
    const std::uint32_t bits = bits_of(value.v);
    return quiet_high(value, bits, bits + 0x7FFF + (bits >> 16 & 1));
  }

  static V from_fp16(Half half) {
    const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
    const std::uint32_t magnitude = half & 0x7FFFu;
    // Normal numbers and specials move their bits up; the factor moves the exponent's bias, denormals included.
    if (magnitude < 0x7C00u) return {value_of(sign | bits_of(value_of(magnitude << 13) * 0x1p112f))};
    return {value_of(sign | 0x7F800000u | magnitude << 13 | (magnitude > 0x7C00u ? 0x400000u : 0u))};
  }
  static Half load_e4m3(const unsigned char* from) {
    return static_cast<Half>((*from & 0x7Fu) << 7 | (*from & 0x80u) << 8);
  }
  static Half to_fp16(V value) {
    const std::uint32_t bits = bits_of(value.v);
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    std::uint32_t half;
    if (magnitude > 0x7F800000u) {
      half = 0x7E00u | magnitude >> 13;  // a NaN stays one, with the high bits of its payload
    } else if (magnitude >= 0x477FF000u) {
      half = 0x7C00u;  // 65520 and above round to infinity
    } else if (magnitude >= 0x38800000u) {
      half = (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    } else {
      // Below 2^-14 the result is denormal: adding 1/2 makes the adder round at its last bit, 2^-24.
      half = bits_of(value_of(magnitude) + 0.5f) - 0x3F000000u;
    }
    return static_cast<Half>(sign | half);
  }

  static V join(Half high, Half low) {
    return {value_of((std::uint32_t{high} << 16) + static_cast<std::uint32_t>(std::int16_t(low)))};
  }
  static void split(V value, Half& high, Half& low) {
    const std::uint32_t bits = bits_of(value.v);
    high = quiet_high(value, bits, bits + 0x8000u);
    low = value.v == value.v ? static_cast<Half>(bits) : Half{0};
  }

  struct U {
    std::uint32_t v;
    static U splat(std::uint32_t value) { return {value}; }
    static U count() { return {0}; }
    static U load(const unsigned* from) { return {*from}; }
    static void store(unsigned* to, U x) { *to = x.v; }
    static U load_bytes(const unsigned char* from) { return {*from}; }
    static U load_signed_bytes(const unsigned char* from) {
      return {static_cast<std::uint32_t>(static_cast<signed char>(*from))};
    }
    static void store_bytes(unsigned char* to, U x) { *to = static_cast<unsigned char>(x.v); }
    static U bits(V x) { return {bits_of(x.v)}; }
    static V float_of(U x) { return {value_of(x.v)}; }
    static V to_floats(U x) { return {static_cast<float>(static_cast<std::int32_t>(x.v))}; }
    static U truncate(V x) { return {static_cast<std::uint32_t>(static_cast<std::int32_t>(x.v))}; }
    static U larger(U a, U b) { return a.v > b.v ? a : b; }
    static U smaller(U a, U b) { return a.v < b.v ? a : b; }
    static unsigned largest(U a) { return a.v; }
    static U shifted_signed(U a, int by) { return {static_cast<std::uint32_t>(static_cast<std::int32_t>(a.v) >> by)}; }
    static U sum_unless(U what, U unless, U a, U b, U otherwise) { return what.v != unless.v ? a + b : otherwise; }
    friend U operator+(U a, U b) { return {a.v + b.v}; }
    friend U operator-(U a, U b) { return {a.v - b.v}; }
    friend U operator*(U a, U b) { return {a.v * b.v}; }
    friend U operator&(U a, U b) { return {a.v & b.v}; }
    friend U operator|(U a, U b) { return {a.v | b.v}; }
    friend U operator^(U a, U b) { return {a.v ^ b.v}; }
    friend U operator<<(U a, int by) { return {a.v << by}; }
    friend U operator>>(U a, int by) { return {a.v >> by}; }
  };
  template <bool is_signed>
  static V load_middles(const unsigned char* from) {
    return U::to_floats(is_signed ? U::load_signed_bytes(from) : U::load_bytes(from)) + splat(0.5f);
  }
  template <bool is_signed>
  static void store_codes(unsigned char* to, V x, float unit, V of) {
    const U whole = U::truncate(is_signed ? x : x * splat(unit));
    U::store_bytes(to, is_signed ? whole ^ U::shifted_signed(U::bits(of), 31)
                                 : U::larger(whole, U::smaller(U::bits(of), U::splat(1))));
  }
  static V larger(V a, V b) { return a.v > b.v || a.v != a.v ? a : b; }
  static V sign(V x) { return {float(x.v > 0.0f) - float(x.v < 0.0f)}; }
  template <bool>
  static Half to_bf16_up(V value, U added) {
    const std::uint32_t bits = bits_of(value.v);
    return quiet_high(value, bits, bits + added.v);
  }

  struct Wide {
    double v;
    static Wide add_squares(Wide sum, V value) { return {sum.v + double{value.v} * double{value.v}}; }
    static Wide add(Wide sum, V value) { return {sum.v + double{value.v}}; }
    static void store(double* to, Wide wide) { *to = wide.v; }
  };

 private:
  // The high half of `rounded`, or of a quiet NaN where the value is one: rounding could carry a NaN into -0.
  static Half quiet_high(V value, std::uint32_t bits, std::uint32_t rounded) {
    return static_cast<Half>((value.v == value.v ? rounded : bits | 0x400000u) >> 16);
  }
};

#include "kernels_impl.h"

}  // namespace

const Kernels kernels_generic = make_kernels("generic");

}  // namespace penstock
