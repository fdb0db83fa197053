// What goes between ranks in fewer bits, packed and unpacked in one pass. Included by kernels_impl.h.
//
// The reference is src/penstock/rules/wire.py, operation by operation. Each format says what its largest code stands for
// (`top`), the largest scale with which that is finite (`most`), and goes between codes and values counted in scales
// (on the way back: times `unit`).

// A sum with this is rounded to a whole number, to nearest even, which is in its low bits.
constexpr float whole = 0x1.8p23f;

struct WireInt8 {
  static constexpr Wire id = Wire::int8;
  static constexpr size_t code_bytes = block_numel;
  static constexpr float top = 127.0f, most = 0x1.020406p121f, unit = 1.0f;

  // Calls get(v) for each vector of the block.
  template <class Get>
  static void encode(unsigned char* to, Get&& get, V inverse) {
    for (size_t v = 0; v < block_vectors; ++v)
      U::store_bytes(to + v * V::width, U::bits(get(v) * inverse + V::splat(whole)));
  }
  // Calls put(v, codes) for each vector of the block.
  template <class Put>
  static void decode(const unsigned char* from, Put&& put) {
    for (size_t v = 0; v < block_vectors; ++v) put(v, U::to_floats(U::load_signed_bytes(from + v * V::width)));
  }
};

// Two in a byte: the low bits are of the block's first half, the high ones of its second.
struct WireInt4 {
  static constexpr Wire id = Wire::int4;
  static constexpr size_t code_bytes = block_numel / 2;
  static constexpr float top = 7.0f, most = 0x1.249248p125f, unit = 1.0f;
  static constexpr size_t half = block_vectors / 2;

  template <class Get>
  static void encode(unsigned char* to, Get&& get, V inverse) {
    for (size_t v = 0; v < half; ++v) {
      const U low = U::bits(get(v) * inverse + V::splat(whole));
      const U high = U::bits(get(v + half) * inverse + V::splat(whole));
      U::store_bytes(to + v * V::width, (low & U::splat(15)) | high << 4);
    }
  }
  template <class Put>
  static void decode(const unsigned char* from, Put&& put) {
    for (size_t v = 0; v < half; ++v) {
      const U both = U::load_signed_bytes(from + v * V::width);
      put(v, U::to_floats(U::shifted_signed(both << 28, 28)));
      put(v + half, U::to_floats(U::shifted_signed(both, 4)));
    }
  }
};

struct WireFp8 {
  static constexpr Wire id = Wire::fp8;
  static constexpr size_t code_bytes = block_numel;
  static constexpr float top = 448.0f, most = 0x1.249248p119f;

  template <class Get>
  static void encode(unsigned char* to, Get&& get, V inverse) {
    for (size_t v = 0; v < block_vectors; v += 2)
      V::store_e4m3(to + v * V::width, get(v) * inverse, get(v + 1) * inverse);
  }
  // With the bits of fp16, which has the next exponents, a code stands for 2^-8 of its value.
  static constexpr float unit = 256.0f;
  template <class Put>
  static void decode(const unsigned char* from, Put&& put) {
    for (size_t v = 0; v < block_vectors; ++v) put(v, V::from_fp16(V::load_e4m3(from + v * V::width)));
  }
};

// A block below 2^-96 is zero, and one that is not finite has NaN for a scale: codes of zero, which it makes NaN.

