// The kernels, written over V of kernels.cpp, which includes this inside an unnamed namespace: nothing compiled for one
// instruction set can be linked into the code of another. For the same reason nothing here calls the standard library.

// Asks for memory before it is needed. The processor's own prefetching stops at the end of a page, and behind this much
// arithmetic it does not look far enough ahead.
constexpr size_t ahead_bytes = 2048;
template <size_t by = ahead_bytes, class... Words>
void look_ahead(size_t i, const Words*... arrays) {
  (__builtin_prefetch(reinterpret_cast<const char*>(arrays + i) + by), ...);
}

// How one dtype is read and written. `put` returns the value that was stored, rounding included.
template <class D>
struct InMemory {
  template <class Word>
  static V get(const Word* from) {
    return D::decode(D::load(from));
  }
  template <class Word>
  static V put(Word* to, V value) {
    const auto stored = D::encode(value);
    D::store(to, stored);
    return D::decode(stored);
  }
};
struct Fp32 : InMemory<Fp32> {
  static constexpr DType id = DType::fp32;
  using Word = float;
  static V load(const Word* from) { return V::load(from); }
  static void store(Word* to, V stored) { V::store(to, stored); }
  static void stream(Word* to, V stored) { V::stream(to, stored); }
  static V encode(V value) { return value; }
  static V encode_param(V value) { return value; }
  static V decode(V stored) { return stored; }
};
struct OfHalves {
  using Word = unsigned short;
  using Stored = typename V::Half;
  static Stored load(const Word* from) { return V::load_half(from); }
  static void store(Word* to, Stored stored) { V::store_half(to, stored); }
  static void stream(Word* to, Stored stored) { V::stream_half(to, stored); }
};
struct Bf16 : OfHalves, InMemory<Bf16> {
  static constexpr DType id = DType::bf16;
  static Stored encode(V value) { return V::to_bf16(value); }
  // A parameter's ties go away from zero, whatever its master is: the remainder form knows no other way.
  static Stored encode_param(V value) {
    Stored high, low;
    V::split(value, high, low);
    return high;
  }
  static V decode(Stored stored) { return V::from_bf16(stored); }
};
struct Fp16 : OfHalves, InMemory<Fp16> {
  static constexpr DType id = DType::fp16;
  static Stored encode(V value) { return V::to_fp16(value); }
  static Stored encode_param(V value) { return encode(value); }
  static V decode(Stored stored) { return V::from_fp16(stored); }
};

// How the fp32 values behind parameters i, i + 1, ... are read and written back, by dtype and kind of master.
template <class P>
struct MasterNone {
  using Param = P;
  using MasterWord = char;
  static constexpr Master kind = Master::none;
  using ParamWord = typename Param::Word;
  static V get(const ParamWord* param, const MasterWord*, size_t i) { return Param::get(param + i); }
  static void put(ParamWord* param, MasterWord*, size_t i, V value) {
    Param::store(param + i, Param::encode_param(value));
  }
};
struct MasterRemainder {
  using Param = Bf16;
  using MasterWord = unsigned short;
  static constexpr Master kind = Master::remainder;
  using ParamWord = unsigned short;
  static V get(const ParamWord* param, const MasterWord* rest, size_t i) {
    return V::join(V::load_half(param + i), V::load_half(rest + i));
  }
  static void put(ParamWord* param, MasterWord* rest, size_t i, V value) {
    typename V::Half high, low;
    V::split(value, high, low);
    V::store_half(param + i, high);
    V::store_half(rest + i, low);
  }
};
template <class P>
struct MasterFp32 {
  using Param = P;
  using MasterWord = float;
  static constexpr Master kind = Master::fp32;
  using ParamWord = typename Param::Word;
  static V get(const ParamWord*, const MasterWord* master, size_t i) { return V::load(master + i); }
  static void put(ParamWord* param, MasterWord* master, size_t i, V value) {
    V::store(master + i, value);
    Param::store(param + i, Param::encode_param(value));
  }
};

// The last elements of a range, padded with zeros to a whole vector: every element goes through the same operations.
template <class Word>
struct Tail {
  Word words[V::width] = {};
  Tail() = default;
  Tail(const Word* from, size_t count) {
    for (size_t i = 0; i < count; ++i) words[i] = from[i];
  }
  void put(Word* to, size_t count) const {
    for (size_t i = 0; i < count; ++i) to[i] = words[i];
  }
};

// Sums of squares in fp64, where the square of any fp32 value is exact, or of sums of them.
class SquareSum {
 public:
  static constexpr size_t vectors = norm_lanes / V::width;
  void add(size_t vector, V value) { sums_[vector] = V::Wide::add_squares(sums_[vector], value); }
  void add_sum(size_t vector, V squares) { sums_[vector] = V::Wide::add(sums_[vector], squares); }
  double total() const {
    double lanes[norm_lanes];
    for (size_t vector = 0; vector < vectors; ++vector) V::Wide::store(lanes + vector * V::width, sums_[vector]);
    for (size_t half = norm_lanes / 2; half > 0; half /= 2)
      for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
  }

