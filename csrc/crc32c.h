// CRC-32C (Castagnoli), as in iSCSI, ext4 and Btrfs: the same value on every processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock {

// The CRC of `nbytes` at `data`, by the fastest way that this processor has; 0 for none.
std::uint32_t crc32c(const void* data, std::size_t nbytes) noexcept;

// One way to compute it.
struct Crc32cWay {
  const char* name;
  std::uint32_t (*compute)(const void* data, std::size_t nbytes) noexcept;
};

// All that this processor has, from the slowest, by table, to the fastest.
const std::vector<Crc32cWay>& crc32c_ways();

// The CRC of A followed by B, of their CRCs and the length of B.
std::uint32_t crc32c_join(std::uint32_t a, std::uint32_t b, std::size_t b_nbytes) noexcept;

}  // namespace penstock