// The bits of the largest magnitude of a block. Those of 16-bit values are compared as they are, 2 bytes each.
template <class Stored>
unsigned largest_of(const typename Stored::Word* from) {
  if constexpr (sizeof(*from) == 2) {
    typename V::Half largest[2] = {};  // one after the other would be a chain
    for (size_t v = 0; v < block_vectors; ++v) {
      look_ahead(v * V::width, from);
      largest[v % 2] = V::larger_half(largest[v % 2], V::load_half(from + v * V::width));
    }
    const unsigned short word = V::largest_half(V::larger_half(largest[0], largest[1]));
    if constexpr (std::is_same_v<Stored, Bf16>) return unsigned{word} << 16;
    const typename Stored::Word words[V::width] = {word};
    return U::largest(U::bits(Stored::get(words)));
  } else {
    U largest = U::splat(0);
    for (size_t v = 0; v < block_vectors; ++v) {
      look_ahead(v * V::width, from);
      look_ahead(v * V::width + V::width / 2, from);
      largest = U::larger(largest, U::bits(Stored::get(from + v * V::width)) & U::splat(0x7FFFFFFFu));
    }
    return U::largest(largest);
  }
}

template <class Format, class Stored>
void pack(unsigned char* packed, const void* values_address, size_t begin, size_t end) noexcept {
  const auto* from = static_cast<const typename Stored::Word*>(values_address) + begin * block_numel;
  unsigned char* to = packed + begin * (sizeof(float) + Format::code_bytes);
  // Of the next block, while this one is packed: a division is between the largest magnitude and the first code.
  unsigned next = begin < end ? largest_of<Stored>(from) : 0;
  for (size_t block = begin; block < end; ++block) {
    const unsigned top = next;
    if (block + 1 < end) next = largest_of<Stored>(from + block_numel);
    float scale = scale_of(top);
    if (has_codes(top)) {
      const float inverse = Format::top / scale;
      scale = scale / Format::top;
      if (scale > Format::most) scale = Format::most;
      // From the cache: the registers do not hold a block.
      const auto get = [=](size_t v) { return Stored::get(from + v * V::width); };
      Format::encode(to + sizeof scale, get, V::splat(inverse));
    } else {
      for (size_t i = 0; i < Format::code_bytes; ++i) to[sizeof scale + i] = 0;
    }
    __builtin_memcpy(to, &scale, sizeof scale);
    from += block_numel;
    to += sizeof scale + Format::code_bytes;
  }
}

// A block of bf16 by tables of its 32 least codes, each times the scale: of a scale with which all of them are normal
// numbers, and finite, all other values are those of 16 to 31 with larger exponents. Says whether it did.
template <class Vec>
bool unpack_by_tables(unsigned short* to, const unsigned char* codes, float scale) {
  if (!(scale >= 0x1p-100f && scale <= 0x1p119f)) return false;
  const typename Vec::Bf16OfE4m3 tables(Vec::splat(scale * WireFp8::unit));
  for (size_t i = 0; i < block_numel; i += tables.width) tables.put(to + i, codes + i);
  return true;
}

template <class Format, class Stored, bool add>
void unpack(void* values_address, const unsigned char* packed, size_t begin, size_t end) noexcept {
  auto* to = static_cast<typename Stored::Word*>(values_address) + begin * block_numel;
  const unsigned char* from = packed + begin * (sizeof(float) + Format::code_bytes);
  for (size_t block = begin; block < end; ++block) {
    float scale;
    __builtin_memcpy(&scale, from, sizeof scale);
    for (size_t line = 0; line < Format::code_bytes; line += 64) __builtin_prefetch(from + ahead_bytes + line);
    if constexpr (V::has_tables && Format::id == Wire::fp8 && std::is_same_v<Stored, Bf16>) {
      if (unpack_by_tables<V>(to, from + sizeof scale, scale)) {
        to += block_numel;
        from += sizeof scale + Format::code_bytes;
        continue;
      }
    }
    const V factor = V::splat(scale * Format::unit);  // a power of two: no scale of a block is too large for it
    Format::decode(from + sizeof scale, [&](size_t v, V codes) {
      V value = codes * factor;
      if constexpr (add) {
        look_ahead(v * V::width, to);
        look_ahead(v * V::width + V::width / 2, to);
        value = Stored::get(to + v * V::width) + value;
      }
      Stored::put(to + v * V::width, value);
    });
    to += block_numel;
    from += sizeof scale + Format::code_bytes;
  }
}