 private:
  typename V::Wide sums_[vectors] = {};
};

// The sum of squares of value_at(i), the elements [i, i + width), and, for the last of them, tail_at(i, count), padded
// with zeros. `quick` adds up 4 squares of a lane in fp32 first.
template <bool quick, class ValueAt, class TailAt>
double sum_squares(size_t begin, size_t end, ValueAt&& value_at, TailAt&& tail_at) {
  SquareSum sum;
  size_t i = begin;
  if constexpr (quick) {
    for (; i + 4 * norm_lanes <= end; i += 4 * norm_lanes) {
      V squares[SquareSum::vectors];
      for (size_t vector = 0; vector < SquareSum::vectors; ++vector) {
        const V value = value_at(i + vector * V::width);
        squares[vector] = value * value;
      }
      for (size_t group = 1; group < 4; ++group) {
        for (size_t vector = 0; vector < SquareSum::vectors; ++vector) {
          const V value = value_at(i + group * norm_lanes + vector * V::width);
          squares[vector] = V::fma(value, value, squares[vector]);
        }
      }
      for (size_t vector = 0; vector < SquareSum::vectors; ++vector) sum.add_sum(vector, squares[vector]);
    }
  }
  for (; i + norm_lanes <= end; i += norm_lanes)
    for (size_t vector = 0; vector < SquareSum::vectors; ++vector) sum.add(vector, value_at(i + vector * V::width));
  for (size_t vector = 0; i < end; ++vector, i += V::width) {
    if (i + V::width <= end) {
      sum.add(vector, value_at(i));
    } else {
      sum.add(vector, tail_at(i, end - i));
    }
  }
  return sum.total();
}

// Squares of bf16 values are exact in fp32 unless they are out of its range. A quick sum that is finite had no square
// above it, and beside one of at least 2^-100 what was lost below it is nothing; otherwise the sum is made again, in fp64.
template <class Stored>
constexpr bool is_quick = std::is_same_v<Stored, Bf16>;
inline bool holds(double quick_sum) { return quick_sum >= 0x1p-100 && quick_sum <= 0x1p127; }

template <class Src, bool quick>
double squares_of(const typename Src::Word* src, size_t begin, size_t end) {
  return sum_squares<quick>(
      begin, end,
      [=](size_t i) {
        look_ahead<512>(i, src);  // with so little arithmetic, asking further ahead gets in the way of the processor's own
        return Src::get(src + i);
      },
      [=](size_t i, size_t count) { return Src::get(Tail<typename Src::Word>(src + i, count).words); });
}

template <class Src>
double squared_norm(const void* src_address, size_t begin, size_t end) noexcept {
  const auto* src = static_cast<const typename Src::Word*>(src_address);
  if constexpr (is_quick<Src>) {
    const double sum = squares_of<Src, true>(src, begin, end);
    if (holds(sum)) return sum;
  }
  return squares_of<Src, false>(src, begin, end);
}

template <class Dst, class Src, Write write>
double deposit(void* dst_address, const void* src_address, size_t begin, size_t end) noexcept {
  using DstWord = typename Dst::Word;
  using SrcWord = typename Src::Word;
  constexpr bool streams = write == Write::past_cache;
  DstWord* dst = static_cast<DstWord*>(dst_address);
  const SrcWord* src = static_cast<const SrcWord*>(src_address);
  const auto stored = [](const DstWord* to, const SrcWord* from) {
    if constexpr (write == Write::add) {
      return Dst::encode(Dst::get(to) + Src::get(from));
    } else if constexpr (std::is_same_v<Dst, Src>) {
      return Src::load(from);  // as it is, also where it is a NaN
    } else {
      return Dst::encode(Src::get(from));
    }
  };
  const double sum = sum_squares<is_quick<Dst>>(
      begin, end,
      [=](size_t i) {
        look_ahead(i, src);
        if constexpr (!streams) look_ahead(i, dst);
        const auto value = stored(dst + i, src + i);
        if constexpr (streams) {
          Dst::stream(dst + i, value);
        } else {
          Dst::store(dst + i, value);
        }
        return Dst::decode(value);
      },
      [=](size_t i, size_t count) {
        Tail<DstWord> to(dst + i, count);
        const auto value = stored(to.words, Tail<SrcWord>(src + i, count).words);
        Dst::store(to.words, value);
        to.put(dst + i, count);
        return Dst::decode(value);
      });
  if constexpr (streams) V::end_stream();
  return !is_quick<Dst> || holds(sum) ? sum : squares_of<Dst, false>(dst, begin, end);
}

// An update of one vector.
template <class R>
inline __attribute__((always_inline)) V step(const R& rule, V param, V grad, V* states) {
  V begun[R::parts];
  rule.begin(param, grad, states, begun);
  return rule.end(begun);
}

// One fused pass over whole blocks: reads parameter, gradient and states, and writes back all but the gradient.
template <class R, class Store, class Grad>
void update(const Arrays& arrays, const float* scalars, size_t begin, size_t end) noexcept {
  constexpr int count = state_count[int(R::id)];
  auto* const param = static_cast<typename Store::ParamWord*>(arrays.param);
  auto* const master = static_cast<typename Store::MasterWord*>(arrays.master);
  const auto* const grad = static_cast<const typename Grad::Word*>(arrays.grad);
  float* states[count + 1];
  for (int k = 0; k < count; ++k) states[k] = static_cast<float*>(arrays.states[k]);
  const R rule(scalars);
  for (size_t i = begin; i < end; i += V::width) {
    V values[count + 1];
    for (int k = 0; k < count; ++k) {
      look_ahead(i, states[k]);
      look_ahead(i + V::width / 2, states[k]);  // a vector of fp32 is two lines of the cache
    }
    look_ahead(i, param, grad);
    if constexpr (Store::kind != Master::none) look_ahead(i, master);
    for (int k = 0; k < count; ++k) values[k] = V::load(states[k] + i);
    const V p = step(rule, Store::get(param, master, i), Grad::get(grad + i), values);
    for (int k = 0; k < count; ++k) V::store(states[k] + i, values[k]);
    Store::put(param, master, i, p);
  }
}

#include "rules_impl.h"
#include "storage_impl.h"
#include "int8_impl.h"
#include "wire_impl.h"

// Calls body.operator()<T>() for each of the types.
template <class... T, class Body>
constexpr void for_types(Body&& body) {
  (body.template operator()<T>(), ...);
}

template <class R>
constexpr void add_rule(Kernels& k) {
  constexpr int rule = int(R::id);
  for_types<MasterNone<Fp32>, MasterNone<Bf16>, MasterRemainder, MasterFp32<Bf16>, MasterFp32<Fp16>>([&]<class Store>() {
    for_types<Fp32, Bf16, Fp16>([&]<class Grad>() {
      k.update[rule][int(Store::Param::id)][int(Store::kind)][int(Grad::id)] = update<R, Store, Grad>;
    });
  });
  if constexpr (state_count[rule] > 0) {
    for_types<Fp32, Bf16>([&]<class Grad>() {
      k.update_int8[rule][int(Grad::id)] = update_int8<R, Grad>;
      for_types<MasterNone<Bf16>, MasterRemainder>([&]<class Store>() {
        k.update_bf16[0][rule][int(Store::kind)][int(Grad::id)] = update_bf16<R, Store, Grad, false>;
        k.update_bf16[1][rule][int(Store::kind)][int(Grad::id)] = update_bf16<R, Store, Grad, true>;
      });
    });
  }
}

constexpr Kernels make_kernels(const char* isa) {
  Kernels k{};
  k.isa = isa;
  for_types<Adam<false>, Adam<true>, Sgd<false>, Sgd<true>, Adagrad, Lion>([&]<class R>() { add_rule<R>(k); });
  for_types<Fp32, Bf16, Fp16>([&]<class Dst>() {
    constexpr int dst = int(Dst::id);
    k.squared_norm[dst] = squared_norm<Dst>;
    for_types<Fp32, Bf16, Fp16>([&]<class Src>() {
      auto& row = k.deposit[dst][int(Src::id)];
      row[int(Write::over)] = deposit<Dst, Src, Write::over>;
      row[int(Write::add)] = deposit<Dst, Src, Write::add>;
      row[int(Write::past_cache)] = deposit<Dst, Src, Write::past_cache>;
    });
    for_types<WireInt8, WireFp8, WireInt4>([&]<class Format>() {
      k.pack[int(Format::id)][dst] = pack<Format, Dst>;
      k.unpack[int(Format::id)][dst][0] = unpack<Format, Dst, false>;
      if constexpr (dst == int(DType::fp32)) k.unpack[int(Format::id)][dst][1] = unpack<Format, Dst, true>;
    });
  });
  k.random = random_block;
  for (const Storage storage : {Storage::bf16, Storage::bf16_random}) k.decode[int(storage)] = decode_bf16;
  k.decode[int(Storage::int8_signed)] = decode_int8<true>;
  k.decode[int(Storage::int8_unsigned)] = decode_int8<false>;
  for (const bool high : {false, true}) {
    k.encode[int(Storage::bf16)][high] = encode_bf16;
    k.encode[int(Storage::bf16_random)][high] = high ? encode_bf16_random<true> : encode_bf16_random<false>;
    k.encode[int(Storage::int8_signed)][high] = encode_int8<true>;
    k.encode[int(Storage::int8_unsigned)][high] = encode_int8<false>;
  }
  return k;
}
